"""The router of a fleet: its time for a long prompt, and what its policies give on a trace, by a modelled clock.

    python -m bench.router
    python -m bench.router --trace FILE --replicas 8 --minutes 15

The trace is Mooncake's (JSON lines). A replica reads 8,000 tokens of prompts in a second; a step takes 18 ms, and
0.2 ms for each sequence that decodes. Its cache has room for `--cache` tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.core.prefix import root_key
from headrace.fleet import traces
from headrace.fleet.index import prefix_keys
from headrace.fleet.router import Router
from headrace.fleet.simulator import Simulation, Sizes, percentile
from headrace.protocol.kinds import ROUTERS
from headrace.protocol.step import CacheKeys

SECRET = bytes(range(32))
NUM_TOKENS, NUM_REPLICAS, BLOCK = 12_000, 64, 16


def routing(rounds: int) -> dict[str, float]:
    """Milliseconds from token ids to a replica, the least and the median: every replica has a part of the prompt, one
    all of it, and each has 20,000 other blocks."""
    rng = random.Random(1)
    token_ids = [rng.randrange(128_000) for _ in range(NUM_TOKENS)]
    keys = prefix_keys(token_ids, BLOCK, SECRET, root_key(SECRET, "", "", b""))
    router = Router("prefix", NUM_REPLICAS, BLOCK)
    for index in range(NUM_REPLICAS):
        part = keys[: len(keys) * (index + 1) // NUM_REPLICAS]
        others = [rng.randbytes(len(keys[0])) for _ in range(20_000)]
        router.index.update(index, CacheKeys(1, 1, True, b"".join([*part, *others])))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        route = router.route(prefix_keys(token_ids, BLOCK, SECRET, root_key(SECRET, "", "", b"")), NUM_TOKENS)
        times.append(1e3 * (time.perf_counter() - start))
        if route is not None:
            router.ended(route)
    return {"least_ms": min(times), "median_ms": sorted(times)[rounds // 2]}


def step_time(starts: Sequence[int], lens: Sequence[int], num_logits: int) -> float:
    num_decoding = sum(length == 1 for length in lens)
    return 0.018 + (sum(lens) - num_decoding) / 8000 + 0.0002 * num_decoding


def simulated(
    calls: Sequence[traces.Call],
    num_replicas: int,
    policy: str,
    cache_tokens: int,
    block_size: int,
    is_early: bool = False,
) -> dict[str, float]:
    """Return the figures of one policy; `is_early`: requests are sent to a replica when they come."""
    num_blocks = cache_tokens // block_size
    sizes = Sizes(num_blocks=num_blocks, block_size=block_size, max_num_batched_tokens=2048, max_model_len=200_000)
    gc.disable()
    run = Simulation(num_replicas, policy, sizes, step_time, is_early).run(calls)
    gc.enable()
    ttft = sorted(life.ttft for life in run.lives)
    num_cached, num_prompt = sum(life.num_cached for life in run.lives), sum(life.num_prompt for life in run.lives)
    return {
        "requests": len(run.lives),
        "hits": num_cached / num_prompt,
        "p50_ttft_s": percentile(ttft, 50),
        "p90_ttft_s": percentile(ttft, 90),
    }


def most_hits(calls: Sequence[traces.Call]) -> float:
    """The share of the prompts' tokens that one cache without bounds has."""
    known: set[int] = set()
    num = 0
    for call in calls:
        depth = next((at for at, key in enumerate(call.keys) if key not in known), len(call.keys))
        num += min(depth * traces.MOONCAKE_TOKENS, call.num_prompt - 1)
        known.update(call.keys)
    return num / sum(call.num_prompt for call in calls)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the router of a fleet.")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=ROUTERS)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--cache", type=int, default=600 * 512, help="tokens in a replica's cache")
    parser.add_argument("--block-size", type=int, default=traces.MOONCAKE_TOKENS)
    parser.add_argument("--speed-up", type=float, default=1.0)
    options = parser.parse_args()
    if options.trace is None:
        print(json.dumps({"tokens": NUM_TOKENS, "replicas": NUM_REPLICAS} | routing(options.rounds)))
        return
    calls = traces.read(options.trace, 60 * options.minutes, options.speed_up)
    print(json.dumps({"requests": len(calls), "replicas": options.replicas, "most_hits": most_hits(calls)}))
    for policy in options.routers:
        # Most fleets send by turns at once; with a queue in front, turns are better than that.
        for is_early in (True, False) if policy == "round-robin" else (False,):
            figures = simulated(calls, options.replicas, policy, options.cache, options.block_size, is_early)
            print(json.dumps({"router": policy, "dispatch": "early" if is_early else "late"} | figures), flush=True)


if __name__ == "__main__":
    main()
