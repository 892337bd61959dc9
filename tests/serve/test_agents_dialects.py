"""Two turns of three agents against models of eight dialects: the model calls a tool, gets its result and answers.

The requests are those that the agents send, recorded; the chat templates are the models' own. A model's answer is
forced, and spoken in its dialect.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support import scripted
from tests.support.server import Live, lines_of
from tests.support.speaking import Answer, speak

from headrace.protocol.config import ServerConfig
from headrace.serve.call.dialect import Dialect
from headrace.text.reasoning import NO_STYLE, STYLES
from headrace.text.templates import ChatTemplate
from headrace.text.tools.formats import FORMATS

HERE = Path(__file__).parent
AGENTS: list[dict[str, Any]] = json.loads((HERE / "recorded" / "agents.json").read_text())
CODEX: dict[str, Any] = json.loads((HERE / "apis" / "openai" / "recorded" / "codex.json").read_text())["request"]
LFM2 = """{{ bos_token }}<|im_start|>system
List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|><|im_end|>
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- if m.tool_calls %}<|tool_call_start|>[
{%- for c in m.tool_calls %}{{ c.function.name }}(
{%- for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})
{%- endfor %}]<|tool_call_end|>{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# The key of the template in the data, and the format and the style that must be found.
DIALECTS = {
    "gpt-oss": ("openai", "openai_gptoss"),
    "Kimi-K2.5": ("kimi_k2", "qwen3"),
    "MiniMax-M2": ("minimax_m2", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "GLM-4.7": ("glm45", "qwen3"),
    "Deepseek-V3.1": ("deepseek_v3", "qwen3"),
    "mistral-large-instruct": ("mistral", None),
    "lfm2": ("lfm2", None),
}
RESULT, THOUGHT, LAST = "It says: Good morning.", "I should read it.", "The file says good morning."


class Turn(NamedTuple):
    """What an agent makes of a reply: the reasoning, the text, the call as (id, name, arguments), and the reply's own
    messages, which it sends back."""

    reasoning: str
    text: str
    call: tuple[str, str, dict[str, Any]] | None
    back: list[dict[str, Any]]


def events_of(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = live.post(path, body)
    assert reply.status_code == 200, reply.text
    return [json.loads(line.removeprefix("data: ")) for line in lines_of(reply) if line.startswith("data: {")]


def claude_code(live: Live, messages: list[dict[str, Any]]) -> Turn:
    request = AGENTS[0]["request"]
    blocks: list[dict[str, Any]] = []
    for event in events_of(live, "/v1/messages", request | {"messages": request["messages"] + messages}):
        delta = event.get("delta", {})
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]) | {"partial": ""})
        for key in ("text", "thinking"):
            if key in delta:
                blocks[-1][key] += delta[key]
        if event["type"] == "content_block_delta":
            blocks[-1]["partial"] += delta.get("partial_json", "")
    call = None
    for block in blocks:
        partial = block.pop("partial")
        if block["type"] == "tool_use":
            block["input"] = json.loads(partial)
            call = block["id"], block["name"], block["input"]
    texts = {kind: "".join(block[kind] for block in blocks if block["type"] == kind) for kind in ("thinking", "text")}
    back: list[dict[str, Any]] = [{"role": "assistant", "content": blocks}]
    if call is not None:
        result = {"type": "tool_result", "tool_use_id": call[0], "content": [{"type": "text", "text": RESULT}]}
        back.append({"role": "user", "content": [result]})
    return Turn(texts["thinking"], texts["text"], call, back)


def codex(live: Live, messages: list[dict[str, Any]]) -> Turn:
    response = events_of(live, "/v1/responses", CODEX | {"input": CODEX["input"] + messages})[-1]["response"]
    texts = {"reasoning": "", "message": ""}
    back, call = [], None
    for item in response["output"]:
        if item["type"] == "function_call":
            call = item["call_id"], item["name"], json.loads(item["arguments"])
            back += [item, {"type": "function_call_output", "call_id": call[0], "output": RESULT}]
        else:
            texts[item["type"]] += "".join(part["text"] for part in item["content"])
            back.append(item)
    return Turn(texts["reasoning"], texts["message"], call, back)


def opencode(live: Live, messages: list[dict[str, Any]]) -> Turn:
    request = AGENTS[3]["request"]
    reasoning = text = name = call_id = arguments = ""
    for event in events_of(live, "/v1/chat/completions", request | {"messages": request["messages"] + messages}):
        for choice in event["choices"]:
            delta = choice["delta"]
            reasoning += delta.get("reasoning_content") or ""
            text += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                call_id, name = part.get("id", call_id), part["function"].get("name", name)
                arguments += part["function"]["arguments"]
    back: dict[str, Any] = {"role": "assistant", "content": text or None}
    if not name:
        return Turn(reasoning, text, None, [back])
    function = {"name": name, "arguments": arguments}
    back |= {"tool_calls": [{"id": call_id, "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": call_id, "content": RESULT}
    return Turn(reasoning, text, (call_id, name, json.loads(arguments)), [back, result])


CALLS: dict[Callable[..., Turn], tuple[str, dict[str, Any]]] = {
    claude_code: ("Read", {"file_path": "/project/hello.txt"}),
    codex: ("exec_command", {"cmd": "cat hello.txt | head -1"}),
    opencode: ("read", {"filePath": "/project/hello.txt"}),
}


CASES = [
    pytest.param(model, agent, id=f"{model}-{agent.__name__}")
    for model in DIALECTS
    for agent in (claude_code, codex, opencode)
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("model", "agent"), CASES)
def test_two_turns_of_an_agent(model: str, agent: Callable[..., Turn], shared_data: Path, tmp_path: Path) -> None:
    families = json.loads((shared_data / "templates" / "families.json").read_text(encoding="utf-8"))
    template = families[model]["chat_template"] if model in families else LFM2
    tools, style = FORMATS[DIALECTS[model][0]], DIALECTS[model][1]
    result = Dialect.of(ChatTemplate({"default": template}, {"bos_token": "<s>", "eos_token": "</s>"}))
    assert result[:2] == DIALECTS[model]

    def said(answer: Answer) -> str:
        # The template may have opened the reasoning: a model may open it all the same.
        return speak(answer, tools, STYLES[style] if style else NO_STYLE, "", template)

    call, thought = CALLS[agent], THOUGHT if style else ""
    rows = [
        scripted.Row(RESULT, said(Answer(THOUGHT, LAST, ()))),
        scripted.Row("", said(Answer(THOUGHT, "I look.", (call,)))),
    ]
    client, tokenizer = scripted.parts(rows, tmp_path, template=template)
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as live:
        first = agent(live, [])
        assert (first.reasoning, first.text) == (thought, "I look.")
        assert first.call is not None
        assert first.call[1:] == call
        second = agent(live, first.back)
        assert (second.reasoning, second.text, second.call) == (thought, LAST, None)
