"""Temperature, min_p, top_k and top_p of rows: the native operator of every ISA gives numpy's ids and numpy's bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.kernels.calls import ISAS, Floats, normals

from headrace.backends.cpu.choose import MAX_WIDTH, Chooser
from headrace.runner.choosing import MAX_HEAD, NativeSelect
from headrace.sampling.filters import Candidates, Cut, select_all

CUTS = [
    Cut(),
    Cut(temperature=0.7),
    Cut(temperature=1.6, top_k=1),
    Cut(top_k=7, top_p=0.5),
    Cut(temperature=0.3, floor=math.log(0.05)),
    Cut(floor=math.log(0.3), top_k=50, top_p=0.9),
    Cut(top_p=0.6),
    Cut(temperature=100.0, top_p=0.97),
    Cut(temperature=5e-324, top_p=0.9),
    Cut(floor=-0.0, top_p=1e-6),
    Cut(temperature=1.3, top_k=2000, top_p=0.9),
    Cut(top_p=1 - 1e-7),
]


def rows_of(width: int) -> list[Floats]:
    """Sound logits: spread, tied, flat, with tokens that never come, with one that towers."""
    plain = normals(width, 4, width) * 4
    tied = np.round(normals(width + 1, 1, width)[0] * 2).astype(np.float32)
    flat = np.zeros(width, np.float32)
    masked = plain[0].copy()
    masked[::2] = -np.inf
    masked[-1] = 3.0
    tower = plain[1].copy()
    tower[width // 2] = 300.0
    return [*plain.astype(np.float32), tied, flat, masked, tower, np.full(width, -3e38, np.float32)]


def bits_of(found: list[Candidates]) -> list[tuple[list[int], bytes, float]]:
    return [(each.token_ids.tolist(), each.scaled.tobytes(), each.base) for each in found]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [1, 2, 7, 8, 63, 300, 4099])
def test_the_same_bits_as_numpy(isa: str, width: int) -> None:
    rows = rows_of(width)
    for cut in CUTS:
        many, cuts = rows * 4, [cut] * (4 * len(rows))
        greatest = [float(row.max()) for row in many]
        want = bits_of(select_all(rows, greatest[: len(rows)], cuts[: len(rows)]))
        for num_threads in (1, 2):
            found = NativeSelect(Chooser(width, num_threads, isa, max_rows=5))(many, greatest, cuts)
            assert bits_of(found) == want * 4, (cut, num_threads)


@pytest.mark.parametrize("isa", ISAS)
def test_a_wide_row(isa: str) -> None:
    rows = rows_of(128_256)
    for cut in CUTS:
        greatest = [float(row.max()) for row in rows]
        native = NativeSelect(Chooser(128_256, 1, isa))(rows, greatest, [cut] * len(rows))
        assert bits_of(native) == bits_of(select_all(rows, greatest, [cut] * len(rows))), cut


def test_rows_with_cuts_of_their_own() -> None:
    width = 5000
    rows = [row for row in rows_of(width) for _ in CUTS]
    cuts = CUTS * (len(rows) // len(CUTS))
    greatest = [float(row.max()) for row in rows]
    assert any(MAX_HEAD < cut.top_k < width for cut in cuts), "some go past the native operator"
    assert bits_of(NativeSelect(Chooser(width))(rows, greatest, cuts)) == bits_of(select_all(rows, greatest, cuts))


def test_rows_that_lie_apart() -> None:
    wide = normals(3, 6, 400).astype(np.float32)
    rows = list(wide[:, ::2])
    greatest = [float(row.max()) for row in rows]
    cuts = [Cut(top_k=9, top_p=0.8)] * 6
    assert bits_of(NativeSelect(Chooser(200))(rows, greatest, cuts)) == bits_of(select_all(rows, greatest, cuts))


def test_no_rows() -> None:
    assert NativeSelect(Chooser(200))([], [], []) == []


def test_rows_too_wide_are_refused() -> None:
    with pytest.raises(ValueError, match="room for"):
        Chooser(MAX_WIDTH + 1)


def test_control_another_exponential_is_caught() -> None:
    """numpy's own exp differs in last bits, which top_p may not: with weights of another scale the cut moves."""
    row = normals(1, 1, 5000)[0].astype(np.float32)
    want = select_all([row], [float(row.max())], [Cut(top_p=0.5)])
    found = NativeSelect(Chooser(5000))([row], [float(row.max())], [Cut(top_p=0.5 + 2**-13)])
    assert bits_of(found) != bits_of(want)
