"""/v1/embeddings, /v1/score and /v1/rerank: OpenAI's own client against a live server over the fake engine."""

from __future__ import annotations

import math
import os
import signal
import struct
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.support.server import HTTP, Live, child, inproc

from headrace.insight.simulated import HIDDEN_SIZE
from headrace.protocol.config import ServerConfig
from headrace.text.tokenizer import Tokenizer
from headrace.text.vectors import Form, finished


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=240) as openai_client:
        yield openai_client


def test_all_forms_of_input_are_one_vector(client: openai.OpenAI) -> None:
    ids = list(b"Hello")
    [text] = client.embeddings.create(model="fake", input="Hello").data
    [tokens] = client.embeddings.create(model="fake", input=ids).data
    several = client.embeddings.create(model="fake", input=["Hello", "you"])
    both = client.embeddings.create(model="fake", input=[ids, list(b"you")])
    assert text.embedding == tokens.embedding == several.data[0].embedding == both.data[0].embedding
    assert several.data[1].embedding == both.data[1].embedding != text.embedding
    assert [row.index for row in several.data] == [0, 1]
    assert len(text.embedding) == HIDDEN_SIZE
    assert math.isclose(math.hypot(*text.embedding), 1, rel_tol=1e-6)
    assert several.usage.prompt_tokens == several.usage.total_tokens == 8


def test_floats_and_base64_are_the_same_numbers(live: Live) -> None:
    body = {"input": ["Hello", "you"], "pooling": "mean"}
    floats = live.post("/v1/embeddings", body).json()["data"]
    packed = live.post("/v1/embeddings", body | {"encoding_format": "base64"}).json()["data"]
    for row, text in zip(floats, packed, strict=True):
        raw = b64decode(text["embedding"])
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == row["embedding"]


def test_dimensions_cut_and_make_one_long_again(live: Live) -> None:
    whole = live.post("/v1/embeddings", {"input": "x", "normalize": False}).json()["data"][0]["embedding"]
    cut = live.post("/v1/embeddings", {"input": "x", "dimensions": 3}).json()["data"][0]["embedding"]
    assert cut == finished(whole, Form("last", dimensions=3))
    assert len(cut) == 3
    assert math.isclose(math.hypot(*cut), 1, rel_tol=1e-6)
    assert math.hypot(*whole) > 1.1


def test_the_cache_and_the_chunks_change_nothing(tokenizer: Tokenizer) -> None:
    texts = ["a text that is longer than a block or two of the cache " + letter for letter in "ab"] * 2
    result = []
    for config in ({"max_num_batched_tokens": 7}, {"enable_prefix_caching": False}, {}):
        with Live(inproc(**config), tokenizer, ServerConfig(log_stats_interval=0)) as server:
            for pooling in ("last", "mean"):
                body = {"input": texts, "pooling": pooling}
                first = server.post("/v1/embeddings", body).json()["data"]
                result.append((pooling, first, server.post("/v1/embeddings", body).json()["data"]))
    for pooling in ("last", "mean"):
        vectors = [rows for kind, *both in result for rows in both if kind == pooling]
        assert all(rows == vectors[0] for rows in vectors)
        assert vectors[0][0]["embedding"] == vectors[0][2]["embedding"] != vectors[0][1]["embedding"]


def test_an_engine_that_dies_is_asked_again(tokenizer: Tokenizer) -> None:
    engine = child(delay=0.03, max_num_batched_tokens=16)
    with Live(engine, tokenizer, ServerConfig(log_stats_interval=0)) as server:
        body = {"input": [f"{i} " + "x" * 200 for i in range(8)], "pooling": "mean"}
        want = server.post("/v1/embeddings", body).json()["data"]
        (pid,) = engine.pids
        import threading

        threading.Timer(0.3, lambda: os.kill(pid, signal.SIGKILL)).start()
        assert server.post("/v1/embeddings", body).json()["data"] == want
        server.wait(lambda: engine.num_restarts == 1)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "prompt"),
        ("/v1/embeddings", {"input": ["a", 3]}, "input[1]"),
        ("/v1/embeddings", {"input": [3, 999]}, "prompt"),
        ("/v1/embeddings", {"input": ["a"] * 257}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": HIDDEN_SIZE + 1}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "pooling": "median"}, "pooling"),
        ("/v1/embeddings", {"input": "a", "cache_salt": "x" * 300}, "cache_salt"),
        ("/v1/embeddings", {"input": "a" * 3000}, "prompt"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ],
)
def test_refusals_name_the_field(live: Live, path: str, body: dict[str, Any], param: str) -> None:
    reply = live.post(path, body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_an_unknown_model_and_an_unknown_field(live: Live, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="x")
    assert live.post("/v1/embeddings", {"input": "x", "colour": 1}).json()["warnings"][0].startswith("colour: unknown")


def test_score_and_rerank(live: Live) -> None:
    texts = ["one", "two", "three"]
    rows = live.post("/v1/embeddings", {"input": texts}).json()["data"]
    vectors = [row["embedding"] for row in rows]
    reply = live.post("/v1/score", {"text_1": "one", "text_2": texts}).json()
    scores = [entry["score"] for entry in reply["data"]]
    assert scores == [math.fsum(a * b for a, b in zip(vectors[0], vector, strict=True)) for vector in vectors]
    assert math.isclose(scores[0], 1, rel_tol=1e-6)
    pairs = live.post("/score", {"text_1": texts, "text_2": texts}).json()["data"]
    assert all(math.isclose(entry["score"], 1, rel_tol=1e-6) for entry in pairs)
    ranked = live.post("/v1/rerank", {"query": "one", "documents": texts, "top_n": 2}).json()
    assert [result["index"] for result in ranked["results"]] == sorted(range(3), key=lambda i: -scores[i])[:2]
    assert ranked["results"][0]["document"] == {"text": "one"}
    assert HTTP.post(live.url + "/rerank", json={"query": "one", "documents": texts}).status_code == 200


def test_generation_and_vectors_share_the_engine(live: Live, client: openai.OpenAI) -> None:
    """A prompt that was embedded is a cached prefix, and the other way round."""
    prompt = "a prompt that is longer than one block of the cache, and so on"
    first = client.embeddings.create(model="fake", input=prompt).data[0].embedding
    result = client.completions.create(model="fake", prompt=prompt, max_tokens=4, seed=1)
    assert result.usage is not None
    assert result.usage.prompt_tokens_details is not None
    assert (result.usage.prompt_tokens_details.cached_tokens or 0) >= 48
    assert client.embeddings.create(model="fake", input=prompt).data[0].embedding == first
