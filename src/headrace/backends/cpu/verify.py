"""Runs a recorded step once more, operator by operator, beside the same operators in plain numpy, and tells the first
that differs: the tape's own oracle, for when an answer looks wrong.

Sums are float64 here, so results agree to float32 rounding and not to the bit (bits are what tests/kernels compares,
ISA against ISA). Knows nodes and their fields; must not know models. Called by tests and by HEADRACE_DEBUG=3.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu.cache import STORED, TYPE_CODES, TYPE_NAMES, numbers, widened
from headrace.backends.cpu.graph import Node
from headrace.backends.cpu.matrix import CpuMatrix
from headrace.backends.cpu.tape import Tape
from headrace.quant.schemes import K_BLOCK, K_TYPES

F64 = NDArray[np.float64]
SPARE = 1e-12
"""Keeps a row of zeros from being compared relatively."""

CODE_STEP = 0.51
"""How far a code may be from the quotient that it rounds: a half, and what float32 adds to it."""

_STEPS = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 1 / 254, "int4": 1 / 15 + 2**-7,
          "fp8_e4m3": 1 / 28, "fp8_e5m2": 1 / 8}  # fmt: skip
CACHE_STEPS = {TYPE_CODES[name]: step for name, step in _STEPS.items()}
"""What rounding to a type may cost, of the greatest number of a row."""

BEYOND = -1
"""In an expected list: beyond its end, where anything may lie."""

CODES = ("q", "to_q")
LDS = {"scales": "ld_s", "sums": "ld_s", "to_scales": "ld_s", "to_sums": "ld_s", "out": "ld_out", "x": "ld_x",
       "lists": "ld_list", "list_weights": "ld_list"}  # fmt: skip
"""The field that tells how far apart rows of a field lie; without one they are dense."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Record `index` (`op`) wrote `name` with this relative error, of the greatest number that was expected."""

    index: int
    op: str
    name: str
    error: float


def verify(tape: Tape, dims: list[int], tolerance: float = 2e-5) -> list[Difference]:
    """Run the step with the inputs as they are; -> records whose results differ by more than `tolerance`, in order.

    Each record is compared given what the records before it wrote. Codes, and a cache narrower than float32, may be off
    by the half step that rounding to them costs.
    """
    found = []
    for node in tape.nodes:
        sizes = dims + tape.expert_dims()
        num_rows = sizes[node.dim] if node.dim < len(sizes) else 0
        seen = View(tape, node, num_rows, sizes)
        expected = REFERENCE[node.op](seen) if num_rows else {}
        tape.run_range(node.index, node.index + 1, dims)
        for name, wanted in expected.items():
            if node.fields.get(name) is None:
                continue
            error = seen.error(name, wanted)
            if not error <= tolerance:
                found.append(Difference(node.index, node.op, name, error))
    return found


class View:
    """The fields of one node as arrays, `rows` rows of them."""

    def __init__(self, tape: Tape, node: Node, rows: int, sizes: list[int]) -> None:
        self.tape, self.node, self.rows, self.sizes = tape, node, rows, sizes

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
            if len(flat) < num_bytes:  # columns of the last buffer: what follows the last row is not there
                flat = np.pad(flat, (0, num_bytes - len(flat)))
            flat = flat[:num_bytes].view(dtype)
        return flat[: num_rows * ld].reshape(num_rows, ld)

    def x(self, width: int | None = None, name: str = "x") -> F64:
        """Input rows as float64, copied."""
        width = self["width"] if width is None else width
        return self.array(name, np.float32, self.rows, self[f"ld_{name}"])[:, :width].astype(np.float64)

    def ints(self, name: str, count: int) -> NDArray[np.int32]:
        found: NDArray[np.int32] = self.array(name, np.int32, 1, count)[0]
        return found

    def error(self, name: str, wanted: NDArray[Any]) -> float:
        """Of what field `name` holds now, relative to the greatest number of each row."""
        if name in ("k", "v"):
            got: NDArray[Any] = numbers(self.node.fields, name, self.ints("slots", self.rows)).reshape(wanted.shape)
            return self._relative(got, wanted, CACHE_STEPS[self["kv_type"]])
        if name in CODES:
            got = self.array(name, np.int8, self.rows, self["ld_q"])[:, : wanted.shape[1]].astype(np.float64)
            return float(np.abs(got - wanted).max() > CODE_STEP)
        if name == "sums":  # of the codes as they are
            codes = self.array("q", np.int8, self.rows, self["ld_q"])[:, : self["width"]].astype(np.int32)
            wanted = _grouped(codes, self["group"]).sum(axis=2, dtype=np.int32)
        kind = np.int32 if wanted.dtype == np.int32 else np.float32
        ld = self.tape.resolve(self[LDS[name]]) if name in LDS else wanted.shape[1]
        got = self.array(name, kind, len(wanted), ld)[:, : wanted.shape[1]]
        if name.startswith("list"):
            got = np.where(wanted == BEYOND, wanted, got)
        if kind == np.int32:
            return float((got != wanted).any())
        return self._relative(got.astype(np.float64), wanted, 0.0)

    def _relative(self, got: F64, wanted: F64, step: float) -> float:
        if (np.isnan(got) != np.isnan(wanted)).any():
            return math.inf
        greatest = np.nanmax(np.abs(wanted), axis=1, keepdims=True, initial=SPARE)
        return max(0.0, float(np.nanmax(np.abs(got - wanted) / greatest, initial=0.0)) - step)


