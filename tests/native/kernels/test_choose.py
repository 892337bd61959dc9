"""Temperature, min_p, top_k and top_p of rows: the native operator of every ISA gives numpy's ids and numpy's bits."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from tests.native.kernels.calls import ISAS, Floats, normals

from headrace.backends import make_backend
from headrace.backends.cpu.choose import MAX_WIDTH, Chooser
from headrace.engine.library.load import choose_select
from headrace.protocol.params import SamplingParams
from headrace.runner.drawing import MAX_HEAD, NativeSelect
from headrace.sampling import noise
from headrace.sampling.filters import Candidates, Cut, select_all
from headrace.sampling.sampler import Row, Sampler

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


def bits_of(result: list[Candidates]) -> list[tuple[list[int], bytes, float]]:
    return [(each.token_ids.tolist(), each.scaled.tobytes(), each.base) for each in result]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [1, 2, 7, 8, 63, 300, 4099])
def test_the_same_bits_as_numpy(isa: str, width: int) -> None:
    rows = rows_of(width)
    for cut in CUTS:
        many, cuts = rows * 4, [cut] * (4 * len(rows))
        greatest = [float(row.max()) for row in many]
        want = bits_of(select_all(rows, greatest[: len(rows)], cuts[: len(rows)]))
        for num_threads in (1, 2):
            result = NativeSelect(Chooser(width, num_threads, isa, max_rows=5))(many, greatest, cuts)
            assert bits_of(result) == want * 4, (cut, num_threads)


@pytest.mark.sampled(3)
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


@pytest.mark.parametrize("isa", ISAS)
def test_who_can_not_win_is_left_out_and_nobody_else(isa: str) -> None:
    """Of wide pools few remain, with the bits that they had; among them is the winner among all."""
    rows = [row[:20_011] for row in rows_of(20_011)]
    native = NativeSelect(Chooser(20_011, 2, isa))
    for cut in (Cut(), Cut(temperature=3.0), Cut(floor=-9.0), Cut(temperature=2.0, top_p=0.95)):
        for seed, position in ((0, 0), (2**63 - 1, 2**40 + 3), (77, 5)):
            greatest = [float(row.max()) for row in rows]
            few = native(rows, greatest, [cut._replace(key=(seed, position))] * len(rows))
            for left, everyone in zip(few, select_all(rows, greatest, [cut] * len(rows)), strict=True):
                sums = everyone.scaled + noise.gumbel(noise.bits(seed, position, everyone.token_ids))
                if left.bar == -math.inf:
                    assert left.token_ids.tolist() == everyone.token_ids.tolist()
                    assert len(left.token_ids) <= 512
                    continue
                assert len(left.token_ids) < 100
                places = np.searchsorted(everyone.token_ids, left.token_ids)
                assert everyone.token_ids[places].tolist() == left.token_ids.tolist()
                assert everyone.scaled[places].tobytes() == left.scaled.tobytes()
                assert sums.max() >= left.bar, "true but for one draw in 10**8"
                assert set(everyone.token_ids[sums >= left.bar].tolist()) <= set(left.token_ids.tolist())


def test_a_draw_below_the_bar_is_made_among_all() -> None:
    """A bar too high, as it once in 10**8 draws is: the token is the same."""
    rows = np.stack(rows_of(3001)).astype(np.float32)
    native = NativeSelect(Chooser(3001))

    def severe(x: list[Floats], greatest: list[float], cuts: list[Cut]) -> list[Candidates]:
        result = native(x, greatest, cuts)
        return [dataclasses.replace(each, bar=1e9) if each.bar > -math.inf else each for each in result]

    requests = [Row(SamplingParams(seed=3), 9, 1)] * len(rows)
    samples = [Sampler(3001, [], select).sample_rows(rows, requests) for select in (select_all, native, severe)]
    assert samples[0] == samples[1] == samples[2]


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
    result = NativeSelect(Chooser(5000))([row], [float(row.max())], [Cut(top_p=0.5 + 2**-13)])
    assert bits_of(result) != bits_of(want)


def test_a_backend_offers_its_operator_where_rows_fit() -> None:
    cpu = make_backend("cpu", "cpu", "float32")
    assert isinstance(choose_select(cpu, 5000, 1), NativeSelect)
    assert choose_select(cpu, MAX_WIDTH + 1, 1) is select_all
    assert choose_select(make_backend("torch_ref", "cpu", "float32"), 5000, 1) is select_all
