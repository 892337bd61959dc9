"""Rows of log-probabilities of the whole vocabulary: made, written and freed beside the event loop (R-03)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.support import fake
from tests.support.server import HTTP, Live, inproc

from headrace.engine import generation
from headrace.protocol.config import ServerConfig
from headrace.serve import routing
from headrace.serve.apis.openai import embeddings, responses, responses_replay
from headrace.serve.apis.openai.responses import ResponseAnswer
from headrace.serve.apis.openai.responses_replay import EncodedResponse, RawResponse, ResponseItems
from headrace.serve.call import embedding, scoring
from headrace.serve.errors import OPENAI
from headrace.text.tokenizer import Tokenizer

ALL = fake.VOCAB_SIZE
TEXT: dict[str, Any] = {"prompt": "ab", "max_tokens": 3, "ignore_eos": True, "seed": 1, "request_id": "same"}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "ignore_eos": True, "seed": 1, "logprobs": True,
    "top_logprobs": ALL,
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "input": "a", "max_output_tokens": 3, "ignore_eos": True, "seed": 1, "top_logprobs": ALL,
    "include": ["message.output_text.logprobs"],
}  # fmt: skip
CALLS = [
    ("/v1/completions", TEXT | {"logprobs": ALL}),
    ("/v1/completions", TEXT | {"prompt_logprobs": -1, "logprobs": ALL, "echo": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", RESPONSE | {"store": False}),
    ("/completion", {"prompt": "a", "n_predict": 3, "n_probs": ALL, "seed": 1}),
    ("/api/chat", {"model": "fake", "messages": CHAT["messages"], "options": {"num_predict": 3, "seed": 1},
                   "logprobs": True, "top_logprobs": ALL}),
]  # fmt: skip
CHANGING = re.compile(
    r'"(?:timings|created_at|created|completed_at|id|item_id|(?:\w+_)?duration)":(?:\{[^}]*\}|"[^"]*"|[\d.]+)'
)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Live]:
    with Live(inproc(max_logprobs=-1), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        yield live


def set_large(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (generation, routing, responses_replay):
        monkeypatch.setattr(module, "LARGE_TEXT", size)


def texts_on_the_loop(monkeypatch: pytest.MonkeyPatch, live: Live, path: str, body: dict[str, Any]) -> tuple[str, int]:
    """The reply without what changes, and how many tokens the server's loop turned into text."""
    threads: Counter[int] = Counter()
    token_bytes = Tokenizer.token_bytes

    def noted(self: Tokenizer, token_id: int, first: bool = False) -> bytes:
        threads[threading.get_ident()] += 1
        return token_bytes(self, token_id, first)

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "token_bytes", noted)
        reply = HTTP.post(live.url + path, json=body)
    assert reply.status_code == 200, reply.text
    return CHANGING.sub("", reply.text), threads[live.thread.ident or 0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), CALLS)
def test_R_03_wide_rows_become_text_beside_the_loop(
    server: Live, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], stream: bool
) -> None:
    set_large(monkeypatch, 16)
    beside, num_beside = texts_on_the_loop(monkeypatch, server, path, body | {"stream": stream})
    set_large(monkeypatch, 10**9)
    at_once, num_at_once = texts_on_the_loop(monkeypatch, server, path, body | {"stream": stream})
    assert beside == at_once
    assert num_beside < 20 < 50 < num_at_once


