"""`ModelSet` over scripted models: loading once, waiting, making room, staying, failing, sleeping."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine import context, tenants
from headrace.engine.library.model_facts import ModelFacts
from headrace.protocol.errors import CheckpointError, DeadlineError, ModelNotFoundError, RequestError
from headrace.serve.call import models
from headrace.serve.call.models import ModelLoadError, ModelSet
from headrace.serve.call.parsing import seconds_of
from headrace.serve.call.sleeping import SleepingError
from headrace.serve.call.states import State


class Files:
    """A folder by name."""

    def __init__(self, *names: str, size: int = 10) -> None:
        self._names, self._size = list(names), size

    def names(self) -> list[str]:
        return self._names

    def find(self, name: str) -> str | None:
        return name if name in self._names else None

    def without_root(self, text: str) -> str:
        return text

    def facts(self, name: str) -> ModelFacts:
        return ModelFacts(format="gguf", family="x", size=self._size, digest=name, modified=0.0)


class Model:
    """A model that does nothing but come and go."""

    def __init__(self, name: str, log: list[str], memory: int = 100) -> None:
        self.name, self.log, self.bytes = name, log, memory
        self.served: Any = SimpleNamespace(name=name, names=(name,), adapters={}, keep_alive=None, stays_loaded=False)
        dead = asyncio.Event()
        self.client: Any = SimpleNamespace(num_unfinished=0, num_waiting=0, dead=dead, is_alive=True)

    def facts(self) -> None:
        return None

    def memory(self) -> int:
        return self.bytes

    async def close(self, at_once: bool = False) -> None:
        self.log.append(f"-{self.name}")


class House:
    """A set of models, with what came and went in `log`."""

    def __init__(self, *names: str, size: int = 10, default: bool = False, **bounds: Any) -> None:
        self.log: list[str] = []
        self.models: dict[str, Model] = {}
        self.gate: asyncio.Event | None = None
        self.callers: list[tuple[str, float | None]] = []
        self.failure: Exception | None = None
        self.set = ModelSet(Model("own", self.log) if default else None, Files(*names, size=size), self.load, **bounds)

    async def load(self, name: str) -> Model:
        self.callers.append((tenants.current().name, context.deadline()))
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.log.append(f"+{name}")
        self.models[name] = Model(name, self.log)
        return self.models[name]

    async def use(self, name: str | None, **fields: Any) -> str:
        async with self.set.hold({"model": name} | fields) as model:
            await asyncio.sleep(0)
            return str(model.name)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "WATCH_S", 0.001)
    monkeypatch.setattr(models, "STOP_S", 0.001)
    monkeypatch.setattr(models, "MEASURE_S", 0.0)
    monkeypatch.setattr(models, "PROCESS_BYTES", 0)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def closing(house: House) -> AsyncIterator[House]:
    yield house
    await house.set.close()


def test_K16_a_model_is_loaded_once_for_all_who_wait() -> None:
    async def scenario() -> None:
        async with closing(House("a", "b")) as house:
            assert await asyncio.gather(*(house.use("a") for _ in range(5))) == ["a"] * 5
            assert await house.use("a") == "a"
            assert house.log == ["+a"]
            with pytest.raises(ModelNotFoundError, match="'c' not found; there are 'a', 'b'"):
                await house.use("c")
            with pytest.raises(RequestError, match="model: None .* the name of a model: 'a', 'b'"):
                await house.use(None)

    run(scenario)


def test_K16_the_least_recently_used_makes_room_and_running_answers_are_waited_for() -> None:
    async def scenario() -> None:
        async with closing(House("a", "b", "c", max_loaded=2)) as house:
            for name in ("a", "b", "a", "c"):
                await house.use(name)
            assert house.log == ["+a", "+b", "-b", "+c"]
            # An engine with open requests, and a route that answers, are in use.
            house.models["a"].client.num_unfinished = 1
            async with house.set.hold({"model": "c"}):
                waiting = asyncio.create_task(house.use("b"))
                await asyncio.sleep(0.02)
                assert house.log == ["+a", "+b", "-b", "+c"]
                house.models["a"].client.num_unfinished = 0
                assert await waiting == "b"
            assert house.log[4:] == ["-a", "+b"]

    run(scenario)


def test_K16_memory_bounds_what_is_loaded() -> None:
    async def scenario() -> None:
        async with closing(House("a", "b", size=100, max_memory=250)) as house:
            await house.use("a")
            await house.use("b")
            assert house.log == ["+a", "+b"]
            # It has grown, so that the two are too large together: the one that was used longer ago goes.
            house.models["b"].bytes = 200
            await until(lambda: house.log[2:] == ["-a"])
        async with closing(House("a", size=300, max_memory=250)) as house:
            with pytest.raises(ModelLoadError, match="it takes 300 bytes, and --models-memory is 250"):
                await house.use("a")

    run(scenario)


def test_K16_keep_alive_counts_from_the_last_use() -> None:
    async def scenario() -> None:
        async with closing(House("a", "b", keep_alive=0.0)) as house:
            async with house.set.hold({"model": "a"}):
                await asyncio.sleep(0.02)
                assert house.log == ["+a"]
            await until(lambda: house.log == ["+a", "-a"])
            async with house.set.hold({"model": "b"}) as model:
                model.keep_alive = float("inf")
            await asyncio.sleep(0.02)
            assert house.log == ["+a", "-a", "+b"]
            house.models["b"].client.dead.set()
            await until(lambda: house.log[-1] == "-b")
            await house.use("b")
            assert house.log[-1] == "+b", "a model whose engine died is loaded again"

    run(scenario)


def test_K16_deadlines_hold_while_a_model_loads_and_the_load_is_nobodys() -> None:
    async def scenario() -> None:
        async with closing(House("a")) as house:
            house.gate = asyncio.Event()
            with tenants.acting_as(tenants.Tenant("bob")), pytest.raises(DeadlineError, match="the model a was loaded"):
                await house.use("a", timeout=0.01)
            with context.within(0.01, time.monotonic()), pytest.raises(DeadlineError):
                await house.use("a")
            house.gate.set()
            assert await house.use("a") == "a"
            assert house.log == ["+a"], "the load goes on when its caller has gone"
            assert house.callers == [("", None)]

    run(scenario)


def test_K16_a_model_that_fails_to_load_harms_no_other() -> None:
    async def scenario() -> None:
        async with closing(House("a", "b", max_loaded=1)) as house:
            house.failure = CheckpointError("config.json is missing")
            for result in await asyncio.gather(house.use("a"), house.use("a"), return_exceptions=True):
                assert isinstance(result, ModelLoadError)
                assert str(result) == "the model a can not be loaded: config.json is missing"
                assert result.status == 500
            assert len(house.callers) == 1
            house.failure = None
            assert await house.use("b") == "b"
            assert await house.use("a") == "a"

    run(scenario)


def test_K16_all_answers_come_however_few_fit() -> None:
    async def scenario() -> None:
        names = [f"m{index}" for index in range(5)]
        async with closing(House(*names, max_loaded=1)) as house:
            calls = [house.use(names[index % 5]) for index in range(60)]
            assert await asyncio.gather(*calls) == [names[index % 5] for index in range(60)]
            num = 0
            for line in house.log:
                num += 1 if line[0] == "+" else -1
                assert num <= 1, "two were loaded at once"

    run(scenario)


def test_S_33_who_only_reads_waits_for_no_model_and_has_no_part_in_its_stay() -> None:
    async def reads(house: House, name: str) -> str:
        async with house.set.hold({"model": name}, wakes=False) as model:
            return str(model.name)

    async def refused(house: House, name: str) -> None:
        with pytest.raises(RequestError, match=f"model: '{name}' is not allowed; it must be a model that is loaded"):
            await reads(house, name)

    async def scenario() -> None:
        async with closing(House("a", "b", max_loaded=1)) as house:
            await refused(house, "a")
            house.gate = asyncio.Event()
            loading = asyncio.create_task(house.use("a"))
            await until(lambda: bool(house.callers))
            await refused(house, "a")
            house.gate.set()
            assert await loading == "a"
            [entry] = house.set.loaded()
            entry.last_use, entry.is_fresh = 5.0, True
            assert await reads(house, "a") == "a"
            # Who loaded it still has it first, and it stays no longer.
            assert (entry.last_use, entry.is_fresh) == (5.0, True)
            async with house.set.hold({"model": "a"}):
                unloading = asyncio.create_task(house.set.unload("a"))
                await until(lambda: entry.stop is not None)
                await refused(house, "a")
            await unloading
            await refused(house, "a")
            assert house.log == ["+a", "-a"]

    run(scenario)


def test_K16_control_a_set_that_does_not_wait_for_answers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.ModelEntry, "is_used", property(lambda entry: False))
    with pytest.raises((AssertionError, asyncio.TimeoutError, TypeError)):
        test_K16_the_least_recently_used_makes_room_and_running_answers_are_waited_for()


def test_K16_a_sleeping_server_refuses_and_a_waking_one_loads() -> None:
    async def scenario() -> None:
        async with closing(House("a", default=True)) as house:
            client = house.set.default.client  # type: ignore[union-attr]
            calls: list[str] = []

            async def note(name: str) -> None:
                calls.append(name)

            client.close, client.start = (lambda: note("close")), (lambda: note("start"))
            assert await house.use("own") == "own"
            assert await house.use("a") == "a"
            client.num_unfinished = 1
            house.set.sleep.become(State.READY)
            sleep = asyncio.create_task(house.set.sleep.fall_asleep())
            await until(lambda: house.log[-1] == "-a")
            with pytest.raises(SleepingError, match="the server sleeps; POST /wake_up wakes it"):
                await house.use("own")
            assert calls == [], "a running answer is waited for"
            client.num_unfinished = 0
            await sleep
            await house.set.sleep.wake_up()
            assert calls == ["close", "start"]
            assert await house.use("a") == "a"
            assert await house.use(None) == "own"

    run(scenario)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("300ms", 0.3),
        ("10", 10.0),
        (0, 0.0),
        ("0", 0.0),
        (-1, float("inf")),
        ("-1m", float("inf")),
        (None, None),
    ],
)
def test_K16_keep_alive_is_read_as_ollama_has_it(value: Any, seconds: float | None) -> None:
    assert seconds_of(value) == seconds


@pytest.mark.parametrize("value", ["five", "5 m", "m", "", "1d", "5m3"])
def test_K16_what_is_no_duration_is_refused(value: str) -> None:
    with pytest.raises(RequestError, match="keep_alive: .* a duration such as 5m"):
        seconds_of(value)
