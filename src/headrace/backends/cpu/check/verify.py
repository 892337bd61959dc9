"""Runs a recorded step once more, compares each operator with torch_ref's, and names the first that differs: for a
search when an answer looks wrong.

Results agree to float32 rounding and not to the bit (bits are what tests/kernels compares, ISA against ISA). Knows
nodes and their fields; must not know models. It imports torch, so `program` imports it only where it is used. Called by
tests and by HEADRACE_DEBUG=3.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.backends.base import HeadForm, HeadNorm, Heads, LayerShape, RopeTable, Routing, Scoring
from headrace.backends.cpu.cache import STORED, TYPE_CODES, TYPE_NAMES, numbers, widened
from headrace.backends.cpu.check.adapted import adapt_in, adapt_out
from headrace.backends.cpu.experts import SCORES
from headrace.backends.cpu.matrix import unpacked
from headrace.backends.cpu.products import KIND_CODES, KINDS
from headrace.backends.cpu.tape import Tape
from headrace.backends.graph import Node
from headrace.backends.states import DeltaInputs, ScanInputs, StateHeads
from headrace.backends.step import Chunks
from headrace.backends.torch_ref.attention import first_seen
from headrace.backends.torch_ref.batch import ForwardBatch, make_forward_batch
from headrace.backends.torch_ref.cache import LayerCache, make_caches
from headrace.backends.torch_ref.ops import RefOps
from headrace.backends.torch_ref.tensors import tensor
from headrace.quant.base import QWeight, source_of
from headrace.quant.formats.gguf_blocks import decode
from headrace.quant.schemes import K_BLOCK, K_TYPES

F64 = NDArray[np.float64]
SPARE = 1e-12
"""Keeps a row of zeros from being compared relatively."""

CODE_STEP = 0.51
"""How far a code may be from the quotient that it rounds: a half, and what float32 adds to it."""

_STEPS = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 1 / 254, "int8_dot": 1 / 254,
          "int4": 1 / 15 + 2**-7, "fp8_e4m3": 1 / 28, "fp8_e5m2": 1 / 8}  # fmt: skip
CACHE_STEPS = {TYPE_CODES[name]: step for name, step in _STEPS.items()}
"""Greatest error of rounding to a type, as a share of the greatest number of a row."""
ATTENTION_STEPS = {TYPE_CODES["int8_dot"]: 0.03}
"""What the codes of queries and weights may add: half a 255th of the greatest weight for each key."""

FIRST_BOOK, BESIDE_INT8 = 2, 64
"""Forms of i4 from FIRST_BOOK on have tables; with HR_BESIDE_INT8, whole numbers as in the integer kernels."""

CODES = ("q", "to_q")
LDS = dict.fromkeys(("scales", "sums", "to_scales", "to_sums"), "ld_s") | {"out": "ld_out", "x": "ld_x"}
"""The field that holds the distance between rows of a field; without one they are dense."""

WIDE_KINDS = {code: name for name, code in KIND_CODES.items()}
ACTIVATIONS = {code: kind for kind, code in KINDS.items()}
SCORE_NAMES: dict[int, Any] = {code: score for score, code in SCORES.items()}


@dataclass(frozen=True, slots=True)
class Difference:
    """Record `index` (`op`) wrote `name` with this relative error, of the greatest number that was expected."""

    index: int
    op: str
    name: str
    error: float


@torch.inference_mode()
def verify(tape: Tape, dims: list[int], tolerance: float = 2e-5) -> list[Difference]:
    """Run the step with the inputs as they are; return differences above `tolerance`, in the order of records.

    Each record is compared on the outputs of the records before it. Codes, and a cache narrower than float32, may be
    off by the half step that rounding to them costs.
    """
    differences = []
    for node in tape.nodes:
        sizes = tape.sizes(dims)
        num_rows = sizes[node.dim]
        view = View(tape, node, num_rows, sizes)
        expected = REFERENCE[node.op](view) if num_rows else {}
        tape.run_range(node.index, node.index + 1, dims)
        for name, values in expected.items():
            if view.node.fields.get(name) is None:
                continue
            error = view.error(name, values.numpy())
            if not error <= tolerance:
                differences.append(Difference(node.index, node.op, name, error))
    return differences


class View:
    """The fields of one node as arrays, `num_rows` rows of them. `ops` are the reference operators, in float32."""

    def __init__(self, tape: Tape, node: Node, num_rows: int, sizes: list[int]) -> None:
        self.tape, self.node, self.num_rows, self.sizes = tape, node, num_rows, sizes
        self.ops = RefOps(torch.device("cpu"), torch.float32)

    def __getitem__(self, name: str) -> Any:
        return self.node.fields[name]

    def array(self, name: str, dtype: Any, num_rows: int, ld: int) -> NDArray[Any]:
        """`num_rows` x `ld` numbers at field `name`, as they lie there now (a view)."""
        value = self.node.fields[name]
        if isinstance(value, np.ndarray):
            flat = value.reshape(-1)
        else:
            start = self.tape.resolve(value) - int(self.tape.arena.ctypes.data)
            flat = self.tape.arena[start:].view(np.uint8)
            num_bytes = num_rows * ld * np.dtype(dtype).itemsize
            if len(flat) < num_bytes:  # columns of the last buffer: nothing follows the last row
                flat = np.pad(flat, (0, num_bytes - len(flat)))
            flat = flat[:num_bytes].view(dtype)
        return flat[: num_rows * ld].reshape(num_rows, ld)

    def rows(self, width: int, name: str = "x", ld: str = "ld_x", num_rows: int | None = None) -> Tensor:
        """A copy of the first `width` floats of the rows of field `name`."""
        num_rows = self.num_rows if num_rows is None else num_rows
        return torch.from_numpy(self.array(name, np.float32, num_rows, self[ld])[:, :width].copy())

    def x(self) -> Tensor:
        return self.rows(self["width"])

    def ints(self, name: str) -> Tensor:
        """An integer of each row, as int64."""
        return torch.from_numpy(self.array(name, np.int32, 1, self.num_rows)[0].astype(np.int64))

    def constant(self, name: str) -> Tensor | None:
        """An array of the model: a weight or a table."""
        return None if self[name] is None else torch.from_numpy(self[name])

    def error(self, name: str, expected: NDArray[Any]) -> float:
        """The error of the numbers that field `name` holds now, relative to the greatest number of each row."""
        if name in ("k", "v"):
            cached = numbers(self.node.fields, name, self.ints("slots").numpy()).reshape(expected.shape)
            return _relative(cached, expected, CACHE_STEPS[self["kv_type"]])
        if name in CODES:
            codes = self.array(name, np.int8, self.num_rows, self["ld_q"])[:, : expected.shape[1]].astype(np.float64)
            return float(not np.abs(codes - expected).max() <= CODE_STEP)
        if name == "sums":  # of the codes as they are
            codes = self.array("q", np.int8, self.num_rows, self["ld_q"])[:, : self["width"]].astype(np.int32)
            expected = _grouped(torch.from_numpy(codes), self["group"]).sum(2, dtype=torch.int32).numpy()
        whole = expected.dtype.kind == "i"
        ld = self.tape.resolve(self[LDS[name]]) if name in LDS else expected.shape[1]
        actual = self.array(name, np.int32 if whole else np.float32, len(expected), ld)[:, : expected.shape[1]]
        if whole:
            return float((actual != expected).any())
        if name == "out" and expected.shape[1] == 1:
            # One number may be a small rest of many that cancel: it is compared with the greatest of the column.
            actual, expected = actual.T, expected.T
        step = ATTENTION_STEPS.get(self["kv_type"], 0.0) if self.node.op == "attention" else 0.0
        return _relative(actual.astype(np.float64), expected, step)


def _relative(actual: F64, expected: NDArray[Any], step: float) -> float:
    if (np.isnan(actual) != np.isnan(expected)).any():
        return math.inf
    greatest = np.nanmax(np.abs(expected), axis=1, keepdims=True, initial=SPARE)
    return max(0.0, float(np.nanmax(np.abs(actual - expected) / greatest, initial=0.0)) - step)


Expected = dict[str, Tensor]


def _grouped(x: Tensor, group: int) -> Tensor:
    """[rows, width] -> [rows, groups, group], the last group filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % group)).view(len(x), -1, group)


