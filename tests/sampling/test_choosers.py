"""typical_p, top_n_sigma, XTC, dynamic temperature, mirostat and adaptive_p against slow references written from their
definitions, and against transformers where it has them; and the order of samplers."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.sampling.reference import chi_square_z, ranking

from headrace.protocol.errors import RequestError
from headrace.protocol.params import DEFAULT_SAMPLERS, SamplingParams
from headrace.sampling import filters, noise
from headrace.sampling.filters import Candidates, Cut, select, weights
from headrace.sampling.sampler import Drawn, Row, Sampler

# Apart from each other: what is all but equal may fall either way.
LOGITS = st.lists(st.integers(-960, 960).map(lambda i: i / 64), min_size=2, max_size=40, unique=True)
SHARES = st.floats(0.01, 0.99)


def all_of(logits: list[float], temperature: float = 1.0) -> Candidates:
    x = np.array(logits, np.float32)
    return select(x, float(x.max()), Cut(temperature=temperature))


def softmax(logits: list[float]) -> list[float]:
    most = max(logits)
    mass = [math.exp(x - most) for x in logits]
    return [m / math.fsum(mass) for m in mass]


def entropy(p: list[float]) -> float:
    return -math.fsum(x * math.log(x) for x in p if x > 0)


def survivors(warped: torch.Tensor) -> list[int]:
    return torch.nonzero(warped[0] > -math.inf).flatten().tolist()


@given(LOGITS)
def test_weights_are_exponentials(logits: list[float]) -> None:
    scaled = np.array(logits) - max(logits)
    assert weights(scaled).tolist() == pytest.approx(
        [math.exp(x) * 2**44 for x in scaled.tolist()], abs=0.51, rel=1e-14
    )


def test_weights_of_nothing_and_of_one() -> None:
    assert weights(np.array([0.0, -31.2, -800.0, -np.inf])).tolist() == [2**44, 0, 0, 0]


@given(LOGITS, SHARES)
def test_typical_p(logits: list[float], share: float) -> None:
    p = softmax(logits)
    level = entropy(p)
    order = sorted(range(len(p)), key=lambda i: (abs(-math.log(p[i]) - level), i))
    kept_ids, mass, near = [], 0.0, 1.0
    for i in order:
        kept_ids.append(i)
        mass += p[i]
        near = min(near, abs(mass - share))
        if mass >= share:
            break
    gaps = sorted(abs(-math.log(x) - level) for x in p)
    assume(near > 1e-9 and all(b - a > 1e-9 for a, b in pairwise(gaps)))
    result = filters.typical_p(all_of(logits), SamplingParams(typical_p=share))
    assert result.token_ids.tolist() == sorted(kept_ids)
    assert result.scaled.max() == 0.0


@given(LOGITS, SHARES)
def test_typical_p_is_transformers(logits: list[float], share: float) -> None:
    p = softmax(logits)
    far = sorted((abs(-math.log(x) - entropy(p)), x) for x in p)
    assume(all(b[0] - a[0] > 1e-3 for a, b in pairwise(far)))
    mass = np.cumsum([x for _, x in far])
    assume(np.abs(mass - share).min() > 1e-4)
    theirs = transformers.TypicalLogitsWarper(share)(torch.tensor([[0]]), torch.tensor([logits]))
    result = filters.typical_p(all_of(logits), SamplingParams(typical_p=share))
    assert result.token_ids.tolist() == survivors(theirs)


@given(LOGITS, SHARES)
def test_min_p_is_transformers(logits: list[float], floor: float) -> None:
    p = softmax(logits)
    assume(min(abs(x - floor * max(p)) for x in p) > 1e-5)
    theirs = transformers.MinPLogitsWarper(floor)(torch.tensor([[0]]), torch.tensor([logits]))
    assert filters.min_p(all_of(logits), SamplingParams(min_p=floor)).token_ids.tolist() == survivors(theirs)


@given(LOGITS, SHARES)
def test_top_p_is_transformers(logits: list[float], share: float) -> None:
    mass = np.cumsum(sorted(softmax(logits), reverse=True))
    assume(np.abs(mass - share).min() > 1e-4)
    theirs = transformers.TopPLogitsWarper(share)(torch.tensor([[0]]), torch.tensor([logits]))
    assert filters.top_p(all_of(logits), SamplingParams(top_p=share)).token_ids.tolist() == survivors(theirs)


@given(LOGITS, st.floats(0.05, 4))
def test_top_n_sigma(logits: list[float], n: float) -> None:
    mean = math.fsum(logits) / len(logits)
    sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in logits) / len(logits))
    assume(min(abs(max(logits) - n * sigma - x) for x in logits) > 1e-9)
    want = [i for i, x in enumerate(logits) if x >= max(logits) - n * sigma]
    assert filters.top_n_sigma(all_of(logits), SamplingParams(top_n_sigma=n)).token_ids.tolist() == want


def test_top_n_sigma_does_not_depend_on_the_temperature() -> None:
    logits = np.random.default_rng(3).normal(0, 2, 50).astype(np.float32).tolist()
    values = [
        filters.top_n_sigma(all_of(logits, t), SamplingParams(top_n_sigma=1.3)).token_ids.tolist() for t in (0.3, 9)
    ]
    assert values[0] == values[1]


@given(LOGITS, st.floats(0, 0.6), st.floats(0, 1), st.floats(0, 1))
def test_xtc(logits: list[float], threshold: float, probability: float, coin: float) -> None:
    p = softmax(logits)
    assume(min(abs(x - threshold) for x in p) > 1e-9)
    top = [i for i in ranking(logits) if p[i] >= threshold]
    excluded = top[:-1] if coin < probability else []
    params = SamplingParams(xtc_probability=probability, xtc_threshold=threshold)
    result = filters.xtc(all_of(logits), params, coin)
    assert result.token_ids.tolist() == [i for i in range(len(p)) if i not in excluded]
    assert result.scaled.max() == 0.0


def test_xtc_tosses_its_own_coin() -> None:
    """As often as asked for, by the position alone, and not with the numbers that pick the token."""
    params = SamplingParams(seed=4, xtc_probability=0.3, xtc_threshold=0.2)
    logits = np.array([[3.0, 2.5, 0.0, -1.0]] * 2000, np.float32)
    samples = Sampler(4, []).sample_rows(logits, [Row(params, i, 0) for i in range(2000)])
    excluded = {i for i, each in enumerate(samples) if isinstance(each, Drawn) and each.token_id != 0}
    coins = [noise.uniform(4, i, noise.XTC) for i in range(2000)]
    assert abs(sum(c < 0.3 for c in coins) / 2000 - 0.3) < 0.04
    assert all(i in excluded for i, c in enumerate(coins) if c < 0.3)
    first = noise.bits_of_rows([4] * 2000, list(range(2000)), [1] * 2000, np.zeros(2000, np.int64))
    assert abs(np.corrcoef(coins, first.astype(np.float64))[0, 1]) < 0.1


@given(LOGITS, st.floats(0, 2), st.floats(0.1, 3), st.floats(0.2, 3))
def test_dynamic_temperature(logits: list[float], temperature: float, spread: float, exponent: float) -> None:
    share = entropy(softmax(logits)) / math.log(len(logits))
    low, high = max(0.0, temperature - spread), temperature + spread
    warmth = low + (high - low) * share**exponent
    # Where the model is all but sure, weights of 44 bits leave an error in its tiny entropy that is seen.
    assume(warmth > 1e-3 and share > 1e-6)
    params = SamplingParams(temperature=temperature, dynatemp_range=spread, dynatemp_exponent=exponent)
    result = filters.temperature(all_of(logits), params)
    want = {i: (x - max(logits)) / warmth for i, x in enumerate(logits)}
    assert result.scaled.tolist() == pytest.approx([want[i] for i in result.token_ids.tolist()], rel=1e-5, abs=1e-9)


def test_dynamic_temperature_is_cold_where_the_model_is_sure() -> None:
    params = SamplingParams(temperature=1.0, dynatemp_range=0.5)
    sure, torn = all_of([40.0, 0.0, 0.0, 0.0]), all_of([1.0, 0.0, 1.0, 0.5])
    assert filters.temperature(sure, params).scaled.min() == pytest.approx(-80.0, rel=1e-6)
    assert filters.temperature(torn, params).scaled.min() == pytest.approx(-1.0 / 1.45, rel=0.05)


def zipf_k(logits: list[float], mu: float, vocab_size: int) -> float:
    """Algorithm 1 of the paper: the least-squares slope of Zipf's law over the hundred likeliest, then k."""
    p = sorted(softmax(logits), reverse=True)[:100]
    t = [math.log((i + 2) / (i + 1)) for i in range(len(p) - 1)]
    b = [math.log(p[i] / p[i + 1]) for i in range(len(p) - 1)]
    s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
    e = s - 1
    try:
        return float(((e * 2**mu) / (1 - vocab_size**-e)) ** (1 / s))
    except OverflowError:
        return 1e9