def _grouped(x: NDArray[Any], group: int) -> NDArray[Any]:
    """[rows, width] -> [rows, groups, group], the last group filled up with zeros."""
    return np.pad(x, ((0, 0), (0, -x.shape[1] % group))).reshape(len(x), -1, group)


def _with_codes(view: View, y: F64) -> dict[str, NDArray[Any]]:
    """Results of an operator that may write floats, codes, or both. Codes are expected before they are rounded."""
    if view["q"] is None:
        return {"out": y}
    grouped = _grouped(y, view["group"])
    amax = np.abs(grouped).max(axis=2)
    codes = grouped * np.divide(127.0, amax, out=np.zeros_like(amax), where=amax > 0)[:, :, None]
    scales = amax / 127
    return {"out": y, "q": codes.reshape(len(y), -1)[:, : y.shape[1]], "scales": scales, "sums": scales}


def _act(x: F64, kind: int) -> F64:
    with np.errstate(over="ignore"):
        if kind == 0:
            made = x / (1 + np.exp(-x))
        elif kind == 1:
            made = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        elif kind == 2:
            made = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        else:
            made = np.maximum(x, 0)
    return np.asarray(made, np.float64)


def _norm(x: F64, weight: NDArray[np.float32], eps: float, offset: float) -> F64:
    made = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * (weight.astype(np.float64) + offset)
    return np.asarray(made, np.float64)


def _rms_norm(view: View) -> dict[str, NDArray[Any]]:
    x = view.x(view["width"] * view["heads"]).reshape(view.rows, view["heads"], view["width"])
    return _with_codes(view, _norm(x, view["weight"], view["eps"], view["offset"]).reshape(view.rows, -1))


def _layer_norm(view: View) -> dict[str, NDArray[Any]]:
    x = view.x()
    x = x - x.mean(axis=1, keepdims=True)
    y = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + view["eps"])
    return _with_codes(view, y * view["weight"].astype(np.float64) + view["bias"].astype(np.float64))


def _embedding(view: View) -> dict[str, NDArray[Any]]:
    ids, width = view.ints("ids", view.rows), view["width"]
    kind = next((kind for kind in K_TYPES if K_TYPES[kind].code == view["type"]), None)
    if kind is not None:
        return {"out": _block_rows(view, kind, ids) * view["scale"]}
    dtype = STORED[TYPE_NAMES[view["type"]]]
    rows = []
    for token_id in ids.tolist():
        size = width * np.dtype(dtype).itemsize
        raw = np.frombuffer(ctypes.string_at(view["table"] + token_id * size, size), dtype)
        rows.append(widened(raw, TYPE_NAMES[view["type"]]))
    return {"out": np.stack(rows) * view["scale"]}


