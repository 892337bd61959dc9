"""Streams of every API against a live server, read to their ends, and what has to be the same however they were cut.

`asked(seed)` makes one of many kinds of request; `read` opens it as a stream and gives its `Told`: text, token ids,
log-probabilities and finish of each answer, with nothing in it that a pause or a merged event may change.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx

OPENINGS = (
    "Once upon a time",
    "The ship left the harbour at dawn, and nobody",
    "Tom and his dog Max went to the park.",
    "In the middle of the night there was a knock",
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "likes": {
            "type": "array",
            "items": {"enum": ["cats", "rain", "books", "trains"]},
            "minItems": 2,
            "maxItems": 9,
        },
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


ENDS = ("message_stop", "response.completed", "response.incomplete")


class Asked(NamedTuple):
    """One request: where to, with which body, and what it is an example of."""

    kind: str
    path: str
    body: dict[str, Any]


class Told(NamedTuple):
    """`answers[i]` is answer i: text, token ids, log-probabilities as JSON has them, finish reason. `error` is the code
    or the text of what ended the stream instead; `ended` says that it had its proper end."""

    status: int
    answers: dict[int, dict[str, Any]]
    error: str = ""
    ended: bool = False

    def bits(self) -> str:
        """All of it as one text: floats are written as the shortest text that reads back as the same number."""
        return json.dumps([self.status, self.answers, self.error, self.ended], sort_keys=True)


def asked(seed: int, max_tokens: int = 96) -> Asked:
    """Request number `seed`: the kinds take turns, seeds and texts differ."""
    opening = f"{OPENINGS[seed % len(OPENINGS)]} ({seed})"
    temperature = (0.0, 0.8)[seed // 2 % 2]
    common: dict[str, Any] = {"temperature": temperature, "seed": seed, "stream": True}
    plain = common | {"prompt": opening, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
    chat = common | {"messages": [{"role": "user", "content": opening}], "max_tokens": max_tokens}
    ids = {"return_token_ids": True, "ignore_eos": True}
    options = {"temperature": temperature, "seed": seed, "num_predict": max_tokens}
    kinds: tuple[Callable[[], Asked], ...] = (
        lambda: Asked("logprobs", "/v1/completions", plain | {"logprobs": 3}),
        lambda: Asked("n=2", "/v1/completions", plain | {"n": 2, "logprobs": 1}),
        lambda: Asked("json", "/v1/chat/completions", chat | {"response_format": SCHEMA, "return_token_ids": True}),
        lambda: Asked("chat", "/v1/chat/completions", chat | ids | {"logprobs": True, "top_logprobs": 2}),
        lambda: Asked("penalties", "/v1/completions", plain | {"repetition_penalty": 1.2, "top_k": 40, "logprobs": 0}),
        lambda: Asked("echo", "/v1/completions", plain | {"echo": True, "logprobs": 1}),
        lambda: Asked("mirostat", "/v1/completions", plain | {"mirostat": 2, "temperature": 1.0, "logprobs": 0}),
        lambda: Asked("json, logprobs", "/v1/chat/completions", chat | {"response_format": SCHEMA, "logprobs": True}),
        lambda: Asked("messages", "/v1/messages", {"model": "builtin", **chat, "temperature": 0.0}),
        lambda: Asked("ollama", "/api/generate", {"model": "builtin", "prompt": opening, "options": options}),
        lambda: Asked("responses", "/v1/responses",
                      {"input": opening, "max_output_tokens": max_tokens, "temperature": temperature, "stream": True,
                       "store": False, "seed": seed}),
    )  # fmt: skip
    return kinds[seed % len(kinds)]()


async def read(
    client: httpx.AsyncClient, url: str, one: Asked, seen: Callable[[], object] = lambda: None, call_id: str = ""
) -> Told:
    """Open `one` as a stream and read it to its end. `seen` is called at each event, `call_id` is what the server calls
    it, if given. A connection that breaks, or is silent for too long, is an error in the result."""
    try:
        return await _read(client, url, one, seen, {"x-request-id": call_id} if call_id else {})
    except httpx.TransportError as error:
        return Told(0, {}, type(error).__name__)


async def _read(
    client: httpx.AsyncClient, url: str, one: Asked, seen: Callable[[], object], headers: dict[str, str]
) -> Told:
    answers: dict[int, dict[str, Any]] = {}
    error = ""
    ended = False
    async with client.stream("POST", url + one.path, json=one.body, headers=headers) as reply:
        if reply.status_code != 200:
            return Told(reply.status_code, {}, (await reply.aread()).decode()[:300])
        async for line in reply.aiter_lines():
            text = line.removeprefix("data: ")
            if text == "[DONE]":
                ended = True
            if not text.startswith("{"):
                continue
            event = json.loads(text)
            seen()
            for index, part in parts_of(event):
                merge(answers.setdefault(index, {}), part)
            ended = ended or event.get("type") in ENDS or event.get("done") is True
            if event.get("error"):
                error = json.dumps(event["error"])[:300]
            if event.get("type") == "response.failed":
                error = json.dumps(event["response"]["error"])[:300]
    return Told(200, answers, error, ended)


def parts_of(event: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """What one event adds to which answer."""
    for choice in event.get("choices", ()):
        part = {"text": choice.get("text") or (choice.get("delta") or {}).get("content") or ""}
        part["token_ids"] = choice.get("token_ids") or []
        part["logprobs"] = choice.get("logprobs") or {}
        part["finish"] = choice.get("finish_reason")
        yield choice["index"], part
    kind = event.get("type")
    if kind == "content_block_delta":
        yield 0, {"text": event["delta"].get("text", "")}
    elif kind == "message_delta":
        yield 0, {"finish": event["delta"]["stop_reason"]}
    elif kind == "response.output_text.delta":
        yield 0, {"text": event["delta"]}
    elif kind in ENDS and "response" in event:
        yield 0, {"finish": event["response"]["status"], "count": event["response"]["usage"]["output_tokens"]}
    elif "response" in event and isinstance(event["response"], str):
        yield 0, {"text": event["response"], "finish": event.get("done_reason"), "count": event.get("eval_count")}


def merge(answer: dict[str, Any], part: dict[str, Any]) -> None:
    """Text and lists are appended, dicts of lists too; of the rest the last value that is one."""
    for name, value in part.items():
        if isinstance(value, dict):
            merge(answer.setdefault(name, {}), value)
        elif isinstance(value, str | list) and name != "finish":
            answer[name] = answer.get(name, type(value)()) + value
        elif value is not None:
            answer[name] = value


def same(actual: Told, expected: Told) -> bool:
    """To the bit, and whole: an error is never the same as anything."""
    return actual.ended and not actual.error and actual.bits() == expected.bits()


def is_whole(output: Told) -> bool:
    """It has its end, its finish, and no number that is none."""
    finite = all(map(math.isfinite, numbers(output.answers)))
    return output.status == 200 and output.ended and not output.error and bool(output.answers) and finite


def numbers(value: Any) -> Iterator[float]:
    """All floats in a JSON value."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers(inner)
