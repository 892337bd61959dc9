"""`CacheKind`: how far back a layer looks, and so which positions the cache keeps for it. Knows neither layers nor
pools.

Blocks of `block_size` positions are kept for a layer that attends, a slot for one that carries a state from token to
token. Each kind of a model has its own pool; kind 0 has blocks (docs/adr/0026-kinds-of-cache.md).
"""

from __future__ import annotations

import msgspec


class CacheKind(msgspec.Struct, frozen=True):
    """A layer sees `window` positions, its own included (0: all), or one state alone."""

    window: int = 0
    is_state: bool = False


ROUTERS = ("round-robin", "least-work", "prefix")
"""Ways to choose the replica of a request (`fleet.router`)."""
POLICIES = ("fcfs", "priority", "fair")
"""Orders of waiting requests (`core.queue`)."""
