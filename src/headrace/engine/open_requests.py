"""Open requests: their streams, how they go on in a new engine after the old one has died, and counters over all
engines' lives.

`RequestStream` has the deltas of one call, merged for a slow reader; `engine.client` fills it, on one event loop, and
the callers of `EngineClient.submit` read it. `OpenRequest` holds the data that a new engine must get. `Resumption`
sends it. Requests that may have been in the step that killed the engine go one at a time, each when the one before has
shown a token. An engine computes the same again, so a request that killed it will do so again at the same token, and
then it is the only suspect; after so many deaths (`STRIKES`) it alone fails. Knows token ids and deltas; holds no
sockets, no clock and no text. Called by `engine.client` and `engine.replica`.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.engine import context
from headrace.protocol.errors import HeadraceError
from headrace.protocol.step import Request, Stats
from headrace.text.outputs import Delta


class RequestStream:
    """The deltas of one call's requests, each named by its index.

    An async iterator of lists of (index, delta). Deltas that wait for a slow reader are merged, so the stream never
    holds more than was generated, and the engine never waits for it (R-14). Leaving it early, by `close` or by leaving
    its `async with`, aborts the requests that still run.
    """

    def __init__(self, requests: Sequence[Request], abort: Callable[[str], None]) -> None:
        self.requests = list(requests)
        # The id in the reply, or else the first request's.
        self.call_id = context.current().call_id or (requests[0].request_id if requests else "")
        self.fingerprint = ""
        """The fingerprint (`engine.fingerprint`) of the engines in a fleet that may compute the answers; "": any
        engine."""
        self._abort = abort
        self._open = set(range(len(requests)))
        self._pending: dict[int, Delta] = {}
        self._wake = asyncio.Event()
        self._error: HeadraceError | None = None
        self._timer: asyncio.TimerHandle | None = None

    def arm(self, timer: asyncio.TimerHandle) -> None:
        """Keep a timer, which is cancelled when all requests have ended."""
        self._timer = timer

    def push(self, index: int, delta: Delta) -> None:
        if index not in self._open:
            return
        if delta.finish is not None:
            self._end(index)
        if index in self._pending:
            self._pending[index].merge(delta)
        else:
            self._pending[index] = delta
        self._wake.set()

    def fail(self, error: HeadraceError) -> None:
        """Close with an error, raised after the pending deltas were read."""
        self._error = self._error or error
        self._wake.set()
        self.close()

    def abort(self, index: int) -> None:
        """End one of the requests; no more deltas of it come."""
        if index in self._open:
            self._end(index)
            self._abort(self.requests[index].request_id)
            self._wake.set()

    def close(self) -> None:
        """Abort the requests that are still open. May be called at any time, and twice."""
        for index in tuple(self._open):
            self.abort(index)

    def _end(self, index: int) -> None:
        self._open.discard(index)
        if self._timer is not None and not self._open:
            self._timer.cancel()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[tuple[int, Delta]]:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self.take()

    def take(self) -> list[tuple[int, Delta]]:
        """Return the deltas that wait, which may be none."""
        pending, self._pending = self._pending, {}
        return list(pending.items())

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


# Deaths at the same token, with no other suspect, after which a request fails; the second number is for SIGKILL, which
# a machine short of memory or a person sends, not always because of the request.
STRIKES = 2
STRIKES_BY_SIGKILL = 3
PROBE = "probe-"
"""Begins the ids of the server's own requests, which test whether an engine makes tokens."""


