"""A client of an engine behind TLS: the same answers as from one in this process, whatever dies, stops or leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.engine.test_client import LONG, Answer, read, request, requests, undisturbed
from tests.support.remote import child, front, listening, run, served, until

from headrace.core.journal import Arrival, Note, Step, decode_note
from headrace.engine.cache_tree import CacheTree, ReadCache
from headrace.engine.client import EngineClient
from headrace.engine.holding import NOT_HELD, HoldSteps
from headrace.fleet.remote import server as server_module
from headrace.fleet.remote.server import EngineServer
from headrace.fleet.remote.stamps import Stamps
from headrace.protocol import frames
from headrace.protocol.errors import EngineDeadError
from headrace.protocol.step import Abort, Add, EngineInfo, Finish, Stats, StepOutput
from headrace.secure.handshake import HandshakeError


def pid_of(server: EngineServer) -> int:
    pid = server._link.pid
    assert pid is not None
    return pid


def test_answers_are_those_of_an_engine_in_this_process() -> None:
    result = requests(6)

    async def work(client: EngineClient, server: EngineServer) -> dict[int, Answer]:
        return await read(client.submit(result))

    assert run(work, child()) == undisturbed(result)


def test_long_rows_of_alternatives_come_whole_and_once() -> None:
    actual = [request(max_tokens=2, logprobs=-1, prompt_logprobs=-1)]

    async def work(client: EngineClient) -> Any:
        stream = client.submit(actual)
        async with stream:
            return [delta for deltas in [each async for each in stream] for _, delta in deltas]

    async def both() -> None:
        from tests.support.server import inproc

        local = inproc(max_logprobs=-1)
        await local.start()
        expected = await work(local)
        await local.close()
        async with served(child(max_logprobs=-1)) as (client, _):
            answers = await work(client)
        for field in ("token_ids", "logprobs", "prompt_logprobs"):
            rows = [[row for delta in deltas for row in getattr(delta, field)] for deltas in (answers, expected)]
            assert rows[0] == rows[1]
        assert len(answers[-1].logprobs[-1].top) >= 250

    asyncio.run(both())


def test_a_killed_engine_behind_its_server_is_a_pause() -> None:
    result = requests(8, LONG)

    async def work(client: EngineClient, server: EngineServer) -> dict[int, Answer]:
        kill = lambda: os.kill(pid_of(server), signal.SIGKILL)  # noqa: E731
        answers = await read(client.submit(result), {2: kill, 6: kill})
        assert client.num_restarts == 2
        return answers

    assert run(work, child(delay=0.01)) == undisturbed(result)


def test_a_stopped_engine_is_replaced_and_a_slow_one_is_not() -> None:
    """Its server lives and reports no processor time; a long step reports some."""
    result = requests(4, LONG)

    async def work(client: EngineClient, server: EngineServer) -> dict[int, Answer]:
        first = pid_of(server)
        stop = lambda: os.kill(first, signal.SIGSTOP)  # noqa: E731
        answers = await read(client.submit(result), {5: stop})
        assert client.num_restarts == 1
        assert pid_of(server) != first
        return answers

    assert run(work, child(delay=0.01), watchdog_timeout=1.5) == undisturbed(result)


def test_the_time_of_a_processor_goes_on_between_beats_and_ends_with_them() -> None:
    link = front(1)
    link._channel = object()  # type: ignore[assignment]
    now = time.monotonic()
    link._beats = [(now - 0.2, (5.0, False)), (now - 0.1, (5.1, True))]
    usage = link.usage()
    assert usage is not None
    assert usage[0] > 5.1
    assert usage[1]
    link._beats = [(now - 9.2, (5.0, False)), (now - 9.1, (5.1, True))]
    usage = link.usage()
    assert usage is not None
    assert usage[0] == pytest.approx(5.3)
    assert not usage[1]


@pytest.mark.parametrize("is_cut", [False, True], ids=["silent", "cut"])
def test_a_lost_connection_is_a_pause(is_cut: bool) -> None:
    """A cut on the way, and a front that hears nothing."""
    result = requests(4, LONG)

    async def work(client: EngineClient, server: EngineServer) -> dict[int, Answer]:
        def lose() -> None:
            channel = server.front
            assert channel is not None
            if is_cut:
                channel.cut("a test")
            else:
                channel.send = lambda frame: None  # type: ignore[method-assign]

        answers = await read(client.submit(result), {5: lose})
        assert client.num_restarts == 1
        return answers

    link = child(delay=0.01)
    assert run(work, link) == undisturbed(result)


def test_a_front_that_leaves_leaves_no_requests_and_the_next_is_served() -> None:
    async def go() -> None:
        async with listening(child(delay=0.01)) as (port, server):
            first, second = (EngineClient(front(port)) for _ in range(2))
            await first.start()
            stream = first.submit(requests(4, 2000))
            await anext(aiter(stream))
            # One front at a time.
            waiting = asyncio.create_task(second.start())
            await asyncio.sleep(1.5)
            assert not waiting.done()
            await first.close()
            await waiting
            assert server.open_ids == set()
            await second.answers()
            assert (second.stats.num_running, second.stats.num_waiting) == (0, 0)
            result = requests(3)
            answers = await read(second.submit(result))
            # The counters are those of this front.
            await second.answers()
            assert second.total.num_generated_tokens == sum(len(tokens) for tokens, *_ in answers.values())
            await second.close()
            assert answers == await asyncio.to_thread(undisturbed, result)

    asyncio.run(go())


class Scripted:
    """A link to no engine: what is posted to it is kept, and a test calls `on_message`."""

    in_process, was_killed, black_box, pid, drain, num_unsent_bytes = False, False, None, None, None, 0

    def __init__(self) -> None:
        self.posted: list[frames.ToEngine] = []

    async def start(self, on_message: Any, on_lost: Any) -> EngineInfo:
        self.on_message, self.on_lost = on_message, on_lost
        return EngineInfo(
            model="none", max_model_len=64, vocab_size=8, eos_token_ids=[], block_size=4, num_blocks=4,
            max_num_seqs=4, max_num_batched_tokens=64,
        )  # fmt: skip

    def post(self, message: frames.ToEngine) -> None:
        self.posted.append(message)

    def usage(self) -> None:
        return None

    async def kill(self) -> None: ...

    async def close(self, at_once: bool = False) -> None: ...


@pytest.mark.parametrize("waits", [True, False], ids=["", "control"])
def test_nothing_of_an_earlier_connection_reaches_the_next(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request goes on under its old id: a token that was under way would come twice."""
    if not waits:
        clear = EngineServer._clear
        monkeypatch.setattr(EngineServer, "_clear", lambda self: (clear(self), self._ready.set()))

    async def go() -> list[frames.FromEngine]:
        link = Scripted()
        async with listening(link) as (port, server):  # type: ignore[arg-type]
            before, after = front(port), front(port)
            await before.start(lambda message: None, lambda reason: None)
            one = request()
            before.post(Add(one, [1.0]))
            await until(lambda: server.open_ids)
            await before.close()
            await until(lambda: link.posted and isinstance(link.posted[-1], frames.Order))
            assert Abort(one.request_id) in link.posted
            arrived: list[frames.FromEngine] = []
            starting = asyncio.create_task(after.start(arrived.append, lambda reason: None))
            await until(lambda: server.front is not None)
            await asyncio.sleep(0.2)
            late = StepOutput(step_id=7, request_ids=[one.request_id], token_ids=[[5]], stats=Stats())
            link.on_message(frames.Output(late))
            await asyncio.sleep(0.2)
            order = link.posted[-1]
            assert isinstance(order, frames.Order)
            link.on_message(frames.Reply(order.order_id, b""))
            await asyncio.sleep(0.2)
            ends = StepOutput(step_id=8, finished={one.request_id: Finish("abort")}, stats=Stats())
            link.on_message(frames.Output(ends))
            await starting
            await asyncio.sleep(0.2)
            await after.close()
            return arrived

    assert bool(asyncio.run(go())) is not waits


