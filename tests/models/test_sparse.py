"""SPLADE: vectors of a weight for each token of the vocabulary, made of the logits of a head for masked words."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.support.harness import BACKENDS
from tests.support.server import write_tokenizer
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from headrace import LLM, models
from headrace.models.encoders import base, head
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.text.vectors import Form, finished, word_weights

TYPES = ("bert", "camembert", "distilbert", "modernbert", "mpnet", "roberta", "xlm-roberta")
FORMS = [(strategy, activation) for strategy in ("max", "sum") for activation in ("relu", "log1p_relu")]
LENGTHS = (1, 2, 40, 129, 300)


def save(name: str, directory: Path, strategy: str = "max", activation: str = "relu", **sizes: Any) -> Any:
    """Write a random checkpoint with sentence-transformers' files, and return the transformers model."""
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(**models.find(name).TINY | sizes)).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        # So that many weights are 0 even where the greatest logit counts.
        model.get_output_embeddings().bias -= 0.7 * torch.rand(model.config.vocab_size)
    model.save_pretrained(directory)
    write_modules(directory, strategy, activation)
    return model


def write_modules(directory: Path, strategy: str, activation: str, *more: str, first: str = "MLMTransformer") -> None:
    kinds = (first, "SpladePooling", *more)
    rows = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else ""}
        | {"type": f"sentence_transformers.sparse_encoder.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(rows))
    folder = directory / "1_SpladePooling"
    folder.mkdir(exist_ok=True)
    settings = {"pooling_strategy": strategy, "activation_function": activation, "word_embedding_dimension": None}
    (folder / "config.json").write_text(json.dumps(settings))


def texts_of(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(5, 199) for _ in range(num)] for num in lengths]


def open_llm(directory: Path, backend: str = "cpu", **options: Any) -> LLM:
    return LLM(str(directory), backend=backend, dtype="float32", skip_tokenizer_init=True, **options)


def vectors(llm: LLM, texts: list[list[int]], **options: Any) -> list[list[float]]:
    inputs: Any = [{"prompt_token_ids": text} for text in texts]
    return [output.outputs.embedding for output in llm.embed(inputs, use_tqdm=False, **options)]


def weights(model: Any, text: list[int], strategy: str = "max", activation: str = "relu") -> np.ndarray[Any, Any]:
    """Formal et al. 2021: log(1 + relu(logit)), summed over a text's tokens (SPLADE) or the greatest (v2)."""
    with torch.no_grad():
        numbers = torch.log1p(torch.relu(model(input_ids=torch.tensor([text])).logits[0]))
    numbers = torch.log1p(numbers) if activation == "log1p_relu" else numbers
    pooled: np.ndarray[Any, Any] = (numbers.amax(0) if strategy == "max" else numbers.sum(0)).numpy()
    return pooled


def error(model: Any, texts: list[list[int]], computed: list[list[float]], *form: str) -> float:
    """The greatest difference from transformers, as a share of the greatest weight."""
    worst = 0.0
    for text, vector in zip(texts, computed, strict=True):
        right = weights(model, text, *form)
        worst = max(worst, float(np.abs(np.array(vector) - right).max() / right.max()))
    return worst


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TYPES)
def test_weights_are_those_of_transformers_logits(name: str, backend: str, tmp_path: Path) -> None:
    model, texts = save(name, tmp_path), texts_of()
    for form in FORMS:
        write_modules(tmp_path, *form)
        llm = open_llm(tmp_path, backend, max_num_batched_tokens=600)
        assert (llm.core.info.pooling, llm.core.info.hidden_size) == (f"splade-{form[0]}", 199)
        together = vectors(llm, texts)
        assert error(model, texts, together, *form) < 1e-5
        assert 0 < sum(x == 0 for x in together[0]) < 199
        # Law: the batch, and what was computed before, change no bit.
        assert [vectors(llm, [text])[0] for text in texts] == together


