"""Two holders of keys on one server: what bob sees must be the same with and without alice.

A program is a random sequence of calls by both over all routes. It runs twice, each time on a fresh server over the
fake engine: with alice's calls and without them. Bob's trace has the statuses and bodies of all his calls, in order,
and of all that he stored; ids, times and the cuts of streams are normalised. Alice may use bob's ids, leave her calls
open, and hang up. Bob's calls follow each other, and he waits for what runs in the background, so that his trace does
not depend on time. `python -m tests.campaigns nightly --only C-16` runs 10,000 programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette
from tests.security import rig
from tests.support import fake
from tests.support.server import write_tokenizer

from headrace.engine.client import InprocClient
from headrace.engine.core import EngineCore
from headrace.insight.simulated import Oracle
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.params import SamplingParams
from headrace.serve.app import create_app
from headrace.serve.loading import ModelParts
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer import Tokenizer

KEYS = {"alice": rig.ALICE, "bob": rig.BOB, "twin": rig.BOB}
"""The twin has bob's key, and makes only calls that keep nothing: they must not change what bob keeps either."""
PATIENCE_S = 4.0
"""How long bob waits for a batch of two lines. Alone he needs milliseconds, behind all of alice's lines much longer."""
LIMITS = {"files": 12, "batches": 6, "responses": 5}
"""Entries of a store: so few that both together reach the bound, and bob alone seldom does."""
MAX_STORAGE_BYTES = 90_000

LONG = "The quick brown fox jumps over the lazy dog, and then it sleeps. "
PROMPTS = (LONG, LONG + "It wakes up.", "A" + LONG, "hi", LONG * 3)
NAMES = ("same", "other")
NO_ID = "0" * 32

