"""`Lifespan`: starts the model that stays loaded, watches over the application while it serves, and ends everything.

The probes read its state. Made by `serve.app`; knows no routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette

from headrace.engine.client import EngineClient
from headrace.insight.metrics import ServerMetrics
from headrace.protocol.errors import EngineDeadError, HeadraceError
from headrace.serve import startup
from headrace.serve.apis.openai.storage import Storage
from headrace.serve.call.sleeping import IdleSleep
from headrace.serve.call.states import ASLEEP, SERVING, State, refusal
from headrace.serve.loading import RunningModels
from headrace.serve.shedding import Shedding

logger = logging.getLogger("headrace.server")

LAG_INTERVAL_S = 0.1
SWITCH_S = 0.001
"""Seconds after which a thread that computes hands the interpreter's lock over. The event loop needs the lock again
after each wait and each send, and Python's 5 ms add up while a large reply is written on a thread."""
LINE = (
    "Avg prompt throughput: {prompt_tokens_per_second:.1f} tokens/s, "
    "Avg generation throughput: {generated_tokens_per_second:.1f} tokens/s, "
    "Running: {num_running} reqs, Waiting: {num_waiting} reqs, "
    "KV cache usage: {kv_cache_usage:.1%}, Prefix cache hit rate: {prefix_cache_hit_rate:.1%}"
)


