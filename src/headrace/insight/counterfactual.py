"""The counterfactual life of a recorded request, had another one not come: `simulate` runs the scheduler without the
other.

Output depends on the request alone, so each request generates its recorded tokens; scheduler, prefix cache, preemptions
and verification of drafts are the real ones (`insight.simulated`). How long a step takes is an estimate: the sum of a
constant, a time for each row, and a time for each token that a row looks back on, fitted to the recorded steps, times
the slowness of the machine at that moment. The estimate leaves out late masks of grammars, failed steps, drafts after
tokens where the recording has none, and clients who might have come at other times. Called by `headrace explain`.
"""

from __future__ import annotations

import contextlib
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, NamedTuple

import msgspec

from headrace.core.journal import Journal, Step
from headrace.engine.build import make_scheduler
from headrace.engine.core import EngineCore
from headrace.engine.records.blind import Recording, notes_of
from headrace.engine.records.recording import Record, StepEnd, StepPlan, StepTimes
from headrace.insight.lives import Life, Lives
from headrace.insight.simulated import Behaviour, Oracle, SimulatedExecutor
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Abort, Add, Draft, EngineInfo, ResetPrefixCache, ScheduledBatch, StepResult

NUM_AROUND = 17


class StepTime(NamedTuple):
    """Seconds of a step, of each of its rows, and of each token before them; and between two steps."""

    step: float
    row: float
    token: float
    between: float

    def of(self, starts: Sequence[int], lens: Sequence[int], num_guesses: int) -> float:
        """Return the seconds of a step with these chunks."""
        return self.step + self.row * (sum(lens) + num_guesses) + self.token * _lookback(starts, lens)

    def of_step(self, step: Step) -> float:
        return self.of(step.starts, step.lens, sum(num for _, num, _ in step.guesses))


