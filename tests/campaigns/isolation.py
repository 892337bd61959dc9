"""C-11, timing and isolation: what a comparison of keys tells by its time, what one salt sees of another's cache."""

from __future__ import annotations

import math
import random
import secrets
import statistics
import time
from collections.abc import Callable
from typing import Any

from tests.campaigns import probing

from headrace.core.blocks import BlockPool
from headrace.core.prefix import PrefixCache
from headrace.serve.gates.auth import KeyRing

MAX_T = 4.5
"""Beyond it two times differ for certain (Goodwill et al., A testing methodology for side-channel resistance, 2011)."""


def welch(left: list[float], right: list[float]) -> float:
    """Welch's t of two samples."""
    spread = statistics.variance(left) / len(left) + statistics.variance(right) / len(right)
    return (statistics.fmean(left) - statistics.fmean(right)) / math.sqrt(spread) if spread else 0.0


def timing(find: Callable[[bytes], object], key: bytes, num: int, seed: int) -> float:
    """Welch's t between wrong keys that differ in the first byte and such that differ in the last, in random order.
    The slowest tenth is left out: then something else ran."""
    near, far = key[:-1] + bytes([key[-1] ^ 1]), bytes([key[0] ^ 1]) + key[1:]
    rng = random.Random(seed)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(num):
        which = rng.randrange(2)
        inputs = (near, far)[which]
        begin = time.perf_counter_ns()
        find(inputs)
        times[which].append(time.perf_counter_ns() - begin)
    bound = sorted(times[0] + times[1])[int(0.9 * num)]
    eaches = [[each for each in side if each <= bound] for side in times]
    return welch(eaches[0], eaches[1])


def foreign_hits(num_pairs: int, seed: int) -> int:
    """Tokens that a tenant finds cached of another's prompt, over so many prompts."""
    pool = BlockPool(64, 4)
    cache = PrefixCache(pool, secrets.token_bytes(32))
    rng = random.Random(seed)
    hits = 0
    for pair in range(num_pairs):
        tokens = [rng.randrange(100) for _ in range(24)]
        keys = [cache.root(f"tenant {pair}")]
        table = pool.allocate(6)
        if table is None:
            raise RuntimeError("no blocks are left")
        cache.publish(tokens, keys, table, 0, 6)
        if cache.match(tokens, [cache.root(f"tenant {pair}")], 23)[1] != 23:
            raise RuntimeError("the owner does not find its own prompt")
        hits += cache.match(tokens, [cache.root(f"tenant {pair + 1}")], 23)[1]
        pool.release(table)
    return hits


def naive(key: bytes, inputs: bytes) -> bool:
    """What must not be: it ends at the first byte that differs. The control of `timing`."""
    return all(left == right for left, right in zip(key, inputs, strict=False))


def run_campaign(num: int, seed: int) -> dict[str, Any]:
    """`num` comparisons. A difference has to show twice: other work on the machine is no leak."""
    key = secrets.token_hex(32).encode()
    ring = KeyRing.of(key.decode(), None, None)
    values = [timing(ring.find, key, num, seed)]
    if abs(values[0]) > MAX_T:
        values.append(timing(ring.find, key, num, seed + 1))
    control = timing(lambda inputs: naive(key, inputs), key, min(num, 20_000), seed)
    hits = foreign_hits(500, seed)
    pairs = min(500, max(100, num // 200))
    probes = {kind: [probing.run_campaign(pairs, seed, kind)] for kind in probing.KINDS}
    for kind, runs in probes.items():
        if runs[0]["p"] < probing.MIN_P:
            runs.append(probing.run_campaign(pairs, seed + 1, kind))
    seen = [kind for kind, runs in probes.items() if all(each["p"] < probing.MIN_P for each in runs)]
    seen += [f"{kind} by a count" for kind, runs in probes.items() if any(each["num_told_of_a_cache"] for each in runs)]
    blind = [kind for kind in probing.CACHED if probes[kind][-1]["p_of_the_control"] > probing.CONTROL_P[kind]]
    prefix = probes["prefix"][-1]
    output = all(abs(t) > MAX_T for t in values) and len({t > 0 for t in values}) == 1
    return {
        "comparisons": num * len(values),
        "welch_t": round(values[-1], 2),
        "welch_t_of_a_naive_comparison": round(control, 2),
        "cache_pairs": 500,
        "foreign_hits": hits,
        "timed_probes": pairs * sum(map(len, probes.values())),
        "p_of_warm_and_cold": round(prefix["p"], 4),
        "p_of_a_shared_cache": prefix["p_of_the_control"],
        "ms_warm_cold_own": prefix["ms_warm_cold_own"],
        **{f"auc_{kind}": round(runs[-1]["auc"], 3) for kind, runs in probes.items()},
        **{f"auc_own_{kind}": round(probes[kind][-1]["auc_of_the_control"], 3) for kind in probing.CACHED},
        "violations": int(output) + int(hits > 0) + int(control < MAX_T) + len(seen) + len(blind),
        "examples": [f"seen: {kind}" for kind in seen] + [f"the control is not seen: {kind}" for kind in blind],
    }
