"""ColBERT: a vector for each token, projected and of length one, and texts compared by MaxSim."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.models.test_encoders import texts_of
from tests.support.harness import BACKENDS
from tests.support.server import write_tokenizer
from transformers import AutoConfig, AutoModel

from headrace import LLM, models
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.text import likeness

WIDTH = 16
TYPES = ("bert", "xlm-roberta", "modernbert", "distilbert")
LENGTHS = (1, 2, 40, 129)
PYLATE = {"query_prefix": "[Q] ", "document_prefix": "[D] ", "similarity_fn_name": "MaxSim", "prompts": {}}


def save(name: str, directory: Path, colbert_files: bool = False, **more: Any) -> tuple[Any, np.ndarray[Any, Any]]:
    """Write a random checkpoint, in sentence-transformers' files (PyLate's), or in ColBERT's own; return the model
    and the projection [width, hidden]."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256} | more
    model = AutoModel.from_config(AutoConfig.for_model(**models.find(name).TINY | sizes)).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    weight = torch.randn(WIDTH, 48).numpy()
    model.save_pretrained(directory)
    if colbert_files:
        path = directory / "model.safetensors"
        tensors = {f"bert.{key}": value for key, value in load_file(path).items()}
        save_file(tensors | {"linear.weight": weight}, path)
        config = json.loads((directory / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
        (directory / "config.json").write_text(json.dumps(config))
    else:
        write_modules(directory, weight)
    write_tokenizer(directory)
    return model, weight


def write_modules(directory: Path, weight: np.ndarray[Any, Any], *more: str, **dense: Any) -> None:
    kinds = ("sentence_transformers.models.Transformer", "pylate.models.Dense.Dense", *more)
    rows = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind.rpartition('.')[2]}" if i else "", "type": kind}
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(rows))
    folder = directory / "1_Dense"
    folder.mkdir(exist_ok=True)
    save_file({"linear.weight": weight}, folder / "model.safetensors")
    settings = {"in_features": weight.shape[1], "out_features": len(weight), "bias": False}
    settings |= {"activation_function": "torch.nn.modules.linear.Identity"} | dense
    (folder / "config.json").write_text(json.dumps(settings))


def open_llm(directory: Path, backend: str = "cpu", **options: Any) -> LLM:
    return LLM(str(directory), backend=backend, dtype="float32", **options)


def rows_of(llm: LLM, texts: list[Any]) -> list[np.ndarray[Any, Any]]:
    inputs: Any = [text if isinstance(text, str) else {"prompt_token_ids": text} for text in texts]
    outputs: Any = llm.encode(inputs, "token_embed", use_tqdm=False)
    return [np.array(output.outputs.data) for output in outputs]


def right(model: Any, weight: np.ndarray[Any, Any], text: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([text])).last_hidden_state[0].numpy()
    rows = hidden.astype(np.float64) @ weight.astype(np.float64).T
    result: np.ndarray[Any, Any] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return result


def maxsim(query: np.ndarray[Any, Any], document: np.ndarray[Any, Any]) -> float:
    """Khattab and Zaharia 2020: the sum over the query's tokens of the greatest dot product."""
    return float((query @ document.T).max(axis=1).sum())


def scores(llm: LLM, query: Any, documents: list[Any]) -> list[float]:
    inputs: Any = [text if isinstance(text, str) else {"prompt_token_ids": text} for text in (query, *documents)]
    return [each.outputs.score for each in llm.score(inputs[:1], inputs[1:], use_tqdm=False)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TYPES)
