"""Which samples count: those taken while other processes left the machine alone. Pure.

Every measurement of `bench.compare` and `bench.pairs`, a peer's and ours alike, is repeated by `until_undisturbed`, and
no median takes a sample for which `is_disturbed` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Sample = Mapping[str, Any]
FOREIGN_LIMIT = 0.04
"""Share of the CPU time of all cores that others may take during a sample."""


def is_disturbed(sample: Sample) -> bool:
    """Whether others took more than `FOREIGN_LIMIT` during the sample. A sample without a share counts as disturbed."""
    return float(sample.get("foreign", 1.0)) > FOREIGN_LIMIT


def until_undisturbed(measure: Callable[[], Sample], num_tries: int) -> Iterator[Sample]:
    """Yield the samples of `measure`, up to the first that is undisturbed; `num_tries` at most."""
    for _ in range(num_tries):
        sample = measure()
        yield sample
        if not is_disturbed(sample):
            return