class Lifespan:
    """The application's lifespan and its `State`. Without a model that stays loaded it is ready at once, for it can
    load others.

    Args:
        models: the served models; `Lifespan` starts and ends the model that stays, and ends the others.
        log_stats_interval: seconds between two log lines of statistics; 0 for none.
        policy: the order of waiting requests; None: the policy of the engine of the model that stays.
        idle: lets idle models sleep; None: they stay awake.
        shedding: measures the overload.

    Functions in `at_end` are called when the application ends. `why` is the reason of the policy, for people.
    """

    def __init__(
        self,
        models: RunningModels,
        log_stats_interval: float,
        storage: Storage,
        policy: str | None = None,
        idle: IdleSleep | None = None,
        shedding: Shedding | None = None,
    ) -> None:
        self.models = models
        self.shedding = shedding or Shedding()
        self.overload = self.shedding.overload
        self.idle = idle
        self._default = models.default
        self.storage = storage
        self.failure: BaseException | None = None
        self.draining = False
        self.is_cut = False
        self.ended = asyncio.Event()
        self.at_end: list[Callable[[], None]] = []
        self.url = ""
        self.num_routes = 0
        self.why = ""
        self._policy = policy
        self._interval = log_stats_interval

    def metrics(self) -> list[ServerMetrics]:
        """Return the metrics of the models that are loaded."""
        return [model.metrics for model in self.models.running]

    @property
    def num_open(self) -> int:
        """How many requests are open."""
        return sum(model.client.num_unfinished for model in self.models.running)

    @property
    def state(self) -> State:
        """What the server does now."""
        sleep = self.models.sleep
        if self.draining:
            return State.DRAINING
        if self.failure is not None:
            return State.DEAD
        if self._default is None or not sleep.is_over:
            return sleep.state
        client = self._default.client
        if client.dead.is_set():
            return State.DEAD
        # A fleet serves with its first engine, though orders wait for all.
        if sleep.state is State.LOADING and not (client.is_fleet and client.is_alive):
            return State.LOADING
        if not client.is_alive:
            return State.RESTARTING
        if client.is_stalled:
            return State.STALLED
        words = (worker.status for worker in self._default.served.workers)
        return next((State(word) for word in words if word != "ready"), State.READY)

    def status(self) -> str:
        """Return the state in one word, for probes; only "ready" means that requests should be sent here."""
        state = self.state
        if self.idle is not None and self.idle.is_dozing and state in (*ASLEEP, State.WAKING):
            return State.READY
        return State.SLEEPING if state is State.FALLING_ASLEEP else state

    def check_order(self, *states: State) -> None:
        """Raise `NotReadyError` unless an order that changes the engines may come in the present state: it is serving,
        or in one of `states`."""
        if (state := self.state) not in (*SERVING, *states):
            raise refusal(state)

    def drain(self, seconds: float) -> None:
        """Refuse new requests, and end the open ones with an error after `seconds`.

        `draining` may be set earlier: then the probes fail, each connection ends with its reply, and all calls are
        still answered."""
        self.draining = True
        for model in self.models.running:
            model.client.is_draining = True
        asyncio.get_running_loop().call_later(seconds, self._end_all)

    def _end_all(self) -> None:
        error = EngineDeadError("the server is shutting down and could wait no longer")
        for model in self.models.running:
            model.client.fail_all(error)

    @contextlib.asynccontextmanager
    async def run(self, app: Starlette) -> AsyncIterator[None]:
        """Load in the background, so that probes are answered meanwhile."""
        works = [self._start, self._log_stats, self._watch_loop, *([] if self.idle is None else [self.idle.watch])]
        tasks = [asyncio.create_task(work()) for work in works]
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            yield
        finally:
            sys.setswitchinterval(switch_s)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._default is not None:
                # First, for it ends the calls that wait for templates, grammars and texts.
                self._default.served.close()
            for close in self.at_end:
                await asyncio.to_thread(close)
            await self.storage.close()
            await self.models.close(self.is_cut)
            if self._default is not None:
                await self._default.close(self.is_cut)

    async def _start(self) -> None:
        default = self._default
        if default is not None:
            logger.info("loading %s; until it is ready, %s answers probes only", default.served.name, self.url)
        try:
            if default is not None:
                await default.served.warm_up()
                await default.client.start()
                default.begin()
            policy = self._policy if default is None else default.client.info.scheduling_policy
            self.storage.start(policy)
            if default is not None:
                self.models.sleep.become(State.READY)
        except Exception as error:  # of any kind: without an end the server would load for ever, and hide the error
            self.failure = error
            expected = isinstance(error, HeadraceError | OSError)
            logger.critical("the engine did not start: %s", error, exc_info=None if expected else error)
            self.ended.set()
            return
        if default is None:
            logger.info("ready: %s; models of the folder are loaded when they are named", self.url)
            return
        info = default.client.info
        served = default.served
        extra = startup.summary(
            info,
            default.path,
            self.url,
            self.num_routes,
            served.quality(info),
            served.defaults.sampling.temperature,
            self.why if info.scheduling_policy == self._policy else "as the engine was started",
        )
        logger.info("ready: %s", self.url, extra=extra)
        await default.client.dead.wait()
        self.failure = EngineDeadError("the engine died too often")
        self.ended.set()

    async def _watch_loop(self) -> None:
        """Measure the delay of the event loop, which grows when a function holds the loop or the interpreter's lock."""
        self.shedding.sample(0.0)  # /metrics has each resource from the first call on
        while True:
            due = time.monotonic() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            lag = max(0.0, time.monotonic() - due)
            self.shedding.sample(lag)
            for metrics in self.metrics():
                metrics.counts.on_lag(lag)

    async def _log_stats(self) -> None:
        lines: dict[EngineClient, StatsLine] = {}
        while self._interval > 0:
            clients = {model.client: model.served.name for model in self.models.running}
            lines = {client: lines.get(client) or StatsLine(client) for client in clients}
            await asyncio.sleep(self._interval)
            for client, line in lines.items():
                fields = line.next(self._interval)
                if not fields:
                    continue
                name = f"{clients[client]}: " if len(clients) > 1 else ""
                logger.info("%s%s", name, LINE.format(**fields), extra={"fields": {"model": clients[client]} | fields})


class StatsLine:
    """The statistics of an engine, for the log."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._before = client.total
        self._was_idle = True

    def next(self, seconds: float) -> dict[str, Any]:
        """Return the numbers of the time since the last call, which was `seconds` ago; none if the engine was idle now
        and before."""
        total, now = self._client.total, self._client.stats
        prompt = total.num_prompt_tokens - self._before.num_prompt_tokens
        generated = total.num_generated_tokens - self._before.num_generated_tokens
        is_idle = not (prompt or generated or self._client.num_unfinished)
        is_silent = is_idle and self._was_idle
        self._before, self._was_idle = total, is_idle
        if is_silent:
            return {}
        return {
            "prompt_tokens_per_second": prompt / seconds,
            "generated_tokens_per_second": generated / seconds,
            "num_running": now.num_running,
            "num_waiting": now.num_waiting,
            "kv_cache_usage": now.kv_cache_usage,
            "prefix_cache_hit_rate": total.prefix_cache_hits / max(1, total.prefix_cache_queries),
        }
