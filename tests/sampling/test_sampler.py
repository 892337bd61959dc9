"""`Sampler`: greedy, seeds, bias, min_tokens, log-probabilities, and clear errors instead of garbage."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.sampling.reference import filtered, ranking, sample, sample_one, token_gumbel

from headrace.protocol.params import SamplingParams
from headrace.sampling.sampler import NonFiniteLogitsError, Row, Sampler

INF = math.inf
FINITE = st.lists(st.floats(-30, 30, width=32) | st.integers(-3, 3).map(float), min_size=1, max_size=30)
GREEDY = SamplingParams(temperature=0.0)


def rows_of(*rows: list[float]) -> NDArray[np.float32]:
    return np.array(rows, np.float32)


def one(logits: list[float], params: SamplingParams, position: int = 5, num_prompt: int = 2) -> int:
    sampler = Sampler(len(logits), [1])
    return sample(sampler, rows_of(logits), [params], [position], [num_prompt])[0][0]


@given(FINITE)
def test_greedy_is_the_first_of_the_likeliest(logits: list[float]) -> None:
    assert one(logits, GREEDY) == ranking(logits)[0]


@given(FINITE, st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1), st.sampled_from([0.5, 1.0, 3.0]))
def test_a_draw_is_the_argmax_of_logits_and_keyed_noise(
    logits: list[float], seed: int, position: int, temperature: float
) -> None:
    sums = [x / temperature + token_gumbel(seed, position, i) for i, x in enumerate(logits)]
    best = sorted(sums)[-2:]
    got = one(logits, SamplingParams(temperature=temperature, seed=seed), position, 0)
    assert got == sums.index(max(sums)) or best[1] - best[0] < 1e-9


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_leaving_out_who_can_not_win_changes_nothing(spread: float) -> None:
    row = np.random.default_rng(1).normal(0, spread, 3000).astype(np.float32)
    sampler = Sampler(3000, [])
    for position in range(50):
        params = SamplingParams(seed=9)
        result = filtered(row, params)
        pairs = zip(result.token_ids.tolist(), result.scaled.tolist(), strict=True)
        sums = [s + token_gumbel(9, position, i) for i, s in pairs]
        assert sample_one(sampler, row, params, position, 0) == result.token_ids[int(np.argmax(sums))]


def test_seed_and_position_matter() -> None:
    logits = [0.0] * 1000
    draws = {one(logits, SamplingParams(seed=seed), position) for seed in range(4) for position in range(4)}
    assert len(draws) >= 14


def test_logit_bias() -> None:
    logits = [0.0, 1.0, 2.0]
    assert one(logits, SamplingParams(temperature=0.0, logit_bias={0: 2.5})) == 0
    assert one(logits, SamplingParams(temperature=0.0, logit_bias={2: -100.0})) == 1
    assert one(logits, SamplingParams(temperature=0.0, logit_bias={0: 2.0})) == 0, "a tie, to the lower id"


def test_min_tokens_masks_eos_and_stop_tokens_until_then() -> None:
    logits = [0.0, 9.0, 8.0, 1.0]
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[2])
    assert [one(logits, params, position, 4) for position in (4, 5, 6, 7, 8)] == [3, 3, 3, 1, 1]
    seeded = SamplingParams(temperature=1.0, seed=1, min_tokens=3, stop_token_ids=[2])
    assert {one(logits, seeded, position, 4) for position in (4, 5, 6)} <= {0, 3}


def test_min_tokens_masks_eos_under_ignore_eos_too() -> None:
    assert one([0.0, 9.0], SamplingParams(temperature=0.0, min_tokens=3, ignore_eos=True), 2, 2) == 0


def test_min_tokens_that_forbids_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens"):
        one([0.0, 9.0], SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[0]), 2, 2)


def test_bias_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logit_bias: 3 .* below 3"):
        one([0.0, 1.0, 2.0], SamplingParams(temperature=0.0, logit_bias={3: 1.0}))


def test_a_seed_is_needed() -> None:
    with pytest.raises(ValueError, match="seed"):
        one([0.0, 1.0], SamplingParams())


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1), SamplingParams(seed=1, top_p=0.5, top_k=2)])
@pytest.mark.parametrize("bias", [None, {1: 1.0}])
@pytest.mark.parametrize("logits", [[0.0, math.nan, 1.0], [math.nan, 5.0, 1.0], [0.0, INF, 1.0], [-INF, -INF, -INF]])
def test_S_12_non_finite_rows_are_refused(
    params: SamplingParams, bias: dict[int, float] | None, logits: list[float]
) -> None:
    import msgspec

    with pytest.raises(NonFiniteLogitsError, match="not finite"):
        one(logits, msgspec.structs.replace(params, logit_bias=bias))
    with pytest.raises(NonFiniteLogitsError):
        Sampler(3, []).prompt_logprobs(rows_of(logits), [0], 1)


def test_minus_infinity_is_a_token_that_never_comes() -> None:
    assert {one([0.0, -INF, 0.0], SamplingParams(seed=seed)) for seed in range(40)} == {0, 2}


@given(FINITE, st.integers(-1, 40), st.data())
def test_logprobs(logits: list[float], num_top: int, data: st.DataObject) -> None:
    token_id = data.draw(st.integers(0, len(logits) - 1))
    [got] = Sampler(len(logits), []).prompt_logprobs(rows_of(logits), [token_id], num_top)
    log_sum = math.log(math.fsum(math.exp(x - max(logits)) for x in logits)) + max(logits)
    order = ranking(logits)
    num = len(logits) if num_top == -1 else min(num_top, len(logits))
    assert got.token_id == token_id
    assert got.rank == order.index(token_id) + 1
    assert [i for i, _ in got.top] == order[:num]
    assert got.logprob == pytest.approx(logits[token_id] - log_sum, abs=1e-12)
    assert [value for _, value in got.top] == pytest.approx([logits[i] - log_sum for i in order[:num]], abs=1e-12)
    if got.rank <= num:
        assert got.top[got.rank - 1] == (token_id, got.logprob), "the same bits in both places"


def test_logprobs_are_of_the_raw_logits() -> None:
    sampler = Sampler(4, [])
    logits = rows_of([0.0, 1.0, 2.0, 3.0])
    params = SamplingParams(seed=3, temperature=0.3, top_k=1, logit_bias={0: 100.0}, logprobs=1)
    [token_id], logprobs = sample(sampler, logits, [params], [1], [1])
    assert token_id == 0
    assert logprobs[0].logprob == pytest.approx(-math.log(sum(math.exp(x) for x in logits[0].tolist())))
    assert (logprobs[0].rank, logprobs[0].top[0][0]) == (4, 3)


def test_logprobs_after_the_samplers_are_those_of_the_draw() -> None:
    rng = np.random.default_rng(7)
    logits, sampler = rng.normal(size=(1, 50)).astype(np.float32) * 3, Sampler(50, [])
    cuts = [
        {"top_k": 4},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 0.0},
        {"mirostat": 2},
        {"logit_bias": {9: 4.0}},
    ]
    for cut in (*cuts, {"allowed_token_ids": [3, 4]}, {"temperature": 0.5, "xtc_probability": 1.0}, {}):
        params = SamplingParams(**({"seed": 3, "logprobs": 50, "temperature": 0.8} | cut))
        after = msgspec.structs.replace(params, post_sampling_probs=True)
        rows = [Row(each, 1, 1) for each in (params, after)]
        before, samples = sampler.sample_rows(np.repeat(logits, 2, axis=0), rows)
        assert before.token_id == samples.token_id
        [(token_ids, shares)] = sampler.shares(logits, rows[1:])
        expected = dict(zip(token_ids.tolist(), shares.tolist(), strict=True))
        reported = {token_id: math.exp(logprob) for token_id, logprob in samples.logprob.top}
        assert reported == pytest.approx(dict.fromkeys(range(50), 0.0) | expected, abs=1e-6)
        assert math.exp(samples.logprob.logprob) == pytest.approx(expected[samples.token_id], rel=1e-5)
        # The control: those before the samplers are others.
        assert {token_id: math.exp(logprob) for token_id, logprob in before.logprob.top} != pytest.approx(reported)


def test_logprobs_only_where_asked_for() -> None:
    params = [GREEDY, SamplingParams(temperature=0.0, logprobs=0), SamplingParams(temperature=0.0, logprobs=2)]
    token_ids, logprobs = sample(Sampler(3, []), rows_of(*[[0.0, 1.0, 2.0]] * 3), params, [1] * 3, [1] * 3)
    assert token_ids == [2, 2, 2]
    assert {i: [t for t, _ in entry.top] for i, entry in logprobs.items()} == {1: [], 2: [2, 1]}


def test_shapes_are_checked() -> None:
    sampler = Sampler(4, [])
    with pytest.raises(ValueError, match=r"\(1, 3\), expected \[S, 4\]"):
        sample(sampler, np.zeros((1, 3), np.float32), [GREEDY], [0], [0])
    with pytest.raises(ValueError, match="2 rows of logits, 1 rows"):
        sample(sampler, np.zeros((2, 4), np.float32), [GREEDY], [0], [0])
    with pytest.raises(ValueError, match="token id 4"):
        sampler.prompt_logprobs(np.zeros((1, 4), np.float32), [4], 0)
    with pytest.raises(ValueError, match="2 rows of logits, 1 tokens"):
        sampler.prompt_logprobs(np.zeros((2, 4), np.float32), [1], 0)


def test_no_rows() -> None:
    assert sample(Sampler(4, []), np.zeros((0, 4), np.float32), [], [], []) == ([], {})


def test_the_logits_are_left_as_they_were() -> None:
    logits = np.random.default_rng(1).normal(size=(1, 50)).astype(np.float32)
    before = logits.copy()
    sample(
        Sampler(50, [3]),
        logits,
        [SamplingParams(seed=1, top_k=5, min_tokens=2, logit_bias={4: 3.0}, logprobs=2)],
        [1],
        [1],
    )
    assert np.array_equal(logits, before)
