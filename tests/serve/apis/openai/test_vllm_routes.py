"""vLLM's routes beside OpenAI's, over the fake engine."""

from __future__ import annotations

import json
from array import array
from base64 import b64decode
from typing import Any

import pytest
from tests.support.server import HTTP, TEMPLATE, Live

from headrace.protocol import bounds


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "seed": 1}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2, "seed": 1}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/score", {"text_1": "hi", "text_2": ["ho", "hi"]}),
        ("/v1/rerank", {"query": "hi", "documents": ["ho", "hi"]}),
    ],
)
def test_invocations_finds_the_route_by_the_field(live: Live, path: str, body: dict[str, Any]) -> None:
    varying = {"id": "", "created": 0, "timings": 0}
    replies = [live.post(each, body) for each in ("/invocations", path)]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert replies[0].json() | varying == replies[1].json() | varying


def test_invocations_streams_and_refuses(live: Live) -> None:
    reply = live.post("/invocations", {"prompt": "hi", "max_tokens": 2, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("data: [DONE]\n\n")
    reply = live.post("/invocations", {"inputs": "hi"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "body")
    assert "messages, prompt, input, text_1, query" in reply.json()["error"]["message"]


def test_pooling_has_the_vectors_of_embeddings(live: Live) -> None:
    vectors = live.post("/v1/embeddings", {"input": ["hi", "ho"]}).json()["data"]
    reply = live.post("/pooling", {"input": ["hi", "ho"], "task": "embed"}).json()
    assert [row["data"] for row in reply["data"]] == [row["embedding"] for row in vectors]
    assert reply["data"][1]["index"] == 1
    packed = live.post("/pooling", {"input": "hi", "encoding_format": "base64"}).json()["data"][0]["data"]
    assert len(b64decode(packed)) == 4 * len(vectors[0]["embedding"])
    reply = live.post("/pooling", {"input": "hi", "task": "classify"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "task")


def test_pooling_has_the_vectors_of_tokens(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    body: dict[str, Any] = {"input": ["hi", "you"], "task": "token_embed"}
    reply = live.post("/pooling", body).json()
    rows = [row["data"] for row in reply["data"]]
    last = [row["embedding"] for row in live.post("/v1/embeddings", {"input": ["hi", "you"]}).json()["data"]]
    assert ([len(each) for each in rows], reply["usage"]["prompt_tokens"]) == ([2, 3], 5)
    assert [each[-1] for each in rows] == last
    packed = live.post("/pooling", body | {"encoding_format": "base64"}).json()["data"][1]["data"]
    assert list(array("f", b64decode(packed))) == [x for row in rows[1] for x in row]
    cut = live.post("/pooling", body | {"dimensions": 3, "normalize": False}).json()["data"][0]["data"]
    assert [len(row) for row in cut] == [3, 3]
    for more, param in (({"pooling": "mean"}, "pooling"), ({"dimensions": 9}, "dimensions"), ({"input": []}, "input")):
        refusal = live.post("/pooling", body | more)
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, param), refusal.text
    width = len(rows[0][0])
    monkeypatch.setitem(bounds.BOUNDS, "row_numbers", bounds.BOUNDS["row_numbers"]._replace(high=5 * width))
    assert live.post("/pooling", body).status_code == 200
    refusal = live.post("/pooling", body | {"input": ["hi", "you!"]})
    assert refusal.status_code == 400
    assert "input: 6 is not allowed; it must be of at most 5 tokens in all" in refusal.json()["error"]["message"]


def test_server_info_and_tokenizer_info(live: Live) -> None:
    info = HTTP.get(live.url + "/server_info").json()
    assert info["vllm_config"]["cache_config"]["block_size"] == live.client.info.block_size
    text = HTTP.get(live.url + "/server_info?config_format=text").json()["vllm_config"]
    assert json.loads(text) == info["vllm_config"]
    assert HTTP.get(live.url + "/server_info?config_format=xml").status_code == 400
    body = HTTP.get(live.url + "/tokenizer_info").json()
    assert body["special_tokens"]["eos_token"] == "<eos>"
    assert body["chat_template"] == TEMPLATE


def test_reset_prefix_cache_forgets_what_was_cached(live: Live) -> None:
    body = {"prompt": "a prompt of more than one block of tokens", "max_tokens": 1}

    def cached() -> int:
        num: int = live.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return num

    assert cached() == 0
    assert cached() > 0
    assert HTTP.post(live.url + "/reset_prefix_cache").status_code == 200
    assert cached() == 0


def test_a_decoder_has_no_classes(live: Live) -> None:
    reply = live.post("/classify", {"input": "x"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
    assert "structured_outputs with a choice" in reply.json()["error"]["message"]