def _with_codes(view: View, y: Tensor) -> Expected:
    """Results of an operator that may write floats, codes, or both. Codes are expected before they are rounded."""
    if view["q"] is None:
        return {"out": y}
    grouped = _grouped(y, view["group"])
    amax = grouped.abs().amax(2)
    codes = grouped * torch.where(amax > 0, 127 / amax, 0)[:, :, None]
    return {"out": y, "q": codes.flatten(1)[:, : y.shape[1]], "scales": amax / 127, "sums": amax}


def _rms_norm(view: View) -> Expected:
    x = view.rows(view["width"] * view["heads"]).view(view.num_rows, view["heads"], view["width"])
    weight = view.constant("weight")
    if weight is not None and view["weight_step"]:
        weight = weight.view(view["heads"], view["width"])
    y = view.ops.rms_norm(x, weight, view["eps"], view["offset"])
    return _with_codes(view, y.flatten(1))


def _layer_norm(view: View) -> Expected:
    y = view.ops.layer_norm(view.x(), torch.from_numpy(view["weight"]), view.constant("bias"), view["eps"])
    return _with_codes(view, y)


def _embedding(view: View) -> Expected:
    """The record has the table's address alone: here the rows that are looked up are made a table."""
    width, kind = view["width"], next((k for k in K_TYPES if K_TYPES[k].code == view["type"]), None)
    dtype = np.dtype(STORED[TYPE_NAMES[view["type"]]] if kind is None else np.uint8)
    size = width * dtype.itemsize if kind is None else width // K_BLOCK * K_TYPES[kind].size
    raw = [ctypes.string_at(view["table"] + token_id * size, size) for token_id in view.ints("ids").tolist()]
    stored = np.frombuffer(b"".join(raw), dtype).reshape(view.num_rows, -1)
    if kind is None:
        table = torch.from_numpy(widened(stored, TYPE_NAMES[view["type"]])).float()
    else:
        table = tensor(decode(kind, stored).dequantize())
    return {"out": view.ops.embedding(torch.arange(view.num_rows), table, view["scale"])}


