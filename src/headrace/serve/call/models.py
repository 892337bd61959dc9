"""`ModelSet`: finds the model that a call names, loads it if need be, and holds it while the call uses it.

A server has one model that was named at its start and stays loaded, or a folder of models that are loaded on use, or
both. A model of the folder is loaded at its first use. It is unloaded when no call has used it for its time to stay, or
when others need its room; calls that come meanwhile wait until it is unloaded, and load it again. A model is in use
while a route answers with it and while its engine has open requests. Knows names and times; `serve.loading` starts
engines, `engine.library.model_folder` reads the files, and every route of an API comes through `bound` or `bind`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from headrace.engine import context
from headrace.engine.client import EngineClient
from headrace.engine.generation import in_time
from headrace.engine.library.model_facts import ModelFacts
from headrace.engine.library.model_folder import ModelFolder
from headrace.protocol.errors import HeadraceError, ModelNotFoundError, RequestError
from headrace.serve.call.listing import NO_FACTS, Listing
from headrace.serve.call.service import ServedModel
from headrace.serve.call.sleeping import refuse
from headrace.serve.call.states import Sleep, State

logger = logging.getLogger("headrace.server")

WATCH_S = 0.1
"""Seconds between two checks of which models are in use."""
STOP_S = 0.02
"""Seconds between two checks of whether the answers of a model, which waits to be unloaded, have ended."""
MEASURE_S = 1.0
PROCESS_BYTES = 2**28
"""Memory that a loaded model probably takes in addition to its files, until the true amount is measured."""
MAX_LISTED = 8

T = TypeVar("T")


class ModelLoadError(HeadraceError):
    """A model of the folder could not be loaded (HTTP 500)."""

    code = "model_load_failed"


class Running(Protocol):
    """A model with its engine."""

    served: ServedModel

    @property
    def client(self) -> EngineClient: ...

    @property
    def path(self) -> Path | None: ...

    def facts(self) -> ModelFacts | None:
        """Return the facts in its files; None where there are no files. Blocks."""
        ...

    def memory(self) -> int:
        """Return the bytes of memory that its processes take now."""
        ...

    async def close(self, at_once: bool = False) -> None:
        """End its processes, `at_once` in mid-step."""
        ...


class ModelEntry:
    """A model that is loaded, is being loaded or unloaded, or was loaded before.

    Attributes:
        running: the model, once it is loaded.
        start: the task that loads it. stop: the task that unloads it.
        num_holds: routes that answer with it now. num_waiting: routes that wait for it.
        is_fresh: whether no route has had it yet.
        has_room: whether it counts as loaded, from before its start until after its end.
        last_use: when it was last in use, in monotonic seconds.
        memory: bytes that it took when they were last measured, or is expected to take; 0 before.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.running: Running | None = None
        self.start: asyncio.Task[None] | None = None
        self.stop: asyncio.Task[None] | None = None
        self.num_holds = 0
        self.num_waiting = 0
        self.is_fresh = False
        self.has_room = False
        self.last_use = 0.0
        self.memory = 0

    @property
    def is_used(self) -> bool:
        """Whether a route answers with it, or its engine has open requests."""
        return self.num_holds > 0 or (self.running is not None and self.running.client.num_unfinished > 0)


