"""`Watchdog` decides whether a process with open work is frozen, by its messages and its processor time.

A frozen process sends nothing and computes nothing; one with long work sends nothing either, but computes. The first is
ended after `timeout` seconds, the second after ten times as many. The class reads no clock and no process:
`engine.replica` (for the engine) and `text.bounded` (for templates, grammars and texts) call `tick` with the result of
`usage`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

PATIENCE = 10
"""Multiple of the timeout for which a process that computes may be silent."""
BUSY = 0.02
"""Share of one processor above which it computes: on a loaded machine it may get no more."""


def usage(pid: int) -> tuple[float, bool] | None:
    """Return the processor time of a process so far, in seconds, and whether it waits for a processor or a disk just
    now; None where that is unknown."""
    if sys.platform != "linux":
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # After the name, which may hold anything: state is field 3, utime and stime are 14 and 15.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] in ("R", "D")


class Watchdog:
    """Counts the seconds since the process's last message.

    `silent` are all of them, `frozen` those in which it used no processor time. `timeout` 0: the process is never
    ended.
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
        """Note the time and usage, each `interval` seconds. Returns whether the process must be ended.

        Args:
            now: monotonic seconds.
            usage: see `usage`.
        """
        passed = 0.0 if self._last is None else now - self._last
        cpu, waits = usage or (None, False)
        computes = waits or (cpu is not None and self._cpu is not None and cpu - self._cpu >= BUSY * passed)
        self._last, self._cpu = now, cpu
        # A late tick means that this process stood still; whether the other did is unknown.
        passed = min(passed, 2 * self.interval)
        self.silent += passed
        if not computes:
            self.frozen += passed
        return bool(self.timeout) and (self.frozen >= self.timeout or self.silent >= PATIENCE * self.timeout)

    def starts_anew(self) -> None:
        """Begin to watch another process."""
        self.heard()
        self._last = self._cpu = None

    @property
    def is_stalled(self) -> bool:
        """Whether half of the time is over, so that requests are better sent to another server."""
        return bool(self.timeout) and (self.frozen > self.timeout / 2 or self.silent > PATIENCE * self.timeout / 2)
