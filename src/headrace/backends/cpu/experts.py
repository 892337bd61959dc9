"""Records a mixture of experts: a row is copied to each of its experts, and the experts' outputs are added up.

The copies lie expert by expert, so that a layer has the same few records however many experts there are: `linear_each`
holds a table with a product for each expert. Knows buffers and matrices; must not know models. Called by `ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Routing
from headrace.backends.cpu.codes import new_codes, quantised
from headrace.backends.cpu.matrix import CpuMatrix, CpuStack, parts_of
from headrace.backends.cpu.memory import aligned
from headrace.backends.cpu.products import NO_Q, NO_RESIDUAL, Pair, product
from headrace.backends.graph import OWN_PAIRS, PAIRS, Graph, Value
from headrace.backends.native import op_code
from headrace.protocol.errors import CheckpointError

SCORES = {"softmax": 0, "sigmoid": 1}
COUNTERS_APART = 8
"""Numbers of 8 bytes from one counter to the next: each lies alone in a cache line."""


class Recording(Protocol):
    """The part of `CpuOps` that a layer's records need."""

    graph: Graph
    pairs: list[Pair] | None

    def takes_floats(self, *matrices: CpuMatrix | CpuStack) -> bool: ...

    def permuted(self, x: Value, columns: NDArray[np.int32], begin: NDArray[np.int32], count: int) -> Value: ...


class Share(NamedTuple):
    """The experts bounds[0] ... bounds[1] - 1 of one rank of several. `collect` gathers the pairs of all ranks; the
    place among them where this rank's pairs begin is known when the tape runs."""

    bounds: tuple[int, int]
    collect: Callable[[Value, NDArray[np.int32]], Value]


