"""C-7 overload, C-8 soak, C-9 drain and restart: the server over the oracle engine, as an operator meets it.

Sizes are seconds or cycles. The clients are those of the load campaign (C-4), with its ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import signal
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.campaigns import load
from tests.campaigns.faults import is_live
from tests.campaigns.oracle_server import Oracle, oracle

SETTLE_S = 10.0
MAX_REJECT_S = 0.05
MAX_PROBE_S = 0.5
MIN_GOODPUT = 0.9
MAX_OBJECTS = 0.5
LOAD = 0.85
STEP_S = 0.01
PEAK = 300
"""The soak's load as a share of the peak, which with its idle moments comes to 0.8; how long a step takes then; and
the requests that the peak is measured over."""
MIN_POINTS = 7
"""Of the soak: two of them differ by a few hundred objects without a leak."""
WARM_UP_S = 40.0
"""The server remembers half a minute of starts."""


def percentile(values: list[float], share: float) -> float:
    """Nearest rank; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


# C-7


async def offer(
    port: int, ledger: load.Ledger, rate: float, seconds: float, seed: int, known: list[load.Asked]
) -> list[float]:
    """`known` over and over at a steady rate, whatever becomes of them, under new numbers. Returns the seconds of those
    that were turned away."""
    times: list[float] = []
    running: set[asyncio.Task[None]] = set()
    begin = time.monotonic()

    async def one(number: int) -> None:
        requests = known[number % len(known)]._replace(number=number)
        start = time.monotonic()
        if await load.work(port, ledger, requests, seed) == "turned away":
            times.append(time.monotonic() - start)

    for index in itertools.count():
        due = begin + index / rate
        if due > begin + seconds:
            break
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        task = asyncio.create_task(one(10**6 + index))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    return times


async def probing(served: Oracle, seconds: float) -> list[float]:
    """How long the probes take meanwhile."""
    times = []
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(timeout=30, verify=False) as client:
        while time.monotonic() < end:
            start = time.monotonic()
            reply = await client.get(f"{served.url}/health/live")
            times.append(time.monotonic() - start if reply.status_code == 200 else 30.0)
            await asyncio.sleep(0.1)
    return times


async def lateness(seconds: float) -> list[float]:
    """How much later than it asked for this process gets to run meanwhile: that is no time of the server's."""
    times = []
    end = time.monotonic() + seconds
    while (start := time.monotonic()) < end:
        await asyncio.sleep(0.01)
        times.append(time.monotonic() - start - 0.01)
    return times


def overload(seconds: float, seed: int) -> dict[str, Any]:
    """Ten times what the server can do (8 at once, steps of 20 ms), with a queue of 64."""
    ledger = load.Ledger()
    with oracle(delay=0.02, max_queued=64, max_num_seqs=8) as served:
        # The peak: always more clients than can run, each with the next request when one is answered.
        begin = time.monotonic()
        asyncio.run(load.drive(served.port, ledger, range(150), seed, 24, sort="plain"))
        peak = ledger.outcomes["answered"] / (time.monotonic() - begin)
        before = ledger.outcomes["answered"]
        # To work out what must be answered takes longer than to be refused.
        known = [load.asked(number, seed, "plain") for number in range(500)]

        async def all_at_once() -> tuple[list[float], list[float], list[float]]:
            offered = offer(served.port, ledger, 10 * peak, seconds, seed, known)
            return await asyncio.gather(offered, probing(served, seconds), lateness(seconds))

        # A pause of the clients' collector would let all of them come at once: a burst that nobody offered.
        gc.collect()
        gc.freeze()
        begin = time.monotonic()
        rejected, probes, late = asyncio.run(all_at_once())
        goodput = (ledger.outcomes["answered"] - before) / (time.monotonic() - begin) / peak
        gc.unfreeze()
        problems = ledger.problems + served.unsettled(SETTLE_S)
        problems += ledger.balance({}, served.metrics())
    reject, probe, late_p99 = (percentile(times, 0.99) for times in (rejected, probes, late))
    if not rejected:
        problems.append("nobody was turned away")
    if reject > MAX_REJECT_S + late_p99 or probe > MAX_PROBE_S + late_p99 or goodput < MIN_GOODPUT:
        output = (
            f"p99 of refusals {reject:.3f} s, of probes {probe:.3f} s, of the clients' own lateness {late_p99:.3f} s"
        )
        problems.append(f"{output}; goodput {goodput:.2f} of the peak")
    return {
        "seconds": seconds,
        "requests": sum(ledger.sorts.values()),
        "outcomes": dict(sorted(ledger.outcomes.items())),
        "peak_a_second": round(peak, 1),
        "goodput_share": round(goodput, 3),
        "reject_p99_s": round(reject, 4),
        "probe_p99_s": round(probe, 4),
        "own_lateness_p99_s": round(late_p99, 4),
        "violations": len(problems),
        "examples": problems[:5],
    }


# C-8


def memory(served: Oracle) -> int:
    """Bytes of anonymous memory of the server and its children, swapped ones too."""
    total = 0
    for process in (psutil.Process(served.process.pid), *served.children()):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith(("RssAnon:", "VmSwap:")):
                    total += int(line.split()[1]) * 1024
    return total