def _rope_store(view: View) -> Expected:
    heads = Heads(view["heads"], view["kv_heads"], view["head_dim"], view["value_dim"])
    num_values = 0 if view["v"] is None else heads.num_kv_heads * heads.value_size
    qkv = view.rows((heads.num_heads + heads.num_kv_heads) * heads.head_dim + num_values)
    rope_table = None
    if view["pairs"]:
        rope_table = RopeTable(torch.from_numpy(view["cos"]), torch.from_numpy(view["sin"]), view["first"])
    norms = [view.constant(name) for name in ("q_norm", "k_norm")]
    q_norm, k_norm = (None if w is None else HeadNorm(w, view["eps"], view["offset"]) for w in norms)
    # A cache with a slot for each row, in its order.
    slots = torch.arange(view.num_rows)
    rows = ForwardBatch(slots, view.ints("positions"), [slots], [], [], [slots[:, None]])
    if view["k"] is None and rope_table is not None:
        return {"x": view.ops.rope(qkv, heads.num_heads, heads.head_dim, rows, rope_table)}
    cache = _reference_cache(view, heads, view.num_rows, 1)
    query = view.ops.rope_store(qkv, heads, rows, cache, HeadForm(rope_table, q_norm, k_norm))
    key, value, mean = cache.keys[:, 0], cache.values[:, 0], view.constant("k_mean")
    return {"x": query, "k": (key if mean is None else key - mean).flatten(1), "v": value.flatten(1)}


def _reference_cache(view: View, heads: Heads, num_blocks: int, block_size: int) -> LayerCache:
    shape = LayerShape(heads.num_kv_heads, heads.head_dim, heads.value_size, shares_key=view["v"] is None)
    cache: LayerCache = make_caches([shape], [num_blocks], block_size, "float32", torch.device("cpu"))[0]
    return cache


