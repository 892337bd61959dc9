"""The determinism law on layers with a state: the bits of a row depend on its sequence up to it alone, on the reference
and on every ISA; and the reference equals the plain formulas in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.backends.native import fields, pack
from headrace.backends.states import DeltaInputs, ScanInputs, StateHeads
from headrace.backends.step import Chunks
from headrace.backends.torch_ref.batch import ForwardBatch, make_forward_batch
from headrace.backends.torch_ref.ops import RefOps

_native = pytest.importorskip("headrace._native", exc_type=ImportError)

Floats = NDArray[np.float32]
OPS = RefOps(torch.device("cpu"), torch.float32)
ISAS: list[str] = _native.isas()
LENGTH, NUM_SEQS = 41, 3
HEADS = StateHeads(num_heads=6, num_key_heads=3, key_dim=20, value_dim=72)
CONV_SIZE, CONV_WIDTH = 4, 83


class Problem(NamedTuple):
    """inputs: numbers [LENGTH, width] of each sequence by name. constants: the layer's. state: of a slot."""

    op: str
    inputs: list[dict[str, Floats]]
    constants: dict[str, Floats]
    state: tuple[int, ...]
    width: int
    tiled: bool = False


def normals(rng: np.random.Generator, *shape: int, spread: float = 1.0, shift: float = 0.0) -> Floats:
    return (rng.standard_normal(shape) * spread + shift).astype(np.float32)


def problem(op: str, by_channel: bool = False) -> Problem:
    rng = np.random.default_rng(7)
    keys, values, heads = 3 * HEADS.key_dim, 6 * HEADS.value_dim, HEADS.num_heads
    inputs: list[dict[str, Floats]] = []
    for _ in range(NUM_SEQS):
        if op == "conv":
            inputs.append({"x": normals(rng, LENGTH, CONV_WIDTH)})
        elif op == "delta":
            decays = heads * HEADS.key_dim if by_channel else heads
            inputs.append({
                "query": normals(rng, LENGTH, keys),
                "key": normals(rng, LENGTH, keys, spread=HEADS.key_dim**-0.5),
                "value": normals(rng, LENGTH, values),
                "decay": -np.abs(normals(rng, LENGTH, decays, spread=0.2)),
                "beta": normals(rng, LENGTH, heads, spread=0.1, shift=0.5),
            })  # fmt: skip
        else:
            x, b, c = normals(rng, LENGTH, values), normals(rng, LENGTH, keys), normals(rng, LENGTH, keys)
            inputs.append({"x": x, "b": b, "c": c, "dt": np.abs(normals(rng, LENGTH, heads, spread=0.2))})
    if op == "conv":
        constants = {"weight": normals(rng, CONV_SIZE, CONV_WIDTH), "bias": normals(rng, CONV_WIDTH)}
        return Problem(op, inputs, constants, (CONV_SIZE - 1, CONV_WIDTH), CONV_WIDTH)
    constants = {"a": -np.abs(normals(rng, heads)), "d": normals(rng, heads)} if op == "scan" else {}
    return Problem(op, inputs, constants, (heads, HEADS.key_dim, HEADS.value_dim), values)


class Piece(NamedTuple):
    """Rows begin ... end - 1 of a sequence, from slot `read` on; `writes`: slots by row of the sequence."""

    seq: int
    begin: int
    end: int
    read: int
    writes: dict[int, int]


Compute = Callable[[Problem, list[Piece], Floats], Floats]


def gathered(p: Problem, pieces: list[Piece]) -> tuple[dict[str, Floats], Chunks]:
    """The inputs of a step, one piece behind the other."""
    x = {name: np.concatenate([p.inputs[i.seq][name][i.begin : i.end] for i in pieces]) for name in p.inputs[0]}
    chunks, writes, row = Chunks([], [], [], states_in=[i.read for i in pieces]), [], 0
    for piece in pieces:
        writes += [(row + at - piece.begin, slot) for at, slot in sorted(piece.writes.items())]
        row += piece.end - piece.begin
        chunks.starts.append(piece.begin)
        chunks.token_ids.append([0] * (piece.end - piece.begin))
        chunks.tables.append([0] * LENGTH)
    return x, chunks._replace(states_out=writes)


def reference(p: Problem, pieces: list[Piece], state: Floats) -> Floats:
    arrays, chunks = gathered(p, pieces)
    rows = make_forward_batch(chunks, 1, torch.device("cpu"))
    x = {name: torch.from_numpy(values) for name, values in (arrays | p.constants).items()}
    return run_ops(p, x, rows, torch.from_numpy(state)).numpy()


