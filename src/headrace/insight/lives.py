"""`Lives`: where the time of each request went, from the notes of the journal.

The parts of a request's life are a partition: they sum to its latency. A request seldom begins to wait for something
else, so a life is only touched when it does: `Lives` sums the time of all steps by purpose, and a life notes the sums
at the beginning of each of its states. A step costs some set operations, however many requests run or wait.

Knows no text and no HTTP. `insight.explain` puts it into words; the server's and the recordings' lives are the same.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from headrace.core.journal import Admission, Arrival, Note, Step, Wait
from headrace.insight.limits import Reads
from headrace.insight.time_split import BY_FIT, BY_ROWS, TimeSplit, by_fit, by_rows
from headrace.protocol.step_model import StepModel

MAX_LIVES = 10_000
"""Ended requests that are kept."""
MAX_CHUNKS = 8192
MAX_SPANS = 256

ESTIMATES = frozenset(("beside_prefill", "beside_guesses"))
"""Parts that are a share of steps which others used too (`insight.time_split`)."""


class Sums(NamedTuple):
    """Seconds of all steps so far: between them, in them, and of a decode row's share of them (own work, prefill chunks
    of others, guesses); and in them by the resource that the head of the queue lacked (`Wait`)."""

    between: float = 0.0
    steps: float = 0.0
    own: float = 0.0
    prefill: float = 0.0
    guesses: float = 0.0
    waits: tuple[float, ...] = (0.0,) * len(Wait)


class Chunk(NamedTuple):
    """A chunk of a prompt: the step's times, whose it was, and its tokens."""

    begun: float
    ended: float
    seq_id: int
    num_tokens: int


class Miss(msgspec.Struct, frozen=True):
    """The cached tokens at one admission, its time, and the token ids around the miss on both sides."""

    time: float
    admission: Admission
    token_ids: tuple[list[int], list[int]] | None


class Life(msgspec.Struct):
    """One request. Times are monotonic seconds, 0 for what has not happened; `parts` are seconds by name.

    `waits` are the seconds in the queue by the resource that its head lacked. `spans` are (name, begin, end), the first
    `MAX_SPANS`. `replica` has it, or had it last. `holder` is the name of the caller's key. `reads`: the total of all
    steps before the first token; once the request has ended, the reads of the steps that decoded its answer
    (`limits.Reads.total`).
    """

    arrival: Arrival
    replica: int = 0
    holder: str = ""
    call_id: str = ""
    parts: dict[str, float] = {}
    waits: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(Wait))
    spans: list[tuple[str, float, float]] = []
    misses: list[Miss] = []
    preemptions: list[tuple[float, int]] = []
    num_guessed: int = 0
    num_kept: int = 0
    first_token: float = 0.0
    reads: tuple[float, float] = (0.0, 0.0)
    ended: float = 0.0
    reason: str = ""
    delivered: float = 0.0
    state: str = ""
    since: float = 0.0
    sums: Sums = Sums()
    position: int = 0
    high_water: int = 0

    @property
    def request_id(self) -> str:
        return self.arrival.request_id

    @property
    def num_cached(self) -> int:
        """Tokens that the prefix cache had at the first admission."""
        return self.misses[0].admission.num_cached if self.misses else 0

    @property
    def latency(self) -> float:
        """Seconds from the arrival of the call to the delivery of its last token."""
        return self.delivered - self.arrival.times[0]

    def add(self, part: str, seconds: float) -> None:
        if seconds:
            self.parts[part] = self.parts.get(part, 0.0) + seconds

    def span(self, name: str, begin: float, end: float) -> None:
        if self.spans and self.spans[-1][0] == name:
            self.spans[-1] = (name, self.spans[-1][1], end)
        elif len(self.spans) < MAX_SPANS:
            self.spans.append((name, begin, end))