def test_rows_and_scores_are_those_of_transformers(name: str, backend: str, tmp_path: Path) -> None:
    model, weight = save(name, tmp_path)
    llm, texts = open_llm(tmp_path, backend), texts_of(LENGTHS)
    assert (llm.core.info.pooling, llm.core.info.hidden_size) == ("tokens", WIDTH)
    rows, expected = rows_of(llm, texts), [right(model, weight, text) for text in texts]
    for mine, theirs in zip(rows, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    for query in range(len(texts)):
        numbers = scores(llm, texts[query], texts)
        np.testing.assert_allclose(numbers, [maxsim(expected[query], each) for each in expected], rtol=1e-5)
    # Law: the batch, and what was computed before, change no bit.
    for text, together in zip(texts, rows, strict=True):
        assert np.array_equal(rows_of(llm, [text])[0], together)
        assert scores(llm, texts[2], [text]) == [scores(llm, texts[2], texts)[texts.index(text)]]


def test_the_files_of_colbert_itself(tmp_path: Path) -> None:
    model, weight = save("bert", tmp_path, colbert_files=True)
    llm, texts = open_llm(tmp_path), texts_of(LENGTHS)
    assert llm.core.info.hidden_size == WIDTH
    for text, mine in zip(texts, rows_of(llm, texts), strict=True):
        np.testing.assert_allclose(mine, right(model, weight, text), atol=1e-5)


@pytest.mark.parametrize("colbert_files", [False, True])
def test_packed_weights(colbert_files: bool, tmp_path: Path) -> None:
    save("bert", tmp_path, colbert_files)
    options: dict[str, Any] = {"quantization": "int8"}
    computed = [rows_of(open_llm(tmp_path, save_packed=saves, **options), texts_of((9,)))[0] for saves in (0, 1, 0)]
    assert np.array_equal(computed[0], computed[1])
    assert np.array_equal(computed[0], computed[2])


def test_query_and_document_have_prefixes(tmp_path: Path) -> None:
    model, weight = save("bert", tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(PYLATE | {"do_query_expansion": False}))
    llm = open_llm(tmp_path)
    query, document = (right(model, weight, list(text.encode())) for text in ("[Q] a cat", "[D] the dog sat"))
    assert scores(llm, "a cat", ["the dog sat"]) == pytest.approx([maxsim(query, document)], rel=1e-5)
    assert maxsim(document, query) != pytest.approx(maxsim(query, document), rel=1e-3)  # the sides are not alike


@pytest.mark.parametrize("kind", ["ColBERT", "MultiVectorEncoder"])
def test_numbers_are_those_of_sentence_transformers(kind: str, tmp_path: Path) -> None:
    """From PyLate's files, and from those of newer versions of sentence-transformers."""
    theirs = pytest.importorskip("sentence_transformers")
    _, weight = save("bert", tmp_path)
    if kind == "MultiVectorEncoder":
        places = ("sentence_transformer.modules.Normalize", "multi_vector_encoder.modules.MultiVectorMask")
        more = [f"sentence_transformers.{place}" for place in places]
        write_modules(tmp_path, weight, *more, module_input_name="token_embeddings")
        for folder, values in (("2_Normalize", {"module_input_name": "token_embeddings"}), ("3_MultiVectorMask", {})):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "config.json").write_text(json.dumps(values))
    settings = {"do_query_expansion": False, "skiplist_words": [], "model_type": kind}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(PYLATE | settings))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<eos>"})
    )
    model, llm = theirs.MultiVectorEncoder(str(tmp_path), device="cpu"), open_llm(tmp_path)
    documents = ["the dog sat", "a cat", "x"]
    numbers = [np.asarray(each) for each in model.encode_document(documents)]
    for mine, each in zip(rows_of(llm, [f"[D] {text}" for text in documents]), numbers, strict=True):
        np.testing.assert_allclose(mine, each, atol=1e-5)
    similarity = model.similarity(model.encode_query(["a cat"]), model.encode_document(documents))
    np.testing.assert_allclose(scores(llm, "a cat", documents), np.asarray(similarity)[0], rtol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b: sum(max(np.dot(x, y) for x in a.rows) for y in b.rows),  # over the document's tokens
        lambda a, b: sum(np.mean([np.dot(x, y) for y in b.rows]) for x in a.rows),  # no greatest one
        lambda a, b: max(max(np.dot(x, y) for y in b.rows) for x in a.rows),  # no sum
    ],
)
def test_control_other_scores_are_noticed(change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace import llm as module

    monkeypatch.setattr(module, "likeness", change)
    model, weight = save("bert", tmp_path)
    one, other = texts_of((7, 40))
    number = scores(open_llm(tmp_path), one, [other])[0]
    assert number != pytest.approx(maxsim(right(model, weight, one), right(model, weight, other)), rel=1e-3)


def test_texts_of_two_kinds_are_not_compared() -> None:
    tokens, words, vector = likeness.Tokens([[1.0]]), likeness.Words({0: 1.0}), [1.0]
    for one, other in ((tokens, words), (words, vector), (vector, tokens)):
        with pytest.raises(TypeError):
            likeness.likeness(one, other)


def test_a_text_has_no_one_vector(tmp_path: Path) -> None:
    save("bert", tmp_path)
    llm = open_llm(tmp_path)
    for pooling in (None, "mean"):
        with pytest.raises(RequestError, match="this one has one for each token"):
            llm.embed(["a"], pooling=pooling, use_tqdm=False)


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        ({"use_residual": True}, "use_residual is set, expected false"),
        ({"module_input_name": "sentence_embedding"}, "module_input_name is 'sentence_embedding', expected token_emb"),
        ({"in_features": 40}, "shape|in_features|40"),
    ],
)
def test_layers_that_are_not_computed_are_refused(dense: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, weight = save("bert", tmp_path)
    write_modules(tmp_path, weight, **dense)
    with pytest.raises(CheckpointError, match=message):
        open_llm(tmp_path)


def test_a_checkpoint_without_its_layer_is_refused(tmp_path: Path) -> None:
    save("bert", tmp_path, colbert_files=True)
    path = tmp_path / "model.safetensors"
    save_file({key: value for key, value in load_file(path).items() if key != "linear.weight"}, path)
    with pytest.raises(CheckpointError, match=r"architectures has 'HF_ColBERT', expected linear\.weight"):
        open_llm(tmp_path)


def test_a_layer_of_another_model_is_a_stray(tmp_path: Path) -> None:
    """Without ColBERT's class nothing says what it is for."""
    save("bert", tmp_path, colbert_files=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["BertModel"]}))
    with pytest.raises(CheckpointError, match=r"linear\.weight"):
        open_llm(tmp_path)


@pytest.mark.parametrize(
    ("settings", "part"),
    [({}, "do_query_expansion"), ({"do_query_expansion": False, "skiplist_words": ["."]}, "skiplist_words")],
)
def test_what_is_scored_otherwise_is_logged(
    settings: dict[str, Any], part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save("bert", tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(PYLATE | settings))
    caplog.set_level(logging.WARNING)
    open_llm(tmp_path)
    assert any(part in line and "of all tokens of both texts" in line for line in caplog.messages)


def test_a_likeness_of_single_vectors_is_refused(tmp_path: Path) -> None:
    save("bert", tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"similarity_fn_name": "cosine"}))
    with pytest.raises(CheckpointError, match="similarity_fn_name is 'cosine', expected maxsim"):
        open_llm(tmp_path)
