"""`Router`: chooses the replica of a request, by turns, by load, or by what a replica has of its prompt already.

Pure: it knows what it routed and which answers began and ended, and reads no clock, file or socket, so that a
simulation and a fleet run the same code. The prefix policy is a cost: the prompt tokens that a replica still has to
compute before the request, and of the request, less those that it probably has cached (compare Srivatsa et al. 2024,
Preble, arXiv:2407.00023, section 3.1).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from hashlib import blake2b

ROUTERS = ("round-robin", "least-loaded", "prefix")
OPEN_TOKENS = 64
"""Prompt tokens that an open request counts as: what decoding it costs the steps of a new prompt."""


class _Replica:
    """What the router knows of one replica: open requests, prompt tokens not computed yet, and keys of prefixes by
    last use."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_pending = 0
        self.keys: OrderedDict[Hashable, None] = OrderedDict()

    @property
    def load(self) -> int:
        return self.num_pending + OPEN_TOKENS * self.num_open


class Router:
    """Routes requests to `num_replicas` replicas under a `policy` of `ROUTERS`.

    A prompt is known by the keys of its blocks of `block_tokens` tokens, each of which stands for all tokens up to its
    end; the router remembers the last `max_keys` of a replica, as many as its cache has room for.

    Raises `ValueError` for an unknown policy, and for numbers below 1.
    """

    def __init__(self, policy: str, num_replicas: int, block_tokens: int, max_keys: int) -> None:
        if policy not in ROUTERS:
            raise ValueError(f"policy is {policy!r}, expected one of {', '.join(ROUTERS)}")
        if min(num_replicas, block_tokens, max_keys) < 1:
            raise ValueError("num_replicas, block_tokens and max_keys must be at least 1")
        self.policy = policy
        self.block_tokens, self.max_keys = block_tokens, max_keys
        self.replicas = [_Replica() for _ in range(num_replicas)]
        self._turn = 0

    def route(self, keys: Sequence[Hashable], num_prompt: int) -> int:
        """Return the replica of a request of `num_prompt` tokens, and count the request there. Of equals, the first."""
        index = self._choose(keys, num_prompt)
        replica = self.replicas[index]
        replica.num_open += 1
        replica.num_pending += num_prompt
        if self.policy == "prefix":
            for key in keys:
                replica.keys[key] = None
                replica.keys.move_to_end(key)
            while len(replica.keys) > self.max_keys:
                replica.keys.popitem(last=False)
        return index

    def _choose(self, keys: Sequence[Hashable], num_prompt: int) -> int:
        if self.policy == "round-robin":
            self._turn += 1
            return (self._turn - 1) % len(self.replicas)
        if self.policy == "least-loaded":
            costs = [replica.load for replica in self.replicas]
        else:
            costs = [each.load - self._num_known(each, keys, num_prompt) for each in self.replicas]
        return costs.index(min(costs))

    def _num_known(self, replica: _Replica, keys: Sequence[Hashable], num_prompt: int) -> int:
        """Tokens of the prompt that the replica was sent before."""
        num = 0
        for key in keys:
            if key not in replica.keys:
                break
            num += 1
        return min(num * self.block_tokens, num_prompt - 1)

    def computed(self, index: int, num_tokens: int) -> None:
        """Count prompt tokens as done on replica `index`: the first token of an answer came, or its end without one."""
        replica = self.replicas[index]
        replica.num_pending = max(0, replica.num_pending - num_tokens)

    def ended(self, index: int) -> None:
        """Count the end of a request on replica `index`."""
        self.replicas[index].num_open -= 1


def prefix_keys(token_ids: Sequence[int], block_tokens: int, key: bytes = b"") -> list[bytes]:
    """Return the keys of the whole blocks of a prompt. With a secret `key` they can not be computed elsewhere."""
    keys, parent = list[bytes](), b""
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        content = array("q", token_ids[end - block_tokens : end]).tobytes()
        parent = blake2b(parent + content, key=key, digest_size=16).digest()
        keys.append(parent)
    return keys
