"""`Roster`: the engines of a model that have announced themselves, as replicas of its fleet. Knows no Ray.

An engine stays while its connection lives, whatever becomes of Ray. It goes when it says so, or when its connection is
lost and it is not heard of any more while others are: then it is dead, and its successor has another name. One that the
fleet could not use is tried again after a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from headrace.engine.links import Link
from headrace.engine.replica import Replica
from headrace.fleet.engines.client import Fleet
from headrace.ray.scaling import Demand

logger = logging.getLogger("headrace.engine")

LOST_S = 5.0
"""Seconds without an announcement after which an engine without a connection is dead, and seconds from the start of one
that cannot be used to the next."""


@dataclass(slots=True)
class Engine:
    """An engine, when it was first and last heard of, and the task that removes it, if it leaves."""

    replica: Replica
    since: float
    heard: float
    leaving: asyncio.Task[None] | None = None


class Roster:
    """The engines of `fleet`; `link_of` connects to the one at a host and port."""

    def __init__(self, fleet: Fleet, link_of: Callable[[str, int], Link]) -> None:
        self.fleet = fleet
        self._link_of = link_of
        self._engines: dict[str, Engine] = {}

    def announce(self, name: str, host: str, port: int, now: float) -> None:
        """Note that the engine `name` is there, and use it from now on. `now` is in monotonic seconds."""
        engine = self._engines.get(name)
        if engine is not None and self.is_unusable(name) and now - engine.since > LOST_S:
            del self._engines[name]
            engine = None
        if engine is None:
            logger.info("engine %s at %s port %d was announced", name, host, port)
            self._engines[name] = Engine(self.fleet.add(self._link_of(host, port)), now, now)
        elif engine.leaving is None:
            engine.heard = now
        for other, each in list(self._engines.items()):
            if each.leaving is None and not each.replica.is_up and now - each.heard > LOST_S:
                logger.warning("engine %s is not heard of any more", other)
                self._remove(other, each)

    def withdraw(self, name: str) -> bool:
        """Give up an engine that goes: its streams go on elsewhere, or end there. Returns whether it has any left."""
        engine = self._engines.get(name)
        if engine is None:
            return False
        if engine.leaving is None:
            self._remove(name, engine)
        return True

    def is_leaving(self, name: str) -> bool:
        """Whether an engine is being removed."""
        return name in self._engines and self._engines[name].leaving is not None

    def is_unusable(self, name: str) -> bool:
        """Whether the fleet has given up an engine."""
        return name in self._engines and not self._has(self._engines[name].replica)

    def _has(self, replica: Replica) -> bool:
        return replica in self.fleet.replicas and replica.dead is None

    def _remove(self, name: str, engine: Engine) -> None:
        async def leave() -> None:
            # The number may be another's by now.
            if self._has(engine.replica):
                await self.fleet.remove(engine.replica.index)
            del self._engines[name]

        engine.leaving = asyncio.get_running_loop().create_task(leave())

    def demand(self, now: float) -> Demand:
        """Return the load of the fleet."""
        return demand_of(self.fleet, now)


def demand_of(fleet: Fleet, now: float) -> Demand:
    """Return the load of a fleet at `now`, in monotonic seconds."""
    alive = [each for each in fleet.replicas if each.is_alive and each.info is not None]
    busy = sum(fleet.router.loads[each.index].num_open / each.info.max_num_seqs for each in alive if each.info)
    return Demand(fleet.admission.seconds_to_begin(now), busy, len(alive))
