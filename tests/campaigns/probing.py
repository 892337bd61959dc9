"""Part of C-11 (S-24): whether one tenant can tell by time what another has asked, over HTTP on a real engine.

Bob times calls that Alice has just sent and calls that nobody has; both must take him equally long. What a shared cache
would show is measured beside it, by Alice's own calls: the control. A kind of call for each cache: prefixes of prompts,
schemas (the verdicts of the grammar process, and the engine's built grammars), breakers of the DRY sampler, words (the
tokenizer's), and rendered chats.
"""

from __future__ import annotations

import math
import random
import socket
import statistics
import time
from collections.abc import Callable
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
MIN_P = 0.01
CONTROL_P = {"prefix": 1e-6, "schema": 0.01, "breakers": 0.01}
"""Of so few probes the control of a cache that saves little is as clear as this."""
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


def auc(warm: list[float], cold: list[float]) -> float:
    """The share of pairs in which the cold one took longer: 0.5 tells nothing, 1 everything."""
    return sum((c > w) + (c == w) / 2 for c in cold for w in warm) / (len(warm) * len(cold))


def _prompt(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """About 150 tokens."""
    prompt = " ".join(rng.choice(WORDS) for _ in range(NUM_WORDS))
    return "/v1/completions", {"prompt": prompt, "max_tokens": 1, "seed": 1}


def _schema(rng: random.Random) -> tuple[str, dict[str, Any]]:
    names = [f"p{rng.getrandbits(32):08x}" for _ in range(40)]
    pattern = {"type": "string", "pattern": "^[a-z]{1,50}[0-9]{1,9}$"}
    schema = {"type": "object", "properties": dict.fromkeys(names, pattern), "required": names[:1]}
    body = {"prompt": "x", "max_tokens": 1, "seed": 1, "structured_outputs": {"json": schema}}
    return "/v1/completions", body


def _breakers(rng: random.Random) -> tuple[str, dict[str, Any]]:
    texts = [f"{rng.getrandbits(24):06x}" for _ in range(16)]
    body = {"prompt": "x", "max_tokens": 1, "seed": 1, "dry_multiplier": 1.0, "dry_sequence_breakers": texts}
    return "/v1/completions", body


def _words(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return "/tokenize", {"prompt": " ".join(f"{rng.getrandbits(120):030x}" for _ in range(60))}


def _chat(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return "/apply-template", {"messages": [{"role": "user", "content": f"{rng.getrandbits(1200):0300x}"}]}


KINDS: dict[str, Callable[[random.Random], tuple[str, dict[str, Any]]]] = {
    "prefix": _prompt, "schema": _schema, "breakers": _breakers, "words": _words, "chat": _chat,
}  # fmt: skip
CACHED = ("prefix", "schema", "breakers")
"""Kinds whose own calls are quicker the second time: their control must be seen."""


def at_once() -> httpx.HTTPTransport:
    """Head and body go in two segments, of which the second would wait for 40 ms."""
    return httpx.HTTPTransport(socket_options=[(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)])


def run_campaign(num_pairs: int, seed: int, kind: str = "prefix") -> dict[str, Any]:
    """So many calls, each probed warm and cold, in random order."""
    rng = random.Random(seed)
    times: dict[str, list[float]] = {"warm": [], "cold": [], "own": []}
    config = EngineConfig(model="builtin", max_model_len=1024, num_threads=1)
    server = ServerConfig(api_key=[ALICE, BOB], log_stats_interval=0)
    cached = 0
    client = InprocClient(lambda: build.build_engine(config))
    with (
        Live(client, Tokenizer.load(hub.resolve("builtin")), server) as live,
        httpx.Client(base_url=live.url, transport=at_once()) as http,
    ):

        def ask(key: str, call: tuple[str, dict[str, Any]]) -> float:
            nonlocal cached
            path, body = call
            begin = time.perf_counter()
            reply = http.post(path, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)
            took = time.perf_counter() - begin
            reply.raise_for_status()
            if kind == "prefix":
                # Of his own prompts some begin with the same words.
                usage = reply.json()["usage"]
                cached += key == BOB and usage["prompt_tokens_details"]["cached_tokens"] > FEW_TOKENS
            return took

        # The processes and the tables of the vocabulary are there before the first call is timed.
        ask(BOB, KINDS[kind](rng))
        for _ in range(num_pairs):
            known = KINDS[kind](rng)
            ask(ALICE, known)
            probes = [("warm", BOB, known), ("cold", BOB, KINDS[kind](rng)), ("own", ALICE, known)]
            rng.shuffle(probes)
            for name, key, call in probes:
                times[name].append(ask(key, call))
    return {
        "probes": num_pairs,
        "p": mann_whitney(times["warm"], times["cold"]),
        "p_of_the_control": mann_whitney(times["own"], times["cold"]),
        "auc": auc(times["warm"], times["cold"]),
        "auc_of_the_control": auc(times["own"], times["cold"]),
        "ms_warm_cold_own": [round(1e3 * statistics.median(each), 2) for each in times.values()],
        "num_told_of_a_cache": cached,
    }
