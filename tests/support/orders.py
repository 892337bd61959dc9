"""The table of docs/states.md: its rows, the calls that stand for them, and a server in each of its states."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT
from tests.support.gated import Server, serving

from headrace.serve.call.states import State
from headrace.text.tokenizer import Tokenizer

PAGE = ROOT / "docs" / "states.md"
STATES = [State.LOADING, State.READY, State.SLEEPING, State.WAKING, State.RESTARTING, State.DRAINING]
"""The columns."""
COMPLETION = {"model": "fake", "prompt": "x", "max_tokens": 4, "seed": 1}
BLOB = f"/api/blobs/sha256:{hashlib.sha256(b'{}').hexdigest()}"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,
    "max_position_embeddings": 512,
}  # fmt: skip
BODIES: dict[str, Any] = {
    "POST /api/copy": {"source": "tiny", "destination": "second"},
    "POST /api/create": {"model": "third", "from": "tiny", "stream": False},
    "POST /api/pull": {"model": "tiny", "stream": False},
    "DELETE /api/delete": {"model": "second"},
    "POST /fleet/update": {},
    "POST /inspect/hold": {},
    "POST /inspect/plan": {"config": LLAMA, "hardware": "h100"},
    "POST /lora-adapters": [],
    "POST /v1/completions": COMPLETION,
    "POST /v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
    "POST /v1/unload_lora_adapter": {"lora_name": "a"},
}
"""Of the calls that have one."""
PATHS = {"/api/blobs/{digest}": BLOB, "/v1/models/{name}": "/v1/models/fake"}
"""Of the routes whose paths have parts of the caller's."""
CELL = re.compile(r"(\d{3})( after it)?")


def rows() -> dict[str, dict[State, tuple[int, bool]]]:
    """The table: for each route and state the status of the reply, and whether it comes after the state has ended."""
    table: dict[str, dict[State, tuple[int, bool]]] = {}
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for line in lines:
        names, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        matches = [CELL.fullmatch(cell) for cell in cells]
        assert all(matches), line
        row = {s: (int(each[1]), bool(each[2])) for s, each in zip(STATES, matches, strict=True) if each is not None}
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in table, name
            table[name] = row
    return table


async def outcome(server: Server, route: str) -> tuple[int, bool]:
    """Call a route in a state that lasts. Return the status, and whether it came only after the state's end."""
    reply = asyncio.create_task(call(server, route))
    await asyncio.wait({reply}, timeout=20.0 if server.gate.is_set() else 2.0)
    waits = not reply.done()
    server.gate.set()
    return await reply, waits


async def call(server: Server, route: str) -> int:
    """Call a row's route, and return the status."""
    method, path = route.split(" ")
    reply = await server.call(f"{method} {PATHS.get(path, path)}", BODIES.get(route, {} if method == "POST" else None))
    assert "Traceback" not in reply.text, reply.text
    if reply.status_code == 503 and "/health" not in path and path != "/ping":
        assert "error" in reply.json(), (route, reply.text)
    return reply.status_code


@contextlib.asynccontextmanager
async def held(state: State, tokenizer: Tokenizer, root: Path, is_fleet: bool = False) -> AsyncIterator[Server]:
    """A server that stays in `state` until its gate is opened."""
    async with serving(tokenizer, root, is_open=state is not State.LOADING, is_fleet=is_fleet) as server:
        if state is not State.LOADING:
            await server.until(lambda: server.lifespan.models.sleep.state is State.READY)
        order: asyncio.Task[Any] | None = None
        if state in (State.SLEEPING, State.WAKING):
            assert await call(server, "POST /sleep") == 200
        if state in (State.WAKING, State.RESTARTING):
            server.gate.clear()
        match state:
            case State.WAKING:
                order = asyncio.create_task(server.call("POST /wake_up"))
            case State.RESTARTING:
                server.kill()
            case State.DRAINING:
                server.lifespan.draining = True
        await server.until(lambda: server.lifespan.state is state)
        try:
            yield server
        finally:
            server.gate.set()
            if order is not None:
                assert (await order).status_code == 200
