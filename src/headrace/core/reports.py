"""`KeyReports`: the keys of a replica's prefix cache, reported to a router in another process. Runs in the scheduler's
process.

A report has the keys that came and went since the last report, under an epoch and a number that grows by one. After a
reset of the cache, or when one is requested, a report has all keys, and after a reset the epoch is a new one. Pure; the
engine's loop is the only caller, and sends the reports with its outputs.
"""

from __future__ import annotations

from headrace.core.prefix import PrefixCache
from headrace.protocol.step import CacheKeys

KEY_BYTES = 16
"""Bytes of a key in a report."""


class KeyReports:
    """Reports of the contents of `cache`, which is empty and gets the key `secret`. `epoch` is a number that no other
    engine has.

    Raises `ValueError` if the cache has blocks: they are known by other keys.
    """

    def __init__(self, cache: PrefixCache, secret: bytes, epoch: int) -> None:
        if len(cache):
            raise ValueError("the cache has blocks under other keys")
        cache.rekey(secret)
        self.secret = secret
        self._cache = cache
        self._num_resets = cache.num_resets
        self._epoch = epoch
        self._number = 0
        self._is_full = True
        # The last state of each key that changed.
        self._changes: dict[bytes, bool] = {}
        cache.on_change = self._changes.__setitem__

    def request_all(self) -> None:
        """Let the next report have all keys."""
        self._is_full = True

    def take(self) -> CacheKeys | None:
        """Return the changes since the last report, None without any."""
        cache, changes = self._cache, self._changes
        if self._num_resets != cache.num_resets:
            self._num_resets, self._is_full = cache.num_resets, True
            self._epoch += 1
        if not self._is_full and not changes:
            return None
        self._number += 1
        if self._is_full:
            report = CacheKeys(self._epoch, self._number, True, b"".join(key[:KEY_BYTES] for key in cache.blocks))
        else:
            came = b"".join(key[:KEY_BYTES] for key, is_cached in changes.items() if is_cached)
            went = b"".join(key[:KEY_BYTES] for key, is_cached in changes.items() if not is_cached)
            report = CacheKeys(self._epoch, self._number, False, came, went)
        self._is_full = False
        changes.clear()
        return report
