"""`Model`: a causal model of transformers as the engine's model, one row at a time.

Each row is a forward pass of its own: one token, its sequence's memory, one thread for each operator. Rows never meet
in an operator, so the bits of a row depend on its sequence alone, whatever operators the model uses. It is the slow
path, for models that headrace has no file for. Knows torch_ref's batch and caches; must not know requests. Made by
`loading`, called by `backends.torch_ref.program`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace import models
from headrace.backends.step import Chunks, num_block_kinds
from headrace.backends.torch_ref.batch import ForwardBatch, make_forward_batch
from headrace.backends.torch_ref.cache import make_caches
from headrace.backends.torch_ref.ops import RefOps
from headrace.models.config import ModelConfig
from headrace.protocol.errors import CheckpointError
from headrace.protocol.kinds import CacheKind
from headrace.transformers_models.memory import Plan, UnknownMemoryError, part_at, replaced
from headrace.transformers_models.pieces import Team

MEMORIES = ("past_key_values", "cache_params", "state")
"""Names of a model's memory, in its output as among its arguments."""
NUM_TRIED = 6
"""Tokens of the trial of a model."""
STEP_S = 2.0
"""Seconds that a step may take: other texts wait for it, and a watchdog too."""
MAX_ROWS = 512
CUT = 4
"""Positions in a block of the trial, and the rows of its first chunk."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}
"""The most by which logits of the trial may differ between a pass over all tokens and a pass for each, as a part of the
spread of a row's logits. Half of the rows must be as close: of 16-bit types roundings may choose other experts."""


