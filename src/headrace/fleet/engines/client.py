"""`Fleet`: the face of one engine client over several engines. One admission and one queue for all.

A request waits in the queue until a replica has room for it, so that no caller's requests pile up before another's. The
open requests of a replica that is lost or drained go to others of the same fingerprint, or wait for one; because output
depends on the request alone, they go on with the same bits. A request that kills its engine is found as with one
engine, whichever replica had it. Replicas may be added and removed while requests run. Takes any `Link`; knows no
processes and no HTTP. Made by `fleet.engines.local`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Collection, Sequence
from itertools import count

import msgspec

from headrace.core.prefix import root_key
from headrace.engine.client import EngineClient
from headrace.engine.core import verify
from headrace.engine.links import Link
from headrace.engine.open_requests import OpenRequest, RequestStream, added, summed
from headrace.engine.order_calls import Orders
from headrace.engine.orders import ReadFingerprint
from headrace.engine.replica import Replica
from headrace.fleet.dispatch import Dispatcher, has_room
from headrace.fleet.index import prefix_keys
from headrace.fleet.router import Route, Router
from headrace.protocol import frames
from headrace.protocol.errors import EngineDeadError, RequestError
from headrace.protocol.step import EngineInfo, Stats, StepOutput

logger = logging.getLogger("headrace.engine")

LEAVE_S = 0.02
"""Seconds between two looks at whether a replica that leaves has ended its requests."""
FIRST_START_S = 360.0
"""The estimated seconds that the start of an added engine takes; after `START_PATIENCE` times as many it is given
up."""
BOUNDS = ("max_model_len", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_logprobs")
"""Numbers of an engine. A request to a fleet is bound by the least of all replicas."""

FACTS = ("vocab_size", "eos_token_ids", "hidden_size")
"""Facts of a model: an engine in which they are others is no replica of it."""


class Fleet(EngineClient):
    """Engines behind `links`.

    Args:
        links: one for each replica that is there from the start. There may be none: `start` then waits for the first
            that is added.
        router: a policy of `protocol.kinds.ROUTERS`.
        secret: the key of the deployment's prefix keys, at most 64 bytes; None: a new one.
        max_num_queued_reqs, max_num_queued_tokens: bounds on requests that no engine has started.
        max_restarts, watchdog_timeout: of each replica; see `Replica`. A replica that is given up leaves its work to
        the others; when none is left, all requests end with an `EngineDeadError`.

    Raises `ValueError` for an unknown policy.
    """

    is_fleet = True

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
        self.num_moved = 0
        self.router = Router(router, max(1, len(links)), 1)
        self._secret = secret or os.urandom(32)
        self._waiting: Dispatcher[OpenRequest] = Dispatcher(self.router, "fcfs")
        self._routes: dict[str, Route] = {}
        self._info: EngineInfo | None = None
        # Whether the bounds of the replicas differ, so that one may serve a request that another cannot.
        self._is_mixed = False
        self._tasks: set[asyncio.Task[None]] = set()
        # Of the replicas that were added, by number.
        self._starts: dict[int, asyncio.Task[None]] = {}
        self._has_started = asyncio.Event()
        # Counters of replicas that were removed.
        self._past = Stats()
        self._num_past_restarts = 0

    # -- the face of one engine

    @property
    def info(self) -> EngineInfo:
        """The numbers within which every started replica can serve a request."""
        if self._info is None:
            raise EngineDeadError("the engine has not started")
        return self._info

    @property
    def is_started(self) -> bool:
        return self._info is not None

    @property
    def num_queued(self) -> int:
        """The number of requests that no replica has."""
        return len(self._waiting)

    @property
    def orders(self) -> Orders:
        """The numbers of the first replica that runs."""
        for replica in (*(each for each in self.replicas if each.is_alive), *self.replicas):
            return replica.orders
        raise EngineDeadError("the fleet has no engine")

    @property
    def stats(self) -> Stats:
        total = added([Stats(), *(replica.stats for replica in self.replicas)])
        return msgspec.structs.replace(total, num_waiting=total.num_waiting + len(self._waiting))

    @property
    def total(self) -> Stats:
        return summed(self._past, added([Stats(), *(replica.total for replica in self.replicas)]))

    @property
    def num_restarts(self) -> int:
        return self._num_past_restarts + super().num_restarts

    async def start(self) -> None:
        if self.replicas and all(task.done() for task in self._starts.values()):
            await super().start()
        else:  # Those that were added first start by themselves.
            self._closing = False
            await self._has_started.wait()
        await asyncio.gather(*self._tasks)

    async def close(self, at_once: bool = False) -> None:
        for task in self._tasks:
            task.cancel()
        await super().close(at_once)
        await asyncio.gather(*self._starts.values(), return_exceptions=True)

    # -- replicas that come and go

    def add(self, link: Link) -> Replica:
        """Start one more engine, and send it requests once it has made a token; `started` waits for that. One that does
        not come so far is removed again. It gets the least number that is free."""
        self._check_open()
        numbers = {replica.index for replica in self.replicas}
        index = next(number for number in count() if number not in numbers)
        replica = Replica(link, self, index, *self._life)
        self.router.add(index)
        self.replicas.append(replica)
        task = self._starts[index] = asyncio.get_running_loop().create_task(self._start(replica))
        # A failure that no caller waits for is logged where it is raised.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return replica

    async def started(self, replica: Replica) -> None:
        """Wait until a replica that was just added gets requests. Raises the error that keeps it from that."""
        await asyncio.shield(self._starts[replica.index])

    async def _start(self, replica: Replica) -> None:
        began = time.monotonic()
        # It ends if it stands still, and is not compared with a start before.
        replica.start_seconds = FIRST_START_S
        try:
            await replica.start()
            replica.start_seconds = time.monotonic() - began
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if not replica.fingerprint:
                raise EngineDeadError("the new engine ended after its first token")
        except BaseException as error:
            logger.error("replica %d can not be used: %s", replica.index, error or type(error).__name__)
            self._starts.pop(replica.index, None)
            # To the end, whatever becomes of this task: its process must not stay behind.
            await asyncio.shield(self._drop(replica))
            raise
        if self.is_watched and replica is self.replicas[0]:
            replica.watching.watch(True)

    def drain(self, index: int) -> None:
        """Send a replica no new requests. Its requests go on in another replica of the same fingerprint, or, without
        one, end where they are."""
        replica = self.replica(index)
        replica.is_leaving = True
        others = [each for each in self.replicas if self._is_serving(each) and each.fingerprint == replica.fingerprint]
        entries = [entry for entry in replica.entries.values() if not entry.is_probe]
        if others and all(any(self._serves(each, entry) for each in others) for entry in entries):
            self._take_back(replica)
        self._dispatch()

    async def remove(self, index: int, patience: float = 0.0) -> None:
        """Drain a replica, wait until it has no request and none waits that it alone can go on with, and end it.

        For `patience` seconds its requests may end where they are before they are moved. Raises `KeyError`."""
        replica = self.replica(index)
        replica.is_leaving = True
        end = time.monotonic() + patience
        try:
            while not self._closing and self._has_requests(replica):
                if time.monotonic() >= end and replica.entries:
                    self.drain(index)
                await asyncio.sleep(LEAVE_S)
        except BaseException:
            replica.is_leaving = False
            raise
        await asyncio.shield(self._drop(replica))

    def _has_requests(self, replica: Replica) -> bool:
        """Whether a replica has requests, or requests wait that no other one can go on with."""
        if any(not entry.is_probe for entry in replica.entries.values()):
            return True
        if replica.dead is not None:
            return False
        others = {each.fingerprint for each in self.replicas if each is not replica and self._is_serving(each)}
        mine = replica.fingerprint
        bound = (entry.stream.fingerprint for entry in self._waiting)
        return any(each and each not in others and mine in ("", each) for each in bound)

    async def _drop(self, replica: Replica) -> None:
        """End a replica and forget it, except for its counters."""
        was_first = self.replicas[:1] == [replica]
        if (start := self._starts.pop(replica.index, None)) is not None:
            start.cancel()
        await replica.close()
        if replica not in self.replicas:
            return
        self._take_back(replica)
        for entry in list(replica.entries.values()):
            entry.stream.fail(EngineDeadError("the engine was removed"))
        self.replicas.remove(replica)
        self._past = summed(self._past, replica.total)
        self._num_past_restarts += replica.num_restarts
        self.router.remove(replica.index)
        self._learn()
        if self.is_watched and was_first:
            self.watch(True)
        self._fail_stranded()
        self._dispatch()

    def probe(self, replica: Replica) -> RequestStream:
        self._learn()
        self._share_keys(replica)
        return super().probe(replica)

    def _learn(self) -> None:
        """Take in the numbers of the engines that there are."""
        infos = [each.info for each in self.replicas if each.info is not None and each.dead is None]
        if not infos:
            return
        if self._info is None:
            self._waiting = Dispatcher(self.router, infos[0].scheduling_policy)
        bounds = [{name: getattr(info, name) for name in BOUNDS} for info in infos]
        self._is_mixed = any(each != bounds[0] for each in bounds)
        self._info = msgspec.structs.replace(infos[0], **{name: min(each[name] for each in bounds) for name in BOUNDS})
        if all(info.block_size != self.router.block_tokens for info in infos):
            self.router.resize_blocks(infos[0].block_size)
            for replica in self.replicas:
                self._share_keys(replica)

    def _share_keys(self, replica: Replica) -> None:
        """Let an engine report the keys of its cache, all of them first."""
        is_alike = replica.info is not None and replica.info.block_size == self.router.block_tokens
        if self.router.policy == "prefix" and is_alike:
            replica.link.post(frames.ShareKeys(self._secret))

    def _on_proven(self, replica: Replica) -> None:
        task = asyncio.get_running_loop().create_task(self._take_in(replica))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take_in(self, replica: Replica) -> None:
        """Use an engine from now on, once its fingerprint is known."""
        try:
            fingerprint = await replica.orders.give(ReadFingerprint(), str)
        except EngineDeadError:
            return
        if wrong := self._unlike(replica):
            replica.refuse(f"replica {replica.index} is not of the same model: {wrong}")
            self._learn()
            return
        replica.fingerprint = fingerprint
        self._has_started.set()
        if len({each.fingerprint for each in self.replicas if each.fingerprint}) > 1:
            logger.warning("the replicas differ in weights, formats or kernels: answers stay where they began")
        self._fail_stranded()
        self._dispatch()

    def _unlike(self, replica: Replica) -> str:
        """Return the fact of a replica's model that the replicas in use have otherwise; empty if there is none."""
        others = (each.info for each in self.replicas if each.fingerprint and each is not replica)
        known, info = next(others, None), replica.info
        if known is None or info is None:
            return ""
        pairs = ((name, getattr(info, name), getattr(known, name)) for name in FACTS)
        return next(
            (f"its {name} is {mine}, and elsewhere {theirs}" for name, mine, theirs in pairs if mine != theirs), ""
        )

    def convict(self, replica: Replica, reason: str, now: float) -> None:
        """Find a request that caused a death, as with one engine, and give the others to other replicas."""
        super().convict(replica, reason, now)
        self._take_back(replica)
        replica.fingerprint = ""
        self.router.index.clear(replica.index)
        self._dispatch()

    def on_given_up(self, replica: Replica, message: str) -> None:
        self._take_back(replica)
        if all(each.dead is not None for each in self.replicas):
            super().on_given_up(replica, message)
            return
        # Its probe, which a start waits for.
        for entry in list(replica.entries.values()):
            entry.stream.fail(EngineDeadError(message))
        logger.critical("replica %d is lost; %d requests go on in others", replica.index, self.num_unfinished)
        self._fail_stranded()

    def _take_back(self, replica: Replica) -> None:
        """Put the requests of a replica back into the queue, ahead of those that have not run."""
        for entry in replica.hand_over():
            if entry.was_sent:
                self.num_moved += 1
                replica.num_moved_away += 1
            if not self._has_begun(entry.stream):
                entry.stream.fingerprint = ""
            self._leave(entry)
            self._queue(entry, is_first=True)

    def _has_begun(self, stream: RequestStream) -> bool:
        """Whether an answer of a call has begun, so that all of its answers are from engines that compute alike."""
        entries = [self._open.get(request.request_id) for request in stream.requests]
        return any(entry is None or entry.started for entry in entries)

    def _fail_stranded(self) -> None:
        """End the answers that no replica can go on with, now or after its restart."""
        known = {each.fingerprint for each in self.replicas}
        if known <= {""} or any(not each.fingerprint and each.dead is None for each in self.replicas):
            return
        for entry in self._waiting:
            bound = entry.stream.fingerprint
            if bound not in ("", *known):
                error = EngineDeadError("no engine is left that computes as the one that began this answer")
                entry.stream.fail(error)
            elif self._is_mixed and not any(
                bound in ("", each.fingerprint) and self._serves(each, entry) for each in self.replicas
            ):
                try:
                    verify(entry.request, self.info)
                except RequestError as refusal:
                    entry.stream.fail(refusal)

    # -- where requests go

    def _place(self, entry: OpenRequest) -> None:
        self._queue(entry)
        self._dispatch()

    def _queue(self, entry: OpenRequest, is_first: bool = False) -> None:
        request = entry.resumed() if entry.delivered else entry.request
        keys: list[bytes] = []
        if self.router.policy == "prefix" and request.params.prompt_logprobs is None:
            token_ids = [*request.prompt_token_ids, *request.resume_token_ids]
            root = root_key(self._secret, request.cache_salt, request.adapter, b"")
            keys = prefix_keys(token_ids, self.router.block_tokens, self._secret, root)
        self._waiting.add(entry, request, keys, is_first)

    def _dispatch(self) -> None:
        """Send requests from the queue to replicas that have room."""
        if not len(self._waiting):
            return
        usable = {replica.index: replica for replica in self.replicas if self._is_usable(replica)}
        for entry, route in self._waiting.dispatch(
            lambda index: index in usable and self._is_free(usable[index]),
            lambda entry: self._candidates(entry, list(usable.values())),
        ):
            self._routes[entry.request.request_id] = route
            replica = usable[route.index]
            replica.num_moved_here += entry.was_sent
            entry.stream.fingerprint = replica.fingerprint
            self._assign(entry, replica)
            replica.resumption.add(entry)

    @staticmethod
    def _is_usable(replica: Replica) -> bool:
        return replica.is_alive and replica.fingerprint != ""

    @classmethod
    def _is_serving(cls, replica: Replica) -> bool:
        """Whether a replica gets new requests."""
        return cls._is_usable(replica) and not replica.is_leaving

    def _is_free(self, replica: Replica) -> bool:
        info, load = replica.info, self.router.loads[replica.index]
        return info is not None and has_room(load, info.max_num_seqs, info.max_num_batched_tokens)

    def _candidates(self, entry: OpenRequest, usable: list[Replica]) -> Collection[int]:
        """Return the replicas that give a request the same bits as the replicas that ran it so far. A leaving replica
        is among them only where no other is left."""
        bound = entry.stream.fingerprint
        able = [each for each in usable if bound in ("", each.fingerprint) and self._serves(each, entry)]
        serving = [each.index for each in able if not each.is_leaving]
        return serving if serving or not bound else [each.index for each in able]

    def _serves(self, replica: Replica, entry: OpenRequest) -> bool:
        """Whether a request is within the bounds of a replica, and gets as long an answer there as it does elsewhere.
        When it came it was within the bounds of all replicas, but they may have changed since."""
        if not self._is_mixed or replica.info is None:
            return True
        longest = max(each.info.max_model_len for each in self.replicas if each.info is not None)
        request = entry.request
        num_tokens = len(request.prompt_token_ids) + (request.params.max_tokens or longest)
        if replica.info.max_model_len < min(num_tokens, longest):
            return False
        with contextlib.suppress(RequestError):
            verify(entry.request, replica.info)
            return True
        return False

    def _leave(self, entry: OpenRequest) -> None:
        """Count a request as gone from its replica."""
        route = self._routes.pop(entry.request.request_id, None)
        if route is not None:
            self.router.ended(route)
            self._waiting.ended(entry.request.tenant)

    def _forget(self, request_id: str, is_aborted: bool = False) -> OpenRequest | None:
        entry = super()._forget(request_id, is_aborted)
        if entry is not None:
            self._leave(entry)
            self._waiting.remove(entry)
        return entry

    def _on_output(self, replica: Replica, output: StepOutput) -> None:
        if replica not in self.replicas:
            return
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
