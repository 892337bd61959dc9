"""Layers with a state: the kernels against their twins, which are torch_ref's operators; the same bits in one chunk, in
pieces and row by row, alone and in company; and states in the slots that a step names, and in no others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from tests.support.cubin import CAPABILITIES, compiled, faults
from tests.support.interpreter import run_interpreted
from tests.support.kernels import assert_close, backwards, poisoned, written
from torch import Tensor

from headrace.backends.cuda.kernels.conv import CONV, conv
from headrace.backends.cuda.kernels.recur import StateRows, delta, scan
from headrace.backends.cuda.kernels.softplus import softplus
from headrace.backends.cuda.launch import Launch
from headrace.backends.states import DeltaInputs, ScanInputs, StateHeads

LENGTH, SLOTS = 7, 7
CASES = "conv", "short conv", "delta", "delta by channel", "scan", "scan without d"
HEADS = StateHeads(num_heads=2, num_key_heads=1, key_dim=5, value_dim=6)
WIDE = StateHeads(num_heads=1, num_key_heads=1, key_dim=37, value_dim=11)
"""A key in several parts, the last of them short."""
TILED = StateHeads(num_heads=4, num_key_heads=2, key_dim=3, value_dim=3, tiled=True)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True)
class Piece:
    """Rows begin ... end - 1 of sequence `seq`, from the state in slot `read` on; `writes`: slots by row."""

    seq: int
    begin: int
    end: int
    read: int
    writes: Mapping[int, int]


class Case:
    """An operator, with the inputs of two sequences: [LENGTH, width] of each by name."""

    def __init__(self, name: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.op, self.dtype = "conv" if "conv" in name else name.split()[0], dtype
        self.heads = heads = TILED if "channel" in name else WIDE if "without" in name else HEADS
        self.constants: dict[str, Tensor] = {}
        self.kind: Literal["silu", "identity"] = "identity" if "short" in name else "silu"
        if self.op == "conv":
            size, self.width = 2 if "short" in name else 4, 37
            self.state: tuple[int, ...] = (size - 1, self.width)
            widths = {"x": self.width}
            self.constants["weight"] = random(size, self.width, seed=1, dtype=dtype)
            if "short" not in name:
                self.constants["bias"] = random(self.width, seed=2, dtype=dtype)
        else:
            keys, self.width = heads.num_key_heads * heads.key_dim, heads.num_heads * heads.value_dim
            self.state = (heads.num_heads, heads.key_dim, heads.value_dim)
            widths = {"query": keys, "key": keys, "value": self.width}
        self.inputs = [
            {each: random(LENGTH, n, seed=10 * seq + i, dtype=dtype) for i, (each, n) in enumerate(widths.items())}
            for seq in range(2)
        ]
        for seq, inputs in enumerate(self.inputs):
            if self.op == "delta":
                decays = heads.num_heads * (heads.key_dim if "channel" in name else 1)
                inputs["decay"] = -random(LENGTH, decays, seed=20 + seq).abs()
                inputs["beta"] = random(LENGTH, heads.num_heads, seed=30 + seq).sigmoid().to(dtype)
            elif self.op == "scan":
                inputs["decay"] = random(LENGTH, heads.num_heads, seed=20 + seq).abs()
        if self.op == "scan":
            self.constants["a"] = -random(heads.num_heads, seed=1).abs()
            if "without" not in name:
                self.constants["d"] = random(heads.num_heads, seed=2)

    def outputs(self, pieces: Sequence[Piece]) -> dict[str, Tensor]:
        num_rows = sum(piece.end - piece.begin for piece in pieces)
        out = poisoned(num_rows + 2, self.width, dtype=self.dtype)
        return {"out": out, "state": random(SLOTS, *self.state, seed=5)}

    def make(self, out: Mapping[str, Tensor], pieces: Sequence[Piece], most: int = 5) -> list[Launch]:
        """A step of the pieces, in a bucket of `most` chunks, over inputs that lie among other columns."""
        x: dict[str, Tensor] = {}
        for name in self.inputs[0]:
            parts = [self.inputs[each.seq][name][each.begin : each.end] for each in pieces]
            rows = torch.cat([*parts, poisoned(2, parts[0].shape[1], dtype=parts[0].dtype)])
            x[name] = torch.cat([poisoned(len(rows), 3, dtype=rows.dtype), rows], 1)[:, 3:]
        lens = [piece.end - piece.begin for piece in pieces]
        begins = [sum(lens[:i]) for i in range(len(lens) + 1)]
        slots = torch.full((sum(lens) + 2,), -1, dtype=torch.int32)
        for begin, piece in zip(begins, pieces, strict=False):
            for row, slot in piece.writes.items():
                slots[begin + row - piece.begin] = slot
        slots[-2:] = 4  # rows beyond the step's
        unused = most - len(lens)
        reads = [piece.read for piece in pieces]
        counts = ints(sum(lens), len(lens), 0)
        step = StateRows(counts, ints(*begins, *[99] * unused), ints(*reads, *[3] * unused), slots)
        c, y, state = self.constants, out["out"], out["state"]
        if self.op == "conv":
            return conv(x["x"], c["weight"], c.get("bias"), self.kind, y, state, step, len(y), most)
        query, key, value, decay = (x[name] for name in ("query", "key", "value", "decay"))
        if self.op == "delta":
            return [delta(DeltaInputs(query, key, value, decay, x["beta"]), self.heads, y, state, step, most, 0.4)]
        return [scan(ScanInputs(value, key, query, decay, c["a"], c.get("d")), self.heads, y, state, step, most)]

    def run(self, pieces: Sequence[Piece], state: Tensor) -> Tensor:
        """Compute a step in the interpreter; `state` is written in place."""
        out = written(lambda out: self.make(out, pieces), self.outputs(pieces) | {"state": state}, "interpreted")
        state.copy_(out["state"])
        return out["out"][:-2]

    def alone(self, seq: int, size: int) -> tuple[Tensor, Tensor]:
        """A sequence in chunks of `size`, its state always in slot 1: all outputs, and the state at the end."""
        state, outs = poisoned(SLOTS, *self.state, dtype=torch.float32), []
        for begin in range(0, LENGTH, size):
            end = min(begin + size, LENGTH)
            outs.append(self.run([Piece(seq, begin, end, 1 if begin else -1, {end - 1: 1})], state))
        return torch.cat(outs), state[1]


PIECES = (
    Piece(0, 1, 7, 2, {2: 0, 6: 1}),
    Piece(1, 0, 1, -1, {0: 5}),
    Piece(0, 4, 6, 2, {}),
    Piece(1, 3, 6, 4, {3: 4, 4: 3, 5: 6}),  # the first of them is the slot that is read
)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in CASES), ("conv", torch.float32), ("delta", torch.float32)]
)
def test_the_kernels_write_what_their_twins_write(name: str, dtype: torch.dtype) -> None:
    case = Case(name, dtype)
    outputs = case.outputs(PIECES)
    twin = written(lambda out: case.make(out, PIECES), outputs)
    out = written(lambda out: case.make(out, PIECES), outputs, "interpreted", backwards)
    for each in outputs:
        assert_close(out[each], twin[each])
    assert out["out"][-2:].isnan().all(), "a row beyond the step's rows was written"
    assert out["out"][:-2].isfinite().all()
    same = [slot for slot in range(SLOTS) if torch.equal(out["state"][slot], outputs["state"][slot])]
    assert same == [2], "the only slot that the step does not write"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_I_13_chunks_and_company_change_no_bit(name: str) -> None:
    case = Case(name)
    whole, last = case.alone(0, LENGTH)
    for size in (1, 3):
        rows, state = case.alone(0, size)
        assert torch.equal(rows, whole)
        assert torch.equal(state, last)
    # Behind and before another sequence; then two sequences go on from one published state.
    state = poisoned(SLOTS, *case.state, dtype=torch.float32)
    rows = case.run([Piece(1, 0, 2, -1, {}), Piece(0, 0, 5, -1, {3: 3, 4: 0})], state)
    assert torch.equal(rows[2:], whole[:5])
    rows = case.run([Piece(0, 5, 6, 0, {}), Piece(0, 4, 7, 3, {6: 1}), Piece(0, 4, 5, 3, {4: 2})], state)
    assert torch.equal(rows, torch.cat([whole[5:6], whole[4:7], whole[4:5]]))
    assert torch.equal(state[1], last)


def test_I_13_control_a_chunk_that_begins_with_zeros_is_noticed() -> None:
    for name in ("conv", "delta", "scan"):
        case = Case(name)
        rows = case.run([Piece(0, 0, 4, -1, {}), Piece(0, 2, 4, -1, {})], random(SLOTS, *case.state, seed=1))
        assert not torch.equal(rows[4:], rows[2:4]), name


def test_tiles_of_a_convolution_change_no_bit() -> None:
    case = Case("conv")
    bits = []
    for config in CONV.configs:
        out = case.outputs(PIECES)
        launch = case.make(out, PIECES)[0]
        rows = len(out["out"])
        grid = -(-rows // config.tiles["ROWS"]), -(-case.width // config.tiles["COLUMNS"])
        run_interpreted(Launch(launch.kernel, grid, launch.arguments, config))
        bits.append(out["out"][:-2])
    assert torch.equal(bits[0], bits[1])
    assert bits[0].isfinite().all()


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_softplus_is_exact_and_hides_no_infinity(mode: str) -> None:
    x = torch.linspace(-30, 30, 300).view(3, 100)
    x[2, -1] = torch.inf
    bias, factor = torch.full((100,), 0.5), torch.linspace(-2, 2, 100)

    def make(out: Mapping[str, Tensor], low: float = 0.0, high: float = math.inf) -> Sequence[Launch]:
        return [softplus(x, bias, factor, out["out"], ints(3, 0, 0), 4, low=low, high=high)]

    outputs = {"out": poisoned(4, 100, dtype=torch.float32)}
    out = written(make, outputs, mode)["out"]
    exact = torch.logaddexp(torch.zeros(()), x.double() + 0.5) * factor
    error = (out[:3].double() / exact - 1).abs()
    assert error.flatten()[:-1].max() < 1e-6
    assert out[3].isnan().all()
    bounded = written(lambda out: make(out, 0.01, 20.0), outputs, mode)["out"]
    assert_close(bounded[:2], torch.logaddexp(torch.zeros(()), x[:2].double() + 0.5).clamp(0.01, 20) * factor)
    assert not bounded[2, -1].isfinite()


def launches(device: str = "meta") -> list[Launch]:
    """Qwen3-Next, Nemotron-H, Falcon-H1, LFM2, and models with small and with odd heads."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def of(*sizes: int) -> StateRows:
        return StateRows(*(empty(size, dtype=torch.int32) for size in sizes))

    listed, step = [], of(3, 65, 64, 256)
    for dtype in (torch.bfloat16, torch.float32):
        for size, width in ((3, 2048), (4, 8192), (4, 100)):
            x, past = empty(256, width, dtype=dtype), empty(16, size - 1, width)
            for num_rows in (8, 256):
                bias = empty(width) if size == 4 else None
                listed += conv(x, empty(size, width), bias, "silu", x.clone(), past, step, num_rows, 64)
        for heads in (StateHeads(32, 16, 128, 128), StateHeads(8, 4, 20, 12)):
            keys, values = heads.num_key_heads * heads.key_dim, heads.num_heads * heads.value_dim
            query, value, beta = (empty(256, width, dtype=dtype) for width in (keys, values, heads.num_heads))
            memory = empty(16, heads.num_heads, heads.key_dim, heads.value_dim)
            inputs = DeltaInputs(query, query, value, empty(256, heads.num_heads), beta)
            listed.append(delta(inputs, heads, value.clone(), memory, step, 64, 0.1))
        for heads in (StateHeads(128, 8, 128, 64), StateHeads(32, 1, 256, 64), StateHeads(8, 2, 20, 12)):
            keys, values = heads.num_key_heads * heads.key_dim, heads.num_heads * heads.value_dim
            query, value, steps = empty(256, keys, dtype=dtype), empty(256, values, dtype=dtype), empty(heads.num_heads)
            memory, dt = empty(16, heads.num_heads, heads.key_dim, heads.value_dim), empty(256, heads.num_heads)
            of_scan = ScanInputs(value, query, query, dt, steps, steps)
            listed.append(scan(of_scan, heads, value.clone(), memory, step, 64))
        x, numbers = empty(256, 128, dtype=dtype), empty(128)
        listed.append(softplus(x, numbers, numbers, empty(256, 128), step.sizes, 256))
    return listed


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(n, marks=pytest.mark.slow) for n in CAPABILITIES if n != 90)]
)
def test_the_kernels_compile_without_a_stack(capability: int) -> None:
    first = {launch.kernel.name + str(launch.arguments.get("DELTA")): launch for launch in launches()[::-1]}
    assert len(first) == 5
    assert not [fault for launch in first.values() for fault in faults(compiled(launch, capability))]