@given(LOGITS, st.floats(0.5, 12))
def test_mirostat_1(logits: list[float], mu: float) -> None:
    p = sorted(softmax(logits), reverse=True)
    assume(p[-1] > 1e-12)
    expected = min(zipf_k(logits, mu, len(logits)), 1e9 + 0.5)
    assume(abs(expected - round(expected)) > 1e-6)
    k = max(1, min(len(logits), int(expected)))
    actual = filters.mirostat(all_of(logits), SamplingParams(mirostat=1), mu, len(logits))
    assert actual.token_ids.tolist() == sorted(ranking(logits)[:k])


@given(LOGITS, st.floats(-1, 12))
def test_mirostat_2(logits: list[float], mu: float) -> None:
    bits = [-math.log2(p) for p in softmax(logits)]
    assume(min(abs(x - mu) for x in bits) > 1e-9)
    want = [i for i, x in enumerate(bits) if x <= mu] or [ranking(logits)[0]]
    result = filters.mirostat(all_of(logits), SamplingParams(mirostat=2), mu, len(logits))
    assert result.token_ids.tolist() == want


@pytest.mark.parametrize("version", [1, 2])
def test_mirostats_state(version: int) -> None:
    """mu starts at twice tau, falls by eta times (the token's surprise less tau), and keeps the mean surprise there."""
    logits = np.random.default_rng(5).normal(0, 2, (1, 400)).astype(np.float32)
    bits = [-math.log2(p) for p in softmax(logits[0].tolist())]
    params = SamplingParams(seed=3, mirostat=version, mirostat_tau=4.0, mirostat_eta=0.2)
    sampler, mu, output = Sampler(400, []), None, []
    for position in range(300):
        [samples] = sampler.sample_rows(logits, [Row(params, position, 0, state=mu)])
        assert isinstance(samples, Drawn)
        want = (8.0 if mu is None else mu) - 0.2 * (bits[samples.token_id] - 4.0)
        assert samples.state == pytest.approx(want, abs=1e-9)
        mu = samples.state
        output.append(bits[samples.token_id])
    assert abs(sum(output[50:]) / 250 - 4.0) < 0.3


