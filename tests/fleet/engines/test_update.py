"""Replicas that are added and removed, and rolling updates, while answers run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.engine.test_client import Answer, read, request, requests
from tests.fleet.engines.test_fleet import all_of, alone, core, listen, run, threads

from headrace.cli import fleet as commands
from headrace.engine.core import EngineCore
from headrace.engine.links import InprocLink, Link
from headrace.engine.open_requests import OpenRequest
from headrace.engine.replica import Replica
from headrace.fleet.engines.client import Fleet
from headrace.fleet.engines.update import FIXED, RollingUpdate, UpdateError
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, EngineDeadError, RequestError
from headrace.protocol.step import Request, StepOutput


class Threads:
    """A `Starter` of engines on threads, whose fingerprint follows from their quantisation."""

    def __init__(self, num_good: int = 100) -> None:
        self.num_good = num_good

    def link(self, config: EngineConfig, old: Replica) -> Link:
        self.num_good -= 1
        if self.num_good < 0:
            return InprocLink(broken)
        return InprocLink(core(config.quantization or "same", max_num_seqs=config.max_num_seqs))

    def took(self, new: Replica, config: EngineConfig, old: Replica) -> None:
        return


def broken() -> EngineCore:
    raise CheckpointError("model.safetensors is missing")


def updates(fleet: Fleet, num_good: int = 100) -> RollingUpdate:
    return RollingUpdate(fleet, EngineConfig(model="fake"), Threads(num_good))


async def in_calls(fleet: Fleet, expected: list[Request], num: int) -> list[Answer]:
    """The answers of calls with `num` requests each."""
    streams = [fleet.submit(expected[at : at + num]) for at in range(0, len(expected), num)]
    answers = [await read(stream) for stream in streams]
    return [call[index] for call in answers for index in range(num)]


def test_replicas_are_added_and_removed_while_streams_run() -> None:
    expected = requests(12, 60)
    fleet = threads([core()])

    async def work(fleet: Fleet) -> list[Answer]:
        task = asyncio.create_task(all_of(fleet, expected))
        new = fleet.add(InprocLink(core()))
        await fleet.started(new)
        assert [each.index for each in fleet.replicas] == [0, 1]
        await fleet.remove(0)
        assert [each.index for each in fleet.replicas] == [1]
        assert fleet.num_moved > 0
        assert new.num_moved_here == fleet.num_moved
        actual = await task
        # What the removed one counted is not lost, and its number is free.
        assert fleet.total.num_generated_tokens >= sum(len(answer[0]) for answer in actual)
        assert fleet.add(InprocLink(core())).index == 0
        more = await all_of(fleet, requests(8))
        return actual + more

    assert run(fleet, work) == alone(expected + requests(8))


def test_a_fleet_may_begin_empty() -> None:
    fleet = threads([])

    async def whole() -> list[Answer]:
        starting = asyncio.create_task(fleet.start())
        await asyncio.sleep(0)
        assert not fleet.is_started
        assert not fleet.is_alive
        fleet.add(InprocLink(core()))
        await asyncio.wait_for(starting, 60)
        try:
            return await all_of(fleet, requests(3))
        finally:
            await fleet.close()

    assert asyncio.run(whole()) == alone(requests(3))


def test_an_engine_that_does_not_start_leaves_the_fleet_as_it_was() -> None:
    fleet = threads([core()])

    async def work(fleet: Fleet) -> None:
        new = fleet.add(InprocLink(broken))
        with pytest.raises(CheckpointError, match="missing"):
            await fleet.started(new)
        assert [each.index for each in fleet.replicas] == [0]
        await all_of(fleet, requests(2))

    run(fleet, work)


def under_load(
    fleet: Fleet,
    update: RollingUpdate,
    expected: list[Request],
    settings: dict[str, Any],
    patience: float,
    num: int = 1,
) -> tuple[list[Answer], dict[str, set[str]]]:
    """The answers of `wanted`, in calls of `num`, during an update, and what computed each request."""
    where: dict[str, set[str]] = {}

    def note(replica: Replica, output: StepOutput) -> None:
        for each in set(output.request_ids) & replica.entries.keys():
            where.setdefault(each, set()).add(replica.fingerprint)

    async def work(fleet: Fleet) -> list[Answer]:
        listen(fleet, note)
        task = asyncio.create_task(in_calls(fleet, expected, num))
        while len(where) < len(expected) / 2:
            await asyncio.sleep(0.001)
        await update.run(settings, patience)
        return await task

    return run(fleet, work), where


def test_an_update_of_settings_moves_streams_at_once() -> None:
    expected = requests(16, 120)
    fleet = threads([core(), core(), core()])
    update = updates(fleet)
    old = {id(each) for each in fleet.replicas}
    actual, _ = under_load(fleet, update, expected, {"max_num_seqs": 64}, 0.0)
    assert actual == alone(expected)
    assert fleet.num_moved > 0
    assert not old & {id(each) for each in fleet.replicas}
    assert len(fleet.replicas) == 3
    assert fleet.info.max_num_seqs == 64
    progress = update.progress
    assert progress is not None
    assert (progress.state, progress.num_replaced, progress.num_replicas) == ("done", 3, 3)


def stays_alike(fleet: Fleet) -> dict[str, set[str]]:
    """An update to other bits, with calls of four requests each; the places of all are few."""
    expected = requests(24, 60)
    update = updates(fleet)
    actual, where = under_load(fleet, update, expected, {"quantization": "int8"}, 0.0, num=4)
    assert actual == alone(expected)
    assert fleet.num_unfinished == 0
    assert {each.fingerprint for each in fleet.replicas} == {"int8"}
    for at in range(0, len(expected), 4):
        call = [where[each.request_id] for each in expected[at : at + 4]]
        assert len(set.union(*call)) == 1, f"a call had answers of {call}"
    return where


def test_answers_end_on_their_own_fingerprint() -> None:
    where = stays_alike(threads([core(max_num_seqs=2) for _ in range(3)]))
    assert {"same"} in where.values()


def test_an_update_that_skips_fingerprints_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def candidates(fleet: Fleet, entry: OpenRequest, usable: list[Replica]) -> list[int]:
        return [each.index for each in usable if not each.is_leaving]

    monkeypatch.setattr(Fleet, "_candidates", candidates)

    def drain(fleet: Fleet, index: int) -> None:
        fleet.replica(index).is_leaving = True
        fleet._take_back(fleet.replica(index))
        fleet._dispatch()

    monkeypatch.setattr(Fleet, "drain", drain)
    with pytest.raises(AssertionError, match="a call had answers of"):
        stays_alike(threads([core(max_num_seqs=2) for _ in range(3)]))


def test_requests_have_time_to_end_where_they_are() -> None:
    expected = requests(6, 60)
    fleet = threads([core(), core()])
    actual, _ = under_load(fleet, updates(fleet), expected, {}, 60.0)
    assert actual == alone(expected)
    assert fleet.num_moved == 0


def test_one_engine_that_is_a_fleet_is_updated() -> None:
    expected = requests(8, 60)
    fleet = threads([core()])
    actual, where = under_load(fleet, updates(fleet), expected, {"quantization": "int8"}, 0.0)
    assert actual == alone(expected)
    assert all(len(each) == 1 for each in where.values())


def test_an_update_that_fails_says_how_far_it_came_and_harms_no_stream() -> None:
    expected = requests(12, 60)
    fleet = threads([core(), core(), core()])
    update = updates(fleet, num_good=1)

    async def work(fleet: Fleet) -> list[Answer]:
        task = asyncio.create_task(all_of(fleet, expected))
        with pytest.raises(UpdateError, match="1 of 3 engines were replaced.*model.safetensors is missing"):
            await update.run({}, 0.0)
        assert len(fleet.replicas) == 3
        assert update.progress is not None
        assert (update.progress.state, update.progress.num_replaced) == ("failed", 1)
        assert not update.is_running
        return await task + await all_of(fleet, requests(3))

    assert run(fleet, work) == alone(expected + requests(3))


def test_one_update_at_a_time_and_it_ends_with_the_server() -> None:
    fleet = threads([core(), core()])
    update = updates(fleet)

    async def work(fleet: Fleet) -> None:
        stream = fleet.submit([request(max_tokens=2000)])
        await anext(stream)
        first = asyncio.create_task(update.run({"quantization": "int8"}, 600.0))
        while not update.is_running:
            await asyncio.sleep(0.001)
        with pytest.raises(UpdateError, match="an update is running"):
            await update.run({})
        await fleet.close()
        with pytest.raises(UpdateError, match="shutting down"):
            await asyncio.wait_for(first, 30)
        with pytest.raises(EngineDeadError):
            await read(stream)

    run(fleet, work)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_seqs": 3}, "max_seqs: 3 is not allowed; it must be a setting of an engine: activations"),
        ({"model": "x"}, "model: 'x' is not allowed; it must be left out: the server has to be restarted"),
        ({"max_num_seqs": "many"}, "max_num_seqs: 'many' is not allowed; it must be of another type"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0 is not allowed; it must be at least 1"),
        ({"speculative_config": {"method": "magic"}}, "method"),
    ],
)
def test_settings_are_checked_before_anything_is_started(settings: dict[str, Any], message: str) -> None:
    update = updates(threads([]))
    with pytest.raises(RequestError, match=message):
        asyncio.run(update.run(settings))
    assert update.progress is None


def test_the_command_has_the_flags_that_may_change() -> None:
    assert set(commands.FIXED) == FIXED


def test_a_request_goes_only_where_it_fits() -> None:
    """The new replica has a shorter context: a stream that is longer ends in the old one, and is not moved."""
    fleet = threads([core(max_model_len=256)])
    long, short = request([1] * 8, max_tokens=200), requests(4)

    async def work(fleet: Fleet) -> list[Answer]:
        stream = fleet.submit([long])
        await anext(stream)
        new = fleet.add(InprocLink(core(max_model_len=64)))
        await fleet.started(new)
        removing = asyncio.create_task(fleet.remove(0))
        result = await all_of(fleet, short)
        assert fleet.info.max_model_len == 64
        rest = (await read(stream))[0]
        await removing
        assert fleet.num_moved == 0
        assert len(rest[0]) > 64
        return [*result, rest]

    *result, rest = run(fleet, work)
    [whole] = alone([long])
    assert result == alone(short)
    assert rest[0] == whole[0][-len(rest[0]) :]


def test_a_watched_fleet_goes_on_with_the_next_engine() -> None:
    fleet = threads([core(), core()])

    async def work(fleet: Fleet) -> None:
        fleet.watch(True)
        assert [each.watching._is_watched for each in fleet.replicas] == [True, False]
        await fleet.remove(0)
        assert [each.watching._is_watched for each in fleet.replicas] == [True]

    run(fleet, work)
