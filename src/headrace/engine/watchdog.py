"""`Watchdog`: whether an engine that owes something still lives, by its steps and its processor time.

A frozen engine makes no steps and computes nothing; one in a long step makes none either, but computes. The first is
given `timeout` seconds, the second ten times as many. Looks at no clock and no process itself: whoever ticks it hands
both in. `engine.client` does.
"""

from __future__ import annotations

PATIENCE = 10
"""How much longer an engine that computes may be silent."""
BUSY = 0.02
"""Share of one processor above which it computes: on a machine that is full it may get no more."""


class Watchdog:
    """Counts the seconds since the engine was last heard of.

    `frozen` are those of them in which it used no processor time, `silent` all of them. `timeout` 0: never ends it.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.interval = min(1.0, max(0.05, timeout / 20)) if timeout else 1.0
        self.frozen = 0.0
        self.silent = 0.0
        self._last: float | None = None
        self._cpu: float | None = None

    def heard(self) -> None:
        """A message came."""
        self.frozen = self.silent = 0.0

    def tick(self, now: float, usage: tuple[float, bool] | None) -> bool:
        """To be called each `interval` seconds. Returns whether the engine is to be ended.

        Args:
            now: monotonic seconds.
            usage: processor time of the engine since its start, and whether it waits for a processor or a disk just
                now; None if not known.
        """
        passed = 0.0 if self._last is None else now - self._last
        cpu, waits = usage or (None, False)
        computes = waits or (cpu is not None and self._cpu is not None and cpu - self._cpu >= BUSY * passed)
        self._last, self._cpu = now, cpu
        # Late ticks are the watcher's own standstill, which says nothing of the engine.
        passed = min(passed, 2 * self.interval)
        self.silent += passed
        if not computes:
            self.frozen += passed
        return bool(self.timeout) and (self.frozen >= self.timeout or self.silent >= PATIENCE * self.timeout)

    def starts_anew(self) -> None:
        """Another engine is watched from now on."""
        self.heard()
        self._last = self._cpu = None

    @property
    def is_stalled(self) -> bool:
        """Whether requests are better sent elsewhere: half of the time is over."""
        return bool(self.timeout) and (self.frozen > self.timeout / 2 or self.silent > PATIENCE * self.timeout / 2)
