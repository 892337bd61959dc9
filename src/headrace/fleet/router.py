"""`Router`: chooses the replica of a request, by turns, by work, or by the part of its prompt that a replica has
already.

Pure: it gets keys, lengths and events, and reads no clock, file or socket, so that a simulation and a fleet run the
same code. The policies by work and by prefix choose the replica where the first token is predicted to come first: the
prompt tokens that it still has to compute, and this prompt's (`UNKNOWN_WEIGHT`), over its measured speed (compare
Srivatsa et al. 2024, Preble, arXiv:2407.00023, section 3.1; Qin et al. 2024, Mooncake, arXiv:2407.00079, section 6).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headrace.fleet.index import PrefixIndex
from headrace.protocol.kinds import ROUTERS

OPEN_TOKENS = 64
"""The number of prompt tokens that an open request counts as: the cost of decoding it in the steps of a new prompt."""
UNKNOWN_WEIGHT = 1.5
"""The weight of a prompt token that must be computed, under the policy by prefix: it also takes the place of another in
the cache. On Mooncake's conversations, 1 gives less hits and 2 later first tokens (`python -m bench.router`)."""
SPEED_WEIGHT = 0.02
"""Weight of the newest step in the measured speed."""
MIN_TOKENS = 256
"""Tokens of prompts in a step whose speed counts. The time of a shorter step says nothing of a long prompt."""


@dataclass(slots=True, eq=False)
class Route:
    """A request on its replica `index`, which has still to compute `num_pending` tokens of its prompt. It runs as
    `width` sequences."""

    index: int
    keys: Sequence[bytes]
    num_pending: int
    width: int = 1


class Load:
    """The load of one replica: open sequences, prompt tokens not computed yet, and its speed."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_pending = 0
        self.speed = 0.0
        self._prompts: deque[Route] = deque()

    @property
    def has_prompts(self) -> bool:
        """Whether there are prompts to compute."""
        return bool(self._prompts)

    def enter(self, route: Route) -> None:
        self.num_open += route.width
        self.num_pending += route.num_pending
        self._prompts.append(route)

    def compute(self, num_tokens: int) -> None:
        """Count prompt tokens as computed, of the oldest prompts first."""
        while num_tokens > 0 and self._prompts:
            oldest = self._prompts[0]
            part = min(num_tokens, oldest.num_pending)
            oldest.num_pending -= part
            self.num_pending -= part
            num_tokens -= part
            if not oldest.num_pending:
                self._prompts.popleft()

    def finish(self, route: Route) -> None:
        """Count the rest of a prompt as computed."""
        if route.num_pending:
            self._prompts.remove(route)
            self.num_pending -= route.num_pending
            route.num_pending = 0

    def leave(self, route: Route) -> None:
        self.finish(route)
        self.num_open -= route.width


class Router:
    """Routes requests to `num_replicas` replicas under a `policy` of `ROUTERS`.

    A prompt is known by the keys of its blocks of `block_tokens` tokens (`index.prefix_keys`).

    Raises `ValueError` for an unknown policy, and for numbers below 1.
    """

    def __init__(self, policy: str, num_replicas: int, block_tokens: int) -> None:
        if policy not in ROUTERS:
            raise ValueError(f"policy is {policy!r}, expected one of {', '.join(ROUTERS)}")
        if min(num_replicas, block_tokens) < 1:
            raise ValueError("num_replicas and block_tokens must be at least 1")
        self.policy = policy
        self.block_tokens = block_tokens
        self.loads = [Load() for _ in range(num_replicas)]
        self.index = PrefixIndex(num_replicas)
        self._last = -1
        self._longest = 0

    def route(
        self,
        keys: Sequence[bytes],
        num_prompt: int,
        among: Collection[int] | None = None,
        rooms: Collection[int] | None = None,
        width: int = 1,
    ) -> Route | None:
        """Return the replica of a request of `num_prompt` tokens, and count the request there. Of equals, the first.

        It is one of `among`, by default of all; None if that is empty. `rooms` are those that can begin it now: by
        prefix it may be better to wait for another.
        """
        candidates = range(len(self.loads)) if among is None else among
        if self.policy != "prefix" and rooms is not None:
            candidates = [index for index in candidates if index in rooms]
        if not candidates:
            return None
        num_known = self._num_known(keys, num_prompt)
        index = self._choose(sorted(candidates), num_prompt, num_known)
        route = Route(index, keys, num_prompt - num_known[index], width)
        self.loads[index].enter(route)
        self.index.expect(index, keys)
        return route

    def _num_known(self, keys: Sequence[bytes], num_prompt: int) -> list[int]:
        """Return the tokens of a prompt that each replica has, or was sent before."""
        if self.policy != "prefix" or not keys:
            return [0] * len(self.loads)
        return [min(depth * self.block_tokens, num_prompt - 1) for depth in self.index.depths(keys)]

    def _choose(self, candidates: list[int], num_prompt: int, num_known: list[int]) -> int:
        if self.policy == "round-robin":
            self._last = next((index for index in candidates if index > self._last), candidates[0])
            return self._last
        speeds = [load.speed for load in self.loads if load.speed]
        weight = UNKNOWN_WEIGHT if self.policy == "prefix" else 1.0
        usual = sum(speeds) / len(speeds) if speeds else 1.0

        def seconds(index: int) -> float:
            load = self.loads[index]
            num_unknown = num_prompt - num_known[index]
            work = load.num_pending + OPEN_TOKENS * load.num_open + weight * num_unknown
            return work / (load.speed or usual)

        return min(candidates, key=seconds)

    def add(self, index: int) -> None:
        """Make room for a replica of this number, of which nothing is known yet."""
        self.loads += [Load() for _ in range(len(self.loads), index + 1)]
        self.index.resize(len(self.loads))
        self.remove(index)

    def remove(self, index: int) -> None:
        """Forget a replica, whose requests have left it."""
        self.loads[index] = Load()
        self.index.clear(index)

    def resize_blocks(self, block_tokens: int) -> None:
        """Know prompts by blocks of another size: nothing is known of any replica then."""
        self.block_tokens = block_tokens
        for index in range(len(self.loads)):
            self.index.clear(index)

    def measure(self, index: int, num_tokens: int, seconds: float) -> None:
        """Note that a step of replica `index` computed so many tokens of prompts."""
        load = self.loads[index]
        load.compute(num_tokens)
        self._longest = max(self._longest, num_tokens)
        # A step that is not full looks slow, and a replica with few requests would get fewer.
        if num_tokens >= max(MIN_TOKENS, self._longest / 2) and seconds > 0:
            speed = num_tokens / seconds
            load.speed += SPEED_WEIGHT * (speed - load.speed) if load.speed else speed

    def computed(self, route: Route) -> None:
        """Count a prompt as computed: the first token of its answer came."""
        self.loads[route.index].finish(route)

    def ended(self, route: Route) -> None:
        """Count the end of a request, or that it leaves its replica."""
        self.loads[route.index].leave(route)
        self.index.forget(route.index, route.keys)
