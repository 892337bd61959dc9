"""Starts `headrace serve`, sends requests and normalises the replies for a take of digests, and has the cases of
several exchanges: stored responses, files with batches, and each format of tool calls.

Of tool calls and reasoning, what the model says is forced (`trace_decode_token_ids`). The docstring of `__main__` lists
what differs between two takes of one commit. `__main__` calls `take`, and `bodies` the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from bench.tied import tied

if TYPE_CHECKING:
    from tests.campaigns.digests.__main__ import Record

START_SECONDS = 120
REPLY_SECONDS = 300

ID = re.compile(
    r"(?<![0-9a-f])([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32}|[0-9a-f]{24})(?![0-9a-f])"
)
CALL_ID = re.compile(r"[A-Za-z0-9]{9}")
"""Of a call in Mistral's format."""
TIME = re.compile(r"^(created|\w+_at)$")
DURATION = re.compile(r"^\w+(_ms|_per_second|_duration)$")
DROPPED_HEADERS = {"date", "content-length", "connection", "transfer-encoding", "server"}
DRAWN_HEADERS = {"x-request-id", "request-id", "retry-after"}

JOINED = {
    "content", "text", "delta", "response", "thinking", "reasoning", "reasoning_content", "arguments", "partial_json",
}  # fmt: skip
JOINED_LISTS = {
    "tokens", "token_logprobs", "top_logprobs", "text_offset", "token_ids", "logprobs", "completion_probabilities",
}  # fmt: skip
COUNTERS = {
    "tokens_predicted", "predicted_n", "completion_tokens", "total_tokens", "tokens_cached",
}  # fmt: skip

TALK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me a story."}]
PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer"}},
         "required": ["city"], "additionalProperties": False}  # fmt: skip
WEATHER = {"name": "weather", "description": "The weather in a city", "parameters": PLACE}
CLOCK = {"name": "time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": CLOCK}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CALLED = [
    {"role": "user", "content": "Weather in Rome?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"},
]  # fmt: skip

FUNCTIONS = [{"type": "function"} | WEATHER, {"type": "function"} | CLOCK]
OPTIONS = {"num_predict": 12, "temperature": 0}
ONE_TOOL = {"tools": [{"name": "weather", "input_schema": PLACE}]}
"""As the Anthropic API has it."""

