"""Which names a request may give the model: all of `--served-model-name`, and any where no key is set."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.server import HTTP, Live, inproc

from headrace.protocol.config import ServerConfig
from headrace.text.tokenizer import Tokenizer

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/completion", {"prompt": "a", "n_predict": 1}),
    ("/api/chat", {"messages": [{"role": "user", "content": "a"}], "stream": False, "options": {"num_predict": 1}}),
    ("/v1/embeddings", {"input": "a"}),
]


def statuses(server: Live, name: str, **more: Any) -> dict[str, int]:
    return {path: server.post(path, body | {"model": name}, **more).status_code for path, body in CALLS}


def test_each_name_is_served_and_replies_have_the_first(tokenizer: Tokenizer) -> None:
    names = ["first", "second"]
    config = ServerConfig(log_stats_interval=0, served_model_name=names, any_model_name=False)
    with Live(inproc(), tokenizer, config) as server:
        for name in names:
            assert set(statuses(server, name).values()) == {200}
        assert set(statuses(server, "fake").values()) == {404}
        assert [card["id"] for card in HTTP.get(server.url + "/v1/models").json()["data"]] == names
        assert [card["name"] for card in HTTP.get(server.url + "/api/tags").json()["models"]] == names
        assert server.post("/v1/completions", CALLS[0][1] | {"model": "second"}).json()["model"] == "first"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 200),
        ({"any_model_name": False}, 404),
        ({"api_key": "k"}, 404),
        ({"api_key": "k", "any_model_name": True}, 200),
    ],
)
def test_any_name_is_served_where_no_key_is_set(tokenizer: Tokenizer, fields: dict[str, Any], expected: int) -> None:
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0, **fields)) as server:
        headers = {"Authorization": "Bearer k"}
        assert set(statuses(server, "gpt-3.5-turbo", headers=headers).values()) == {expected}
        if expected == 200:
            for path, body in CALLS:
                reply = server.post(path, body | {"model": "dummy"}, headers=headers).json()
                assert reply["model"] == "fake", "the reply has the true name"
        assert HTTP.get(server.url + "/v1/models/dummy", headers=headers).status_code == 404, "a look-up is no request"
