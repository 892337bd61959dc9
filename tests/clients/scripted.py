"""A server whose model answers by rule: `python -m tests.clients.scripted --port 8001 --api-key KEY`.

It is the real server over the fake engine, for what the built-in model is too small to show: it calls the tools of a
prompt, quotes its system prompt, thinks, counts for ever, and fails at nothing. `answer` holds the rules. The model's
name is `scripted`; no other name is accepted, and a key is needed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import sys
import tempfile
from array import array
from pathlib import Path
from typing import Any

from tests.support import fake
from tests.support.server import write_tokenizer

from headrace.engine import logs
from headrace.engine.client import InprocClient
from headrace.insight.simulated import Oracle
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.params import SamplingParams
from headrace.serve.app import create_app
from headrace.serve.loading import ModelParts
from headrace.serve.process import run
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer import Tokenizer

# One token is a byte, and coding agents begin with a hundred kilobytes.
MAX_MODEL_LEN = 2**19
STEP_S = 0.001
TEMPLATE = """\
{%- if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif -%}
{%- for message in messages -%}
<|{{ message['role'] }}|>{{ message['content'] or '' }}
{%- for call in message.get('tool_calls') or [] %}
<tool_call>
{"name": {{ call['function']['name'] | tojson }}, "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>
{%- endfor %}<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# What the tool of the scripts returns. Some clients hand it back as a message of the user.
RESULT = "21 degrees"


def answer(prompt: str) -> str | None:
    """Return what the model says to a rendered prompt; None: it counts until it is stopped.

    After a result of a tool: a call of the tool whose name begins with "final", if there is one, or a sentence that
    quotes the result. With tools: a call of the one that the last turn names, or else of the first. Otherwise what the
    words of the last turn mean, by the list below.
    """
    turns = re.findall(r"<\|(\w+)\|>(.*?)(?:<\|end\|>|\Z)", prompt, re.DOTALL)
    texts = turns[:-1] if turns[-1:] == [("assistant", "")] else turns
    tools = [tool["function"] for role, text in texts if role == "tools" for tool in json.loads(text)]
    # The turns since the model spoke: agents put reminders between and behind what the user says.
    since = max((place + 1 for place, (role, _) in enumerate(texts) if role == "assistant"), default=0)
    recent = [(role, text) for role, text in texts[since:] if role in ("user", "tool")]
    last, results = "\n".join(text for _, text in recent), [text for role, text in recent if role == "tool"]
    system = " ".join(text for role, text in texts if role in ("system", "developer"))
    final = next((tool for tool in tools if tool["name"].startswith("final")), None)
    if results or RESULT in last:
        result = RESULT if RESULT in last else results[-1].strip()
        return _call(final, result) if final else f"The tool returned: {result}."
    if tools:
        by_name = next((tool for tool in tools if re.search(rf"\b{re.escape(tool['name'])}\b", last)), tools[0])
        return _call(by_name, "Rome")
    if "Count until" in last:
        return None
    if "Think." in last:
        return "<think>Two and two make four.</think>Four."
    if "system prompt" in last:
        return f"My system prompt: {system}"
    if match := re.search(r"Create the file (\S+)", last):
        return f"{match[1].rstrip('.')}\n```\nHello from the script.\n```\n"
    return "Hello from the script."


def _call(tool: dict[str, Any], text: str) -> str:
    arguments = {name: _value(name, schema, text) for name, schema in _required(tool.get("parameters") or {})}
    return f"<tool_call>\n{json.dumps({'name': tool['name'], 'arguments': arguments})}\n</tool_call>"


def _required(parameters: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    properties = parameters.get("properties") or {}
    return [(name, properties[name]) for name in parameters.get("required") or properties if name in properties]


def _value(name: str, schema: dict[str, Any], text: str) -> Any:
    """A value of a schema's type: `text` for strings, but for a command a harmless one."""
    if name in ("cmd", "command"):
        text = f"echo {RESULT}"
    kind = schema.get("type", "string")
    if "enum" in schema:
        return schema["enum"][0]
    numbers = {"integer": 4, "number": 4.0, "boolean": True, "array": [], "object": {}}
    return numbers.get(kind if isinstance(kind, str) else kind[0], text)


@functools.lru_cache(maxsize=64)
def _plan(prompt: bytes) -> bytes | None:
    text = answer(prompt.decode("utf-8", "replace"))
    return None if text is None else text.encode()


class ScriptedOracle(Oracle):
    """Spells the answer to the prompt, a byte a token, and then ends."""

    def next_token(self, context: array[int], params: SamplingParams, num_generated: int) -> int:
        tokens = list(context[1::3])
        plan = _plan(bytes(tokens[: len(tokens) - num_generated]))
        if plan is None:
            numbers = itertools.islice(itertools.count(1), num_generated + 1)
            plan = " ".join(map(str, numbers)).encode()
        return plan[num_generated] if num_generated < len(plan) else fake.EOS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.scripted")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--api-key")
    options = parser.parse_args()
    logs.set_up("warning")
    config = EngineConfig(
        model="scripted", block_size=256, max_model_len=MAX_MODEL_LEN, num_gpu_blocks_override=2 * MAX_MODEL_LEN // 256
    )
    server = ServerConfig(
        port=options.port,
        api_key=options.api_key,
        any_model_name=False,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        log_stats_interval=0,
        shutdown_delay=0,
        shutdown_timeout=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer_config = {"eos_token": "<eos>", "chat_template": TEMPLATE}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        tokenizer = Tokenizer.load(folder)
        client = InprocClient(lambda: fake.build(config, STEP_S, ScriptedOracle(fake.VOCAB_SIZE, [fake.EOS])))
        return run(create_app(client, server, "scripted", ModelParts(tokenizer, ChatTemplate.of(tokenizer))), server)


if __name__ == "__main__":
    sys.exit(main())
