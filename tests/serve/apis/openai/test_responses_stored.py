"""Stored responses as streams, conversations, and the count of a response's tokens: OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from tests.security import rig
from tests.support.server import HTTP, Live, inproc

from headrace.protocol.config import ServerConfig
from headrace.serve.apis.openai.conversations import Conversations
from headrace.serve.apis.openai.files import NotFoundError
from headrace.serve.apis.openai.responses_events import Event, OutputItem, OutputText, ResponseObject
from headrace.serve.apis.openai.responses_replay import Replay, StoredResponse
from headrace.serve.apis.openai.responses_stored import StoredResponses, StoredText, past_item, written, written_entry
from headrace.serve.call.replies import ChatTokenLogprob, TopLogprob
from headrace.serve.storage.store import Store
from headrace.serve.storage.writers import Writers
from headrace.text.tokenizer import Tokenizer

TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}]
CALL = '<tool_call>{"name": "f", "arguments": {"x": "a long argument"}}</tool_call>'


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=240) as openai_client:
        yield openai_client


def replayed(live: Live, response_id: str, query: str = "") -> str:
    reply = HTTP.get(f"{live.url}/v1/responses/{response_id}?stream=true{query}")
    assert reply.status_code == 200, reply.text
    return reply.text


def id_of(stream: str) -> str:
    result: str = json.loads(stream.split("data: ", 1)[1].split("\n")[0])["response"]["id"]
    return result


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("a plain answer", {}),
        ("with its numbers", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        ("a text, and then " + CALL + CALL, {"tools": TOOLS}),
        ("", {}),
    ],
)
def test_a_stored_response_is_replayed_byte_for_byte(live: Live, say: Any, text: str, more: dict[str, Any]) -> None:
    say(text)
    stream = live.post("/v1/responses", {"input": "hi", "stream": True, "max_output_tokens": 400} | more).text
    assert stream.count("\n\n") > 6
    assert replayed(live, id_of(stream)) == stream
    cut = live.post("/v1/responses", {"input": "hi", "stream": True, "max_output_tokens": 3} | more).text
    assert "response.incomplete" in cut or text == ""
    assert replayed(live, id_of(cut)) == cut


def test_a_replay_begins_behind_the_event_that_the_client_has(live: Live, client: openai.OpenAI) -> None:
    stream = live.post("/v1/responses", {"input": "hi", "stream": True, "max_output_tokens": 20}).text
    events = stream.split("\n\n")
    for after in (0, 3, len(events) - 3, 10**6):
        assert replayed(live, id_of(stream), f"&starting_after={after}") == "\n\n".join(events[after + 1 :])
    output = list(client.responses.retrieve(id_of(stream), stream=True, starting_after=5))
    assert output[0].sequence_number == 6
    assert output[-1].type in ("response.completed", "response.incomplete")
    for query in ("stream=yes", "stream=true&starting_after=-1", "stream=true&starting_after=x"):
        assert HTTP.get(f"{live.url}/v1/responses/{id_of(stream)}?{query}").status_code == 400


def test_a_response_in_the_background_is_streamed_while_it_runs(live: Live, client: openai.OpenAI) -> None:
    inputs: dict[str, Any] = {"model": "fake", "input": "hi", "max_output_tokens": 60, "background": True}
    inputs["extra_body"] = {"ignore_eos": True, "seed": 4}
    events = list(client.responses.create(**inputs, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == client.responses.retrieve(events[-1].response.id).output_text
    result = client.responses.create(**inputs)
    assert result.status == "in_progress"
    again = list(client.responses.retrieve(result.id, stream=True))
    assert "".join(event.delta for event in again if event.type == "response.output_text.delta") == text
    # A reader that leaves ends nothing.
    with client.responses.create(**inputs, stream=True) as stream:
        response_id = next(iter(stream)).response.id  # type: ignore[union-attr]
    live.wait(lambda: client.responses.retrieve(response_id).status == "incomplete")
    long = inputs | {"max_output_tokens": 2000}
    stream = client.responses.create(**long, stream=True)
    client.responses.cancel(next(iter(stream)).response.id)  # type: ignore[union-attr]
    assert list(stream)[-1].type == "response.incomplete"


def test_control_a_response_stored_without_cuts_is_replayed_in_one_piece(live: Live) -> None:
    stream = live.post("/v1/responses", {"input": "hi", "stream": True, "max_output_tokens": 20}).text
    store = live.app.state.lifespan.storage.responses.store
    entry = StoredResponses(store).entry(id_of(stream))
    assert len(entry.cuts) > 1
    replay = Replay(entry.response, [])
    events: list[Event] = [*replay.opening(), *replay.advance()]
    [delta] = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert delta == entry.response.output[0].part.text


def entry_of(live: Live, num_rows: int, text: str) -> StoredResponse:
    """A stored response whose two items of text have so many log-probabilities."""
    top = (TopLogprob(token="\t", logprob=-0.5, bytes=(9,)),)
    rows = [ChatTokenLogprob(token=f"{n}\t\n", logprob=-n / 8, bytes=(9,), top_logprobs=top) for n in range(num_rows)]
    output = [
        OutputItem(
            id=f"msg_{n}", type="message", status="completed", role="assistant",
            content=[OutputText(type="output_text", text=text, annotations=[], logprobs=rows)],
        )
        for n in range(2)
    ]  # fmt: skip
    call = OutputItem(id="fc_1", type="function_call", status="completed", name="f", arguments='{"a":"\t"}')
    reply = live.post("/v1/responses", {"input": "hi", "max_output_tokens": 1, "store": False}).content
    response = msgspec.json.decode(reply, type=ResponseObject)
    response.output = [output[0], call, output[1]]
    return StoredResponse(response=response, input=[{"id": "a", "type": "message", "content": "\t"}], history=[])


@pytest.mark.parametrize("num_rows", [0, 1, 256, 1000])
def test_R_03_log_probabilities_are_passed_over_and_read_in_slices(
    live: Live, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entry_of(live, num_rows, "a\tb\n")
    store = Store("resp_", None, max_items=9, max_bytes=2**30)
    body, plain = written_entry(entry), msgspec.json.encode(entry)
    assert json.loads(body) == json.loads(plain)
    sizes: list[int] = []
    decode = msgspec.json.decode

    def noted(data: Any, **more: Any) -> Any:
        sizes.append(memoryview(data).nbytes)
        return decode(data, **more)

    monkeypatch.setattr(msgspec.json, "decode", noted)
    longest = []
    # The control: a body of an earlier version, without tabs, is read in one call, and gives the same.
    for number, text in enumerate((body, plain)):
        sizes.clear()
        response_id = f"resp_{number:032x}"
        store.put(response_id, {}, text)
        stored = StoredResponses(store)
        assert b"".join(stored.parts(response_id)) == msgspec.json.encode(entry.response)
        assert msgspec.json.encode(stored.entry(response_id)) == plain
        items = stored.items(response_id)
        assert [past_item(item)["id"] for item in items.response.output] == ["msg_0", "fc_1", "msg_1"]
        assert past_item(items.response.output[0])["content"] == [{"type": "output_text", "text": "a\tb\n"}]
        longest.append(max(sizes))
    assert longest[0] < 2**16
    assert num_rows < 1000 or longest[1] > 2 * longest[0]


def test_a_stored_response_whose_pieces_are_damaged_is_not_found(live: Live) -> None:
    store = Store("resp_", None, max_items=9, max_bytes=2**30)
    response_id = f"resp_{0:032x}"
    store.put(response_id, {}, written_entry(entry_of(live, 2, "a")).replace(b"\t", b"", 1))
    with pytest.raises(NotFoundError):
        StoredResponses(store).entry(response_id)
    # The control: an item's own text is read as it is.
    item = entry_of(live, 2, "a").response.output[0]
    assert StoredText(b"".join(written(item))).short().count(b"\t") == 2


def test_stored_items_are_taken_by_their_ids(live: Live, client: openai.OpenAI, say: Any) -> None:
    say(CALL)
    inputs: dict[str, Any] = {"model": "fake", "max_output_tokens": 400}
    question = {"role": "user", "content": "What is f of it?"}
    first = client.responses.create(input=[question], tools=TOOLS, **inputs)  # type: ignore[list-item]
    call = first.output[0]
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    data = client.responses.input_items.list(first.id).data[0]
    by_id = [{"type": "item_reference", "id": data.id}, {"id": call.id}, result]
    whole = [question, call.to_dict(), result]
    counts = [
        live.post("/v1/responses/input_tokens", {"input": items}).json()["input_tokens"] for items in (by_id, whole)
    ]
    assert counts[0] == counts[1] > len("What is f of it?")
    second = client.responses.create(input=by_id, **inputs)  # type: ignore[arg-type]
    assert second.usage is not None
    assert second.usage.input_tokens == counts[0]
    # The stored input has the items, not their references.
    items = client.responses.input_items.list(second.id).data
    assert [item.type for item in items] == ["function_call_output", "function_call", "message"]
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="item of a stored response"):
        client.responses.create(input=by_id, **inputs)  # type: ignore[arg-type]


def test_input_tokens_are_those_of_the_response(live: Live, client: openai.OpenAI) -> None:
    inputs: dict[str, Any] = {"model": "fake", "input": "How many?", "instructions": "Count."}
    counted = client.responses.input_tokens.count(**inputs)
    result = client.responses.create(**inputs, max_output_tokens=3)
    assert result.usage is not None
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", result.usage.input_tokens)
    more = client.responses.input_tokens.count(model="fake", input="And?", previous_response_id=result.id)
    assert more.input_tokens > counted.input_tokens
    # An answer of no tokens has a prompt too; one of fewer is refused.
    sizes = {num: live.post("/v1/responses/input_tokens", inputs | {"max_output_tokens": num}) for num in (0, -1)}
    assert {num: reply.status_code for num, reply in sizes.items()} == {0: 200, -1: 400}
    reply = live.post("/v1/responses/input_tokens", {"input": [{"type": "item_reference"}]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input[0].id")


def test_a_conversation_with_calls_of_hosted_tools_goes_on(live: Live) -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    shell = {"type": "local_shell_call_output", "id": "sh_1", "output": "a.txt"}
    question, more = {"role": "user", "content": "Who?"}, {"role": "user", "content": "When?"}
    mixed = [question, search, {"role": "assistant", "content": "Ada."}, search, shell, more]
    plain = [item for item in mixed if "role" in item]
    settings = {"max_output_tokens": 3, "seed": 1}
    first = live.post("/v1/responses", {"input": mixed, **settings}).json()
    again = live.post("/v1/responses", {"input": plain, **settings}).json()
    assert first["output"][0]["content"] == again["output"][0]["content"]
    assert first["usage"]["input_tokens"] == again["usage"]["input_tokens"]
    (warning,) = first["warnings"]
    assert warning.startswith("input: 3 items of tools")
    assert warning.endswith("web_search_call, local_shell_call_output")
    assert "warnings" not in again
    counted = live.post("/v1/responses/input_tokens", {"input": mixed}).json()
    assert (counted["input_tokens"], counted["warnings"]) == (again["usage"]["input_tokens"], [warning])
    # The stored response has all items, and a response that goes on from it leaves them out again.
    assert len(HTTP.get(f"{live.url}/v1/responses/{first['id']}/input_items").json()["data"]) == len(mixed)
    later = live.post("/v1/responses", {"input": "So?", "previous_response_id": first["id"], **settings}).json()
    assert later["warnings"] == [warning]
    created = live.post("/v1/conversations", {"items": mixed}).json()
    within = live.post("/v1/responses", {"input": "So?", "conversation": created["id"], **settings}).json()
    assert within["warnings"] == [warning]


def test_a_conversation_grows_with_its_responses(client: openai.OpenAI) -> None:
    result = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "My name is Ann."}], metadata={"topic": "names"}
    )
    assert (result.object, result.metadata) == ("conversation", {"topic": "names"})
    one = client.responses.create(model="fake", input="Hello", conversation=result.id, max_output_tokens=4)
    assert one.conversation is not None
    assert one.conversation.id == result.id
    two = client.responses.create(model="fake", input="Again", conversation={"id": result.id}, max_output_tokens=4)
    items = list(client.conversations.items.list(result.id, order="asc"))
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]
    assert len({item.id for item in items}) == 5
    # The same as a chat with all of it.
    turns = ["My name is Ann.", "Hello", one.output_text, "Again"]
    roles: list[Any] = ["user", "user", "assistant", "user"]
    whole: Any = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
    seed = two.model_extra["seed"] if two.model_extra else None
    alone = client.responses.create(model="fake", input=whole, max_output_tokens=4, extra_body={"seed": seed})
    assert (alone.output_text, alone.usage.input_tokens) == (two.output_text, two.usage.input_tokens)  # type: ignore[union-attr]


def test_conversations_are_changed_and_deleted(live: Live, client: openai.OpenAI) -> None:
    warnings = ["topic: unknown, and ignored"]
    assert live.post("/v1/conversations", {"topic": "x"}).json()["warnings"] == warnings
    result = client.conversations.create()
    added = client.conversations.items.create(
        result.id, items=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    first, second = added.data
    assert client.conversations.items.retrieve(first.id, conversation_id=result.id).id == first.id  # type: ignore[arg-type, union-attr]
    assert client.conversations.items.delete(first.id, conversation_id=result.id).id == result.id  # type: ignore[arg-type]
    assert [item.id for item in client.conversations.items.list(result.id)] == [second.id]
    assert client.conversations.update(result.id, metadata={"a": "b"}).metadata == {"a": "b"}
    assert client.conversations.retrieve(result.id).metadata == {"a": "b"}
    assert client.conversations.delete(result.id).deleted
    for call in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            call(result.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="fake", input="x", conversation=result.id)


def test_items_that_were_kept_as_one_list_are_read_and_kept_as_lines() -> None:
    store = Store("conv_", None, max_items=2, max_bytes=10_000)
    conversations = Conversations(store, Writers())
    result = store.new_id()
    for body, ids in ((b'[{"id":"a"}, {"id":"b"}]', ["a", "b"]), (b"[]", []), (b"", []), (b'{"id":"c"}\n', ["c"])):
        store.put(result, {}, body)
        assert [json.loads(bytes(item))["id"] for item in conversations._items(result)] == ids
        asyncio.run(conversations.append(result, [{"id": "d"}]))
        lines = store.body(result).decode().splitlines()
        assert [json.loads(line)["id"] for line in lines] == [*ids, "d"]
        store.delete(result)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0].type"),
        ("", {"items": ["a"] * 21}, "items"),
        ("", {"items": [3]}, "items[0]"),
        ("", {"metadata": {"k" * 65: "v"}}, "metadata"),
        ("/{}", {"items": []}, "items"),
        ("/{}/items", {"items": []}, "items"),
        ("/{}/items", {}, "items"),
    ],
)
def test_refusals_of_conversations_name_the_field(live: Live, path: str, body: dict[str, Any], param: str) -> None:
    result = live.post("/v1/conversations", {}).json()["id"]
    reply = live.post("/v1/conversations" + path.format(result), body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_S_25_a_conversation_is_its_holders_and_outlives_the_server(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = ServerConfig(
        log_stats_interval=0, storage_dir=str(tmp_path / "kept"), api_key_file=rig.write_keys(tmp_path),
        max_storage_bytes=20_000,
    )  # fmt: skip
    alice, bob = rig.bearer(rig.ALICE), rig.bearer(rig.BOB)
    with Live(inproc(), tokenizer, config) as live:
        result = live.post("/v1/conversations", {"items": ["hi"]}, headers=alice).json()["id"]
        url = f"{live.url}/v1/conversations/{result}"
        for method, path in (("GET", ""), ("GET", "/items"), ("DELETE", ""), ("POST", "/items")):
            body = {"items": ["x"]} if method == "POST" else None
            assert HTTP.request(method, url + path, json=body, headers=bob).status_code == 404
        reply = live.post("/v1/responses", {"input": "x", "conversation": result}, headers=bob)
        assert reply.status_code == 404
        # A share of the storage holds so much, and no more; nothing gives way.
        statuses = {live.post(f"/v1/conversations/{result}/items", {"items": ["x" * 900]}, headers=alice).status_code
                    for _ in range(8)}  # fmt: skip
        assert statuses == {200, 413}
        items = HTTP.get(url + "/items?limit=100", headers=alice).json()["data"]
    with Live(inproc(), tokenizer, config) as live:
        url = f"{live.url}/v1/conversations/{result}"
        assert HTTP.get(url + "/items?limit=100", headers=alice).json()["data"] == items
