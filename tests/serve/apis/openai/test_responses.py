"""/v1/responses: OpenAI's own client, its streaming helper included, against a live server over the fake engine."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.responses import ResponseInputParam
from tests.support import fake
from tests.support.reading import tool_parser
from tests.support.server import HTTP, Live, child, inproc, lines_of

from headrace.engine.generation import Generation
from headrace.protocol.config import ServerConfig
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Finish, Request, TokenLogprob
from headrace.serve.apis.openai.responses import ResponseAnswer, Responses
from headrace.serve.apis.openai.responses_events import Output, response_object
from headrace.serve.apis.openai.responses_input import chat_call, read
from headrace.serve.apis.openai.responses_replay import StoredResponse
from headrace.serve.call.call import Answer, ChatCall, SamplingFields
from headrace.serve.call.replies import ChatTokenLogprob
from headrace.serve.storage.store import Store
from headrace.serve.storage.writers import Writers
from headrace.text.outputs import CallPart, Content, ContentParser, Delta, MessageParser, Reasoning, RequestState
from headrace.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=240) as openai_client:
        yield openai_client


def test_plain_streamed_and_helper_are_one_text(client: openai.OpenAI) -> None:
    inputs: dict[str, Any] = {"model": "fake", "input": "Wer fährt so spät?", "max_output_tokens": 40}
    inputs["extra_body"] = {"seed": 5}
    plain = client.responses.create(**inputs)
    assert plain.status in ("completed", "incomplete")
    assert plain.usage is not None
    assert plain.usage.output_tokens <= 40
    assert plain.usage.total_tokens == plain.usage.input_tokens + plain.usage.output_tokens
    assert plain.output_text
    chat = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": inputs["input"]}], max_tokens=40, seed=5
    )
    assert plain.output_text == chat.choices[0].message.content
    text, kinds, numbers = "", [], []
    for event in client.responses.create(**inputs, stream=True):
        kinds.append(event.type)
        numbers.append(event.sequence_number)  # type: ignore[union-attr]
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == plain.output_text
    assert numbers == list(range(len(numbers)))
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    ends = {"completed": "response.completed", "incomplete": "response.incomplete"}
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", ends[plain.status],
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    with client.responses.stream(**inputs) as stream:
        for _ in stream:
            pass
        if plain.status == "completed":
            assert stream.get_final_response().output_text == text


def test_an_answer_that_ends_by_itself_is_completed(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="fake", input="Hi", extra_body={"seed": 1, "stop_token_ids": [*range(255)]}
    ) as s:
        s.until_done()
        final = s.get_final_response()
    assert final.status == "completed"
    assert final.incomplete_details is None
    cut = client.responses.create(model="fake", input="Hi", max_output_tokens=1, extra_body={"ignore_eos": True})
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_stored_and_gone_on_with(client: openai.OpenAI) -> None:
    first = client.responses.create(model="fake", input="One", max_output_tokens=8, metadata={"a": "b"})
    again = client.responses.retrieve(first.id)
    assert again.output_text == first.output_text
    assert again.metadata == {"a": "b"}
    items = client.responses.input_items.list(first.id).data
    assert [item.content[0].text for item in items] == ["One"]  # type: ignore[union-attr]
    inputs: dict[str, Any] = {"model": "fake", "max_output_tokens": 8, "extra_body": {"seed": 3}}
    second = client.responses.create(input="Two", previous_response_id=first.id, **inputs)
    output: ResponseInputParam = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Two"},
    ]
    assert client.responses.create(input=output, **inputs).output_text == second.output_text
    assert second.previous_response_id == first.id
    third = client.responses.create(input="Two", **inputs)
    assert third.output_text != second.output_text, "the history changes nothing, so the test tells nothing"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="Two", previous_response_id=first.id, **inputs)
    # What it was built on stays with the second one.
    assert client.responses.create(input="!", previous_response_id=second.id, **inputs).output_text


def test_store_false_is_not_kept(client: openai.OpenAI) -> None:
    result = client.responses.create(model="fake", input="One", max_output_tokens=4, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(result.id)


def test_background(live: Live, client: openai.OpenAI) -> None:
    result = client.responses.create(model="fake", input="One", max_output_tokens=30, background=True)
    assert result.status in ("queued", "in_progress")
    live.wait(lambda: client.responses.retrieve(result.id).status in ("completed", "incomplete"))
    assert client.responses.retrieve(result.id).output_text
    long = client.responses.create(
        model="fake", input="Two", max_output_tokens=2000, background=True, extra_body={"ignore_eos": True}
    )
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="fake", input="Go on", previous_response_id=long.id)
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"
    live.wait(lambda: live.client.num_unfinished == 0)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(client.responses.create(model="fake", input="x", max_output_tokens=2).id)


def test_a_client_that_leaves_cancels(live: Live, client: openai.OpenAI) -> None:
    stream = client.responses.create(
        model="fake", input="One", max_output_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    created = next(iter(stream))
    assert created.type == "response.created"
    stream.close()
    live.wait(lambda: client.responses.retrieve(created.response.id).status == "cancelled")
    live.wait(lambda: live.client.num_unfinished == 0)


def test_logprobs_with_text(client: openai.OpenAI) -> None:
    result = client.responses.create(
        model="fake", input="One", max_output_tokens=5, top_logprobs=2, include=["message.output_text.logprobs"],
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    [message] = result.output
    logprobs = message.content[0].logprobs  # type: ignore[union-attr]
    assert logprobs is not None
    assert len(logprobs) == 5
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


class Scripted:
    """The engine's stream of one answer, whose tokens come in deltas of given lengths."""

    def __init__(self, token_ids: list[int], lengths: list[int]) -> None:
        self._token_ids, self._lengths = list(token_ids), list(lengths)
        self._is_closed = False

    async def __anext__(self) -> list[tuple[int, Delta]]:
        if self._is_closed or not self._lengths:
            raise StopAsyncIteration
        length = self._lengths.pop(0)
        token_ids, self._token_ids = self._token_ids[:length], self._token_ids[length:]
        entries = [TokenLogprob(token_id, -0.5, 1, ()) for token_id in token_ids]
        finish = None if self._token_ids else Finish("stop")
        return [(0, Delta(0.0, 0.0, 0.0, token_ids, entries, finish=finish))]

    def abort(self, index: int) -> None:
        self._is_closed = True

    def close(self) -> None:
        self._is_closed = True


