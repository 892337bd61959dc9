"""Classifiers and cross-encoders: the numbers of the classes are transformers' logits, and the bits of a text are its
own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tests.models.test_encoders import open_llm, texts_of
from tests.support.harness import BACKENDS
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from headrace import LLM, models
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.protocol.step import Classes
from headrace.text import pairs

TYPES = [name for name in models.encoder_names() if name not in ("new", "jina-bert-v2")]


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma2", "gpt2", "qwen3_moe"])
def test_decoders_with_a_head_for_classes(name: str, backend: str, tmp_path: Path) -> None:
    """Of the last token. The files have no output head."""
    model, texts = save(name, tmp_path, tie_word_embeddings=False, pad_token_id=0), texts_of((1, 2, 40, 129))
    llm = open_llm(tmp_path, backend, max_num_batched_tokens=64)
    assert not llm.core.info.generates
    together = classes(llm, texts)
    for text, numbers in zip(texts, together, strict=True):
        assert numbers == pytest.approx(logits(model, text), abs=2e-5)
    # Law: the batch, the chunks, and what was computed before, change no bit.
    assert [classes(llm, [text])[0] for text in texts] == together
    assert classes(open_llm(tmp_path, backend, max_num_batched_tokens=512), texts) == together
    with pytest.raises(RequestError, match="a model that answers: this one gives vectors or classes"):
        llm.generate([{"prompt_token_ids": [5]}], use_tqdm=False)


TOKENS = ["no", "yes", *(f"w{i}" for i in range(5, 180)), "<|im_start|>", "<|im_end|>", "<think>", "</think>", "[UNK]"]


@pytest.fixture
def reranker(tmp_path: Path) -> tuple[Any, Path]:
    """A decoder whose answer "yes" or "no" is the score, as Qwen3-Reranker's files have it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**models.find("qwen3").TINY | {"max_position_embeddings": 300})
    model = AutoModelForCausalLM.from_config(config).eval().float()
    model.save_pretrained(tmp_path)
    library = tokenizers.Tokenizer(WordLevel({word: i for i, word in enumerate(TOKENS)}, unk_token="[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.add_special_tokens(TOKENS[-5:-1])
    library.save(str(tmp_path / "tokenizer.json"))
    return model, tmp_path


OVERRIDES = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}


def test_a_reranker_answers_with_yes_or_no(reranker: tuple[Any, Path]) -> None:
    model, directory = reranker
    llm = LLM(str(directory), dtype="float32", hf_overrides=OVERRIDES)
    assert llm.core.info.classes == Classes(("yes",), "sigmoid", 0, "qwen3")
    library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    query, documents = "w7 w8", ["w9 w10 w11", "w12", "w7 " * 30]
    scores = [each.outputs.score for each in llm.score(query, documents, use_tqdm=False)]
    for document, score in zip(documents, scores, strict=True):
        middle = f"<Instruct>: {pairs.INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        ids = [i for part in (pairs.QWEN3[0], middle, pairs.QWEN3[2]) for i in library.encode(part).ids]
        with torch.no_grad():
            last = model(input_ids=torch.tensor([ids])).logits[0, -1, :2]
        assert score == pytest.approx(float(last.softmax(0)[1]), abs=1e-6)
    assert len(set(scores)) == 3


def test_a_text_that_is_too_long_is_cut_inside_the_template(reranker: tuple[Any, Path]) -> None:
    _, directory = reranker
    llm = LLM(str(directory), dtype="float32", hf_overrides=OVERRIDES)
    tokenizer, info = llm.get_tokenizer(), llm.core.info
    whole = pairs.pair_ids("w7", "w8", tokenizer, info)
    cut = pairs.pair_ids("w7", "w8 " * 500, tokenizer, info, -1)
    assert len(cut) == info.max_prompt_len
    end = tokenizer.encode(pairs.QWEN3[2], add_special_tokens=False)
    assert cut[-len(end) :] == whole[-len(end) :] == end
    assert pairs.pair_ids("w7", "w8", tokenizer, info, instruction="w9") != whole
    with pytest.raises(RequestError, match="at least"):
        pairs.pair_ids("w7", "w8", tokenizer, info, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classifier_from_token": ["no", "maybe"]}, "'maybe', which is no token"),
        ({"classifier_from_token": "yes"}, "expected at most 64 texts"),
        ({"problem_type": "guessing"}, "problem_type is 'guessing'"),
    ],
)
def test_mistakes_in_the_settings_are_named(change: dict[str, Any], message: str, reranker: tuple[Any, Path]) -> None:
    with pytest.raises(CheckpointError, match=message):
        LLM(str(reranker[1]), dtype="float32", hf_overrides=OVERRIDES | change)


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({}, "softmax"),
        ({"problem_type": "regression"}, "identity"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
    ],
)
def test_the_activation_is_that_of_the_files(changes: dict[str, Any], activation: str, tmp_path: Path) -> None:
    save("bert", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    llm = open_llm(tmp_path)
    assert llm.core.info.classes is not None
    assert llm.core.info.classes.activation == activation
    [raw] = torch.tensor(classes(llm, texts_of((9,))))
    inputs: Any = [{"prompt_token_ids": texts_of((9,))[0]}]
    probs = llm.classify(inputs, use_tqdm=False)[0].outputs.probs
    right = {"softmax": raw.softmax(0), "identity": raw, "sigmoid": raw.sigmoid()}[activation]
    assert probs == pytest.approx(right.tolist(), abs=1e-6)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_classifier_is_near(quantization: str, tmp_path: Path) -> None:
    """The head itself stays in floats."""
    model, texts = save("bert", tmp_path), texts_of((40, 129))
    computed = classes(open_llm(tmp_path, quantization=quantization), texts)
    for text, numbers in zip(texts, computed, strict=True):
        assert numbers == pytest.approx(logits(model, text), abs=0.2)


def test_a_mean_of_all_tokens_goes_through_the_head(tmp_path: Path) -> None:
    model, texts = save("modernbert", tmp_path, classifier_pooling="mean", classifier_bias=True), texts_of((1, 40, 300))
    for text, numbers in zip(texts, classes(open_llm(tmp_path), texts), strict=True):
        assert numbers == pytest.approx(logits(model, text), abs=1e-5)


def test_a_classifier_has_no_vectors_and_a_model_of_vectors_no_classes(tmp_path: Path) -> None:
    save("bert", tmp_path)
    inputs: Any = [{"prompt_token_ids": [5]}]
    with pytest.raises(RequestError, match="a model of vectors; this one has classes"):
        open_llm(tmp_path).embed(inputs)
    with pytest.raises(RequestError, match="this model has no classes"):
        LLM("builtin").classify("x")
