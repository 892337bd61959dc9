"""The commands of docs/howto-scale.md for ranks on two hosts, with a real model: streams of many kinds have the bits of
one process, also when the other host's `headrace rank` is killed in their midst."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Callable

import httpx
import pytest
from tests.campaigns.streams import Told, asked, is_whole, read, same
from tests.support.commands import run_command
from tests.support.remote import page_command
from tests.support.serving import await_metric, free_port, running, serve
from tests.support.shallow import shallow

KINDS = range(8)
MODEL = shallow(2)


def command(name: str, port: int, gathers: bool = True) -> list[str]:
    """The words of the page's command, for this model and port: of ranks with columns, or with layers."""
    places = {"builtin": MODEL, "127.0.0.1:7171": f"127.0.0.1:{port}"}

    def accepts(words: list[str]) -> bool:
        is_command = words[:2] == ["headrace", name] and "--rendezvous" in words
        return is_command and ("--distributed-interface" in words) == gathers

    return page_command("sh", places, accepts)


def rank(port: int, gathers: bool) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """`headrace rank`."""
    return running(command("rank", port, gathers))


async def streams(url: str, seen: Callable[[], None] = lambda: None) -> list[Told]:
    async with httpx.AsyncClient(timeout=300) as client:
        return await asyncio.gather(*(read(client, url, asked(kind, 48), seen) for kind in KINDS))


@pytest.mark.parametrize("gathers", [pytest.param(True, marks=pytest.mark.slow), False], ids=["columns", "layers"])
def test_streams_have_the_bits_of_one_process_also_when_a_rank_is_killed(gathers: bool) -> None:
    options = ("--served-model-name", "builtin", "--num-threads", "1")
    with serve(MODEL, *options) as local:
        expected = asyncio.run(streams(local.url))
    assert all(map(is_whole, expected))
    port = free_port()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(rank(port, gathers))
        served = stack.enter_context(serve(*command("serve", port, gathers)[2:], *options))
        num_events = 0

        def kill_in_the_middle() -> None:
            nonlocal num_events
            num_events += 1
            if num_events == 8:
                first.kill()
                stack.enter_context(rank(port, gathers))

        assert all(map(same, asyncio.run(streams(served.url, kill_in_the_middle)), expected))
        assert num_events > 8
        await_metric(served.url, "headrace:engine_restarts_total", 1)


RANK = "rank builtin --world 2 --rendezvous 127.0.0.1:1 --distributed-interface lo"
SERVE = "serve builtin --rendezvous 127.0.0.1:0 --distributed-interface lo"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{RANK} --rank 0", "rank: 0 is not allowed; it must be from 1 to 1, for --world 2"),
        (f"{RANK} --rank 2", "rank: 2"),
        (f"{RANK} --rank 1", "fleet_secret_file"),
        (f"{RANK} --rank 1 --num-threads -1", "num_threads"),
        (f"{RANK.replace('lo', 'none0')} --rank 1", "distributed_interface: 'none0'"),
        (f"{RANK.replace(' --distributed-interface lo', '')} --rank 1", "fleet_secret_file"),
        (f"{RANK.replace(':1', '')} --rank 1", "an address such as"),
        (f"{SERVE} FILES", "left out with tensor_parallel_size 1 and pipeline_parallel_size 1"),
        (f"{SERVE} --tensor-parallel-size 2", "fleet_secret_file"),
        (f"{SERVE} FILES --tensor-parallel-size 2 --data-parallel-size 2", "data_parallel_size: '2'"),
        (f"{SERVE} FILES --tensor-parallel-size 2 --models-dir x", "models_dir: 'x'"),
        (f"{SERVE} FILES --tensor-parallel-size 2 --enable-expert-parallel", "left out with rendezvous"),
        (f"{SERVE} FILES --pipeline-parallel-size 2", "left out with pipeline_parallel_size"),
        (f"{SERVE} FILES --tensor-parallel-size 2 --engine a:1", "it is set where the engine runs"),
        ("serve builtin --tensor-parallel-size 2 --distributed-interface lo", "left out without --rendezvous"),
        ("serve builtin --tensor-parallel-size 2 --rendezvous 127.0.0.1:0 FILES", "an interface in a trusted network"),
        ("serve builtin --nnodes 2", "headrace rank"),
    ],
)
def test_flags_at_fault_are_named(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serving = command("serve", 1)
    text = words.replace("FILES", " ".join(serving[serving.index("--fleet-secret-file") :]))
    done = run_command(monkeypatch, capsys, *text.split())
    assert done.code == 2
    assert message in " ".join(done.err.split())
