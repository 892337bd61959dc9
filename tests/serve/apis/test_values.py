"""Values that one API allows and another does not: each is taken where its own clients send it."""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

import numpy as np
import pytest
from tests.support.server import HTTP, Live

from headrace.protocol import parameters
from headrace.sampling import filters
from headrace.sampling.filters import Cut, select
from headrace.serve.call.call import SamplingFields
from headrace.serve.storage.batch_lines import read_line

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 6},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 6},
    "/v1/messages": {"model": "fake"} | CHAT,
    "/completion": {"prompt": "hi", "n_predict": 6},
}


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_a_share_of_nothing_is_greedy(live: Live, path: str) -> None:
    assert live.post(path, ROUTES[path] | {"top_p": 0}).status_code == 200
    refusal = live.post(path, ROUTES[path] | {"top_p": -0.5})
    assert (refusal.status_code, "top_p" in refusal.text) == (400, True)


@pytest.mark.parametrize("api", parameters.APIS)
def test_the_least_share_keeps_one_token(api: str) -> None:
    params = SamplingFields(top_p=0, typical_p=0, seed=3).translated(api).params()
    pool = select(np.linspace(0, 1, 1000, dtype=np.float32), 1.0, Cut(temperature=1.0))
    assert filters.top_p(pool, params).token_ids.tolist() == [999]
    assert len(filters.typical_p(pool, params).token_ids) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/completion"])
def test_a_seed_of_minus_one_is_random(live: Live, path: str) -> None:
    texts = {live.post(path, ROUTES[path] | {"seed": -1, "ignore_eos": True}).text for _ in range(4)}
    assert len(texts) == 4
    refusal = live.post(path, ROUTES[path] | {"seed": -2})
    assert refusal.status_code == 400
    assert "seed: -2 is not allowed; it must be -1 or more" in refusal.text


def test_scoring_a_text_generates_nothing(live: Live) -> None:
    requests = {"prompt": ["abc", "de"], "max_tokens": 0, "echo": True, "logprobs": 1}
    whole = live.post("/v1/completions", requests).json()
    assert [choice["text"] for choice in whole["choices"]] == ["abc", "de"]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length", "length"]
    assert whole["usage"]["completion_tokens"] == 0
    longer = live.post("/v1/completions", requests | {"max_tokens": 2}).json()
    for short, long in zip(whole["choices"], longer["choices"], strict=True):
        num = len(short["logprobs"]["tokens"])
        assert num == len(short["text"])
        assert short["logprobs"]["token_logprobs"] == long["logprobs"]["token_logprobs"][:num]
    events = live.post("/v1/completions", requests | {"stream": True}).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["abc", "de"]
    beams = live.post("/v1/completions", {"prompt": "a", "max_tokens": 0, "use_beam_search": True, "n": 2})
    assert "max_tokens: 0 is not allowed" in beams.text


def test_an_answer_of_no_tokens_fills_the_cache(live: Live) -> None:
    prompt = "a prompt that is longer than a block or two of the cache, so that it can be found again"
    body = live.post("/completion", {"prompt": prompt, "n_predict": 0}).json()
    assert (body["content"], body["tokens_predicted"], body["stop_type"]) == ("", 0, "limit")
    assert body["tokens_evaluated"] == len(prompt)
    assert body["generation_settings"]["n_predict"] == 0
    *_, last = live.post("/completion", {"prompt": prompt, "n_predict": 0, "stream": True}).text.strip().split("\n\n")
    assert json.loads(last[6:])["stop"] is True
    again = live.post("/v1/completions", {"prompt": prompt, "max_tokens": 0}).json()
    [choice] = again["choices"]
    assert (choice["text"], choice["finish_reason"], again["usage"]["completion_tokens"]) == ("", "length", 0)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "name", "ends"),
    [
        ("/v1/chat/completions", "max_tokens", '"finish_reason":"length"'),
        ("/v1/chat/completions", "max_completion_tokens", '"finish_reason":"length"'),
        ("/v1/messages", "max_tokens", '"stop_reason":"max_tokens"'),
        ("/v1/responses", "max_output_tokens", '"incomplete_details":{"reason":"max_output_tokens"}'),
    ],
)
def test_a_chat_of_no_tokens_fills_the_cache(live: Live, path: str, name: str, ends: str) -> None:
    turns = [
        {"role": "user", "content": f"{name} of {path}: rules at some length, so that they fill more than a block"}
    ]
    requests = {"model": "fake", "input" if path == "/v1/responses" else "messages": turns}
    for stream in (False, True):
        response = live.post(path, requests | {name: 0, "stream": stream})
        assert response.status_code == 200, response.text
        assert ends in response.text
        assert re.search(r'"(completion_tokens|output_tokens|predicted_n)":0\b', response.text)
        # No text comes, as content, delta or block.
        assert not re.search(r'"(content|text|delta)":"[^"]', response.text)
    usage = live.post(path, requests | {name: 1}).json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    assert usage.get("cache_read_input_tokens", details.get("cached_tokens")) > len(turns[0]["content"]) // 2


@pytest.mark.parametrize("none", [-1, -2, 0])
def test_a_length_of_none_in_ollama(live: Live, none: int) -> None:
    body = {"model": "fake", "prompt": "hi", "stream": False, "options": {"num_predict": none, "seed": 1}}
    reply = live.post("/api/generate", body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["eval_count"] > 1


def test_no_texts_have_no_vectors_in_ollama(live: Live) -> None:
    body = live.post("/api/embed", {"model": "fake", "input": []}).json()
    assert (body["embeddings"], body["prompt_eval_count"]) == ([], 0)
    assert live.post("/v1/embeddings", {"model": "fake", "input": []}).status_code == 400


def test_a_byte_order_mark_before_a_body_is_passed_over(live: Live) -> None:
    body = json.dumps(ROUTES["/v1/completions"]).encode()
    for marks, status in ((codecs.BOM_UTF8, 200), (2 * codecs.BOM_UTF8, 400), (codecs.BOM_UTF16, 400)):
        reply = HTTP.post(live.url + "/v1/completions", content=marks + body)
        assert reply.status_code == status, reply.text
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": ROUTES["/v1/completions"]}
    assert read_line(codecs.BOM_UTF8 + json.dumps(line).encode(), 1, ["/v1/completions"]).custom_id == "a"
