"""A server whose model answers by a script: a client runs against it as against a model that knows what to do.

`python -m tests.support.scripted SCRIPT --port 8000 [--record FILE]`. SCRIPT is a JSON list of `{"when": TEXT, "say":
TEXT}`: the answer to a prompt is `say` of the first row whose `when` is in the prompt, so rows of later turns come
first. Calls are written as in Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. With `--record`,
each POST is appended to FILE as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tests.support import fake
from tests.support.server import write_tokenizer

from headrace.engine import logs
from headrace.engine.client import EngineClient, InprocClient
from headrace.insight.simulated import Oracle
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.params import SamplingParams
from headrace.serve.app import create_app
from headrace.serve.loading import ModelParts
from headrace.serve.process import run
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 2**19
"""Tokens, which are bytes here: an agent's first prompt has about 100,000."""
TEMPLATE = """\
{%- if tools %}<|tools|>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Write a call as <tool_call>{"name": ..., "arguments": {...}}</tool_call>
{% endif %}
{%- for m in messages %}<|{{ m['role'] }}|>
{{- m['content'] or '' }}
{%- for call in m.get('tool_calls') or [] %}
<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>
{%- endfor %}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


class Row(msgspec.Struct, frozen=True):
    """`say` answers a prompt that contains `when`."""

    when: str
    say: str


class Scripted(Oracle):
    """The answers of a script."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__(fake.VOCAB_SIZE, [fake.EOS])
        self._rows = rows

    def next_token(self, context: array[int], params: SamplingParams, num_generated: int) -> int:
        prompt = bytes(list(context[1 : len(context) - 3 * num_generated : 3]))
        answer = next((row.say for row in self._rows if row.when.encode() in prompt), "").encode()
        return answer[num_generated] if num_generated < len(answer) else fake.EOS


class Recorder:
    """An ASGI application around another, which keeps the JSON of each POST in `file`."""

    def __init__(self, app: Any, file: Path) -> None:
        self._app, self._file = app, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = bytearray()

        async def heard() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body") and body:
                line = {"path": scope["path"], "body": json.loads(body)}
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                body.clear()
            return message

        await self._app(scope, heard if scope["type"] == "http" and scope["method"] == "POST" else receive, send)


class Parts(NamedTuple):
    """What a server is made of."""

    client: EngineClient
    tokenizer: Tokenizer


def parts(rows: Sequence[Row], folder: Path, max_model_len: int = 2**15, template: str = TEMPLATE) -> Parts:
    """An engine that answers by `rows`, and its tokenizer, which is written to `folder`. Its tokens are bytes."""
    write_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    engine = EngineConfig(
        model="scripted",
        max_model_len=max_model_len,
        num_gpu_blocks_override=2 * max_model_len // 16,
        max_num_batched_tokens=2**16,
        block_size=16,
    )
    return Parts(InprocClient(lambda: fake.build(engine, oracle=Scripted(rows))), Tokenizer.load(folder))


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args(arguments)
    rows = msgspec.json.decode(options.script.read_bytes(), type=list[Row])
    logs.set_up("info")
    server = ServerConfig(port=options.port, log_stats_interval=0)
    with tempfile.TemporaryDirectory() as folder:
        client, tokenizer = parts(rows, Path(folder), MAX_MODEL_LEN)
        app: Any = create_app(client, server, "scripted", ModelParts(tokenizer, ChatTemplate.of(tokenizer)))
        return run(app if options.record is None else Recorder(app, options.record), server)


if __name__ == "__main__":
    sys.exit(main())
