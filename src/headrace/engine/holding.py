"""`Hold`: an engine that waits between two steps, for people who watch it: it computes as many steps as they ask for.

A hold ends `LEASE_S` after the last order, so that a watcher who has gone holds nobody up. While it lasts the engine
takes in requests, aborts and orders, and sends its gauges each `BEAT_S`, so that no watchdog takes it for frozen. What
it computes is the same with and without. Knows no scheduler. Called by `engine.child` and `engine.orders`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from headrace.protocol import frames

LEASE_S = 10.0
BEAT_S = 1.0
POLL_S = 0.005
"""How late a message to an engine that waits may be read."""


class HoldSteps(msgspec.Struct, frozen=True, tag="hold_steps"):
    """Order: compute `num_steps` more steps than were asked for before, and then wait; None: go on without a hold.
    Returns the steps that will be computed before it waits, or `NOT_HELD`."""

    num_steps: int | None = None


NOT_HELD = -1


class Hold:
    """The hold of one engine. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = 0.0
        self._num_left = 0

    @property
    def is_held(self) -> bool:
        return self._clock() < self._end

    @property
    def must_wait(self) -> bool:
        """Whether no step may be computed now."""
        return self._num_left <= 0 and self.is_held

    def set(self, order: HoldSteps) -> int:
        """Begin or renew the hold, or end it. Returns the result of the order."""
        if order.num_steps is None:
            self._end = 0.0
            return NOT_HELD
        self._num_left = order.num_steps + (self._num_left if self.is_held else 0)
        self._end = self._clock() + LEASE_S
        return self._num_left

    def stepped(self) -> None:
        """Note that a step was computed."""
        self._num_left = max(0, self._num_left - 1)

    def wait(self, receive: Callable[[bool], list[frames.ToEngine] | None]) -> list[frames.ToEngine] | None:
        """Return the next messages, or none after `BEAT_S` or at the end of the hold. `receive` is that of `drive`."""
        due = self._clock() + BEAT_S
        while (messages := receive(False)) == [] and self.must_wait and self._clock() < due:
            time.sleep(POLL_S)
        return messages
