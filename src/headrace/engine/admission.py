"""`Admission` bounds the requests that wait, and says when a refused caller should try again (R-12).

Counts the requests that the engine has not begun, and their predicted work: the prompt's tokens, and the mean length of
recent answers, or max_tokens if that is less. Where more than one caller is known by name, no caller may have more work
waiting than there is room left: one caller gets half of the queue, two get a third each, and there is always room for
another one (dynamic thresholds: Choudhury and Hahne, IEEE/ACM ToN 6 (2), 1998). Knows no engine; called by
`engine.client`.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from headrace.protocol.errors import QueueFullError, RequestError
from headrace.protocol.step import Request

RATE_WINDOW_S = 30.0
# The mean length of answers, before any has ended.
FIRST_MEAN = 128.0
# Weight of the newest answer in the mean length.
WEIGHT = 1 / 32
MAX_NAMES = 4096


class Admission:
    """Bounds on requests that wait: `max_reqs` of them, with `max_tokens` of predicted work."""

    def __init__(self, max_reqs: int, max_tokens: int) -> None:
        self.max_reqs = max_reqs
        self.max_tokens = max_tokens
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self.mean_answer = FIRST_MEAN
        self._names: set[str] = set()
        self._waiting: collections.Counter[str] = collections.Counter()
        self._waiting_tokens: collections.Counter[str] = collections.Counter()
        self._starts: collections.deque[tuple[float, int]] = collections.deque()

    def work_of(self, request: Request) -> int:
        """Return the number of tokens that `request` will probably cost."""
        answer = 0.0 if request.pooling else min(request.params.max_tokens or math.inf, self.mean_answer)
        width = request.beam.beam_width if request.beam is not None else 1
        return len(request.prompt_token_ids) + math.ceil(answer * width)

    def admit(self, works: Sequence[int], name: str, now: float) -> None:
        """Check that requests of so much work each may wait, on behalf of `name`: all of them, or none.

        Raises `RequestError` for more requests than the queue ever takes, and `QueueFullError`.
        """
        if len(works) > self.max_reqs:
            raise RequestError("n", len(works), f"at most {self.max_reqs} answers in one call (n times prompts)")
        if name and len(self._names) < MAX_NAMES:
            self._names.add(name)
        # A call that is above the token bound by itself may enter an empty queue: it could never be served otherwise.
        if not self.num_waiting:
            return
        room = self.max_reqs - self.num_waiting
        room_tokens = self.max_tokens - self.num_waiting_tokens
        if len(works) > room or sum(works) > room_tokens:
            raise QueueFullError(
                f"{self.num_waiting} requests with {self.num_waiting_tokens} tokens of work wait already; the bounds "
                f"are {self.max_reqs} and {self.max_tokens}",
                retry_after=self._retry_after(self.num_waiting, self.num_waiting_tokens, now),
            )
        num, num_tokens = self._waiting[name], self._waiting_tokens[name]
        if num and len(self._names) > 1 and (num + len(works) > room or num_tokens + sum(works) > room_tokens):
            raise QueueFullError(
                f"{num} requests with {num_tokens} tokens of work of this key wait already, which is its share",
                retry_after=self._retry_after(num, num_tokens, now),
            )

    def check_room(self, num: int, name: str, now: float) -> None:
        """Raise the errors of `admit` for so many requests, however little work each of them is."""
        self.admit([1] * num, name, now)

    def enter(self, work: int, name: str) -> None:
        """Count a request that begins to wait."""
        self._move(1, work, name)

    def leave(self, work: int, name: str, started: float | None = None) -> None:
        """Count a request that waits no more: it was begun at the time `started`, or has ended."""
        self._move(-1, -work, name)
        if started is not None:
            self._starts.append((started, work))
            self._forget(started)

    def ended(self, num_tokens: int) -> None:
        """Note that an answer of so many tokens has ended."""
        self.mean_answer += WEIGHT * (num_tokens - self.mean_answer)

    def seconds_to_begin(self, now: float) -> float:
        """Return how long the last request in the queue will wait, by the rate at which work was begun in the last half
        minute; 0 if none was begun in it."""
        self._forget(now)
        if not self.num_waiting or not self._starts:
            return 0.0
        return self.num_waiting_tokens * self._span(now) / max(1, sum(work for _, work in self._starts))

    def _span(self, now: float) -> float:
        """Return the seconds of the half minute in which work was begun."""
        return max(now - self._starts[0][0], 1.0)

    def _move(self, number: int, work: int, name: str) -> None:
        self.num_waiting += number
        self.num_waiting_tokens += work
        self._waiting[name] += number
        self._waiting_tokens[name] += work
        if not self._waiting[name]:
            del self._waiting[name], self._waiting_tokens[name]

    def _retry_after(self, num: int, num_tokens: int, now: float) -> int:
        """Return the seconds that so many requests take at the rate of the last half minute, 1 to 60."""
        self._forget(now)
        if not self._starts:
            return 10
        span = self._span(now)
        wait_reqs = num * span / len(self._starts)
        wait_tokens = num_tokens * span / max(1, sum(work for _, work in self._starts))
        return min(60, max(1, math.ceil(max(wait_reqs, wait_tokens))))

    def _forget(self, now: float) -> None:
        """Drop starts from before the window."""
        while self._starts and self._starts[0][0] < now - RATE_WINDOW_S:
            self._starts.popleft()
