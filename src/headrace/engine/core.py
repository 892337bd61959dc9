"""`EngineCore`: one scheduler, one executor, one step. A plain object without threads, sockets or text.

`step` goes one way: schedule -> start -> finish -> commit; nothing calls back. Where the executor can, the next step is
scheduled and started before the result of the one before is known. Its callers are `LLM`, the engine thread
of an in-process client, and the engine's own process. The clock is an argument, so that a simulation can hold it still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from headrace.core.journal import Journal
from headrace.core.requests import verify_fit, verify_model, verify_wholes
from headrace.core.scheduler import Scheduler
from headrace.core.sequence import NEVER, Status
from headrace.protocol.adapters import AdapterRead, AdapterReply, AdapterStore, LoadAdapter, UnloadAdapter, base_of
from headrace.protocol.errors import RequestError
from headrace.protocol.step import EngineInfo, Request, ScheduledBatch, Stats, StepOutput, StepResult

Ticket: TypeAlias = Any
"""A step that an executor has started and not yet finished, in the executor's own form."""


class Executor(Protocol):
    """Owns the model and the KV cache's memory. `runner` has the real one, `SimulatedExecutor` is the oracle.

    A step is started and then finished, each once. In between the device may be at work, so the blocks of the step must
    neither be freed nor written, but for the tables, which may grow. Its caller may do anything else: receive requests,
    send answers, start the next step; steps are computed and finished in the order of their starts. Either call may
    raise, for faults that belong to no single request; all steps that are not finished have not happened then, and
    their tickets are void.
    """

    def start(self, batch: ScheduledBatch) -> Ticket:
        """Begin to compute one step. May return before it is computed."""
        ...

    def finish(self, ticket: Ticket) -> StepResult:
        """Wait for the step and return its result."""
        ...

    def run(self, batch: ScheduledBatch) -> StepResult:
        """Start one step and finish it."""
        return self.finish(self.start(batch))

    def close(self) -> None:
        """Release memory and threads. May be called twice."""
        ...


class EngineCore:
    """Continuous batching over one model.

    Args:
        scheduler: chooses each step.
        executor: computes it.
        info: the numbers that requests are checked against.
        clock: seconds, monotonic.
        check_every: run `Scheduler.check()` after each n-th step (0: only when idle).
        on_idle: called by the engine's process or thread when the work has run out.

    `journal`, if set, notes each step; it changes none. `fingerprint` returns a digest of all that decides the bits of
    its answers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        info: EngineInfo,
        clock: Callable[[], float],
        check_every: int = 0,
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.info = info
        self.num_steps = 0
        # The steps that are started and not finished: at most one between two calls of `step`.
        self._tickets: deque[tuple[ScheduledBatch, Ticket]] = deque()
        self.on_idle = on_idle
        self.journal: Journal | None = None
        self.adapters: AdapterStore | None = None
        self.fingerprint: Callable[[], str] = lambda: "unknown"
        self.clock = clock
        self._check_every = check_every

    def add(self, request: Request, times: Sequence[float] = ()) -> None:
        """Accept a request; `times`: of its `Add`. Raises `RequestError`, with nothing changed, if it cannot be
        served."""
        verify_model(request, self.info)
        if request.adapter and (self.adapters is None or request.adapter not in self.adapters):
            raise RequestError("model", request.adapter[:12], "an adapter that is loaded; this one is not, or no more")
        self.scheduler.add(request)
        if self.journal is not None:
            self.journal.arrived(request, times)

    def abort(self, request_id: str) -> bool:
        """End a request early. False if it is unknown or has ended, which is no error: ends race with aborts."""
        return self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> StepOutput:
        """Compute one step: some tokens for some requests. Cheap and empty without work.

        Raises the executor's errors, and an interrupt. Then neither the step nor one that was started after it has
        happened: their requests wait again, and can be aborted or tried once more.
        """
        start = self.clock()
        if not self._tickets:
            self._start(self.scheduler.schedule())
        ahead = self.scheduler.schedule_ahead()
        if ahead is not None:
            self._start(ahead)
        batch, ticket = self._tickets.popleft()
        try:
            result = self.executor.finish(ticket)
        except BaseException:
            self._retract()
            raise
        computed = self.clock()
        output = self.scheduler.commit(batch, result)
        self.num_steps += 1
        if (self._check_every and self.num_steps % self._check_every == 0) or not self.scheduler.has_work():
            self.scheduler.check()
        output.start_time = start
        output.end_time = self.clock()
        if self.journal is not None:
            output.note = self.journal.note(batch, result, output, computed)
        return output

    def _start(self, batch: ScheduledBatch) -> None:
        if self.journal is not None:
            self.journal.plan(batch)
        try:
            self._tickets.append((batch, self.executor.start(batch)))
        except BaseException:
            self._retract()
            raise

    def _retract(self) -> None:
        """Withdraw all steps in flight: the executor has raised."""
        self._tickets.clear()
        self.scheduler.retract()

    def stats(self) -> Stats:
        return self.scheduler.stats()

    def read_adapter(self, path: str) -> AdapterRead:
        """Read an adapter. Any thread may call it, also in mid-step."""
        try:
            if self.adapters is None:
                raise RequestError("enable_lora", False, "true for an engine that takes adapters")
            return AdapterRead(*self.adapters.read(path))
        except RequestError as error:
            return AdapterRead(refused=(error.field, str(error.value), error.bound))

    def change_adapters(self, order: LoadAdapter | AdapterRead | UnloadAdapter) -> AdapterReply:
        """Load an adapter, which is read first or was read before, or unload one, between two steps. One that a
        sequence uses stays."""
        try:
            if isinstance(order, LoadAdapter):
                order = self.read_adapter(order.path)
            if self.adapters is None:
                raise RequestError("enable_lora", False, "true for an engine that takes adapters")
            if isinstance(order, AdapterRead):
                if order.adapter is not None:
                    self.adapters.put(order.adapter, order.prepared)
                return AdapterReply(order.adapter, order.refused)
            # One that has ended and is not reported yet is no user, unless a step of it may still be computed.
            users = [
                seq
                for seq in self.scheduler.sequences.values()
                if (self._tickets or seq.status is not Status.FINISHED) and base_of(seq.request.adapter) == order.digest
            ]
            if users:
                raise RequestError("lora_name", order.digest[:12], f"one that no request uses; {len(users)} do")
            self.adapters.unload(order.digest)
            return AdapterReply()
        except RequestError as error:
            return AdapterReply(refused=(error.field, str(error.value), error.bound))

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no running sequence holds."""
        self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        self.executor.close()


def verify(request: Request, info: EngineInfo) -> None:
    """Check a request before it is sent to an engine: all that `EngineCore.add` checks, but for a request id in use.

    Raises `RequestError`, or `ContextLengthError` for a prompt that is too long.
    """
    max_num_seqs = min(info.max_num_seqs, info.max_num_batched_tokens)
    # Beams may share less than all of a window's blocks: the engine, which knows how much, checks that itself.
    num_blocks = NEVER if info.kinds[0].window else info.num_blocks
    verify_fit(request, info.max_model_len, max_num_seqs, num_blocks, info.block_size)
    verify_model(request, info)
    verify_wholes(request, info.max_num_batched_tokens)
