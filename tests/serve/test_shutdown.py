"""R-23: a server that was asked to end is left by load balancers first, and then drains."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from tests.campaigns.connections import VirtualLoop, virtual
from tests.serve.test_faults import LONG, Served
from tests.support.server import HTTP, Live

from headrace.serve.process import Server


def reply_to(served: Served, path: str, body: Any = None) -> httpx.Response:
    return HTTP.get(served.url + path) if body is None else HTTP.post(served.url + path, json=body)


def test_R_23_before_the_drain_calls_are_taken_and_probes_say_draining(tmp_path: Path) -> None:
    with Served(tmp_path, delay=0.001, leave=600.0) as served:
        served.process.send_signal(signal.SIGTERM)
        Live.wait(lambda: reply_to(served, "/health/ready").status_code == 503)
        assert reply_to(served, "/health/ready").json()["status"] == "draining"
        assert reply_to(served, "/health/live").status_code == 200
        # On new connections, with an answer that is whole; each connection ends with its reply.
        for _ in range(3):
            reply = reply_to(served, "/v1/completions", dict(LONG, max_tokens=20))
            assert reply.status_code == 200
            assert reply.json()["usage"]["completion_tokens"] == 20
            assert reply.headers["connection"] == "close"
        with HTTP.stream("POST", served.url + "/v1/completions", json=dict(LONG, stream=True)) as stream:
            lines = stream.iter_lines()
            next(lines)
            # The second one ends the delay, and the drain begins: the stream still comes to its end.
            served.process.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]"
        assert served.end()[0] == 0


SIGNALS: dict[str, tuple[float, list[tuple[float, signal.Signals]], dict[float, tuple[bool, bool, bool]]]] = {
    "the delay ends": (5.0, [(0, signal.SIGTERM)], {4.9: (True, False, False), 5.1: (True, True, False)}),
    "a second one ends it": (
        5.0,
        [(0, signal.SIGTERM), (1, signal.SIGTERM)],
        {0.9: (True, False, False), 1.1: (True, True, False), 9.0: (True, True, False)},
    ),
    "a third one ends the drain": (5.0, [(0, signal.SIGTERM)] * 3, {0.1: (True, True, True)}),
    "Ctrl-C does not wait": (5.0, [(0, signal.SIGINT)], {0.1: (True, True, False)}),
    "no delay": (0.0, [(0, signal.SIGTERM)], {0.1: (True, True, False)}),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_R_23_what_a_signal_does_and_when(name: str) -> None:
    """At these times: whether probes fail, whether the drain has begun, whether it is skipped."""
    delay, signals, states = SIGNALS[name]

    class Drained:
        draining = is_cut = False
        num_drains = num_open = 0

        def drain(self, seconds: float) -> None:
            self.draining = True
            self.num_drains += 1

    async def run(loop: VirtualLoop) -> None:
        lifespan = Drained()
        server = Server(uvicorn.Config(lambda: None, log_config=None), lifespan, delay, 30.0)  # type: ignore[arg-type]
        for at, number in signals:
            loop.call_later(at, server._on_signal, number)
        for at, state in states.items():
            await asyncio.sleep(at - loop.time())
            assert (lifespan.draining, server.should_exit, server.force_exit) == state
        assert lifespan.num_drains == 1

    with virtual() as loop:
        loop.run_until_complete(run(loop))
