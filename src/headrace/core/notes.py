"""`Notes`: the scheduler's decisions since the last reading, as ints. The journal reads them; the schedule does not.

The scheduler writes, `core.journal` reads and empties; without a reader, the oldest notes are dropped. The events
of blocks are the pool's (`BlockPool.log`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headrace.core.prefix import Verdict

MAX_NOTES = 4096


@dataclass(slots=True)
class Notes:
    """`admitted`: sequences that began to run, the tokens that they share, and the verdict of their lookup.
    `preempted`: sequences that were sent back to the queue, and for which other (0: none). Beams count as the first of
    their search."""

    admitted: deque[tuple[int, int, Verdict]] = field(default_factory=lambda: deque(maxlen=MAX_NOTES))
    preempted: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MAX_NOTES))
