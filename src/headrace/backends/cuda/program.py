"""A model on the tape of the cuda backend: bound once for each bucket of rows, then every step is a replay.

Owns the step's inputs (small int arrays, copied to the device at once), the logits, the cache, the tape, and a CUDA
graph for each bucket where there is a GPU. Knows chunks and block tables; must not know requests. Called by
`runner.runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.backends import places
from headrace.backends.base import DrawnRows
from headrace.backends.cuda import tuned
from headrace.backends.cuda.cache import KVCache
from headrace.backends.cuda.drawing import Drawing
from headrace.backends.cuda.kernels import attention, spans
from headrace.backends.cuda.launch import Config, Work
from headrace.backends.cuda.ops import CudaOps
from headrace.backends.cuda.ranks import CudaRankOps
from headrace.backends.cuda.replay import Bind, Replay
from headrace.backends.cuda.staging import Mark, Staging, to_host
from headrace.backends.cuda.tape import StepTensors, Tape
from headrace.backends.graph import LOGITS, ROWS, SEQS, Buffer, Graph, Value
from headrace.backends.reads import ReadRows
from headrace.backends.step import Chunks, Draw, StepRows, StepSizes, make_step_rows
from headrace.protocol.kinds import CacheKind

MAX_ROWS = 8192
"""Rows of one step; a longer one is computed in portions."""

F32 = NDArray[np.float32]
AttentionConfigs: TypeAlias = tuple[Config, Config]


def bucket_sizes(most: int) -> list[int]:
    """Return the numbers of rows that launches are bound for: 1, 2, 4, 8, then in steps of about an eighth, and `most`.

    A step runs in the smallest that holds it: padding rows cost a little time and change no bit.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(8, 2 ** (sizes[-1].bit_length() - 4)))
    return [size for size in sizes if size < most] + [most]


@dataclass(frozen=True, slots=True)
class DeviceLogits:
    """`backends.base.Logits` whose rows [S, V] float32 lie on the device until they are fetched."""

    rows: Tensor
    finite: list[bool]
    best: list[int]
    drawing: Drawing
    on_host: bool = False

    def draw(self, indices: list[int], draws: list[Draw]) -> list[int]:
        return self.drawing.draw(indices, draws, len(self.rows))

    def fetch(self, indices: list[int] | None = None) -> F32:
        rows = self.rows if indices is None else self.rows[indices]
        numbers: F32 = rows.cpu().numpy()
        return numbers


@dataclass(frozen=True, slots=True)
class StartedCall:
    """A call that `start` began: the first rows of its chunks, the number of its rows of logits, what `Drawing.report`
    says of them, and the logits for the host, in host memory once the work before `end` is done."""

    begins: list[int]
    num_logits: int
    outcome: Tensor
    logits: Tensor | None
    end: Mark


