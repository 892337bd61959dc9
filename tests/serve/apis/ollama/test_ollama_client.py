"""Ollama's own Python client against a live server, over the fake engine; what it sends that must be refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import ollama
import pytest
from tests.support.server import HTTP, Live, brittle, inproc

from headrace.protocol.config import ServerConfig
from headrace.protocol.step import Finish
from headrace.serve.apis.ollama.library import OLLAMA_VERSION
from headrace.serve.apis.ollama.reply import OllamaAnswer
from headrace.serve.apis.ollama.request import ChatRequest
from headrace.text.outputs import CallPart, MessageBuilder
from headrace.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Wer reitet?"}]


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[ollama.Client]:
    result = ollama.Client(host=live.url, timeout=240)
    yield result
    result.close()


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.strip().split("\n")]


def test_ollama_generate(client: ollama.Client, say: Callable[[str], None]) -> None:
    say("Der Väter.")
    reply = client.generate("fake", "Wer?", system="Kurz.")
    assert (reply.response, reply.done, reply.done_reason, reply.model) == ("Der Väter.", True, "stop", "fake")
    assert (reply.prompt_eval_count, reply.eval_count) == (len("[system]Kurz.[user]Wer?[a]"), 12)
    durations = (reply.total_duration, reply.prompt_eval_duration, reply.eval_duration)
    assert all(isinstance(each, int) and 0 < each < 60e9 for each in durations)
    assert reply.total_duration >= reply.prompt_eval_duration + reply.eval_duration  # type: ignore[operator]
    pieces = list(client.generate("fake", "Wer?", system="Kurz.", stream=True))
    assert "".join(piece.response or "" for piece in pieces) == "Der Väter."
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert (pieces[-1].eval_count, pieces[-1].done_reason) == (12, "stop")


def test_ollama_streams_without_being_asked(live: Live) -> None:
    reply = live.post("/api/generate", {"model": "fake", "prompt": "x", "options": {"num_predict": 3}})
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    assert lines(reply.text)[-1]["done_reason"] == "length"
    whole = live.post("/api/generate", {"model": "fake", "prompt": "x", "stream": False, "options": {"num_predict": 3}})
    assert whole.headers["content-type"].startswith("application/json")


def test_ollama_raw_and_context(client: ollama.Client) -> None:
    raw = client.generate("fake", "Hi", raw=True, options={"num_predict": 2, "seed": 3})
    assert raw.prompt_eval_count == 2
    assert raw.context is None
    first = client.generate("fake", "Hi", options={"num_predict": 4, "seed": 3})
    assert first.context is not None
    assert len(first.context) == len("[user]Hi[a]") + 4
    second = client.generate("fake", "Go on", context=first.context, options={"num_predict": 4})
    assert second.prompt_eval_count == len(first.context) + len("[user]Go on[a]")
    assert second.context is not None
    assert second.context[: len(first.context)] == first.context
    # Without a length the answer may fill the context.
    long = client.generate("fake", "Hi", raw=True, options={"seed": 3})
    assert (long.done_reason, long.eval_count) == ("length", 2046)


def test_ollama_chat(client: ollama.Client, say: Callable[[str], None]) -> None:
    say("Es ist der Vater.")
    reply = client.chat("fake", MESSAGES)
    assert (reply.message.role, reply.message.content, reply.done_reason) == ("assistant", "Es ist der Vater.", "stop")
    assert reply.prompt_eval_count == len("[user]Wer reitet?[a]")
    pieces = list(client.chat("fake", MESSAGES, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == "Es ist der Vater."
    assert pieces[-1].done
    # History with calls of tools is the prompt that the template makes of it.
    history: Any = [
        *MESSAGES,
        {"role": "assistant", "content": "c", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "r", "tool_name": "f"},
    ]
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    prompt = f"[user]Wer reitet?[assistant]c\n{call}[user]<tool_response>\nr\n</tool_response>[a]"
    assert client.chat("fake", history).prompt_eval_count == len(prompt)


def test_ollama_options(client: ollama.Client, live: Live, say: Callable[[str], None]) -> None:
    options = {"seed": 5, "temperature": 0.5, "top_k": 10, "top_p": 0.9, "num_predict": 20, "min_p": 0.1}
    first, second = (client.generate("fake", "x", options=options).response for _ in range(2))
    assert first == second
    assert client.generate("fake", "x", options=options | {"seed": 6}).response != first
    # Each of them is handed on: a value that no engine can honour is refused under Ollama's name.
    hostile = {"temperature": -1, "top_k": -2, "top_p": 2, "min_p": 2, "typical_p": 2, "repeat_penalty": 0}
    hostile |= {"presence_penalty": 3, "frequency_penalty": 3, "mirostat": 3, "mirostat_tau": -1, "mirostat_eta": -1}
    hostile |= {"repeat_last_n": -2, "num_predict": 2**40, "seed": 2**70}
    for name, value in hostile.items():
        reply = live.post("/api/generate", {"model": "fake", "prompt": "x", "options": {name: value}})
        assert reply.status_code == 400, (name, reply.text)
        assert reply.json()["error"].startswith(f"options.{name}: "), reply.text
    say("one two three")
    stopped = client.generate("fake", "x", options={"stop": ["wo"]})
    assert (stopped.response, stopped.done_reason) == ("one t", "stop")


def test_ollama_logprobs(client: ollama.Client) -> None:
    options = {"num_predict": 4}
    reply = client.generate("fake", "x", logprobs=True, top_logprobs=2, options=options)
    assert reply.logprobs is not None
    assert [len(entry.top_logprobs or ()) for entry in reply.logprobs] == [2] * 4
    pieces = list(client.chat("fake", MESSAGES, logprobs=True, options=options, stream=True))
    assert sum(len(piece.logprobs or ()) for piece in pieces) == 4


def test_ollama_warnings(live: Live) -> None:
    options = {"num_ctx": 4096, "num_thread": 8, "wings": 2, "num_predict": 2}
    body = {"model": "fake", "prompt": "x", "options": options, "keep_alive": "5m", "template": "{{ .Prompt }}", "x": 1}
    output = [
        "keep_alive: ignored: the model is loaded as long as the server runs",
        "options.num_ctx: ignored: the context has 2048 tokens, as the server was started",
        "options.num_thread: ignored: set when the server starts",
        "options.wings: unknown, and ignored",
        "template: ignored: prompts are put into the model's own chat template; raw takes them as they are",
        "x: unknown, and ignored",
    ]
    first, *others = lines(live.post("/api/generate", body).text)
    assert sorted(first["warnings"]) == output
    assert not any("warnings" in other for other in others)
    assert sorted(live.post("/api/generate", body | {"stream": False}).json()["warnings"]) == output
    assert "warnings" not in live.post("/api/generate", {"model": "fake", "prompt": "x", "stream": False}).json()


def test_ollama_tags_show_ps_version(client: ollama.Client, live: Live) -> None:
    assert [model.model for model in client.list().models] == ["fake"]
    running = client.ps().models
    assert [(model.model, model.context_length) for model in running] == [("fake", 2048)]
    facts = client.show("fake")
    assert facts.capabilities is not None
    assert "completion" in facts.capabilities
    assert facts.modelinfo is not None
    assert facts.modelinfo[facts.modelinfo["general.architecture"] + ".context_length"] == 2048
    assert HTTP.get(live.url + "/api/version").json() == {"version": OLLAMA_VERSION}
    assert HTTP.head(live.url + "/").status_code == 200


def test_ollama_loading_and_pulling_what_is_there(client: ollama.Client) -> None:
    assert client.generate("fake", "").done_reason == "load"
    assert client.chat("fake", []).done_reason == "load"
    assert client.pull("fake").status == "success"
    assert [step.status for step in client.pull("fake:latest", stream=True)] == ["success"]
    assert client.generate("fake:latest", "x", options={"num_predict": 1}).model == "fake:latest"


def test_ollama_what_is_not_done_is_told(client: ollama.Client, live: Live) -> None:
    for call in (
        lambda: client.create("other", from_="fake"),
        lambda: client.copy("fake", "other"),
        lambda: client.delete("fake"),
    ):
        with pytest.raises(ollama.ResponseError, match="not supported here; the model is named") as caught:
            call()
        assert caught.value.status_code == 501
    with pytest.raises(ollama.ResponseError, match="pulled from the hub, not pushed"):
        client.push("fake")
    for call in (lambda: client.pull("llama3"), lambda: client.generate("llama3", "x"), lambda: client.show("llama3")):
        with pytest.raises(ollama.ResponseError, match="not served here") as caught:
            call()
        assert caught.value.status_code == 404


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        ("generate", {"model": None}, "model"),
        ("generate", {"prompt": 1}, "prompt"),
        ("generate", {"images": ["AA=="]}, "images"),
        ("generate", {"suffix": "x"}, "suffix"),
        ("generate", {"format": "yaml"}, "format"),
        ("generate", {"options": {"temperature": "hot"}}, "options.temperature"),
        ("generate", {"options": []}, "options"),
        ("generate", {"options": {"num_predict": -3}}, "options.num_predict"),
        ("generate", {"options": {"seed": -2}}, "options.seed"),
        ("generate", {"context": [256]}, "prompt"),
        ("generate", {"prompt": "x" * 2049, "raw": True}, "prompt"),
        ("generate", {"think": "a lot"}, "think"),
        ("chat", {"messages": "x"}, "messages"),
        ("chat", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["AA=="]}]}, "messages[0].images"),
        ("chat", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ("generate", {"prompt": None, "top_logprobs": -2}, "top_logprobs"),
        ("generate", {"prompt": None, "options": {"mirostat_eta": 11}}, "options.mirostat_eta"),
        ("show", {}, "model"),
    ],
)
def test_ollama_refusals_name_the_field(live: Live, path: str, more: dict[str, Any], field: str) -> None:
    inputs = {"model": "fake", "prompt": "x"} if path == "generate" else {"model": "fake"} if path == "chat" else {}
    reply = live.post(f"/api/{path}", {name: value for name, value in (inputs | more).items() if value is not None})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error.startswith((f"{field}: ", "the input length exceeds the context length.")), error
    assert f"{field}: " in error


def test_ollama_embed(client: ollama.Client) -> None:
    result = client.embed("fake", ["one", "two"])
    assert len(result.embeddings) == 2
    assert result.prompt_eval_count == 6
    assert sum(x * x for x in result.embeddings[0]) == pytest.approx(1)
    assert list(client.embed("fake", "one").embeddings[0]) == list(result.embeddings[0])
    # The older route gives vectors as they are; they point the same way.
    older = client.embeddings("fake", "one").embedding
    length = sum(x * x for x in older) ** 0.5
    assert [x / length for x in older] == pytest.approx(list(result.embeddings[0]))
    with pytest.raises(ollama.ResponseError, match="input: "):
        client.embed("fake", "x" * 3000, truncate=False)
    assert client.embed("fake", "x" * 3000).prompt_eval_count == 2047


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Aix"}}\n</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def test_ollama_tools_and_thinking(tokenizer: Tokenizer, say: Callable[[str], None]) -> None:
    say("<think>Hm, so.</think>I look." + CALL)
    with Live(inproc(), tokenizer, ServerConfig(reasoning_parser="deepseek_r1", log_stats_interval=0)) as live:
        client = ollama.Client(host=live.url, timeout=240)
        whole = client.chat("fake", MESSAGES, tools=[TOOL], think=True).message
        pieces = [piece.message for piece in client.chat("fake", MESSAGES, tools=[TOOL], think=True, stream=True)]
        client.close()
    assert (whole.thinking or "").strip() == "Hm, so."
    assert (whole.content or "").strip() == "I look."
    assert whole.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in whole.tool_calls] == [
        ("weather", {"city": "Aix"})
    ]
    assert "".join(piece.thinking or "" for piece in pieces) == whole.thinking
    assert "".join(piece.content or "" for piece in pieces) == whole.content
    assert [call for piece in pieces for call in piece.tool_calls or ()] == list(whole.tool_calls)


def test_ollama_calls_are_told_whole() -> None:
    message = MessageBuilder()
    state = SimpleNamespace(finish=None)
    events: list[list[dict[str, Any]]] = []

    async def parts() -> AsyncIterator[tuple[int, Any, list[Any]]]:
        for added in (
            [CallPart(0, "a", "f", '{"x"')],
            [CallPart(0, "a", None, ": 1}"), CallPart(1, "b", "g", "")],
            [CallPart(1, "b", None, '{"cut')],
        ):
            for part in added:
                message.add(part)
            events.append([])
            yield 0, SimpleNamespace(logprobs=[]), []
        state.finish = Finish("length")
        for _ in range(2):
            events.append([])
            yield 0, SimpleNamespace(logprobs=[]), []
        raise EOFError

    chat: Any = SimpleNamespace(
        id="a", generation=SimpleNamespace(states=[state]), message=lambda place: message, parts=parts,
        call=SimpleNamespace(warnings=SimpleNamespace(reply=lambda: msgspec.UNSET)),
    )  # fmt: skip

    async def read() -> None:
        async for event in OllamaAnswer(chat, ChatRequest(model="fake"), chat=True, ids=False).events():
            events[-1] += json.loads(event)["message"]["tool_calls"]

    with pytest.raises(EOFError):
        asyncio.run(read())
    whole = {"id": "a", "function": {"name": "f", "arguments": {"x": 1}, "index": 0}}
    cut = {"id": "b", "function": {"name": "g", "arguments": {"_incomplete": '{"cut'}, "index": 1}}
    assert events == [[], [whole], [], [cut], []]


def test_ollama_a_broken_stream_ends_with_an_error(tokenizer: Tokenizer) -> None:
    with Live(brittle(8), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        output = lines(live.post("/api/chat", {"model": "fake", "messages": MESSAGES}).text)
        assert set(output[-1]) == {"error"}
        assert not any(each.get("done") for each in output)
        with pytest.raises(ollama.ResponseError):
            list(ollama.Client(host=live.url).chat("fake", MESSAGES, stream=True))


def test_ollama_hang_up_ends_the_request(live: Live) -> None:
    with HTTP.stream(
        "POST", live.url + "/api/chat", json={"model": "fake", "messages": MESSAGES}, timeout=240
    ) as reply:
        next(reply.iter_lines())
    live.wait(lambda: live.client.num_unfinished == 0)