def held(served: Oracle) -> dict[str, int]:
    """Open files and threads of the server and the engine."""
    processes = [psutil.Process(served.process.pid), *served.children()]
    return {"files": sum(p.num_fds() for p in processes), "threads": sum(p.num_threads() for p in processes)}


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares: the growth of the second number with the first."""
    if len(points) < 3:
        return 0.0
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope


async def peak(port: int, ledger: load.Ledger, seed: int) -> float:
    """Requests a second, when there are always more than can run: the last ones, which run alone, do not count."""
    begin = time.monotonic()
    driving = asyncio.create_task(load.drive(port, ledger, range(PEAK + 60), seed, 24))
    while ledger.outcomes.total() < PEAK and not driving.done():
        await asyncio.sleep(0.01)
    result = ledger.outcomes.total() / (time.monotonic() - begin)
    await driving
    return result


def soak(size: tuple[float, float, float], seed: int, leak: int = 0) -> dict[str, Any]:
    """`size` is (seconds, bytes a request that are too many, MiB an hour that are too many). The mix of C-4 at 80 % of
    what the server can do; whenever a round of it is over and nothing runs, anonymous memory of all processes and the
    server's number of objects, which tells of a small leak long before the memory does. Growth is judged over the
    second half. A slow machine takes longer, since few points show their own noise."""
    seconds, most, most_an_hour = size
    ledger = load.Ledger()
    points: list[tuple[float, float, float, float]] = []
    size_of_round = 1000 if seconds > 600 else 200
    with oracle(delay=STEP_S, max_num_seqs=8, leak=leak) as served:
        rate = asyncio.run(peak(served.port, ledger, seed))
        problems = served.unsettled()
        idle = held(served)
        begin, first = time.monotonic(), PEAK + 60
        while (now := time.monotonic() - begin) < WARM_UP_S + seconds or len(points) < MIN_POINTS:
            numbers = range(first, first + size_of_round)
            asyncio.run(load.pace(served.port, ledger, numbers, seed, LOAD * rate))
            problems += served.unsettled()
            first = numbers.stop
            if now > WARM_UP_S:
                count = float(served.get("/objects").text)
                points.append((float(first), time.monotonic() - begin, float(memory(served)), count))
        share = (first - PEAK - 60) / (time.monotonic() - begin) / rate
        problems += ledger.problems + ledger.balance({}, served.metrics())
        left = held(served)
    half = points[len(points) // 2 :] if len(points) > 9 else points
    growth = slope([(number, duration) for number, _, duration, _ in half])
    an_hour = slope([(at, duration) for _, at, duration, _ in half]) * 3600 / 2**20
    more = slope([(number, count) for number, _, _, count in half])
    if left["threads"] > idle["threads"] + 2 or left["files"] > idle["files"] + 8:
        problems.append(f"held at idle: {idle}, and at the end: {left}")
    if growth > most or an_hour > most_an_hour:
        problems.insert(0, f"memory grows by {growth:.0f} bytes a request, {an_hour:.2f} MiB an hour")
    if more > MAX_OBJECTS:
        problems.insert(0, f"{more:.2f} objects are left of each request")
    return {
        "seconds": seconds,
        "requests": first,
        "peak_a_second": round(rate, 1),
        "share_of_the_peak": round(share, 2),
        "bytes_a_request": round(growth, 1),
        "mib_an_hour": round(an_hour, 3),
        "objects_a_request": round(more, 3),
        "anonymous_mib": round(points[-1][2] / 2**20, 1) if points else 0,
        "anonymous_kib_at": {int(number): round(duration / 2**10) for number, _, duration, _ in points},
        "outcomes": dict(sorted(ledger.outcomes.items())),
        "violations": len(problems),
        "examples": problems[:5],
    }


# C-9


def drain(num_cycles: int, seed: int) -> dict[str, Any]:
    """Start, load, and an end: SIGTERM, after which every accepted stream comes to its end, or SIGKILL of the server,
    after which its children are gone within five seconds and its port is free at once."""
    problems: list[str] = []
    answered = 0
    for cycle in range(num_cycles):
        ledger = load.Ledger()
        polite = cycle % 2 == 0
        with oracle(delay=0.005) as served:
            children = served.children()
            asyncio.run(_until_signal(served, ledger, seed + cycle, signal.SIGTERM if polite else signal.SIGKILL))
            status = served.process.wait(timeout=60)
            if polite:
                # Refused connections are no accepted requests.
                problems += [each for each in ledger.problems if "ConnectionRefused" not in each]
                answered += ledger.outcomes["answered"]
                if status:
                    problems.append(f"cycle {cycle}: exit status {status}")
            end = time.monotonic() + 5
            while (left := [process for process in children if is_live(process)]) and time.monotonic() < end:
                time.sleep(0.02)
            problems += [f"cycle {cycle}: {process} is left" for process in left]
            with socket.socket() as again:
                again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    again.bind(("127.0.0.1", served.port))
                except OSError as error:
                    problems.append(f"cycle {cycle}: the port is not free: {error}")
    return {
        "cycles": num_cycles,
        "sigterm": (num_cycles + 1) // 2,
        "sigkill": num_cycles // 2,
        "answers_after_sigterm": answered,
        "violations": len(problems),
        "examples": problems[:5],
    }


async def _until_signal(served: Oracle, ledger: load.Ledger, seed: int, name: signal.Signals) -> None:
    """32 streams, and the signal when all of them have begun."""
    working = [
        asyncio.create_task(load.work(served.port, ledger, load.asked(number, seed, "slow"), seed))
        for number in range(32)
    ]
    end = time.monotonic() + 60
    async with httpx.AsyncClient(timeout=20, verify=False) as client:
        while (await client.get(f"{served.url}/load")).json()["server_load"] < 32 and time.monotonic() < end:
            await asyncio.sleep(0.02)
    served.process.send_signal(name)
    await asyncio.gather(*working)
