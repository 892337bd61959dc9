"""The journal of an engine: the work of each step, and its times. One stream for metrics of a request, recordings and
viewers.

`Journal` reads the notes of the scheduler (ints) after each step and adds the times. A `Note` has no tokens and no
text, but for the few token ids around a miss of the prefix cache and those of guesses, which travel next to the `Step`.
The events of blocks and the tokens of guesses are in it only while there is a viewer. The journal changes nothing:
schedule and output are the same with and without it.

Must not know HTTP or the readers of the notes. Called by `engine.core`; `insight.lives` reads the notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any

import msgspec

from headrace.core.blocks import CACHED, TAKEN
from headrace.core.scheduler import Scheduler
from headrace.core.shares import MAX_PREEMPTIONS
from headrace.protocol.step import Request, ScheduledBatch, StepOutput, StepResult

RESET = 6
"""A further block event, numbered after those in `core.blocks`: all blocks are free; those in use follow as if taken
just now."""

BlockEvent = tuple[int, list[int], list[int]]


class Wait(IntEnum):
    """The resource that the head of the queue lacked in a step: nothing (it is empty); tokens of the step's budget; a
    place among the running; blocks; the room that protected sequences may claim; or it waits to share a sibling's
    prompt."""

    NONE, TOKENS, PLACES, BLOCKS, PROTECTION, SIBLING = range(6)


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """A request that the engine took in. `times`, in monotonic seconds: when the call came, when its prompt was
    tokenised, when it was sent to the engine, and when the engine read it. `num_known` tokens came with it, the first
    `num_prompt` of them as prompt."""

    seq_id: int
    request_id: str
    num_prompt: int
    num_known: int
    times: list[float]


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that began to run on `num_cached` tokens of the prefix cache, and why not more (`core.prefix.Miss`):
    the token `at` which the lookup ended. An evicted block was evicted at `evicted_time`, to make room for the sequence
    `by`."""

    seq_id: int
    num_cached: int
    miss: int
    at: int
    evicted_time: float = 0.0
    by: int = 0


class Step(msgspec.Struct, array_like=True, gc=False):
    """One step. Sequences are ints; beams count as the first of their search.

    `times`: begun, scheduled, computed and ended, in monotonic seconds. Column i computed `lens[i]` tokens of sequence
    `seq_ids[i]` from `starts[i]` on. `guesses` are (column, draft tokens, those kept); the masks of the columns in
    `late` were. `preemptions` are (sequence, for which other; 0: none), `ends` (sequence, reason). `head` is the first
    sequence of the queue after the step was chosen, and the resource that it lacked (`Wait`). `blocks` are events
    (`core.blocks`), None without a viewer.
    """

    step_id: int
    times: tuple[float, float, float, float]
    seq_ids: list[int]
    starts: list[int]
    lens: list[int]
    guesses: list[tuple[int, int, int]] = []
    late: list[int] = []
    arrivals: list[Arrival] = []
    admissions: list[Admission] = []
    preemptions: list[tuple[int, int]] = []
    ends: list[tuple[int, str]] = []
    head: tuple[int, int] = (0, 0)
    blocks: list[BlockEvent] | None = None


class Note(msgspec.Struct, array_like=True, gc=False):
    """A step, and apart from it the token ids around the misses of the prefix cache, by sequence: the request's, and
    the ids of the newest cached block in that place; and of guesses, by column: the draft's and then the answer's."""

    step: Step
    token_ids: dict[int, tuple[list[int], list[int]]] = {}
    guesses: dict[int, tuple[list[int], list[int]]] = {}


_encoder = msgspec.msgpack.Encoder()
decode_note = msgspec.msgpack.Decoder(Note).decode
"""Return the `Note` of `StepOutput.note`."""


def arrival_times(times: Sequence[float], now: float) -> list[float]:
    """Return the four times of an `Arrival` at an engine that reads it `now`; missing times are `now`, too."""
    return [*times, *[now] * (4 - len(times))]


