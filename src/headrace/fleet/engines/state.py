"""`state_of`: the engines behind a client, a row for each, for `GET /fleet`. Called by `serve.fleet`."""

from __future__ import annotations

import time

import msgspec

from headrace.engine.client import EngineClient
from headrace.fleet.engines.client import Fleet
from headrace.fleet.engines.local import LocalFleet
from headrace.fleet.engines.update import UpdateProgress


class ReplicaState(msgspec.Struct, kw_only=True):
    """One of the engines. `phase`: loading, ready, leaving (it gets no new requests), restarting or lost. `age` is in
    seconds since its engine was ready. Counters grow since the replica was added; `num_moved_away` and `num_moved_here`
    count requests that went on in another replica, or came from one. `fingerprint` (`engine.fingerprint`) is "" while
    it is not known."""

    replica: int
    phase: str
    fingerprint: str
    pid: int | None
    age: float
    num_open: int
    num_running: int
    kv_cache_usage: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_moved_away: int
    num_moved_here: int
    num_restarts: int


class FleetState(msgspec.Struct, kw_only=True):
    """The engines. `num_queued` requests wait in front of them; `num_moved` went on in another engine than they began
    in. `update` is the rolling update that runs, or the last one; None if there was none. `router` is None for a single
    engine, which cannot be updated."""

    model: str
    router: str | None
    num_queued: int
    num_moved: int
    replicas: list[ReplicaState]
    update: UpdateProgress | None = None


def state_of(client: EngineClient, model: str) -> FleetState:
    """Return the engines of a client now; `model` is their model's name."""
    fleet = client if isinstance(client, Fleet) else None
    return FleetState(
        model=model,
        router=None if fleet is None else fleet.router.policy,
        num_queued=0 if fleet is None else fleet.num_queued,
        num_moved=0 if fleet is None else fleet.num_moved,
        replicas=replicas_of(client, time.monotonic()),
        update=client.updates.progress if isinstance(client, LocalFleet) else None,
    )


def replicas_of(client: EngineClient, now: float) -> list[ReplicaState]:
    """Return the state of each engine at `now`, in monotonic seconds."""
    states = []
    for replica in client.replicas:
        stats, total = replica.stats, replica.total
        states.append(
            ReplicaState(
                replica=replica.index,
                phase=replica.phase,
                fingerprint=replica.fingerprint,
                pid=replica.link.pid,
                age=now - replica.start_time if replica.is_up else 0.0,
                num_open=sum(not entry.is_probe for entry in replica.entries.values()),
                num_running=stats.num_running,
                kv_cache_usage=stats.kv_cache_usage,
                prefix_cache_queries=max(0, total.prefix_cache_queries),
                prefix_cache_hits=total.prefix_cache_hits,
                num_prompt_tokens=max(0, total.num_prompt_tokens),
                num_generated_tokens=max(0, total.num_generated_tokens),
                num_moved_away=replica.num_moved_away,
                num_moved_here=replica.num_moved_here,
                num_restarts=replica.num_restarts,
            )
        )
    return states
