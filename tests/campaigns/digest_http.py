"""Start `headrace serve`, send requests, and normalise the replies for a take of digests.

Knows HTTP, event streams and what in a reply differs between two takes (the docstring of `digests` lists it); knows no
route. `digest_exchanges` and `digest_refusals` call it.
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
from typing import Any

import httpx
from bench.tied import tied
from tests.campaigns.digests import Record

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
    """A running server and the record of what was exchanged with it. `title` is the start of the cases' names."""

    def __init__(self, record: Record, title: str, port: int, hidden: tuple[str, ...]) -> None:
        self.record = record
        self.title = title
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

    def keep(self, name: str, reply: httpx.Response, kind: str = "exchanges") -> None:
        self.record.add(f"{self.title}/{name}", plain(reply, self.normal()), kind)

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
def serve(record: Record, title: str, work: Path, *flags: str, key: str = "") -> Iterator[Server]:
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
            server = Server(record, title, port, (str(work),))
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
