"""Holds a signal that comes before `headrace serve` can answer it.

Python is still importing then, and would end without a word. `process.ended_by_signals` takes over, and ends the
process if a signal was held. Imports nothing of headrace. Called by `headrace.__main__`.
"""

from __future__ import annotations

import signal
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
pending: list[int] = []
"""The signal that came, if one did."""


def hold() -> None:
    """Hold the first signal. A further one ends the process, as without `hold`."""
    for name in SIGNALS:
        signal.signal(name, _on_signal)


def _on_signal(number: int, frame: Any) -> None:
    pending.append(number)
    for name in SIGNALS:
        signal.signal(name, signal.SIG_DFL)