def _block_rows(view: View, kind: str, ids: NDArray[np.int32]) -> F64:
    from headrace.quant.formats.gguf_blocks import decode

    size = view["width"] // K_BLOCK * K_TYPES[kind].size
    raw = np.stack([np.frombuffer(ctypes.string_at(view["table"] + i * size, size), np.uint8) for i in ids.tolist()])
    found: F64 = decode(kind, raw).dequantize().numpy().astype(np.float64)
    return found


def _gated(view: View) -> dict[str, NDArray[Any]]:
    x = view.x(2 * view["width"])
    return _with_codes(view, _act(x[:, : view["width"]], view["kind"]) * x[:, view["width"] :])


def _rope_store(view: View) -> dict[str, NDArray[Any]]:
    heads, kv_heads, size, pairs = view["heads"], view["kv_heads"], view["head_dim"], view["pairs"]
    x = view.x((heads + 2 * kv_heads) * size).reshape(view.rows, -1, size)
    query, key, value = np.split(x, [heads, heads + kv_heads], axis=1)
    at = view.ints("positions", view.rows)

    def turned(part: F64, norm: NDArray[np.float32] | None) -> F64:
        if norm is not None:
            part = _norm(part, norm, view["eps"], view["offset"])
        if not pairs:
            return part.reshape(view.rows, -1)
        cos, sin = (view[name][at].astype(np.float64)[:, None, :] for name in ("cos", "sin"))
        left, right = part[..., :pairs], part[..., pairs : 2 * pairs]
        made = [left * cos - right * sin, right * cos + left * sin, part[..., 2 * pairs :]]
        return np.concatenate(made, axis=2).reshape(view.rows, -1)

    return {
        "x": turned(query, view["q_norm"]),
        "k": turned(key, view["k_norm"]) - (0.0 if view["k_mean"] is None else view["k_mean"].reshape(-1)),
        "v": value.reshape(view.rows, -1),
    }


