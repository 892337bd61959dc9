"""How often noise in the logits changes the likeliest token, and which products take floats so that few change."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.quant import flips
from headrace.quant.flips import Noise, Spread

GENERATOR = np.random.default_rng(5)
PLAIN = GENERATOR.normal(0, 2, (4000, 50)).astype(np.float32)


def noisy(deviation: float) -> np.ndarray:
    return (PLAIN + np.random.default_rng(6).normal(0, deviation, PLAIN.shape)).astype(np.float32)


@pytest.mark.parametrize("deviation", [0.01, 0.05, 0.2])
def test_the_predicted_rate_is_the_rate_of_changes(deviation: float) -> None:
    best, changed = flips.likeliest(PLAIN), noisy(deviation)
    plain, gaps = flips.gaps(PLAIN, best), flips.gaps(changed, best)
    spread = flips.spread(plain, gaps, plain)
    counted = (PLAIN.argmax(1) != changed.argmax(1)).mean()
    assert spread.rate == pytest.approx(counted, rel=0.4)
    assert (spread.body, spread.head) == (pytest.approx(2 * deviation**2, rel=0.1), 0)
    # At the limit as many tokens change as may.
    assert flips.rate(plain.tolist(), math.sqrt(spread.limit)) == pytest.approx(flips.MAX_RATE, rel=0.4)


def test_one_small_gap_does_not_decide() -> None:
    plain = flips.gaps(PLAIN, flips.likeliest(PLAIN))[:60]
    smaller = plain.copy()
    smaller[smaller.argmin()] = 1e-6
    limits = [flips.spread(gaps, gaps, gaps).limit for gaps in (plain, smaller)]
    assert limits[1] == pytest.approx(limits[0], rel=0.5)


def test_the_two_likeliest_are_wherever_they_stand() -> None:
    for row in np.eye(3, dtype=np.float32):
        values = row + np.roll(row, 1) / 2
        (pair,) = flips.likeliest(values[None]).tolist()
        assert pair == np.argsort(-values)[:2].tolist()
        assert flips.gaps(values[None], np.array([pair])).tolist() == [0.5]


HEAD = Noise(1e-4, 8.0, True)
BODY = [Noise(1e-4, 4.0, False), Noise(3e-4, 1.0, False), Noise(2e-4, 4.0, False)]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (10.0, set()),
        (8.0, set()),
        (7.9, {BODY[1]}),
        (4.9, {BODY[1], BODY[2]}),
        (2.9, {BODY[1], BODY[2], BODY[0]}),
        (1.9, {BODY[1], BODY[2], BODY[0], HEAD}),
        (math.nan, {*BODY, HEAD}),
    ],
)
def test_products_take_floats_that_add_most_for_their_cost_and_no_more_than_need_be(
    limit: float, expected: set[Noise]
) -> None:
    assert flips.chosen([HEAD, *BODY], Spread(limit, 6.0, 2.0, 0.1)) == expected


def test_a_product_without_noise_stays() -> None:
    still = Noise(0.0, 1.0, False)
    assert flips.chosen([still, BODY[0]], Spread(0.5, 1.0, 0.0, 0.1)) == {BODY[0]}


def test_only_tokens_that_the_model_would_have_said_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    best = np.array([[5, 1], [6, 1], [9, 1]])
    token_ids, rows = [0, 4, 5, 7, 9], [1, 2, 3]
    monkeypatch.setattr(flips, "LEAST_SAID", 2)
    assert flips.said(best, token_ids, rows).tolist() == [True, False, True]
    monkeypatch.setattr(flips, "LEAST_SAID", 3)
    assert flips.said(best, token_ids, rows).tolist() == [True, True, True], "too few to judge by"