TEMPLATE = """{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}\
{% for message in messages %}\
{{ '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' }}{{ message['content'] or '' }}\
{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
SAID: dict[str, list[str]] = {
    "hermes": ['<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
               'Well. <tool_call>{"name": "time", "arguments": {}}</tool_call><tool_call>{"name": "weather"'],
    "qwen3_coder": ["<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"],
    "llama3_json": ['{"name": "weather", "parameters": {"city": "Rome"}}',
                    '<|python_tag|>{"name": "time", "parameters": {}}'],
    "mistral": ['[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]',
                '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'],
    "pythonic": ['[weather(city="Rome", days=3), time()]'],
    "deepseek_v3": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
                    '{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'],
    "granite": ['<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]'],
    "glm45": ["<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"],
}  # fmt: skip
"""An answer with calls in each format; every format is given every answer."""
THOUGHT = {"hermes": "qwen3", "qwen3_coder": "qwen3", "llama3_json": "deepseek_r1", "mistral": "mistral",
           "pythonic": "gemma4", "deepseek_v3": "deepseek_v3", "granite": "granite", "glm45": "glm45"}  # fmt: skip
THOUGHTS = ["<think>Hm. Let me see.</think>\n\nHello.", "Hm.</think>Hello.", "[THINK]Hm.[/THINK]Hello.", "<think>Hm",
            "Here is my thought process: Hm. Here is my response: Hello.",
            "<|channel>thought\nHm.<channel|>Hello."]  # fmt: skip


class Normaliser:
    """Replaces what is drawn or measured in one exchange; equal ids stay equal."""

    def __init__(self, port: int = 0, hidden: tuple[str, ...] = ()) -> None:
        self.ids: dict[str, str] = {}
        self.port = port
        self.hidden = hidden

    def text(self, text: str) -> str:
        for path in self.hidden:
            text = text.replace(path, "<folder>")
        if self.port:
            text = text.replace(f":{self.port}", ":<port>")
        return ID.sub(lambda match: self.ids.setdefault(match.group(), f"<id {len(self.ids) + 1}>"), text)

    def value(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            if value.get("purpose") == "batch_output":
                # Its answers have times of varying length.
                value = value | {"bytes": "<bytes>"}
            return {self.text(name): self.value(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            if TIME.match(key):
                return "<time>"
            if key in ("id", "call_id") and isinstance(value, str) and CALL_ID.fullmatch(value):
                return self.ids.setdefault(value, f"<id {len(self.ids) + 1}>")
            if DURATION.match(key) and not isinstance(value, str):
                return "<duration>"
        return self.text(value) if isinstance(value, str) else value


class Stream:
    """The events of one stream: a skeleton of each sort in the order of their first, and the texts joined."""

    def __init__(self) -> None:
        self.skeletons: list[Any] = []
        self.texts: dict[str, Any] = {}
        self.counters: dict[str, Any] = {}
        self.numbers: list[int] = []
        self.has_text = False

    def add(self, name: str, event: Any) -> None:
        if not isinstance(event, dict):
            self.skeletons.append([name, event])
            return
        places = [str(event.get(key, "")) for key in ("type", "item_id", "output_index", "content_index", "index")]
        self.has_text = False
        skeleton = [name, self.strip(event, " ".join([name, *places]), "")]
        # A joined text has as many events as the server had turns to write it: one is kept. Where there was one turn
        # only, the last event has the whole text: the skeleton that it leaves out is put before it.
        if not self.has_text:
            self.skeletons.append(skeleton)
            return
        for each in ([name, as_delta(skeleton[1])], skeleton):
            if each not in self.skeletons:
                self.skeletons.append(each)

    def strip(self, value: Any, path: str, parent: str) -> Any:
        if isinstance(value, list):
            return [
                self.strip(item, f"{path}[{item.get('index', place) if isinstance(item, dict) else place}]", parent)
                for place, item in enumerate(value)
            ]
        if not isinstance(value, dict):
            return value
        fields: dict[str, Any] = {}
        for key, item in value.items():
            below = f"{path}.{key}"
            joins = (isinstance(item, str) and key in JOINED) or (
                isinstance(item, list) and (key in JOINED_LISTS or (key == "content" and parent == "logprobs"))
            )
            if key == "sequence_number":
                self.numbers.append(item)
            elif key == "logprobs" and parent == "part":
                fields[key] = "<logprobs of the first piece>"
            elif joins:
                if parent != "delta" or "role" in value:
                    fields[key] = type(item)()
                if item:
                    self.has_text = True
                    self.texts[below] = self.texts.get(below, type(item)()) + item
            elif key in COUNTERS:
                fields[key] = "<counter>"
                self.counters[below] = item
            else:
                fields[key] = self.strip(item, below, key)
        return fields

    def plain(self) -> dict[str, Any]:
        in_order = self.numbers == list(range(len(self.numbers)))
        return {"events": self.skeletons, "texts": self.texts, "counters": self.counters, "in_order": in_order}


def as_delta(event: dict[str, Any]) -> dict[str, Any]:
    """The skeleton of an event with text, without what only the last event of a choice has."""
    rest = {name: value for name, value in event.items() if name not in ("timings", "usage")}
    if "choices" not in event:
        return event
    ends = {"finish_reason": None, "stop_reason": None}
    rest["choices"] = [
        {name: ends.get(name, value) for name, value in choice.items() if name != "warnings"}
        for choice in event["choices"]
    ]
    return rest


def events_of(text: str) -> Iterator[tuple[str, Any]]:
    """Yield (event name, data) of server-sent events; comments, which keep a connection open, are left out."""
    for block in text.replace("\r\n", "\n").split("\n\n"):
        name, data = "", []
        for line in block.split("\n"):
            field, _, content = line.partition(":")
            if field == "event":
                name = content.strip()
            elif field == "data":
                data.append(content.removeprefix(" "))
        if data:
            yield name, parsed("\n".join(data))


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def body_of(reply: httpx.Response, normal: Normaliser) -> Any:
    kind = reply.headers.get("content-type", "").partition(";")[0]
    if kind == "text/event-stream" or kind == "application/x-ndjson":
        if kind == "text/event-stream":
            pairs = list(events_of(reply.text))
        else:
            pairs = [("", parsed(line)) for line in reply.text.splitlines()]
        stream = Stream()
        for name, event in pairs:
            stream.add(name, normal.value(event))
        return stream.plain()
    if kind == "application/json":
        return normal.value(parsed(reply.text))
    return normal.text(reply.text)


def plain(reply: httpx.Response, normal: Normaliser) -> dict[str, Any]:
    """Status, headers and body of a reply, normalised."""
    headers = {
        name: "<drawn>" if name in DRAWN_HEADERS else normal.text(value)
        for name, value in sorted(reply.headers.items())
        if name not in DROPPED_HEADERS
    }
    return {"status": reply.status_code, "headers": headers, "body": body_of(reply, normal)}


class Server:
    """A running server and the record of what was exchanged with it. `title` is the start of the cases' names, `kind`
    what a take counts them as."""

    def __init__(self, record: Record, title: str, port: int, hidden: tuple[str, ...], kind: str) -> None:
        self.record = record
        self.title = title
        self.kind = kind
        self.port = port
        self.hidden = hidden
        # One connection at a time, closed by nobody: the order of requests decides what the prefix cache holds.
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=REPLY_SECONDS)

    def send(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """Send a JSON body, or bytes as they are. A connection that the server closed is a reply of status 599."""
        if isinstance(body, bytes):
            options["content"] = body
        elif body is not None:
            options["content"] = json.dumps(body).encode()
            options["headers"] = {"content-type": "application/json"} | options.get("headers", {})
        try:
            return self.client.request(method, path, **options)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            return httpx.Response(599, text="the connection was closed")

    def normal(self) -> Normaliser:
        return Normaliser(self.port, self.hidden)

    def keep(self, name: str, reply: httpx.Response, kind: str = "") -> None:
        self.record.add(f"{self.title}/{name}", plain(reply, self.normal()), kind or self.kind)

    def exchange(self, name: str, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """Send, record and return the reply."""
        reply = self.send(method, path, body, **options)
        self.keep(name, reply)
        return reply

    def wanted(self, path: str, done: tuple[str, ...], field: str = "status", **options: Any) -> httpx.Response:
        """Read `path` until its `field` is one of `done`. Raises `TimeoutError` after a minute."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            reply = self.send("GET", path, **options)
            if reply.json().get(field) in done:
                return reply
            time.sleep(0.05)
        raise TimeoutError(f"{path} has {field} {reply.json().get(field)}, none of {done}")


