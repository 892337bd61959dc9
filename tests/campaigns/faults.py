"""The campaign of live faults (C-5): the engine's process is killed, stopped, crashed and starved in mid-answer.

`python -m tests.campaigns.faults --faults 250 --seed 1 --out bench/results/faults.json` starts `headrace serve`, lets
streams of every kind run undisturbed, and then again and again with a fault at a random moment of each round. Every
stream must end with the text, token ids and log-probabilities of the undisturbed run, to the bit; the server must be
ready again within a bound, with the same process, and nothing may be left behind. What it counted it prints as JSON;
the exit status is 1 if anything was wrong.

Faults: `kill` (SIGKILL), `stop` (SIGSTOP; the watchdog has to find out), `segv` (SIGSEGV), `abort` (SIGABRT), `memory`
(its address space may not grow any more, and a request comes that needs a lot; either that fails alone, or the engine
dies of it). `rank-kill`, `rank-stop`: of a rank beside the first, where there are several (`tests.campaigns.ranks`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import resource
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.campaigns.streams import Told, asked, is_whole, read, same
from tests.support.serving import Served, gauge, serve

KINDS = ("kill", "stop", "segv", "abort", "memory")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV, "abort": signal.SIGABRT}
HUNGRY = {"prompt": "many words " * 400, "max_tokens": 4, "n": 16, "prompt_logprobs": 20, "logprobs": 20}
STREAM_S = 300.0


class Campaign:
    """Rounds of streams against one server, with faults in them."""

    def __init__(self, served: Served, num_streams: int, seed: int, max_tokens: int) -> None:
        self.served = served
        self.noise = random.Random(seed)
        self.requests = [asked(place, max_tokens) for place in range(num_streams)]
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.recoveries: list[float] = []
        self.noticed: dict[str, list[float]] = {}
        self.expected: list[Told] = []

    async def undisturbed(self) -> None:
        """What every stream has to be."""
        self.expected = await self.streams()
        for one, output in zip(self.requests, self.expected, strict=True):
            if not is_whole(output):
                self.problems.append(f"{one.kind} fails without a fault: {output.bits()[:300]}")

    def rounds(self, kinds: list[str], per_round: int, label: str = "") -> None:
        """Rounds with some of the faults each, until all have come, or too much is wrong."""
        left = list(kinds)
        while left and len(self.problems) < 20:
            now, left = left[:per_round], left[per_round:]
            before = self.counts["faults"]
            asyncio.run(self.round(now))
            missed = len(now) - (self.counts["faults"] - before)
            # The round was over before they came.
            left += now[len(now) - missed :] if missed else []
            print(f"{label}{self.counts['faults']} faults, {self.counts['streams']} streams, "
                  f"{self.counts['wrong']} wrong", file=sys.stderr, flush=True)  # fmt: skip

    async def round(self, kinds: list[str]) -> None:
        """All streams once, with one fault of each of `kinds` while they run."""
        seen = asyncio.Event()
        reading = asyncio.create_task(self.streams(seen))
        # Into prefill, early or late decode, or into the time of a restart.
        await seen.wait()
        for kind in kinds:
            await asyncio.sleep(self.noise.choice([0.0, 0.02, 0.1, 0.4]))
            if not reading.done():
                await self._strike(kind)
        for place, (one, actual) in enumerate(zip(self.requests, await reading, strict=True)):
            self.counts["streams"] += 1
            self.counts[f"streams: {one.kind}"] += 1
            if not self.is_right(actual, place):
                expected = self.expected[place]
                self.counts["wrong"] += 1
                self.problems.append(
                    f"{one.kind} after {kinds}: {actual.bits()[:400]} instead of {expected.bits()[:400]}"
                )

    def is_right(self, result: Told, place: int) -> bool:
        """Whether a stream is that of the undisturbed run."""
        return same(result, self.expected[place])

    async def _strike(self, kind: str) -> None:
        engine = await self._engine()
        struck = engine
        if engine is not None and kind.startswith("rank-"):
            ranks = ranks_of(engine)
            struck = self.noise.choice(ranks) if ranks else None
        if engine is None or struck is None:
            return
        began = time.monotonic()
        self.counts["faults"] += 1
        self.counts[f"faults: {kind}"] += 1
        if kind != "memory":
            try:
                struck.send_signal(SIGNALS[kind.removeprefix("rank-")])
            except psutil.NoSuchProcess:  # it is on its way out, after the fault before
                return
        elif not await self._starve(engine):
            return
        async with httpx.AsyncClient(timeout=10) as client:
            red = False
            while not (red and await self._is_ready(client)):
                if not red and not is_live(engine):
                    red = True
                    self.noticed.setdefault(kind, []).append(time.monotonic() - began)
                if time.monotonic() - began > STREAM_S:
                    self.problems.append(f"not ready {STREAM_S:.0f} s after {kind}")
                    return
                await asyncio.sleep(0.02)
        self.recoveries.append(time.monotonic() - began)

    async def _is_ready(self, client: httpx.AsyncClient) -> bool:
        try:
            return (await client.get(f"{self.served.url}/health/ready")).status_code == 200
        except httpx.TransportError as error:
            self.counts[f"probes without an answer: {type(error).__name__}"] += 1
            return False

    async def _starve(self, engine: psutil.Process) -> bool:
        """No more memory than it has, and somebody who wants more. Returns whether it died."""
        resource.prlimit(engine.pid, resource.RLIMIT_AS, (engine.memory_info().vms, resource.RLIM_INFINITY))
        async with httpx.AsyncClient(timeout=STREAM_S) as client:
            reply = await client.post(f"{self.served.url}/v1/completions", json=HUNGRY)
        self.counts[f"memory: the hungry request got {reply.status_code}"] += 1
        if not is_live(engine):
            return True
        resource.prlimit(engine.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return False

    async def _engine(self) -> psutil.Process | None:
        """The engine's process, as soon as there is one."""
        for _ in range(3000):
            try:
                return self.served.engine()
            except (StopIteration, psutil.NoSuchProcess):
                await asyncio.sleep(0.01)
        self.problems.append("no engine for 30 s")
        return None

    async def streams(self, seen: asyncio.Event | None = None) -> list[Told]:
        limits = httpx.Limits(max_connections=None)
        output = (lambda: None) if seen is None else seen.set
        async with httpx.AsyncClient(timeout=STREAM_S, limits=limits) as client:
            return await asyncio.gather(*(read(client, self.served.url, one, output) for one in self.requests))

    def settle(self) -> None:
        """Nothing is left: no request, no block, no process but the server's own."""
        end = time.monotonic() + 60
        names = ("headrace:num_requests_running", "headrace:num_requests_waiting", "headrace:kv_cache_usage_perc")
        while any(gauge(self.served.url, name) for name in names):
            if time.monotonic() > end:
                self.problems.append(f"gauges: {[gauge(self.served.url, name) for name in names]}")
                break
            time.sleep(0.05)
        # The last fault may have come when all streams were over: then the new engine is on its way.
        while (num_engines := self.served.num_engines()) != 1 and time.monotonic() < end:
            time.sleep(0.05)
        if num_engines != 1:
            self.problems.append(f"{num_engines} engines are left")

    def report(self, **more: Any) -> dict[str, Any]:
        """What was done, and what was wrong."""
        times = sorted(self.recoveries)
        result: dict[str, Any] = {"campaign": "C-5 live faults", "platform": platform.platform()} | more
        result["counts"] = dict(sorted(self.counts.items()))
        result["restarts"] = int(gauge(self.served.url, "headrace:engine_restarts_total"))
        if times:
            result["recovery_s"] = {"median": round(times[len(times) // 2], 2), "most": round(times[-1], 2)}
        result["noticed_s"] = {kind: round(max(seconds), 2) for kind, seconds in sorted(self.noticed.items())}
        result["problems"] = self.problems
        return result


def ranks_of(engine: psutil.Process) -> list[psutil.Process]:
    """The processes of an engine's other ranks."""
    result = []
    try:
        for child in engine.children():
            if "headrace.engine.rank" in child.cmdline():
                result.append(child)
    except psutil.NoSuchProcess:
        pass
    return result


def is_live(process: psutil.Process) -> bool:
    """Whether it is the process that it was, and no zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def run(
    num_faults: int,
    seed: int,
    num_streams: int = 32,
    kinds: tuple[str, ...] = KINDS,
    watchdog: float = 10.0,
    max_tokens: int = 96,
    per_round: int = 1,
    arguments: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The whole campaign. Returns its report."""
    began = time.monotonic()
    options = ("--watchdog-timeout", str(watchdog), "--max-restarts", "1000000", "--uvicorn-log-level", "critical")
    with serve("--num-gpu-blocks-override", "1024", *options, *arguments) as served:
        campaign = Campaign(served, num_streams, seed, max_tokens)
        asyncio.run(campaign.undisturbed())
        left = [kinds[turn % len(kinds)] for turn in range(num_faults)]
        campaign.noise.shuffle(left)
        campaign.rounds(left, per_round)
        campaign.settle()
        minutes = round((time.monotonic() - began) / 60, 2)
        known = {"seed": seed, "streams_at_once": num_streams, "watchdog_s": watchdog, "arguments": list(arguments)}
        return campaign.report(minutes=minutes, **known)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--watchdog", type=float, default=10.0)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--per-round", type=int, default=1, help="faults while the same streams run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("arguments", nargs="*", help="further arguments of headrace serve, after --")
    options = parser.parse_args()
    kinds = tuple(options.kinds.split(","))
    report = run(
        options.faults,
        options.seed,
        options.streams,
        kinds,
        options.watchdog,
        options.max_tokens,
        options.per_round,
        tuple(options.arguments),
    )
    return concluded(report, options.out)


def concluded(report: dict[str, Any], out: Path | None) -> int:
    """Print a report, write it to `out`, and return the exit status: 1 if it has problems."""
    text = json.dumps(report, indent=1)
    print(text)
    if out is not None:
        out.write_text(text + "\n")
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
