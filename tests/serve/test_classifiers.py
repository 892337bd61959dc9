"""A cross-encoder and a classifier behind the server: the same numbers at every door, also after their engine was
killed."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient
from tests.models.test_classifiers import logits, save
from tests.support.server import write_tokenizer
from tests.support.serving import Served, serve

from headrace.protocol.step import Classes, EngineInfo
from headrace.serve.startup import summary

HTTP = httpx.Client(timeout=240)
QUERY, DOCUMENTS = "where is the cat", ["the dog ran", "the cat sat on the mat", "on"]


def open_server(folder: Path, num_classes: int) -> Iterator[tuple[Served, Any]]:
    model = save("bert", folder, num_classes, vocab_size=256, max_position_embeddings=64)
    with serve(str(write_tokenizer(folder)), "--served-model-name", "bert") as server:
        yield server, model


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Any]]:
    yield from open_server(tmp_path_factory.mktemp("reranker"), 1)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Any]]:
    yield from open_server(tmp_path_factory.mktemp("classifier"), 3)


@pytest.fixture(params=["reranker", "classifier"])
def served(request: pytest.FixtureRequest) -> tuple[Served, Any]:
    server: tuple[Served, Any] = request.getfixturevalue(request.param)
    return server


def post(server: Served, path: str, **body: Any) -> httpx.Response:
    return HTTP.post(f"{server.url}{path}", json=body)


def score(model: Any, first: str, second: str) -> float:
    """The logit of a pair, in the form of the tokenizer: without tokens of its own, the second text of type 1."""
    return logits(model, [*first.encode(), *second.encode()], [0] * len(first) + [1] * len(second))[0]


def test_a_cross_encoder_scores_pairs_at_every_door(reranker: tuple[Served, Any]) -> None:
    server, model = reranker
    right = [1 / (1 + math.exp(-score(model, QUERY, text))) for text in DOCUMENTS]
    order = sorted(range(3), key=lambda i: -right[i])
    reply = post(server, "/v1/rerank", query=QUERY, documents=[*DOCUMENTS[:2], {"text": DOCUMENTS[2]}]).json()
    assert reply["scoring"] == "cross-encoder"
    assert [each["index"] for each in reply["results"]] == order
    numbers = {each["index"]: each["relevance_score"] for each in reply["results"]}
    assert [numbers[i] for i in range(3)] == pytest.approx(right, abs=1e-6)
    assert [each["document"]["text"] for each in reply["results"]] == [DOCUMENTS[i] for i in order]
    for names in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents")):
        rated = post(server, "/score", **dict(zip(names, (QUERY, DOCUMENTS), strict=True))).json()
        assert [each["score"] for each in rated["data"]] == [numbers[i] for i in range(3)]
    tei = post(server, "/rerank", query=QUERY, texts=DOCUMENTS, return_text=True).json()
    assert tei == [{"index": i, "text": DOCUMENTS[i], "score": numbers[i]} for i in order]
    raw = post(server, "/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=True).json()
    plain = post(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS, use_activation=False).json()["results"]
    assert [each["score"] for each in raw] == [each["relevance_score"] for each in plain]
    assert raw[0]["score"] == pytest.approx(score(model, QUERY, DOCUMENTS[order[0]]), abs=1e-5)
    pair = post(server, "/predict", inputs=[QUERY, DOCUMENTS[0]]).json()
    assert pair == [{"score": numbers[0], "label": "class 0"}]
    alone = {
        i: post(server, "/v1/score", text_1=QUERY, text_2=DOCUMENTS[i]).json()["data"][0]["score"] for i in range(3)
    }
    assert alone == numbers
    assert list(HTTP.get(f"{server.url}/info").json()["model_type"]) == ["reranker"]


def test_a_classifier_names_classes_at_every_door(classifier: tuple[Served, Any]) -> None:
    server, model = classifier
    rows = [logits(model, list(text.encode())) for text in DOCUMENTS]
    powers = [[math.exp(x) for x in row] for row in rows]
    right = [[x / sum(row) for x in row] for row in powers]
    reply = post(server, "/classify", input=DOCUMENTS).json()
    for row, rated in zip(right, reply["data"], strict=True):
        assert rated["probs"] == pytest.approx(row, abs=1e-6)
        assert (rated["label"], rated["num_classes"]) == (f"class {row.index(max(row))}", 3)
    raw = post(server, "/classify", input=DOCUMENTS, use_activation=False).json()
    assert raw["data"][0]["probs"] == pytest.approx(rows[0], abs=1e-5)
    pooled = post(server, "/pooling", input=DOCUMENTS, task="classify").json()
    assert [each["data"] for each in pooled["data"]] == [each["probs"] for each in reply["data"]]
    tei = post(server, "/predict", inputs=[[text] for text in DOCUMENTS]).json()
    best = [sorted(zip(each["probs"], range(3), strict=True), key=lambda pair: -pair[0]) for each in reply["data"]]
    assert tei == [[{"score": number, "label": f"class {i}"} for number, i in row] for row in best]
    assert post(server, "/predict", inputs=DOCUMENTS[0]).json() == tei[0]
    assert list(HTTP.get(f"{server.url}/info").json()["model_type"]) == ["classifier"]
    for path in ("/v1/rerank", "/rerank"):
        refused = post(server, path, query=QUERY, documents=DOCUMENTS)
        assert (refused.status_code, "this one has 3" in refused.text) == (400, True)


def test_a_clients_own_library_reads_the_classes(classifier: tuple[Served, Any]) -> None:
    server, _ = classifier
    # Of TEI's reply to one text this client returns the first class alone.
    best: Any = InferenceClient(model=f"{server.url}/predict").text_classification(DOCUMENTS[1])
    tei = post(server, "/predict", inputs=DOCUMENTS[1], truncate=True, truncation_direction="right").json()
    assert {"score": best.score, "label": best.label} == tei[0]


def test_classes_are_no_vectors_and_no_answers(served: tuple[Served, Any]) -> None:
    server, _ = served
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/api/embed", {"input": "a", "model": "bert"}),
        ("/embedding", {"content": "a"}),
        ("/pooling", {"input": "a", "task": "embed"}),
        ("/embed", {"inputs": "a"}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        reply = post(server, path, **body)
        assert reply.status_code == 400, path
    refused = post(server, "/embed", inputs="a").json()
    assert refused["error_type"] == "Validation"
    assert "this one has classes" in refused["error"]


def test_the_same_numbers_after_the_engine_was_killed(served: tuple[Served, Any]) -> None:
    server, _ = served
    before = post(server, "/classify", input=DOCUMENTS).json()["data"]
    server.engine().send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and post(server, "/classify", input="a").status_code != 200:
        time.sleep(0.2)
    assert post(server, "/classify", input=DOCUMENTS).json()["data"] == before


def test_mistakes_are_named(served: tuple[Served, Any]) -> None:
    server, model = served
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": [3]}, "documents"),
        ("/classify", {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("/predict", {"inputs": [["a", "b", "c"]]}, "inputs[0]"),
        ("/predict", {"inputs": []}, "inputs[0]"),
        ("/predict", {"inputs": "a", "truncate": True, "truncation_direction": "Left"}, "truncation_direction"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences"),
    ]
    if model.config.num_labels == 1:
        cases.append(("/v1/rerank", {"query": "a" * 70, "documents": ["b"]}, "prompt"))
    for path, body, field in cases:
        reply = post(server, path, **body)
        assert reply.status_code == 400, (path, body)
        assert field in reply.text


def test_the_summary_of_the_start_names_the_classes() -> None:
    numbers = {"max_model_len": 64, "vocab_size": 256, "block_size": 16, "num_blocks": 8, "max_num_seqs": 4}
    base: dict[str, Any] = {"model": "bert", "eos_token_ids": [], "max_num_batched_tokens": 64} | numbers
    for labels, words in ((("a",), "a cross-encoder"), (("good", "bad"), "2 classes: good, bad")):
        info = EngineInfo(**base, generates=False, pooling="cls", classes=Classes(labels))
        assert words in summary(info, None, "http://x", 1)["rows"]["classes"]
