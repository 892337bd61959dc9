"""A graph on the tape: every node bound to launches, for a bucket of rows.

`Tape` owns the arena of intermediate buffers, and scratch memory that one launch after the other uses. A bucket's
launches have fixed addresses and grids that cover the most rows of the bucket; the real number of rows lies in device
memory. `BINDERS` has the launches of each operator. Knows nodes and kernels; must not know requests. Made by `program`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.backends.base import Heads
from headrace.backends.cuda import binders_experts, binders_heads, gathers, recurrent, trust, tuned
from headrace.backends.cuda.gathers import Gather
from headrace.backends.cuda.kernels import attention as paged
from headrace.backends.cuda.kernels import (
    best,
    experts,
    linear,
    linear_8bit,
    linear_codes,
    linear_ws,
    norm,
    rope_store,
    rows,
    spans,
)
from headrace.backends.cuda.kernels.linear_8bit import EightBits
from headrace.backends.cuda.launch import Config, Kernel, Launch, Work
from headrace.backends.cuda.matrix import CudaMatrix
from headrace.backends.graph import LOGITS, ROWS, SEQS, Buffer, Graph, Node, Value

EARLY_ROWS = 4
"""The largest bucket whose kernels begin early: with more rows than 4 it did not pay on an H100."""

DIM_NAMES = {ROWS: "rows", SEQS: "seqs", LOGITS: "logits"}


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The inputs of a step that launches read besides the rows, in device memory: its sizes by dimension, and
    attention's items."""

    sizes: Tensor
    items: Tensor