class CudaProgram:
    """`DrawingProgram` of the cuda backend. All but the weights is on the cache's device: "meta" to plan memory. All
    rows are computed to the end, and those that are read are given.

    Args:
        max_len: positions of a sequence at most.
        layers: those whose residual streams `features` gives.
    """

    def __init__(
        self,
        model: Any,
        ops: CudaOps | CudaRankOps,
        cache: KVCache,
        sizes: StepSizes,
        max_len: int,
        layers: Sequence[int] = (),
    ) -> None:
        self.model, self.cache = model, cache
        self.vocab_size: int = model.vocab_size
        self.kinds: tuple[CacheKind, ...] = model.kinds
        self.block_size, self.pool_sizes = cache.block_size, cache.pool_sizes
        self.num_blocks = self.pool_sizes[0]
        self.max_rows, self.max_logits = max_rows, max_chunks = sizes[:2]
        self._device = device = cache.device
        self._partials = spans.num_partials(max_rows, max_len)
        ops.begin()
        graph = ops.graph
        features = graph.outside(model.feature_size, ROWS) if model.feature_size else None
        image = self._stage(sizes, max_len, features)
        self._features = torch.zeros(max_rows, features.ld if features else 0, dtype=ops.dtype, device=device)
        self._num_featured = max_rows
        self._place_features(None)
        self._finite_rows = torch.zeros(max_rows, dtype=torch.int32, device=device)
        # Ids and flags lie together: one copy brings them to the host.
        self._best = torch.zeros(2, max_chunks, dtype=torch.int32, device=device)
        streams: list[Value] = []
        self._read = ReadRows(Chunks([], [], []))
        self._hidden = ops.whole(model.forward(image, cache.layers, streams if layers else None))
        self._streams = [ops.whole(streams[layer]) for layer in layers]
        ops.finite(self._hidden, self._finite_rows)
        self._num_forward = len(graph.nodes)
        logits = ops.whole(model.logits(self._hidden, self._logit_rows_image))
        self._best_values = torch.zeros(max_chunks, device=device)
        ops.best(logits, self._best[0], self._best[1], self._best_values)
        # Hidden states and streams stay until the next step, for `logits` and `features` of other rows.
        for value in (self._hidden, *self._streams):
            graph.read(value)
        self._logits = torch.zeros(max_chunks, logits.ld, device=device)
        outside = {logits.buffer: self._logits} | ({features.buffer: self._features} if features else {})
        self._tile_rows = tile_rows(graph, ops.dtype, ops.device)
        self._sees_all = any(node.op == "attention" and node.fields["scoring"].ahead for node in graph.nodes)
        self.tape = self._make_tape(graph, outside, ops)
        best = self._best[0], self._best[1], self._best_values
        rows, buckets = self._logits[:, : self.vocab_size], bucket_sizes(max_chunks)
        self._drawing = Drawing(rows, self._step.sizes, best, self._finite_rows, buckets)
        self.whole = self._replay(self._bind_whole, max_rows)
        self._body = self._replay(self._bind_body, max_rows)
        self.head = self._replay(self._bind_head, max_chunks)
        self.tape.reserve([self._most(size) for size in bucket_sizes(max_rows)])
        self._final = self._record_final(ops)
        ops.begin()
        self.whole.prepare()
        self._drawing.replay.prepare()

    def _stage(self, most: StepSizes, max_len: int, features: Value | None) -> StepRows:
        """Make the step's inputs; return their images on the device."""
        lengths: list[int] = []
        shape = self.kinds, self.block_size, most
        has_places = places.table_of(self.model) is not None
        make_step_rows(lengths.append, *shape, has_places=has_places)
        num_items = spans.ITEM * spans.max_items(self.max_rows, max_len)
        self._staging = Staging([3, self.max_logits, num_items, self.max_rows, *lengths], self._device)
        host, device = iter(self._staging.host), iter(self._staging.device)
        self._sizes, self._logit_rows, self._items, self._carry = (next(host) for _ in range(4))
        sizes, self._logit_rows_image, items, self._carry_image = (next(device) for _ in range(4))
        self._step = StepTensors(sizes, items.view(-1, spans.ITEM))
        self.inputs = make_step_rows(lambda _: next(host), *shape, has_places=has_places)
        image = make_step_rows(lambda _: next(device), *shape, features, has_places=has_places)
        self._token_ids: Tensor = image.token_ids
        self._arrival = Mark(self._device)
        return image

    def _make_tape(self, graph: Graph, outside: dict[Buffer, Tensor], ops: CudaOps | CudaRankOps) -> Tape:
        most = {ROWS: self.max_rows, SEQS: self.max_logits, LOGITS: self.max_logits}
        return Tape(graph, most, self._step, ops.dtype, outside, ops.device, num_programs(ops.device), self._partials)

    def _replay(self, bind: Bind, most: int) -> Replay:
        # The first item has the numbers of items.
        return Replay(bind, bucket_sizes(most), self._device, (self._step.sizes, self._step.items[:1]))

    @property
    def num_bytes(self) -> int:
        """Of all memory outside of weights and cache, once the largest bucket is bound."""
        self.whole.launches(self.max_rows)
        inputs = self._features.nbytes + self._staging.num_bytes
        return self.tape.num_bytes + self._logits.nbytes + self._drawing.num_bytes + inputs

    def _most(self, size: int) -> dict[int, int]:
        return {ROWS: size, SEQS: min(size, self.max_logits), LOGITS: min(size, self.max_logits)}

    def _bind_whole(self, size: int) -> list[Work]:
        carry = self._drawing.carry(self._carry_image, self._token_ids, size)
        return [carry, *self.tape.bind(0, len(self.tape.nodes), self._most(size))]

    def _bind_body(self, size: int) -> list[Work]:
        return self.tape.bind(0, self._num_forward, self._most(size))

    def _bind_head(self, size: int) -> list[Work]:
        return self.tape.bind(self._num_forward, len(self.tape.nodes), {ROWS: self.max_rows, LOGITS: size})

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: int = 0) -> None:
        self.cache.copy_blocks(pairs, kind)

    def forward(self, chunks: Chunks, rows: list[int], features: F32 | None = None) -> tuple[list[bool], DeviceLogits]:
        num_rows = self._place(chunks, rows, features)
        self.whole.run(num_rows)
        logits = self._take(len(rows))
        return self._are_finite(num_rows, len(chunks.starts)), logits

    def hidden_rows(self, chunks: Chunks, features: F32 | None = None) -> tuple[list[bool], F32]:
        """Compute the chunks, without logits: whether the rows of each are finite, and the hidden states [R, H] before
        the final norm of the rows that are read."""
        num_rows = self._place(chunks, [], features)
        self._body.run(num_rows)
        hidden: F32 = self.tape.value(self._hidden, num_rows).float().cpu().numpy()
        return self._are_finite(num_rows, len(chunks.starts)), hidden[self._read.rows()]

    def logits_of(self, hidden: F32, rows: list[int]) -> DeviceLogits:
        """Return the logits of some rows of hidden states [R, H]. From now on they are the logits of the last call."""
        self._read = ReadRows(Chunks([0], [[0] * len(hidden)], []).all_read())
        self.tape.value(self._hidden, len(hidden)).copy_(torch.tensor(hidden))
        return self.logits(rows)

    def _place(self, chunks: Chunks, rows: list[int], features: F32 | None) -> int:
        """Send a step's inputs to the device. Returns the number of rows."""
        num_rows, self._read = self._fill(chunks), ReadRows(chunks, rows)
        self._place_features(features)
        self._send(rows, bool(chunks.copies))
        return num_rows

    def _place_features(self, features: F32 | None) -> None:
        """Send the features of the first rows, or clear those of the last call."""
        size = self.model.feature_size
        if features is not None:
            self._features[: len(features), :size] = torch.tensor(features, device=self._device)
            self._num_featured = max(self._num_featured, len(features))
        elif size and self._num_featured:
            blank = torch.tensor(self.model.no_features, dtype=self._features.dtype, device=self._device)
            self._features[: self._num_featured, :size] = blank
            self._num_featured = 0

    def _are_finite(self, num_rows: int, num_chunks: int) -> list[bool]:
        sound, begin = self._finite_rows[:num_rows].cpu().numpy(), self.inputs.row_begin
        return [bool(sound[begin[i] : begin[i + 1]].all()) for i in range(num_chunks)]

    def start(self, chunks: Chunks, rows: list[int], draws: list[Draw | None], carried: dict[int, int]) -> StartedCall:
        # The host's data for the last call have arrived once that began.
        self._arrival.wait()
        num_rows, num_logits = self._fill(chunks), len(rows)
        self._place_features(None)
        self._carry[list(carried)] = list(carried.values())
        self._send(rows, bool(chunks.copies))
        places = {i: each for i, each in enumerate(draws) if each is not None and each.temperature > 0}
        self._drawing.send(list(places), list(places.values()))
        self._arrival.set()
        self.whole.run(num_rows)
        if places:
            self._drawing.run(num_logits)
        outcome = self._drawing.report(num_rows, num_logits)
        # One copy for each row: to gather them first, their places would have to be sent.
        fetched = [self._logits[i, : self.vocab_size] for i, each in enumerate(draws) if each is None]
        call = StartedCall(
            self.inputs.row_begin[: len(chunks.starts) + 1].tolist(),
            num_logits,
            to_host([outcome])[0],
            to_host(fetched) if fetched else None,
            Mark(self._device),
        )
        call.end.set()
        return call

    def finish(self, ticket: StartedCall) -> DrawnRows:
        ticket.end.wait()
        outcome, num_logits = ticket.outcome.numpy(), ticket.num_logits
        ids, finite, is_sure = outcome[: 3 * num_logits].reshape(3, num_logits).tolist()
        sound = [bool(outcome[3 * num_logits + a : 3 * num_logits + b].all()) for a, b in pairwise(ticket.begins)]
        logits = np.empty((0, self.vocab_size), np.float32) if ticket.logits is None else ticket.logits.numpy()
        return DrawnRows(sound, [bool(each) for each in finite], ids, [bool(each) for each in is_sure], logits)

    def _fill(self, chunks: Chunks) -> int:
        """Write the ints of `chunks` on the host. Returns the number of rows."""
        num_rows = self.inputs.fill(chunks)
        if chunks.places is not None and (table := places.table_of(self.model)) is not None:
            places.fill(self.inputs.rope_rows, chunks.places, table)
        lens = [len(ids) for ids in chunks.token_ids]
        begins = self.inputs.table_begin[:-1]
        items = spans.work_list(chunks.starts, lens, begins, *self._tile_rows, self._partials, self._sees_all)
        self._items[: items.size] = items.reshape(-1)
        self._sizes[:2] = num_rows, len(chunks.starts)
        self._carry[:num_rows] = -1
        return num_rows

    def logits(self, rows: list[int]) -> DeviceLogits:
        self._read.places(rows)
        self._send(rows)
        self.head.run(len(rows))
        return self._take(len(rows))

    def hidden_states(self, rows: list[int]) -> F32:
        self._read.places(rows)
        self._send(rows)
        replay, out = self._final
        replay.run(len(rows))
        hidden: F32 = out[: len(rows)].float().cpu().numpy()
        return hidden

    def _send(self, rows: list[int], has_copies: bool = False) -> None:
        """Send the step's ints to the device, with the rows that logits are computed of."""
        self._sizes[LOGITS] = len(rows)
        self._logit_rows[: len(rows)] = rows
        self._staging.send(has_copies)

    def _record_final(self, ops: CudaOps | CudaRankOps) -> tuple[Replay, Tensor]:
        """Record select and final norm on a second tape, which reads the hidden states of the last step: on the step's
        tape they would run in each step, and few callers need them."""
        ops.begin()
        graph, hidden = ops.graph, self._hidden
        source = graph.outside(hidden.width, ROWS, hidden.buffer.row_bytes)
        final = ops.whole(self.model.final(source, self._logit_rows_image))
        out = torch.zeros(self.max_logits, final.ld, dtype=ops.dtype, device=self._device)
        tape = self._make_tape(graph, {source.buffer: self.tape.value(hidden, self.max_rows), final.buffer: out}, ops)

        def bind(size: int) -> list[Work]:
            return tape.bind(0, len(tape.nodes), {ROWS: self.max_rows, LOGITS: size})

        return self._replay(bind, self.max_logits), out[:, : final.width]

    def features(self, rows: list[int]) -> F32:
        if self._streams:
            self._read.places(rows)
            index = torch.tensor(rows, dtype=torch.int64, device=self._device)
            parts = [self.tape.value(value, self.max_rows)[index] for value in self._streams]
            features: F32 = torch.cat(parts, 1).float().cpu().numpy()
            return features
        most = self.max_logits
        pieces = [self.hidden_states(rows[i : i + most]) for i in range(0, len(rows), most)]
        return np.concatenate(pieces) if pieces else np.empty((0, self._hidden.width), np.float32)

    def close(self) -> None:
        for replay in (self.whole, self._body, self.head, self._final[0]):
            replay.close()
        self._drawing.close()
        self.tape.close()
        self.cache.close()

    def _take(self, num_rows: int) -> DeviceLogits:
        ids, finite = self._best[:, :num_rows].cpu().numpy()
        fit = finite.astype(bool) & (self._best_values[:num_rows].cpu().numpy() > -np.inf)
        rows = self._logits[:num_rows, : self.vocab_size]
        return DeviceLogits(rows, fit.tolist(), ids.tolist(), self._drawing)