def test_weights_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    theirs = pytest.importorskip("sentence_transformers")
    for place, (name, form) in enumerate(zip(TYPES, FORMS * 2, strict=False)):
        directory = tmp_path / name
        save(name, directory, *form)
        write_tokenizer(directory)
        (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        (directory / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "SparseEncoder"}))
        model = theirs.SparseEncoder(str(directory), device="cpu")
        features = [
            {"input_ids": torch.tensor([text]), "attention_mask": torch.ones(1, len(text))} for text in texts_of()
        ]
        with torch.no_grad():
            right = [model(each)["sentence_embedding"][0].numpy() for each in features]
        np.testing.assert_allclose(vectors(open_llm(directory), texts_of()), right, atol=1e-5, err_msg=str(place))


@pytest.mark.parametrize(
    "change",
    [
        lambda numbers, row: numbers.weights(row - numbers.bias),  # no bias
        lambda numbers, row: np.maximum(row + numbers.bias, 0),  # no logarithm
        lambda numbers, row: np.log1p(np.abs(row + numbers.bias)),  # no relu
    ],
)
def test_control_other_weights_are_noticed(change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = head.WordWeights.weights

    class Other:
        def __init__(self, numbers: head.WordWeights) -> None:
            self.bias = numbers.bias

        def weights(self, row: Any) -> Any:
            return real(head.WordWeights(self.bias), row)

    monkeypatch.setattr(head.WordWeights, "weights", lambda self, row: change(Other(self), row))
    model = save("bert", tmp_path)
    assert error(model, texts_of(), vectors(open_llm(tmp_path), texts_of())) > 1e-3


def test_control_the_vectors_of_the_last_layer_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the layer and the norm between the hidden states and the words."""
    monkeypatch.setattr(base.WordHead, "__call__", lambda self, x: self.ops.linear(x, self.words))
    model = save("bert", tmp_path)
    assert error(model, texts_of(), vectors(open_llm(tmp_path), texts_of())) > 1e-3


def test_the_table_or_a_head_of_its_own(tmp_path: Path) -> None:
    """The words' matrix is the table of the embeddings, or another where the files have one."""
    for tied in (True, False):
        model = save("bert", tmp_path, tie_word_embeddings=tied)
        words, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        assert torch.equal(words, table) is tied
        assert error(model, texts_of(), vectors(open_llm(tmp_path), texts_of())) < 1e-5


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_a_bias_without_the_tied_matrix(name: str, tmp_path: Path) -> None:
    """Files of the hub have the decoder's bias, and not its weight, which is the table's."""
    model = save(name, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for key in ("cls.predictions.decoder.weight", "vocab_projector.weight"):
        tensors.pop(key, None)
    if name == "bert":
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"]
    save_file(tensors, path)
    assert error(model, texts_of(), vectors(open_llm(tmp_path), texts_of())) < 1e-5


def test_newer_files_name_the_models_task(tmp_path: Path) -> None:
    model = save("bert", tmp_path)
    write_modules(tmp_path, "max", "relu", first="Transformer")
    with pytest.raises(CheckpointError, match="a module SpladePooling, expected"):
        open_llm(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"transformer_task": "fill-mask"}))
    assert error(model, texts_of(), vectors(open_llm(tmp_path), texts_of())) < 1e-5


def test_threads_steps_and_order_change_no_bit(tmp_path: Path) -> None:
    save("bert", tmp_path, "sum")
    texts = texts_of()
    expected = vectors(open_llm(tmp_path, num_threads=1), texts)
    llm = open_llm(tmp_path, num_threads=2, max_num_batched_tokens=512, max_num_seqs=2)
    assert vectors(llm, texts) == expected
    assert vectors(llm, texts[::-1])[::-1] == expected


def test_packed_weights_have_the_head(tmp_path: Path) -> None:
    model, texts = save("bert", tmp_path), texts_of()
    computed = [
        vectors(open_llm(tmp_path, quantization="int8", save_packed=saves), texts) for saves in (False, True, False)
    ]
    assert computed[0] == computed[1] == computed[2]
    assert 1e-5 < error(model, texts, computed[0]) < 0.2


