"""A tokenizer's own `response_template` through a server: answers with special tokens, whole and streamed."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.support import fake
from tests.support.server import Live, write_tokenizer

from headrace.engine.client import InprocClient
from headrace.insight.simulated import Oracle
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.params import SamplingParams
from headrace.text.tokenizer import Tokenizer

MARKS = ("[CALL]", "[/CALL]", "<think>", "</think>", "<|user|>")
"""Special tokens, whose ids follow the bytes."""
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
RESPONSE: dict[str, Any] = {
    "start_anchor": "[a]",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*\[CALL\](?P<name>\w+)\s+",
            "close": "[/CALL]",
            "repeats": True,
            "content": "kv-lines",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"optional": False},
    },
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CALL = "[CALL]weather\ncity: Bern\ndays: 3[/CALL]"
ANSWERS = {
    "both": f"<think>I look.</think>One<|user|> moment.\n{CALL}\n{CALL}",
    "calls": CALL,
    "text": "Hello<|user|>.",
    "open": "<think>I muse.",
    "ill": "[CALL]: Bern[/CALL]",
}


class Said(Oracle):
    """Says the answer that the prompt names last."""

    def __init__(self, answers: dict[bytes, list[int]]) -> None:
        super().__init__(fake.VOCAB_SIZE + len(MARKS), [fake.EOS])
        self._answers = answers

    def next_token(self, context: array[int], params: SamplingParams, num_generated: int) -> int:
        tokens = list(context[1 : len(context) - 3 * num_generated : 3])
        name = bytes(token for token in tokens if token < fake.EOS).rpartition(b"say:")[2].partition(b"[a]")[0]
        answer = self._answers.get(name, [])
        return answer[num_generated] if num_generated < len(answer) else fake.EOS


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_tokenizer(tmp_path_factory.mktemp("response"))
    data = json.loads((folder / "tokenizer.json").read_text())
    for number, mark in enumerate(MARKS, fake.VOCAB_SIZE):
        data["added_tokens"].append(data["added_tokens"][0] | {"id": number, "content": mark})
    (folder / "tokenizer.json").write_text(json.dumps(data))
    config = {"eos_token": "<eos>", "chat_template": TEMPLATE, "response_template": RESPONSE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(folder)
    answers = {name.encode(): tokenizer.encode(text, add_special_tokens=False) for name, text in ANSWERS.items()}
    assert len(answers[b"calls"]) == len(CALL) - len("[CALL][/CALL]") + 2
    size = fake.VOCAB_SIZE + len(MARKS)
    build = lambda: fake.build(EngineConfig(model="fake"), oracle=Said(answers), vocab_size=size)  # noqa: E731
    with Live(InprocClient(build), tokenizer, ServerConfig(log_stats_interval=0)) as server:
        yield server


def asked(name: str, **more: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": f"say:{name}"}], "tools": TOOLS, **more}


def read(live: Live, name: str, **more: Any) -> tuple[str, str, list[dict[str, Any]], str]:
    """Content, reasoning, calls and the reason of the end: the same whole and streamed."""
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=240) as client:
        [choice] = client.chat.completions.create(**asked(name, **more)).choices
        message = choice.message
        thought = (message.model_extra or {}).get("reasoning_content") or ""
        calls = [call.function for call in message.tool_calls or [] if call.type == "function"]
        whole = (message.content or "", thought, [call.arguments for call in calls], choice.finish_reason)
        content = reasoning = finish = ""
        arguments: list[str] = []
        for chunk in client.chat.completions.create(**asked(name, **more), stream=True):
            [part] = chunk.choices
            content += part.delta.content or ""
            reasoning += (part.delta.model_extra or {}).get("reasoning_content") or ""
            for call in part.delta.tool_calls or []:
                assert call.function is not None
                arguments += [""] * (call.index + 1 - len(arguments))
                arguments[call.index] += call.function.arguments or ""
            finish = part.finish_reason or finish
        assert (content, reasoning, arguments, finish) == whole
    return content, reasoning, [json.loads(text) for text in arguments], finish


WEATHER = {"city": "Bern", "days": 3}


def test_an_answer_is_read_as_the_tokenizer_says(live: Live) -> None:
    assert read(live, "both") == ("One moment.", "I look.", [WEATHER, WEATHER], "tool_calls")
    assert read(live, "text") == ("Hello.", "", [], "stop")
    assert read(live, "both", parallel_tool_calls=False)[2] == [WEATHER]


def test_a_required_field_may_be_missing(live: Live) -> None:
    """transformers raises an error for a message without it."""
    assert read(live, "calls") == ("", "", [WEATHER], "tool_calls")


def test_what_is_cut_or_not_well_formed(live: Live) -> None:
    size = len(ANSWERS["calls"]) - len("[CALL]") - 10
    assert read(live, "calls", max_tokens=size) == ("", "", [], "length")
    content, _, calls, finish = read(live, "both", max_tokens=40)
    assert ("One moment.".startswith(content), calls, finish) == (True, [], "length")
    # A call that the model ends itself is content, but for its marks.
    assert read(live, "ill") == (": Bern", "", [], "stop")
    # Reasoning without an end is the answer, unless a limit has ended it.
    assert read(live, "open") == ("I muse.", "I muse.", [], "stop")
    assert read(live, "open", max_tokens=5) == ("", "I mu", [], "length")


def test_special_tokens_are_never_content(live: Live) -> None:
    for more in ({}, {"extra_body": {"skip_special_tokens": False}}):
        for name in ANSWERS:
            content, reasoning, *_ = read(live, name, **more)
            assert not any(mark in content + reasoning for mark in MARKS), name
    # Control: without tools and without the reading, they are what the client asks for.
    body = {"model": "fake", "prompt": "say:text[a]", "max_tokens": 9, "skip_special_tokens": False}
    assert "<|user|>" in live.post("/v1/completions", body).json()["choices"][0]["text"]


def test_the_other_apis_read_it_too(live: Live) -> None:
    turns = asked("both")["messages"]
    tool = {"name": "weather", "input_schema": SCHEMA}
    body: dict[str, Any] = {"model": "fake", "max_tokens": 99, "messages": turns, "tools": [tool]}
    blocks = live.post("/v1/messages", body).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["input"] for block in blocks[2:]] == [WEATHER, WEATHER]
    lines = live.post("/v1/messages", body | {"stream": True}).text.split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "One moment."