def tile_rows(graph: Graph, dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
    """Choose the configurations of every attention, and return the query rows of a small and of a large tile: work
    lists are made for the least of them, since one list serves all layers."""
    listed = [(1, 1)]
    for node in graph.nodes:
        if node.op == "attention":
            heads, cache = node.fields["heads"], node.fields["cache"]
            shape = (heads.num_heads, heads.num_kv_heads, max(heads.head_dim, heads.value_size))
            chosen = attention_configs(device, (*shape, dtype, cache.keys.dtype), cache.shares_key)
            node.fields["chosen"] = chosen
            listed.append(attention.tile_rows(*shape[:2], chosen, shape[2]))
    few, many = zip(*(listed[1:] or listed), strict=True)
    return min(few), min(many)


def attention_configs(
    device: torch.device, shape: tuple[int, int, int, torch.dtype, torch.dtype], shared: bool = False
) -> AttentionConfigs:
    """Return the configs of small and of large tiles: the fastest measured ones, else the defaults. shape: heads, heads
    of keys, numbers of a key or value, types of queries and of the cache. shared: values are a part of the keys."""
    key, kernels = tuned.heads_shape(*shape), {"few": attention.FEW, "many": attention.MANY}
    listed = []
    for name, kernel in kernels.items():
        suited = attention.configs(kernel, *shape, capability(device), shared)
        listed.append(tuned.choose(device, f"attention {name}", key, 1, suited, suited[0]))
    return listed[0], listed[1]


def planned_bytes(model: Any, ops: CudaOps | CudaRankOps, max_rows: int, max_chunks: int, max_len: int) -> int:
    """Return the bytes that a program takes in addition to weights and cache, without allocating them."""
    block, meta = 16, torch.device("meta")
    cache = KVCache(ops.cache_shapes(model), [1] * len(model.kinds), block, "bfloat16", meta)
    sizes = StepSizes(max_rows, max_chunks, max_chunks * -(-max_len // block))
    return CudaProgram(model, ops, cache, sizes, max_len).num_bytes


def capability(device: torch.device) -> int:
    """Return the compute capability of a GPU, such as 90; on a CPU Hopper's."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor


def num_programs(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; on a CPU, where twins run, one stands for all."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
