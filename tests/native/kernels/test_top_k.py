"""The greatest logits of a row: ties by lower index, -infinity a sound number, NaN and +infinity told."""

from __future__ import annotations

import numpy as np
import pytest
from tests.native.kernels.calls import FAST, ISAS, Array, Floats, call, normals, same

Found = tuple[Array, Floats, Array]


def top_k(isa: str, x: Floats, k: int, num_threads: int = 1) -> Found:
    rows, width = x.shape
    ids, values = np.full((rows + 1, k), -9, np.int32), np.full((rows + 1, k), 5.5, np.float32)
    finite = np.full(rows + 1, 9, np.int32)
    call(
        "top_k",
        isa,
        rows,
        num_threads=num_threads,
        x=x,
        ld_x=width,
        width=width,
        k=k,
        ids=ids,
        values=values,
        finite=finite,
    )
    assert (ids[rows] == -9).all()
    assert (values[rows] == 5.5).all()
    assert finite[rows] == 9
    return ids[:rows], values[:rows], finite[:rows]


def check(isa: str, x: Floats, k: int, num_threads: int = 1) -> None:
    """Against a stable sort."""
    ids, values, finite = top_k(isa, x, k, num_threads)
    expected = np.argsort(-x, axis=1, kind="stable")[:, :k]
    assert (ids == expected).all()
    assert same(values, np.take_along_axis(x, expected, 1))
    assert (finite == 1).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k", [1, 2, 7, 64])
def test_against_a_stable_sort(isa: str, k: int) -> None:
    for width in (1, 5, 16, 63, 64, 65, 80, 300, 4100):
        if k <= width:
            check(isa, normals(width, 3, width), k)
            check(isa, np.round(normals(width, 3, width) * 2), k)  # many ties


@pytest.mark.parametrize("isa", ISAS)
def test_k_up_to_the_whole_row(isa: str) -> None:
    for width in (1, 17, 64, 200):
        x = np.round(normals(width, 2, width) * 3)
        check(isa, x, width)
        check(isa, x, max(width - 1, 1))


@pytest.mark.parametrize("isa", ISAS)
def test_the_greatest_anywhere(isa: str) -> None:
    width = 150
    x = np.full((width, width), -1.0, np.float32)
    np.fill_diagonal(x, 2.0)
    ids, _, _ = top_k(isa, x, 1)
    assert ids[:, 0].tolist() == list(range(width))


@pytest.mark.parametrize("isa", ISAS)
def test_rising_falling_and_equal_rows(isa: str) -> None:
    rising = np.arange(1000, dtype=np.float32)
    zeros = np.where(np.arange(1000) % 3 == 0, np.float32(-0.0), np.float32(0.0))
    for k in (1, 10):
        check(isa, np.stack([rising, rising[::-1], np.ones(1000, np.float32), zeros]), k)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("at", [0, 1, 63, 64, 100, 129])
@pytest.mark.parametrize("k", [1, 3])
def test_what_is_not_finite_is_told_but_for_minus_infinity(isa: str, at: int, k: int) -> None:
    x = normals(1, 4, 130)
    x[0, at], x[1, at], x[2, at] = np.nan, np.inf, -np.inf
    ids, _, finite = top_k(isa, x, k)
    assert finite.tolist() == [0, 0, 1, 1]
    assert ids[1, 0] == at
    assert at not in ids[2]
    check(isa, x[2:], k)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_minus_infinity(isa: str) -> None:
    x = np.full((2, 100), -np.inf, np.float32)
    x[1, 77] = -3
    check(isa, x, 5)
    assert top_k(isa, x, 3)[0].tolist() == [[0, 1, 2], [77, 0, 1]]


@pytest.mark.parametrize("isa", FAST)
def test_threads_and_company(isa: str) -> None:
    x = normals(1, 40, 3000)
    check(isa, x, 5, num_threads=2)
    check(isa, x[7:8].copy(), 5, num_threads=2)


def test_a_tie_broken_the_other_way_shows() -> None:
    """Control: rows with ties tell a stable order from its mirror."""
    x = np.round(normals(1, 3, 300) * 2)
    mirrored = 299 - np.argsort(-x[:, ::-1], axis=1, kind="stable")[:, :7]
    assert (top_k("scalar", x, 7)[0] != mirrored).any()