@pytest.mark.parametrize("normed", [False, True])
def test_texts_are_compared_by_the_dot_product(normed: bool, tmp_path: Path) -> None:
    model, texts = save("bert", tmp_path), texts_of()
    if normed:
        write_modules(tmp_path, "max", "relu", "Normalize")
    llm = open_llm(tmp_path)
    first, *others = (weights(model, text).astype(np.float64) for text in texts)
    rows = [each / np.linalg.norm(each) if normed else each for each in (first, *others)]
    np.testing.assert_allclose(vectors(llm, texts), rows, atol=1e-5)
    inputs: Any = [{"prompt_token_ids": text} for text in texts]
    scores = [each.outputs.score for each in llm.score(inputs[:1], inputs[1:], use_tqdm=False)]
    np.testing.assert_allclose(scores, [rows[0] @ each for each in rows[1:]], rtol=1e-5)


def test_a_vector_of_zeros_is_one(tmp_path: Path) -> None:
    """It has no weights, and is no failure."""
    model = save("bert", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["cls.predictions.bias"][:] = -1000
    save_file(tensors, path)
    assert model.config.vocab_size == 199
    assert vectors(open_llm(tmp_path), texts_of()) == [[0.0] * 199] * len(LENGTHS)


def test_the_numbers_of_a_vector() -> None:
    form = Form("splade-max", None, normalize=False, width=6)
    assert finished([6, 1, 4, 0.5, 2.0], form) == [0.0, 0.5, 0.0, 0.0, 2.0, 0.0]
    assert word_weights([6, 1, 4, 3.0, 4.0], form._replace(normalize=True)) == (
        [1, 4],
        pytest.approx([0.6, 0.8], rel=1e-6),
    )
    assert word_weights([6], form) == ([], [])
    assert finished([6], form) == [0.0] * 6


def test_what_is_not_finite_stays_so() -> None:
    """The runner ends a request with such numbers."""
    pooled = np.array([1.0, np.nan, 2.0])
    assert not np.isfinite(head.WordWeights(np.zeros(3))(pooled)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimensions": 8}, "dimensions: 8 is not allowed; it must be left out"),
        ({"pooling": "mean"}, "pooling: 'mean' is not allowed; it must be splade-max"),
    ],
)
def test_options_of_other_vectors_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    save("bert", tmp_path)
    llm = open_llm(tmp_path)
    with pytest.raises(RequestError, match=message):
        vectors(llm, texts_of(), **options)
    with pytest.raises(RequestError, match="the model's vectors are weights of words"):
        llm.encode([{"prompt_token_ids": [5]}], "token_embed")


def test_models_without_such_a_head_are_refused(tmp_path: Path) -> None:
    for name, message in (
        ("electra", "of this one no head for masked words is read"),
        ("llama", "expected an encoder with a head for masked words"),
    ):
        directory = tmp_path / name
        torch.manual_seed(0)
        config = AutoConfig.for_model(**models.find(name).TINY)
        (AutoModel if name == "electra" else AutoModelForCausalLM).from_config(config).save_pretrained(directory)
        write_modules(directory, "max", "relu")
        with pytest.raises(CheckpointError, match=message):
            open_llm(directory)


def test_a_checkpoint_without_its_head_is_refused(tmp_path: Path) -> None:
    save("bert", tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({key: value for key, value in load_file(path).items() if "transform" not in key}, path)
    with pytest.raises(CheckpointError, match=r"cls\.predictions\.transform\.dense"):
        open_llm(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"1_SpladePooling/config.json": {"pooling_strategy": "mean"}}, "pooling_strategy is 'mean', expected max or"),
        ({"1_SpladePooling/config.json": {"activation_function": "tanh"}}, "activation_function is 'tanh', expected"),
        ({"config_sentence_transformers.json": {"max_active_dims": 64}}, "max_active_dims is 64, expected none"),
    ],
)
def test_files_that_mean_other_weights_are_refused(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    save("bert", tmp_path)
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        open_llm(tmp_path)


@pytest.mark.parametrize("more", ["Dense", "SpladePooling", "SparseAutoEncoder"])
def test_modules_behind_the_weights_are_refused(more: str, tmp_path: Path) -> None:
    save("bert", tmp_path)
    write_modules(tmp_path, "max", "relu", more)
    with pytest.raises(CheckpointError, match=f"a module {more}, expected"):
        open_llm(tmp_path)
