"""Which samples count: those taken while others left the machine alone. Pure.

Processes of this machine show in its CPU times. A neighbour on the other thread of a core shows nowhere in a virtual
machine: the same work only takes up to twice as long. So a sample may have a pace, the speed of a fixed loop just
before or after it, whichever was slower.

Every measurement of `bench.compare` and `bench.pairs`, a peer's and ours alike, is repeated by `until_undisturbed`, and
no median takes a sample for which `is_disturbed` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Sample = Mapping[str, Any]
FOREIGN_LIMIT = 0.04
"""Share of the CPU time of all cores that others may take during a sample."""
PACE_LIMIT = 0.85
"""The least pace of a sample that counts, as a share of the run's best."""


def best_pace(samples: Iterable[Sample]) -> float:
    """The best pace of a run; 0 where none was measured."""
    return max((float(sample["pace"]) for sample in samples if "pace" in sample), default=0.0)


def is_disturbed(sample: Sample, best: float = 0.0) -> bool:
    """Whether others took more than `FOREIGN_LIMIT` during the sample, or its pace was below `PACE_LIMIT` of `best`. A
    sample without a share counts as disturbed, one without a pace is judged by the share alone."""
    slow = "pace" in sample and float(sample["pace"]) < PACE_LIMIT * best
    return slow or float(sample.get("foreign", 1.0)) > FOREIGN_LIMIT


def until_undisturbed(
    measure: Callable[[], Sample], num_tries: int, best: Callable[[], float] = lambda: 0.0
) -> Iterator[Sample]:
    """Yield the samples of `measure`, up to the first that is undisturbed; `num_tries` at most. `best` returns the best
    pace so far."""
    for _ in range(num_tries):
        sample = measure()
        yield sample
        if not is_disturbed(sample, max(best(), float(sample.get("pace", 0.0)))):
            return
