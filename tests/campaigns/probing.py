"""Part of C-11 (S-24): whether one tenant can tell by time what another has asked, over HTTP on a real engine.

Bob times prompts that Alice has just sent and prompts that nobody has; both must take him equally long. What a shared
cache would show is measured beside it, by Alice's own prompts: the control.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from typing import Any

import httpx
from tests.support.server import Live

from headrace import hub
from headrace.engine import build
from headrace.engine.client import InprocClient
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.text.tokenizer import Tokenizer

WORDS = "river stone garden winter letter captain mirror orange thunder village candle forest silver window".split()
NUM_WORDS, FEW_TOKENS = 80, 32
MIN_P, CONTROL_P = 0.01, 1e-6
ALICE, BOB = "alice-key-1234", "bob-key-1234"


def mann_whitney(left: list[float], right: list[float]) -> float:
    """Two-sided p that two samples are from one distribution (Mann and Whitney, 1947): the normal approximation, equal
    values with their mean rank."""
    values = sorted([(value, 0) for value in left] + [(value, 1) for value in right])
    ranks, ties, first = 0.0, 0.0, 0
    while first < len(values):
        end = first
        while end < len(values) and values[end][0] == values[first][0]:
            end += 1
        ranks += (first + end + 1) / 2 * sum(side == 0 for _, side in values[first:end])
        ties += (end - first) ** 3 - (end - first)
        first = end
    num, n, m = len(values), len(left), len(right)
    u = ranks - n * (n + 1) / 2
    spread = n * m / 12 * (num + 1 - ties / (num * (num - 1)))
    return math.erfc(abs(u - n * m / 2) / math.sqrt(2 * spread)) if spread else 1.0


def run_campaign(num_pairs: int, seed: int) -> dict[str, Any]:
    """So many prompts of about 150 tokens, each probed warm and cold, in random order."""
    rng = random.Random(seed)
    times: dict[str, list[float]] = {"warm": [], "cold": [], "own": []}
    config = EngineConfig(model="builtin", max_model_len=1024, num_threads=1)
    server = ServerConfig(api_key=[ALICE, BOB], log_stats_interval=0)
    cached = 0

    def text() -> str:
        return " ".join(rng.choice(WORDS) for _ in range(NUM_WORDS))

    client = InprocClient(lambda: build.build_engine(config))
    with Live(client, Tokenizer.load(hub.resolve("builtin")), server) as live, httpx.Client(base_url=live.url) as http:

        def ask(key: str, prompt: str) -> float:
            nonlocal cached
            begin = time.perf_counter()
            reply = http.post(
                "/v1/completions",
                json={"prompt": prompt, "max_tokens": 1, "seed": 1},
                headers={"authorization": f"Bearer {key}"},
                timeout=60,
            )
            took = time.perf_counter() - begin
            reply.raise_for_status()
            # Of his own prompts some begin with the same words.
            cached += key == BOB and reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > FEW_TOKENS
            return took

        for _ in range(num_pairs):
            known = text()
            ask(ALICE, known)
            probes = [("warm", BOB, known), ("cold", BOB, text()), ("own", ALICE, known)]
            rng.shuffle(probes)
            for kind, key, prompt in probes:
                times[kind].append(ask(key, prompt))
    return {
        "probes": num_pairs,
        "p": mann_whitney(times["warm"], times["cold"]),
        "p_of_the_control": mann_whitney(times["own"], times["cold"]),
        "ms_warm_cold_own": [round(1e3 * statistics.median(each), 2) for each in times.values()],
        "num_told_of_a_cache": cached,
    }