def test_mirostat_takes_the_place_of_the_filters() -> None:
    logits = np.random.default_rng(6).normal(0, 2, (60, 50)).astype(np.float32)
    ids = []
    for more in ({}, {"top_k": 1, "top_p": 0.1, "min_p": 0.9, "typical_p": 0.1, "xtc_probability": 1.0}):
        params = SamplingParams(seed=3, mirostat=2, **more)  # type: ignore[arg-type]
        ids.append(Sampler(50, []).sample_rows(logits, [Row(params, i, 0) for i in range(60)]))
    assert ids[0] == ids[1]


@given(LOGITS, st.floats(0, 1), st.floats(0, 1))
def test_adaptive_p(logits: list[float], target: float, mean: float) -> None:
    """llama.cpp's curve, with its peak of 5, over the probabilities of all candidates."""
    aim = min(1.0, max(0.0, 2 * target - mean))
    far = [abs(p - aim) / 0.3 for p in softmax(logits)]
    want = [5.0 - 10.0 * d * d / (1.0 + d) for d in far]
    result = filters.adaptive_p(all_of(logits), SamplingParams(adaptive_target=target), mean)
    assert result.token_ids.tolist() == list(range(len(logits)))
    assert result.scaled.tolist() == pytest.approx([x - max(want) for x in want], abs=1e-9)


def test_adaptive_p_holds_the_mean_probability_at_its_target() -> None:
    """The mean starts at the target, and each token's probability gets a share of 1 - decay in it."""
    p = [0.5, 0.25, 0.12, 0.08, 0.05]
    logits = np.log(np.array([p], np.float32))
    means = []
    for target in (0.15, 0.3, -1.0):
        params = SamplingParams(seed=3, adaptive_target=target, adaptive_decay=0.8)
        sampler, state, output = Sampler(5, []), None, []
        for position in range(400):
            [samples] = sampler.sample_rows(logits, [Row(params, position, 0, state=state)])
            assert isinstance(samples, Drawn)
            if target >= 0:
                before = target if state is None else state
                assert samples.state == pytest.approx(0.8 * before + 0.2 * p[samples.token_id], abs=1e-6)
            else:
                assert samples.state is None
            state = samples.state
            output.append(p[samples.token_id])
        means.append(sum(output) / 400)
    assert abs(means[0] - 0.15) < 0.03
    assert abs(means[1] - 0.3) < 0.03
    assert abs(means[2] - math.fsum(x * x for x in p)) < 0.03, "off: the model's own"


def test_adaptive_p_runs_last_wherever_it_is_listed() -> None:
    logits = np.random.default_rng(6).normal(0, 2, (60, 50)).astype(np.float32)
    orders = (["adaptive_p", "temperature", "top_k"], ["temperature", "top_k", "adaptive_p"], ["temperature", "top_k"])
    output = []
    for order in orders:
        params = SamplingParams(seed=3, adaptive_target=0.1, top_k=5, temperature=0.7, samplers=order)
        output.append(Sampler(50, []).sample_rows(logits, [Row(params, i, 0) for i in range(60)]))
    assert output[0] == output[1]
    assert output[1] != output[2], "not listed"
    assert all(isinstance(each, Drawn) and each.state is None for each in output[2])
    greedy = SamplingParams(seed=3, adaptive_target=0.1, temperature=0.0)
    [samples] = Sampler(50, []).sample_rows(logits[:1], [Row(greedy, 5, 0)])
    assert isinstance(samples, Drawn)
    assert samples.token_id == int(logits[0].argmax())