@pytest.mark.parametrize("stream", [False, True])
def test_R_03_a_stored_response_is_freed_in_slices_beside_the_loop(
    server: Live, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    set_large(monkeypatch, 16)
    freed: list[tuple[int, bool]] = []
    free = routing.free

    def noted(lists: Any) -> None:
        on_loop = threading.get_ident() == server.thread.ident
        freed.extend((len(each), on_loop) for each in lists if each and hasattr(each[0], "top_logprobs"))
        free(lists)

    monkeypatch.setattr(routing, "free", noted)
    reply = HTTP.post(f"{server.url}/v1/responses", json=RESPONSE | {"stream": stream, "max_output_tokens": 30})
    Live.wait(lambda: bool(freed))
    assert [on_loop for _, on_loop in freed] == [False]
    assert freed[0][0] > 10
    # What is stored is whole.
    response_id = re.findall(r"resp_[0-9a-f]{32}", reply.text)[0]
    stored = HTTP.get(f"{server.url}/v1/responses/{response_id}").json()
    assert len(stored["output"][0]["content"][0]["logprobs"]) == freed[0][0]


def test_R_03_a_stored_response_is_read_as_it_was_written(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    written = HTTP.post(f"{server.url}/v1/responses", json=RESPONSE | {"max_output_tokens": 30})
    path = f"/v1/responses/{written.json()['id']}"
    monkeypatch.setattr(routing, "SENT_BYTES", 1000)
    kinds: list[Any] = []
    decode = msgspec.json.decode

    def noted(data: bytes, **more: Any) -> Any:
        kinds.append(more.get("type"))
        return decode(data, **more)

    monkeypatch.setattr(msgspec.json, "decode", noted)
    stored = HTTP.get(server.url + path)
    assert stored.content == written.content
    assert stored.headers["content-type"] == "application/json"
    assert HTTP.head(server.url + path).headers["content-length"] == str(len(stored.content))
    assert RawResponse in kinds
    assert not {ResponseItems, EncodedResponse} & {kind for kind in kinds if isinstance(kind, type)}
    # The control: one that needs the items takes the entry apart.
    HTTP.get(f"{server.url}{path}/input_items")
    assert ResponseItems in kinds


class LongEvent(routing.Readable):
    """One event that is sent in several parts."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(id="a", close=lambda: None), True)
        self.event = b"data: " + b"x" * (3 * routing.SENT_BYTES) + b"\n\n"

    async def whole(self) -> None:
        raise NotImplementedError

    async def events(self) -> AsyncIterator[bytes]:
        yield self.event
        await asyncio.sleep(0.05)


def test_an_event_is_sent_in_parts_and_heartbeats_stand_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "HEARTBEAT_S", 0.005)
    answer, messages = LongEvent(), []

    async def send(message: dict[str, Any]) -> None:
        # The client reads slowly, so that a heartbeat is due between two parts.
        await asyncio.sleep(0.02)
        messages.append(message.get("body", b""))

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    asyncio.run(routing.EventStream(answer, {}, OPENAI)({}, receive, send))
    assert max(map(len, messages)) == routing.SENT_BYTES
    assert answer.event in b"".join(messages)
    assert OPENAI.heartbeat in messages


@contextlib.contextmanager
def converted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of JSON that each call of msgspec writes of structs, or reads into values: what it holds the
    interpreter's lock for. Texts that stay as they were written do not count."""
    sizes: list[int] = []
    encode, decode, to_builtins = msgspec.json.encode, msgspec.json.decode, msgspec.to_builtins

    def kept(value: Any) -> int:
        """The bytes of `value` that are JSON already."""
        if isinstance(value, msgspec.Raw):
            return len(value)
        if isinstance(value, msgspec.Struct):
            return sum(kept(getattr(value, name)) for name in value.__struct_fields__)
        if isinstance(value, dict):
            return sum(map(kept, value.values()))
        return sum(map(kept, value)) if isinstance(value, list) else 0

    def encoding(value: Any, **more: Any) -> bytes:
        text = encode(value, **more)
        sizes.append(len(text) - kept(value))
        return text

    def decoding(data: Any, **more: Any) -> Any:
        value = decode(data, **more)
        sizes.append(len(encode(value)) - kept(value))
        return value

    def building(value: Any, **more: Any) -> Any:
        sizes.append(len(encode(value)) - kept(value))
        return to_builtins(value, **more)

    with monkeypatch.context() as patch:
        patch.setattr(msgspec.json, "encode", encoding)
        patch.setattr(msgspec.json, "decode", decoding)
        patch.setattr(msgspec, "to_builtins", building)
        yield sizes


def in_a_conversation(live: Live) -> None:
    result = HTTP.post(f"{live.url}/v1/conversations", json={"items": [{"role": "user", "content": "b"}]}).json()
    url = f"{live.url}/v1/conversations/{result['id']}"
    body = RESPONSE | {"max_output_tokens": 30, "conversation": result["id"]}
    first = HTTP.post(f"{live.url}/v1/responses", json=body).json()
    items = HTTP.get(f"{url}/items?order=asc").json()["data"]
    assert [item["type"] for item in items] == ["message"] * 3
    assert items[2]["content"] == first["output"][0]["content"]
    assert HTTP.get(f"{url}/items/{items[2]['id']}").json() == items[2]
    assert HTTP.post(f"{live.url}/v1/responses", json=body | {"max_output_tokens": 1}).status_code == 200
    HTTP.delete(f"{url}/items/{items[2]['id']}")
    assert len(HTTP.get(f"{url}/items").json()["data"]) == 4


def replayed(live: Live) -> None:
    stream = HTTP.post(f"{live.url}/v1/responses", json=RESPONSE | {"max_output_tokens": 30, "stream": True}).text
    response_id = re.findall(r"resp_[0-9a-f]{32}", stream)[0]
    assert HTTP.get(f"{live.url}/v1/responses/{response_id}?stream=true").text == stream


def gone_on_with(live: Live) -> None:
    first = HTTP.post(f"{live.url}/v1/responses", json=RESPONSE | {"max_output_tokens": 30}).json()
    second = {"input": "b", "max_output_tokens": 1, "previous_response_id": first["id"]}
    assert HTTP.post(f"{live.url}/v1/responses", json=second).json()["usage"]["input_tokens"] > 30


def in_the_background(live: Live) -> None:
    body = RESPONSE | {"max_output_tokens": 60, "background": True}
    result = HTTP.post(f"{live.url}/v1/responses", json=body).json()
    url = f"{live.url}/v1/responses/{result['id']}"
    events = [json.loads(line[6:]) for line in HTTP.get(url + "?stream=true").text.split("\n") if line[:5] == "data:"]
    rows = [row for event in events if event["type"] == "response.output_text.delta" for row in event["logprobs"]]
    assert rows == HTTP.get(url).json()["output"][0]["content"][0]["logprobs"]
    HTTP.post(url + "/cancel")


def in_a_batch(live: Live) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT | {"max_tokens": 30}}
    form = {"files": {"file": ("a.jsonl", json.dumps(line))}, "data": {"purpose": "batch"}}
    file_id = HTTP.post(f"{live.url}/v1/files", **form).json()["id"]  # type: ignore[arg-type]
    expected = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "1h"}
    batch_id = HTTP.post(f"{live.url}/v1/batches", json=expected).json()["id"]
    Live.wait(lambda: HTTP.get(f"{live.url}/v1/batches/{batch_id}").json()["status"] == "completed")
    output_id = HTTP.get(f"{live.url}/v1/batches/{batch_id}").json()["output_file_id"]
    output = HTTP.get(f"{live.url}/v1/files/{output_id}/content").json()
    assert len(output["response"]["body"]["choices"][0]["logprobs"]["content"]) == 30