def run_ops(p: Problem, x: dict[str, torch.Tensor], rows: ForwardBatch, state: torch.Tensor) -> torch.Tensor:
    op, heads = p.op, HEADS._replace(tiled=p.tiled)
    if op == "conv":
        return OPS.conv(x["x"], x["weight"], x["bias"], "silu", rows, state)
    if op == "delta":
        return OPS.delta(
            DeltaInputs(*(x[name] for name in DeltaInputs._fields)), heads, rows, state, HEADS.key_dim**-0.5
        )
    return OPS.scan(ScanInputs(*(x[name] for name in ScanInputs._fields)), heads, rows, state)


def native(isa: str) -> Compute:
    def compute(p: Problem, pieces: list[Piece], state: Floats) -> Floats:
        arrays, chunks = gathered(p, pieces)
        lens = [len(ids) for ids in chunks.token_ids]
        rows = sum(lens)
        out = np.full((rows, p.width), np.nan, np.float32)
        state_out = np.full(rows, -1, np.int32)
        for row, slot in chunks.states_out:
            state_out[row] = slot
        values: dict[str, Any] = arrays | p.constants | {
            "state": state, "row_begin": np.cumsum([0, *lens]).astype(np.int32),
            "state_in": np.array(chunks.states_in, np.int32), "state_out": state_out, "out": out, "ld_out": p.width,
            "width": p.width, "size": CONV_SIZE, "kind": 0, "heads": HEADS.num_heads, "key_heads": HEADS.num_key_heads,
            "tiled": int(p.tiled),
            "key_dim": HEADS.key_dim, "value_dim": HEADS.value_dim, "scale": HEADS.key_dim**-0.5,
        }  # fmt: skip
        values |= {f"ld_{name}": array.shape[1] for name, array in arrays.items()}
        if "decay" in arrays:
            values["decay_width"] = arrays["decay"].shape[1] // HEADS.num_heads
        args = {name: values.get(name, 0) for name in fields()[p.op][1]}
        raw = {n: v.ctypes.data if isinstance(v, np.ndarray) else v for n, v in args.items()}
        raw = {n: float(v) if fields()[p.op][1][n] == "f" else v for n, v in raw.items()}
        tape = _native.Tape(isa)
        tape.add(p.op, pack(p.op, **raw))
        tape.run([rows, len(pieces), rows], 0)
        return out

    return compute