class ModelSet:
    """The models that calls may name.

    Args:
        default: the model that is loaded when the server starts and stays; None: there is none.
        files: the models folder; None: there is none.
        load: starts a model of the folder by its name. Raises `HeadraceError`s.
        keep_alive: seconds that a model of the folder stays loaded after its last use, if no call sets another time.
        max_loaded: models of the folder that are loaded at once; 0 for no bound.
        max_memory: bytes of memory that they take together; None for no bound.
    """

    def __init__(
        self,
        default: Running | None,
        files: ModelFolder | None = None,
        load: Callable[[str], Awaitable[Running]] | None = None,
        keep_alive: float = 300.0,
        max_loaded: int = 4,
        max_memory: int | None = None,
    ) -> None:
        self.default = default
        self.files = files
        self.sleep = Sleep(State.READY if default is None else State.LOADING, self._end_engines, self._start_default)
        # Called for a call that needs an engine while all sleep.
        self.rouse: Callable[[], Awaitable[None]] = functools.partial(refuse, self.sleep)
        self._load = load
        self._keep_alive = keep_alive
        self._max_loaded = max_loaded
        self._max_memory = max_memory
        self._entries: dict[str, ModelEntry] = {}
        self._default_entry = ModelEntry("")
        self._default_entry.running = default
        self._room = asyncio.Lock()
        self._change_lock = asyncio.Lock()
        self._next_measure = 0.0
        self._listing = Listing()
        self._watch: asyncio.Task[None] | None = None

    @property
    def is_sleeping(self) -> bool:
        """Whether there is no engine until `sleep` is over."""
        return not self.sleep.is_over

    # -- lists

    @property
    def running(self) -> Sequence[Running]:
        """The models that are loaded, the default one first."""
        entries = [self._default_entry, *self._entries.values()]
        return [entry.running for entry in entries if entry.running is not None]

    def loaded(self) -> Iterator[ModelEntry]:
        """Yield the entries of the folder's models that are loaded."""
        return (entry for entry in self._entries.values() if entry.running is not None)

    def expires_in(self, entry: ModelEntry) -> float:
        """Return the seconds until a loaded model is unloaded, counted from now if it is in use; infinity: never."""
        idle = 0.0 if entry.is_used else time.monotonic() - entry.last_use
        return max(0.0, self._time_to_stay(entry) - idle)

    def names(self) -> list[str]:
        """Return the names of all models, the default one's first."""
        served = None if self.default is None else self.default.served
        names = [] if served is None else [*served.names, *served.adapters]
        files = [] if self.files is None else self.files.names()
        return [*names, *(name for name in files if name not in names)]

    def _is_default(self, name: str) -> bool:
        """Whether a true name is the default model's, or that of one of its adapters."""
        served = None if self.default is None else self.default.served
        return served is not None and (name in served.names or name in served.adapters)

    def running_as(self, name: str) -> Running | None:
        """Return the model with this true name if it is loaded."""
        if self._is_default(name):
            return self.default
        entry = self._entries.get(name)
        return None if entry is None else entry.running

    async def facts(self, name: str) -> ModelFacts:
        """Return the facts in the files of a model, by its true name. Raises `CheckpointError`,
        `ModelNotFoundError`, `ChildFailedError`."""
        running = self.running_as(name)
        if self.files is None or (running is not None and running is self.default):
            return NO_FACTS if running is None else await self._listing.facts("", running.facts)
        return await self._listing.facts(name, functools.partial(self.files.facts, name))

    async def listed(self) -> dict[str, ModelFacts]:
        """Return the facts of all models by name, the default one's first; see `Listing.of`."""
        return await self._listing.of(await asyncio.to_thread(self.names), self.facts)

    def last_use(self) -> float:
        """Return the time when a call last used a model, in monotonic seconds: now, if one does."""
        entries = self._default_entry, *self._entries.values()
        return max(time.monotonic() if entry.is_used else entry.last_use for entry in entries)

    def num_waiting(self) -> int:
        """Return the number of requests that wait for their engines, of all models."""
        return sum(running.client.num_waiting for running in self.running)

    def true_name(self, name: str | None, is_request: bool = False) -> str:
        """Return the true name of the model that has the name `name`: the default model's, or the name of a model in
        the folder. A request may use any other name for the default model, if the server was started so.

        Raises `ModelNotFoundError`, and `RequestError` if a name is needed."""
        default = None if self.default is None else self.default.served
        if default is not None and (name is None or name in default.names or name in default.adapters):
            return name or default.name
        if name is None:
            names = self.names()
            if len(names) != 1:
                raise RequestError("model", None, f"the name of a model: {_listed(names)}")
            return names[0]
        true = None if self.files is None else self.files.find(name)
        if true is not None:
            return true
        bare = name.removesuffix(":latest")
        if default is not None and bare in default.names:
            return bare
        if default is not None and (self.files is None or (is_request and default.takes_any_name)):
            default.check_model(name, is_request)
            return default.name
        label = name if len(name) <= 80 else name[:77] + "..."
        raise ModelNotFoundError(f"model: {label!r} not found; there are {_listed(self.names())}")

    # -- use

    def bound(self, function: Callable[..., Any], wakes: bool = True) -> Callable[..., Awaitable[Any]]:
        """Return `function`, which takes a `ServedModel` first, as a function of its other arguments, for a route: the
        model is the one that `model` names in the body or the query, and is held until the function returns. Without
        `wakes` the route only reads, which is no use of the model: it must be loaded, and its engine may sleep."""

        @functools.wraps(function)
        async def route(*args: Any) -> Any:
            fields = next((each for each in args if isinstance(each, Mapping)), {})
            async with self.hold(fields, wakes) as model:
                result = function(model, *args)
                return await result if inspect.isawaitable(result) else result

        return route

    def bind(self, api: type[T], make: Callable[[ServedModel], T] | None = None, wakes: bool = True) -> T:
        """Return an object with the methods of `api`; each is `bound`, to an object that `make` returns for the model.
        None: the class itself takes a `ServedModel`."""
        return cast(T, _Bound(self, api, make or api, wakes))

    @contextlib.asynccontextmanager
    async def hold(self, fields: Mapping[str, Any], wakes: bool = True) -> AsyncIterator[ServedModel]:
        """Hold the model that the `fields` of a request name, loaded, and with `wakes` awake, in the block.

        The request's own `timeout`, and its deadline, hold while it is loaded; without `wakes`, none is. Raises
        `ModelNotFoundError`, `ModelLoadError`, `SleepingError`, `DeadlineError`, `RequestError`."""
        if self.is_sleeping and wakes:
            await self.rouse()
        entry = self._entry_of(fields)
        if entry.running is None or entry.stop is not None:
            if not wakes:
                raise RequestError("model", entry.name, "a model that is loaded; it is not, and to read loads none")
            timeout = fields.get("timeout")
            seconds = timeout if isinstance(timeout, int | float) and timeout > 0 else None
            with context.within(seconds, context.arrival()):
                await in_time(self._until_loaded(entry), f"the model {entry.name} was loaded")
        # Nothing is awaited between the last look at the entry and this.
        running = cast(Running, entry.running)
        entry.num_holds += 1
        entry.is_fresh = entry.is_fresh and not wakes
        try:
            yield running.served
        finally:
            entry.num_holds -= 1
            entry.last_use = time.monotonic() if wakes else entry.last_use

    def _entry_of(self, fields: Mapping[str, Any]) -> ModelEntry:
        name = fields.get("model")
        if self.files is None:
            # One model: its name is checked with the request's other fields.
            return self._default_entry
        name = self.true_name(name if isinstance(name, str) else None, is_request=True)
        if self._is_default(name):
            return self._default_entry
        return self._entries.setdefault(name, ModelEntry(name))

    async def _until_loaded(self, entry: ModelEntry) -> None:
        entry.num_waiting += 1
        try:
            while entry.running is None or entry.stop is not None:
                if self.is_sleeping:
                    await self.rouse()
                if entry.stop is not None:
                    await asyncio.wait({entry.stop})
                    continue
                if entry.start is None:
                    entry.start = _spawn(self._start(entry))
                await asyncio.shield(entry.start)
        finally:
            entry.num_waiting -= 1

    async def unload(self, name: str) -> None:
        """Unload a model of the folder when its running answers have ended; nothing for one that is not loaded."""
        entry = self._entries.get(name)
        if entry is None:
            return
        if entry.start is not None:
            await asyncio.wait({entry.start})
        await self._gone(entry)

    async def change(self, name: str, work: Callable[..., None], *args: Any) -> None:
        """Change the model of the folder that has, or will have, this name: call `work` on a thread, one such at a
        time, and unload the model that was loaded under the name."""
        async with self._change_lock:
            await asyncio.to_thread(work, *args)
        await self.unload(name)
        entry = self._entries.get(name)
        if entry is not None and entry.running is None and entry.start is None and not entry.num_waiting:
            # Its size may have changed.
            del self._entries[name]

    async def _end_engines(self) -> None:
        """End all engines when their running answers have ended."""
        for name in list(self._entries):
            await self.unload(name)
        while self._default_entry.is_used:
            await asyncio.sleep(STOP_S)
        if self.default is not None:
            await self.default.client.close()

    async def _start_default(self) -> None:
        if self.default is not None:
            await self.default.client.start()

    async def close(self, at_once: bool = False) -> None:
        """End all models of the folder, `at_once` in mid-step, and the tasks that load them."""
        self._listing.close()
        await self.sleep.close()
        tasks = [task for entry in self._entries.values() for task in (entry.start, entry.stop) if task is not None]
        tasks += [] if self._watch is None else [self._watch]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for entry in self.loaded():
            await cast(Running, entry.running).close(at_once)

    # -- loading and unloading

    async def _start(self, entry: ModelEntry) -> None:
        load = cast(Callable[[str], Awaitable[Running]], self._load)
        began = time.monotonic()
        try:
            async with self._room:
                await self._make_room(entry)
            running = await load(entry.name)
        except BaseException as error:
            entry.has_room = False
            if isinstance(error, HeadraceError | OSError) and not isinstance(error, ModelNotFoundError):
                logger.error("%s can not be loaded: %s", entry.name, error)
                why = str(error) if self.files is None else self.files.without_root(str(error))
                raise ModelLoadError(f"the model {entry.name} can not be loaded: {why}") from error
            raise
        finally:
            entry.start = None
        entry.running, entry.is_fresh = running, True
        entry.last_use = time.monotonic()
        entry.memory = running.memory()
        logger.info("%s is loaded, in %.1f s", entry.name, entry.last_use - began)
        if self._watch is None:
            self._watch = _spawn(self._keep_watch())

    async def _make_room(self, entry: ModelEntry) -> None:
        """Unload models until there is room for one more. Raises `ModelLoadError` if even all of the memory is too
        little."""
        expected = entry.memory or (await self.facts(entry.name)).size + PROCESS_BYTES
        if self._max_memory is not None and expected > self._max_memory:
            raise ModelLoadError(f"it takes {expected:,} bytes, and --models-memory is {self._max_memory:,}")
        while True:
            others = [each for each in self._entries.values() if each.has_room]
            if not self._is_too_much(len(others) + 1, expected + sum(each.memory for each in others)):
                break
            await self._unload_one(others)
        entry.memory, entry.has_room = expected, True

    def _is_too_much(self, number: int, num_bytes: int) -> bool:
        too_large = self._max_memory is not None and num_bytes > self._max_memory
        return too_large or bool(self._max_loaded and number > self._max_loaded)

    async def _unload_one(self, entries: list[ModelEntry]) -> None:
        """Unload one of these entries: the least recently used one, idle ones before others. If none can be unloaded
        yet, wait."""
        ready = [each for each in entries if each.running is not None and not (each.is_fresh and each.num_waiting)]
        if ready:
            await self._gone(min(ready, key=lambda each: (each.is_used, each.last_use)))
            return
        tasks = {each.start for each in entries if each.start is not None}
        await (asyncio.wait(tasks) if tasks else asyncio.sleep(STOP_S))

    async def _gone(self, entry: ModelEntry) -> None:
        self._begin_stop(entry)
        if entry.stop is not None:
            await asyncio.wait({entry.stop})

    def _begin_stop(self, entry: ModelEntry) -> None:
        if entry.running is not None and entry.stop is None:
            entry.stop = _spawn(self._stop(entry, entry.running))

    async def _stop(self, entry: ModelEntry, running: Running) -> None:
        try:
            while entry.is_used:
                await asyncio.sleep(STOP_S)
            entry.memory = running.memory() or entry.memory
            await running.close()
            logger.info("%s is unloaded", entry.name)
        finally:
            entry.running = entry.stop = None
            entry.has_room = False

    async def _keep_watch(self) -> None:
        """Unload models that no call uses any more, dead ones, and idle ones when all together take too much memory."""
        while any(entry.running is not None for entry in self._entries.values()):
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            for entry in list(self.loaded()):
                running = cast(Running, entry.running)
                if entry.is_used or entry.num_waiting:
                    entry.last_use = now
                elif running.client.dead.is_set() or now - entry.last_use >= self._time_to_stay(entry):
                    self._begin_stop(entry)
            self._shed(now)
        self._watch = None

    def _shed(self, now: float) -> None:
        """Measure the models once a second, and unload an idle one if they have grown too large together."""
        if now < self._next_measure:
            return
        self._next_measure = now + MEASURE_S
        entries = [entry for entry in self.loaded() if entry.stop is None]
        for entry in entries:
            entry.memory = cast(Running, entry.running).memory() or entry.memory
        idle = [entry for entry in entries if not entry.is_used and not entry.num_waiting]
        if idle and len(entries) > 1 and self._is_too_much(0, sum(entry.memory for entry in entries)):
            self._begin_stop(min(idle, key=lambda entry: entry.last_use))

    def _time_to_stay(self, entry: ModelEntry) -> float:
        seconds = cast(Running, entry.running).served.keep_alive
        return self._keep_alive if seconds is None else seconds


class _Bound:
    """The methods of an API's class, each bound to the model of its call."""

    def __init__(self, models: ModelSet, api: type[Any], make: Callable[[ServedModel], Any], wakes: bool) -> None:
        self._models, self._api, self._make, self._wakes = models, api, make, wakes

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._api, name)

        @functools.wraps(method)
        def of_model(model: ServedModel, *args: Any) -> Any:
            return method(self._make(model), *args)

        return self._models.bound(of_model, self._wakes)


def _listed(names: list[str]) -> str:
    """Return the first of some names as a list for an error."""
    if not names:
        return "no models in the models folder"
    more = f" and {len(names) - MAX_LISTED} more, see GET /v1/models" if len(names) > MAX_LISTED else ""
    return ", ".join(repr(name) for name in names[:MAX_LISTED]) + more


def _spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task that belongs to no call: it has neither the caller's name nor its deadline. A failure is logged if
    no caller waits for the task any more."""

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, HeadraceError):
            logger.error("a change of the loaded models failed", exc_info=error)

    task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
    task.add_done_callback(ended)
    return task
