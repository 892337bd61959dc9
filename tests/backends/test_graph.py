"""A graph of values of any item size: sizes of rows, what becomes part of a neighbouring node, arrays outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from headrace.backends.graph import LOGITS, ROWS, Buffer, Graph, Value
from headrace.backends.step import Chunks, StepSizes, make_step_rows
from headrace.protocol.kinds import CacheKind


@dataclass
class RowCodes:
    """Codes with one scale for each row."""

    q: Buffer
    scales: Buffer

    def buffers(self) -> tuple[Buffer, ...]:
        return self.q, self.scales

    def fields(self) -> dict[str, Any]:
        return {"q": self.q, "scales": self.scales}


def norm(graph: Graph, x: Value) -> Value:
    """A node that can write codes of its result."""
    out = graph.value(x.width, x.dim)
    fields = {"x": graph.read(x), "out": out.buffer, "weight": torch.ones(x.width), "q": None, "scales": None}
    graph.put("norm", x.dim, out, fields)
    return out


def linear(graph: Graph, x: Value, width: int, item_bytes: int = 0) -> Value:
    """A node that can add a residual."""
    out = graph.value(width, x.dim, item_bytes)
    graph.put("linear", x.dim, out, {"x": graph.read(x), "out": out.buffer, "residual": None, "ld_res": 0})
    return out


def codes_of(x: Value) -> RowCodes:
    return x.graph.codes(x, "row", lambda: RowCodes(x.graph.buffer(x.width, x.dim), x.graph.buffer(4, x.dim)))


@pytest.mark.parametrize(("item_bytes", "ld"), [(4, 112), (2, 128)])
def test_rows_start_on_cache_lines_whatever_the_size_of_a_number(item_bytes: int, ld: int) -> None:
    value = Graph(item_bytes).value(100, ROWS)
    assert value.buffer.row_bytes == ld * item_bytes
    assert value.ld == ld


def test_a_linear_layer_adds_the_residual_of_numbers_of_its_size_alone() -> None:
    graph = Graph(2)
    x = graph.value(64, ROWS)
    y = linear(graph, x, 64)
    assert x + y is y
    assert (y.node and y.node.fields["residual"], y.node and y.node.fields["ld_res"]) == (x.buffer, 64)
    wide = linear(graph, x, 64, 4)
    total = y + wide
    assert total is not wide
    assert (total.item_bytes, graph.nodes[-1].op) == (4, "add")
    other = norm(graph, x)
    assert (x + other).node is graph.nodes[-1], "a node without the field adds nothing"
    assert graph.nodes[-1].op == "add"


def test_codes_are_written_by_the_node_that_makes_the_value_if_it_can() -> None:
    graph = Graph(2)
    x = norm(graph, graph.value(64, ROWS))
    codes = codes_of(x)
    assert codes_of(x) is codes
    assert graph.nodes[-1].op == "norm"
    assert graph.nodes[-1].fields["q"] is codes.q
    assert codes.q.first == 0
    plain = linear(graph, x, 64)
    codes_of(plain)
    assert graph.nodes[-1].op == "quantize"
    lonely = norm(graph, x)
    codes_of(lonely)
    graph.drop_unread()
    assert lonely.node is not None
    assert lonely.node.fields["out"] is None, "only its codes are read"
    assert x.buffer in graph.buffers
    assert lonely.buffer not in graph.buffers


def test_a_buffer_outside_the_arena_is_an_array_in_every_node() -> None:
    graph = Graph(2)
    features = graph.outside(64, ROWS)
    y = linear(graph, features, 64)
    of_columns = linear(graph, graph.columns(features, 16, 8), 64)
    inputs, logits = torch.arange(8.0 * 64, dtype=torch.bfloat16).reshape(8, 64), torch.zeros(8, 64)
    graph.keep_outside(features.buffer, inputs)
    graph.keep_outside(y.buffer, logits)
    graph.keep_outside(of_columns.buffer, logits)
    assert graph.nodes[0].fields["x"] is inputs
    assert graph.nodes[0].fields["out"] is logits
    assert graph.nodes[1].fields["x"].data_ptr() == inputs[0, 16:].data_ptr()
    assert graph.plan({ROWS: 8, LOGITS: 2}) == 0


def test_the_ints_of_a_step_lie_where_those_of_the_last_did() -> None:
    rows = make_step_rows(lambda n: np.zeros(n, np.int32), [CacheKind()], 4, StepSizes(16, 4, 32))
    assert rows.fill(Chunks([3, 0], [[7], [1, 2, 3, 4, 5]], [[9], [2, 5, 8]], [(0, 77), (5, 78), (5, 79)])) == 6
    assert rows.token_ids[:6].tolist() == [7, 1, 2, 3, 4, 5]
    assert rows.positions[:6].tolist() == [3, 0, 1, 2, 3, 4]
    assert rows.slots[0][:6].tolist() == [39, 8, 9, 10, 11, 20]
    assert rows.row_begin[:3].tolist() == [0, 1, 6]
    assert rows.start[:2].tolist() == [3, 0]
    assert rows.table_begin[:3].tolist() == [0, 1, 3], "as many blocks as the positions take"
    assert rows.blocks[0][:3].tolist() == [9, 2, 5]
    assert rows.copy_begin.tolist() == [0, 1, 1, 1, 1, 1] + [3] * 11
    assert rows.copy_slots[:3].tolist() == [77, 78, 79]
    rows.fill(Chunks([4, 5], [[7], [6]], [[9, 1], [2, 5]]))
    assert not rows.copy_begin.any(), "a step without copies leaves none behind"


def test_rows_are_set_apart_where_their_stride_is_a_page_and_nowhere_else() -> None:
    strides = {
        apart: [Graph(4, apart).value(width, ROWS).ld for width in (1024, 2048, 1040)] for apart in (True, False)
    }
    assert strides == {True: [1024 + 48, 2048 + 48, 1040], False: [1024, 2048, 1040]}
