"""The blocks of each kind of cache are on /metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace.insight.metrics import ServerMetrics
from headrace.protocol.step import Stats


def test_waste_is_the_share_of_the_held_slots() -> None:
    stats = Stats(num_blocks=40, num_blocks_held=5)
    client: Any = SimpleNamespace(stats=stats, is_started=True, info=SimpleNamespace(block_size=16))
    metrics = ServerMetrics(client, "m")
    metrics.num_unfilled = lambda block_size: block_size // 2 * 3
    assert metrics.waste() == 24 / 80
    stats.num_blocks_held = 0
    assert metrics.waste() == 0


def test_blocks_of_every_kind_are_held_cached_or_free() -> None:
    stats = Stats(num_blocks=40, num_blocks_held=7, num_blocks_cached=3, more_blocks=[(9, 9, 0), (5, 2, 3)])
    client: Any = SimpleNamespace(
        stats=stats, total=stats, is_alive=True, is_started=False, num_unfinished=0, num_restarts=0, num_expired=0,
        num_quarantined=0, replicas=[None], is_fleet=False,
    )  # fmt: skip
    text = ServerMetrics(client, "m").render().decode()
    numbers = {
        tuple(line.split('"')[i] for i in (3, 7)): float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("headrace:cache_blocks{")
    }
    assert numbers == {
        ("0", "held"): 7, ("0", "cached"): 3, ("0", "free"): 30,
        ("1", "held"): 9, ("1", "cached"): 0, ("1", "free"): 0,
        ("2", "held"): 2, ("2", "cached"): 3, ("2", "free"): 0,
    }  # fmt: skip