class Lives:
    """The lives of open requests by sequence and request id, and of the last `MAX_LIVES` that ended by request id.

    `step_model` has the fitted times of the engine's steps, by which they are split; None: they are split by rows.

    In a fleet each replica has its own lives, made by `beside` of the first: each numbers its own sequences, and all
    share the requests.
    """

    def __init__(self, max_lives: int | None = None) -> None:
        self.replica = 0
        self.replicas = [self]
        self.ended: OrderedDict[str, Life] = OrderedDict()
        self.chunks: deque[Chunk] = deque(maxlen=MAX_CHUNKS)
        self.reads = Reads()
        self.step_model: StepModel | None = None
        self._max_lives = MAX_LIVES if max_lives is None else max_lives
        self._open: dict[int, Life] = {}
        self._open_requests: dict[str, Life] = {}
        self._names: OrderedDict[int, Life] = OrderedDict()
        self._sums = Sums()
        self._last = 0.0
        self._running: set[int] = set()
        self._prefilled: set[int] = set()
        self._decoding: set[int] = set()
        self._previous: Step | None = None

    @property
    def split(self) -> str:
        """The measure by which steps are split, in words."""
        return BY_ROWS if self.step_model is None else BY_FIT

    def beside(self, replica: int) -> Lives:
        """Return the lives of another replica."""
        for number in range(len(self.replicas), replica + 1):
            lives = Lives(self._max_lives)
            lives.replica, lives.replicas = number, self.replicas
            lives.ended, lives._open_requests = self.ended, self._open_requests
            self.replicas.append(lives)
        return self.replicas[replica]

    def of(self, life: Life) -> Lives:
        """Return the lives of the replica that has the request, or had it last."""
        return self.replicas[life.replica]

    def life_of(self, seq_id: int) -> Life | None:
        """Return the life of a sequence that is open or ended lately."""
        return self._names.get(seq_id)

    def find(self, request_id: str) -> Life | None:
        """Return the life of a request by its id."""
        return self.ended.get(request_id) or self._open_requests.get(request_id)

    def open(self) -> list[Life]:
        return list(self._open_requests.values())

    def phase_of(self, life: Life) -> str:
        """Return the phase of an open request: queued, preempted, no_budget, prefill or decode."""
        if life.replica != self.replica:
            return self.of(life).phase_of(life)
        if life.state in ("queued", "preempted", "no_budget"):
            return life.state
        return "decode" if life.arrival.seq_id in self._prefilled else "prefill"

    def num_unfilled(self, block_size: int) -> int:
        """Return how many slots of the last blocks of open sequences had no token after the latest step."""
        num = 0
        for lives in self.replicas:
            step = lives._previous
            right = {} if step is None else {column: num_kept for column, _, num_kept in step.guesses}
            for column, seq_id in enumerate([] if step is None else step.seq_ids):
                if seq_id in lives._open and step is not None:
                    num += -(step.starts[column] + step.lens[column] + right.get(column, 0)) % block_size
        return num

    def num_generated(self, life: Life) -> int:
        """Return how many tokens of the answer were drawn, as far as computed steps tell."""
        if life.replica != self.replica:
            return self.of(life).num_generated(life)
        known = max(life.position, self._position(life.arrival.seq_id), life.high_water)
        return max(0, known - life.arrival.num_prompt + 1) if life.first_token else 0

    def restart(self, request_ids: Collection[str]) -> None:
        """Note that the engine has ended: its sequences are gone, and the next one counts from the beginning. These
        requests go on, and arrive there again; any other was aborted, which its engine did not come to note."""
        for life in [life for life in self._open_requests.values() if life.request_id not in request_ids]:
            self.of(life)._break_off(life, "abort")
        self._open.clear()
        self._running.clear()
        self._prefilled.clear()
        self._decoding.clear()
        self._previous = None

    def deliver(self, request_id: str, now: float, reason: str = "") -> Life | None:
        """Note that the last token of a request is with its caller. One that the engine has not ended yet, as after a
        stop string, ends here with `reason`. Returns its life, None if that is not known."""
        life = self.ended.get(request_id)
        if life is None:
            life = self._open_requests.get(request_id)
            if life is not None:
                self.of(life)._break_off(life, reason)
        if life is not None:
            life.add("delivery", now - (life.delivered or life.ended))
            life.span("delivery", life.ended, now)
            life.delivered = now
        return life

    # -- a step ----------------------------------------------------------------------------------------------------

    def follow(self, note: Note) -> None:
        """Follow one step. Raises nothing for sequences that it does not know: they came before it was there."""
        step = note.step
        start_time, ended = step.times[0], step.times[3]
        for arrival in step.arrivals:
            self._arrive(arrival)
        before = self._sums
        self._sums = before._replace(between=before.between + start_time - (self._last or start_time))
        for seq_id, by in step.preemptions:
            self._preempt(seq_id, by, start_time)
        for admission in step.admissions:
            self._running.add(admission.seq_id)
            life = self._open.get(admission.seq_id)
            if life is not None:
                life.misses.append(Miss(start_time, admission, note.token_ids.get(admission.seq_id)))
        self.reads.follow(step)
        self._move_on(step)
        self._last, self._previous = ended, step
        for seq_id, reason in step.ends:
            life = self._remove(seq_id)
            if life is not None:
                self._end(life, reason, ended)

    def _arrive(self, arrival: Arrival) -> None:
        came, tokenised, posted, read = arrival.times
        in_step = max(0.0, min(read, self._last) - posted)
        last = self._last = self._last or read
        life = self._open_requests.get(arrival.request_id)
        if life is not None:
            # It was in an engine that died, or gave it up.
            before = self.of(life)
            before._leave(life, before._last)
            life.add("restarting", read - before._last)
            if before is not self and before._open.get(life.arrival.seq_id) is life:
                before._remove(life.arrival.seq_id)
            life.replica = self.replica
            life.arrival = msgspec.structs.replace(arrival, times=life.arrival.times)
        else:
            life = self._open_requests[arrival.request_id] = Life(arrival, self.replica)
            life.add("tokenising", tokenised - came)
            life.add("sending", posted - tokenised)
            life.add("mid_step", in_step)
            life.add("between_steps", read - posted - in_step)
            life.span("tokenising", came, posted)
            life.span("mid_step", posted, read)
        life.position = 0
        self._open[arrival.seq_id] = self._names[arrival.seq_id] = life
        if len(self._names) > self._max_lives:
            self._names.popitem(last=False)
        self._enter(life, "queued", read)
        # The time between the last step and now is not part of its wait.
        life.sums = life.sums._replace(between=life.sums.between + read - last)

    def _enter(self, life: Life, state: str, now: float) -> None:
        life.state, life.since, life.sums = state, now, self._sums

    def _leave(self, life: Life, now: float) -> None:
        """Add the time of the steps since the beginning of the state, by purpose."""
        sums, old, state = self._sums, life.sums, life.state
        life.add("between_steps", sums.between - old.between)
        if state == "decode":
            life.position = max(life.position, self._position(life.arrival.seq_id))
            life.add("decode", sums.own - old.own)
            life.add("beside_prefill", sums.prefill - old.prefill)
            life.add("beside_guesses", sums.guesses - old.guesses)
        elif state != "busy":
            life.add(state, sums.steps - old.steps)
        if state in ("queued", "preempted"):
            life.waits = [w + b - a for w, a, b in zip(life.waits, old.waits, sums.waits, strict=True)]
        if state != "busy":
            life.span(state, life.since, now)

    def _position(self, seq_id: int) -> int:
        """Return how many tokens of a sequence the previous step had computed, 0 if it was not in it."""
        step = self._previous
        if step is None or seq_id not in step.seq_ids:
            return 0
        column = step.seq_ids.index(seq_id)
        return step.starts[column] + step.lens[column]

    def _change(self, seq_id: int, state: str, now: float) -> Life | None:
        life = self._open.get(seq_id)
        if life is not None and life.state != state:
            self._leave(life, now)
            self._enter(life, state, now)
        return life

    def _preempt(self, seq_id: int, by: int, now: float) -> None:
        self._running.discard(seq_id)
        self._prefilled.discard(seq_id)
        self._decoding.discard(seq_id)
        life = self._change(seq_id, "preempted", now)
        if life is not None:
            life.preemptions.append((now, by))
            life.high_water = max(life.high_water, life.position)

    def _move_on(self, step: Step) -> None:
        start_time, ended = step.times[0], step.times[3]
        seconds = ended - start_time
        columns = set(step.seq_ids)
        wide = {i for i, length in enumerate(step.lens) if length > 1}
        guesses = {i: (num, num_kept) for i, num, num_kept in step.guesses}
        special = wide.union(guesses, step.late)
        if not columns <= self._prefilled:
            special |= {i for i, seq_id in enumerate(step.seq_ids) if seq_id not in self._prefilled}
        busy = {step.seq_ids[i] for i in special}
        plain = columns - busy
        for seq_id in plain - self._decoding:
            self._change(seq_id, "decode", start_time)
        for seq_id in self._running - columns:
            life = self._open.get(seq_id)
            # One that a step in flight admitted is not in this one.
            self._change(seq_id, "no_budget" if life is not None and life.position else "queued", start_time)
        for seq_id in busy:
            self._change(seq_id, "busy", start_time)
        self._decoding = plain
        prompts = {i: step.lens[i] for i in special if step.seq_ids[i] not in self._prefilled}
        shares, prefill, guessing = TimeSplit({}, 0.0), 0.0, 0.0
        if special:
            shares = self._shares(step, seconds, prompts, {i: num for i, (num, _) in guesses.items()})
            prefill, guessing = shares.prefill, shares.guesses
        sums = self._sums
        waits = list(sums.waits)
        waits[step.head[1]] += seconds
        self._sums = Sums(
            sums.between,
            sums.steps + seconds,
            sums.own + seconds - prefill - guessing,
            sums.prefill + prefill,
            sums.guesses + guessing,
            tuple(waits),
        )
        counted: set[int] = set()
        for i in sorted(special):
            self._work(step, i, seconds, shares, guesses.get(i), counted)
        for i, num in prompts.items():
            self.chunks.append(Chunk(start_time, ended, step.seq_ids[i], num))

    def _shares(self, step: Step, seconds: float, prompts: Collection[int], guesses: dict[int, int]) -> TimeSplit:
        """Return the seconds of the prompts in these columns, and of draft tokens by column."""
        if self.step_model is None:
            return by_rows(step, seconds, prompts, sum(guesses.values()))
        lives = {i: self._open.get(step.seq_ids[i]) for i in prompts}
        ends = {i for i, life in lives.items() if life and step.starts[i] + step.lens[i] >= self._num_known(life)}
        return by_fit(self.step_model, step, seconds, prompts, ends, guesses)

    @staticmethod
    def _num_known(life: Life) -> int:
        """Return the tokens that are computed before the request goes on."""
        return max(life.arrival.num_known, life.high_water + 1)

    def _work(
        self,
        step: Step,
        column: int,
        seconds: float,
        shares: TimeSplit,
        guess: tuple[int, int] | None,
        counted: set[int],
    ) -> None:
        """Add the time of a step to a life that computed something other than one token in it."""
        seq_id, start, length = step.seq_ids[column], step.starts[column], step.lens[column]
        life = self._open.get(seq_id)
        if life is None:
            return
        start_time, ended = step.times[0], step.times[3]
        stop = start + length
        if guess is not None:
            life.num_guessed += guess[0]
            life.num_kept += guess[1]
        is_prompt = seq_id not in self._prefilled
        num_known = self._num_known(life)
        if seq_id not in counted:  # a search has several columns, and one life
            counted.add(seq_id)
            if column in step.late:
                life.add("mask_late", seconds)
                life.span("mask_late", start_time, ended)
            else:
                prefill, guessing = shares.prefill - shares.prompts.get(column, 0.0), shares.guesses
                rest = seconds - prefill - guessing
                num_again = max(0, min(life.high_water, stop) - start)
                again = rest * min(1.0, num_again / length)
                life.add("recomputed", again)
                life.add("prefill" if is_prompt else "decode", rest - again)
                life.add("beside_prefill", prefill)
                life.add("beside_guesses", guessing)
                name = "recomputed" if num_again else "prefill" if is_prompt else "decode"
                life.span(name, start_time, ended)
        life.position = max(life.position, stop + (guess[1] if guess else 0))
        if is_prompt and stop >= num_known and column not in step.late:
            self._prefilled.add(seq_id)
            if not life.first_token:
                life.first_token, life.reads = ended, self.reads.total

    def _remove(self, seq_id: int) -> Life | None:
        """Remove a sequence that the engine has no more. Returns its life, None if that is not known."""
        self._running.discard(seq_id)
        self._prefilled.discard(seq_id)
        self._decoding.discard(seq_id)
        return self._open.pop(seq_id, None)

    def _break_off(self, life: Life, reason: str) -> None:
        """End a request that its engine has not ended."""
        if life.since > self._last:  # no step has begun since its state did
            life.state, life.sums = "busy", self._sums
        if self._open.get(life.arrival.seq_id) is life:
            self._remove(life.arrival.seq_id)
        self._end(life, reason, max(life.since, self._last))

    def _end(self, life: Life, reason: str, ended: float) -> None:
        del self._open_requests[life.request_id]
        self._leave(life, ended)
        life.ended = life.delivered = ended
        if life.first_token:
            (num_bytes, seconds), before = self.reads.total, life.reads
            life.reads = num_bytes - before[0], seconds - before[1]
        life.reason = reason
        self.ended[life.request_id] = life
        if len(self.ended) > self._max_lives:
            self.ended.popitem(last=False)