class Tape:
    """The nodes of `graph` in one arena.

    Args:
        most: the largest size of each dimension that changes.
        dtype: of values of the model.
        outside: tensors that hold buffers which the arena does not.
        gpu: whose configs are taken. The tape's memory may lie elsewhere, to plan it.
        num_programs: programs that the device runs at once.
        partials: partial sums of rows that attention's scratch holds.
    """

    def __init__(
        self,
        graph: Graph,
        most: Mapping[int, int],
        step: StepTensors,
        dtype: torch.dtype,
        outside: Mapping[Buffer, Tensor],
        gpu: torch.device,
        num_programs: int,
        partials: int = 0,
    ) -> None:
        self.nodes, self.step, self.dtype = graph.nodes, step, dtype
        self.gpu, self.num_programs, self._partials = gpu, num_programs, partials
        self.starts_early = gpu.type == "cuda" and torch.cuda.get_device_capability(gpu) >= (9, 0)
        self._outside = dict(outside)
        for buffer in outside:
            graph.drop(buffer)
        self.device = step.sizes.device
        self.arena = torch.zeros(max(64, graph.plan(dict(most))), dtype=torch.uint8, device=self.device)
        self._sums: linear.Scratch | None = None
        self._spans: dict[Heads, spans.Scratch] = {}
        self._pairs: dict[str, Tensor] = {}
        self._most_rows, self._most_logits = most[ROWS], most[LOGITS]
        self._tops: best.Space | None = None
        self._wide = torch.zeros(0, dtype=dtype, device=self.device)
        self._rounded = torch.zeros(0), torch.zeros(0)
        self._gathering = torch.zeros(0, dtype=torch.uint8, device=self.device)

    def rows(self, buffer: Buffer, width: int, item_bytes: int, num_rows: int, column: int = 0) -> Tensor:
        """Return the first rows of a buffer [num_rows, width], a view of its columns from `column` on."""
        memory = self._outside.get(buffer)
        if memory is None:
            dtype = self.dtype if item_bytes == self.dtype.itemsize else torch.float32
            size = buffer.row_bytes * num_rows
            memory = self.arena[buffer.offset : buffer.offset + size].view(dtype).view(num_rows, -1)
        return memory[:num_rows, column : column + width]

    def value(self, value: Value, num_rows: int) -> Tensor:
        """Return the first rows of a value, a view."""
        return self.rows(value.buffer, value.width, value.item_bytes, num_rows, value.column)

    def bind(self, first: int, last: int, most: Mapping[int, int]) -> list[Work]:
        """Return the work of the nodes first ... last - 1 for a bucket of `most` rows of each dimension."""
        frame = Frame(self, most)
        work = [launch for node in self.nodes[first:last] for launch in BINDERS[node.op](frame, node)]
        if not self.starts_early or most[ROWS] > EARLY_ROWS:
            return work
        return [each.early() if isinstance(each, Launch) else each for each in work]

    def reserve(self, buckets: Sequence[Mapping[int, int]]) -> None:
        """Make the scratch of linear layers as large as the buckets, in ascending order, need it at most. Scratch that
        grows later would exist twice: bound launches keep the old one."""
        for node in self.nodes:
            if node.op == "gather":
                item_bytes = node.fields["x"].item_bytes
                self.gathering(gathers.num_bytes(node.fields["layout"], buckets[-1][node.dim], item_bytes))
        frames, linears = [Frame(self, most) for most in buckets], [node for node in self.nodes if node.op == "linear"]
        numbers, tiles = zip(*[_linear_config(frame, node)[1] for frame in frames for node in linears], strict=True)
        self.sums((max(numbers), max(tiles)))
        for node in linears:
            matrix = node.fields["matrix"]
            if isinstance(matrix.data, EightBits):
                self.rounded(matrix.num_in, matrix.data.grouped)
            elif not isinstance(matrix.data, Tensor) and buckets[-1][node.dim] > linear_codes.MOST_ROWS:
                self.wide(matrix.num_in * matrix.num_out)

    def sums(self, needed: tuple[int, int]) -> linear.Scratch:
        """Return memory for the sums of a linear layer that is computed in parts."""
        if self._sums is None or not linear.holds(self._sums, needed):
            partial, arrived = (torch.zeros(max(size, 1), device=self.device) for size in needed)
            self._sums = linear.Scratch(partial, arrived.int())
        return self._sums

    def wide(self, num_weights: int) -> Tensor:
        """Return memory for the weights of one matrix of codes in the model's dtype."""
        if self._wide.numel() < num_weights:
            self._wide = torch.zeros(num_weights, dtype=self.dtype, device=self.device)
        return self._wide

    def gathering(self, num_bytes: int) -> Tensor:
        """Return memory for the rows that ranks send and receive, which gathers use in turn."""
        self._gathering = gathers.grown(self._gathering, num_bytes)
        return self._gathering

    def rounded(self, width: int, grouped: bool) -> tuple[Tensor, Tensor]:
        """Return memory for rows of `width` numbers rounded to 8 bits, and for their scales."""
        pieces = -(-width // linear_8bit.PIECE) if grouped else 1
        codes, scales = self._rounded
        if codes.numel() < self._most_rows * width or scales.numel() < self._most_rows * pieces:
            most_codes = max(codes.numel(), self._most_rows * width)
            most_scales = max(scales.numel(), self._most_rows * pieces)
            codes = torch.zeros(most_codes, dtype=torch.uint8, device=self.device)
            self._rounded = codes, torch.zeros(most_scales, device=self.device)
        codes, scales = self._rounded
        rows = codes[: self._most_rows * width].view(torch.float8_e4m3fn).view(self._most_rows, width)
        return rows, scales[: self._most_rows * pieces].view(pieces, self._most_rows)

    def spans(self, heads: Heads) -> spans.Scratch:
        """Return memory for attention's partial sums."""
        if heads not in self._spans:
            self._spans[heads] = spans.make_scratch(self._partials, *heads[:3], self.device, heads.value_size)
        return self._spans[heads]

    def tops(self) -> best.Space:
        """Return memory for the greatest of each row of logits."""
        if self._tops is None:
            self._tops = best.make_space(self._most_logits, self.device)
        return self._tops

    def pairs(self, mixture: experts.Mixture) -> experts.Scratch:
        """Return memory for the rows of experts, which the layers of a model use in turn."""
        if not self._pairs:
            mixtures = [node.fields["mixture"] for node in self.nodes if node.op == "experts"]
            self._pairs = experts.shared_memory(self._most_rows, mixtures, self.dtype, self.device)
        return experts.cut_scratch(self._pairs, self._most_rows, mixture, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Of the arena and the scratch of all launches bound so far."""
        scratch = [self._wide, self._gathering, *self._rounded, *(self._sums or ()), *(self._tops or ())]
        scratch += self._pairs.values()
        scratch += [part for each in self._spans.values() for part in (each.sums, each.totals, each.arrived)]
        return sum(int(part.nbytes) for part in [self.arena, *scratch])

    def close(self) -> None:
        """Free the memory."""
        self._pairs, self._wide, self._gathering = {}, self._wide.new_empty(0), self._gathering.new_empty(0)
        self.arena, self._sums, self._spans, self._outside = self.arena.new_empty(0), None, {}, {}
        self._tops = None

    def dump(self) -> list[str]:
        """Return a line for each node: number, operator, dimension, widths, weights."""
        lines = []
        for i, node in enumerate(self.nodes):
            out = node.fields.get("out")
            width = f" -> {out.width}" if isinstance(out, Value) else ""
            fused = "".join(f"+{name}" for name in ("gate", "residual") if node.fields.get(name) is not None)
            weights = f"  {node.read_bytes / 1e6:.2f} MB of {node.note}" if node.read_bytes else ""
            lines.append(f"{i:4d} {node.op}{fused} [{DIM_NAMES[node.dim]}]{width}{weights}")
        return lines


@dataclass(frozen=True, slots=True)
class Frame:
    """A bucket: `most` is its largest number of rows of each dimension."""

    tape: Tape
    most: Mapping[int, int]

    @property
    def sizes(self) -> Tensor:
        return self.tape.step.sizes

    def config(self, kernel: Kernel, matrix: CudaMatrix, form: str, gated: bool, rows: int, default: Config) -> Config:
        """Return the config of a linear layer's kernel: the fastest measured one, else `default`."""
        shape = tuned.matrix_shape(matrix.num_out, matrix.num_in, form, gated)
        return tuned.choose(self.tape.gpu, kernel.name, shape, rows, kernel.configs, default)

    def many(self, node: Node, operands: tuple[Tensor, ...], form: str, kernel: Kernel, usual: Config) -> Config:
        """Return the config of `linear_ws` for a linear layer of many rows, where it is faster than `kernel`, whose
        config is `usual`. operands: those that it would load, the weights last."""
        matrix, gated, num_rows = node.fields["matrix"], node.fields["gate"] is not None, self.most[node.dim]
        weight, gpu = operands[-1], self.tape.gpu
        is_few = num_rows <= linear_ws.MOST_FEW
        if is_few or not linear_ws.can_load(*operands) or not trust.is_trusted(gpu, weight.dtype):
            return usual
        suited = [c for c in linear_ws.KERNEL.configs if linear_ws.suits(c, weight, gated, matrix.num_whole)]
        shape = tuned.matrix_shape(matrix.num_out, matrix.num_in, form, gated)
        default = linear_ws.default(weight, num_rows, gated, matrix.num_whole) or usual
        # What was measured of both kernels, by the names of their configs.
        return tuned.choose(gpu, linear_ws.KERNEL.name, shape, num_rows, [*suited, *kernel.configs], default)

    def rows(self, value: Value) -> Tensor:
        """Return a value's rows in the bucket."""
        return self.tape.value(value, self.most[value.dim])

    def buffer(self, node: Node, name: str, ld: str, width: int) -> Tensor:
        """Return the rows of a buffer that the graph wrote into a node by itself (`Graph.add`)."""
        at = node.fields[name]
        _, buffer, column = at if isinstance(at, tuple) else ("column", at, 0)
        return self.tape.rows(buffer, width, buffer.row_bytes // node.fields[ld], self.most[buffer.dim], column)


def _embedding(frame: Frame, node: Node) -> list[Launch]:
    f, out = node.fields, frame.rows(node.fields["out"])
    return [rows.embedding(f["ids"], f["table"], out, frame.sizes, len(out), f["scale"])]


def _select(frame: Frame, node: Node) -> list[Launch]:
    x, out = frame.rows(node.fields["x"]), frame.rows(node.fields["out"])
    return [rows.select(x, node.fields["rows"], out, frame.sizes, len(out))]


def _add(frame: Frame, node: Node) -> list[Launch]:
    x, y, out = (frame.buffer(node, name, f"ld_{name}", node.fields["width"]) for name in ("x", "y", "out"))
    return [rows.add(x, y, out, frame.sizes, len(out), node.dim)]


def _norm(frame: Frame, node: Node) -> list[Launch]:
    f, x, out = node.fields, frame.rows(node.fields["x"]), frame.rows(node.fields["out"])
    options = {name: f[name] for name in ("eps", "offset", "bias", "centred", "heads")}
    return [norm.norm(x, f["weight"], out, frame.sizes, node.dim, len(out), **options)]


def _elementwise(frame: Frame, node: Node) -> list[Launch]:
    f, x, out = node.fields, frame.rows(node.fields["x"]), frame.rows(node.fields["out"])
    if node.op == "softcap":
        return [rows.softcap(x, f["cap"], out, frame.sizes, len(out), node.dim)]
    if node.op == "scale":
        return [rows.scale(x, f["factor"], out, frame.sizes, len(out), node.dim)]
    operator = rows.gated if node.op == "gated" else rows.activation
    return [operator(x, f["kind"], out, frame.sizes, len(out), node.dim)]


def _multiply(frame: Frame, node: Node) -> list[Launch]:
    x, gate, out = (frame.rows(node.fields[name]) for name in ("x", "gate", "out"))
    return [rows.multiply(x, gate, node.fields["kind"], out, frame.sizes, len(out), node.dim)]


def _linear(frame: Frame, node: Node) -> list[Launch]:
    f, tape = node.fields, frame.tape
    x, out, matrix, gate = frame.rows(f["x"]), frame.rows(f["out"]), f["matrix"], f["gate"]
    num_rows, weight, gated = len(out), matrix.data, gate is not None
    options: dict[str, Any] = {
        "num_programs": tape.num_programs,
        "bias": matrix.bias,
        "residual": None if f.get("residual") is None else frame.buffer(node, "residual", "ld_res", out.shape[1]),
        "activation": gate,
        "gated": gated,
        "num_whole": matrix.num_whole,
    }
    config, needed = _linear_config(frame, node)
    options |= {"config": config, "scratch": tape.sums(needed) if any(needed) else None}
    step = frame.sizes, node.dim, num_rows
    product = linear_ws.linear_ws if linear_ws.is_config(config) else linear.linear
    if isinstance(weight, EightBits):
        # Rows are rounded, and multiplied with weights of the same type.
        codes, scales = tape.rounded(matrix.num_in, weight.grouped)
        codes = codes[:num_rows]
        rounded = linear_8bit.round_rows(x, codes, scales, *step, grouped=weight.grouped)
        if linear_ws.is_config(config):
            options |= {"x_scales": scales, "w_scales": weight.scales}
            return [rounded, linear_ws.linear_ws(codes, weight.codes, out, *step, **options)]
        return [rounded, linear_8bit.linear_8bit(codes, scales, weight.codes, weight.scales, out, *step, **options)]
    if isinstance(weight, Tensor):
        return [product(x, weight, out, *step, **options)]
    wide = tape.wide(matrix.num_in * matrix.num_out) if num_rows > linear_codes.MOST_ROWS else None
    return linear_codes.linear_codes(x, weight, out, *step, wide=wide, product=product, **options)


def _linear_config(frame: Frame, node: Node) -> tuple[Config, tuple[int, int]]:
    """Return the config of a linear layer, and how many numbers of scratch it takes for the sums of spans."""
    matrix, num_rows, gated = node.fields["matrix"], frame.most[node.dim], node.fields["gate"] is not None
    weight, dtype, num_whole = matrix.data, frame.tape.dtype, matrix.num_whole
    if isinstance(weight, EightBits):
        form = tuned.dtype_name(weight.codes.dtype) + "-128" * weight.grouped
        config = linear_8bit.default(weight.codes, num_rows, gated, weight.grouped, num_whole)
        config = frame.config(linear_8bit.KERNEL, matrix, form, gated, num_rows, config)
        if not weight.grouped:
            config = frame.many(node, (weight.codes,), form, linear_8bit.KERNEL, config)
        return config, linear.scratch_numbers(weight.codes, num_rows, config, num_whole)
    if not isinstance(weight, Tensor) and num_rows <= linear_codes.MOST_ROWS:
        config = linear_codes.default(weight, num_rows, gated)
        config = frame.config(linear_codes.KERNEL, matrix, tuned.scheme_key(matrix.scheme), gated, num_rows, config)
        return config, linear_codes.scratch_numbers(weight, num_rows, config, num_whole)
    plain = torch.empty(matrix.num_out, matrix.num_in, dtype=dtype, device="meta")
    config, form = linear.default(plain, num_rows, gated, num_whole), tuned.dtype_name(dtype)
    config = frame.config(linear.KERNEL, matrix, form, gated, num_rows, config)
    config = frame.many(node, (frame.rows(node.fields["x"]), plain), form, linear.KERNEL, config)
    return config, linear.scratch_numbers(plain, num_rows, config, num_whole)


def _rope_store(frame: Frame, node: Node) -> list[Launch]:
    f, x = node.fields, frame.rows(node.fields["x"])
    step = f["rows"]
    copies = (step.copy_begin, step.copy_slots)
    return [
        rope_store.rope_store(
            x,
            f["heads"],
            f["cache"],
            step.slots[f["cache"].kind],
            step.rope_rows,
            frame.sizes,
            len(x),
            f["form"],
            copies=copies,
        )
    ]


def _attention(frame: Frame, node: Node) -> list[Launch]:
    f, tape = node.fields, frame.tape
    x, out, heads = frame.rows(f["x"]), frame.rows(f["out"]), f["heads"]
    launches = paged.attention(
        x,
        out,
        f["cache"],
        f["rows"].blocks[f["cache"].kind],
        tape.step.items,
        tape.spans(heads),
        heads=heads.num_heads,
        kv_heads=heads.num_kv_heads,
        scale=f["scoring"].scale,
        window=f["scoring"].reach,
        softcap=f["scoring"].softcap,
        sinks=f["scoring"].sinks,
        ahead=f["scoring"].ahead,
        programs=2 * tape.num_programs,
        chosen=f["chosen"],
    )
    # No chunk of so few rows takes a large tile.
    return launches[:1] if len(x) <= spans.SPLIT_ROWS and not f["scoring"].ahead else launches


def _finite(frame: Frame, node: Node) -> list[Launch]:
    x = frame.rows(node.fields["x"])
    return [rows.finite(x, node.fields["flags"], frame.sizes, len(x), node.dim)]


def _best(frame: Frame, node: Node) -> list[Launch]:
    f = node.fields
    logits, space = frame.rows(f["x"]), frame.tape.tops()
    return [best.best(logits, space, f["ids"], f["values"], f["finite"], frame.sizes, node.dim)]


def _gather(frame: Frame, node: Node) -> list[Gather]:
    f, x, out = node.fields, frame.rows(node.fields["x"]), frame.rows(node.fields["out"])
    memory = frame.tape.gathering(gathers.num_bytes(f["layout"], len(out), x.element_size()))
    return [Gather(f["exchange"], f["layout"], x, out, memory)]


BINDERS: dict[str, Callable[[Frame, Node], Sequence[Work]]] = {
    "embedding": _embedding,
    "select": _select,
    "add": _add,
    "norm": _norm,
    "softcap": _elementwise,
    "activation": _elementwise,
    "gated": _elementwise,
    "multiply": _multiply,
    "scale": _elementwise,
    "linear": _linear,
    "rope_store": _rope_store,
    "attention": _attention,
    "gather": _gather,
    "finite": _finite,
    "best": _best,
    **binders_heads.BINDERS,
    **recurrent.BINDERS,
    **binders_experts.BINDERS,
}
