"""`SaltedCache` keeps the values of callers, so that no caller finds or evicts another's (S-24).

An entry is found again under its salt only. If the cache is full, the holder with the most entries loses its own least
recently used one: a holder keeps its equal share, whatever others do. Knows no callers: a salt begins with its
holder's, as `engine.tenants.salted` makes it. Held by `text.grammars`, `text.inputs` and `grammar.matchers`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

HOLDER_LENGTH = 32
"""Characters of a salt that are its holder's."""

T = TypeVar("T")


class SaltedCache(Generic[T]):
    """At most `capacity` values, for any thread."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: dict[str, OrderedDict[tuple[str, Hashable], T]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def get(self, salt: str, key: Hashable) -> T | None:
        """Return the value, or None."""
        with self._lock:
            entries = self._entries.get(salt[:HOLDER_LENGTH])
            if entries is None or (salt, key) not in entries:
                return None
            entries.move_to_end((salt, key))
            return entries[salt, key]

    def put(self, salt: str, key: Hashable, value: T) -> None:
        """Keep a value."""
        with self._lock:
            entries = self._entries.setdefault(salt[:HOLDER_LENGTH], OrderedDict())
            entries[salt, key] = value
            entries.move_to_end((salt, key))
            if len(self) > self._capacity:
                # Of equals, the one that adds: its entry is the reason.
                largest = max(self._entries.values(), key=lambda each: (len(each), each is entries))
                largest.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
