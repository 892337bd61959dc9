"""The labs by name, in the order of a lecture. Called by `headrace lab` and docs/labs/pages.py."""

from __future__ import annotations

from collections.abc import Callable

from headrace.labs import caching, drawing, scheduling, weights
from headrace.labs.base import Lab
from headrace.protocol.errors import RequestError

LABS: dict[str, Callable[[str, bool], Lab]] = {
    "cache": caching.cache,
    "lengths": caching.lengths,
    "prefix": caching.prefix,
    "paging": caching.paging,
    "batching": scheduling.batching,
    "rounding": weights.rounding,
    "precision": weights.precision,
    "experts": weights.experts,
    "sampling": drawing.sampling,
    "speculation": drawing.speculation,
}


def run(name: str, model: str, small: bool = False) -> Lab:
    """Run a lab. `small`: a size for tests. Raises `RequestError` for an unknown name, and the engine's errors."""
    if name not in LABS:
        raise RequestError("NAME", name, f"one of {', '.join(LABS)}")
    return LABS[name](model, small)
