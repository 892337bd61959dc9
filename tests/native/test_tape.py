"""The tape: records are checked when they are added, skipped where they have no rows, and see what others wrote."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from headrace.backends.native import fields, op_code, pack, record

ROWS, SEQS, LOGITS, PAIRS = range(4)
SCALE: dict[str, float] = {
    "dim": 0, "x": 0, "ld_x": 1, "width": 1, "factor": 1.0, "residual": 0, "ld_res": 0, "out": 0, "ld_out": 1,
}  # fmt: skip


def add(tape: Any, x: np.ndarray, y: np.ndarray, out: np.ndarray, dim: int = ROWS) -> int:
    width = x.shape[1]
    return record(
        tape, "add", dim=dim, x=x.ctypes.data, ld_x=width, y=y.ctypes.data, ld_y=width, width=width,
        out=out.ctypes.data, ld_out=width,
    )  # fmt: skip


@pytest.fixture
def numbers() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((9, 37)).astype(np.float32)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_records_run_in_order(native: ModuleType, numbers: np.ndarray, num_threads: int) -> None:
    tape = native.Tape()
    out = np.zeros_like(numbers)
    assert [add(tape, numbers, out, out) for _ in range(50)] == list(range(50))
    assert len(tape) == 50
    assert tape.ops() == ["add"] * 50
    expected = np.zeros_like(numbers)
    for _ in range(50):
        expected += numbers
    tape.run([9, 0, 0], num_threads)
    assert np.array_equal(out, expected)
    tape.run_range(10, 12, [9, 0, 0], num_threads)
    assert np.array_equal(out, expected + numbers + numbers)


def test_one_tape_serves_any_number_of_rows(native: ModuleType, numbers: np.ndarray) -> None:
    tape = native.Tape()
    out = np.zeros_like(numbers)
    add(tape, numbers, numbers, out)
    for rows in (0, 1, 5, 9):
        out[:] = 0
        tape.run([rows, 0, 0])
        assert np.array_equal(out[:rows], 2 * numbers[:rows])
        assert not out[rows:].any()


def test_a_record_without_rows_is_left_out(native: ModuleType, numbers: np.ndarray) -> None:
    tape = native.Tape()
    out, other = np.zeros_like(numbers), np.zeros_like(numbers)
    add(tape, numbers, numbers, out, SEQS)
    add(tape, numbers, numbers, other, LOGITS)
    tape.run([9, 0, 2], 2)
    assert not out.any()
    assert np.array_equal(other[:2], 2 * numbers[:2])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_sizes_that_an_operator_wrote_hold_in_the_same_run(native: ModuleType, num_threads: int) -> None:
    """Pairs of rows and experts: their number comes into being on the way."""
    rows, experts = 6, 3
    ids, weights = np.zeros((rows, 2), np.int32), np.ones((rows, 2), np.float32)
    begin, (row_of, places) = np.zeros(experts + 1, np.int32), np.zeros((2, 2 * rows), np.int32)
    pair_weights = np.zeros(2 * rows, np.float32)
    x, out = np.ones((2 * rows, 16), np.float32), np.zeros((2 * rows, 16), np.float32)
    tape = native.Tape()
    arrays = {"ids": ids, "weights": weights, "begin": begin, "rows": row_of, "places": places}
    addresses = {name: array.ctypes.data for name, array in (arrays | {"pair_weights": pair_weights}).items()}
    record(tape, "moe_group", dim=ROWS, top_k=2, num_experts=experts, first=0, num_own=0, own_begin=0, **addresses)
    add(tape, x, x, out, PAIRS)
    for num_rows in (6, 1, 4):
        ids[:] = [1, 2]
        out[:] = 0
        tape.run([num_rows, 0, 0], num_threads)
        assert tape.dims() == [num_rows, 0, 0, 2 * num_rows, 0]
        assert int(out.sum()) == 2 * num_rows * 32


def test_a_profile_has_a_time_for_each_record(native: ModuleType, numbers: np.ndarray) -> None:
    tape = native.Tape()
    out = np.zeros_like(numbers)
    for dim in (ROWS, SEQS, ROWS):
        add(tape, numbers, numbers, out, dim)
    times = tape.profile([9, 0, 0], 2)
    assert len(times) == 3
    assert all(time >= 0 for time in times)
    assert np.array_equal(out, 2 * numbers)
    assert native.Tape().profile([1, 1, 1]) == []


def test_arguments_are_copied(native: ModuleType, numbers: np.ndarray) -> None:
    tape = native.Tape()
    out = np.zeros_like(numbers)
    inputs = bytearray(
        pack(
            "scale", **SCALE | {"out": out.ctypes.data, "x": numbers.ctypes.data, "ld_out": 37, "ld_x": 37, "width": 37}
        )
    )
    tape.add("scale", bytes(inputs))
    inputs[:] = b"\xff" * len(inputs)
    tape.run([9, 0, 0])
    assert np.array_equal(out, numbers)


def test_what_is_wrong_is_told(native: ModuleType) -> None:
    tape = native.Tape()
    right = pack("scale", **SCALE)
    with pytest.raises(ValueError, match="no operator is called 'sclae'"):
        tape.add("sclae", right)
    with pytest.raises(ValueError, match="scale takes 72 bytes of arguments, not 71"):
        tape.add("scale", right[:-1])
    for dim in (-1, 5, 2**63 - 1):
        with pytest.raises(ValueError, match=r"scale: dim must be 0 \.\.\. 4"):
            tape.add("scale", pack("scale", **SCALE | {"dim": dim}))
    group = dict.fromkeys(fields()["moe_group"][1], 0)
    for experts in (0, -1, 8193):
        with pytest.raises(ValueError, match="num_experts"):
            tape.add("moe_group", pack("moe_group", **group | {"num_experts": experts}))
    for first, num_own in ((-1, 1), (0, -1), (0, 4), (3, 1), (1, 2**63 - 1)):
        with pytest.raises(ValueError, match="its own experts"):
            tape.add("moe_group", pack("moe_group", **group | {"num_experts": 3, "first": first, "num_own": num_own}))
    each = dict.fromkeys(fields()["linear_each"][1], 0)
    for op, count in ((op_code("add"), 1), (-1, 1), (op_code("linear_f"), 0), (op_code("linear_f"), 8193)):
        with pytest.raises(ValueError, match="op must be a linear layer, count 1"):
            tape.add("linear_each", pack("linear_each", **each | {"op": op, "count": count}))
    assert len(tape) == 0
    tape.add("scale", right)
    for dims in ([1], [1, 1, 1, 1], [-1, 1, 1]):
        with pytest.raises(ValueError, match="dims"):
            tape.run(dims)
    with pytest.raises(ValueError, match="not on a tape of 1"):
        tape.run_range(0, 2, [0, 0, 0])
    with pytest.raises(ValueError, match="num_threads"):
        tape.run([0, 0, 0], 257)
    with pytest.raises(TypeError):
        tape.run(["one", 1, 1])


def test_fields_are_packed_by_name(native: ModuleType) -> None:
    right = {"dim": 0, "x": 0, "ld_x": 8, "width": 8, "cap": 0.5, "out": 0, "ld_out": 8}
    assert len(pack("softcap", **right)) == 8 * len(native.schema()["softcap"])
    with pytest.raises(TypeError, match=r"missing \['cap'\]"):
        pack("softcap", **{name: value for name, value in right.items() if name != "cap"})
    with pytest.raises(TypeError, match=r"unknown \['cpa'\]"):
        pack("softcap", **right, cpa=1.0)
    with pytest.raises(TypeError, match="softcap"):
        pack("softcap", **right | {"width": 8.5})
    with pytest.raises(TypeError, match="sotfcap"):
        pack("sotfcap", **right)


@pytest.mark.parametrize("format", ["i4", "i8", "f"])
def test_packing_in_parts_and_at_once_is_the_same(native: ModuleType, format: str) -> None:
    """Large enough for the team to share it, in parts as a loader may."""
    random = np.random.default_rng(2)
    num_out, num_in, group = 1000, 320, 32
    panel = native.panel(format)
    assert native.layout(format)
    codes, flag = {
        "i4": (random.integers(0, 16, (num_out, num_in), np.int8), 1),
        "i8": (random.integers(-128, 128, (num_out, num_in), np.int8), group),
        "f": (random.standard_normal((num_out, num_in)).astype(np.float32), 0),
    }[format]
    d = random.standard_normal((num_out, num_in // group)).astype(np.float16).astype(np.float32)
    m = random.standard_normal((num_out, num_in // group)).astype(np.float16).astype(np.float32)
    size = native.packed_bytes(format, num_out, num_in, group, flag)
    whole, parts = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    shape = (num_in, group, flag)

    def pack_rows(first: int, last: int, to: np.ndarray) -> None:
        at = [array[first:].ctypes.data for array in (codes, d, m)]
        native.pack(format, *at, *shape, first, last, num_out, to.ctypes.data)

    pack_rows(0, num_out, whole)
    cut = 7 * panel
    pack_rows(cut, num_out, parts)
    pack_rows(0, cut, parts)
    assert np.array_equal(whole, parts)

    row = np.zeros(num_in, np.float32)
    for index in (0, 1, panel, num_out - 1):
        native.unpack_row(format, whole.ctypes.data, num_out, *shape, index, row.ctypes.data)
        if format == "f":
            expected = codes[index]
        else:
            expected = codes[index].astype(np.float32) * np.repeat(d[index], group)
            expected += np.repeat(m[index], group) if format == "i4" else 0
        assert np.array_equal(row, expected)
    with pytest.raises(ValueError, match="multiple"):
        native.pack(format, codes.ctypes.data, d.ctypes.data, m.ctypes.data, *shape, 1, 9, num_out, whole.ctypes.data)
    with pytest.raises(ValueError, match="no format is called 'i7'"):
        native.layout("i7")
