"""The real engine on the built-in model under clients that vanish, send garbage, come all at once, and a dying engine.

Whatever they do, nobody else notices, nothing hangs, and the KV cache is empty again afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from tests.support.serving import Served, gauge, serve, wait_for
from tests.support.shallow import shallow

PROMPT = {"prompt": "Once upon a time", "temperature": 0.8, "seed": 5, "ignore_eos": True}
USAGE = "headrace:kv_cache_usage_perc"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    bounds = ("--max-num-seqs", "32", "--num-gpu-blocks-override", "512", "--max-num-queued-reqs", "100")
    with serve(shallow(), "--served-model-name", "builtin", *bounds) as server:
        yield server


def ask(url: str, **more: object) -> dict[str, object]:
    reply = httpx.post(f"{url}/v1/completions", json=PROMPT | {"max_tokens": 24} | more, timeout=240)
    assert reply.status_code == 200, reply.text
    choice: dict[str, object] = reply.json()["choices"][0]
    return choice


async def hang_up(url: str, num_events: int) -> None:
    async with httpx.AsyncClient(timeout=240) as client:
        body = PROMPT | {"max_tokens": 900, "stream": True}
        async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            lines = reply.aiter_lines()
            for _ in range(num_events):
                await anext(lines)


def test_R_04_clients_that_vanish_in_mid_stream_leave_nothing_behind(served: Served) -> None:
    alone = ask(served.url)

    async def all_at_once() -> None:
        await asyncio.gather(*(hang_up(served.url, 2 + i) for i in range(20)))

    asyncio.run(all_at_once())
    wait_for(served.url, USAGE, 0.0)
    assert gauge(served.url, "headrace:num_requests_running") == 0
    assert ask(served.url) == alone


GARBAGE = [
    b"\x00\xff\xfe" * 1000,
    b"GET / HTTP/1.1\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"a":\xff\xff}',
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n[[[[",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    os.urandom(4096),
]


def test_garbage_on_the_socket_harms_nobody(served: Served) -> None:
    alone = ask(served.url)
    where = urlsplit(served.url)
    for garbage in GARBAGE:
        with socket.create_connection((where.hostname or "", where.port or 0), timeout=10) as connection:
            connection.sendall(garbage)
            connection.settimeout(0.3)
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                connection.recv(4096)
    assert ask(served.url) == alone
    wait_for(served.url, USAGE, 0.0)


def test_R_12_two_hundred_requests_at_once(served: Served) -> None:
    """With room for 32 to run and 100 to wait, some are refused until later; all others get their own text."""
    alone = [ask(served.url, seed=seed)["text"] for seed in range(4)]

    async def all_at_once() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=100, limits=limits) as client:
            bodies = (PROMPT | {"max_tokens": 24, "seed": i % 4} for i in range(200))
            return await asyncio.gather(*(client.post(f"{served.url}/v1/completions", json=body) for body in bodies))

    replies = asyncio.run(all_at_once())
    statuses = [reply.status_code for reply in replies]
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 100
    for i, reply in enumerate(replies):
        if reply.status_code == 200:
            assert reply.json()["choices"][0]["text"] == alone[i % 4]
        else:
            assert int(reply.headers["retry-after"]) >= 1
    wait_for(served.url, USAGE, 0.0)
    assert gauge(served.url, "headrace:num_requests_waiting") == 0


def test_a_killed_engine_costs_a_pause_and_no_token(served: Served) -> None:
    """Streams that were open when the engine was killed end with the text that an undisturbed run gives."""
    whole = [ask(served.url, seed=seed, max_tokens=160)["text"] for seed in range(4)]
    killed = asyncio.Event()

    async def read(seed: int) -> str:
        text = ""
        async with httpx.AsyncClient(timeout=240) as client:
            body = PROMPT | {"max_tokens": 160, "seed": seed, "stream": True}
            async with client.stream("POST", f"{served.url}/v1/completions", json=body) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                    if len(text) > 80 and not killed.is_set():
                        killed.set()
                        served.engine().kill()
        return text

    async def read_all() -> list[str]:
        return await asyncio.gather(*(read(seed) for seed in range(4)))

    first = served.engine().pid
    assert asyncio.run(read_all()) == whole
    assert killed.is_set()
    assert served.engine().pid != first
    assert not psutil.pid_exists(first)
    wait_for(served.url, USAGE, 0.0)