@contextlib.contextmanager
def serve(
    record: Record, title: str, work: Path, *flags: str, key: str = "", kind: str = "exchanges"
) -> Iterator[Server]:
    """Run `headrace serve builtin` with `flags`; `key` opens its /health.

    Raises `RuntimeError` if it does not become ready.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    log = work / f"{title.replace('/', '-')}.log"
    command = [
        sys.executable, "-m", "headrace", "serve", "builtin", "--port", str(port), "--num-threads", "2", "--seed", "1",
        "--num-gpu-blocks-override", "4096", "--crash-report-dir", "", "--log-stats-interval", "0",
        "--shutdown-delay", "0", *flags,
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(tied(command), stdout=output, stderr=subprocess.STDOUT, env=environment())
        try:
            server = Server(record, title, port, (str(work),), kind)
            wait_for(server, process, log, key)
            with contextlib.closing(server.client):
                yield server
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(server: Server, process: subprocess.Popen[bytes], log: Path, key: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if server.client.get("/health", headers={"x-api-key": key} if key else {}).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the server did not become ready:\n{log.read_text(errors='replace')[-3000:]}")


def environment() -> dict[str, str]:
    """The environment of a command: no colours, a fixed width, and none of the caller's settings of headrace."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return variables | {"NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb", "PYTHONHASHSEED": "0"}


def take(record: Record, models: Path, work: Path) -> None:
    """Record all cases under http/tools/."""
    for parser, style in THOUGHT.items():
        if record.wants(f"http/tools/{parser}/"):
            take_tools(record, work, parser, style)


def take_kept(server: Server) -> None:
    """What a server keeps: responses, files and batches."""
    take_stored(server)
    take_files(server)


def take_stored(server: Server) -> None:
    """Stored responses: read, continued, listed, removed, cancelled."""
    body = {"input": "Hello", "max_output_tokens": 12, "seed": 7}
    first = server.exchange("stored/first", "POST", "/v1/responses", body).json()["id"]
    follow = server.exchange("stored/follow", "POST", "/v1/responses",
                             body | {"input": "And then?", "previous_response_id": first})  # fmt: skip
    for name, response_id in (("first", first), ("follow", follow.json()["id"])):
        path = f"/v1/responses/{response_id}"
        for query in (
            "",
            "/input_items",
            "/input_items?limit=1",
            "/input_items?order=asc",
            "?stream=true",
            "?include=x",
        ):
            server.exchange(f"stored/{name}/read{query}", "GET", path + query)
        server.exchange(f"stored/{name}/cancel", "POST", f"{path}/cancel")
        server.exchange(f"stored/{name}/delete", "DELETE", path)
        server.exchange(f"stored/{name}/deleted", "GET", path)
    background = server.exchange("stored/background", "POST", "/v1/responses", body | {"background": True})
    if background.status_code == 200:
        path = f"/v1/responses/{background.json()['id']}"
        server.keep("stored/background/done", server.wanted(path, ("completed", "incomplete", "failed")))
        server.exchange("stored/background/cancel", "POST", f"{path}/cancel")


