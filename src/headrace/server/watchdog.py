"""`Watchdog`: whether an engine that owes something still lives, by its steps and its processor time.

A frozen engine makes no steps and computes nothing; one in a long step makes none either, but computes. The first is
given `timeout` seconds, the second ten times as many. Looks at no clock and no process itself: whoever ticks it hands
both in. `server.client` does.
"""

from __future__ import annotations

PATIENCE = 10
"""How much longer an engine that computes may be silent."""
BUSY = 0.1
"""Share of one processor above which it computes."""


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

    def tick(self, now: float, cpu_seconds: float | None) -> bool:
        """To be called each `interval` seconds. Returns whether the engine is to be ended.

        Args:
            now: monotonic seconds.
            cpu_seconds: processor time of the engine since its start; None if not known.
        """
        passed = 0.0 if self._last is None else now - self._last
        used = None if cpu_seconds is None or self._cpu is None else cpu_seconds - self._cpu
        self._last, self._cpu = now, cpu_seconds
        computes = used is not None and used >= BUSY * passed
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
