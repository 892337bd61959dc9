"""The structs that flow through a step, in the order in which they appear:

    Request    -> Sequence  -> ScheduledBatch -> Chunks      -> logits  -> StepResult -> StepOutput
    frozen        mutable      frozen ints       tensors        tensor     ints          ints, floats
    server, core  core only    core, runner      runner only    backend    runner, core  core, server

Here are those that cross a layer: `Request`, `ScheduledBatch`, `StepResult`, `StepOutput`. `Sequence` lives in
`core.sequence`, `Chunks` in `backends.base`. All are msgspec structs of ints, floats, strings and lists:
the msgpack bytes of one are its wire form. No torch, no policy, no methods but those that look at a struct itself.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.protocol.adapters import LoadedAdapter
from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.kinds import CacheKind
from headrace.protocol.params import SamplingParams
from headrace.protocol.pictures import Picture

FinishReason = Literal["stop", "length", "abort", "error"]

UNDRAWN = -1
"""In a batch: the token that the step before draws for the sequence, which is not known yet."""

Pooling = str
"""What is made of the final hidden states of a prompt: "" for nothing, one of `POOLINGS`, or several of them side by
side, joined by "+"."""
Activation = Literal["sigmoid", "softmax", "identity"]
ALL_ROWS = "tokens"
"""The pooling that leaves the rows of all tokens as they are, one after the other."""
POOLINGS = ("last", "mean", "cls", "max", "weightedmean", "mean_sqrt_len_tokens")
SPARSE_POOLINGS = ("splade-max", "splade-sum")
"""Of models whose vectors have a weight for each token of the vocabulary, most of them 0 (SPLADE, Formal et al. 2021).
Their numbers are the vector's width, the places of the weights that are not 0, ascending, and then these weights."""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request for one answer. `n` answers to one prompt are n requests of one `group`, made by the front end.

    The front end fills in `params.seed` and `params.max_tokens`, so that the same request can be sent to another engine
    and gives the same bits. `resume_token_ids` are tokens generated before (in an engine that died): they are not
    sampled again, and count towards max_tokens and min_tokens. `resume_state` is the last state of that answer in
    `StepOutput.states`, for samplers whose state is no function of the tokens. With `pooling` nothing is sampled: the
    request ends when its prompt is computed, and `StepOutput.pooled` has its hidden state. With `beam` the request is a
    search: `params` sets where answers end, and all of them come in one `BeamResult` at the end. `adapter` is the
    digest of the adapter that all its tokens are computed with, "" for none. `pictures` stand in the places of some
    tokens of the prompt, in their order. `tenant` names the
    caller and `work` is a prediction of the tokens to compute; only the fair policy uses them.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    pictures: list[Picture] = []
    group: str = ""
    resume_token_ids: list[int] = []
    resume_state: float | None = None
    pooling: Pooling = ""
    beam: BeamSearchParams | None = None
    tenant: str = ""
    work: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of one token under the raw logits (before temperature, bias and filters), natural log.

    `rank` is 1 for the likeliest. `top` holds (token id, logprob) pairs of the likeliest, best first; a list where a
    row came in parts (`engine.parts`).
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Draft(msgspec.Struct, array_like=True, gc=False):
    """Draft tokens of one sequence: a chain, or a tree if there are `parents`. This class alone handles the shape.

    Node i holds `token_ids[i]` and follows node `parents[i]`; -1 is the last known token of the sequence. Parents come
    before their children, and two children of a node differ in their tokens. Without `parents` each node follows the
    one before it. A tree is computed as paths (`paths`): path 0 in the blocks of the sequence, path p in the blocks
    `tails[p - 1]` in place of those from the first block on that holds a draft token. The scheduler fills in `tails`.
    """

    token_ids: list[int]
    parents: list[int] = []
    tails: list[list[int]] = []

    @property
    def depth(self) -> int:
        """The most tokens that can be accepted."""
        return max(self.depths(), default=0)

    def depths(self) -> list[int]:
        """Depth of each node; 1 follows the last known token."""
        if not self.parents:
            return list(range(1, len(self.token_ids) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def children(self, node: int) -> list[int]:
        """The nodes that follow `node` (-1: the last known token), in their order."""
        if self.parents:
            return [child for child, parent in enumerate(self.parents) if parent == node]
        return [node + 1] if node + 1 < len(self.token_ids) else []

    def path(self, node: int) -> list[int]:
        """The nodes from a first one to `node`."""
        if not self.parents:
            return list(range(node + 1))
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def paths(self) -> list[list[int]]:
        """The paths to all leaves, at least one. Path 0 takes the first child of every node."""
        if not self.parents:
            return [list(range(len(self.token_ids)))]
        inner = set(self.parents)
        return sorted(self.path(leaf) for leaf in range(len(self.parents)) if leaf not in inner)

    def path_id(self, nodes: list[int]) -> int:
        """The first of `paths` that begins with `nodes`, 0 if none does."""
        return next((i for i, path in enumerate(self.paths()) if path[: len(nodes)] == nodes), 0)

    def subset(self, nodes: list[int]) -> Draft:
        """The draft of `nodes` alone, which are in order and hold the parents of all of them."""
        token_ids = [self.token_ids[node] for node in nodes]
        if not self.parents:
            return Draft(token_ids)
        places = {-1: -1} | {node: place for place, node in enumerate(nodes)}
        parents = [places[self.parents[node]] for node in nodes]
        return Draft(token_ids, [] if parents == list(range(-1, len(parents) - 1)) else parents)

    def cut(self, max_depth: int, max_nodes: int) -> Draft:
        """The draft without nodes deeper than `max_depth`, and of the rest the first `max_nodes`."""
        nodes = [node for node, depth in enumerate(self.depths()) if depth <= max_depth]
        return self.subset(nodes[: max(0, max_nodes)])

    def flaw(self) -> str:
        """Why `parents` make no tree, or ""."""
        num = len(self.token_ids)
        if not self.parents:
            return ""
        if len(self.parents) != num or any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            return f"parents {self.parents} make no tree of {num} nodes"
        if len(set(zip(self.parents, self.token_ids, strict=True))) < num:
            return "two children of a node are the same token"
        return ""


class ScheduledBatch(msgspec.Struct, kw_only=True, gc=False):
    """The work of one step. Columns: entry i of each list belongs to chunk i, a piece of one sequence.

    Chunk i computes positions starts[i] ... starts[i] + lens[i] - 1, whose tokens are the next lens[i] entries of
    the flat `token_ids`. Position p lives in slot p % block_size of block block_tables[i][p // block_size]. If
    samples[i], the chunk ends at the last known token and the token after it is to be sampled. A chunk of the token
    `UNDRAWN` follows the token that the step before, still in flight, draws for its sequence. `copies` are (source
    block, target block) pairs, to be copied in that order before anything is written.

    Frozen by contract, not by class (a frozen struct takes longer to make, and this is made every step). The block
    tables are the scheduler's own lists, lent until `commit`: a copy is needed to keep one longer.

    `next_token_ids[i]` is the prompt token after chunk i, for chunks with prompt_logprobs that end before the prompt
    does: the last row predicts that token. `histories[i]` has all known tokens of chunk i's sequence, for chunks that
    sample and whose parameters need them: the scheduler's own list, lent as the tables are. `states[i]` is the sampler
    state in the last `RowResult.state` of that sequence, for chunks that sample. `pooling[i]` is there for chunks
    whose hidden states are pooled: the kind, and the numbers in `RowResult.pooled` for the rows before. `drafts[i]`
    are draft tokens to verify after chunk i. `ended` are sequence ids that the drafter can forget. `asks`: the result
    should have drafts for the sequences that sample, and `histories` has the tokens of all that may get one.

    `block_tables` and `copies` belong to kind 0 (`protocol.kinds`), `more_tables[k - 1]` and `more_copies[k - 1]`, in
    the same forms, to block kind k. An entry of -1 stands for a block that was freed, since it lies wholly behind the
    window of its kind; no row of the step sees it. With a state kind, `state_reads[i]` is the slot of the state before
    chunk i's first row, -1 if its sequence begins there; `state_writes` are (row of the step, slot) pairs, rows
    ascending: the state after that row goes to the slot. Rows count chunks one after the other, each with its draft
    tokens behind it. `pictures[i]` are those of chunk i's sequence.
    """

    step_id: int
    seq_ids: list[int]
    starts: list[int]
    lens: list[int]
    token_ids: list[int]
    block_tables: list[list[int]]
    samples: list[bool]
    params: list[SamplingParams]
    num_prompts: list[int]
    copies: list[tuple[int, int]]
    next_token_ids: dict[int, int] = {}
    histories: dict[int, list[int]] = {}
    states: dict[int, float] = {}
    pooling: dict[int, tuple[Pooling, list[float]]] = {}
    drafts: dict[int, Draft] = {}
    ended: list[int] = []
    asks: bool = False
    more_tables: list[list[list[int]]] = []
    more_copies: list[list[tuple[int, int]]] = []
    state_reads: list[int] = []
    state_writes: list[tuple[int, int]] = []
    adapters: dict[int, str] = {}
    pictures: dict[int, list[Picture]] = {}

    def __len__(self) -> int:
        return len(self.seq_ids)


class RowResult(msgspec.Struct, kw_only=True, gc=False, omit_defaults=True):
    """The rest of a chunk's result, beside its token.

    `prompt_logprobs` has one entry for each row of the chunk whose next token belongs to the prompt. `further` are
    tokens sampled after the first, one for each accepted draft token, `further_logprobs` theirs, and `path` the path of
    the draft that holds them (`Draft.paths`). `forced` are tokens that a grammar forces after all of these: they need
    no forward pass. Never for a request with log-probabilities. `state` is the sampler's state after the last sampled
    token, an input of the next chunk. `pooled` are numbers made of the hidden states after the final norm of the
    sequence's rows so far, in float64 (`backends.pooling`). `draft` has draft tokens after all known
    ones.

    A chunk that `is_deferred` could not be sampled yet, because its sampler waits for something, or it followed a token
    that was not drawn: its last token is computed again in the next step. `error` is the reason why the chunk failed;
    its sequence alone is ended, and its blocks are never published.
    """

    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] = []
    further: list[int] = []
    further_logprobs: list[TokenLogprob] = []
    path: int = 0
    forced: list[int] = []
    state: float | None = None
    pooled: list[float] = []
    draft: Draft | None = None
    is_deferred: bool = False
    error: str = ""


PLAIN = RowResult()
"""The record of a chunk that has none. Not to be changed."""


class StepResult(msgspec.Struct, kw_only=True, gc=False):
    """The result of a step. `token_ids[i]` is chunk i's sampled token, or -1 if it samples none or has failed.

    `rows[i]` is there if chunk i has more than its token. The next `rest` steps need no `asks`, unless fewer sequences
    run than in this one.
    """

    step_id: int
    token_ids: list[int]
    rows: dict[int, RowResult] = {}
    rest: int = 0

    def row(self, i: int) -> RowResult:
        """Return the record of chunk i, made if there is none."""
        row = self.rows.get(i)
        if row is None:
            row = self.rows[i] = RowResult()
        return row

    def read(self, i: int) -> RowResult:
        """Return the record of chunk i to look at, `PLAIN` if there is none."""
        return self.rows.get(i, PLAIN)

    def column(self, name: str) -> dict[int, Any]:
        """Return one field of all records in which it is set, by chunk."""
        default = getattr(PLAIN, name)
        return {i: value for i, row in self.rows.items() if (value := getattr(row, name)) != default}


class Finish(msgspec.Struct, frozen=True):
    """The end of a request. `stop_reason` is the stop token's id or, set by the server, the stop string."""

    reason: FinishReason
    stop_reason: int | str | None = None
    message: str = ""


class Beam(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a beam search. `score` ranks it: the sum of its log-probabilities (natural, under the raw logits,
    less the penalties of a diverse search) / length ** length_penalty. `cumulative_logprob` is the plain sum."""

    token_ids: list[int]
    score: float
    cumulative_logprob: float
    finish: Finish


class BeamResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of a beam search, the best first, and the most KV blocks that its beams held at once (`num_blocks`),
    and would have held without sharing (`num_blocks_unshared`)."""

    beams: list[Beam]
    num_blocks: int
    num_blocks_unshared: int


class Add(msgspec.Struct, frozen=True, tag="add"):
    """A message to the engine: a new request, and when its call came, its prompt was tokenised, and it was sent
    (`core.journal.Arrival.times`)."""

    request: Request
    times: list[float] = []


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """A message to the engine: end a request early."""

    request_id: str


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """A message to the engine: forget all cached prefixes."""


class Stats(msgspec.Struct, kw_only=True):
    """Gauges and counters of the engine. Counters only grow. Not frozen, since the scheduler counts in one of them.

    `num_prompt_tokens` counts the computed prompt tokens, chunk by chunk, without the cached ones. `num_beam_blocks`
    are held by beam searches, which would hold `num_beam_blocks_unshared` if no beam shared. `num_drafts` drafts of
    `num_draft_tokens` tokens were verified, and `num_accepted_tokens` of these were accepted; entry i of
    `num_accepted_per_pos` counts those that were i tokens after a draft's first. `num_recordings_ended` is 1 if a
    recording of the schedule has ended before the engine. `num_blocks`, `num_blocks_held` and `num_blocks_cached` are
    of kind 0 of the cache; `more_blocks` has these three of every further kind.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_held: int = 0
    num_blocks_cached: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_recomputed_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_batched_tokens: int = 0
    num_beam_blocks: int = 0
    num_beam_blocks_unshared: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_pos: list[int] = []
    num_recordings_ended: int = 0
    more_blocks: list[tuple[int, int, int]] = []

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that running sequences hold, 0 to 1, of the fullest kind. Evictable cached blocks count
        as free."""
        kinds = [(self.num_blocks, self.num_blocks_held), *(each[:2] for each in self.more_blocks)]
        return max(num_held / num if num else 0.0 for num, num_held in kinds)


class CacheKeys(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a replica's prefix cache, for a router: keys of equal length, joined (`core.reports`). If it
    `is_full` they are the keys of all blocks, else the keys that came and went since the report before, which had the
    same `epoch` and `number` - 1.
    """

    epoch: int
    number: int
    is_full: bool
    added: bytes
    evicted: bytes = b""


class StepOutput(msgspec.Struct, kw_only=True):
    """The output of a step for its requests: columns over those that got tokens, dicts for the rarer things.

    `started` maps a request to the number of its prompt tokens in the prefix cache, in the step that first ran it. A
    request appears in `finished` exactly once, and never again in any later output. `states` are the samplers' states
    with which a request can be resumed elsewhere (`Request.resume_state`). `beams` has the answers of a search, in the
    output that has its end. `cache_keys` are for a router. `note` is for viewers (`core.journal.Note`). Times are
    monotonic seconds. An output may come in parts (`engine.parts`): `alternatives` are then the next of
    `TokenLogprob.top` of a row, by its index, in the next part that has log-probabilities of that request.
    """

    step_id: int
    start_time: float = 0.0
    end_time: float = 0.0
    request_ids: list[str] = []
    token_ids: list[list[int]] = []
    logprobs: dict[str, list[TokenLogprob]] = {}
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}
    states: dict[str, float] = {}
    alternatives: dict[str, tuple[int, tuple[tuple[int, float], ...]]] = {}
    pooled: dict[str, list[float]] = {}
    started: dict[str, int] = {}
    finished: dict[str, Finish] = {}
    beams: dict[str, BeamResult] = {}
    stats: Stats | None = None
    cache_keys: CacheKeys | None = None
    note: bytes = b""

    @property
    def has_rows(self) -> bool:
        """Whether it has rows of many numbers, so that it may have to come in parts."""
        return bool(self.prompt_logprobs or self.logprobs or self.pooled)


class Classes(msgspec.Struct, frozen=True):
    """The classes of a classifier or reranker. activation: of their numbers, as the model's files have it.
    second_type: the ids of a pair's second text are raised by it, if the tokenizer gives it a type of its own.
    pair_template: the name of the text that a pair is put into (`text.pairs`); "": the tokenizer joins them."""

    labels: tuple[str, ...]
    activation: Activation = "sigmoid"
    second_type: int = 0
    pair_template: Literal["", "qwen3"] = ""


class VectorForm(msgspec.Struct, frozen=True):
    """The vectors of a model by its files, where a request says nothing. prompts: texts by name that are put before a
    text; `prompt_name`: of the usual one, "" for none. normalize: whether vectors have length one. cosine: texts are
    compared by their angle, else by the dot product. dimensions: the first numbers, that are kept. one_kind: whether
    requests may name no other pooling than the files."""

    prompts: dict[str, str] = {}
    prompt_name: str = ""
    normalize: bool = True
    cosine: bool = True
    dimensions: int | None = None
    one_kind: bool = False


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a running engine by which the front end checks a request as the engine does.

    `max_model_len` is the greatest number of tokens of prompt and answer together: the model's context length, or less
    if the KV cache is smaller. A step reads `weight_bytes`, and `kv_token_bytes` for each token before its rows; 0 if
    unknown. `num_blocks` are of kind 0 of the cache's `kinds`, `more_blocks` of the others. `adapters`: those of the
    config, by name. `generates`: False for a model of vectors or classes alone. `whole_texts`: of an encoder, whose
    texts are one chunk each, not cached. `pooling`: the kind of vectors that the model's files name, "" for none.
    `classes`: of a classifier, whose pooled numbers are these classes'. `hidden_size`: the count of numbers in a
    vector, which `vectors` tells more of. `pictures`: the type of the tower that reads them, "" without one.
    """

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int = 20
    hidden_size: int = 0
    scheduling_policy: str = "fcfs"
    dtype: str = ""
    kv_cache_dtype: str = ""
    quantization: str = ""
    activations: str = ""
    backend: str = ""
    device: str = ""
    version: str = ""
    weight_bytes: int = 0
    kv_token_bytes: int = 0
    kinds: tuple[CacheKind, ...] = (CacheKind(),)
    more_blocks: tuple[int, ...] = ()
    adapters: dict[str, LoadedAdapter] = {}
    generates: bool = True
    whole_texts: bool = False
    pooling: Pooling = ""
    classes: Classes | None = None
    vectors: VectorForm = VectorForm()
    pictures: str = ""

    @property
    def max_prompt_len(self) -> int:
        """The most tokens of a prompt: a decoder's leaves room for an answer."""
        return self.max_model_len - self.generates