class Model(models.Model):
    """`theirs`: a causal model of transformers with its weights. Raises `CheckpointError` for one that computes
    something else token by token than at once, or that keeps anything outside of its memory.

    rows_of_a_step: the most that a step should have, by the time that the trial took."""

    def __init__(self, theirs: Any, ops: RefOps, context: int, team: Team) -> None:
        self.ops: Any = ops
        self._theirs, self._context, self._team = theirs, context, team
        self._name = type(theirs).__name__
        head = theirs.get_output_embeddings()
        if head is None:
            raise CheckpointError(f"{self._name} has no output layer of its own")
        self.head, self.embedding, self._multiply = head, None, head.forward
        head.forward = self._head_forward
        self.vocab_size, self.layers = int(head.weight.shape[0]), [self._compute]
        self._is_read, self._seen = True, torch.empty(0)
        self._logits: dict[int, Tensor] = {}
        try:
            with torch.inference_mode(), team.working():
                expected = self._learn()
                self._verify(expected)
        except UnknownMemoryError as error:
            raise CheckpointError(f"{self._name} cannot run token by token: {error}") from error
        except Exception as error:
            name = type(error).__name__
            raise CheckpointError(f"{self._name} fails on a trial of {NUM_TRIED} tokens: {name}: {error}") from error

    def max_positions(self, config: ModelConfig) -> int:  # type: ignore[override]
        """The context by transformers' own config."""
        return self._context

    def enter(self, rows: Any) -> Tensor:
        return torch.zeros(len(rows.token_ids), self.hidden_size)

    def forward(self, rows: Any, kv: Sequence[Any], streams: list[Tensor] | None = None) -> Tensor:
        """Rows -> the inputs of the output layer [R, H]. The logits of rows that are read are kept until the next
        call."""
        return self._compute(None, rows, kv)

    def final(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return hidden.index_select(0, rows)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return torch.stack([self._logits[row] for row in rows.tolist()])

    def _compute(self, x: Any, rows: Any, kv: Sequence[Any]) -> Tensor:
        hidden: list[Tensor] = []
        self._logits = {}
        copies: dict[int, list[int]] = {}
        for row, slot in zip(*(rows.copies.tolist() if rows.copies is not None else ((), ())), strict=True):
            copies.setdefault(row, []).append(slot)
        token_ids, slots = rows.token_ids.tolist(), rows.slot_mapping[0].tolist()
        with self._team.working():
            for chunk, length in enumerate(rows.lens):
                memory = self._resumed(chunk, rows, kv)
                for row in range(len(hidden), len(hidden) + length):
                    self._is_read = rows.read is None or row in rows.read
                    logits, memory = self._step([token_ids[row]], memory)
                    if self._is_read:
                        self._logits[row] = logits[0]
                    hidden.append(self._seen.reshape(-1, self._seen.shape[-1])[-1])
                    memory = self._stored(memory, [slots[row], *copies.get(row, ())], rows.states_out.get(row), kv)
        return torch.stack(hidden)

    def _step(self, token_ids: list[int], memory: Any, keeps: bool = True) -> tuple[Tensor, Any]:
        """Compute tokens -> their logits [T, V], and the memory with them."""
        arguments = {} if memory is None else {self._key: memory}
        tokens = torch.tensor([token_ids], device=self.ops.device)
        out = self._theirs(input_ids=tokens, use_cache=keeps, return_dict=True, **arguments)
        return out.logits[0], getattr(out, self._key, None) if keeps else None

    def _head_forward(self, x: Tensor) -> Tensor:
        self._seen = x
        return self._multiply(x) if self._is_read else x.new_zeros(*x.shape[:-1], self.vocab_size)

    def _resumed(self, chunk: int, rows: ForwardBatch, kv: Sequence[Any]) -> Any:
        """Return the memory before a chunk's first row; None where a sequence begins."""
        start, table, plan = rows.starts[chunk], rows.block_tables[0][chunk], self._plan
        if not start:
            return None
        tensors = {
            path: leaf.read(cache, table, start)
            for (path, leaf), cache in zip(plan.by_position.items(), kv[: len(plan.by_position)], strict=True)
        }
        for (path, state), cache in zip(plan.states.items(), kv[len(plan.by_position) :], strict=True):
            tensors[path] = cache.arrays[0][rows.states_in[chunk]].to(state.dtype, copy=True)
        return plan.rebuilt(start, tensors)

    def _stored(self, memory: Any, slots: list[int], state_slot: int | None, kv: Sequence[Any]) -> Any:
        """Write the newest position to slots, and the state to its slot if there is one. Return the memory, as it would
        be read again."""
        plan = self._plan
        for (path, leaf), cache in zip(plan.by_position.items(), kv[: len(plan.by_position)], strict=True):
            leaf.write(part_at(memory, path), cache, slots)
        if not plan.states:
            return memory
        if state_slot is not None:
            for path, cache in zip(plan.states, kv[len(plan.by_position) :], strict=True):
                cache.arrays[0][state_slot] = part_at(memory, path)
        # A state that is read again is contiguous, whatever view an operator returned.
        return replaced(memory, lambda path, leaf: leaf.contiguous() if path in plan.states else leaf)

    def _learn(self) -> Tensor:
        """Find the model's memory -> the logits of the trial's tokens, computed at once [T, V]."""
        self._key = ""
        ids = trial_tokens(self.vocab_size, 0)
        tokens = torch.tensor([ids[:1]], device=self.ops.device)
        out = self._theirs(input_ids=tokens, use_cache=True, return_dict=True)
        self._key = next((name for name in MEMORIES if getattr(out, name, None) is not None), "")
        if not self._key:
            raise UnknownMemoryError("it keeps no memory, and would compute each text from its begin")
        self.hidden_size = self._seen.shape[-1]
        memory = getattr(out, self._key)
        for token_id in ids[1:-1]:
            earlier = replaced(memory, lambda path, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
            _, memory = self._step([token_id], memory)
        later = replaced(memory, lambda path, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
        self._plan = plan = Plan(earlier, later, NUM_TRIED - 1)
        self.kinds = (CacheKind(), CacheKind(is_state=True)) if plan.states else (CacheKind(),)
        self.cache_shapes = [leaf.cached for leaf in plan.by_position.values()]
        self.cache_shapes += [leaf.cached for leaf in plan.states.values()]
        return self._step(ids, None, keeps=False)[0]

    def _verify(self, expected: Tensor) -> None:
        """Compute the trial's tokens row by row, alone and beside others."""
        ids, others = trial_tokens(self.vocab_size, 0), trial_tokens(self.vocab_size, 1)
        kinds, sizes = num_block_kinds(self.kinds), (4, 4)[: len(self.kinds)]
        kv = make_caches(self.cache_shapes, sizes, CUT, "float32", self.ops.device)

        def rows(*chunks: tuple[int, list[int], int]) -> Tensor:
            """(first position, tokens, number of the sequence) of each chunk -> all logits."""
            out = []
            starts, token_ids = [start for start, *_ in chunks], [ids for _, ids, _ in chunks]
            ends = [sum(map(len, token_ids[: i + 1])) - 1 for i in range(len(chunks))]
            batch = Chunks(
                starts, token_ids, [[2 * seq, 2 * seq + 1] for *_, seq in chunks],
                states_in=[seq if start else -1 for start, _, seq in chunks],
                states_out=[(end, seq) for end, (*_, seq) in zip(ends, chunks, strict=True)],
            )  # fmt: skip
            hidden = self._compute(None, make_forward_batch(batch, CUT, self.ops.device, kinds), kv)
            out.append(self.logits(hidden, torch.arange(len(hidden))))
            return torch.cat(out)

        begin = time.perf_counter()
        alone = torch.cat([rows((i, [token_id], 0)) for i, token_id in enumerate(ids)])
        self.rows_of_a_step = max(1, min(MAX_ROWS, int(STEP_S * len(ids) / (time.perf_counter() - begin))))
        spread = (expected.amax(-1) - expected.amin(-1)).clamp(min=1e-6)
        apart = ((alone - expected).abs().amax(-1) / spread).median().item()
        if not apart <= TOLERANCE[self.ops.dtype]:
            raise UnknownMemoryError(
                f"its logits for a row alone differ by {apart:.2g} of their spread from those for a whole text"
            )
        first = rows((0, others, 1), (0, ids[:CUT], 0))[len(others) :]
        rest = rows((CUT, ids[CUT:], 0))
        if not torch.equal(torch.cat([first, rest]), alone):
            raise UnknownMemoryError("it keeps numbers outside of its memory, which another text changes")


def trial_tokens(vocab_size: int, seed: int) -> list[int]:
    """Tokens of the trial. The first ids are left out, which may have a meaning of their own."""
    first = min(10, vocab_size // 2)
    return [first + (seed * 31 + i * 17) % (vocab_size - first) for i in range(NUM_TRIED)]
