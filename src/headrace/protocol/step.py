"""The structs that flow through a step, in the order in which they appear:

    Request -> Sequence -> ScheduledBatch -> ForwardBatch -> logits -> StepResult -> StepOutput
    frozen     mutable     frozen ints       tensors         tensor    ints         frozen ints
    server     core only   crosses processes runner only     backend   crosses      crosses

Here are those that cross a layer: `Request`, `ScheduledBatch`, `StepResult`, `StepOutput`. `Sequence` lives in
`core.sequence`, `Chunks` in `backends.base`. All are msgspec structs of ints, floats, strings and lists:
the msgpack bytes of one are its wire form. No torch, no policy, no methods beyond reading.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]

Pooling = Literal["", "last", "mean"]
"""What becomes of a prompt's final hidden states: nothing, the last row, or the sum over all rows."""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer to make. `n` answers to one prompt are n requests of one `group`, made by the front end.

    `params.seed` and `params.max_tokens` are filled in by the front end, so that the engine can be told the same
    request again and give the same bits. `resume_token_ids` are tokens generated before (in an engine that died):
    they are known, not sampled again, and count towards max_tokens and min_tokens. `resume_state` is what
    `StepOutput.states` told last of that answer, for samplers whose state is no function of the tokens. With `pooling`
    nothing is sampled: the request ends when its prompt is computed, and `StepOutput.pooled` tells its hidden state.
    With `beam` the request is a search: `params` says where answers end, and all come in one `BeamResult` at the end.
    `tenant` is on whose behalf, and `work` the tokens that it will probably cost; they matter to a fair order alone.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    group: str = ""
    resume_token_ids: list[int] = []
    resume_state: float | None = None
    pooling: Pooling = ""
    beam: BeamSearchParams | None = None
    tenant: str = ""
    work: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token under the raw logits (before temperature, bias and filters), natural log.

    `rank` is 1 for the likeliest. `top` holds (token id, logprob) pairs of the likeliest, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class DraftTokens(msgspec.Struct, array_like=True, gc=False):
    """Guesses of how a sequence goes on after its last known token: a chain, or a tree if there are `parents`.

    `parents[i]` is the node that node i follows, -1 for the last known token; parents come before their children. Of a
    tree the core writes down `paths`, each the nodes from a first guess to a leaf, and where they go: path 0 to the
    sequence's own blocks, path p to `tails[p - 1]` in place of those from the first one on that a guess falls into.
    """

    token_ids: list[int]
    parents: list[int] = []
    paths: list[list[int]] = []
    tails: list[list[int]] = []

    @property
    def depth(self) -> int:
        """Tokens that can be kept at most."""
        return max(map(len, self.paths)) if self.paths else len(self.token_ids)


