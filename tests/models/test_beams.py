"""`LLM.beam_search` against `transformers`' `generate(num_beams=...)`: the same token ids, scores within rounding."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.harness import random_ids, save_random

from headrace import LLM, models
from headrace.protocol.beam import BeamSearchParams

NUM_TOKENS = 20
CASES = [
    {"beam_width": width, "length_penalty": penalty, "early_stopping": mode}
    for width, penalty, mode in itertools.product([2, 3, 4, 8], [1.0, 0.0, -1.5, 2.0], [False, True, "never"])
]


@pytest.fixture(scope="module", params=["llama", "gpt2", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp(request.param)
    reference = save_random(models.find(request.param).TINY, directory, seed=5)
    llm = LLM(
        str(directory), skip_tokenizer_init=True, dtype="float32", num_threads=1, num_gpu_blocks_override=256,
        block_size=4, max_num_batched_tokens=64,
    )  # fmt: skip
    yield llm, reference
    llm.close()


def stops_in(llm: LLM, prompt: list[int], width: int, num: int) -> list[int] | None:
    """Tokens that the beams of an endless search choose, so that beams do end."""
    if not num:
        return None
    (result,) = llm.beam_search([prompt], BeamSearchParams(beam_width=width, max_tokens=NUM_TOKENS, ignore_eos=True))
    chosen = [
        answer.tokens[len(prompt) + 3 + 4 * i]
        for i, answer in enumerate(itertools.islice(itertools.cycle(result.sequences), 4))
    ]
    return sorted(set(chosen))[:num]


def expected(reference: Any, prompt: list[int], case: dict[str, Any]) -> tuple[list[list[int]], list[float]]:
    with torch.no_grad():
        outputs = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            num_beams=case["beam_width"], num_return_sequences=case["beam_width"], max_new_tokens=NUM_TOKENS,
            length_penalty=case["length_penalty"], early_stopping=case["early_stopping"],
            eos_token_id=case["stop_token_ids"], pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    actual = []
    for row in outputs.sequences.tolist():
        answer = row[len(prompt) :]
        ends = [i for i, token in enumerate(answer) if token in (case["stop_token_ids"] or ())]
        actual.append(answer[: ends[0] + 1] if ends else answer)
    return actual, outputs.sequences_scores.tolist()


@pytest.mark.sampled(2)
def test_beams_are_those_of_transformers(pair: Any) -> None:
    llm, reference = pair
    ended = 0
    step = 1 if type(reference).__name__.startswith("Llama") else 4
    for seed, options in list(enumerate(CASES))[::step]:
        prompt = random_ids(9 + seed % 30, llm.core.info.vocab_size, seed)
        case = options | {"stop_token_ids": stops_in(llm, prompt, options["beam_width"], seed // 3 % 4)}
        token_ids, scores = expected(reference, prompt, case)
        params = BeamSearchParams(max_tokens=NUM_TOKENS, ignore_eos=True, **case)
        (actual,) = llm.beam_search({"prompt_token_ids": prompt}, params)
        assert [answer.tokens[len(prompt) :] for answer in actual.sequences] == token_ids, case
        assert [answer.score for answer in actual.sequences] == pytest.approx(scores, rel=2e-6, abs=2e-5), case
        ended += sum(answer.finish_reason == "stop" for answer in actual.sequences)
    assert ended > 60 / step


def test_one_beam_is_transformers_greedy(pair: Any) -> None:
    llm, reference = pair
    prompt = random_ids(12, llm.core.info.vocab_size, 3)
    with torch.no_grad():
        (row,) = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=NUM_TOKENS, eos_token_id=None, pad_token_id=0,
        ).tolist()  # fmt: skip
    (result,) = llm.beam_search([prompt], BeamSearchParams(beam_width=1, max_tokens=NUM_TOKENS, ignore_eos=True))
    assert result.sequences[0].tokens == row


@pytest.mark.sampled(2)
def test_control_another_length_penalty_is_noticed(pair: Any) -> None:
    llm, reference = pair
    differ = 0
    for seed, options in enumerate(CASES[-9:]):
        prompt = random_ids(9 + seed, llm.core.info.vocab_size, seed)
        case = options | {"stop_token_ids": stops_in(llm, prompt, options["beam_width"], 3)}
        token_ids, _ = expected(reference, prompt, case)
        wrong = BeamSearchParams(max_tokens=NUM_TOKENS, ignore_eos=True, **(case | {"length_penalty": 0.5}))
        (actual,) = llm.beam_search([prompt], wrong)
        differ += [answer.tokens[len(prompt) :] for answer in actual.sequences] != token_ids
    assert differ > 2