_ID = re.compile(r"[0-9a-f]{16,}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_STORED = re.compile(r"(?:file-|batch_|resp_)[0-9a-f]{32}")
_PLACE = re.compile(r"<(alice|bob) (file-|batch_|resp_)(-?\d+)( bare)?>")
_TIMES = re.compile(r"(.*_at|.*_on|created|.*duration|.*_ms|.*_per_second|timings|sequence_number|seed)")
_TEXTS = ("text", "content", "delta", "response", "thinking", "partial_json", "arguments", "reasoning_content")
_RUNNING = ("validating", "in_progress", "finalizing", "cancelling", "queued")


class Call(NamedTuple):
    """One step of a program. `<bob file-0>` in path and body stands for the first file of bob's, `bare` for its id
    without the prefix. manner: whole; open, beside what follows; gone, the client hangs up; wait, the call is repeated
    until the thing is done."""

    who: str
    method: str
    path: str
    body: Any = None
    manner: str = "whole"


class Reply(NamedTuple):
    status: int
    kind: str
    body: bytes


class TextOracle(Oracle):
    """Tokens follow from the tokens before, and not from the seed, which the server draws for some calls."""

    def next_token(self, context: Any, params: SamplingParams, num_generated: int) -> int:
        return 97 + blake2b(context.tobytes()[-240:], digest_size=2).digest()[0] % 26


def engine(config: EngineConfig) -> EngineCore:
    core = fake.build(config, oracle=TextOracle(fake.VOCAB_SIZE, [fake.EOS]))
    # C-1 checks the invariants of the scheduler. Here a walk over all blocks at each pause would take 40 % of the time.
    core.scheduler.check = lambda: None  # type: ignore[method-assign]
    return core


class House:
    """A fresh server in this process and its two callers. Used as an asynchronous context manager."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, keys: str, limits: dict[str, int]) -> None:
        config = EngineConfig(model="fake", max_model_len=1024, num_gpu_blocks_override=8192)
        self.client = InprocClient(lambda: engine(config))
        server = ServerConfig(api_key_file=keys, log_stats_interval=0, max_storage_bytes=MAX_STORAGE_BYTES)
        self.app: Starlette = create_app(self.client, server, "fake", ModelParts(tokenizer, template))
        storage = self.app.state.lifespan.storage
        for name, most in limits.items():
            getattr(storage, name).store.max_items = most
        self.ids: dict[str, list[str]] = {who: [] for who in KEYS}
        self.trace: list[str] = []
        self._open: list[asyncio.Task[Reply]] = []
        self._lifespan = self.app.state.lifespan.run(self.app)

    async def __aenter__(self) -> House:
        await self._lifespan.__aenter__()
        while not self.client.is_alive:
            await asyncio.sleep(0.0005)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await self._lifespan.__aexit__(*exc)

    async def run(self, program: list[Call]) -> list[str]:
        """Run the calls. -> bob's trace."""
        for call in program:
            if call.manner == "open":
                self._open.append(asyncio.ensure_future(self._send(call)))
                await asyncio.sleep(0)
                continue
            reply = await (self._wait(call) if call.manner == "wait" else self._send(call))
            if call.who == "bob":
                self.trace.append(f"{call.method} {call.path} {shown(reply)}")
        for entry_id in self.ids["bob"]:
            for path in kept_paths(entry_id):
                reply = await self._send(Call("bob", "GET", path))
                self.trace.append(f"GET {path} {shown(reply)}")
        return list(renamed(self.trace))

    async def _wait(self, call: Call) -> Reply:
        end = time.monotonic() + PATIENCE_S
        while True:
            reply = await self._send(call)
            running = reply.status == 200 and json.loads(reply.body).get("status") in _RUNNING
            if not running or time.monotonic() > end:
                return reply
            await asyncio.sleep(0.001)

    async def _send(self, call: Call) -> Reply:
        path = self._filled(call.path)
        kind, body = "application/json", b""
        if isinstance(call.body, bytes):
            body = self._filled(call.body.decode("latin-1")).encode("latin-1")
        elif isinstance(call.body, tuple):
            kind, body = form(*call.body)
        elif call.body is not None:
            body = self._filled(json.dumps(call.body)).encode()
        target, _, query = path.partition("?")
        headers = {"host": "localhost", "content-length": str(len(body)), "authorization": f"Bearer {KEYS[call.who]}"}
        headers |= {"content-type": kind} if body else {}
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
            "method": call.method, "path": target, "raw_path": target.encode(), "query_string": query.encode(),
            "root_path": "", "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1), "state": {},
        }  # fmt: skip
        bodies = [{"type": "http.request", "body": body, "more_body": False}]
        messages: list[dict[str, Any]] = []
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if bodies:
                return bodies.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            messages.append(message)
            if call.manner == "gone":
                left.set()
                raise OSError("the client is gone")

        with contextlib.suppress(OSError):
            await self.app(scope, receive, send)
        if not messages:
            return Reply(0, "", b"")
        content = dict(messages[0].get("headers", ())).get(b"content-type", b"").decode()
        reply = Reply(messages[0]["status"], content, b"".join(message.get("body", b"") for message in messages[1:]))
        ids = self.ids[call.who]
        for entry_id in _STORED.findall(reply.body.decode("utf-8", "replace")):
            if entry_id not in ids and not entry_id.endswith(NO_ID):
                ids.append(entry_id)
        return reply

    def _filled(self, text: str) -> str:
        def entry_id(match: re.Match[str]) -> str:
            owner, prefix, number, bare = match.groups()
            ids = [each for each in self.ids[owner] if each.startswith(prefix)]
            result = ids[int(number) % len(ids)] if ids else prefix + NO_ID
            return result.removeprefix(prefix) if bare else result

        return _PLACE.sub(entry_id, text)