def test_an_engine_that_comes_back_as_another_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        async with listening(child(delay=0.01)) as (port, _):
            client = EngineClient(front(port), max_restarts=0, watchdog_timeout=3.0)
            await client.start()
            stream = client.submit(requests(1, 2000))
            await anext(aiter(stream))
        async with listening(child(), weights="others", port=port):
            with pytest.raises(EngineDeadError):
                async for _ in stream:
                    pass
            await client.close()

    asyncio.run(go())
    assert "other weights or formats" in caplog.text or "died" in caplog.text


def test_an_engine_of_other_weights_than_the_front_has_is_refused() -> None:
    async def go() -> None:
        async with listening(child()) as (port, _):
            with pytest.raises(HandshakeError, match=r"127\.0\.0\.1:\d+: it serves other weights"):
                await front(port, weights="mine").start(lambda message: None, lambda reason: None)
            link = front(port, weights="weights")
            await link.start(lambda message: None, lambda reason: None)
            await link.close()

    asyncio.run(go())


# -- clocks ------------------------------------------------------------------------------------------------------


class Times:
    """An observer that keeps every time it sees."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.steps: list[Step] = []

    def on_step(self, output: StepOutput, replica: int = 0) -> None:
        if output.note:
            self.steps.append(decode_note(output.note).step)

    def on_first_token(self, num_prompt_tokens: int, num_cached_tokens: int, seconds: float) -> None:
        self.seconds.append(seconds)

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        self.seconds += [] if seconds is None else [seconds]

    def on_end(self, request_ids: object, replica: int = 0) -> None: ...


def faults(observer: Times, tree: CacheTree, began: float, ended: float) -> list[str]:
    """Times that lie outside of those of the test, or out of order."""
    wrong = [f"{each} s" for each in observer.seconds if not 0 <= each <= ended - began]
    last = began
    for step in observer.steps:
        if not last <= step.times[0] <= step.times[1] <= step.times[2] <= step.times[3] <= ended:
            wrong.append(f"step {step.times}")
        last = step.times[3]
        wrong += [f"arrival {a.times}" for a in step.arrivals if sorted(a.times) != a.times or a.times[0] < began]
        wrong += [f"arrival {a.times}" for a in step.arrivals if a.times[3] > ended]
        wrong += [f"{a}" for a in step.admissions if a.evicted_time and not began <= a.evicted_time <= ended]
    wrong += [f"{node}" for node in tree.nodes if node.last_use and not began <= node.last_use / 1e6 <= ended]
    return wrong


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stamped", [True, False], ids=["", "control"])
@pytest.mark.parametrize("shift", [1e7, -time.monotonic() / 2], ids=["ahead", "behind"])
def test_no_clock_of_the_engine_is_compared_with_ours(
    shift: float, stamped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not stamped:
        monkeypatch.setattr(Stamps, "stamp", lambda self, output, clock, now: None)
        monkeypatch.setattr(Stamps, "stamp_reply", lambda self, reply, clock, now: reply)
    # The server of the engine has the engine's clock.
    monkeypatch.setattr(server_module, "time", Clock(shift))

    async def work(client: EngineClient, server: EngineServer) -> list[str]:
        client.observer = observer = Times()
        began = time.monotonic()
        responses = [request([1, 2, 3, 4, 5, 6, 7, 8, i // 2], max_tokens=30, seed=i) for i in range(8)]
        await read(client.submit(responses))
        await read(client.submit([request([1, 2, 3, 4, 5, 6, 7, 8, 1])]))
        tree = await client.orders.give(ReadCache(100), CacheTree)
        assert await client.orders.give(HoldSteps(), int) == NOT_HELD
        assert len(observer.steps) > 20
        assert sum(len(step.arrivals) for step in observer.steps) == 9
        assert any(node.last_use for node in tree.nodes)
        return faults(observer, tree, began, time.monotonic())

    wrong = run(work, child(0.002, shift, block_size=4, num_gpu_blocks_override=24))
    assert bool(wrong) is not stamped, wrong[:3]


class Clock:
    """The module `time` of another host."""

    def __init__(self, shift: float) -> None:
        self._shift = shift

    def monotonic(self) -> float:
        return time.monotonic() + self._shift


def test_steps_that_come_at_once_follow_each_other() -> None:
    """Held up on the way: the engine's clock went on between them."""
    stamps = Stamps()
    ends = []
    for index in range(3):
        output = StepOutput(step_id=index, start_time=100.0 + index, end_time=100.9 + index)
        stamps.stamp(output, 103.0 if index else 100.9, 5.0)
        ends += [output.start_time, output.end_time]
    assert ends == sorted(ends)
    assert ends[-1] <= 5.0


