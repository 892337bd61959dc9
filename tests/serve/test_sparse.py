"""A SPLADE model behind the server: weights of words in the form of Text Embeddings Inference, and as vectors."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from tests.models.test_sparse import save, weights
from tests.support.server import Live, write_tokenizer
from tests.support.serving import Served, serve

HTTP = httpx.Client(timeout=240)
TEXTS = ["A cat sat on the mat.", "x", "Two dogs ran through the wood."]
WIDTH = 2**13


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Any]]:
    folder = tmp_path_factory.mktemp("splade")
    model = save("distilbert", folder, vocab_size=WIDTH, max_position_embeddings=64)
    with serve(str(write_tokenizer(folder, WIDTH)), "--served-model-name", "splade") as server:
        yield server, model


def post(server: Served, path: str, **body: Any) -> httpx.Response:
    return HTTP.post(f"{server.url}{path}", json=body)


def right(model: Any, text: str) -> np.ndarray[Any, Any]:
    return weights(model, list(text.encode()))


def dense(row: list[dict[str, Any]]) -> list[float]:
    vector = [0.0] * WIDTH
    for each in row:
        vector[each["index"]] = each["value"]
    return vector


def test_embed_sparse_has_the_weights_that_are_not_0(served: tuple[Served, Any]) -> None:
    server, model = served
    rows = post(server, "/embed_sparse", inputs=TEXTS).json()
    assert len(rows) == len(TEXTS)
    for text, row in zip(TEXTS, rows, strict=True):
        places = [each["index"] for each in row]
        assert places == sorted(set(places))
        assert all(each["value"] > 0 for each in row)
        assert 0 < len(row) < WIDTH
        np.testing.assert_allclose(dense(row), right(model, text), atol=1e-5)
        assert post(server, "/embed_sparse", inputs=text).json() == [row]
    ids = [list(text.encode()) for text in TEXTS]
    assert post(server, "/embed_sparse", inputs=ids).json() == rows


def test_other_routes_have_the_same_numbers(served: tuple[Served, Any]) -> None:
    server, model = served
    rows = [dense(row) for row in post(server, "/embed_sparse", inputs=TEXTS).json()]
    pooled = post(server, "/pooling", input=TEXTS, task="embed").json()["data"]
    assert [each["data"] for each in pooled] == rows
    assert [each["embedding"] for each in post(server, "/v1/embeddings", input=TEXTS).json()["data"]] == rows
    reply = post(server, "/v1/rerank", query=TEXTS[0], documents=TEXTS).json()
    assert reply["scoring"] == "dot"
    scores = {each["index"]: each["relevance_score"] for each in reply["results"]}
    expected = [right(model, TEXTS[0]) @ right(model, text) for text in TEXTS]
    assert [scores[i] for i in range(3)] == pytest.approx(expected, rel=1e-5)
    rated = post(server, "/v1/score", text_1=TEXTS[0], text_2=TEXTS).json()["data"]
    assert [each["score"] for each in rated] == [scores[i] for i in range(3)]


def test_a_text_that_is_too_long_is_refused_or_cut(served: tuple[Served, Any]) -> None:
    server, _ = served
    reply = post(server, "/embed_sparse", inputs="a" * 70)
    assert (reply.status_code, set(reply.json())) == (400, {"error", "error_type"})
    cut = post(server, "/embed_sparse", inputs="a" * 63 + "bcd", truncate=True).json()
    assert cut == post(server, "/embed_sparse", inputs="a" * 63 + "d").json()


def test_all_numbers_of_many_texts_are_too_many(served: tuple[Served, Any]) -> None:
    """2^20 numbers are 128 vectors of 8,192; the weights that are not 0 have no such bound."""
    server, _ = served
    assert post(server, "/pooling", input=["x"] * 128).status_code == 200
    reply = post(server, "/pooling", input=["x"] * 129)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input")
    assert "of at most 128 texts: a vector has 8192 numbers" in reply.json()["error"]["message"]
    assert len(post(server, "/embed_sparse", inputs=["x"] * 129).json()) == 129


def test_a_killed_engine_gives_the_same_weights_again(served: tuple[Served, Any]) -> None:
    server, _ = served
    before = post(server, "/embed_sparse", inputs=TEXTS).json()
    server.engine().send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        reply = post(server, "/embed_sparse", inputs=TEXTS)
        if reply.status_code == 200:
            break
        time.sleep(0.2)
    assert reply.json() == before


def test_other_models_have_no_weights_of_words(live: Live) -> None:
    reply = HTTP.post(f"{live.url}/embed_sparse", json={"inputs": "x"})
    assert reply.status_code == 400
    assert "a model with a head for masked words" in reply.json()["error"]
