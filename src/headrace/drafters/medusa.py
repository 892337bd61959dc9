"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the target's last state, each for a token further ahead.

It needs no cache and no text: all heads read the state after the final norm at the position before the last token. A
tree takes the paths of greatest probability, which is the product of the heads' shares.
docs/maintainers/drafter-layouts.md has the layouts. Called by `drafters.build`.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.backends.base import Array, Backend, Cache, Matrix, Rows
from headrace.checkpoint.mapped import MappedCheckpoint
from headrace.drafters.base import F32, Context, Drafter, Target
from headrace.drafters.context import DraftVocabulary
from headrace.drafters.features import RowProgram, RowsOnly
from headrace.drafters.files import directory_of, integers, load, verify_token_ids
from headrace.drafters.grow import best_first
from headrace.hub import read_config
from headrace.models.config import ModelConfig
from headrace.models.unread import log_unread
from headrace.models.weights import Linear
from headrace.protocol.errors import CheckpointError
from headrace.protocol.speculation import SpeculativeConfig
from headrace.protocol.step import Draft

if TYPE_CHECKING:
    from headrace.models.weights import Weights

MAX_HEADS = 64


class Head(RowsOnly):
    """y += silu(W y + b) for each block; then the head's matrix."""

    def __init__(self, backend: Backend, blocks: Sequence[Matrix], head: Matrix) -> None:
        super().__init__(backend, head.num_in, head.num_in, head.num_out)
        self._blocks, self.head = blocks, head

    def forward(self, rows: Rows, kv: Sequence[Cache], streams: list[Array] | None = None) -> Array:
        y = rows.features
        for block in self._blocks:
            y = y + self.ops.activation(self.ops.linear(y, block), "silu")
        return y


class MedusaDrafter(Drafter):
    """`Drafter` with `heads`, the first for the token after the last known one. `token_ids` as in `PrivateContext`."""

    feature_layers = ()

    def __init__(
        self,
        heads: Sequence[RowProgram],
        spec: SpeculativeConfig,
        target: Target,
        token_ids: Any = None,
    ) -> None:
        self._heads, self._guide, self._width = heads, target.guide, spec.tree_width
        self._vocabulary = DraftVocabulary(token_ids, target.vocab_size)
        self._most = 2 * target.max_num_seqs
        # For each sequence the position of the last state that was observed, and the state.
        self._states: OrderedDict[int, tuple[int, F32]] = OrderedDict()

    def observe(self, seq_id: int, start: int, token_ids: list[int], features: F32) -> None:
        self._states[seq_id] = start + len(token_ids) - 1, features[-1].copy()
        self._states.move_to_end(seq_id)
        while len(self._states) > self._most:
            self._states.popitem(last=False)

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        drafts = [Draft([]) for _ in contexts]
        ready = []
        for i, context in enumerate(contexts):
            position, _ = self._states.get(context.seq_id, (-1, None))
            if position == len(context.tokens) - 2 and context.num_drafts > 0:
                ready.append(i)
        if not ready:
            return drafts
        states = np.stack([self._states[contexts[i].seq_id][1] for i in ready])
        trees = not self._guide.rejects and any(contexts[i].num_nodes > contexts[i].num_drafts for i in ready)
        chains: list[list[int]] = [[] for _ in ready]
        ranked: list[list[tuple[list[int], list[float]]]] = [[] for _ in ready]
        alive = list(range(len(ready)))
        for depth, head in enumerate(self._heads):
            alive = [row for row in alive if contexts[ready[row]].num_drafts > depth]
            if not alive:
                break
            logits, finite = head.logits(states[alive])
            if not all(finite):
                logits, alive = logits[finite], [row for row, sound in zip(alive, finite, strict=True) if sound]
                if not alive:
                    break
            logits = self._vocabulary.widened(logits)
            sequences, tails = [contexts[ready[row]] for row in alive], [chains[row] for row in alive]
            if trees:
                ids, shares = self._guide.rank(logits, sequences, tails, self._width)
                token_ids = ids[:, 0].tolist()
                for row, row_ids, logs in zip(alive, ids.tolist(), best_first(shares).tolist(), strict=True):
                    ranked[row].append((row_ids, logs))
            else:
                token_ids = self._guide.choose(logits, sequences, tails)
            for row, token_id in zip(alive, token_ids, strict=True):
                chains[row].append(token_id)
        for row, i in enumerate(ready):
            drafts[i] = best_paths(ranked[row], contexts[i].num_nodes) if trees else Draft(chains[row])
        return drafts

    def drop(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)

    def close(self) -> None:
        self._states.clear()
        for head in self._heads:
            head.close()