def test_the_times_of_an_add_are_the_fronts_own_in_the_note() -> None:
    """And the time at which the engine read it is not before them."""
    stamps = Stamps()
    stamps.note_sent("a", [1.0, 2.0, 9.0])
    arrivals = [Arrival(1, "a", 1, 1, [70.0, 71.0, 78.0, 78.5]), Arrival(2, "b", 1, 1, [70.0, 71.0, 78.0, 78.5])]
    step = Step(0, (79.0, 79.1, 79.2, 79.3), [1], [0], [1], arrivals=arrivals)
    output = StepOutput(step_id=0, start_time=79.0, end_time=79.3, note=msgspec.msgpack.encode(Note(step)))
    stamps.stamp(output, 80.0, 10.0)
    stamped = decode_note(output.note).step
    assert stamped.times == pytest.approx((9.0, 9.1, 9.2, 9.3))
    assert [each.times for each in stamped.arrivals] == [[1.0, 2.0, 9.0, 9.0], [0.0, 1.0, 8.0, 8.5]]


def test_a_restart_may_take_as_long_as_the_engine_takes_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    link, seconds = child(), 0.0
    start = link.start

    async def load(*args: Any) -> EngineInfo:
        nonlocal seconds
        info = await start(*args)
        seconds = 2000.0
        return info

    monkeypatch.setattr(link, "start", load)
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + seconds))

    async def go() -> None:
        async with listening(link) as (port, _):
            client = EngineClient(front(port))
            await client.start()
            assert 2000 < client.replicas[0].start_seconds < 3000
            await client.close()

    asyncio.run(go())
