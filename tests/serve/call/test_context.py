"""Prompts and answers that do not fit the context: each API's own words, and which lengths are cut to fit."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.support.server import Live

# The context of the server is 2,048 tokens, a letter each; the template of a chat adds a few.
LONG = "x" * 3000
USER = {"role": "user", "content": "x"}
OPENAI = (
    r"This model's maximum context length is 2048 tokens\. However, you requested (\d+) tokens \((\d+) in the prompt"
)


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/chat/completions", {"messages": messages(LONG)}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 2048}),
        ("/v1/chat/completions", {"messages": messages("x"), "max_completion_tokens": 2048}),
    ],
)
def test_an_overflow_has_openais_words(live: Live, path: str, body: dict[str, Any]) -> None:
    reply = live.post(path, body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    words = re.match(OPENAI, error["message"])
    assert words, error
    answer = body.get("max_tokens", body.get("max_completion_tokens", 0))
    assert int(words[1]) == int(words[2]) + answer > 2048
    assert error["code"] == "context_length_exceeded"
    # langchain's classes see the message alone.
    assert "context_length_exceeded" in error["message"]


def test_the_words_of_other_apis(live: Live) -> None:
    error = live.post("/completion", {"prompt": LONG}).json()["error"]
    assert re.match(r"request \(3000 tokens\) exceeds the available context size \(2048 tokens\)", error["message"])
    error = live.post("/v1/messages", {"model": "fake", "max_tokens": 2, "messages": messages(LONG)}).json()["error"]
    assert re.fullmatch(r"prompt is too long: 30\d\d tokens > 2047 maximum", error["message"])
    assert error["type"] == "invalid_request_error"
    body = {"model": "fake", "stream": False, "messages": messages(LONG)}
    assert live.post("/api/chat", body).json()["error"].startswith("the input length exceeds the context length. This")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/messages", {"messages": [USER], "max_tokens": 1_000_000}, "max_tokens"),
        (
            "/api/chat",
            {"messages": [USER], "stream": False, "options": {"num_predict": 1_000_000}},
            "options.num_predict",
        ),
        ("/api/generate", {"prompt": "x", "stream": False, "options": {"num_predict": 2048}}, "options.num_predict"),
        ("/completion", {"prompt": "x", "n_predict": 1_000_000}, "n_predict"),
        ("/completion", {"prompt": "x", "max_tokens": 2048}, "max_tokens"),
    ],
)
def test_a_length_beyond_the_context_is_cut_with_a_warning(
    live: Live, path: str, body: dict[str, Any], field: str
) -> None:
    reply = live.post(path, body | {"model": "fake", "stop": ["x"], "stop_sequences": ["x"]})
    assert reply.status_code == 200, reply.text
    lines = [line for line in reply.json()["warnings"] if line.startswith(f"{field}: ")]
    assert len(lines) == 1
    assert "more than the context has room for" in lines[0]
