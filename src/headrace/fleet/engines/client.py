"""`Fleet`: the face of one engine client over several engines. One admission and one queue for all.

A request waits in the queue until a replica has room for it, so that no caller's requests pile up before another's. The
open requests of a replica that is lost or drained go to others of the same fingerprint, or wait for one; because output
depends on the request alone, they go on with the same bits. A request that kills its engine is found as with one
engine, wherever it did so. Takes any `Link`; knows no processes and no HTTP. Made by `fleet.engines.local`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Sequence

import msgspec

from headrace.engine.client import EngineClient
from headrace.engine.links import Link
from headrace.engine.order_calls import Orders
from headrace.engine.orders import ReadFingerprint
from headrace.engine.replica import Replica
from headrace.engine.request_stream import RequestStream
from headrace.engine.resumption import OpenRequest, added
from headrace.fleet.dispatch import Dispatcher, has_room
from headrace.fleet.index import prefix_keys, root_key
from headrace.fleet.router import Route, Router
from headrace.protocol import frames
from headrace.protocol.errors import EngineDeadError, HeadraceError
from headrace.protocol.step import EngineInfo, Stats, StepOutput

logger = logging.getLogger("headrace.engine")

DRAIN_S = 0.02
"""Seconds between two looks at whether a replica that goes has ended its requests."""


class Fleet(EngineClient):
    """Engines behind `links`.

    Args:
        links: one for each replica.
        router: a policy of `protocol.kinds.ROUTERS`.
        secret: the key of the deployment's prefix keys, at most 64 bytes; None: a new one.
        max_num_queued_reqs, max_num_queued_tokens: bounds on requests that no engine has started.
        max_restarts, watchdog_timeout: of each replica; see `Replica`. Those that are given up leave their work to the
            others; without any left, all ends with an `EngineDeadError`.

    More engines may come later, by `add`, and go, by `remove`; the fleet may begin without any. Raises `ValueError`
    for an unknown policy.
    """

    def __init__(
        self,
        links: Sequence[Link],
        *,
        router: str = "prefix",
        secret: bytes | None = None,
        max_num_queued_reqs: int = 1024,
        max_num_queued_tokens: int = 2**20,
        max_restarts: int = 0,
        watchdog_timeout: float = 60.0,
    ) -> None:
        self._set_up(links, max_num_queued_reqs, max_num_queued_tokens, max_restarts, watchdog_timeout)
        self._life = max_restarts, watchdog_timeout
        self.num_moved = 0
        self.router = Router(router, len(links), 1)
        # Of each replica that can be used; "" while it starts.
        self.fingerprints = [""] * len(links)
        self._draining: set[int] = set()
        # Numbers of replicas that were removed, which others may have.
        self._vacant: set[int] = set()
        self._starts: dict[int, asyncio.Task[None]] = {}
        self._has_begun = asyncio.Event()
        self._secret = secret or os.urandom(32)
        self._waiting: Dispatcher[OpenRequest] = Dispatcher(self.router, "fcfs")
        self._routes: dict[str, Route] = {}
        # What may go on with the answers that have begun.
        self._bound: dict[str, str] = {}
        self._info: EngineInfo | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # -- the face of one engine

    @property
    def info(self) -> EngineInfo:
        """The numbers of which every replica that has started can serve a request."""
        if self._info is None:
            raise EngineDeadError("the engine has not started")
        return self._info

    @property
    def is_started(self) -> bool:
        return self._info is not None

    @property
    def orders(self) -> Orders:
        """Those of the first replica that runs."""
        if not self.replicas:
            raise EngineDeadError("the engine has not started")
        return next((replica for replica in self.replicas if replica.is_alive), self.replicas[0]).orders

    @property
    def stats(self) -> Stats:
        total = added([replica.stats for replica in self.replicas]) if self.replicas else Stats()
        return msgspec.structs.replace(total, num_waiting=total.num_waiting + len(self._waiting))

    @property
    def total(self) -> Stats:
        return added([replica.total for replica in self.replicas]) if self.replicas else Stats()

    async def start(self) -> None:
        await super().start()
        await self._has_begun.wait()
        await asyncio.gather(*self._tasks)

    async def close(self, at_once: bool = False) -> None:
        for task in (*self._tasks, *self._starts.values()):
            task.cancel()
        await super().close(at_once)

    def drain(self, index: int) -> None:
        """Send a replica no more requests, and let others of its fingerprint go on with those that it has; where there
        are none, it ends them itself."""
        self._draining.add(index)
        fingerprint = self.fingerprints[index]
        if any(
            self._is_usable(other) and self.fingerprints[other] == fingerprint for other in range(len(self.replicas))
        ):
            self._take_back(self.replicas[index])
        self._dispatch()

    # -- replicas that come and go

    def add(self, link: Link) -> Replica:
        """Start one more engine, and use it from its first token on. One that can not be used is removed again."""
        index = min(self._vacant, default=len(self.replicas))
        replica = Replica(link, self, index, *self._life)
        if index < len(self.replicas):
            self.replicas[index], self.fingerprints[index] = replica, ""
            self._vacant.discard(index)
            self._draining.discard(index)
            self.router.renew(index)
        else:
            self.replicas.append(replica)
            self.fingerprints.append("")
            self.router.add()
        self._starts[index] = asyncio.get_running_loop().create_task(self._start(replica))
        return replica

    async def _start(self, replica: Replica) -> None:
        try:
            await replica.start()
        except (HeadraceError, OSError) as error:
            logger.error("replica %d can not be used: %s", replica.index, error)
            del self._starts[replica.index]
            await self.remove(replica.index)

    async def remove(self, index: int) -> None:
        """Drain a replica, wait until it has no requests, and end it. Its number may be given to another afterwards."""
        replica = self.replicas[index]
        self.drain(index)
        while replica.is_alive and any(not entry.is_probe for entry in replica.entries.values()):
            await asyncio.sleep(DRAIN_S)
        if (task := self._starts.pop(index, None)) is not None:
            task.cancel()
        await replica.close()
        self._take_back(replica)
        replica.dead = EngineDeadError("the replica was removed")
        self.fingerprints[index] = ""
        self.router.renew(index)
        self._vacant.add(index)
        self._fail_stranded()
        self._dispatch()

    def probe(self, replica: Replica) -> RequestStream:
        self._learn(replica)
        self._share_keys(replica)
        return super().probe(replica)

    def _learn(self, replica: Replica) -> None:
        """Take in the numbers of an engine that has just started."""
        if self._info is None:
            self.router.block_tokens = replica.info.block_size if replica.info is not None else 1
        infos = [each.info for each in self.replicas if each.info is not None]
        least = ("max_model_len", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_logprobs")
        bounds = {name: min(getattr(info, name) for info in infos) for name in least}
        if self._info is None:
            self._waiting = Dispatcher(self.router, infos[0].scheduling_policy)
        self._info = msgspec.structs.replace(infos[0], **bounds)

    def _share_keys(self, replica: Replica) -> None:
        """Let an engine report what its cache has, all of it first."""
        is_alike = replica.info is not None and replica.info.block_size == self.router.block_tokens
        if self.router.policy == "prefix" and is_alike:
            replica.link.post(frames.ShareKeys(self._secret))

    def _on_proven(self, replica: Replica) -> None:
        task = asyncio.get_running_loop().create_task(self._take_in(replica))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take_in(self, replica: Replica) -> None:
        """Use an engine from now on, once it has said what it computes."""
        try:
            fingerprint = await replica.orders.give(ReadFingerprint(), str)
        except EngineDeadError:
            return
        self.fingerprints[replica.index] = fingerprint
        self._has_begun.set()
        if len({each for each in self.fingerprints if each}) > 1:
            logger.warning("the replicas differ in weights, formats or kernels: answers stay where they began")
        self._fail_stranded()
        self._dispatch()

    def convict(self, replica: Replica, reason: str, now: float) -> None:
        """Find a request that caused a death, as with one engine, and give the others to other replicas."""
        super().convict(replica, reason, now)
        self._take_back(replica)
        self.fingerprints[replica.index] = ""
        self.router.index.clear(replica.index)
        self._dispatch()

    def on_given_up(self, replica: Replica, message: str) -> None:
        self._take_back(replica)
        if all(each.dead is not None for each in self.replicas):
            super().on_given_up(replica, message)
            return
        logger.critical("replica %d is lost; %d requests go on in others", replica.index, self.num_unfinished)
        self._fail_stranded()

    def _take_back(self, replica: Replica) -> None:
        """Put the requests of a replica back into the queue, ahead of those that have not run."""
        fingerprint = self.fingerprints[replica.index]
        for entry in replica.hand_over():
            if entry.started:
                self._bound.setdefault(entry.request.request_id, fingerprint)
            self.num_moved += entry.was_sent
            self._leave(entry)
            self._queue(entry, is_first=True)

    def _fail_stranded(self) -> None:
        """End the answers that no replica can go on with, now or after its restart."""
        if any(
            not each and replica.dead is None for each, replica in zip(self.fingerprints, self.replicas, strict=True)
        ):
            return
        if not any(self.fingerprints):
            # The next engine may be one that is added.
            return
        for entry in self._waiting:
            bound = self._bound.get(entry.request.request_id)
            if bound is not None and bound not in self.fingerprints:
                entry.stream.fail(EngineDeadError("no engine is left that computes as the one that began this answer"))

    # -- where requests go

    def _place(self, entry: OpenRequest) -> None:
        self._queue(entry)
        self._dispatch()

    def _queue(self, entry: OpenRequest, is_first: bool = False) -> None:
        request = entry.resumed() if entry.delivered else entry.request
        keys: list[bytes] = []
        if self.router.policy == "prefix" and request.params.prompt_logprobs is None:
            token_ids = [*request.prompt_token_ids, *request.resume_token_ids]
            root = root_key(self._secret, request.cache_salt)
            keys = prefix_keys(token_ids, self.router.block_tokens, self._secret, root)
        self._waiting.add(entry, request, keys, is_first)

    def _dispatch(self) -> None:
        """Send requests from the queue to replicas that have room."""
        if not len(self._waiting):
            return
        usable = [index for index in range(len(self.replicas)) if self._is_usable(index)]
        for entry, route in self._waiting.dispatch(
            lambda index: index in usable and self._is_free(index), lambda entry: self._candidates(entry, usable)
        ):
            self._routes[entry.request.request_id] = route
            replica = self.replicas[route.index]
            self._assign(entry, replica)
            replica.resumption.add(entry)

    def _is_usable(self, index: int) -> bool:
        return self.replicas[index].is_alive and self.fingerprints[index] != "" and index not in self._draining

    def _is_free(self, index: int) -> bool:
        info = self.replicas[index].info
        load = self.router.loads[index]
        return info is not None and has_room(load, info.max_num_seqs, info.max_num_batched_tokens)

    def _candidates(self, entry: OpenRequest, usable: list[int]) -> Collection[int]:
        """Return the replicas that give a request the same bits as those that have run it."""
        bound = self._bound.get(entry.request.request_id)
        return usable if bound is None else [index for index in usable if self.fingerprints[index] == bound]

    def _leave(self, entry: OpenRequest) -> None:
        """Count a request as gone from its replica."""
        route = self._routes.pop(entry.request.request_id, None)
        if route is not None:
            self.router.ended(route)

    def _forget(self, request_id: str, is_aborted: bool = False) -> OpenRequest | None:
        entry = super()._forget(request_id, is_aborted)
        if entry is not None:
            self._leave(entry)
            self._waiting.remove(entry)
            self._bound.pop(request_id, None)
        return entry

    def _on_output(self, replica: Replica, output: StepOutput) -> None:
        num_before = replica.stats.num_prompt_tokens
        super()._on_output(replica, output)
        router, index = self.router, replica.index
        if output.stats is not None:
            router.measure(index, output.stats.num_prompt_tokens - num_before, output.end_time - output.start_time)
        if router.loads[index].has_prompts:
            for request_id in output.request_ids:
                route = self._routes.get(request_id)
                if route is not None and route.index == index:
                    router.computed(route)
        if output.cache_keys is not None and not router.index.update(index, output.cache_keys):
            self._share_keys(replica)
        self._dispatch()