COMPUTES: dict[str, Compute] = {"torch_ref": reference} | {isa: native(isa) for isa in ISAS}
PROBLEMS = {
    "conv": problem("conv"), "delta": problem("delta"), "delta by channel": problem("delta", by_channel=True),
    "scan": problem("scan"), "delta in tiles": problem("delta")._replace(tiled=True),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    _native.set_num_threads(0)


def set_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    _native.set_num_threads(num_threads)


def alone(compute: Compute, p: Problem, seq: int, size: int) -> tuple[Floats, Floats]:
    """A sequence in chunks of `size`, its state always in slot 1: all outputs, and the state at the end."""
    state = np.full((2, *p.state), np.nan, np.float32)
    outs = []
    for begin in range(0, LENGTH, size):
        end = min(begin + size, LENGTH)
        outs.append(compute(p, [Piece(seq, begin, end, 1 if begin else -1, {end - 1: 1})], state))
    return np.concatenate(outs), state[1]


def same(a: Floats, b: Floats) -> bool:
    return bool((a.view(np.uint32) == b.view(np.uint32)).all())


@pytest.fixture(params=PROBLEMS)
def case(request: pytest.FixtureRequest) -> Problem:
    return PROBLEMS[request.param]


@pytest.fixture(params=COMPUTES)
def compute(request: pytest.FixtureRequest) -> Compute:
    return COMPUTES[request.param]


def test_I_13_chunks_and_threads_change_no_bit(case: Problem, compute: Compute) -> None:
    set_threads(1)
    whole, last = alone(compute, case, 0, LENGTH)
    for size, num_threads in ((1, 1), (7, 1), (7, 2), (64, 2)):
        set_threads(num_threads)
        rows, state = alone(compute, case, 0, size)
        assert same(rows, whole), (size, num_threads)
        assert same(state, last), (size, num_threads)


def test_I_13_company_changes_no_bit(case: Problem, compute: Compute) -> None:
    """Three sequences of different lengths in one step, then row by row together, each row's state in a slot anew."""
    set_threads(2)
    state = np.full((8, *case.state), np.nan, np.float32)
    lens = [5, 1, 17]
    pieces = [Piece(seq, 0, n, -1, {n - 1: seq}) for seq, n in enumerate(lens)]
    parts = np.split(compute(case, pieces, state), np.cumsum(lens)[:-1])
    for turn in range(4):
        slots = [(turn % 2) * 3 + seq for seq in range(3)], [((turn + 1) % 2) * 3 + seq for seq in range(3)]
        pieces = [Piece(seq, n, n + 1, slots[0][seq], {n: slots[1][seq]}) for seq, n in enumerate(lens)]
        rows = compute(case, pieces[::-1], state)[::-1]
        parts = [np.concatenate([before, row[None]]) for before, row in zip(parts, rows, strict=True)]
        lens = [n + 1 for n in lens]
    for seq, rows in enumerate(parts):
        assert same(rows, alone(compute, case, seq, LENGTH)[0][: len(rows)])


def test_a_state_is_read_where_it_was_published(case: Problem, compute: Compute) -> None:
    """Rows 9 and 12 of a chunk leave their states in slots of their own; two sequences go on from one of them at once,
    and the slot that they read stays as it is."""
    set_threads(1)
    state = np.full((5, *case.state), np.nan, np.float32)
    compute(case, [Piece(0, 0, 20, -1, {9: 3, 12: 4, 19: 0})], state)
    published = state[3].copy()
    pieces = [Piece(0, 10, 16, 3, {15: 1}), Piece(0, 10, 11, 3, {10: 2})]
    rows = compute(case, pieces, state)
    expected = alone(compute, case, 0, LENGTH)[0]
    assert same(rows, np.concatenate([expected[10:16], expected[10:11]]))
    assert same(state[3], published)
    assert same(compute(case, [Piece(0, 13, 14, 4, {})], state), expected[13:14])


def test_states_of_each_row_may_begin_in_the_slot_that_is_read(case: Problem, compute: Compute) -> None:
    state = np.full((4, *case.state), np.nan, np.float32)
    compute(case, [Piece(0, 0, 8, -1, {7: 0})], state)
    rows = compute(case, [Piece(0, 8, 11, 0, {8: 0, 9: 1, 10: 2})], state)
    expected = alone(compute, case, 0, LENGTH)[0]
    assert same(rows, expected[8:11])
    assert same(compute(case, [Piece(0, 9, 10, 0, {})], state), expected[9:10])


def test_every_isa_gives_the_same_bits(case: Problem) -> None:
    expected = alone(COMPUTES["scalar"], case, 0, LENGTH)
    for isa in ISAS[1:]:
        assert all(same(a, b) for a, b in zip(alone(COMPUTES[isa], case, 0, LENGTH), expected, strict=True)), isa


def test_all_equal_the_plain_formulas(case: Problem, compute: Compute) -> None:
    expected = plain(case, 0)
    rows, _ = alone(compute, case, 0, 7)
    assert np.abs(rows - expected).max() <= 2e-6 * np.abs(expected).max()


def plain(p: Problem, seq: int) -> NDArray[np.float64]:
    """All rows of a sequence, in float64 as the papers have the formulas."""
    x = {name: values.astype(np.float64) for name, values in (p.inputs[seq] | p.constants).items()}
    if p.op == "conv":
        past = np.concatenate([np.zeros((CONV_SIZE - 1, p.width)), x["x"]])
        y = sum(x["weight"][k] * past[k : k + LENGTH] for k in range(CONV_SIZE)) + x["bias"]
        conv: NDArray[np.float64] = y / (1 + np.exp(-y))
        return conv
    times = (lambda k: np.tile(k, (1, 2, 1))) if p.tiled else (lambda k: np.repeat(k, 2, axis=1))
    names = ("key", "query") if p.op == "delta" else ("b", "c")
    key, query = (times(x[n].reshape(LENGTH, HEADS.num_key_heads, -1)) for n in names)
    state, out = np.zeros(p.state), np.empty((LENGTH, HEADS.num_heads, HEADS.value_dim))
    for t in range(LENGTH):
        if p.op == "delta":
            value = x["value"][t].reshape(HEADS.num_heads, -1)
            state = state * np.exp(x["decay"][t]).reshape(HEADS.num_heads, -1, 1)
            u = (value - np.einsum("hd,hdv->hv", key[t], state)) * x["beta"][t][:, None]
            state = state + np.einsum("hd,hv->hdv", key[t], u)
            out[t] = np.einsum("hd,hdv->hv", query[t], state) * HEADS.key_dim**-0.5
        else:
            value, dt = x["x"][t].reshape(HEADS.num_heads, -1), x["dt"][t][:, None, None]
            state = state * np.exp(dt * x["a"][:, None, None]) + dt * np.einsum("hd,hv->hdv", key[t], value)
            out[t] = np.einsum("hd,hdv->hv", query[t], state) + x["d"][:, None] * value
    return out.reshape(LENGTH, -1)


def test_I_13_control_a_state_that_restarts_with_the_chunk_is_noticed(case: Problem, compute: Compute) -> None:
    """As a form in pieces would be that forgets what came before: chunks change bits, and the comparison sees it."""

    def forgetful(p: Problem, pieces: list[Piece], state: Floats) -> Floats:
        return compute(p, [piece._replace(read=-1) for piece in pieces], state)

    assert not same(alone(forgetful, case, 0, 7)[0], alone(compute, case, 0, LENGTH)[0])


def test_I_13_control_a_sum_over_the_whole_chunk_is_noticed() -> None:
    """The delta rule by one product over a chunk, as fast prefills have it: close, but not the same bits."""
    case = PROBLEMS["scan"]

    def in_one_product(p: Problem, pieces: list[Piece], state: Floats) -> Floats:
        (piece,) = pieces
        n, heads = piece.end - piece.begin, HEADS.num_heads
        x = {name: torch.from_numpy(values[piece.begin : piece.end]) for name, values in p.inputs[piece.seq].items()}
        a, d = torch.from_numpy(p.constants["a"]), torch.from_numpy(p.constants["d"])
        b, c = (x[k].view(n, 3, -1).repeat_interleave(2, 1) for k in "bc")
        value, logs = x["x"].view(n, heads, -1), (x["dt"] * a).cumsum(0)
        before = torch.zeros(p.state) if piece.read < 0 else torch.from_numpy(state[piece.read].copy())
        decay = (logs[:, None] - logs[None]).permute(2, 0, 1).exp().tril()
        weights = torch.einsum("thd,shd->hts", c, b) * decay
        u = value * x["dt"].unsqueeze(2)
        out = torch.einsum("hts,shv->thv", weights, u)
        out = out + torch.einsum("thd,hdv->thv", c, before) * logs.exp().unsqueeze(2) + d[:, None] * value
        left = torch.exp(logs[-1] - logs).unsqueeze(2)
        after = before * logs[-1].exp()[:, None, None] + torch.einsum("shd,shv->hdv", b * left, u)
        for slot in piece.writes.values():
            state[slot] = after.numpy()
        return out.flatten(1).numpy()

    whole, pieces = alone(in_one_product, case, 0, LENGTH)[0], alone(in_one_product, case, 0, 7)[0]
    assert np.abs(whole - plain(case, 0)).max() < 1e-4
    assert not same(whole, pieces)


def test_softplus_is_that_of_torch_on_every_isa() -> None:
    x = np.linspace(-30, 30, 400, dtype=np.float32).reshape(4, 100)
    x[3, -1] = np.inf
    bias, factor = np.full(100, 0.5, np.float32), np.linspace(-2, 2, 100, dtype=np.float32)
    expected = (np.logaddexp(0, x.astype(np.float64) + 0.5).clip(0.01, 20) * factor).astype(np.float32)
    actual = {
        "torch_ref": OPS.softplus(torch.from_numpy(x), torch.from_numpy(bias), torch.from_numpy(factor), 0.01, 20)
    }
    results = {name: y.numpy() for name, y in actual.items()}
    for isa in ISAS:
        out = np.empty_like(x)
        values = {"x": x, "ld_x": 100, "width": 100, "bias": bias, "factor": factor, "out": out, "ld_out": 100}
        raw = {name: v.ctypes.data if isinstance(v, np.ndarray) else v for name, v in values.items()}
        tape = _native.Tape(isa)
        tape.add("softplus", pack("softplus", dim=0, low=0.01, high=20.0, **raw))
        tape.run([4, 1, 1], 1)
        results[isa] = out
    assert all(same(results[isa], results["scalar"]) for isa in ISAS)
    for name, y in results.items():
        assert np.abs(y[:3] - expected[:3]).max() < 2e-6 * np.abs(expected[:3]).max(), name
    assert not any(np.isfinite(y[3, -1]) for y in results.values())  # the bound does not hide it
