"""llama-server's own fields of OpenAI's routes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.server import Live, inproc

from headrace.protocol.config import ServerConfig
from headrace.protocol.constraints import StructuredOutputs
from headrace.serve.apis.openai.completions import answer_form
from headrace.serve.call.schema import ChatCompletionRequest, CompletionRequest, parse
from headrace.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Hello"}]


def chat(live: Live, **more: Any) -> Any:
    return live.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 6, "seed": 1} | more)


def chunks(reply: Any) -> list[dict[str, Any]]:
    lines = [line[6:] for line in reply.text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("with_usage", [False, True])
def test_timings_per_token_come_with_every_chunk_but_the_first(live: Live, with_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    first, *others = chunks(chat(live, stream=True, timings_per_token=True, **options))
    assert "timings" not in first
    numbers = [chunk["timings"]["predicted_n"] for chunk in others]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 6
    plain = chunks(chat(live, stream=True, **options))
    assert [("timings" in chunk) for chunk in plain] == [False] * (len(plain) - 1) + [True]


def test_a_prompts_progress_has_its_timings(live: Live) -> None:
    output = chunks(chat(live, stream=True, timings_per_token=True, return_progress=True))
    first, *_, done = [chunk for chunk in output if "prompt_progress" in chunk]
    assert first["prompt_progress"]["processed"] == first["prompt_progress"]["cache"]
    assert (first["timings"]["prompt_n"], first["timings"]["prompt_ms"]) == (0, 0.0)
    progress, timings = done["prompt_progress"], done["timings"]
    assert progress["processed"] == progress["total"]
    assert timings["prompt_n"] + timings["cache_n"] == progress["total"]
    assert timings["predicted_n"] == 0
    output = chunks(chat(live, stream=True, return_progress=True))
    assert not any("timings" in chunk for chunk in output if "prompt_progress" in chunk)


def test_verbose_shows_the_prompt(live: Live) -> None:
    assert chat(live, verbose=True).json()["__verbose"]["prompt"] == "[user]Hello[a]"
    assert "__verbose" not in chat(live, verbose=False).json()
    *others, last = chunks(chat(live, stream=True, verbose=True))
    assert last["__verbose"]["prompt"] == "[user]Hello[a]"
    assert not any("__verbose" in chunk for chunk in others)


def test_a_server_that_logs_all_shows_prompts_unasked(tokenizer: Tokenizer) -> None:
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0, uvicorn_log_level="debug")) as talkative:
        assert chat(talkative).json()["__verbose"]["prompt"] == "[user]Hello[a]"


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"stop": "o"}])
def test_a_stream_begins_with_the_role_alone_and_ends_without_text(live: Live, more: dict[str, Any]) -> None:
    choices = [chunk["choices"][0] for chunk in chunks(chat(live, stream=True, **more))]
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    assert choices[-1]["delta"] == {}
    assert choices[-1]["finish_reason"] is not None
    assert not any(choice["finish_reason"] or "role" in choice["delta"] for choice in choices[1:-1])
    assert not any(choice["delta"].get("content") == "" for choice in choices)
    whole = chat(live, **more).json()["choices"][0]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == whole["message"]["content"]
    if "logprobs" in more:
        entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
        assert entries == whole["logprobs"]["content"]


def test_a_grammar_and_a_schema_have_names_of_their_own(live: Live) -> None:
    grammar = 'root ::= "a"{3}'
    for kind, body in ((CompletionRequest, {"prompt": "x"}), (ChatCompletionRequest, {"messages": MESSAGES})):
        assert answer_form(parse(kind, body | {"grammar": grammar}))[0] == StructuredOutputs(grammar=grammar)
        schema, spelling = answer_form(parse(kind, body | {"json_schema": {"const": 42}}))
        assert schema == StructuredOutputs(json={"const": 42})
        assert spelling["structured_outputs"] == "json_schema"
    for more, field in (
        ({"grammar": "root ::= this is (not a grammar"}, "grammar"),
        ({"json_schema": {"type": "hiccup"}}, "json_schema"),
        ({"json_schema": 5}, "json_schema"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar"),
    ):
        reply = chat(live, **more)
        assert (reply.status_code, reply.json()["error"]["param"].partition(".")[0]) == (400, field), reply.text


def test_the_tokens_of_a_chat_are_counted(live: Live) -> None:
    num = chat(live).json()["usage"]["prompt_tokens"]
    for path in ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"):
        assert live.post(path, {"messages": MESSAGES}).json() == {"input_tokens": num}
    assert live.post("/chat/completions/input_tokens", {"messages": []}).status_code == 400
    assert live.post("/chat/completions/input_tokens", {"messages": MESSAGES, "model": "gpt"}).status_code == 404
