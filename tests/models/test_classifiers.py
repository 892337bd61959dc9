"""Classifiers and cross-encoders: the numbers of the classes are transformers' logits, and the bits of a text are its
own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.test_encoders import open_llm, texts_of
from tests.support.harness import BACKENDS
from transformers import AutoConfig, AutoModelForSequenceClassification

from headrace import LLM, models

TYPES = [name for name in models.encoder_names() if name != "new"]


def save(name: str, directory: Path, num_classes: int = 3, **sizes: Any) -> Any:
    """Write a random classifier of a type, and return the transformers model."""
    torch.manual_seed(0)
    names = {i: f"class {i}" for i in range(num_classes)}
    config = AutoConfig.for_model(**models.find(name).TINY | {"id2label": names, "type_vocab_size": 2} | sizes)
    model = AutoModelForSequenceClassification.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return model


def classes(llm: LLM, texts: list[list[int]]) -> list[list[float]]:
    inputs: Any = [{"prompt_token_ids": text} for text in texts]
    return [each.outputs.probs for each in llm.classify(inputs, use_tqdm=False, use_activation=False)]


def logits(model: Any, text: list[int], types: list[int] | None = None) -> list[float]:
    further = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.no_grad():
        return [float(x) for x in model(input_ids=torch.tensor([text]), **further).logits[0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TYPES)
def test_classes_are_transformers_logits(name: str, backend: str, tmp_path: Path) -> None:
    model, texts = save(name, tmp_path), texts_of()
    llm = open_llm(tmp_path, backend, max_num_batched_tokens=600)
    assert llm.core.info.classes is not None
    assert llm.core.info.classes.labels == ("class 0", "class 1", "class 2")
    together = classes(llm, texts)
    for text, numbers in zip(texts, together, strict=True):
        assert numbers == pytest.approx(logits(model, text), abs=1e-5)
    # Law: the batch, and what was computed before, change no bit.
    assert [classes(llm, [text])[0] for text in texts[:4]] == together[:4]


@pytest.mark.parametrize("name", ["bert", "gte", "nomic_bert"])
def test_the_second_text_has_a_type_of_its_own(name: str, tmp_path: Path) -> None:
    model, (text,) = save(name, tmp_path), texts_of((40,))
    llm = open_llm(tmp_path)
    types = [0] * 15 + [1] * 25
    assert llm.core.info.classes is not None
    offset = llm.core.info.classes.second_type
    [numbers] = classes(llm, [[token + offset * kind for token, kind in zip(text, types, strict=True)]])
    assert numbers == pytest.approx(logits(model, text, types), abs=1e-5)
    assert numbers != pytest.approx(logits(model, text), abs=1e-3)