def best_paths(ranked: Sequence[tuple[list[int], list[float]]], most: int) -> Draft:
    """Return the tree of the `most` nodes whose paths are likeliest; `ranked[d]` are tokens and log shares at depth
    d."""
    token_ids: list[int] = []
    parents: list[int] = []
    # Ordered by value, then by age, which keeps ties the same everywhere.
    heap: list[tuple[float, int, int, int, int]] = []  # -value, age, depth, rank, parent
    age = 0

    def push(value: float, depth: int, rank: int, parent: int) -> None:
        nonlocal age
        if depth < len(ranked) and rank < len(ranked[depth][0]):
            share = ranked[depth][1][rank]
            if share > -math.inf:
                heapq.heappush(heap, (-(value + min(share, 0.0)), age, depth, rank, parent))
                age += 1

    push(0.0, 0, 0, -1)
    while heap and len(token_ids) < most:
        negative, _, depth, rank, parent = heapq.heappop(heap)
        value = -negative
        token_ids.append(ranked[depth][0][rank])
        parents.append(parent)
        push(value - min(ranked[depth][1][rank], 0.0), depth, rank + 1, parent)
        push(value, depth + 1, 0, len(token_ids) - 1)
    return Draft(token_ids, parents)


class Names(NamedTuple):
    """How a checkpoint names its parts: head k, block j."""

    block: str
    head: str


VLLM = Names("blocks.{k}.layers.{j}", "lm_heads.{k}")
PREFIXES = ("", "medusa_heads.")


def make(spec: SpeculativeConfig, target: Target) -> MedusaDrafter:
    """Make the drafter. Raises `CheckpointError` for a checkpoint without heads, or with another model's heads."""
    directory = directory_of(spec, target, "medusa")
    if not any(directory.glob("*.safetensors")) and any(directory.glob("medusa_lm_head.pt")):
        raise CheckpointError(
            f"{directory} has its heads in medusa_lm_head.pt, a pickle. Reading a pickle can run any code, so headrace "
            "does not; write its tensors with safetensors.torch.save_file, under the same names"
        )
    values = read_config(directory)
    config = ModelConfig(values)
    for name, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.integer(name, size) != size:
            raise CheckpointError(f"{directory}: {name} is {values[name]}, the model's is {size}")
    names, num_heads, num_blocks = _find(directory)
    for key, num in (("num_heads", num_heads), ("medusa_num_heads", num_heads)):
        if config.integer(key, num) != num:
            raise CheckpointError(f"{directory}: config.json says {key} {values[key]}, the file has {num}")
    width = config.integer("truncated_vocab_size", target.vocab_size, high=target.vocab_size)
    token_ids = integers(directory, "token_map", width)
    if token_ids is None and width != target.vocab_size:
        raise CheckpointError(f"{directory}: truncated_vocab_size is {width}, and there is no token_map")
    if token_ids is not None:
        verify_token_ids(directory, "token_map", token_ids, target)
    size = target.hidden_size
    num_wanted = min(num_heads, spec.num_drafts)

    def build(weights: Weights) -> list[Head]:
        heads: list[Head] = []
        for k in range(num_wanted):
            blocks = []
            for j in range(num_blocks):
                name = names.block.format(k=k, j=j)
                blocks.append(weights.matrix(Linear([name], size, [size], bias=weights.has(f"{name}.bias"))))
            name = names.head.format(k=k)
            if weights.has(f"{name}.weight"):
                head = weights.matrix(Linear([name], size, [width]))
            elif heads and config.flag("original_lm_head", False):
                head = heads[0].head
            elif width == target.vocab_size:
                head = target.model.head
            else:
                raise CheckpointError(f"{name}.weight is missing from the checkpoint")
            heads.append(Head(target.backend, blocks, head))
        return heads

    # Heads beyond num_speculative_tokens are not read.
    further = "|".join(re.escape(names.block.format(k=k, j=0)).rpartition("0")[0] + ".*" + "|"
                       + re.escape(names.head.format(k=k)) + r"\..*" for k in range(num_wanted, num_heads))  # fmt: skip
    spare = "token_map" + (f"|{further}" if further else "")
    heads = load(directory, spec, target, values, build, spare)
    log_unread(config.values, ())
    programs = [RowProgram(head, target.backend, target.num_threads) for head in heads]
    return MedusaDrafter(programs, spec, target, token_ids)


def _find(directory: Path) -> tuple[Names, int, int]:
    """Return the names of a checkpoint, its heads, and the blocks of each. Raises `CheckpointError`."""
    tensors = set(MappedCheckpoint(directory).names)
    for prefix in PREFIXES:
        named = Names(prefix + VLLM.block, prefix + VLLM.head)
        blocks = 0
        while f"{named.block.format(k=0, j=blocks)}.weight" in tensors:
            blocks += 1
        if not blocks:
            # FasterDecoding: each head is a list of blocks, with the matrix at its end.
            while f"{prefix}0.{blocks}.linear.weight" in tensors:
                blocks += 1
            named = Names(prefix + "{k}.{j}.linear", prefix + "{k}." + str(blocks))
        if blocks:
            num_heads = next(k for k in range(MAX_HEADS + 1) if f"{named.block.format(k=k, j=0)}.weight" not in tensors)
            return named, num_heads, blocks
    raise CheckpointError(f"{directory} has no Medusa heads; looked for {VLLM.block} and {{k}}.{{j}}.linear")
