"""`state_of`: the gauges and open requests of a running engine, for `headrace top` and the inspector."""

from __future__ import annotations

import msgspec

from headrace.engine.client import EngineClient
from headrace.engine.open_requests import PROBE
from headrace.insight.limits import Machine, Share, share_now
from headrace.insight.lives import Lives

MAX_REQUESTS = 1024


class OpenCall(msgspec.Struct, kw_only=True):
    """A request that has not ended: `age` in seconds since its call came, and how much of its prompt is computed.
    Steps of its replica name it by `seq_id`."""

    id: str
    seq_id: int
    replica: int
    phase: str
    age: float
    num_prompt_tokens: int
    num_computed_prompt_tokens: int
    num_preemptions: int


class State(msgspec.Struct, kw_only=True):
    """`time` is monotonic seconds. The counters of tokens and of the prefix cache grow since the server started;
    `num_blocks_cached` are blocks that the prefix cache has and no request holds. A step has at most
    `max_num_batched_tokens` tokens and `max_num_seqs` columns; a block has the keys and values of `block_size` tokens,
    `kv_token_bytes` each (0: unknown). `requests` are the oldest `MAX_REQUESTS`. `memory` compares the decoding of the
    last seconds with the machine; None where there was none. Steps are of `replica`. `drafter` is the method of
    speculation, "" without one."""

    time: float
    model: str
    is_ready: bool
    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_held: int
    num_blocks_cached: int
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generated_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    block_size: int
    kv_token_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    requests: list[OpenCall]
    replica: int = 0
    memory: Share | None = None
    drafter: str = ""


def state_of(client: EngineClient, lives: Lives, machine: Machine, now: float, drafter: str = "") -> State:
    """Return the state at `now`, in monotonic seconds."""
    requests = []
    for life in sorted(lives.open(), key=lambda life: life.arrival.times[0]):
        if life.request_id.startswith(PROBE):
            continue
        phase, num_prompt = lives.phase_of(life), life.arrival.num_prompt
        requests.append(
            OpenCall(
                id=life.request_id,
                seq_id=life.arrival.seq_id,
                replica=life.replica,
                phase=phase,
                age=now - life.arrival.times[0],
                num_prompt_tokens=num_prompt,
                num_computed_prompt_tokens=num_prompt if phase == "decode" else min(life.position, num_prompt),
                num_preemptions=len(life.preemptions),
            )
        )
    gauges, total, info = client.stats, client.total, client.info if client.is_started else None
    return State(
        time=now,
        model=info.model if info else "",
        is_ready=client.is_alive,
        num_running=gauges.num_running,
        num_waiting=gauges.num_waiting,
        num_blocks=gauges.num_blocks,
        num_blocks_held=gauges.num_blocks_held,
        num_blocks_cached=gauges.num_blocks_cached,
        num_steps=total.num_steps,
        num_preemptions=total.num_preemptions,
        num_prompt_tokens=total.num_prompt_tokens,
        num_generated_tokens=total.num_generated_tokens,
        prefix_cache_queries=total.prefix_cache_queries,
        prefix_cache_hits=total.prefix_cache_hits,
        block_size=info.block_size if info else 0,
        kv_token_bytes=info.kv_token_bytes if info else 0,
        max_num_seqs=info.max_num_seqs if info else 0,
        max_num_batched_tokens=info.max_num_batched_tokens if info else 0,
        requests=requests[:MAX_REQUESTS],
        replica=client.replicas[0].index if client.replicas else 0,
        memory=share_now(lives.reads, machine, now),
        drafter=drafter,
    )
