"""A ColBERT model behind the server: vectors of tokens, and documents ranked by MaxSim."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from tests.models.test_colbert import PYLATE, maxsim, right, save
from tests.support.serving import Served, serve

HTTP = httpx.Client(timeout=240)
TEXTS = ["A cat sat on the mat.", "x", "Two dogs ran through the wood."]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Any]]:
    folder = tmp_path_factory.mktemp("colbert")
    parts = save("bert", folder)
    settings = PYLATE | {"do_query_expansion": False}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with serve(str(folder), "--served-model-name", "colbert") as server:
        yield server, parts


def post(server: Served, path: str, **body: Any) -> httpx.Response:
    return HTTP.post(f"{server.url}{path}", json=body)


def rows_of(parts: Any, text: str) -> np.ndarray[Any, Any]:
    return right(*parts, list(text.encode()))


def test_pooling_has_the_vectors_of_tokens(served: tuple[Served, Any]) -> None:
    server, parts = served
    data = post(server, "/pooling", input=TEXTS).json()["data"]
    for text, each in zip(TEXTS, data, strict=True):
        np.testing.assert_allclose(each["data"], rows_of(parts, text), atol=1e-5)
    assert post(server, "/pooling", input=TEXTS, task="token_embed").json()["data"] == data
    named = post(server, "/pooling", input=TEXTS[1], prompt_name="query").json()["data"][0]["data"]
    np.testing.assert_allclose(named, rows_of(parts, "[Q] x"), atol=1e-5)


def test_documents_are_ranked_by_maxsim(served: tuple[Served, Any]) -> None:
    server, parts = served
    query = rows_of(parts, f"[Q] {TEXTS[0]}")
    expected = [maxsim(query, rows_of(parts, f"[D] {text}")) for text in TEXTS]
    reply = post(server, "/v1/rerank", query=TEXTS[0], documents=TEXTS).json()
    assert reply["scoring"] == "maxsim"
    assert [each["index"] for each in reply["results"]] == sorted(range(3), key=lambda i: -expected[i])
    numbers = {each["index"]: each["relevance_score"] for each in reply["results"]}
    assert [numbers[i] for i in range(3)] == pytest.approx(expected, rel=1e-5)
    rated = post(server, "/v1/score", text_1=TEXTS[0], text_2=TEXTS).json()["data"]
    assert [each["score"] for each in rated] == [numbers[i] for i in range(3)]
    tei = post(server, "/rerank", query=TEXTS[0], texts=TEXTS).json()
    assert {each["index"]: each["score"] for each in tei} == numbers


def test_more_vectors_than_one_reply_may_have_are_compared(served: tuple[Served, Any]) -> None:
    """The reply has the scores alone: 1,000 documents of 80 tokens have 1,280,000 numbers."""
    server, parts = served
    documents = [f"{i:076d}" for i in range(1000)]
    reply = post(server, "/v1/rerank", query="x", documents=documents, return_documents=False).json()
    numbers = {each["index"]: each["relevance_score"] for each in reply["results"]}
    for i in (0, 63, 64, 999):
        right_one = maxsim(rows_of(parts, "[Q] x"), rows_of(parts, f"[D] {documents[i]}"))
        assert numbers[i] == pytest.approx(right_one, rel=1e-5)
    refused = post(server, "/pooling", input=documents[:256] * 4)
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": "x"}, "this one has one for each token"),
        ("/pooling", {"input": "x", "task": "embed"}, "must be token_embed, which this model has"),
        ("/embed", {"inputs": "x"}, "this one has one for each token"),
        ("/v1/score", {"text_1": "x", "text_2": "x", "pooling": "mean"}, "this model has a vector for each token"),
    ],
)
def test_vectors_of_texts_are_refused(served: tuple[Served, Any], path: str, body: Any, message: str) -> None:
    reply = post(served[0], path, **body)
    assert reply.status_code == 400
    assert message in reply.text