def form(name: str, data: bytes) -> tuple[str, bytes]:
    """The body of an upload."""
    parts = [b'--cut\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n']
    parts += [f'--cut\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode(), data]
    return "multipart/form-data; boundary=cut", b"".join([*parts, b"\r\n--cut--\r\n"])


def kept_paths(entry_id: str) -> list[str]:
    """Where the thing with this id is read."""
    if entry_id.startswith("file-"):
        return [f"/v1/files/{entry_id}", f"/v1/files/{entry_id}/content"]
    if entry_id.startswith("batch_"):
        return [f"/v1/batches/{entry_id}"]
    return [f"/v1/responses/{entry_id}", f"/v1/responses/{entry_id}/input_items"]


# -- what is seen


def shown(reply: Reply) -> str:
    """Status, type and body without times. Of a stream: the kinds of its events, and all of its text."""
    text = reply.body.decode("utf-8", "replace")
    if reply.kind.startswith(("text/event-stream", "application/x-ndjson")):
        return f"{reply.status} {reply.kind} {stream(text)}"
    try:
        whole = json.dumps(timeless(json.loads(text)))
        # What is stored holds times, so its size is another each time.
        return f"{reply.status} {reply.kind} {re.sub(r'[0-9]+ of [0-9]+ bytes', '', whole)}"
    except ValueError:
        lines = [json.dumps(timeless(json.loads(line))) if line[:1] == "{" else line for line in text.splitlines()]
        # Lines of a batch end in any order.
        return f"{reply.status} {reply.kind} {' '.join(sorted(lines, key=lambda line: _ID.sub('', line)))}"


def timeless(value: Any) -> Any:
    """The value without what holds a time."""
    if isinstance(value, dict):
        # A batch's output holds times, so its size may be another.
        sized = not str(value.get("filename")).endswith(("_output.jsonl", "_error.jsonl"))
        return {k: timeless(each) for k, each in value.items() if not _TIMES.fullmatch(k) and (sized or k != "bytes")}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def stream(text: str) -> str:
    """A stream, whatever the pieces that it came in: its text, and the values that each field has had."""
    pieces: list[str] = []
    values: dict[str, dict[str, None]] = {}

    def take(value: Any, path: str) -> None:
        name = path.rpartition(".")[2]
        if isinstance(value, str) and name in _TEXTS:
            pieces.append(value)
        elif isinstance(value, dict):
            for key, each in value.items():
                if key not in ("logprobs", "tokens", "probs") and not (key == "tokens_predicted" and not value["stop"]):
                    take(each, f"{path}.{key}")
        elif isinstance(value, list):
            for each in value:
                take(each, path)
        elif value is not None:
            values.setdefault(path, {})[str(value)] = None

    for line in text.splitlines():
        data = line.removeprefix("data: ")
        take(timeless(json.loads(data)) if data[:1] == "{" else data, "")
    return json.dumps(["".join(pieces), {path: list(seen) for path, seen in sorted(values.items())}])


def renamed(lines: list[str]) -> Iterator[str]:
    """The lines with ids named in the order in which they come."""
    names: dict[str, str] = {}

    def name(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"#{len(names)}")

    for line in lines:
        yield _ID.sub(name, line)


# -- programs


def random_program(seed: int, num_steps: int = 12) -> list[Call]:
    """A random program of both. At least three calls are bob's."""
    noise = random.Random(seed)
    result: list[Call] = []
    for _ in range(noise.randint(4, num_steps)):
        for _ in range(noise.choice((0, 1, 1, 2, 3))):
            result += alices(noise)
        first, *rest = bobs(noise)
        result.append(first)
        if rest and noise.random() < 0.7:
            result += alices(noise)
        result += rest
    return result


def bobs(noise: random.Random) -> list[Call]:
    """One deed of bob's: a call, and the wait for what it leaves running."""
    if noise.random() < 0.6:
        return [answered("bob", noise)]
    return stored("bob", noise)


def alices(noise: random.Random) -> list[Call]:
    """One deed of alice's, of any manner."""
    draw = noise.random()
    if draw < 0.35:
        return [answered("alice", noise)._replace(manner=noise.choice(("whole", "open", "gone")))]
    if draw < 0.8:
        return [
            call._replace(manner=noise.choice(("whole", "whole", "open", "gone"))) for call in stored("alice", noise)
        ]
    if draw < 0.83:
        return flood()
    return [meddling(noise)]


def answered(who: str, noise: random.Random) -> Call:
    """A call that keeps nothing, to any route of all APIs. Of six one is wrong."""
    path = noise.choice([path for path in rig.BODIES if path != "/v1/responses"])
    body = rig.body_of(path)
    prompt = noise.choice(PROMPTS)
    body = json.loads(json.dumps(body), object_hook=lambda d: {k: prompt if v == "hi" else v for k, v in d.items()})
    if path in ("/v1/completions", "/v1/chat/completions", "/completion", "/v1/messages"):
        if noise.random() < 0.3:
            body["stream"] = True
        if noise.random() < 0.2:
            body["temperature"] = 0.7
    if path in ("/v1/completions", "/v1/chat/completions"):
        if noise.random() < 0.3:
            body["request_id"] = noise.choice(NAMES)
        if noise.random() < 0.2:
            body["cache_salt"] = "mine"
        if noise.random() < 0.2:
            body["seed"] = noise.randrange(4)
    if path in ("/api/generate", "/api/chat") and noise.random() < 0.3:
        body["stream"] = True
    draw = noise.random()
    if draw < 0.05:
        body["temperature"] = noise.choice((-1, 1e9, "x"))
    elif draw < 0.09:
        body["model"] = "nothing"
    elif draw < 0.12:
        body["unknown"] = 1
    elif draw < 0.15:
        return Call(who, "POST", path, noise.choice((b"{", b"[]", b'{"a": 1, "a": 2}', b"\xff")))
    elif draw < 0.18:
        return Call(
            who, noise.choice(("GET", "PUT")), noise.choice(("/v1/models", "/v1/models/fake", "/nothing", "/props"))
        )
    return Call(who, "POST", path, body)


def lines(noise: random.Random, count: int, max_tokens: int) -> bytes:
    """A file of lines of a batch. No two begin alike, for they run at once, and either may find the other's blocks."""
    result = []
    for number in range(count):
        body = {"prompt": f"{chr(33 + number % 90)} {noise.random()}", "max_tokens": max_tokens, "ignore_eos": True}
        result.append({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
    return "\n".join(map(json.dumps, result)).encode()


def response(who: str, noise: random.Random) -> dict[str, Any]:
    """The body of a response: stored or not, one that continues another, with an id of the caller's."""
    body: dict[str, Any] = {"input": noise.choice(PROMPTS), "max_output_tokens": 3}
    draw = noise.random()
    if draw < 0.3:
        body["store"] = False
    if noise.random() < 0.4:
        body["request_id"] = noise.choice((*NAMES, f"<{who} resp_{noise.randrange(3)} bare>"))
    if noise.random() < 0.3:
        body["previous_response_id"] = f"<{who} resp_{noise.randrange(4)}>"
    if noise.random() < 0.2:
        body["stream"] = True
    elif draw >= 0.3 and noise.random() < 0.2:
        body["background"] = True
    return body


def stored(who: str, noise: random.Random) -> list[Call]:
    """A deed that keeps something, reads what is kept, or ends it."""
    draw, number = noise.random(), noise.randrange(4)
    if draw < 0.35:
        body = response(who, noise)
        calls = [Call(who, "POST", "/v1/responses", body)]
        return (
            [*calls, Call(who, "GET", f"/v1/responses/<{who} resp_-1>", manner="wait")]
            if "background" in body
            else calls
        )
    if draw < 0.5:
        size = noise.choice((1, 5, 40) if who == "bob" else (1, 5, 40, 150))
        return [Call(who, "POST", "/v1/files", (f"{number}.jsonl", lines(noise, size, 2)))]
    if draw < 0.65:
        expected = {"endpoint": "/v1/completions", "completion_window": "24h"}
        return [
            Call(who, "POST", "/v1/files", ("in.jsonl", lines(noise, 2, 3))),
            Call(who, "POST", "/v1/batches", {"input_file_id": f"<{who} file--1>", **expected}),
            Call(who, "GET", f"/v1/batches/<{who} batch_-1>", manner="wait"),
        ]
    method = noise.choice(("GET", "GET", "DELETE"))
    path = noise.choice(
        (f"/v1/files/<{who} file-{number}>", f"/v1/responses/<{who} resp_{number}>", "/v1/files", "/v1/batches",
         f"/v1/batches/<{who} batch_{number}>", f"/v1/responses/<{who} resp_{number}>/input_items",
         f"/v1/files/<{who} file-{number}>/content")
    )  # fmt: skip
    if noise.random() < 0.1:
        return [Call(who, "POST", f"/v1/batches/<{who} batch_{number}>/cancel")]
    return [Call(who, method if path.count("/") == 3 and "batches" not in path else "GET", path)]


def meddling(noise: random.Random) -> Call:
    """A call with an id of bob's that is not his."""
    number = noise.randrange(4)
    return noise.choice(
        (
            Call("alice", "DELETE", f"/v1/files/<bob file-{number}>"),
            Call("alice", "DELETE", f"/v1/responses/<bob resp_{number}>"),
            Call("alice", "POST", f"/v1/batches/<bob batch_{number}>/cancel"),
            Call("alice", "POST", f"/v1/responses/<bob resp_{number}>/cancel"),
            Call("alice", "GET", f"/v1/files/<bob file-{number}>/content"),
            Call("alice", "POST", "/v1/responses", {"input": "x", "store": False, "max_output_tokens": 2,
                                                    "request_id": f"<bob resp_{number} bare>"}),
            Call("alice", "POST", "/v1/responses", {"input": "x", "max_output_tokens": 2,
                                                    "previous_response_id": f"<bob resp_{number}>"}),
            Call("twin", "POST", "/v1/responses", {"input": "x", "store": False, "max_output_tokens": 2,
                                                   "cache_salt": "twin", "request_id": f"<bob resp_{number} bare>"}),
            Call("alice", "POST", "/v1/batches", {"input_file_id": f"<bob file-{number}>", "completion_window": "24h",
                                                  "endpoint": "/v1/completions"}),
        )
    )  # fmt: skip


def flood() -> list[Call]:
    """A batch of alice's that takes longer than bob waits."""
    expected = {"endpoint": "/v1/completions", "completion_window": "24h"}
    return [
        Call("alice", "POST", "/v1/files", ("long.jsonl", lines(random.Random(0), 300, 900))),
        Call("alice", "POST", "/v1/batches", {"input_file_id": "<alice file--1>", **expected}),
    ]


# -- both runs


class Rig:
    """What all houses share: the tokenizer, the template and the file of keys."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.load(write_tokenizer(folder))
        self.template = ChatTemplate.of(self.tokenizer)
        self.keys = rig.write_keys(folder)

    async def trace(self, program: list[Call]) -> list[str]:
        async with House(self.tokenizer, self.template, self.keys, LIMITS) as house:
            return await house.run(program)

    async def differences(self, program: list[Call]) -> list[str]:
        """What bob sees otherwise when alice is there; nothing if all is well."""
        alone = await self.trace([call for call in program if call.who == "bob"])
        beside = await self.trace(program)
        result = [f"alone:  {a}\nbeside: {b}" for a, b in zip(alone, beside, strict=False) if a != b]
        return result + (["another number of calls"] if len(alone) != len(beside) else [])


def run_campaign(num: int, seed: int) -> dict[str, Any]:
    """Random programs, each run twice."""
    with tempfile.TemporaryDirectory() as folder:
        counts, bad = asyncio.run(run_programs(Rig(Path(folder)), num, seed))
    return {"programs": num, **counts, "violations": len(bad), "examples": bad[:5]}


async def run_programs(shared: Rig, num: int, seed: int) -> tuple[Counter[str], list[str]]:
    """-> counts of calls, and the first difference of each program that has one."""
    counts: Counter[str] = Counter()
    bad: list[str] = []
    for number in range(seed * 10**6, seed * 10**6 + num):
        program = random_program(number)
        counts["calls_of_bob"] += sum(call.who == "bob" for call in program)
        counts["calls_of_alice"] += sum(call.who == "alice" for call in program)
        differences = await shared.differences(program)
        bad += [f"program {number}: {differences[0][:600]}"] if differences else []
    return counts, bad