# -- order


def law_of(logits: list[float], order: list[str], **fields: float) -> dict[int, float]:
    """Probabilities after the samplers one by one, in plain Python."""
    x = dict(enumerate(logits))
    for name in order:
        most = max(x.values())
        ids = sorted(x, key=lambda i: (-x[i], i))
        p = dict(zip(x, softmax(list(x.values())), strict=True))
        if name == "temperature":
            x = {i: value / fields["temperature"] for i, value in x.items()}
        elif name == "top_k":
            x = {i: x[i] for i in ids[: int(fields["top_k"])]}
        elif name == "min_p":
            x = {i: value for i, value in x.items() if math.exp(value - most) >= fields["min_p"]}
        elif name == "top_p":
            head, mass = [], 0.0
            for i in ids:
                head.append(i)
                mass += p[i]
                if mass >= fields["top_p"]:
                    break
            x = {i: x[i] for i in head}
    p = dict(zip(x, softmax(list(x.values())), strict=True))
    return p


ORDERS = [
    ["temperature", "min_p", "top_k", "top_p"],
    ["top_k", "top_p", "min_p", "temperature"],
    ["top_p", "temperature", "top_k", "min_p"],
    ["min_p", "temperature", "top_p"],
    ["top_p"],
]
FIELDS = {"temperature": 1.8, "top_k": 9, "top_p": 0.8, "min_p": 0.08}


def z_of(order: list[str], law: dict[int, float], logits: list[float]) -> float:
    params = [SamplingParams(seed=seed, samplers=order, **FIELDS) for seed in (1, 2)]  # type: ignore[arg-type]
    sampler, counts = Sampler(len(logits), []), Counter[int]()
    row = np.array([logits] * 2000, np.float32)
    for param in params:
        for samples in sampler.sample_rows(row, [Row(param, i, 0) for i in range(2000)]):
            assert isinstance(samples, Drawn)
            counts[samples.token_id] += 1
    return chi_square_z(counts, law)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_samplers_run_in_the_order_given(order: list[str]) -> None:
    logits = np.random.default_rng(8).normal(0, 2, 30).astype(np.float32).tolist()
    assert z_of(order, law_of(logits, order, **FIELDS), logits) < 4.0


def test_control_another_order_is_another_law() -> None:
    logits = np.random.default_rng(8).normal(0, 2, 30).astype(np.float32).tolist()
    assert z_of(ORDERS[0], law_of(logits, ORDERS[1], **FIELDS), logits) > 4.0


def test_penalties_may_come_after_filters() -> None:
    """top_k = 2 first keeps 0 and 1; penalties after it can not bring 2 back."""
    logits = np.array([[3.0, 2.9, 2.8]], np.float32)
    early, late = (
        SamplingParams(seed=1, top_k=2, frequency_penalty=2.0, samplers=order)
        for order in (["penalties", "top_k"], ["top_k", "penalties"])
    )
    history = [0, 0, 0, 1]
    seen = [set(), set()]  # type: list[set[int]]
    for at, params in enumerate((early, late)):
        for position in range(60):
            [samples] = Sampler(3, []).sample_rows(logits, [Row(params, position, 0, history)])
            assert isinstance(samples, Drawn)
            seen[at].add(samples.token_id)
    assert 2 in seen[0]
    assert 2 not in seen[1]


def test_samplers_that_are_not_listed_do_not_run() -> None:
    logits = np.array([[0.0, 0.0, 0.0, 0.0]] * 40, np.float32)
    params = SamplingParams(seed=1, top_k=1, temperature=0.0, samplers=["top_p"])
    samples = Sampler(4, []).sample_rows(logits, [Row(params, i, 0) for i in range(40)])
    assert {each.token_id for each in samples if isinstance(each, Drawn)} == {0, 1, 2, 3}


@pytest.mark.parametrize("samplers", [["nonsense"], ["top_k", "top_k"], ["typ_p", "typical_p"], "top_k"])
def test_orders_that_are_refused(samplers: object) -> None:
    with pytest.raises(RequestError, match="samplers"):
        SamplingParams(samplers=samplers)  # type: ignore[arg-type]


def test_the_default_order_is_vllms_with_the_others_in_between() -> None:
    vllms = ("penalties", "temperature", "min_p", "top_k", "top_p")
    assert tuple(name for name in DEFAULT_SAMPLERS if name in vllms) == vllms
