"""With all scales 1 the linear layers of integer codes give whole numbers: numpy's products of the same matrices.

What every ISA computes here is one instruction after the other (sdot, usdot, usmmla, vpdpbusd, tdpbssd), with the
greatest codes of both signs among them.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.native.kernels.calls import ISAS, Array, call

_native = pytest.importorskip("headrace._native", exc_type=ImportError)

# The least and the greatest code, and what they are too great by.
FORMATS = {"i8": (-128, 127, 0), "i4": (0, 15, 8), "i5": (0, 31, 16), "i6": (0, 63, 32)}


def sums(kind: str, isa: str, q: Array, codes: Array, num_threads: int) -> Array:
    rows, num_in = q.shape
    num_out = len(codes)
    ones = np.ones((num_out, 1), np.float32)
    packed = np.zeros(_native.packed_bytes(kind, num_out, num_in, num_in, 0), np.uint8)
    at = (codes.ctypes.data, ones.ctypes.data, 0, num_in, num_in, 0, 0, num_out, num_out, packed.ctypes.data)
    _native.pack(kind, *at)
    out, scales = np.full((rows, num_out), np.nan, np.float32), np.ones((rows, 1), np.float32)
    totals = q.sum(1, dtype=np.int32)
    values = {"q": q, "ld_q": num_in, "scales": scales, "sums": totals, "ld_s": 1, "group": num_in, "weights": packed}
    values |= {"num_in": num_in, "num_out": num_out, "out": out, "ld_out": num_out}
    call(f"linear_{kind}", isa, rows, num_threads=num_threads, **values)
    return out


@pytest.mark.parametrize("kind", list(FORMATS))
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rows", "num_out"), [(1, 40), (2, 32), (5, 64), (6, 33), (7, 96), (37, 64), (70, 40)])
def test_sums_are_numpys(kind: str, isa: str, rows: int, num_out: int) -> None:
    least, greatest, offset = FORMATS[kind]
    rng = np.random.default_rng(rows * 100 + num_out)
    q = rng.integers(-127, 128, (rows, 576), dtype=np.int8)
    codes = rng.integers(least, greatest + 1, (num_out, 576)).astype(np.int8)
    q[0], codes[0] = -127, least
    q[-1, :64], codes[-1] = 127, greatest
    expected = q.astype(np.int64) @ (codes.astype(np.int64) - offset).T
    assert np.abs(expected).max() < 2**24  # whole numbers of float32
    for threads in (1, 3):
        assert (sums(kind, isa, q, codes, threads) == expected).all()


def test_a_code_more_is_noticed() -> None:
    q, codes = np.ones((3, 64), np.int8), np.ones((32, 64), np.int8)
    expected = q.astype(np.int64) @ codes.astype(np.int64).T
    codes[31, 63] += 1
    assert (sums("i8", "scalar", q, codes, 1) != expected).sum() == 3
