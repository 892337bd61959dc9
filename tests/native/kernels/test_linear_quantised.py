"""Native linear layers of int4 and int8 weights: exact integers in a group, one stated chain of floats across them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.native.kernels.calls import (
    FAST,
    ISAS,
    Array,
    Floats,
    Quantized,
    call,
    fma,
    normals,
    padded,
    quantized,
    same,
    untouched,
)

from headrace import _native
from headrace.quant import schemes

# (rows, num_in, num_out): ragged, and at the edges of groups, octs of inputs, blocks of 16 and panels of 32 outputs.
SMALL = [(1, 8, 1), (2, 20, 16), (3, 48, 33), (5, 80, 31), (4, 112, 199), (13, 199, 17), (2, 300, 64)]
LARGE = [(num_in, num_out) for num_in in (20, 64, 199, 520, 1032) for num_out in (1, 33, 96)]


class Kind(NamedTuple):
    """`flag` is what the format calls form (i4, i6) or weight_group (i8, one more with minima)."""

    format: str
    group: int
    flag: int

    @property
    def op(self) -> str:
        return "linear_" + self.format

    @property
    def flag_name(self) -> str:
        return "weight_group" if self.format == "i8" else "form"

    @property
    def has_min(self) -> bool:
        return bool(self.flag % 2) if self.format == "i8" else self.flag == 1


CODES: dict[str, tuple[int, int, Any]] = {
    "i4": (0, 16, np.uint8),
    "i5": (0, 32, np.uint8),
    "i6": (0, 64, np.uint8),
    "i8": (-128, 128, np.int8),
}
MIDDLES = {"i4": 8, "i5": 16, "i6": 32, "i8": 0}
BOOKS = {
    2: [-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127],
    3: [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
    4: [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    5: [0, 1, 85, 127, 42, 64, 21, 32, 0, -1, -85, -127, -42, -64, -21, -32],
}
LEVELS = {2: schemes.LEVELS["nf4"], 5: schemes.LEVELS["fp4"]}
"""What codes stand for exactly; beside int8 activations they are 127ths."""
UNIT = np.float32(1) / np.float32(127)

KINDS = {
    **{f"i4-g{group}": Kind("i4", group, 0) for group in (32, 64, 128)},
    **{f"i4-min-g{group}": Kind("i4", group, 1) for group in (32, 64, 128)},
    **{f"i8-g{group}": Kind("i8", group, group) for group in (32, 64, 128)},
    **{f"i8-min-g{group}": Kind("i8", group, group + 1) for group in (32, 128)},
    **{f"i8-channel-g{group}": Kind("i8", group, 0) for group in (64, 256)},
    "i4-g8": Kind("i4", 8, 0),
    "i4-min-g16": Kind("i4", 16, 1),
    "i4-nf4-g64": Kind("i4", 64, 2),
    "i4-e2m1-g32": Kind("i4", 32, 3),
    "i4-iq4nl-g32": Kind("i4", 32, 4),
    "i4-fp4-g64": Kind("i4", 64, 5),
    "i5-g16": Kind("i5", 16, 0),
    "i5-min-g32": Kind("i5", 32, 1),
    **{f"i6-g{group}": Kind("i6", group, 0) for group in (16, 64)},
    **{f"i6-min-g{group}": Kind("i6", group, 1) for group in (32, 128)},
    "i8-g24": Kind("i8", 24, 24),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


class Weights:
    """Random codes [num_out, num_in] with scales d, and m if there are minima: [num_out, groups] or [num_out]."""

    def __init__(self, kind: Kind, num_out: int, num_in: int, *, seed: int = 7, codes: Array | None = None) -> None:
        rng = np.random.default_rng(seed)
        low, high, dtype = CODES[kind.format]
        self.kind, self.num_out, self.num_in = kind, num_out, num_in
        self.codes = rng.integers(low, high, (num_out, num_in), dtype) if codes is None else codes
        self.groups = -(-num_in // kind.group)
        channel = kind.format == "i8" and kind.flag == 0
        shape = (num_out,) if channel else (num_out, self.groups)
        exact = np.float32 if channel else np.float16
        self.d = (rng.random(shape) * 0.02 + 0.001).astype(exact).astype(np.float32)
        self.m = rng.normal(0, 0.1, shape).astype(exact).astype(np.float32) if kind.has_min else None

    def packed_bytes(self) -> int:
        return _native.packed_bytes(self.kind.format, self.num_out, self.num_in, self.kind.group, self.kind.flag)

    def pack(self, into: Array, first: int = 0, last: int | None = None) -> None:
        last = self.num_out if last is None else last
        codes, d = (np.ascontiguousarray(a[first:last]) for a in (self.codes, self.d))
        m = None if self.m is None else np.ascontiguousarray(self.m[first:last])
        at = (codes.ctypes.data, d.ctypes.data, 0 if m is None else m.ctypes.data)
        sizes = (self.num_in, self.kind.group, self.kind.flag, first, last, self.num_out)
        _native.pack(self.kind.format, *at, *sizes, into.ctypes.data)

    def packed(self) -> Array:
        into = np.full(self.packed_bytes(), 0xA5, np.uint8)
        self.pack(into)
        return into

    def numbers(self) -> Array:
        """What the codes stand for, int64 [num_out, num_in]."""
        if self.kind.flag in BOOKS and self.kind.format == "i4":
            return np.array(BOOKS[self.kind.flag], np.int64)[self.codes]
        return self.codes.astype(np.int64) - (0 if self.kind.has_min else MIDDLES[self.kind.format])

    @property
    def is_rounded(self) -> bool:
        return self.kind.format == "i4" and self.kind.flag in LEVELS

    def floats(self) -> Floats:
        """[num_out, num_in], one rounding for each operation."""
        codes = self.numbers().astype(np.float32)
        if self.is_rounded:
            codes = np.float32(LEVELS[self.kind.flag])[self.codes]
        d = self.d[:, None] if self.d.ndim == 1 else self.d
        each = np.arange(self.num_in) // self.kind.group if self.d.ndim == 2 else np.zeros(self.num_in, np.int64)
        product = codes * d[:, each]
        return product if self.m is None else product + self.m[:, each]


def linear(
    isa: str,
    weights: Weights,
    q: Quantized,
    rows: int,
    *,
    num_threads: int = 1,
    bias: Floats | None = None,
    residual: Floats | None = None,
    in_place: bool = False,
    packed: Array | None = None,
) -> Floats:
    """The first `rows` rows of q through the layer -> [rows, num_out]"""
    out = padded(rows, weights.num_out)
    ld_out = out.shape[1]
    if residual is not None and in_place:
        out[:, : weights.num_out] = residual
    values: dict[str, Any] = {
        "weights": weights.packed() if packed is None else packed,
        "num_in": weights.num_in,
        "num_out": weights.num_out,
        weights.kind.flag_name: weights.kind.flag,
        "bias": bias,
        "residual": out if in_place else residual,
        "ld_res": ld_out if in_place else weights.num_out,
        "out": out,
        "ld_out": ld_out,
    }
    call(weights.kind.op, isa, rows, num_threads=num_threads, **values, **q.fields())
    assert untouched(out, weights.num_out)
    return out[:, : weights.num_out].copy()


def group_sums(weights: Weights, q: Quantized, g: int, rows: int) -> tuple[Array, Floats, Floats]:
    """Of group g: exact integer sums [rows, num_out], scales [rows, 1], float sums of codes [rows, 1]."""
    part = slice(g * weights.kind.group, min((g + 1) * weights.kind.group, weights.num_in))
    codes = weights.numbers()[:, part]
    isum = q.q[:rows, part].astype(np.int64) @ codes.T
    assert np.abs(isum).max() < 2**31
    unit = UNIT if weights.is_rounded else np.float32(1)
    return isum, q.scales[:rows, g : g + 1] * unit, q.sums[:rows, g : g + 1].astype(np.float32)


def defined(weights: Weights, q: Quantized, rows: int, *, backwards: bool = False) -> Floats:
    """The contract, operation by operation."""
    acc = np.zeros((rows, weights.num_out), np.float32)
    for g in reversed(range(weights.groups)) if backwards else range(weights.groups):
        isum, scale, total = group_sums(weights, q, g, rows)
        if weights.d.ndim == 1:
            acc = fma(isum.astype(np.float32), scale, acc)
        else:
            acc = fma(isum.astype(np.float32) * scale, weights.d[None, :, g], acc)
        if weights.m is not None:
            acc = fma(total * scale, weights.m[None, :, g], acc)
    return acc * weights.d if weights.d.ndim == 1 else acc


def rows_of(kind: Kind, rows: int, num_in: int, seed: int = 3) -> Quantized:
    return quantized(normals(seed, rows, num_in), kind.group)


@pytest.mark.parametrize("isa", ISAS)
@every_kind
def test_each_output_is_the_stated_chain_to_the_bit(isa: str, kind: Kind) -> None:
    for rows, num_in, num_out in SMALL:
        weights, q = Weights(kind, num_out, num_in), rows_of(kind, rows, num_in)
        want, bias, residual = defined(weights, q, rows), normals(1, num_out), normals(2, rows, num_out)
        assert same(linear(isa, weights, q, rows), want)
        assert same(linear(isa, weights, q, rows, bias=bias), want + bias)
        for in_place in (False, True):
            got = linear(isa, weights, q, rows, bias=bias, residual=residual, in_place=in_place)
            assert same(got, (want + bias) + residual)


@every_kind
def test_the_order_of_groups_can_be_told(kind: Kind) -> None:
    """Negative control: with the groups in another order the bits differ, so the test above would see it."""
    weights, q = Weights(kind, 64, 1032), rows_of(kind, 4, 1032)
    assert not same(defined(weights, q, 4), defined(weights, q, 4, backwards=True))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("isa", FAST)
@every_kind
def test_every_isa_agrees_with_scalar(isa: str, kind: Kind) -> None:
    for num_in, num_out in LARGE:
        weights, q = Weights(kind, num_out, num_in), rows_of(kind, 70, num_in)
        packed = weights.packed()
        want = linear("scalar", weights, q, 70, packed=packed)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 23, 24, 25, 37, 70):
            for num_threads in (1, 2):
                got = linear(isa, weights, q, rows, num_threads=num_threads, packed=packed)
                assert same(got, want[:rows]), (num_in, num_out, rows, num_threads)


@pytest.mark.parametrize("isa", ISAS)
@every_kind
def test_a_row_alone_has_the_bits_it_has_in_company(isa: str, kind: Kind) -> None:
    weights, q = Weights(kind, 100, 264), rows_of(kind, 45, 264)
    packed = weights.packed()
    want = linear(isa, weights, q, 45, num_threads=2, packed=packed)
    for row in (0, 1, 11, 12, 30, 44):
        alone = Quantized(1, 264, kind.group)
        alone.q[:], alone.scales[:], alone.sums[:] = q.q[row], q.scales[row], q.sums[row]
        assert same(linear(isa, weights, alone, 1, packed=packed), want[row : row + 1])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("isa", FAST)
@pytest.mark.parametrize("kind", [KINDS["i4-g64"], KINDS["i4-min-g128"], KINDS["i8-g128"], KINDS["i8-channel-g256"]])
def test_more_rows_than_fit_into_scratch_at_once(isa: str, kind: Kind) -> None:
    weights, q = Weights(kind, 97, 16392), rows_of(kind, 600, 16392)
    packed = weights.packed()
    want = linear(isa, weights, q, 600, num_threads=1, packed=packed)
    assert same(want, linear(isa, weights, q, 600, num_threads=2, packed=packed))
    rows = [0, 199, 200, 299, 300, 400, 599]
    some = Quantized(len(rows), 16392, kind.group)
    some.q[:], some.scales[:], some.sums[:] = q.q[rows], q.scales[rows], q.sums[rows]
    assert same(defined(weights, some, len(rows)), want[rows])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "kind",
    [KINDS[n] for n in ("i4-g128", "i4-min-g64", "i4-nf4-g64", "i6-g64", "i6-min-g128", "i8-g128", "i8-channel-g256")],
)
def test_the_greatest_numbers_do_not_saturate(isa: str, kind: Kind) -> None:
    """Every pairing of the extreme codes, long runs of each: 16-bit sums on the way would overflow or clamp."""
    low, beyond, dtype = CODES[kind.format]
    high, num_in = beyond - 1, 512
    codes = np.array([[low] * num_in, [high] * num_in, [low, high] * (num_in // 2)], dtype)
    weights, q = Weights(kind, 3, num_in, codes=codes), Quantized(14, num_in, kind.group)
    q.q[:], q.scales[:] = 0, 1 / 127
    q.q[::2, :num_in], q.q[1::2, :num_in], q.q[2, :num_in:2] = 127, -127, -127
    for g in range(q.groups):
        q.sums[:, g] = q.q[:, g * kind.group : (g + 1) * kind.group].astype(np.int32).sum(1)
    for rows in (1, 2, 14):
        assert same(linear(isa, weights, q, rows), defined(weights, q, rows))
    if kind.format == "i8":  # Negative control: what vpmaddubsw would make of codes + 128 is another number.
        pair = 2 * 127 * (int(codes[1, 0]) + 128)
        assert min(pair, 2**15 - 1) != pair


@pytest.mark.parametrize("isa", ISAS)
@every_kind
def test_near_torch_on_the_same_weights(isa: str, kind: Kind) -> None:
    x = normals(5, 15, 520)
    weights, q = Weights(kind, 70, 520), quantized(x, kind.group)
    scales = np.repeat(q.scales[:, : q.groups], kind.group, 1)[:, :520]
    read = torch.from_numpy((q.q[:, :520] * scales).astype(np.float64))
    exact = torch.nn.functional.linear(read, torch.from_numpy(weights.floats().astype(np.float64))).numpy()
    got = linear(isa, weights, q, 15)
    assert np.abs(got - exact).max() <= (5e-3 if weights.is_rounded else 4e-6) * np.abs(exact).max()
    close = torch.nn.functional.linear(torch.from_numpy(x), torch.from_numpy(weights.floats())).numpy()
    assert np.abs(got - close).max() <= 0.03 * np.abs(close).max()  # the quantiser's error, of 8 bits
    wrong = linear(isa, Weights(kind, 70, 520, seed=8), q, 15)  # Negative control.
    assert np.abs(wrong - close).max() > 0.03 * np.abs(close).max()


@pytest.mark.parametrize("isa", ISAS)
@every_kind
def test_a_row_that_is_not_finite_shows_and_harms_no_other(isa: str, kind: Kind) -> None:
    x = normals(6, 14, 150)
    want = linear(isa, Weights(kind, 40, 150), quantized(x, kind.group), 14)
    x[3, 70], x[9, 149] = np.nan, np.inf
    got = linear(isa, Weights(kind, 40, 150), quantized(x, kind.group), 14)
    assert not np.isfinite(got[[3, 9]]).any()
    assert same(np.delete(got, [3, 9], 0), np.delete(want, [3, 9], 0))


@every_kind
def test_unpacked_rows_are_the_floats_exactly(kind: Kind) -> None:
    for num_out, num_in in [(1, 20), (33, 199), (70, 300)]:
        weights = Weights(kind, num_out, num_in)
        packed, want = weights.packed(), weights.floats()
        for row in range(num_out):
            got = np.full(num_in, np.nan, np.float32)
            sizes = (num_out, num_in, kind.group, kind.flag, row)
            _native.unpack_row(kind.format, packed.ctypes.data, *sizes, got.ctypes.data)
            assert same(got, want[row])


@every_kind
def test_a_matrix_packed_in_parts_has_the_same_bytes(kind: Kind) -> None:
    weights = Weights(kind, 150, 72)
    panel = _native.panel(kind.format)
    parts = np.full(weights.packed_bytes(), 0x5A, np.uint8)
    weights.pack(parts, 2 * panel)
    weights.pack(parts, 0, panel)
    weights.pack(parts, panel, 2 * panel)
    assert same(parts, weights.packed())
    weights.codes[panel] ^= 1  # Negative control.
    assert not same(parts, weights.packed())


def test_bytes_for_each_weight_are_those_of_codes_and_scales() -> None:
    known = {
        "i4-g128": 4.125,
        "i4-g64": 4.25,
        "i4-min-g64": 4.5,
        "i8-g128": 8.125,
        "i8-min-g128": 8.25,
        "i5-g16": 6,
        "i5-min-g32": 6,
        "i6-g16": 7,
        "i6-min-g32": 7,
    }
    for kind, bits in known.items():
        assert Weights(KINDS[kind], 64, 2048).packed_bytes() * 8 == 64 * 2048 * bits
    assert Weights(KINDS["i8-channel-g64"], 64, 2048).packed_bytes() == 64 * (2048 + 4)


def test_the_names_of_the_layouts_are_pinned() -> None:
    """Packed files carry them: other bytes need another name."""
    known = {"i4": "i4/panel32/oct8/f16", "i5": "i5/panel32/pair16/f16", "i6": "i6/panel32/oct8/f16"}
    known |= {"i8": "i8/panel32/quad4/f16"}
    assert {kind: _native.layout(kind) for kind in known} == known
    i4, i8 = Weights(KINDS["i4-g8"], 1, 8), Weights(KINDS["i8-channel-g64"], 1, 4)
    i4.codes[:], i4.d[:] = np.arange(1, 9), 1.0
    i8.codes[:], i8.d[:] = [[-128, -1, 0, 127]], 1.0
    i6 = Weights(KINDS["i6-g16"], 17, 8)
    i6.codes[:], i6.codes[16] = 0, [0x11, 0x02, 0x23, 0x34, 0x05, 0x36, 0x17, 0x08]
    assert i6.packed()[128:132].tolist() == [0x51, 0x62, 0x73, 0x84]
    assert i6.packed()[192:196].tolist() == [0b00000100, 0b11000000, 0b01001000, 0b00001100]
    i5 = Weights(KINDS["i5-g16"], 17, 16)
    i5.codes[:], i5.codes[16, :8], i5.codes[16, 8:] = 0, [0x11, 2, 0x13, 4, 5, 0x16, 7, 0x18], [0x10] * 8
    assert i5.packed()[128:132].tolist() == [0x51, 0x62, 0x73, 0x84]  # block 1 of the first oct, then of the second
    assert i5.packed()[256:260].tolist() == [0, 0, 0, 0]
    assert i5.packed()[320:324].tolist() == [0b10100010, 0b10101000, 0b10100010, 0b10101000]
    assert i4.packed()[:2].tobytes() == np.float16(1).tobytes()
    assert i4.packed()[64:68].tolist() == [0x51, 0x62, 0x73, 0x84]
    assert i8.packed()[:4].tolist() == [0, 127, 128, 255]
    assert i8.packed()[256:260].tobytes() == np.float32(1).tobytes()