@pytest.mark.sampled(3)
@pytest.mark.parametrize("work", [in_a_conversation, replayed, gone_on_with, in_the_background, in_a_batch])
def test_R_03_long_answers_are_written_in_pieces_and_kept_as_they_were_written(
    server: Live, monkeypatch: pytest.MonkeyPatch, work: Callable[[Live], None]
) -> None:
    set_large(monkeypatch, 16)
    with converted(monkeypatch) as sizes:
        work(server)
    assert max(sizes) < 2**16
    # The control: a reply that is written in one go is noticed.
    monkeypatch.setattr(routing, "json_pieces", lambda value, levels=0: [msgspec.json.encode(value)])
    with converted(monkeypatch) as sizes:
        work(server)
    assert max(sizes) > 2**18


def test_R_03_what_ran_in_the_background_or_was_given_up_is_freed_beside_the_loop(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: dict[str, tuple[str, bool]] = {}
    free_lists = responses.free_lists

    def noted(response: Any) -> None:
        freed[response.id] = response.status, threading.get_ident() == server.thread.ident
        # What is read from now on was stored.
        free_lists(response)
        assert not response.output

    monkeypatch.setattr(responses, "free_lists", noted)
    url, body = f"{server.url}/v1/responses", RESPONSE | {"max_output_tokens": 30}
    whole = HTTP.post(url, json=body | {"background": True}).json()["id"]
    Live.wait(lambda: whole in freed)
    # One that is given up is freed when it is stored, and so is one whose client has gone.
    body["max_output_tokens"] = 2000
    with HTTP.stream("POST", url, json=body | {"stream": True}) as reply:
        left = re.findall(r"resp_[0-9a-f]{32}", next(reply.iter_text()))[0]
    ended = HTTP.post(url, json=body | {"background": True}).json()["id"]
    HTTP.post(f"{url}/{ended}/cancel")
    Live.wait(lambda: len(freed) == 3)
    assert freed == {whole: ("incomplete", False), left: ("cancelled", False), ended: ("cancelled", False)}
    for response_id, (status, _) in freed.items():
        assert HTTP.get(f"{url}/{response_id}").json()["status"] == status
    # The control: a reply that is sent whole is freed by what writes it.
    HTTP.post(url, json=body | {"max_output_tokens": 1})
    assert len(freed) == 3


def test_R_03_control_a_reader_that_stays_keeps_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[Any] = []
    monkeypatch.setattr(responses, "free_lists", freed.append)

    async def work() -> None:
        answer: Any = SimpleNamespace(
            api=SimpleNamespace(ends=SimpleNamespace(tasks={})), id="a", response="whole", change=None, _num_readers=1
        )
        answer.output, answer.leave = SimpleNamespace(cuts=[]), lambda: ResponseAnswer.leave(answer)
        answer.response = SimpleNamespace(id="a")
        stream = ResponseAnswer.follow(answer)
        answer.leave()
        await asyncio.sleep(0.01)
        assert not freed
        for _ in range(2):
            stream.close()
        Live.wait(lambda: freed == [answer.response], 5)
        assert len(freed) == 1

    asyncio.run(work())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
        ("/pooling", {"input": ["a", "b"], "model": "fake"}),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/api/embed", {"model": "fake", "input": ["a", "b"]}),
        ("/embedding", {"content": ["a", "b"]}),
    ],
)
def test_R_03_vectors_are_made_and_written_beside_the_loop(
    server: Live, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    changing = re.compile(r'"(?:id|created|total_duration)":(?:"[^"]*"|\d+)')

    def reply_and_calls(size: int) -> tuple[str, int]:
        """The reply, and how often the server's loop made a vector, a text of one, a likeness, or a text of a reply."""
        threads: Counter[int] = Counter()

        def noted(work: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                threads[threading.get_ident()] += 1
                return work(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            set_large(patch, size)
            patch.setattr(embedding, "finished", noted(embedding.finished))
            patch.setattr(embeddings, "packed", noted(embeddings.packed))
            patch.setattr(scoring, "likeness", noted(scoring.likeness))
            patch.setattr(routing, "json_response", noted(routing.json_response))
            reply = HTTP.post(server.url + path, json=body)
        assert reply.status_code == 200, reply.text
        return changing.sub("", reply.text), threads[server.thread.ident or 0]

    beside, num_beside = reply_and_calls(2)
    at_once, num_at_once = reply_and_calls(10**9)
    assert beside == at_once
    assert num_beside == 0
    assert num_at_once >= 3