def _attention(view: View) -> Expected:
    heads, block_size = Heads(*(view[f] for f in ("heads", "kv_heads", "head_dim", "value_dim"))), view["block_size"]
    begin, start, table_begin = (view[name].tolist() for name in ("row_begin", "start", "table_begin"))
    # A cache of the step's blocks alone, in the order of the tables; what no row sees stays zero.
    counts = [-(-(start[c] + begin[c + 1] - begin[c]) // block_size) for c in range(view.sizes[1])]
    cache = _reference_cache(view, heads, sum(counts), block_size)
    parts = {"k": cache.keys} if cache.shares_key else {"k": cache.keys, "v": cache.values}
    chunks = Chunks([], [], [])
    num_blocks = 0
    for chunk_id, count in enumerate(counts):
        first, length = start[chunk_id], begin[chunk_id + 1] - begin[chunk_id]
        low = max(0, first_seen(first, view["window"] or None))
        positions = np.arange(low, first + length)
        slots = view["blocks"][table_begin[chunk_id] + positions // block_size] * block_size + positions % block_size
        for name, part in parts.items():
            at = num_blocks * block_size
            slots_of_chunk = part.flatten(0, 1)[at + low : at + first + length]
            slots_of_chunk[:] = torch.from_numpy(numbers(view.node.fields, name, slots))
        chunks.starts.append(first)
        chunks.token_ids.append([0] * length)
        chunks.tables.append(list(range(num_blocks, num_blocks + count)))
        num_blocks += count
    rows = make_forward_batch(chunks, block_size, torch.device("cpu"))
    rows.seen = None if view["seen"] is None else view.ints("seen").tolist()
    query = view.rows(heads.num_heads * heads.head_dim)
    window, chunked = abs(view["window"]) or None, view["window"] < 0
    sinks, bias = view.constant("sinks"), view.constant("bias")
    scoring = Scoring(view["scale"], window, chunked, view["softcap"], sinks, view["ahead"], bias)
    return {"out": view.ops.attention(query, heads, rows, cache, scoring)}


def _linear(view: View) -> Expected:
    kind, num_in, num_out = view.node.op.removeprefix("linear_"), view["num_in"], view["num_out"]
    if kind == "w":
        x, flag, group, kind = view.rows(num_in), view["form"], view["group"], WIDE_KINDS[view["kind"]]
    elif kind == "f":
        x, flag, group = view.rows(num_in), view["type"], 0
    else:
        ld_s, group = view["ld_s"], view["group"]
        codes = view.array("q", np.int8, view.num_rows, view["ld_q"])[:, :num_in].astype(np.float32)
        # Beyond the last group of a row of scales nothing was written.
        scales = view.array("scales", np.float32, view.num_rows, ld_s)[:, : -(-num_in // group)]
        x = torch.from_numpy(codes * np.repeat(scales, group, axis=1)[:, :num_in])
        flag = view["weight_group"] if kind == "i8" else view["form"]
        if kind == "i4" and flag >= FIRST_BOOK:
            flag += BESIDE_INT8
    dense = torch.from_numpy(unpacked(kind, view["weights"], num_out, num_in, group, flag, range(num_out)))
    y = view.ops.linear(x, view.ops.matrix(source_of([QWeight(dense)], ""), view.constant("bias")))
    return {"out": _with_residual(view, y)}


def _linear_each(view: View) -> Expected:
    """The outputs of the table's products. Rows of experts without an entry keep their numbers."""
    _, op, calls = view["args"]
    if view["begin"] is None:
        return _by_head(view, op, calls)
    first = view.node.fields["args"][2][0]
    whole = View(view.tape, Node(op, 0, first, view.node.index), view.num_rows, view.sizes)
    out = whole.rows(first["num_out"], "out", "ld_out")
    for expert_id, call in zip(view["experts"].tolist(), calls, strict=True):
        begin, end = (int(x) for x in view["begin"][expert_id : expert_id + 2])
        if begin < end:
            part = View(view.tape, Node(op, 0, call, view.node.index), end, view.sizes)
            out[begin:end] = _linear(part)["out"][begin:end]
    view.node = whole.node  # where the results lie
    return {"out": out}


def _by_head(view: View, op: str, calls: list[dict[str, Any]]) -> Expected:
    """Products of all rows, each in its columns; the columns between them keep their numbers."""
    places = [call["out"][2] if isinstance(call["out"], tuple) else 0 for call in calls]
    whole = {"out": calls[0]["out"][1] if isinstance(calls[0]["out"], tuple) else calls[0]["out"]}
    nodes = [Node(op, 0, call, view.node.index) for call in calls]
    view.node = Node(op, 0, calls[0] | whole, view.node.index)
    out = view.rows(max(places) + calls[0]["num_out"], "out", "ld_out")
    for place, node in zip(places, nodes, strict=True):
        y = _linear(View(view.tape, node, view.num_rows, view.sizes))["out"]
        out[:, place : place + y.shape[1]] = y
    return {"out": out}


def _spread(view: View) -> Expected:
    """The pieces in their columns. Between them nothing is written yet, and zeros can be compared."""
    heads, width, steps = view["heads"], view["width"], (view["step_x"], view["step_out"])
    x, last = view.rows((heads - 1) * steps[0] + width), (heads - 1) * steps[1] + width
    view.array("out", np.float32, view.num_rows, view["ld_out"])[:, :last] = 0
    out = torch.zeros(view.num_rows, last)
    for head in range(heads):
        out[:, head * steps[1] :][:, :width] = x[:, head * steps[0] :][:, :width]
    return {"out": out}


def _route(view: View) -> Expected:
    bias = view.constant("bias")
    groups = (view["num_groups"], view["top_groups"], view["group_top"]) if view["num_groups"] > 1 else None
    routing = Routing(
        view["top_k"], SCORE_NAMES[view["score"]], bias, groups, bool(view["renormalise"]), view["scale"],
        factors=view.constant("factors"),
    )  # fmt: skip
    weights, ids = view.ops.route(view.rows(view["num_experts"]), routing)
    return {"ids": ids, "weights": weights}


def _group(view: View) -> Expected:
    ids, weights = (
        torch.from_numpy(view.array(name, kind, view.num_rows, view["top_k"]))
        for name, kind in (("ids", np.int32), ("weights", np.float32))
    )
    order = ids.flatten().sort(stable=True).indices
    counts = torch.bincount(ids.flatten(), minlength=view["num_experts"])
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order))).view(ids.shape).sort(1).values
    return {
        "begin": torch.cat([counts.new_zeros(1), counts.cumsum(0)])[None],
        "rows": (order // view["top_k"])[:, None],
        "pair_weights": weights.flatten()[order][:, None],
        "places": places,
    }


def _gather(view: View) -> Expected:
    rows = view.ints("list")
    height, width = int(rows.max()) + 1, view["width"]
    if view["x"] is not None:
        out = view.ops.select(view.rows(width, num_rows=height), rows)
        if view["weights"] is not None:
            out = out * torch.from_numpy(view.array("weights", np.float32, view.num_rows, 1))
        return {"out": out}

    def select(name: str, dtype: Any, ld: str) -> Tensor:
        return view.ops.select(torch.from_numpy(view.array(name, dtype, height, view[ld])), rows)

    # The bits of the scales: a row of them is copied whole, and beyond the last group there may be anything.
    parts = {f"to_{name}": select(name, np.int32, "ld_s") for name in ("scales", "sums")}
    return parts | {"to_q": select("q", np.int8, "ld_q")[:, :width].double()}


def _combine(view: View) -> Expected:
    top_k, num_pairs = view["top_k"], view.num_rows * view["top_k"]
    places = torch.from_numpy(view.array("places", np.int32, view.num_rows, top_k).astype(np.int64))
    y = view.rows(view["width"], num_rows=num_pairs)
    if view["weights"] is not None:
        y = y * torch.from_numpy(view.array("weights", np.float32, num_pairs, 1))
    return {"out": _with_residual(view, y[places].sum(1))}


def _with_residual(view: View, y: Tensor) -> Tensor:
    return y if view["residual"] is None else y + view.rows(y.shape[1], "residual", "ld_res")


def _top_k(view: View) -> Expected:
    values, ids = view.x().sort(dim=1, descending=True, stable=True)
    return {"ids": ids[:, : view["k"]], "values": values[:, : view["k"]]}


def _select(view: View) -> Expected:
    rows = view.ints("rows")
    return {"out": view.ops.select(view.rows(view["width"], num_rows=int(rows.max()) + 1), rows)}


def _permute(view: View) -> Expected:
    columns = view["columns"].reshape(view["count"], view["width"]).astype(np.int64)
    begin = [0, view.num_rows] if view["begin"] is None else view["begin"].tolist()
    orders = np.repeat(columns, np.diff(begin), axis=0)
    return _with_codes(view, view.x().gather(1, torch.from_numpy(orders)))


def _gated(view: View) -> Expected:
    return _with_codes(view, view.ops.gated(view.rows(2 * view["width"]), ACTIVATIONS[view["kind"]]))


def _state(view: View) -> tuple[ForwardBatch, Tensor]:
    """The step's chunks, and a copy of the states."""
    begin, num_chunks, none = view["row_begin"].tolist(), view.sizes[1], torch.empty(0)
    lens = [begin[i + 1] - begin[i] for i in range(num_chunks)]
    slots = view["state_out"][: view.num_rows].tolist()
    out = {row: slot for row, slot in enumerate(slots) if slot >= 0}
    states_in = view["state_in"][:num_chunks].tolist()
    rows = ForwardBatch(none, none, [], [], lens, [], states_in=states_in, states_out=out)
    return rows, torch.from_numpy(view["state"].copy())


def _with_state(y: Tensor, state: Tensor) -> Expected:
    return {"out": y, "state": state.flatten(1)}


def _conv(view: View) -> Expected:
    rows, state = _state(view)
    weight, bias = torch.from_numpy(view["weight"]), view.constant("bias")
    return _with_state(view.ops.conv(view.x(), weight, bias, ACTIVATIONS[view["kind"]], rows, state), state)


def _state_parts(view: View, widths: dict[str, int]) -> tuple[StateHeads, list[Tensor]]:
    heads = StateHeads(view["heads"], view["key_heads"], view["key_dim"], view["value_dim"], bool(view["tiled"]))
    return heads, [view.rows(width, name, f"ld_{name}") for name, width in widths.items()]


def _delta(view: View) -> Expected:
    keys, num_heads = view["key_heads"] * view["key_dim"], view["heads"]
    widths = {"query": keys, "key": keys, "value": num_heads * view["value_dim"]}
    widths |= {"decay": num_heads * view["decay_width"], "beta": num_heads}
    heads, parts = _state_parts(view, widths)
    rows, state = _state(view)
    query, key, value, decay, beta = parts
    y = view.ops.delta(DeltaInputs(query, key, value, decay, beta), heads, rows, state, view["scale"])
    return _with_state(y, state)


def _scan(view: View) -> Expected:
    keys, num_heads = view["key_heads"] * view["key_dim"], view["heads"]
    heads, parts = _state_parts(view, {"x": num_heads * view["value_dim"], "b": keys, "c": keys, "dt": num_heads})
    rows, state = _state(view)
    x, b, c, dt = parts
    y = view.ops.scan(ScanInputs(x, b, c, dt, torch.from_numpy(view["a"]), view.constant("d")), heads, rows, state)
    return _with_state(y, state)


def _softplus(view: View) -> Expected:
    bias, factor = torch.from_numpy(view["bias"]), view.constant("factor")
    return {"out": view.ops.softplus(view.x(), bias, factor, view["low"], view["high"])}


REFERENCE: dict[str, Callable[[View], Expected]] = {
    "embedding": _embedding,
    "select_rows": _select,
    "permute": _permute,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "add": lambda view: {"out": view.x() + view.rows(view["width"], "y", "ld_y")},
    "softcap": lambda view: {"out": view.ops.softcap(view.x(), view["cap"])},
    "quantize": lambda view: _with_codes(view, view.x()),
    "activation": lambda view: _with_codes(view, view.ops.activation(view.x(), ACTIVATIONS[view["kind"]])),
    "xielu": lambda view: _with_codes(view, view.ops.xielu(view.x(), view["positive"], view["negative"], view["beta"])),
    "gated": _gated,
    "rope_store": _rope_store,
    "attention": _attention,
    **dict.fromkeys([f"linear_{kind}" for kind in ("i4", "i5", "i6", "i8", "k", "w", "f")], _linear),
    "route": _route,
    "moe_group": _group,
    "moe_gather": _gather,
    "linear_each": _linear_each,
    "moe_combine": _combine,
    "multiply": lambda view: {
        "out": _with_residual(
            view,
            view.ops.multiply(view.x(), view.rows(view["gate_width"], "gate", "ld_gate"), ACTIVATIONS[view["kind"]]),
        )
    },
    "scale": lambda view: {"out": _with_residual(view, view.ops.scale(view.x(), view["factor"]))},
    "finite": lambda view: {"finite": view.x().isfinite().all(1, keepdim=True).int()},
    "top_k": _top_k,
    "conv": _conv,
    "delta": _delta,
    "scan": _scan,
    "softplus": _softplus,
    "spread": _spread,
    "adapt_in": adapt_in,
    "adapt_out": adapt_out,
}
