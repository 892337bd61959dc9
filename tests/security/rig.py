"""The route table as the tests of this tier see it, servers with locks, and bodies with something put into every field.

`ACCESS` is written by hand: a route that is not in it, or opens to another class of keys, is red. `BODIES` (of
tests/serve) has a valid body for each POST route; a new one is red there until it has.
"""

from __future__ import annotations

import asyncio
import copy
import re
import socket
from collections.abc import Callable, Iterator
from json import dumps as encode
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
from starlette.applications import Starlette
from tests.serve.test_refusals import BODIES, NO_BODY
from tests.support.server import Live

from headrace.serve.aliases import ALIASES

FORMS = {"/v1/batches": {"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h"}}
READS = ("GET", "HEAD")

# "METHOD path" to the class of keys that opens it; HEAD is GET's.
ACCESS = dict.fromkeys(["GET /health/live", "GET /", "GET /inspect", "GET /inspector/{name:path}"], "public")
ACCESS |= dict.fromkeys(
    [
        "GET /version",
        "GET /ping",
        "POST /ping",
        "GET /health",
        "GET /health/ready",
        "GET /health/serving",
        "GET /is_sleeping",
        "GET /openapi.json",
        "GET /docs",
        "GET /v1/health",
    ],
    "any",
)
ACCESS |= dict.fromkeys(["GET /metrics", "GET /load", "GET /slots", "GET /fleet"], "metrics")
ACCESS |= dict.fromkeys(
    [
        "POST /api/push",
        "POST /api/create",
        "POST /api/copy",
        "DELETE /api/delete",
        "POST /props",
        "POST /api/pull",
        "POST /sleep",
        "POST /wake_up",
        "POST /lora-adapters",
        "POST /reset_prefix_cache",
        "GET /inspect/live",
        "GET /inspect/requests",
        "GET /inspect/cache",
        "GET /inspect/limits",
        "GET /inspect/numbers",
        "POST /inspect/hold",
        "POST /inspect/recording",
        "POST /inspect/plan",
        "POST /fleet/update",
        "GET /server_info",
        "POST /v1/load_lora_adapter",
        "POST /v1/unload_lora_adapter",
    ],
    "admin",
)
ACCESS |= dict.fromkeys([f"POST {path}" for path in BODIES if path != "/api/pull"], "infer")
ACCESS |= dict.fromkeys(
    [
        "POST /infill",
        "POST /slots/{slot_id}",
        "POST /classify",
        "POST /predict",
        "POST /embed_sparse",
        "GET /info",
        "GET /tokenizer_info",
        "GET /models",
        "GET /props",
        "GET /lora-adapters",
        "GET /api/tags",
        "GET /api/ps",
        "GET /api/version",
        "GET /v1/models",
        "GET /v1/models/{name:path}",
        "GET /v1/requests/{name}/explain",
        "POST /v1/files",
        "GET /v1/files",
        "GET /v1/files/{file_id}",
        "GET /v1/files/{file_id}/content",
        "DELETE /v1/files/{file_id}",
        "POST /v1/batches",
        "GET /v1/batches",
        "GET /v1/batches/{batch_id}",
        "POST /v1/batches/{batch_id}/cancel",
        "POST /v1/responses/compact",
        "GET /v1/conversations/{conversation_id}",
        "POST /v1/conversations/{conversation_id}",
        "DELETE /v1/conversations/{conversation_id}",
        "GET /v1/conversations/{conversation_id}/items",
        "POST /v1/conversations/{conversation_id}/items",
        "GET /v1/conversations/{conversation_id}/items/{item_id}",
        "DELETE /v1/conversations/{conversation_id}/items/{item_id}",
        "GET /v1/responses/{response_id}",
        "GET /v1/responses/{response_id}/input_items",
        "DELETE /v1/responses/{response_id}",
        "POST /v1/responses/{response_id}/cancel",
    ],
    "infer",
)
ACCESS |= {f"POST {alias}": ACCESS[f"POST {path}"] for alias, path in ALIASES.items() if path in BODIES}

ALICE, BOB, PROBE, ROOT = "alice-key-1234", "bob-key-1234", "probe-key-1234", "root-key-1234"
KEY_FILE = f"""
[alice]
key = ["{ALICE}", "alice-old-key"]
[bob]
key = "{BOB}"
[prometheus]
key = "{PROBE}"
classes = ["metrics"]
[root]
key = "{ROOT}"
classes = ["admin"]
"""
OPENS = {"any": {ALICE, BOB, PROBE, ROOT}, "infer": {ALICE, BOB, ROOT}, "metrics": {PROBE, ROOT}, "admin": {ROOT}}


