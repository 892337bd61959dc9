"""Native linear layers of codes with float inputs: the unpacked weights' chain of fma, to the bit, on every ISA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.formats.gguf.models import random_blocks
from tests.native.kernels.calls import FAST, ISAS, Array, Floats, call, fma, normals, padded, same, untouched

from headrace import _native
from headrace.backends.cpu.matrix import unpacked
from headrace.backends.cpu.products import KIND_CODES
from headrace.quant.schemes import K_TYPES

# kind, group, flag: every form of every kind.
FORMS = [
    *[("i4", group, form) for group, form in ((8, 0), (40, 1), (64, 2), (32, 3), (16, 4), (64, 5))],
    ("i6", 24, 0), ("i6", 64, 1), ("i8", 128, 0), ("i8", 16, 16), ("i8", 128, 128), ("i8", 32, 33),
    ("f8", 128, 0), ("f8", 48, 48), ("i3", 16, 0), ("i3", 64, 6), ("i5", 16, 0), ("i5", 48, 1),
    ("i2", 8, 0), ("i2", 40, 6),
    *[("k", 32, kind.code) for kind in K_TYPES.values()],
]  # fmt: skip
every_form = pytest.mark.parametrize(("kind", "group", "flag"), FORMS)
# Few rows, and tiles; one panel of 32 outputs, two, and three; ends of a row within an oct.
SHAPES = [(1, 9, 20), (1, 200, 70), (2, 130, 33), (4, 64, 100), (5, 77, 64), (13, 129, 97)]


class Weights:
    """Random codes, packed."""

    def __init__(self, kind: str, group: int, flag: int, num_in: int, num_out: int) -> None:
        num_in = -(-num_in // 256) * 256 if kind == "k" else num_in
        self.kind, self.group, self.flag, self.num_in, self.num_out = kind, group, flag, num_in, num_out
        self.packed = np.full(_native.packed_bytes(kind, num_out, num_in, group, flag), 0xA5, np.uint8)
        codes, d, m = self.numbers()
        sizes = (num_in, group, flag, 0, num_out, num_out)
        _native.pack(kind, codes.ctypes.data, d.ctypes.data, m.ctypes.data, *sizes, self.packed.ctypes.data)

    def numbers(self) -> tuple[Array, Floats, Floats]:
        shape, random = (self.num_out, self.num_in), np.random.default_rng(self.num_in)
        groups = -(-self.num_in // self.group)
        d, m = normals(3, self.num_out, groups), normals(4, self.num_out, groups)
        if self.kind == "k":
            name = next(name for name, kind in K_TYPES.items() if kind.code == self.flag)
            return np.ascontiguousarray(random_blocks(name, shape, 7)[0]), d, m
        if self.kind in ("i2", "i3"):
            m = random.integers(0, 16, d.shape).astype(np.float32)
        most = {"i2": 4, "i3": 8, "i4": 16, "i5": 32, "i6": 64}.get(self.kind, 256)
        codes = random.integers(0, most, shape).astype(np.uint8)
        return np.where(codes & 127 == 127, 0, codes) if self.kind == "f8" else codes, d, m

    def floats(self) -> Floats:
        return unpacked(self.kind, self.packed, self.num_out, self.num_in, self.group, self.flag, range(self.num_out))


def linear(isa: str, x: Floats, w: Weights, *, num_threads: int = 1, **values: Any) -> Floats:
    out = padded(len(x), w.num_out)
    values |= {"weights": w.packed, "kind": KIND_CODES[w.kind], "group": w.group, "form": w.flag}
    values |= {"num_in": w.num_in, "num_out": w.num_out, "out": out, "ld_out": out.shape[1]}
    call("linear_w", isa, len(x), num_threads=num_threads, x=x, ld_x=x.shape[1], **values)
    assert untouched(out, w.num_out)
    return out[:, : w.num_out].copy()


def chain(x: Floats, weights: Floats) -> Floats:
    """[rows, num_in], [num_out, num_in] -> [rows, num_out]"""
    acc = np.zeros((len(x), len(weights)), np.float32)
    for k in range(weights.shape[1]):
        acc = fma(x[:, k, None], weights[None, :, k], acc)
    return acc


@pytest.mark.sampled(2)
@pytest.mark.parametrize("isa", ISAS)
@every_form
def test_each_output_is_the_chain_over_the_unpacked_weights(isa: str, kind: str, group: int, flag: int) -> None:
    for rows, num_in, num_out in SHAPES[::2] if isa == "scalar" else SHAPES:
        w = Weights(kind, group, flag, num_in, num_out)
        x = normals(rows, rows, w.num_in)
        assert same(linear(isa, x, w), chain(x, w.floats())), (rows, num_in, num_out)


def test_control_the_chain_over_other_weights_differs() -> None:
    w = Weights("i8", 16, 16, 70, 40)
    x, weights = normals(1, 2, 70), w.floats()
    weights[0, 0] *= np.float32(1.001)
    assert not same(linear("scalar", x, w), chain(x, weights))


def test_every_number_of_f8_is_what_it_stands_for() -> None:
    """E4M3 (Micikevicius et al. 2022): subnormals, both zeros and the greatest, beside torch."""
    codes = np.array([c for c in range(256) if c & 127 != 127], np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    w = Weights("f8", 128, 0, len(codes), 70)
    d = np.exp2(np.arange(70, dtype=np.float32) - 30)
    rows = np.ascontiguousarray(np.broadcast_to(codes, (70, len(codes))))
    sizes = (len(codes), 128, 0, 0, 70, 70)
    _native.pack("f8", rows.ctypes.data, d.ctypes.data, 0, *sizes, w.packed.ctypes.data)
    for isa in ISAS:
        out = linear(isa, np.eye(len(codes), dtype=np.float32), w)
        assert (out == expected[:, None] * d).all()


@pytest.mark.parametrize("isa", FAST)
@every_form
def test_rows_in_company_and_threads_change_no_bits(isa: str, kind: str, group: int, flag: int) -> None:
    w = Weights(kind, group, flag, 150, 170)
    x = normals(1, 30, w.num_in)
    whole = linear(isa, x, w, num_threads=2)
    for begin, end in [(0, 1), (29, 30), (3, 5), (6, 9), (8, 12), (10, 17)]:
        assert same(linear(isa, x[begin:end].copy(), w), whole[begin:end])


@pytest.mark.parametrize("isa", ISAS)
def test_bias_and_residual(isa: str) -> None:
    for rows in (1, 9):
        w = Weights("i4", 32, 0, 70, 50)
        x, bias, residual = normals(1, rows, 70), normals(3, 50), normals(4, rows, 50)
        plain = linear(isa, x, w)
        assert same(linear(isa, x, w, bias=bias, residual=residual, ld_res=50), (plain + bias) + residual)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(isa: str, bad: float) -> None:
    for rows in (3, 9):
        w, x = Weights("i8", 16, 16, 70, 50), normals(1, rows, 70)
        x[1, 69] = bad
        finite = np.isfinite(linear(isa, x, w)).all(axis=1)
        assert finite.tolist() == [row != 1 for row in range(rows)]


@pytest.mark.parametrize(("kind", "group", "flag"), [form for form in FORMS if form[0] in ("i2", "i3")])
def test_codes_of_two_and_three_bits_are_exact_in_their_own_size(kind: str, group: int, flag: int) -> None:
    w = Weights(kind, group, flag, 320, 64)
    codes, d, m = w.numbers()
    each = np.arange(320) // group
    zeros = m[:, each] if flag else np.float32(2 if kind == "i2" else 4)
    scales = d.astype(np.float16).astype(np.float32)[:, each]
    assert same(w.floats(), (codes.astype(np.float32) - zeros) * scales)
    bits = int(kind[1]) + (16 + 4 * (flag > 0)) / group
    assert len(w.packed) * 8 == 64 * 320 * bits
    codes[5, 7] ^= 1  # Negative control.
    assert not same(w.floats(), (codes.astype(np.float32) - zeros) * scales)


@pytest.mark.parametrize("kind", ["i3", "i5"])
def test_groups_that_split_a_pair_of_octs_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        Weights(kind, 24, 0, 48, 32)
