"""Native adapters: two thin products of the rows that have one, against the arithmetic of csrc/include/kernels.h."""

from __future__ import annotations

import numpy as np
import pytest
from tests.native.kernels.calls import ISAS, Array, Floats, Values, call, fma, normals, padded, same, untouched

from headrace.backends.adapters import LayerAdapter, NormedAdapter
from headrace.backends.cpu.adapters import CpuAdapters
from headrace.backends.tiles import fill_tiles
from headrace.models.weights import Linear
from headrace.quant.arrays import cast, floats

WIDTHS, RANKS, NUM_IN, MAX_RANK = [40, 17, 300], [(3, 1, 16), (0, 9, 2)], 70, 16
TYPES = ["float32", "float16", "bfloat16"]
NORMED = (0, 2), (1, 1)
"""Slots and layers whose adapters have magnitudes."""


def in_lanes(a: Floats, x: Floats) -> Floats:
    """The sum of products as `lanes` of kernels.h: a [in], x [R, in] -> [R]."""
    whole = -(-len(a) // 16) * 16
    a, x = np.pad(a, (0, whole - len(a))), np.pad(x, ((0, 0), (0, whole - x.shape[1])))
    sums = np.zeros((len(x), 16), np.float32)
    for at in range(0, whole, 16):
        sums = fma(a[at : at + 16], x[:, at : at + 16], sums)
    for half in (8, 4, 2, 1):
        sums = sums[:, :half] + sums[:, half:]
    return np.asarray(sums[:, 0])


class Base:
    """The base's matrix, of which magnitudes need the rows and the biases."""

    def __init__(self) -> None:
        self.num_out, self.bias = sum(WIDTHS), normals(90, sum(WIDTHS))
        self.weights = normals(91, self.num_out, NUM_IN)

    def dense(self, first: int, last: int) -> Floats:
        return self.weights[first:last]


class Case:
    """Two adapters of a matrix of three layers, the second of which has none for the first layer."""

    def __init__(self, dtype: str) -> None:
        self.adapters = CpuAdapters(2, MAX_RANK)
        matrix = Base()
        self.adapters.add(matrix, Linear(["0", "1", "2"], NUM_IN, WIDTHS))
        self.spot = self.adapters.spots[matrix]
        self.weights: dict[tuple[int, int], NormedAdapter] = {}
        for slot, ranks in enumerate(RANKS):
            for part, (rank, width) in enumerate(zip(ranks, WIDTHS, strict=True)):
                if rank:
                    a, b = (cast(normals(slot + 7 * part, *shape), dtype) for shape in ((rank, NUM_IN), (width, rank)))
                    self.weights[slot, part] = NormedAdapter(a, b, 0.75 + slot)
            layers = {
                str(part): LayerAdapter(
                    *layer[:3], np.abs(normals(80, WIDTHS[part])) if (slot, part) in NORMED else None
                )
                for (of_slot, part), layer in self.weights.items()
                if of_slot == slot
            }
            self.adapters.load(slot, self.adapters.prepare(layers))
        for slot, part in NORMED:
            a, b, gains, _ = self.spot.layers[slot, part]
            width = WIDTHS[part]
            assert gains is not None
            self.weights[slot, part] = NormedAdapter(a[:, :NUM_IN], b[:, :width].T, 0.75 + slot, gains[:, :width])
            self.spot.table["scale"][slot, part] *= 0.75 + slot

    def run(
        self, isa: str, slots: list[int], x: Floats, before: Floats, num_threads: int, residual: Floats | None = None
    ) -> tuple[Floats, Floats]:
        """Rows of the slots through both operators: A x, and the outputs to which the rest was added."""
        rows, tiles = np.full(len(x), -1, np.int32), np.full(1 + 3 * len(x), -1, np.int32)
        fill_tiles(slots, list(range(len(slots) + 1)), tiles, rows)
        shared: Values = {"tiles": tiles, "list": rows, "table": self.spot.table, "parts": 3, "max_rank": MAX_RANK}
        inner, out = padded(len(x), 3 * MAX_RANK), padded(len(x), sum(WIDTHS))
        out[:, : sum(WIDTHS)] = before
        facts: Values = {"x": x, "ld_x": x.shape[1], "num_in": NUM_IN, "out": inner, "ld_out": inner.shape[1]}
        call("adapt_in", isa, len(x), num_threads=num_threads, **(shared | facts))
        facts = {"begins": self.spot.begins, "x": inner, "ld_x": inner.shape[1], "out": out, "ld_out": out.shape[1]}
        facts |= {"residual": residual, "ld_res": sum(WIDTHS)}
        call("adapt_out", isa, len(x), num_threads=num_threads, **(shared | facts))
        assert untouched(out, sum(WIDTHS))
        return inner, out[:, : sum(WIDTHS)]

    def expected(self, slots: list[int], x: Floats, before: Floats, residual: Floats | None = None) -> Floats:
        out = before.copy()
        for (slot, part), (a, b, scale, gains) in self.weights.items():
            rows = [row for row, of_row in enumerate(slots) if of_row == slot]
            inner = np.stack([in_lanes(each, x[rows]) * np.float32(scale) for each in floats(a)], axis=1)
            total = np.zeros((len(rows), WIDTHS[part]), np.float32)
            for i, column in enumerate(floats(b).T):
                total = fma(inner[:, i : i + 1], column, total)
            first = int(self.spot.begins[part])
            columns = slice(first, first + WIDTHS[part])
            if gains is not None:
                product = out[rows, columns] - (0 if residual is None else residual[rows, columns])
                total = fma(np.float32(scale), fma(gains[0], product, gains[1]), total)
            out[rows, columns] += total
        return out


def numbers(num_rows: int) -> tuple[Floats, Floats]:
    return normals(1, num_rows, NUM_IN), normals(2, num_rows, sum(WIDTHS))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_have_their_adapters_alone(isa: str, dtype: str) -> None:
    case = Case(dtype)
    slots = [1, -1, 0, 0, 1, 0, 0, 0, 1, -1, 0]
    x, before = numbers(len(slots))
    expected = case.expected(slots, x, before)
    for num_threads in (1, 2, 5):
        _, out = case.run(isa, slots, x, before, num_threads)
        assert same(out, expected)
    assert same(out[[1, 9]], before[[1, 9]])  # to the bit, as without adapters
    assert not same(case.expected([0] * len(slots), x, before), expected)  # control: another adapter shows
    for slot, part in NORMED:
        layer = case.weights[slot, part]
        case.weights[slot, part] = layer._replace(gains=None)
        assert not same(case.expected(slots, x, before), expected)  # control: gains show
        case.weights[slot, part] = layer


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_has_the_same_bits_among_any_others(isa: str) -> None:
    case = Case("bfloat16")
    x, before = numbers(9)
    alone = [case.run(isa, [row % 3 - 1], x[row : row + 1], before[row : row + 1], 1)[1] for row in range(9)]
    together = case.run(isa, [row % 3 - 1 for row in range(9)], x, before, 3)[1]
    assert same(np.concatenate(alone), together)


@pytest.mark.parametrize("isa", ISAS)
def test_gains_are_of_the_product_without_its_residual(isa: str) -> None:
    case, slots = Case("float32"), [0, 1, -1, 1, 0]
    x, before = numbers(len(slots))
    residual = normals(3, *before.shape)
    _, out = case.run(isa, slots, x, before, 2, residual)
    assert same(out, case.expected(slots, x, before, residual))
    assert not same(out, case.expected(slots, x, before))  # control: it shows


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_not_finite_stays_so(isa: str) -> None:
    case = Case("float32")
    x, before = numbers(3)
    x[1, 5] = np.inf
    out: Array = case.run(isa, [0, 0, 0], x, before, 1)[1]
    assert not np.isfinite(out[1]).any()
    assert np.isfinite(out[[0, 2]]).all()


def test_tiles_hold_each_row_once() -> None:
    rows, tiles = np.zeros(12, np.int32), np.zeros(40, np.int32)
    fill_tiles([2, -1, 0, 2], [0, 5, 6, 8, 12], tiles, rows)
    assert tiles[0] == 4
    assert tiles[1:13].reshape(-1, 3).tolist() == [[0, 2, 0], [2, 4, 2], [6, 4, 2], [10, 1, 2]]
    assert rows[:11].tolist() == [6, 7, 0, 1, 2, 3, 4, 8, 9, 10, 11]
    fill_tiles([], [0], tiles, rows)
    assert tiles[0] == 0