class ScheduledBatch(msgspec.Struct, kw_only=True, gc=False):
    """What to compute in one step. Columns: entry i of each list tells of chunk i, a piece of one sequence.

    Chunk i computes positions starts[i] ... starts[i] + lens[i] - 1, whose tokens are the next lens[i] entries of
    the flat `token_ids`. Position p lives in slot p % block_size of block block_tables[i][p // block_size]. If
    samples[i], the chunk ends at the last known token and the token after it is to be sampled. `copies` are
    (source block, target block) pairs, to be copied in that order before anything is written.

    Frozen by contract, not by class (a frozen struct costs more to make, and this is made every step). The block
    tables are the scheduler's own lists, lent until `commit`: whoever keeps one longer copies it.

    `next_token_ids[i]` is the prompt token after chunk i, for chunks that ask for prompt_logprobs and end before the
    prompt does: its last row foretells that token. `histories[i]` is all that chunk i's sequence knows, for chunks that
    sample and whose parameters need it: the scheduler's own list, lent as the tables are. `states[i]` is what the last
    `StepResult.states` told of that sequence, for chunks that sample. `pooling[i]` is there for chunks whose hidden
    states are wanted: how, and what `StepResult.pooled` told of the rows before. `asks`: guesses are wanted of how the
    sequences go on that sample, and `histories` has all that may be guessed for.
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
    drafts: dict[int, DraftTokens] = {}
    ended: list[int] = []
    asks: bool = False

    def __len__(self) -> int:
        return len(self.seq_ids)


class StepResult(msgspec.Struct, kw_only=True, gc=False):
    """What a step gave. `token_ids[i]` is chunk i's sampled token, or -1 where none was asked for or it failed.

    The dicts are by chunk index and hold only what was asked for. `prompt_logprobs[i]` has one entry for each row
    of chunk i whose next token belongs to the prompt. `forced[i]` are tokens that must follow token_ids[i], whatever
    the model says (a grammar leaves no choice): they are known without a forward pass. Never for a request that wants
    log-probabilities. `states[i]` is the sampler's state after token_ids[i], to be handed back with the next chunk.
    `pooled[i]` are hidden states after the final norm: those of the chunk's last row, or the sum in float64 over the
    sequence's rows so far, added one after the other. Chunks in `deferred` were to be sampled and could not be yet,
    because something that their sampler needs is late: their last token is computed again in the next step.
    `errors[i]` says why chunk i failed; its sequence alone is ended, and its blocks are never published.

    `further[i]` are tokens sampled after token_ids[i], one for each guess that was kept, `further_logprobs[i]` theirs,
    and `paths[i]` a path of the tree that has all of these. `drafts[i]` are guesses of what follows all that is known.
    Nobody need be asked for more in the next `rest` steps, unless fewer sequences run than in this one.
    """

    step_id: int
    token_ids: list[int]
    logprobs: dict[int, TokenLogprob] = {}
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}
    forced: dict[int, list[int]] = {}
    states: dict[int, float] = {}
    pooled: dict[int, list[float]] = {}
    deferred: set[int] = set()
    errors: dict[int, str] = {}
    further: dict[int, list[int]] = {}
    further_logprobs: dict[int, list[TokenLogprob]] = {}
    paths: dict[int, int] = {}
    drafts: dict[int, DraftTokens] = {}
    rest: int = 0


class Finish(msgspec.Struct, frozen=True):
    """How a request ended. `stop_reason` is the stop token's id or, set by the server, the stop string."""

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
    """What a beam search found, the best answer first, and the most KV blocks that its beams held at once: shared as
    they were (`num_blocks`), and as many as beams with blocks of their own would have held (`num_blocks_unshared`)."""

    beams: list[Beam]
    num_blocks: int
    num_blocks_unshared: int


class Add(msgspec.Struct, frozen=True, tag="add"):
    """An engine is told of a request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    pass


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of the engine, read from its state and not kept beside it. Counters only grow.

    `num_beam_blocks` are held by beam searches, `num_beam_blocks_unshared` is what they would hold if no beam shared.
    `num_drafts` were verified, of `num_draft_tokens` tokens, of which `num_accepted_tokens` were kept, entry i of
    `num_accepted_per_pos` counting those that were i tokens after a draft's first. `num_recordings_ended` is 1 if the
    recording of the schedule that was asked for has ended before the engine.
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

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that running sequences hold, 0 to 1. Cached blocks that nobody holds are free."""
        return self.num_blocks_held / self.num_blocks if self.num_blocks else 0.0


class StepOutput(msgspec.Struct, kw_only=True):
    """What a step means for the requests: columns over those that got tokens, dicts for the rarer things.

    `started` maps a request to the prompt tokens it found in the prefix cache, in the step that first ran it.
    A request appears in `finished` exactly once, and never again in any later output. `states` is for whoever may have
    to resume the request elsewhere (`Request.resume_state`). `beams` has the answers of a search, in the output that
    tells of its end. Times are monotonic seconds.
    """

    step_id: int
    start_time: float = 0.0
    end_time: float = 0.0
    request_ids: list[str] = []
    token_ids: list[list[int]] = []
    logprobs: dict[str, list[TokenLogprob]] = {}
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}
    states: dict[str, float] = {}
    pooled: dict[str, list[float]] = {}
    started: dict[str, int] = {}
    finished: dict[str, Finish] = {}
    beams: dict[str, BeamResult] = {}
    stats: Stats | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front end must know of a running engine to admit a request by the engine's own rules."""

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
    backend: str = ""
    device: str = ""
    version: str = ""
