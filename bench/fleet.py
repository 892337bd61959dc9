"""A fleet of built-in engines on this host under a slice of a real trace, by prefix against by turns.

    python -m bench.fleet --trace FILE

Starts two servers with `--replicas` engines each, one with `--router prefix` and one with `round-robin`, and plays
the same slice of Mooncake's trace against each in turn, `--runs` times; caches are empty before each run. The slice has
the first `--minutes` of the trace, and of its conversations one in `--conversations`: a conversation goes on for many
minutes, in which the whole trace has more requests than this host computes. A prompt's
blocks of 512 tokens become `512 / --scale` tokens each, answers are as much shorter, and what prompts share stays the
same. Prints the hit rate and the TTFT of each run as JSON lines, and in how many runs `prefix` was better. Needs an
otherwise idle machine: the engines of the server that waits take no time, the client is on the same processors.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.compare.serve import server
from headrace.fleet import traces
from headrace.fleet.simulator import percentile

START_S = 300.0
ROUTERS = ("prefix", "round-robin")


def prompt_of(call: traces.Call, scale: int) -> list[int]:
    """Token ids that share with other prompts what the trace says."""
    size = traces.MOONCAKE_TOKENS // scale
    token_ids: list[int] = []
    for key in call.keys:
        noise = random.Random(key)
        token_ids += [noise.randrange(300, 2000) for _ in range(size)]
    return token_ids[: max(1, call.num_prompt // scale)]


def conversation_of(call: traces.Call) -> int:
    """The key of a conversation: its first block after the one that all share."""
    return call.keys[1] if len(call.keys) > 1 else call.keys[0]


@contextlib.contextmanager
def started(router: str, num_replicas: int, num_blocks: int, log: Path) -> Iterator[str]:
    """The address of a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "headrace", "serve", "builtin", "--port", str(port), "--crash-report-dir", ""]
    line += [
        "--router",
        router,
        "--data-parallel-size",
        str(num_replicas),
        "--num-gpu-blocks-override",
        str(num_blocks),
    ]
    with server(line, dict(os.environ), port, log, START_S):
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while any(each["phase"] != "ready" for each in httpx.get(url + "/fleet").json()["replicas"]):
            if time.monotonic() > deadline:
                raise SystemExit(f"the engines of {url} were not ready after {START_S:.0f} s")
            time.sleep(0.1)
        yield url


def counter(url: str, name: str) -> float:
    text = httpx.get(url + "/metrics").text
    return sum(float(value) for value in re.findall(rf"^headrace:{name}_total{{[^}}]*}} (\S+)$", text, re.M))


async def play(url: str, calls: Sequence[traces.Call], scale: int) -> dict[str, Any]:
    """Send the calls at their times. Returns the figures of the run."""
    names = ("prefix_cache_hits", "prefix_cache_queries")
    before = [counter(url, name) for name in names]
    times: list[float] = []
    errors: list[str] = []

    async def one(client: httpx.AsyncClient, call: traces.Call) -> None:
        body = {"prompt": prompt_of(call, scale), "max_tokens": max(1, call.num_new // scale), "stream": True}
        start = time.monotonic()
        async with client.stream("POST", url + "/v1/completions", json=body | {"ignore_eos": True}) as reply:
            is_first = True
            async for line in reply.aiter_lines():
                if line.startswith("data: {") and is_first:
                    times.append(time.monotonic() - start)
                    is_first = False
                if reply.status_code != 200 or '"error"' in line:
                    errors.append(line[:200])

    async with httpx.AsyncClient(timeout=START_S, limits=httpx.Limits(max_connections=None)) as client:
        start = time.monotonic()
        tasks = []
        for call in calls:
            await asyncio.sleep(max(0.0, start + call.time - time.monotonic()))
            tasks.append(asyncio.create_task(one(client, call)))
        await asyncio.gather(*tasks)
    if errors:
        raise SystemExit(f"{len(errors)} errors, such as {errors[0]}")
    hits, queries = (counter(url, name) - was for name, was in zip(names, before, strict=True))
    times.sort()
    return {
        "requests": len(times),
        "seconds": round(time.monotonic() - start, 1),
        "hits": round(hits / queries, 4),
        "p50_ttft_ms": round(1e3 * percentile(times, 50), 1),
        "p90_ttft_ms": round(1e3 * percentile(times, 90), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=20.0, help="of the trace")
    parser.add_argument("--conversations", type=int, default=16, help="of so many one is played")
    parser.add_argument("--speed-up", type=float, default=24.0)
    parser.add_argument("--scale", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=2048, help="blocks of 16 tokens in an engine's cache")
    options = parser.parse_args()
    calls = traces.read(options.trace, 60 * options.minutes / options.speed_up, options.speed_up)
    calls = [call for call in calls if conversation_of(call) % options.conversations == 0]
    wins = {"hits": 0, "p50_ttft_ms": 0}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {
            router: stack.enter_context(started(router, options.replicas, options.blocks, folder / router))
            for router in ROUTERS
        }
        for run in range(options.runs):
            figures = {}
            # Each is first in every other run.
            for router in ROUTERS if run % 2 else reversed(ROUTERS):
                httpx.post(urls[router] + "/reset_prefix_cache").raise_for_status()
                figures[router] = asyncio.run(play(urls[router], calls, options.scale))
                print(json.dumps({"run": run, "router": router} | figures[router]), flush=True)
            prefix, turns = figures["prefix"], figures["round-robin"]
            wins["hits"] += prefix["hits"] > turns["hits"]
            wins["p50_ttft_ms"] += prefix["p50_ttft_ms"] < turns["p50_ttft_ms"]
    print(json.dumps({"runs": options.runs, "prefix_was_better_in": wins}))
    if min(wins.values()) < options.runs:
        sys.exit(1)


if __name__ == "__main__":
    main()
