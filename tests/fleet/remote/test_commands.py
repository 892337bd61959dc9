"""The two commands of docs/howto-scale.md, with a real model: streams of many kinds have the bits of one host's, also
when the engine's host is killed in their midst."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable

import httpx
import pytest
from tests.campaigns.streams import Told, asked, is_whole, read, same
from tests.support.commands import run_command
from tests.support.remote import page_command
from tests.support.serving import await_metric, free_port, running, serve
from tests.support.shallow import shallow

KINDS = range(8)
"""Log-probabilities, n=2, a grammar, a chat, penalties, an echo, mirostat, a grammar with log-probabilities."""

NUM_TOKENS = 96
FEW = 8
"""Events of a stream after which an engine is stopped: so few that the streams are at work, however slow the reader."""


def command(name: str, port: int) -> list[str]:
    """The words of the page's command, for this model and port."""
    places = {"builtin": shallow(), "127.0.0.1:7070": f"127.0.0.1:{port}"}
    return page_command("bash", places, lambda words: words[:2] == ["headrace", name])


def engine(port: int) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """`headrace engine` in a process group of its own."""
    return running(command("engine", port), start_new_session=True)


async def streams(url: str, seen: Callable[[], None] = lambda: None) -> list[Told]:
    async with httpx.AsyncClient(timeout=300) as client:
        return await asyncio.gather(*(read(client, url, asked(kind, NUM_TOKENS), seen) for kind in KINDS))


def test_streams_have_the_bits_of_one_host_also_when_the_engine_is_killed() -> None:
    with serve(shallow(), "--served-model-name", "builtin", "--num-threads", "1") as local:
        expected = asyncio.run(streams(local.url))
    assert all(map(is_whole, expected))
    port = free_port()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(engine(port))
        # Through `serve` of the tests, which chooses the port.
        served = stack.enter_context(serve(*command("serve", port)[2:], "--served-model-name", "builtin"))
        assert served.num_engines() == 0
        assert all(map(same, asyncio.run(streams(served.url)), expected))
        num_events = 0

        def kill_in_the_middle() -> None:
            nonlocal num_events
            num_events += 1
            if num_events == FEW:
                os.kill(first.pid, signal.SIGKILL)
                stack.enter_context(engine(port))

        answers = asyncio.run(streams(served.url, kill_in_the_middle))
        assert first.wait(10) == -signal.SIGKILL
        assert all(map(same, answers, expected))
        await_metric(served.url, "headrace:engine_restarts", 1)


def test_streams_go_on_in_the_engine_of_another_host() -> None:
    """Of two engines one is killed with its server, and stays away."""
    ports = free_port(), free_port()
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(engine(port)) for port in ports]
        words = [*command("serve", ports[0])[2:], "--engine", f"127.0.0.1:{ports[1]}", "--router", "least-work"]
        served = stack.enter_context(serve(*words, "--served-model-name", "builtin"))
        expected = asyncio.run(streams(served.url))
        assert all(map(is_whole, expected))
        num_events = 0

        def kill_in_the_middle() -> None:
            nonlocal num_events
            num_events += 1
            if num_events == FEW:
                os.killpg(engines[0].pid, signal.SIGKILL)

        answers = asyncio.run(streams(served.url, kill_in_the_middle))
        assert engines[0].wait(10) == -signal.SIGKILL
        assert all(map(same, answers, expected))
        assert httpx.get(f"{served.url}/health/ready", timeout=240).status_code == 200
        await_metric(served.url, "headrace:replica_up", 0)


@pytest.mark.slow
def test_a_stopped_host_is_waited_for() -> None:
    """SIGSTOP of the engine and of its server: nothing comes, and the front asks again until it goes on."""
    port = free_port()
    with engine(port) as process, serve(*command("serve", port)[2:], "--served-model-name", "builtin") as served:
        before = asyncio.run(streams(served.url))
        num_events = 0

        def stop() -> None:
            nonlocal num_events
            num_events += 1
            if num_events == FEW:
                os.killpg(process.pid, signal.SIGSTOP)

        async def go() -> list[Told]:
            answers = asyncio.create_task(streams(served.url, stop))
            end = time.monotonic() + 100
            async with httpx.AsyncClient() as client:
                while (await client.get(f"{served.url}/health/ready")).status_code == 200:
                    assert time.monotonic() < end
                    await asyncio.sleep(0.2)
            os.killpg(process.pid, signal.SIGCONT)
            return await answers

        assert all(map(same, asyncio.run(go()), before))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve builtin --tls-ca x", "tls_ca"),
        ("serve builtin --engine 127.0.0.1:1", "fleet_secret_file"),
        ("serve builtin --engine 127.0.0.1", "an address such as"),
        ("serve builtin --engine [::1]:x", "an address such as"),
        ("serve builtin --engine a:1 --engine b:1 --engine a:1", "a different address each time"),
        ("serve builtin --engine a:1 --data-parallel-size 2", "given once for each engine"),
        ("serve builtin --engine a:1 --max-model-len 100", "it is set where the engine runs"),
        ("serve builtin --engine a:1 --slot-save-path x", "on another host"),
        ("engine builtin --listen 127.0.0.1:0", "fleet_secret_file"),
        ("engine builtin --listen 1.2.3.4:7070 FILES", "an address of this machine"),
    ],
)
def test_flags_at_fault_are_named(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = words.replace("FILES", " ".join(command("engine", 1)[5:]))
    done = run_command(monkeypatch, capsys, *text.split())
    assert done.code == 2
    assert message in done.err
