"""Computes the number of engines that a deployment needs from the work that waits in its front. Pure.

The measure is time: the queued work, divided by the rate at which work was begun lately, is the wait of the last
request in the queue. The front sends `Demand` to its engines, each of them reports it to Ray Serve as its autoscaling
stats, and Serve's controller calls `replicas_for` with them. Knows Ray's context by its attributes alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

ROUNDING = 1e-6


class Demand(msgspec.Struct, frozen=True):
    """The load of a fleet. `queued_seconds`: the time in which all its engines can begin the waiting requests;
    `busy_replicas`: its open sequences, in engines full of them; `num_replicas`: the engines that have them."""

    queued_seconds: float = 0.0
    busy_replicas: float = 0.0
    num_replicas: int = 0


def wanted(demand: Demand, target_seconds: float) -> float:
    """Return the number of engines that can begin the waiting requests within `target_seconds`, while busy engines stay
    busy."""
    return demand.busy_replicas + demand.num_replicas * demand.queued_seconds / target_seconds


def stats(demand: Demand, target_seconds: float) -> dict[str, float]:
    """Return the autoscaling stats of an engine."""
    return {
        "queued_seconds": demand.queued_seconds,
        "busy_replicas": demand.busy_replicas,
        "wanted_replicas": wanted(demand, target_seconds),
    }


def replicas_for(context: Any) -> tuple[int, dict[str, Any]]:
    """Return how many replicas there should be: Ray Serve's policy of engines.

    Each engine reports the same of its front, at another time; the mean of them counts. Serve's own bounds and delays
    are applied to it. Without any report, nothing changes.
    """
    reports: Mapping[Any, float | None] = (context.aggregated_metrics or {}).get("wanted_replicas", {})
    number = mean(value for value in reports.values() if value is not None)
    if number is None:
        return context.target_num_replicas, {}
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(low, min(high, math.ceil(number - ROUNDING))), {}


def mean(values: Iterable[float]) -> float | None:
    """Return the mean of `values`; None for none."""
    known = list(values)
    return sum(known) / len(known) if known else None