class PoisonedRequestError(HeadraceError):
    """The request killed the engine again and again, and failed for that (HTTP 500)."""

    code = "request_killed_engine"


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One open request: the receiver of its deltas, and the data that a new engine must get.

    `work` and `name`: of its admission. `replica` is the number of the one that has it or gets it next, -1 for none;
    `is_sent`: its present engine has it; `was_sent`: some engine had it. `deaths` are the times of deaths that it may
    have caused, `num_strikes` the number of them in a row, at one token, without another suspect.
    """

    request: Request
    stream: RequestStream
    index: int
    arrival_time: float
    work: int
    name: str
    tokenised_time: float = 0.0
    started: bool = False
    replica: int = -1
    is_sent: bool = False
    was_sent: bool = False
    is_suspect: bool = False
    deaths: list[float] = field(default_factory=list)
    num_strikes: int = 0
    struck_at: int = -1
    num_cached: int = 0
    last_time: float | None = None
    delivered: list[int] = field(init=False)
    state: float | None = field(init=False)
    num_prompt_logprobs: int = 0
    num_prompt_logprobs_seen: int = 0

    def __post_init__(self) -> None:
        self.delivered = list(self.request.resume_token_ids)
        self.state = self.request.resume_state

    @property
    def is_probe(self) -> bool:
        return self.request.request_id.startswith(PROBE)

    @property
    def shows_no_tokens(self) -> bool:
        """Whether it shows nothing before its end."""
        return self.request.beam is not None or bool(self.request.pooling)

    def accept(self, delta: Delta) -> None:
        """Note the delivered tokens. A restarted engine sends prompt logprobs from the start: drop the known ones."""
        self.delivered += delta.token_ids
        if delta.prompt_logprobs:
            seen = self.num_prompt_logprobs_seen
            self.num_prompt_logprobs_seen += len(delta.prompt_logprobs)
            delta.prompt_logprobs = delta.prompt_logprobs[max(0, self.num_prompt_logprobs - seen) :]
            self.num_prompt_logprobs += len(delta.prompt_logprobs)
        if self.started:
            delta.num_cached_tokens = None
            delta.start_time = None
        elif delta.num_cached_tokens is not None:
            self.started = True
            self.num_cached = delta.num_cached_tokens

    def times(self, now: float) -> list[float]:
        """Return the times of its `Add`, which is sent `now`."""
        return [self.arrival_time, self.tokenised_time or now, now]

    def resumed(self) -> Request:
        """Return the request to send to a new engine."""
        self.num_prompt_logprobs_seen = 0
        return msgspec.structs.replace(self.request, resume_token_ids=list(self.delivered), resume_state=self.state)

    def strike(self) -> None:
        """Count a death of the engine without another suspect. Only deaths at one and the same token add up."""
        at = len(self.delivered)
        self.num_strikes = self.num_strikes + 1 if at == self.struck_at else 1
        self.struck_at = at


class Resumption:
    """Decides which open request is sent to the engine when.

    Args:
        send: sends a request to the engine.
    """

    def __init__(self, send: Callable[[OpenRequest], None]) -> None:
        self._send = send
        self._suspects: collections.deque[OpenRequest] = collections.deque()
        self._rest: collections.deque[OpenRequest] = collections.deque()
        self._num_trials = 1
        self._trial: OpenRequest | None = None

    @property
    def is_over(self) -> bool:
        """Whether no request is held back."""
        return self._trial is None and not self._suspects and not self._rest

    def judge(self, entries: Iterable[OpenRequest], most: int, by_sigkill: bool, now: float) -> OpenRequest | None:
        """Note that the engine has died. Returns the request that must fail for it, if any.

        `entries` are all open requests, in their order of arrival; a step holds at most `most` of them. The requests in
        the last step are among the started ones, and the first `most` of the others.
        """
        open_entries = [entry for entry in entries if entry.is_sent]
        sole = self._trial if self._trial is not None else open_entries[0] if len(open_entries) == 1 else None
        self.clear()
        num_fresh = 0
        for entry in open_entries:
            entry.is_sent = False
            num_fresh += not entry.started
            entry.is_suspect = entry.started or num_fresh <= most
            if entry.is_suspect:
                entry.deaths.append(now)
        if sole is None:
            return None
        sole.strike()
        return sole if sole.num_strikes >= (STRIKES_BY_SIGKILL if by_sigkill else STRIKES) else None

    def clear(self) -> None:
        """Forget the requests that are held back."""
        self._trial = None
        self._suspects.clear()
        self._rest.clear()

    def begin(self, entries: Iterable[OpenRequest], most: int) -> None:
        """Send the open requests to a new engine, which has shown that it works. It takes `most` at once."""
        self._num_trials = most
        entries = list(entries)
        # Requests that were the only suspects come last, after the others have finished.
        self._suspects.extend(sorted((e for e in entries if e.is_suspect), key=lambda e: e.num_strikes))
        self._rest.extend(entry for entry in entries if not entry.is_suspect)
        self._go_on()

    def add(self, entry: OpenRequest) -> None:
        """Send a request, at once or after those that are held back. One that may have killed another replica waits
        until the one before it has shown a token."""
        if entry.is_suspect:
            self._suspects.append(entry)
            self._num_trials += 1
            if self._trial is None:
                self._go_on()
        elif self.is_over:
            self._send(entry)
        else:
            self._rest.append(entry)

    def saw(self, entry: OpenRequest, ended: bool) -> None:
        """Note that `entry` has got a token, or has ended in whatever way."""
        entry.is_suspect = False
        if ended:
            for queue in (self._suspects, self._rest):
                if not entry.is_sent and entry in queue:
                    queue.remove(entry)
        if entry is self._trial:
            self._trial = None
            self._go_on()

    def _go_on(self) -> None:
        """Send the next suspect. As many as fill a step wait for each other there; after them send all others."""
        if self._suspects and self._num_trials > 0:
            self._num_trials -= 1
            self._trial = self._suspects.popleft()
            self._send(self._trial)
            return
        self._trial = None
        while self._suspects or self._rest:
            self._send((self._suspects or self._rest).popleft())


# Fields of `Stats` that are no plain counters.
OTHERS = frozenset(
    "num_running num_waiting num_blocks num_blocks_held num_blocks_cached num_beam_blocks num_beam_blocks_unshared "
    "num_accepted_per_pos more_blocks".split()
)
GAUGES = OTHERS - {"num_accepted_per_pos", "more_blocks"}
COUNTERS = tuple(name for name in Stats.__struct_fields__ if name not in OTHERS)


def summed(past: Stats, now: Stats) -> Stats:
    """Return `now` with the counters of both added up. Gauges stay as in `now`."""
    counters: dict[str, Any] = {name: getattr(past, name) + getattr(now, name) for name in COUNTERS}
    both = itertools.zip_longest(past.num_accepted_per_pos, now.num_accepted_per_pos, fillvalue=0)
    counters["num_accepted_per_pos"] = [before + since for before, since in both]
    return msgspec.structs.replace(now, **counters)


def added(all_stats: Sequence[Stats]) -> Stats:
    """Return the gauges and counters of several engines together."""
    total = all_stats[0]
    for stats in all_stats[1:]:
        gauges = {name: getattr(total, name) + getattr(stats, name) for name in GAUGES}
        both = itertools.zip_longest(total.more_blocks, stats.more_blocks, fillvalue=(0, 0, 0))
        more = [tuple(map(sum, zip(*each, strict=True))) for each in both]
        total = msgspec.structs.replace(summed(total, stats), **gauges, more_blocks=more)
    return total


def negated(stats: Stats) -> Stats:
    """Return stats that remove the work counted in `stats` from a sum; the count of ended recordings stays."""
    return Stats(**{name: -getattr(stats, name) for name in COUNTERS if name != "num_recordings_ended"})
