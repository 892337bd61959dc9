"""`PrefixIndex`: which replica has which prefixes in its cache, and the keys of a prompt's prefixes.

Keys are as in `core.prefix`, cut to `KEY_BYTES`: a chain of BLAKE2b under a secret of the deployment, from a root that
covers the salt. Nobody without the secret can compute the key of a text. The index may be behind the caches: an entry
that is wrong costs time, for the replica then computes the missing tokens, and never correctness. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from headrace.core.reports import KEY_BYTES
from headrace.protocol.step import CacheKeys

_ITEM = array("q").itemsize


def prefix_keys(token_ids: Sequence[int], block_tokens: int, secret: bytes, root: bytes) -> list[bytes]:
    """Return the keys of the whole blocks of a prompt that begins at `root`."""
    keys, parent, width = list[bytes](), root, block_tokens * _ITEM
    content = array("q", token_ids).tobytes()
    for end in range(width, len(content) + 1, width):
        parent = blake2b(parent + content[end - width : end], key=secret, digest_size=32).digest()
        keys.append(parent[:KEY_BYTES])
    return keys


class PrefixIndex:
    """The keys of `num_replicas` replicas: the keys that they reported, and the keys of prompts on the way to them."""

    def __init__(self, num_replicas: int) -> None:
        self._num = num_replicas
        # For each key a number with a bit for each replica that has it.
        self._known: dict[bytes, int] = {}
        self._routed: dict[bytes, int] = {}
        self._reported: list[set[bytes]] = [set() for _ in range(num_replicas)]
        self._last: list[tuple[int, int]] = [(0, 0)] * num_replicas

    def resize(self, num_replicas: int) -> None:
        """Have room for so many replicas; never fewer than before."""
        self._reported += [set() for _ in range(self._num, num_replicas)]
        self._last += [(0, 0)] * (num_replicas - self._num)
        self._num = max(self._num, num_replicas)

    def __len__(self) -> int:
        return len(self._known)

    def depths(self, keys: Sequence[bytes]) -> list[int]:
        """Return for each replica how many of the first `keys` it has."""
        known, routed = self._known, self._routed
        depths, depth, mask = [0] * self._num, 0, (1 << self._num) - 1
        for key in keys:
            has = known.get(key, 0) | routed.get(key, 0)
            lost = mask & ~has
            if lost:
                _set(depths, lost, depth)
                mask &= has
                if not mask:
                    break
            depth += 1
        _set(depths, mask, depth)
        return depths

    def update(self, index: int, report: CacheKeys) -> bool:
        """Take in a replica's report. False if reports before it are missing: the replica must send all its keys."""
        epoch, number = self._last[index]
        if report.is_full or report.epoch != epoch:
            self._drop(index)
        self._last[index] = report.epoch, report.number
        if not report.is_full and (report.epoch, report.number) != (epoch, number + 1):
            self._last[index] = (0, 0)
            return False
        known, reported, bit = self._known, self._reported[index], 1 << index
        for key in _cut(report.added):
            known[key] = known.get(key, 0) | bit
            reported.add(key)
        for key in _cut(report.evicted):
            reported.discard(key)
            _clear(known, key, bit)
            _clear(self._routed, key, bit)
        return True

    def clear(self, index: int) -> None:
        """Forget the keys of a replica: its engine is gone."""
        self._drop(index)
        self._last[index] = (0, 0)

    def _drop(self, index: int) -> None:
        reported, self._reported[index] = self._reported[index], set()
        for key in reported:
            _clear(self._known, key, 1 << index)

    def expect(self, index: int, keys: Sequence[bytes]) -> None:
        """Count the keys of a prompt that is on its way to a replica."""
        routed, bit = self._routed, 1 << index
        for key in keys:
            routed[key] = routed.get(key, 0) | bit

    def forget(self, index: int, keys: Sequence[bytes]) -> None:
        """Count them no longer: by now the replica has reported which of them it has."""
        for key in keys:
            _clear(self._routed, key, 1 << index)


def _set(depths: list[int], mask: int, depth: int) -> None:
    while mask:
        low = mask & -mask
        depths[low.bit_length() - 1] = depth
        mask ^= low


def _clear(keys: dict[bytes, int], key: bytes, bit: int) -> None:
    rest = keys.get(key, 0) & ~bit
    if rest:
        keys[key] = rest
    else:
        keys.pop(key, None)


def _cut(joined: bytes) -> list[bytes]:
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