class Journal:
    """Makes the notes of one engine. `clock` returns monotonic seconds. `last` is the latest note."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.last: Note | None = None
        self._scheduler = scheduler
        self._clock = clock
        self._seq_ids: dict[str, int] = {}
        self._arrivals: list[Arrival] = []
        # Of the steps in flight, by id: when each was scheduled, its sequences, and the head of the queue.
        self._plans: dict[int, tuple[float, list[int], tuple[int, int]]] = {}

    def watch(self, is_watched: bool) -> None:
        """Begin or end the events of blocks. They begin with the blocks in use."""
        self._scheduler.pool.log = list(self._snapshot()) if is_watched else None

    def _snapshot(self) -> Iterable[tuple[int, Iterable[int], list[int]]]:
        pool, steps = self._scheduler.pool, self._scheduler.steps
        yield RESET, (0,), []
        for seq in [*self._scheduler.running, *steps.zombies()]:
            for table in (seq.block_table, *seq.tails):
                yield TAKEN, (seq.arrival,), [block for block in table if block >= 0]
        yield TAKEN, (0,), list(pool.pins)
        yield CACHED, (0,), [block for block, is_cached in enumerate(pool.cached) if is_cached]

    def arrived(self, request: Request, times: Sequence[float]) -> None:
        """Note a request that the scheduler has just accepted. `times` are the first of `Arrival.times`."""
        now = self._clock() if len(times) < 4 else times[3]
        seq_id = self._scheduler.sequences[request.request_id].arrival
        self._seq_ids[request.request_id] = seq_id
        num_prompt = len(request.prompt_token_ids)
        num_known = num_prompt + len(request.resume_token_ids)
        self._arrivals.append(Arrival(seq_id, request.request_id, num_prompt, num_known, arrival_times(times, now)))
        self._scheduler.cache.now = int(1e6 * now)

    def plan(self, batch: ScheduledBatch) -> None:
        """Note that `batch` was scheduled and is computed from now on."""
        while len(self._plans) > 1:  # those that were withdrawn
            del self._plans[next(iter(self._plans))]
        seq_ids = [seq.arrival for seq in self._scheduler.flight]
        self._plans[batch.step_id] = self._clock(), seq_ids, head_of(self._scheduler, batch)

    def note(self, batch: ScheduledBatch, result: StepResult, output: StepOutput, computed: float) -> bytes:
        """Return the `Note` of a step that was committed, as msgpack. The result was there at `computed`."""
        scheduler, notes, pool = self._scheduler, self._scheduler.notes, self._scheduler.pool
        scheduled, seq_ids, head = self._plans.pop(batch.step_id)
        times = output.start_time, scheduled, computed, output.end_time
        step = Step(batch.step_id, times, seq_ids, batch.starts, batch.lens, head=head)
        if batch.drafts:
            step.guesses = [(i, len(d.token_ids), len(result.read(i).further)) for i, d in batch.drafts.items()]
        if result.rows:
            step.late = sorted(result.column("is_deferred"))
        step.arrivals, self._arrivals = self._arrivals, []
        token_ids: dict[int, Any] = {}
        while notes.admitted:
            seq_id, num_cached, verdict = notes.admitted.popleft()
            why = int(verdict.miss), verdict.at, verdict.time / 1e6, verdict.by
            step.admissions.append(Admission(seq_id, num_cached, *why))
            if verdict.theirs:
                token_ids[seq_id] = list(verdict.ours), list(verdict.theirs)
        step.preemptions = [notes.preempted.popleft() for _ in range(len(notes.preempted))]
        step.ends = [(self._seq_ids.pop(name, 0), finish.reason) for name, finish in output.finished.items()]
        self.last = Note(step, token_ids)
        if pool.log is not None:
            step.blocks = [(kind, list(users), blocks) for kind, users, blocks in pool.log]
            pool.log = []
            for i, draft in batch.drafts.items():
                self.last.guesses[i] = draft.token_ids, [result.token_ids[i], *result.read(i).further]
        scheduler.cache.now = int(1e6 * output.end_time)
        return _encoder.encode(self.last)


def head_of(scheduler: Scheduler, batch: ScheduledBatch) -> tuple[int, int]:
    """Return the first sequence that waits after `batch` was chosen, and the resource that it lacked; (0, 0) if none
    waits."""
    if not len(scheduler.waiting):
        return 0, Wait.NONE
    return scheduler.waiting[0].arrival, _lack(scheduler, batch)


def _lack(scheduler: Scheduler, batch: ScheduledBatch) -> Wait:
    seq, searches = scheduler.waiting[0], scheduler.searches
    if scheduler.tables.awaits_sibling(seq):
        return Wait.SIBLING
    search = searches.get(seq) if seq.is_beam else None
    num_places = scheduler.max_num_seqs - len(scheduler.running) - (searches.num_absent() if searches.open else 0)
    if num_places < (1 if search is None else search.width):
        return Wait.PLACES
    num_drafted = sum(len(draft.token_ids) for draft in batch.drafts.values())
    budget = scheduler.max_num_batched_tokens - len(batch.token_ids) - num_drafted
    # Without chunks the whole gap must fit the step, less the cached tokens, which are not looked up here.
    if budget <= 0 or (not scheduler.enable_chunked_prefill and len(seq.tokens) > budget):
        return Wait.TOKENS
    if seq.num_preemptions >= MAX_PREEMPTIONS:
        protected = [other for other in scheduler.running if other.num_preemptions >= MAX_PREEMPTIONS]
        if not searches.fit([*protected, seq]):
            return Wait.PROTECTION
    return Wait.BLOCKS