def _attention(view: View) -> dict[str, NDArray[Any]]:
    heads, kv_heads, size = view["heads"], view["kv_heads"], view["head_dim"]
    block_size, num_chunks = view["block_size"], view.sizes[1]
    begin, start, tables = view["row_begin"], view["start"], view["table_begin"]
    query = view.x(heads * size).reshape(view.rows, heads, size)
    out = np.zeros_like(query)
    for chunk in range(num_chunks):
        for row in range(begin[chunk], begin[chunk + 1]):
            position = start[chunk] + row - begin[chunk]
            low = max(0, position - view["window"] + 1) if view["window"] else 0
            at = np.arange(low, position + 1)
            slots = view["blocks"][tables[chunk] + at // block_size] * block_size + at % block_size
            keys, values = (numbers(view.node.fields, name, slots) for name in ("k", "v"))
            for head in range(heads):
                own = head // (heads // kv_heads)
                scores = keys[:, own] @ query[row, head] * view["scale"]
                if view["softcap"]:
                    scores = view["softcap"] * np.tanh(scores / view["softcap"])
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values[:, own] / weights.sum()
    return {"out": out.reshape(view.rows, -1)}


def _linear(view: View) -> dict[str, NDArray[Any]]:
    kind, num_in, num_out = view.node.op.removeprefix("linear_"), view["num_in"], view["num_out"]
    if kind == "f":
        x, flag, group = view.x(num_in), view["type"], 0
    else:
        ld_s, group = view["ld_s"], view["group"]
        codes = view.array("q", np.int8, view.rows, view["ld_q"])[:, :num_in].astype(np.float64)
        # What lies beyond the last group of a row nobody has written.
        scales = view.array("scales", np.float32, view.rows, ld_s)[:, : -(-num_in // group)].astype(np.float64)
        x = codes * np.repeat(scales, group, axis=1)[:, :num_in]
        flag = view["weight_group"] if kind == "i8" else view["form"]
        group = flag if kind == "i8" else group
    dense = CpuMatrix("", kind, view["weights"], num_in, num_out, group, flag).dense().astype(np.float64)
    y = x @ dense.T
    if view["bias"] is not None:
        y = y + view["bias"].astype(np.float64)
    if view["residual"] is not None:
        y = y + view.array("residual", np.float32, view.rows, view["ld_res"])[:, :num_out].astype(np.float64)
    return {"out": y}


def _route(view: View) -> dict[str, NDArray[Any]]:
    logits, top_k = view.x(view["num_experts"]), view["top_k"]
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :top_k].astype(np.int32)
    best = np.take_along_axis(logits, ids.astype(np.int64), axis=1)
    weights = np.exp(best - best[:, :1])
    return {"ids": ids, "weights": weights / weights.sum(axis=1, keepdims=True)}


def _group(view: View) -> dict[str, NDArray[Any]]:
    shape = view["num_experts"], view.tape.resolve(view["ld_list"])
    ids, weights = (view.array(name, kind, view.rows, view["top_k"])
                    for name, kind in (("ids", np.int32), ("weights", np.float32)))  # fmt: skip
    lists, list_weights = np.full(shape, BEYOND, np.int32), np.full(shape, BEYOND, np.float64)
    for expert_id in range(view["num_experts"]):
        rows, place = np.nonzero(ids == expert_id)
        lists[expert_id, : len(rows)] = rows
        list_weights[expert_id, : len(rows)] = weights[rows, place]
    return {"lists": lists, "list_weights": list_weights}


def _gather(view: View) -> dict[str, NDArray[Any]]:
    rows = view.array("list", np.int32, 1, view.rows)[0]
    height, width = int(rows.max()) + 1, view["width"]
    if view["x"] is not None:
        return {"out": view.array("x", np.float32, height, view["ld_x"])[rows][:, :width].astype(np.float64)}
    # The bits of the scales: a row of them is copied with what lies beyond the last group, which may be anything.
    found: dict[str, NDArray[Any]] = {
        f"to_{name}": view.array(name, np.int32, height, view["ld_s"])[rows] for name in ("scales", "sums")
    }
    return found | {"to_q": view.array("q", np.int8, height, view["ld_q"])[rows][:, :width].astype(np.float64)}


def _scatter(view: View) -> dict[str, NDArray[Any]]:
    rows = view.array("list", np.int32, 1, view.rows)[0]
    weights = view.array("list_weights", np.float32, 1, view.rows)[0].astype(np.float64)
    height = view.sizes[0]
    out = view.array("out", np.float32, height, view["ld_out"])[:, : view["width"]].astype(np.float64)
    out[rows] += weights[:, None] * view.x()
    return {"out": out}


def _top_k(view: View) -> dict[str, NDArray[Any]]:
    order: Any = np.argsort(-view.x(), axis=1, kind="stable")[:, : view["k"]]
    values: F64 = np.take_along_axis(view.x(), order, axis=1)
    ids: NDArray[np.int32] = order.astype(np.int32)
    return {"ids": ids, "values": values}


def _finite(view: View) -> dict[str, NDArray[Any]]:
    found: Any = np.isfinite(view.x()).all(axis=1, keepdims=True)
    finite: NDArray[np.int32] = found.astype(np.int32)
    return {"finite": finite}


def _select(view: View) -> dict[str, NDArray[Any]]:
    rows = view.ints("rows", view.rows)
    found = view.array("x", np.float32, int(rows.max()) + 1, view["ld_x"])[rows][:, : view["width"]]
    return {"out": found.astype(np.float64)}


REFERENCE: dict[str, Callable[[View], dict[str, NDArray[Any]]]] = {
    "embedding": _embedding,
    "select_rows": _select,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "add": lambda view: {"out": view.x() + view.x(name="y")},
    "scale": lambda view: {"out": view.x() * view["factor"]},
    "softcap": lambda view: {"out": view["cap"] * np.tanh(view.x() / view["cap"])},
    "quantize": lambda view: _with_codes(view, view.x()),
    "activation": lambda view: _with_codes(view, _act(view.x(), view["kind"])),
    "gated": _gated,
    "rope_store": _rope_store,
    "attention": _attention,
    "linear_i4": _linear,
    "linear_i6": _linear,
    "linear_i8": _linear,
    "linear_k": _linear,
    "linear_f": _linear,
    "route": _route,
    "moe_group": _group,
    "moe_gather": _gather,
    "moe_scatter": _scatter,
    "zero": lambda view: {"out": np.zeros((view.rows, view["width"]))},
    "finite": _finite,
    "top_k": _top_k,
}
