"""Texts of the built-in model with and without a watermark: who has the key tells them apart, and nobody else."""

from __future__ import annotations

import pytest

from headrace import LLM
from headrace.protocol.params import SamplingParams, Watermark
from headrace.sampling.watermark import Detection, detect

KEY = Watermark(gamma=0.25, delta=3.0, hashing_key=77)
OTHER = Watermark(gamma=0.25, delta=3.0, hashing_key=78)
PROMPTS = ["Once upon a time", "One day, Tom", "The old woman said", "In the forest"]


def scores(result: list[list[int]], mark: Watermark) -> list[Detection]:
    return [detect(token_ids, mark) for token_ids in result]


@pytest.fixture(scope="module")
def texts() -> dict[str, list[list[int]]]:
    """Answers of 120 tokens, marked, marked while greedy, and unmarked."""
    llm = LLM(max_num_seqs=16, num_gpu_blocks_override=256)
    kinds = {"marked": (KEY, 1.0), "greedy": (KEY, 0.0), "unmarked": (None, 1.0)}
    result = {}
    for kind, (mark, temperature) in kinds.items():
        params = SamplingParams(seed=5, max_tokens=120, temperature=temperature, watermark=mark, ignore_eos=True)
        result[kind] = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    llm.close()
    return result


def test_marked_texts_are_told_from_unmarked_ones(texts: dict[str, list[list[int]]]) -> None:
    assert all(result.z_score > 4.0 and result.p_value < 1e-4 for result in scores(texts["marked"], KEY))
    # Greedy texts go round in circles, and a pair of tokens counts once.
    assert all(result.z_score > 3.0 for result in scores(texts["greedy"], KEY))
    assert all(result.z_score < 4.0 for result in scores(texts["unmarked"], KEY))


def test_control_another_key_sees_nothing(texts: dict[str, list[list[int]]]) -> None:
    for kind in texts:
        assert all(abs(result.z_score) < 4.0 for result in scores(texts[kind], OTHER))