async def read_scripted(
    tokenizer: Tokenizer,
    token_ids: list[int],
    lengths: list[int],
    stream: bool,
    parser: Callable[[], MessageParser] = ContentParser,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the response at its end, the events of a stream) of an answer that comes in pieces of these lengths."""
    params = SamplingParams(logprobs=0, max_tokens=100, seed=1)
    state = RequestState(Request(request_id="r", prompt_token_ids=[65], params=params), tokenizer)
    scripted: Any = Scripted(token_ids, lengths)
    generation = Generation(scripted, [state], 1, None, num_returned=1, per_request=1)
    call = ChatCall(messages=[], sampling=SamplingFields(logprobs=0))
    responses = Responses(Store("resp_", None, max_items=1, max_bytes=2**20, evict=True), Writers())
    chat = Answer(generation, call, tokenizer, "chatcmpl", ["A"], parser)
    request, shared = read({"input": "A", "stream": stream})
    entry = StoredResponse(response=response_object("fake", request, chat, "resp_1"), input=[], history=[])
    answer = ResponseAnswer(responses, request, chat, entry, chat_call(request, shared)[1])
    if not stream:
        return json.loads(msgspec.json.encode(await answer.whole())), []
    events = [json.loads(raw.split(b"data: ")[1]) async for raw in answer.events()]
    return events[-1]["response"], events


@pytest.mark.parametrize("text", ["One", ""])
def test_logprobs_do_not_depend_on_the_pieces_of_an_answer(live: Live, tokenizer: Tokenizer, text: str) -> None:
    """The token that ends an answer is among them, as in a chat, though it has no text."""
    token_ids = [*text.encode(), fake.EOS]
    for lengths in ([1] * len(token_ids), [len(token_ids)], [max(len(token_ids) - 1, 1), 1][: len(token_ids)]):
        for stream in (False, True):
            response, events = asyncio.run(read_scripted(tokenizer, token_ids, lengths, stream))
            (message,) = response["output"]
            (part,) = message["content"]
            assert part["text"] == text
            assert [entry["logprob"] for entry in part["logprobs"]] == [-0.5] * len(token_ids)
            if stream:
                deltas = [event for event in events if event["type"] == "response.output_text.delta"]
                assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
                (added,) = (event["part"] for event in events if event["type"] == "response.content_part.added")
                assert added == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


@pytest.mark.parametrize("single", [True, False])
def test_logprobs_before_a_call_do_not_depend_on_the_pieces_of_an_answer(
    live: Live, tokenizer: Tokenizer, single: bool
) -> None:
    """Those of the text before a call are the text's own, and tokens after the end of a single call are not counted,
    however many tokens come at once."""
    text = 'Let me see. <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call> Done.'
    token_ids = [*text.encode(), fake.EOS]
    num = len(token_ids)
    parser = functools.partial(tool_parser, "hermes", {"f": {}}, single=single)
    answers = []
    for lengths in ([1] * num, [num], [7] * (num // 7) + [num % 7], [12, num - 12], [20, 30, num - 50]):
        for stream in (False, True):
            response, events = asyncio.run(read_scripted(tokenizer, token_ids, lengths, stream, parser))
            answers.append({field: response[field] for field in ("output", "usage", "status")})
            if stream:
                deltas = [event for event in events if event["type"] == "response.output_text.delta"]
                logprobs = [item["content"][0]["logprobs"] for item in response["output"] if item["type"] == "message"]
                assert [entry for event in deltas for entry in event["logprobs"]] == list(itertools.chain(*logprobs))
    assert [item["type"] for item in answers[0]["output"]][:2] == ["message", "function_call"]
    assert all(answer == answers[0] for answer in answers)
    # The text's own tokens: one for each character, and perhaps some that the parser held back.
    assert len(answers[0]["output"][0]["content"][0]["logprobs"]) < len(text.partition("<tool_call>")[0]) + 2


def test_usage_tells_what_the_cache_had(client: openai.OpenAI) -> None:
    inputs: dict[str, Any] = {"model": "fake", "input": "a long text that the cache knows " * 4, "max_output_tokens": 2}
    client.responses.create(**inputs)
    again = client.responses.create(**inputs)
    assert again.usage is not None
    # Whole blocks of 16.
    assert again.usage.input_tokens_details.cached_tokens == again.usage.input_tokens // 16 * 16


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": ["a", {"id": f"msg_{'0' * 32}_0"}]}, "input[1].id"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [{"type": "image_generation_call"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_video"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": "x", "tools": [{"type": "wand"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": {}}]}, "tools[0].tools"),
        ({"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "wand"}]}]},
         "tools[0].tools[0].type"),
        ({"input": "x", "tools": [{"type": "mcp"}, {"type": "custom", "name": "a b"}]}, "tools[1].name"),
        ({"input": "x", "tools": [{"type": "custom", "name": "c", "format": {"type": "xml"}}]}, "tools[0].format"),
        ({"input": "x", "tools": [{"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "peg"}}]},
         "tools[0].format.syntax"),
        ({"input": "x", "tools": [{"type": "custom", "name": "c"}, {"type": "custom", "name": "c"}]}, "tools[1].name"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "truncation": "middle"}, "truncation"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "x", "background": True, "store": False}, "store"),
        ({"input": "x", "conversation": {"name": "c"}}, "conversation.id"),
        ({"input": "x", "conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "max_output_tokens": -1}, "max_output_tokens"),
        ({"input": "x", "temperature": -1}, "temperature"),
        ({"input": "x", "metadata": {"k" * 65: "v"}}, "metadata"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(live: Live, body: dict[str, Any], param: str) -> None:
    reply = live.post("/v1/responses", body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_what_is_ignored_is_told(live: Live) -> None:
    body = {"input": "x", "max_output_tokens": 2, "max_tool_calls": 3, "frobnicate": 1, "include": ["file_search"]}
    warnings = live.post("/v1/responses", body).json()["warnings"]
    assert [warning.partition(":")[0] for warning in warnings] == ["frobnicate", "max_tool_calls", "include"]
    effort = {"input": "x", "max_output_tokens": 2, "reasoning": {"effort": "low"}}
    assert live.post("/v1/responses", effort).json()["warnings"][0].startswith("reasoning.effort: ")
    assert "warnings" not in live.post("/v1/responses", {"input": "x", "max_output_tokens": 2}).json()


@pytest.mark.parametrize("path", ["../../etc/passwd", "resp_" + "0" * 32, "%2e%2e%2fx", "file-" + "a" * 32])
def test_S_08_an_id_is_never_a_path(live: Live, path: str) -> None:
    for url in (f"/v1/responses/{path}", f"/v1/files/{path}", f"/v1/files/{path}/content", f"/v1/batches/{path}"):
        assert HTTP.get(live.url + url).status_code == 404


def test_truncation_auto_drops_the_oldest(client: openai.OpenAI) -> None:
    items: ResponseInputParam = [{"role": "user", "content": f"{i}" * 300} for i in range(12)]
    with pytest.raises(openai.BadRequestError, match="input: "):
        client.responses.create(model="fake", input=items, max_output_tokens=4)
    result = client.responses.create(model="fake", input=items, max_output_tokens=4, truncation="auto")
    assert result.usage is not None
    assert 0 < result.usage.input_tokens < 2048


def test_kept_in_a_folder_over_a_restart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = ServerConfig(log_stats_interval=0, storage_dir=str(tmp_path))
    with Live(inproc(delay=0.01), tokenizer, config) as first:
        result = first.post("/v1/responses", {"input": "One", "max_output_tokens": 6}).json()
        body = {"input": "Two", "max_output_tokens": 2000, "ignore_eos": True, "background": True}
        running = first.post("/v1/responses", body).json()["id"]
        spoilt = first.post("/v1/responses", {"input": "One", "max_output_tokens": 6}).json()["id"]
    (tmp_path / "responses" / f"{spoilt}.bin").write_bytes(b'{"response": ')
    with Live(inproc(), tokenizer, config) as second:
        assert HTTP.get(f"{second.url}/v1/responses/{spoilt}").status_code == 404
        assert HTTP.get(f"{second.url}/v1/responses/{result['id']}").json() == result
        assert HTTP.get(f"{second.url}/v1/responses/{running}").json()["status"] in ("failed", "cancelled")
        assert HTTP.delete(f"{second.url}/v1/responses/{result['id']}").json()["deleted"] is True


def test_events_of_reasoning_text_and_calls() -> None:
    output = Output(SimpleNamespace(id="resp_1", output=[]))
    logprob = {"token": "Say", "logprob": -1.0, "bytes": [83, 97, 121], "top_logprobs": []}
    inputs = output.take([Reasoning("Hm"), Reasoning("m.")], [])
    inputs += output.take([Content("Say"), Content("ing")], [msgspec.convert(logprob, ChatTokenLogprob)])
    inputs += output.take([CallPart(0, "call_a", "f", "{"), CallPart(0, "call_a", None, "}")], [])
    inputs += output.take([CallPart(1, "call_b", "g", ""), Content("Done")], [])
    inputs += output.end("incomplete")
    events, items = json.loads(msgspec.json.encode(inputs)), json.loads(msgspec.json.encode(output.items))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
    ]  # fmt: skip
    assert [item["type"] for item in items] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert [item["status"] for item in items] == ["completed"] * 4 + ["incomplete"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
    assert items[1]["content"][0]["logprobs"] == [logprob]
    assert items[2]["arguments"] == "{}"
    # The deltas of each item together are what its last event tells.
    for index, item in enumerate(items):
        item_events = [event for event in events if event.get("output_index") == index]
        text = "".join(event["delta"] for event in item_events if "delta" in event)
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert item_events[-1]["item"] == item
    assert len({item["id"] for item in items}) == 5


def test_fields_become_a_call_s() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    other = {"type": "function", "name": "g", "parameters": {"type": "object"}}
    request, shared = read(
        {
            "input": "x", "tools": [tool, other], "max_output_tokens": 9, "top_k": 3, "min_p": 0.1,
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
            "reasoning": {"effort": "low"},
        }
    )  # fmt: skip
    call = chat_call(request, shared)[0]
    assert call.tools.tools == [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    ]
    assert (call.tools.mode, list(call.tools.schemas)) == ("required", ["f"])
    assert call.sampling == SamplingFields(max_tokens=9, top_k=3, min_p=0.1)
    assert call.form == StructuredOutputs(json={"type": "object"})
    assert call.reasoning_effort == "low"
    chosen, _ = chat_call(
        *read({"input": "x", "tools": [tool, other], "tool_choice": {"type": "function", "name": "f"}})
    )
    assert (chosen.tools.mode, list(chosen.tools.schemas), chosen.tools.parallel) == ("required", ["f"], False)
    with pytest.raises(RequestError, match="tool_choice"):
        chat_call(*read({"input": "x", "tools": [tool], "tool_choice": {"type": "mcp"}}))


def test_a_broken_engine_is_told_as_an_event(tokenizer: Tokenizer) -> None:
    engine = child(delay=0.01, max_restarts=0)
    with Live(engine, tokenizer, ServerConfig(log_stats_interval=0)) as server:
        body = {"input": "x", "stream": True, "max_output_tokens": 500, "ignore_eos": True}
        with httpx.stream("POST", server.url + "/v1/responses", json=body, timeout=240) as reply:
            seen, killed = [], False
            for line in lines_of(reply):
                if line.startswith("data: "):
                    seen.append(json.loads(line[6:]))
                if len(seen) == 6 and not killed:
                    killed = True
                    os.kill(*engine.pids, signal.SIGKILL)
    assert seen[-1]["type"] == "response.failed"
    assert seen[-1]["response"]["error"]["code"] == "server_error"


SAID = (
    '<think>They want the weather.</think>I look.<tool_call>{"name": "weather", "arguments": {"at": "Ulm"}}</tool_call>'
)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_text_and_calls_of_a_model(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """What the model is made to say arrives as items, and goes on as a conversation with the call's output."""
    script = [*SAID.encode(), fake.EOS]

    class Speaker(fake.Oracle):
        def next_token(self, context: Any, params: Any, num_generated: int) -> int:
            return script[min(num_generated, len(script) - 1)]

    monkeypatch.setattr(fake, "Oracle", Speaker)
    config = ServerConfig(log_stats_interval=0, tool_call_parser="hermes", reasoning_parser="deepseek_r1")
    inputs: dict[str, Any] = {"model": "fake", "input": "Weather in Ulm?", "max_output_tokens": 300}
    parameters = {"type": "object", "properties": {"at": {"type": "string"}}}
    inputs["tools"] = [{"type": "function", "name": "weather", "parameters": parameters, "strict": False}]
    with (
        Live(inproc(), tokenizer, config) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        if stream:
            with client.responses.stream(**inputs) as events:
                kinds = [event.type for event in events]
                final_response: Any = events.get_final_response()
            assert "response.reasoning_text.delta" in kinds
            assert "response.function_call_arguments.delta" in kinds
            assert kinds[-1] == "response.completed"
        else:
            final_response = client.responses.create(**inputs)
        reasoning, message, call = final_response.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "They want the weather.")
        assert (message.type, message.content[0].text) == ("message", "I look.")
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"at": "Ulm"})
        assert 0 < final_response.usage.output_tokens_details.reasoning_tokens < final_response.usage.output_tokens
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        more = client.responses.create(**(inputs | {"input": [output]}), previous_response_id=final_response.id)
        assert more.status == "completed"
        result = [*client.responses.input_items.list(more.id)]
        assert [item.type for item in result] == ["function_call_output"]
