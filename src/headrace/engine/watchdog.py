"""`Watchdog` decides whether an engine with open requests is frozen, by its steps and its processor time.

A frozen engine makes no steps and computes nothing; one in a long step makes none either, but computes. The first is
ended after `timeout` seconds, the second after ten times as many. Reads no clock and no process: `engine.client` calls
`tick` with both.
"""

from __future__ import annotations

PATIENCE = 10
"""Multiple of the timeout for which an engine that computes may be silent."""
BUSY = 0.02
"""Share of one processor above which it computes: on a loaded machine it may get no more."""


class Watchdog:
    """Counts the seconds since the engine's last message.

    `silent` are all of them, `frozen` those in which it used no processor time. `timeout` 0: the engine is never ended.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.interval = min(1.0, max(0.05, timeout / 20)) if timeout else 1.0
        self.frozen = 0.0
        self.silent = 0.0
        self._last: float | None = None
        self._cpu: float | None = None

    def heard(self) -> None:
        """Note that a message came."""
        self.frozen = self.silent = 0.0

    def tick(self, now: float, usage: tuple[float, bool] | None) -> bool:
        """Note the time and usage, each `interval` seconds. Returns whether the engine must be ended.

        Args:
            now: monotonic seconds.
            usage: processor time of the engine since its start, and whether it waits for a processor or a disk just
                now; None if unknown.
        """
        passed = 0.0 if self._last is None else now - self._last
        cpu, waits = usage or (None, False)
        computes = waits or (cpu is not None and self._cpu is not None and cpu - self._cpu >= BUSY * passed)
        self._last, self._cpu = now, cpu
        # A late tick means that this process stood still; whether the engine did is unknown.
        passed = min(passed, 2 * self.interval)
        self.silent += passed
        if not computes:
            self.frozen += passed
        return bool(self.timeout) and (self.frozen >= self.timeout or self.silent >= PATIENCE * self.timeout)

    def starts_anew(self) -> None:
        """Begin to watch another engine."""
        self.heard()
        self._last = self._cpu = None

    @property
    def is_stalled(self) -> bool:
        """Whether half of the time is over, so that requests are better sent to another server."""
        return bool(self.timeout) and (self.frozen > self.timeout / 2 or self.silent > PATIENCE * self.timeout / 2)
