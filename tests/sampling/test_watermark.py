"""The watermark against its definition, token by token, and the detector on texts made of nothing but noise."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from tests.sampling.reference import token_bits

from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams, Watermark
from headrace.sampling import noise, watermark
from headrace.sampling.sampler import Drawn, Row, Sampler

V = 101


def is_green(mark: Watermark, previous: int, token_id: int) -> bool:
    return token_bits(mark.hashing_key, previous, token_id, noise.WATERMARK) < mark.gamma * 2**64


@pytest.mark.parametrize("mark", [Watermark(), Watermark(gamma=0.5, hashing_key=2**63 - 1)])
def test_green_tokens_by_hand(mark: Watermark) -> None:
    for previous in (0, 7, 2**31 - 1):
        want = [is_green(mark, previous, token_id) for token_id in range(V)]
        assert watermark.green_mask(mark, previous, V).tolist() == want
        assert watermark.green_mask(mark, previous, V - 40).tolist() == want[:-40], "the width does not matter"


def test_watermark() -> None:
    """Green logits get delta, before bans and masks; log-probabilities are the model's."""
    mark = Watermark(gamma=0.3, delta=3.0, hashing_key=11)
    logits = np.random.default_rng(1).normal(0, 1, (1, V)).astype(np.float32)
    green = [is_green(mark, 42, token_id) for token_id in range(V)]
    banned = int(np.argmax(logits[0] + 3.0 * np.array(green)))
    want = max((i for i in range(V) if i != banned), key=lambda i: logits[0, i] + 3.0 * green[i])
    params = SamplingParams(temperature=0.0, watermark=mark, bad_words_token_ids=[[banned]], logprobs=0)
    [samples] = Sampler(V, []).sample_rows(logits, [Row(params, 9, 5, [3, 42])])
    [plain] = Sampler(V, []).prompt_logprobs(logits, [want], 0)
    assert isinstance(samples, Drawn)
    assert (samples.token_id, samples.logprob) == (want, plain)


def test_what_a_watermark_may_be() -> None:
    assert SamplingParams(watermark=True).watermark == Watermark()
    assert SamplingParams(watermark=False).watermark is None
    sampling_params = SamplingParams(watermark={"gamma": 0.5, "hashing_key": 3})  # type: ignore[arg-type]
    assert sampling_params.watermark == Watermark(gamma=0.5, hashing_key=3)
    for bad, field in (
        (3, "watermark"), ({"gamma": 1.0}, "watermark.gamma"), ({"delta": "x"}, "watermark.delta"),
        ({"hashing_key": -1}, "watermark.hashing_key"), ({"bias": 2.0}, "watermark.bias"),
    ):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            SamplingParams(watermark=bad)  # type: ignore[arg-type]
        assert caught.value.field == field


def test_detect_by_hand() -> None:
    mark = Watermark(gamma=0.4, hashing_key=5)
    text = [1, 2, 3, 1, 2, 9, 9, 9]
    pairs = set(pairwise(text))
    result = watermark.detect(text, mark)
    green = sum(is_green(mark, a, b) for a, b in pairs)
    assert result[:2] == (len(pairs), green) == (5, green), "each pair once"
    z = (green - 0.4 * 5) / math.sqrt(5 * 0.4 * 0.6)
    assert result.z_score == pytest.approx(z)
    assert result.p_value == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)))
    with pytest.raises(RequestError, match="token_ids"):
        watermark.detect([1], mark)


def test_unmarked_texts_have_z_scores_of_chance() -> None:
    rng = random.Random(3)
    scores = [watermark.detect([rng.randrange(5000) for _ in range(80)]).z_score for _ in range(400)]
    mean = math.fsum(scores) / 400
    spread = math.sqrt(math.fsum((z - mean) ** 2 for z in scores) / 400)
    assert abs(mean) < 0.2
    assert abs(spread - 1.0) < 0.15
