"""`Overload`: decides which calls are refused while the server runs short of memory, open files or time (R-12).

A pure state machine. Its input are pressures: for each resource the part of its bound that is in use. It climbs at once
to the state of the highest pressure, and goes down one state at a time, after the pressure was clearly lower for a
while. Each state refuses one more class of calls, so that the work that can wait gives way first, then new answers, and
probes never; what has begun goes on. Knows no sockets and no clock. Called by `serve.shedding`, which measures, and by
`calls.CallGate`, which asks for each call.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping

from headrace.serve.errors import CallError
from headrace.serve.gates.auth import class_of


class State(enum.IntEnum):
    """What the server still does; each state refuses what the one before it refuses, and more."""

    NORMAL = 0
    NO_LATER_WORK = 1
    NO_ANSWERS = 2
    PROBES_ONLY = 3

    @property
    def word(self) -> str:
        return self.name.lower()


class Work(enum.Enum):
    """A class of calls, by what they cost. The value names it in errors."""

    LATER = "batches, files, conversations and work in the background"
    ANSWER = "new answers"
    READ = "all but probes, metrics and an administrator's calls"


REFUSED_FROM = {Work.LATER: State.NO_LATER_WORK, Work.ANSWER: State.NO_ANSWERS, Work.READ: State.PROBES_ONLY}
ENTER = {State.NO_LATER_WORK: 0.80, State.NO_ANSWERS: 0.90, State.PROBES_ONLY: 0.97}
"""The pressure at which each state begins."""
MARGIN = 0.10
"""How far the pressure must be below a state's beginning before the state ends."""
CALM_S = 3.0
"""Seconds for which it must be so."""
RETRY_S = 5
WORDS = {"memory": "memory", "open_files": "reserve of open files", "lag": "event loop's delay"}
"""The resources, as errors and the log name them."""

_LATER_UNDER = ("/v1/files", "/v1/batches", "/v1/conversations", "/slots/")


def work_of(method: str, path: str) -> Work | None:
    """Return the class of a call; None for those that always pass: probes, metrics, the page, an administrator's."""
    if class_of(method, path) != "infer":
        return None
    if method in ("GET", "HEAD", "DELETE") or path.endswith("/cancel"):
        return Work.READ
    return Work.LATER if path.startswith(_LATER_UNDER) else Work.ANSWER


class OverloadError(CallError):
    """The server is short of a resource, and refuses calls of this class for now (HTTP 503)."""

    def __init__(self, why: str, work: Work) -> None:
        message = f"the server is overloaded: {why}; {work.value} are refused until there is less"
        super().__init__(503, "overloaded", message, {"retry-after": str(RETRY_S)})


class Overload:
    """The state of one server.

    Attributes:
        pressures: the last ones, by resource.
        num_refused: calls that were refused, by class.
    """

    def __init__(self) -> None:
        self.state = State.NORMAL
        self.pressures: Mapping[str, float] = {}
        self.num_refused: Counter[Work] = Counter()
        self._calm_since: float | None = None

    def step(self, pressures: Mapping[str, float], now: float) -> None:
        """Go to the state of these pressures at `now`, in seconds of any clock."""
        self.pressures = pressures
        worst = max(pressures.values(), default=0.0)
        reached = max((state for state, least in ENTER.items() if worst >= least), default=State.NORMAL)
        if reached >= self.state:
            self.state = reached
        if self.state is State.NORMAL or worst >= ENTER[self.state] - MARGIN:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        elif now - self._calm_since >= CALM_S:
            self.state = State(self.state - 1)
            self._calm_since = now

    @property
    def why(self) -> str:
        """The resource that is shortest, in words."""
        name = max(self.pressures, key=lambda each: self.pressures[each], default="")
        return f"its {WORDS[name]} is at {self.pressures[name]:.0%} of the bound" if name else "no resource is measured"

    @property
    def refused(self) -> str:
        """The largest class of calls that is refused now, in words; empty if none is."""
        return max(
            ((least, work.value) for work, least in REFUSED_FROM.items() if self.state >= least), default=(0, "")
        )[1]

    def refuses(self, work: Work) -> bool:
        """Return whether calls of this class are refused now."""
        return self.state >= REFUSED_FROM[work]

    def check(self, work: Work | None) -> None:
        """Raise `OverloadError` if calls of this class are refused now."""
        if work is not None and self.refuses(work):
            self.num_refused[work] += 1
            raise OverloadError(self.why, work)