def write_keys(folder: Path, text: str = KEY_FILE) -> str:
    """A file of keys."""
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def routes(app: Starlette) -> list[tuple[str, str]]:
    """(method, path as it is written in the table) of all that is answered."""
    return [
        (method, getattr(route, "path", ""))
        for route in app.routes
        for method in sorted(getattr(route, "methods", None) or {"GET"})
    ]


def concrete(path: str) -> str:
    """A path of the table with its parameters filled in."""
    return re.sub(r"{\w+(?::path)?}", "fake" if path.startswith("/v1/models") else "x-1", path)


def access_of(method: str, path: str) -> str:
    """What `ACCESS` says. KeyError: it says nothing."""
    return ACCESS[f"{'GET' if method == 'HEAD' else method} {path}"]


def uncovered(app: Starlette) -> set[str]:
    """Routes that the tables of these tests do not have, or that they have and the server has not."""
    there = {f"{'GET' if method == 'HEAD' else method} {path}" for method, path in routes(app)}
    bodies = {
        f"POST {path} (its body)"
        for method, path in routes(app)
        if method == "POST" and path not in NO_BODY and path not in ALIASES
    }
    return (there | bodies) ^ (set(ACCESS) | {f"POST {path} (its body)" for path in BODIES})


def posts() -> list[str]:
    """Paths that take a JSON body."""
    return [*BODIES, *FORMS]


def body_of(path: str) -> dict[str, Any]:
    """A body that the route takes, or nearly; its answer is short."""
    result = copy.deepcopy(BODIES[path][1] if path in BODIES else FORMS[path])
    return result | ({"options": {"num_predict": 2}} if path in ("/api/generate", "/api/chat") else {})


def planted(body: Any, value: Any) -> Iterator[Any]:
    """Copies of `body` with `value` in the place of one text each, wherever it is, and as a field of its own."""
    for where in places(body):
        result = copy.deepcopy(body)
        inner = result
        for key in where[:-1]:
            inner = inner[key]
        inner[where[-1]] = value
        yield result
    if isinstance(body, dict):
        yield body | {"x": value}


def places(body: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where `body` holds texts."""
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in items:
        if isinstance(value, str):
            yield (*above, key)
        yield from places(value, (*above, key))


def raw(live: Live, text: bytes, seconds: float = 10.0) -> bytes:
    """What the server says to these bytes, until it hangs up or says nothing more."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=seconds) as client:
        client.sendall(text)
        reply = b""
        try:
            while data := client.recv(65536):
                reply += data
        except (TimeoutError, ConnectionResetError):
            pass
        return reply


def head(method: str, path: str, *lines: str) -> bytes:
    """The bytes of a request's head."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode("latin-1")


def call(live: Live, method: str, path: str, **more: Any) -> httpx.Response:
    """One call to the application of a running server, past its socket: a tenth of the work, for sweeps over routes.

    `path` may be one of the table. What is between socket and application is tried by `raw`. `more`: see `begin`.
    """
    return begin(live, method, path, **more)()


def begin(
    live: Live,
    method: str,
    path: str,
    *,
    headers: dict[str, str] | None = None,
    content: bytes = b"",
    json: Any = None,
    query: str = "",
) -> Callable[[], httpx.Response]:
    """A call that goes on beside others. -> what waits for its reply."""
    body = content if json is None else encode(json).encode()
    target = concrete(path)
    inputs = {"host": "localhost", "content-length": str(len(body))} | (
        {"content-type": "application/json"} if json else {}
    )
    messages = [(name.lower().encode(), value.encode("latin-1")) for name, value in (inputs | (headers or {})).items()]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": method}
    scope |= {"path": unquote(target), "raw_path": target.encode(), "query_string": query.encode(), "root_path": ""}
    scope |= {"headers": messages, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", live.port), "state": {}}
    output: list[dict[str, Any]] = []

    async def work() -> None:
        bodies = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return bodies.pop() if bodies else await asyncio.Event().wait()  # type: ignore[return-value]

        async def send(message: dict[str, Any]) -> None:
            output.append(message)

        await live.app(scope, receive, send)

    task = asyncio.run_coroutine_threadsafe(work(), live.server.servers[0].get_loop())

    def reply() -> httpx.Response:
        task.result(60)
        text = b"".join(message.get("body", b"") for message in output[1:])
        return httpx.Response(output[0]["status"], headers=output[0]["headers"], content=text)

    return reply