def take_files(server: Server) -> None:
    """Files and batches, one that succeeds, one with refused lines, one with broken lines."""
    requests = [
        ("/v1/completions", {"prompt": "Once", "max_tokens": 4}), ("/v1/completions", {"prompt": "A",
        "max_tokens": 3, "seed": 2}),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 0}),
    ]  # fmt: skip
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(requests)
    ]
    contents = {
        "good": "\n".join(map(json.dumps, lines[:2])), "refused": "\n".join(map(json.dumps, lines)),
        "broken": json.dumps(lines[0]) + "\n{\n" + json.dumps(lines[0]),
        "url": json.dumps(lines[0] | {"url": "/nothing"}),
    }  # fmt: skip
    for name, content in contents.items():
        reply = server.client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": (f"{name}.jsonl", content.encode())}
        )
        server.keep(f"files/{name}", reply)
        file_id = reply.json()["id"]
        server.exchange(f"files/{name}/read", "GET", f"/v1/files/{file_id}")
        server.exchange(f"files/{name}/content", "GET", f"/v1/files/{file_id}/content")
        body = {
            "input_file_id": file_id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"a": "b"},
        }
        batch = server.send("POST", "/v1/batches", body)
        server.record.add(f"{server.title}/batches/{name}/status", batch.status_code, "exchanges")
        done = server.wanted(f"/v1/batches/{batch.json()['id']}", ("completed", "failed", "expired", "cancelled"))
        server.keep(f"batches/{name}", done)
        for kind in ("output_file_id", "error_file_id"):
            if done.json().get(kind):
                output = server.send("GET", f"/v1/files/{done.json()[kind]}/content")
                for line in sorted(map(json.loads, output.text.splitlines()), key=lambda one: str(one["custom_id"])):
                    body = server.normal().value(line)
                    server.record.add(f"{server.title}/batches/{name}/{kind}/{line['custom_id']}", body, "exchanges")
        server.exchange(f"batches/{name}/cancel", "POST", f"/v1/batches/{batch.json()['id']}/cancel")
        server.exchange(f"files/{name}/delete", "DELETE", f"/v1/files/{file_id}")
        server.exchange(f"files/{name}/deleted", "GET", f"/v1/files/{file_id}")
    for query in ("", "?limit=2", "?order=asc", "?purpose=batch"):
        server.exchange(f"files/list{query}", "GET", f"/v1/files{query}")
    for query in ("", "?limit=1"):
        server.exchange(f"batches/list{query}", "GET", f"/v1/batches{query}")


def take_tools(record: Record, work: Path, parser: str, style: str) -> None:
    """A server that reads one format of calls and one of reasoning, with answers in every format."""
    template = work / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ["--chat-template", str(template), "--tool-call-parser", parser, "--reasoning-parser", style]
    with serve(record, f"http/tools/{parser}", work, *flags) as server:
        for place, text in enumerate([text for texts in SAID.values() for text in texts] + THOUGHTS):
            tokens = server.send("POST", "/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
            body = {
                "messages": TALK,
                "tools": TOOLS,
                "seed": 7,
                "max_tokens": len(tokens),
                "trace_decode_token_ids": tokens,
            }
            for stream in (False, True):
                server.exchange(f"chat/{place}/{stream}", "POST", "/v1/chat/completions", body | {"stream": stream})
            response = {
                "input": "Hi",
                "tools": FUNCTIONS,
                "max_output_tokens": len(tokens),
                "trace_decode_token_ids": tokens,
            }
            server.exchange(f"responses/{place}", "POST", "/v1/responses", response | {"seed": 7, "stream": True})
        fields = {"messages": CALLED, "tools": TOOLS, "seed": 7, "max_tokens": 80, "tool_choice": "required"}
        message = {"model": "builtin", "messages": TALK[1:],
        "max_tokens": 80, "temperature": 0, "tool_choice": {"type": "any"}} | ONE_TOOL  # fmt: skip
        for stream in (False, True):
            server.exchange(f"required/{stream}", "POST", "/v1/chat/completions", fields | {"stream": stream})
            server.exchange(f"messages/{stream}", "POST", "/v1/messages", message | {"stream": stream})
            server.exchange(f"ollama/{stream}", "POST", "/api/chat", {"model": "builtin",
            "messages": TALK, "tools": TOOLS,
                            "options": OPTIONS, "stream": stream})  # fmt: skip
        server.exchange("template", "POST", "/apply-template", {"messages": CALLED, "tools": TOOLS})
