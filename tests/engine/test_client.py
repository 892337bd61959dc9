"""The engine client over both links: same answers, bounds on the queue, and deaths that nobody sees."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from tests.support import fake
from tests.support.server import child, inproc

from headrace.core.requests import verify_model
from headrace.engine import replica as engine_replica
from headrace.engine.client import EngineClient
from headrace.engine.links import ProcessLink
from headrace.engine.open_requests import RequestStream
from headrace.insight.simulated import Oracle
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import (
    CheckpointError,
    ContextLengthError,
    EngineDeadError,
    HeadraceError,
    QueueFullError,
    RequestError,
)
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Abort, EngineInfo, Finish, Request
from headrace.protocol.watchdog import Watchdog
from headrace.text.inputs import new_request_id
from headrace.text.outputs import Delta

Answer = tuple[list[int], list[float], list[float], Finish | None]


def request(prompt: list[int] | None = None, **params: object) -> Request:
    inputs = {"max_tokens": 20, "seed": 1, "ignore_eos": True} | params
    return Request(
        request_id=new_request_id(),
        prompt_token_ids=prompt or [1, 2, 3],
        params=SamplingParams(**inputs),  # type: ignore[arg-type]
    )


def requests(count: int, num_tokens: int = 10) -> list[Request]:
    """Requests of at least `num_tokens` tokens each, of different lengths."""
    return [
        request([1, 2, 3, i], seed=i, logprobs=1, prompt_logprobs=0, max_tokens=num_tokens + i) for i in range(count)
    ]


# So long that an engine which goes on while its reader gets no processor is not done before the reader strikes.
LONG = 80


async def read(stream: RequestStream, at: dict[int, Callable[[], object]] | None = None) -> dict[int, Answer]:
    """All that comes; `at` has what to do after so many tokens of answer 0."""
    whole: dict[int, Delta] = {}
    async with stream:
        async for deltas in stream:
            for index, delta in deltas:
                if index in whole:
                    whole[index].merge(delta)
                else:
                    whole[index] = delta
            for num in [n for n in at or {} if 0 in whole and len(whole[0].token_ids) >= n]:
                (at or {}).pop(num)()
    return {
        index: (
            delta.token_ids,
            [x.logprob for x in delta.logprobs],
            [x.logprob for x in delta.prompt_logprobs],
            delta.finish,
        )
        for index, delta in whole.items()
    }


def run(client: EngineClient, work: Callable[[EngineClient], Awaitable[object]]) -> object:
    async def go() -> object:
        await client.start()
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(go())


def pid_of(client: EngineClient) -> int:
    pid = client.replicas[0].link.pid  # type: ignore[attr-defined]
    assert pid is not None
    return int(pid)


def undisturbed(result: list[Request]) -> object:
    return run(inproc(), lambda client: read(client.submit(result)))


def test_both_links_give_what_the_oracle_says() -> None:
    result = requests(6)
    answers = undisturbed(result)
    assert isinstance(answers, dict)
    for index, one in enumerate(result):
        assert answers[index][0] == Oracle(fake.VOCAB_SIZE, [fake.EOS]).stream(one, 2048)
        assert len(answers[index][1]) == len(answers[index][0])
        assert len(answers[index][2]) == len(one.prompt_token_ids) - 1
        assert answers[index][3] == Finish("length")
    assert run(child(), lambda client: read(client.submit(result))) == answers


def test_a_killed_engine_is_a_pause_and_nothing_else() -> None:
    """Promise 2: same ids, same logprobs, each once, though the process died twice."""
    result = requests(8, LONG)
    client = child(delay=0.01)

    async def work(client: EngineClient) -> object:
        kill = lambda: os.kill(pid_of(client), signal.SIGKILL)  # noqa: E731
        return await read(client.submit(result), {2: kill, 6: kill})

    answers = run(client, work)
    assert client.num_restarts == 2
    assert answers == undisturbed(result)


def test_what_follows_the_engine_hears_which_requests_go_on_in_the_next_one() -> None:
    """A request that was aborted before its engine could note that is not open any more."""
    ends: list[list[str]] = []

    class Ends:
        def on_end(self, request_ids: Collection[str], replica: int = 0) -> None:
            ends.append(list(request_ids))

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args: None

    first, second = requests(2, LONG)

    async def work(client: EngineClient) -> object:
        client.observer = Ends()
        aborted, stays = client.submit([first]), client.submit([second])

        def abort_and_kill() -> None:
            aborted.close()
            os.kill(pid_of(client), signal.SIGKILL)

        return await read(stays, {2: abort_and_kill})

    run(child(delay=0.01), work)
    assert ends == [[second.request_id], []]


def test_control_a_client_that_forgets_what_it_delivered_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.engine.open_requests import OpenRequest

    monkeypatch.setattr(OpenRequest, "resumed", lambda self: self.request)
    result = requests(8, LONG)

    async def work(client: EngineClient) -> object:
        return await read(client.submit(result), {6: lambda: os.kill(pid_of(client), signal.SIGKILL)})

    assert run(child(delay=0.01), work) != undisturbed(result)


def test_R_02_a_frozen_engine_is_killed_and_its_streams_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """SIGSTOP in mid-answer: found by the steps that do not come, stacks shown, replaced; same bits as undisturbed."""
    result = requests(8, LONG)
    client = child(delay=0.01)
    client.replicas[0].watchdog = Watchdog(1.0)

    async def work(client: EngineClient) -> object:
        return await read(client.submit(result), {3: lambda: os.kill(pid_of(client), signal.SIGSTOP)})

    answers = run(client, work)
    assert client.num_restarts == 1
    assert answers == undisturbed(result)
    assert "most recent call first" in caplog.text


def test_R_02_an_engine_that_freezes_while_idle_is_found_too() -> None:
    client = child()
    client.replicas[0].watchdog = Watchdog(1.0)

    async def work(client: EngineClient) -> object:
        os.kill(pid_of(client), signal.SIGSTOP)
        while not client.num_restarts:
            await asyncio.sleep(0.02)
        return await read(client.submit(requests(2)))

    assert run(client, work) == undisturbed(requests(2))


def test_R_02_an_engine_that_freezes_while_it_starts_is_found_too(caplog: pytest.LogCaptureFixture) -> None:
    client = child()
    client.replicas[0].watchdog = Watchdog(1.0)

    async def work(client: EngineClient) -> object:
        client.replicas[0].start_seconds = 1000.0  # A start may take long.
        first = pid_of(client)
        os.kill(first, signal.SIGKILL)
        while client.replicas[0].link.pid in (None, first):  # type: ignore[attr-defined]
            await asyncio.sleep(0.005)
        os.kill(pid_of(client), signal.SIGSTOP)
        async with asyncio.timeout(60):
            return await read(client.submit(requests(2)))

    assert run(client, work) == undisturbed(requests(2))
    assert "the engine did not start within" in caplog.text


def test_control_without_a_watchdog_a_frozen_engine_hangs() -> None:
    client = child(delay=0.005)
    client.replicas[0].watchdog = Watchdog(0)

    async def work(client: EngineClient) -> object:
        stream = client.submit([request(max_tokens=1500)])
        pid = pid_of(client)
        await stream.__anext__()
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await read(stream)
        finally:
            os.kill(pid, signal.SIGKILL)
        return client.num_restarts

    assert run(client, work) == 0


def test_R_01_after_too_many_deaths_every_stream_gets_an_honest_error() -> None:
    client = child(delay=0.005, max_restarts=1)

    async def work(client: EngineClient) -> None:
        async def kill_all() -> None:
            while not client.dead.is_set():
                if client.is_alive:
                    os.kill(pid_of(client), signal.SIGKILL)
                await asyncio.sleep(0.02)

        streams = [client.submit([request(max_tokens=500)]) for _ in range(4)]
        killer = asyncio.create_task(kill_all())
        for stream in streams:
            with pytest.raises(EngineDeadError, match="restarted 1 times"):
                await read(stream)
        await killer
        assert not client.is_alive
        assert client.num_unfinished == client.num_waiting == 0
        with pytest.raises(EngineDeadError):
            client.submit([request()])

    run(client, work)


@pytest.mark.parametrize("pause", [engine_replica.SHORTAGE_S, 0.0], ids=["", "control"])
def test_R_01_a_shortage_of_descriptors_at_a_restart_may_pass(pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_replica, "SHORTAGE_S", pause)
    client = child(delay=0.005, max_restarts=5)

    async def work(client: EngineClient) -> None:
        link, loop = client.replicas[0].link, asyncio.get_running_loop()
        start, end = link.start, loop.time() + 1.0

        async def short(*args: Any) -> Any:
            if loop.time() < end:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return await start(*args)

        monkeypatch.setattr(link, "start", short)
        stream = client.submit([request(max_tokens=200)])
        os.kill(pid_of(client), signal.SIGKILL)
        if pause:
            assert len((await read(stream))[0][0]) == 200
        else:
            with pytest.raises(EngineDeadError, match="restarted 5 times"):
                await read(stream)

    run(client, work)


def test_a_refusal_to_start_keeps_its_reason(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(
        "import sys\nfrom headrace.protocol.errors import CheckpointError\nfrom headrace.engine.child import main\n"
        "def build(config, is_restart):\n    raise CheckpointError('config.json is missing')\n"
        "sys.exit(main(int(sys.argv[1]), build))\n"
    )
    client = EngineClient(ProcessLink(EngineConfig(), (sys.executable, str(script))), max_restarts=3)
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        asyncio.run(client.start())
    with pytest.raises(HeadraceError, match="ended while it started"):
        asyncio.run(EngineClient(ProcessLink(EngineConfig(), (sys.executable, "-c", "")), max_restarts=3).start())


def test_S_01_garbage_from_the_engine_ends_it(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text("import os, sys, time\nos.write(int(sys.argv[1]), b'\\4\\0\\0\\0abcd')\ntime.sleep(60)\n")
    client = EngineClient(ProcessLink(EngineConfig(), (sys.executable, str(script))))
    started = time.monotonic()
    with pytest.raises(HeadraceError, match="not a message from the engine"):
        asyncio.run(client.start())
    assert time.monotonic() - started < 50


def test_R_12_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    client = inproc(delay=0.01, max_num_seqs=1)
    client.admission.max_reqs, client.admission.max_tokens = 4, 100

    async def work(client: EngineClient) -> None:
        running = client.submit([request(max_tokens=100)])
        await running.__anext__()
        assert client.num_waiting == 0
        waiting = [client.submit([request()]) for _ in range(4)]
        with pytest.raises(QueueFullError) as refused:
            client.submit([request()])
        assert 1 <= refused.value.retry_after <= 60
        assert client.num_waiting == 4
        for stream in waiting:
            stream.close()
        assert (client.num_waiting, client.admission.num_waiting_tokens) == (0, 0)
        many = client.submit([request([1] * 60)])
        with pytest.raises(QueueFullError):
            client.submit([request([1] * 60)])
        many.close()
        with pytest.raises(RequestError, match="at most 4 answers"):
            client.submit([request() for _ in range(5)])
        with pytest.raises(ContextLengthError):
            client.verify([request(), request([1] * 5000)])
        assert client.num_waiting == 0
        running.close()

    run(client, work)


def test_admission_is_asked_once_and_a_request_checked_once_on_each_side(monkeypatch: pytest.MonkeyPatch) -> None:
    client, batch = inproc(), requests(3)
    works: list[list[int]] = []
    admit = client.admission.admit
    monkeypatch.setattr(client.admission, "admit", lambda *args: (works.append(args[0]), admit(*args)))
    checks: list[str] = []

    def counted(request: Request, info: EngineInfo) -> None:
        checks.append(request.request_id)
        verify_model(request, info)

    monkeypatch.setattr("headrace.engine.core.verify_model", counted)

    async def work(client: EngineClient) -> None:
        client.verify(batch)
        await read(client.submit(batch))

    run(client, work)
    assert [len(work) for work in works] == [3]
    assert Counter(checks).items() >= {(request.request_id, 2) for request in batch}


def test_R_04_leaving_a_stream_frees_its_blocks() -> None:
    async def work(client: EngineClient) -> None:
        async with client.submit([request(max_tokens=500) for _ in range(8)]) as stream:
            await stream.__anext__()
            await stream.__anext__()
            assert client.stats.num_blocks_held > 0
        assert client.num_unfinished == 0
        end = time.monotonic() + 60
        while client.stats.num_blocks_held or client.stats.num_running:
            assert time.monotonic() < end, client.stats
            await asyncio.sleep(0.005)

    run(child(delay=0.002), work)


def test_R_05_aborts_that_hit_nothing_harm_nobody() -> None:
    result = requests(3)

    async def work(client: EngineClient) -> object:
        stream = client.submit(result)
        ended = request(max_tokens=1)
        await read(client.submit([ended]))
        for _ in range(3):
            for request_id in ("nobody", ended.request_id):
                client.abort(request_id)
                # An abort on its way when the request ends.
                client.replicas[0].link.post(Abort(request_id))
        done = await read(stream)
        assert client.num_restarts == 0
        return done

    assert run(child(), work) == undisturbed(result)


def test_R_14_deltas_of_a_slow_reader_are_merged() -> None:
    async def work(client: EngineClient) -> None:
        slow = client.submit([request(max_tokens=200)])
        fast = await read(client.submit([request(max_tokens=200)]))
        deltas = [delta async for batch in slow for _, delta in batch]
        assert len(deltas) == 1
        assert deltas[0].token_ids == fast[0][0]

    run(inproc(), work)


def test_the_engines_own_refusal_reaches_its_caller_alone() -> None:
    async def work(client: EngineClient) -> None:
        good = client.submit([request()])
        # The scheduler alone knows that more tokens were resumed than may be generated.
        bad = Request(
            request_id="x", prompt_token_ids=[1], params=SamplingParams(seed=1, max_tokens=2), resume_token_ids=[1] * 9
        )
        with pytest.raises(RequestError, match="resume_token_ids"):
            await read(client.submit([bad, request(max_tokens=500)]))
        assert len((await read(good))[0][0]) == 20
        assert client.num_unfinished == 0

    run(child(), work)


def test_R_23_no_orphan_stays_when_the_server_is_killed() -> None:
    code = (
        "import asyncio\nfrom tests.support.server import child\n"
        "async def go():\n    c = child()\n    await c.start()\n    print(c.replicas[0].link.pid, flush=True)\n"
        "    await asyncio.sleep(60)\nasyncio.run(go())"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    engine = int(server.stdout.readline())
    assert is_running(engine)
    server.kill()
    server.wait()
    server.stdout.close()
    end = time.monotonic() + 60
    while is_running(engine):
        assert time.monotonic() < end
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_I_23_closing_leaves_no_process_no_socket_and_no_thread() -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    run(child(), lambda client: read(client.submit(requests(2))))
    before = open_files()
    client = child()
    pids: list[int] = []

    async def work(client: EngineClient) -> None:
        pids.append(pid_of(client))
        client.submit([request(max_tokens=500)])

    run(client, work)
    assert not is_running(pids[0])
    assert open_files() == before
