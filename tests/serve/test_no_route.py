"""Paths, methods and fields that are not served: the reply says what is there instead."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.server import HTTP, Live


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v1/model", 404, "there is no /v1/model here; did you mean /v1/models? GET /docs lists all routes"),
        ("POST", "/v1/chat/completion", 404, "did you mean /v1/chat/completions?"),
        ("GET", "/nothing/like/it", 404, "there is no /nothing/like/it here; GET /docs lists all routes"),
        ("GET", "/v1/completions", 405, "/v1/completions takes POST, not GET"),
        ("POST", "/v1/responses/compact", 501, "/v1/responses/compact: not supported here; it is opaque state"),
        ("POST", "/slots/3", 501, "/slots/3: not supported here; start the server with --slot-save-path FOLDER"),
        ("POST", "/api/create", 501, "/api/create: not supported here; the model is named when the server starts"),
    ],
)
def test_a_route_that_is_not_there_names_what_is(live: Live, method: str, path: str, status: int, words: str) -> None:
    reply = HTTP.request(method, live.url + path, json={} if method == "POST" else None)
    error = reply.json()["error"]
    assert reply.status_code == status
    assert words in (error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize(
    ("path", "field", "value", "words"),
    [
        ("/v1/completions", "functions", [{"name": "f"}], "functions: not supported here; chats have it"),
        ("/v1/chat/completions", "chat_template", "{{ 1 }}", "start the server with --trust-request-chat-template"),
        ("/v1/completions", "suffix", "end", "suffix: not supported here; write it into the prompt"),
        ("/v1/responses", "prompt", {"id": "p"}, "prompt: not supported here; stored prompts are not kept"),
    ],
)
def test_a_field_that_is_not_supported_names_what_is(live: Live, path: str, field: str, value: Any, words: str) -> None:
    body = {"prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}], field: value}
    reply = live.post(path, body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == field