class Slowness:
    """How many times as long as fitted the `NUM_AROUND` recorded steps around a time took."""

    def __init__(self, steps: Sequence[Step], times: StepTime) -> None:
        self._ends = [step.times[3] for step in steps]
        self._seconds = [0.0, *accumulate(step.times[3] - step.times[0] for step in steps)]
        self._fitted = [0.0, *accumulate(times.of_step(step) for step in steps)]

    def at(self, now: float) -> float:
        first = max(0, min(bisect(self._ends, now) - NUM_AROUND // 2, len(self._ends) - NUM_AROUND))
        last = min(first + NUM_AROUND, len(self._ends))
        return (self._seconds[last] - self._seconds[first]) / (self._fitted[last] - self._fitted[first] or 1.0)


class RecordedRequest(msgspec.Struct):
    """A recorded request: its message, and its tokens, of which the first `num_given` came with it. By the number of
    known tokens: the drafts that it got, and how many tokens a grammar then forced. `aborted`: when it was."""

    add: Add
    tokens: list[int]
    num_given: int
    drafts: dict[int, Draft] = {}
    num_forced: dict[int, int] = {}
    aborted: float | None = None

    def is_over(self, num_left: int, now: float) -> bool:
        """Whether its client ends it: after the same tokens, or, if there were none, at the same time."""
        if len(self.tokens) > self.num_given:
            return num_left <= 0
        return self.aborted is not None and now >= self.aborted


class Simulation(NamedTuple):
    """A request in the recording, and as the scheduler with estimated times has it, with the other request and without.

    The second tells how far the estimate is from the first."""

    recorded: Life
    estimated: Life
    without: Life


def simulate(recording: Recording, request_id: str, other_id: str) -> Simulation:
    """Return the life of a request without another one.

    Raises `RecordingError`, `ReplayDifference`, and `HeadraceError` for a recording that cannot be simulated.
    """
    records = list(recording.records)
    lives, steps = Lives(max_lives=2**62), list[Step]()
    for note in notes_of(recording._replace(records=iter(records))):
        lives.follow(note)
        steps.append(note.step)
    answers, resets = _answers(records, steps)
    times = fitted(steps)
    slowness = Slowness(steps, times)
    others = {name: answer for name, answer in answers.items() if name != other_id}
    estimated, without = (_run(recording, each, resets, times, slowness).find(request_id) for each in (answers, others))
    recorded = lives.ended.get(request_id)
    if recorded is None or estimated is None or without is None:
        raise HeadraceError(f"{request_id} did not run to its end in the recording")
    return Simulation(recorded, estimated, without)


def fitted(steps: Sequence[Step]) -> StepTime:
    """Return the times that fit recorded steps best: least squares of the relative errors, with no part below zero."""
    rows = []
    for step in steps:
        seconds = step.times[3] - step.times[0]
        if seconds > 0:
            num_rows = sum(step.lens) + sum(num for _, num, _ in step.guesses)
            rows.append([1 / seconds, num_rows / seconds, _lookback(step.starts, step.lens) / seconds])
    if not rows:
        raise HeadraceError("the recording has no steps to estimate times from")
    parts = [0, 1, 2]
    while True:
        solution = _least_squares([[row[part] for part in parts] for row in rows])
        if min(solution) >= 0:
            break
        parts.pop(min(range(len(parts)), key=solution.__getitem__))
    seconds_of = dict(zip(parts, solution, strict=True))
    gaps = [after.times[0] - before.times[3] for before, after in pairwise(steps)]
    # The pauses of an idle engine are longer.
    between = median(sorted(gaps)[: max(1, len(gaps) // 2)]) if gaps else 0.0
    return StepTime(seconds_of.get(0, 0.0), seconds_of.get(1, 0.0), seconds_of.get(2, 0.0), max(0.0, between))


def _lookback(starts: Sequence[int], lens: Sequence[int]) -> float:
    return sum(start * length + length * length / 2 for start, length in zip(starts, lens, strict=True))


def _least_squares(rows: list[list[float]]) -> list[float]:
    """Return x with the least sum of (row . x - 1) ** 2, by Gauss-Jordan elimination of the normal equations."""
    size = len(rows[0])
    scales = [max(abs(row[i]) for row in rows) or 1.0 for i in range(size)]
    rows = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)] + [sum(row[i] for row in rows)] for i in range(size)
    ]
    for i in range(size):
        # A small number on the diagonal keeps the matrix regular where two columns are the same in all steps.
        matrix[i][i] += 1e-9 * len(rows)
        pivot = matrix[i][i]
        matrix[i] = [value / pivot for value in matrix[i]]
        for j in range(size):
            if j != i:
                factor = matrix[j][i]
                matrix[j] = [value - factor * above for value, above in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][size] / scales[i] for i in range(size)]


def _answers(records: list[Record], steps: list[Step]) -> tuple[dict[str, RecordedRequest], list[float]]:
    """Return the recorded requests with their tokens, and the times at which the prefix cache was reset."""
    answers: dict[str, RecordedRequest] = {}
    names: dict[int, str] = {}
    resets: list[float] = []
    notes = iter(steps)
    now = records[0].times[3] if records and isinstance(records[0], Add) else 0.0
    plan: StepPlan | None = None
    end: StepEnd | None = None
    for record in records:
        match record:
            case Add(request, times):
                if request.beam is not None:
                    raise HeadraceError("a recording with beam searches can not be simulated")
                known = [*request.prompt_token_ids, *request.resume_token_ids]
                answers[request.request_id] = RecordedRequest(record, known, len(known))
                now = max(now, times[3])
            case Abort(request_id) if request_id in answers:
                answers[request_id].aborted = now
            case ResetPrefixCache():
                resets.append(now)
            case StepPlan():
                plan = record
            case StepEnd():
                end = record
            case StepTimes(_, step_times) if plan is not None and end is not None:
                names |= {arrival.seq_id: arrival.request_id for arrival in next(notes).arrivals}
                _extend(answers, names, plan, end.result)
                now = step_times[3]
    return answers, resets


def _extend(answers: dict[str, RecordedRequest], names: dict[int, str], plan: StepPlan, result: StepResult) -> None:
    """Add the tokens of one step."""
    for index, seq_id in enumerate(plan.seq_ids):
        answer, token, row = answers[names[seq_id]], result.token_ids[index], result.read(index)
        if token >= 0 and plan.samples[index] and not row.is_deferred and not row.error:
            answer.tokens += [token, *row.further]
            if row.forced:
                answer.num_forced[len(answer.tokens)] = len(row.forced)
                answer.tokens += row.forced
        if row.draft is not None:
            answer.drafts[len(answer.tokens)] = row.draft


class Recalled(Oracle):
    """The "model" of a recording: the token after a context is the recorded one. `answers` are by sequence."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        super().__init__(vocab_size, eos_token_ids)
        self.answers: dict[int, RecordedRequest] = {}
        self._answer: RecordedRequest | None = None
        self._num_known = 0

    def next_token(self, context: Any, params: SamplingParams, num_generated: int, state: int | None = None) -> int:
        # The last token is always the sequence's own; those before may be shared.
        answer = self._answer = self.answers[context[-3]]
        self._num_known = len(context) // 3
        return answer.tokens[self._num_known] if self._num_known < len(answer.tokens) else 0

    def forced_after(self, params: SamplingParams, position: int, num_generated: int) -> list[int]:
        answer = self._answer
        return [] if answer is None else answer.tokens[position : position + answer.num_forced.get(position, 0)]

    def guess(self, step_id: int, index: int, next_token: Callable[[list[int]], int]) -> Draft | None:
        """Return the draft that was recorded after the same tokens."""
        next_token([])
        draft = None if self._answer is None else self._answer.drafts.get(self._num_known)
        return None if draft is None else Draft(list(draft.token_ids), list(draft.parents))


class Estimated(SimulatedExecutor):
    """An executor whose steps take estimated times, on a clock that stands at `now`."""

    def __init__(self, times: StepTime, slowness: Slowness, now: float, info: EngineInfo, oracle: Recalled) -> None:
        sizes = info.num_blocks, info.block_size
        super().__init__(
            *sizes,
            oracle,
            Behaviour(lambda seq_id: seq_id, guess=oracle.guess),
            kinds=info.kinds,
            more_blocks=info.more_blocks,
        )
        self.now = now
        self._times = times
        self._slowness = slowness

    def finish(self, ticket: ScheduledBatch) -> StepResult:
        num_guesses = sum(len(draft.token_ids) for draft in ticket.drafts.values())
        result = super().finish(ticket)
        self.now += self._times.of(ticket.starts, ticket.lens, num_guesses) * self._slowness.at(self.now)
        return result


def _run(
    recording: Recording,
    answers: dict[str, RecordedRequest],
    resets: Sequence[float],
    times: StepTime,
    slowness: Slowness,
) -> Lives:
    """Return the lives of requests that come at their recorded times, and generate their recorded tokens."""
    info, config = recording.head.info, recording.config
    scheduler = make_scheduler(config, info, speculates=config.speculative_config is not None)
    oracle, lives = Recalled(info.vocab_size, info.eos_token_ids), Lives(max_lives=2**62)
    adds = deque(sorted((answer.add for answer in answers.values()), key=posted))
    executor = Estimated(times, slowness, posted(adds[0]), info, oracle)
    core = EngineCore(scheduler, executor, info, lambda: executor.now)
    journal = core.journal = Journal(scheduler, core.clock)
    pending_resets = deque(resets)
    num_left = {name: len(answer.tokens) - answer.num_given for name, answer in answers.items()}
    while adds or core.has_work():
        if not core.has_work():
            executor.now = max(executor.now, posted(adds[0]))
        while adds and posted(adds[0]) <= executor.now:
            request, arrival = adds[0].request, [*adds.popleft().times[:3], executor.now]
            # One that was refused is refused again.
            with contextlib.suppress(RequestError):
                core.add(request, arrival)
                oracle.answers[scheduler.sequences[request.request_id].arrival] = answers[request.request_id]
        while pending_resets and pending_resets[0] <= executor.now:
            pending_resets.popleft()
            core.reset_prefix_cache()
        for name in [*scheduler.sequences]:
            if answers[name].is_over(num_left[name], executor.now):
                core.abort(name)
        if core.has_work():
            output = core.step()
            executor.now += times.between
            for name, token_ids in zip(output.request_ids, output.token_ids, strict=True):
                num_left[name] -= len(token_ids)
            if journal.last is not None:
                lives.follow(journal.last)
    return lives


def posted(add: Add) -> float:
    """Return when a request was sent to the engine."""
    return add.times[2]