class Experts:
    """One layer's records. `begin` [E + 1]: the first pair of each expert. share: for a rank that computes the pairs of
    some experts only. These are numbered 0, 1, ... in dimension OWN_PAIRS; their experts begin at `own_begin`."""

    def __init__(self, ops: Recording, routing: Routing, num_experts: int, share: Share | None = None) -> None:
        self.ops, self.graph, self.routing, self.num_experts = ops, ops.graph, routing, num_experts
        self.begin = self.own_begin = np.zeros(num_experts + 1, np.int32)
        self.share, self.dim = share, PAIRS
        self.first, self.last = (0, num_experts) if share is None else share.bounds
        if share is not None:
            self.own_begin, self.dim = np.zeros(self.last - self.first + 1, np.int32), OWN_PAIRS

    def mix(
        self,
        x: Value,
        logits: Value,
        gate_up: Sequence[CpuMatrix | CpuStack],
        down: Sequence[CpuMatrix | CpuStack],
        activation: Callable[[Value], Value],
    ) -> Value:
        """Record the mixture. `activation`: takes the first products, gives the inputs of the second ones."""
        graph, routing, top_k = self.graph, self.routing, self.routing.top_k
        graph.pairs_of_row = max(graph.pairs_of_row, top_k)
        ids, weights = graph.buffer(4 * top_k, x.dim), graph.buffer(4 * top_k, x.dim)
        groups, chosen, top = routing.groups or (1, 1, 1)
        fields: dict[str, Any] = {
            "x": graph.read(logits),
            "ld_x": logits.ld,
            "num_experts": self.num_experts,
            "top_k": top_k,
            "score": SCORES[routing.score],
            "bias": routing.bias,
            "num_groups": groups,
            "top_groups": chosen,
            "group_top": top,
            "renormalise": int(routing.renormalise),
            "scale": routing.scale,
            "factors": routing.factors,
        }
        graph.put("route", x.dim, None, fields | {"ids": ids, "weights": weights})
        rows, pair_weights = graph.buffer(4, PAIRS), graph.buffer(4, PAIRS)
        places = graph.buffer(4 * top_k, x.dim)
        fields = {"ids": graph.touch(ids), "weights": graph.touch(weights), "top_k": top_k, "begin": self.begin}
        fields |= {"num_experts": self.num_experts, "rows": rows, "places": places, "pair_weights": pair_weights}
        fields |= {"first": self.first, "num_own": self.last - self.first}
        fields["own_begin"] = None if self.share is None else self.own_begin
        graph.put("moe_group", x.dim, None, fields)
        gathered = self._gather(x, rows, pair_weights, gate_up)
        y = self._collected(self._each(activation(self._each(gathered, gate_up)), down))
        out = graph.value(y.width, x.dim)
        fields = {"places": graph.touch(places), "top_k": top_k, "x": graph.read(y), "ld_x": y.ld, "width": y.width}
        fields |= {"weights": None if routing.scale_input else graph.touch(pair_weights)}
        graph.put("moe_combine", x.dim, out, fields | NO_RESIDUAL | {"out": out.buffer, "ld_out": out.ld})
        return out

    def _collected(self, y: Value) -> Value:
        """Return the pairs of all ranks, gathered from each rank's."""
        return y if self.share is None else self.share.collect(y, self.begin[self.first :])

    def _gather(self, x: Value, rows: Any, weights: Any, matrices: Sequence[CpuMatrix | CpuStack]) -> Value:
        """Return the rows of all pairs: as codes where all products take the same, so that a row is quantised once."""
        graph, ops, scales = self.graph, self.ops, self.routing.scale_input
        matrices = matrices[self.first : self.last]
        parts = [part for matrix in matrices for part in parts_of(matrix)]
        groups = {part.act_group for part in parts}
        is_ordered = any(part.permutation is not None for part in parts)
        as_floats = scales or is_ordered or len(groups) > 1 or ops.pairs is not None or ops.takes_floats(*matrices)
        gathered = graph.value(x.width, self.dim)
        fields = NO_Q | {"to_q": None, "to_scales": None, "to_sums": None, "x": None, "ld_x": 0, "width": x.width}
        fields |= {"list": rows, "weights": None, "out": None, "ld_out": 0}
        fields["from"] = None if self.share is None else self.begin[self.first :]
        if as_floats:
            fields |= {"x": graph.read(x), "ld_x": x.ld, "out": gathered.buffer, "ld_out": gathered.ld}
            fields |= {"weights": graph.touch(weights) if scales else None}
        else:
            source = quantised(x, groups.pop())
            codes = gathered.codes[source.group] = new_codes(graph, self.dim, source.ld_q, source.ld_s, source.group)
            fields |= source.fields() | {"to_q": codes.q, "to_scales": codes.scales, "to_sums": codes.sums}
            for part in (*source.buffers(), *codes.buffers()):
                graph.touch(part)
            graph.drop(gathered.buffer)
        del fields["group"]
        graph.touch(rows)
        # The node's `q` are codes that it reads, so it must not get to write the codes of `gathered`.
        graph.put("moe_gather", self.dim, None, fields)
        return gathered

    def _each(self, x: Value, matrices: Sequence[CpuMatrix | CpuStack]) -> Value:
        pairs = self.ops.pairs
        if pairs is None or all(self.ops.takes_floats(part) for matrix in matrices for part in parts_of(matrix)):
            return self._products(x, matrices, as_floats=False)
        narrow, wide = (self._products(x, matrices, as_floats) for as_floats in (False, True))
        # Each rank measures the pairs of all ranks, so that it chooses as one process would.
        all_narrow, all_wide = self._collected(narrow), self._collected(wide)
        last = len(self.graph.nodes) - 1
        all_narrow.buffer.last = all_wide.buffer.last = last
        pairs.append(Pair(matrices, all_narrow, all_wide, last, self.begin))
        return wide

    def _products(self, x: Value, matrices: Sequence[CpuMatrix | CpuStack], as_floats: bool) -> Value:
        """Multiply each expert's rows of x by its matrix. as_floats: without codes, whatever the matrices take."""
        graph = self.graph
        experts = [parts_of(matrix) for matrix in matrices]
        shapes = {tuple((part.num_in, part.num_out) for part in parts) for parts in experts}
        if len(shapes) > 1 or any(part.outliers is not None for parts in experts for part in parts):
            raise CheckpointError(
                f"{matrices[0].name} and the other experts of the layer: the native kernels take matrices of one "
                "shape with the same parts, without outliers; dequantise them, or use backend torch_ref"
            )
        experts = experts[self.first : self.last]
        out = graph.value(matrices[0].num_out, self.dim)
        column = 0
        for place, first in enumerate(experts[0]):
            ordered = self._ordered(x, [parts[place] for parts in experts])
            tables: dict[tuple[bool, str, int], list[int]] = {}
            for expert_id, parts in enumerate(experts):
                part = parts[place]
                key = as_floats or self.ops.takes_floats(part), part.kind, part.act_group
                tables.setdefault(key, []).append(expert_id)
            for (is_wide, _, group), expert_ids in tables.items():
                codes = None if is_wide else quantised(ordered, group)
                if codes is None:
                    graph.read(ordered)
                for buffer in (out.buffer, *(() if codes is None else codes.buffers())):
                    graph.touch(buffer)
                calls = [product(experts[expert_id][place], ordered, codes) for expert_id in expert_ids]
                at = {"out": ("column", out.buffer, column), "ld_out": out.ld}
                fields = {
                    "op": op_code(calls[0][0]),
                    "fn": None,
                    "args": ("table", calls[0][0], [call | at for _, call in calls]),
                    "experts": np.array(expert_ids, np.int32),
                    "count": len(expert_ids),
                    "begin": self.own_begin,
                    "counters": aligned(8 * COUNTERS_APART * (len(expert_ids) + 1)),
                }
                graph.put(
                    "linear_each",
                    self.dim,
                    None,
                    fields,
                    note=first.name,
                    read_bytes=sum(experts[expert_id][place].data.nbytes for expert_id in expert_ids),
                    row_ops=2 * first.num_in * first.num_out,
                )
            column += first.num_out
        return out

    def _ordered(self, x: Value, matrices: Sequence[CpuMatrix]) -> Value:
        """Return x, or its rows with their inputs in the orders of their experts' matrices."""
        if all(matrix.permutation is None for matrix in matrices):
            return x
        plain = np.arange(x.width, dtype=np.int32)
        orders = [plain if matrix.permutation is None else matrix.permutation for matrix in matrices]
        return self.ops.permuted(x, np.concatenate(orders), self.own_begin, len(orders))
