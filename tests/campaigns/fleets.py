"""The campaign of a fleet (C-5-fleet): replicas are killed, stopped and replaced while streams of every kind run.

`python -m tests.campaigns.fleets --kills 50 --stops 20 --seed 1 --out FILE` starts `headrace serve` with three
replicas, lets 32 streams of C-5's kinds and beam searches run undisturbed, all with speculation, and then again and
again with a replica killed (SIGKILL) or stopped (SIGSTOP; the watchdog has to find out) at a random moment. Every
stream must end with the text, token ids and log-probabilities of the undisturbed run, to the bit, and `/health/ready`
must stay green while a replica serves. `--isas scalar,avx2,avx512` gives each replica an instruction set of its own.

`--updates N` replaces the engines N times while streams run, in turn by ones that compute other bits and the same ones.
Then every stream must be that of the one or of the other engines, as a whole.

What it counted it prints as JSON, with the pause of the streams whose engine was killed: between their last event
before and their first one after. The exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.campaigns.faults import SIGNALS, STREAM_S, Campaign, concluded, is_live
from tests.campaigns.streams import Asked, Told, asked, is_whole, read, same
from tests.support.serving import Served, gauge, serve

NUM_REPLICAS = 3
BEAMS_EVERY = 8
"""Of so many streams one is a beam search."""
SPECULATION = '{"method": "ngram", "num_speculative_tokens": 4}'
OTHER = {"kv_cache_dtype": "int8"}
"""Settings by which engines compute other bits."""
PATIENCE_S = 0.1


def request_of(place: int, max_tokens: int) -> Asked:
    """The request of one of the streams."""
    one = asked(place, max_tokens)
    if place % BEAMS_EVERY != BEAMS_EVERY - 1:
        return one
    body = {
        "prompt": f"The {place} ships",
        "use_beam_search": True,
        "n": 2,
        "beam_width": 4,
        "max_tokens": max_tokens // 4,
    }
    return Asked("beams", "/v1/completions", body | {"temperature": 0, "stream": True, "return_token_ids": True})


class FleetCampaign(Campaign):
    """Rounds of streams against a server with several replicas, with faults and updates in them."""

    def __init__(self, served: Served, num_streams: int, seed: int, max_tokens: int) -> None:
        super().__init__(served, num_streams, seed, max_tokens)
        self.requests = [request_of(place, max_tokens) for place in range(num_streams)]
        self.others: list[Told] = []
        self.settings: dict[str, Any] = {}
        self.pauses: dict[str, list[float]] = defaultdict(list)
        self.strikes: list[tuple[str, float]] = []
        self.events: list[list[float]] = []
        self.num_rounds = 0

    def replicas(self) -> list[psutil.Process]:
        """The engines' processes that run."""
        return [each for each in self.served.engines() if is_live(each)]

    async def round(self, kinds: list[str]) -> None:
        self.num_rounds += 1
        self.strikes = []
        await super().round(kinds)
        async with httpx.AsyncClient(timeout=60) as client:
            for kind, when in self.strikes:
                for place, times in enumerate(self.events):
                    before, after = [t for t in times if t <= when], [t for t in times if t > when]
                    if before and after and await self._has_moved(client, place):
                        self.pauses[kind].append(after[0] - before[-1])

    async def _has_moved(self, client: httpx.AsyncClient, place: int) -> bool:
        """Whether the stream has waited for another engine."""
        reply = await client.get(f"{self.served.url}/v1/requests/{self._call_id(place)}/explain")
        data = reply.json().get("data", [])
        return any(part["name"] == "restarting" for each in data for part in each["parts"])

    def _call_id(self, place: int) -> str:
        return f"round-{self.num_rounds}-{place}"

    async def streams(self, seen: asyncio.Event | None = None) -> list[Told]:
        self.events = [[] for _ in self.requests]

        def note(place: int) -> None:
            self.events[place].append(time.monotonic())
            if seen is not None:
                seen.set()

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=STREAM_S, limits=limits) as client:
            return await asyncio.gather(
                *(
                    read(client, self.served.url, one, lambda place=place: note(place), self._call_id(place))  # type: ignore[misc]
                    for place, one in enumerate(self.requests)
                )
            )

    async def _strike(self, kind: str) -> None:
        if kind.startswith("update"):
            await self._update(kind)
            return
        replicas = self.replicas()
        if len(replicas) < 2:
            return
        victim = self.noise.choice(replicas)
        victim.send_signal(SIGNALS[kind])
        self.strikes.append((kind, time.monotonic()))
        self.counts["faults"] += 1
        self.counts[f"faults: {kind}"] += 1
        began = time.monotonic()
        async with httpx.AsyncClient(timeout=10) as client:
            # Until the replica is back, the others serve.
            while is_live(victim) or len(self.replicas()) < NUM_REPLICAS:
                num_before = len(self.replicas())
                if not await self._is_ready(client) and num_before > 1:
                    self.counts["probes that were red"] += 1
                if time.monotonic() - began > STREAM_S:
                    self.problems.append(f"{len(self.replicas())} replicas {STREAM_S:.0f} s after {kind}")
                    return
                await asyncio.sleep(0.05)
        self.recoveries.append(time.monotonic() - began)

    async def change(self, settings: dict[str, Any], patience: float = 0.0) -> None:
        """Replace the engines by ones with these settings."""
        async with httpx.AsyncClient(timeout=STREAM_S) as client:
            body = {"settings": settings, "patience": patience}
            reply = await client.post(f"{self.served.url}/fleet/update", json=body)
            if reply.status_code != 200:
                self.problems.append(f"an update: {reply.status_code} {reply.text[:300]}")
        self.settings = settings

    async def _update(self, kind: str) -> None:
        self.counts["faults"] += 1
        self.counts[f"faults: {kind}"] += 1
        began = time.monotonic()
        settings = self.settings
        if kind == "update to other bits":
            settings = {} if self.settings else OTHER
        updating = asyncio.create_task(self.change(settings, PATIENCE_S))
        async with httpx.AsyncClient(timeout=10) as client:
            while not updating.done():
                if not await self._is_ready(client):
                    self.counts["probes that were red"] += 1
                await asyncio.sleep(0.05)
        await updating
        self.recoveries.append(time.monotonic() - began)

    def is_right(self, actual: Told, place: int) -> bool:
        """Whether a stream is that of an undisturbed run, of the one or of the other engines, as a whole."""
        expected = [each[place] for each in (self.expected, self.others) if each]
        if self.others and actual.bits() == self.others[place].bits() != self.expected[place].bits():
            self.counts["streams of the other bits"] += 1
        return any(same(actual, each) for each in expected)

    def settle(self) -> None:
        """Nothing is left: no request, no block, no process but the server's own."""
        end = time.monotonic() + 60
        names = ("headrace:num_requests_running", "headrace:num_requests_waiting", "headrace:kv_cache_usage_perc")
        while any(gauge(self.served.url, name) for name in names) or len(self.replicas()) != NUM_REPLICAS:
            if time.monotonic() > end:
                values = [gauge(self.served.url, name) for name in names]
                self.problems.append(f"gauges {values}, {len(self.replicas())} replicas")
                return
            time.sleep(0.05)

    def report(self, **more: Any) -> dict[str, Any]:
        report = super().report(**more)
        report["streams_moved"] = httpx.get(f"{self.served.url}/fleet", timeout=10).json()["num_moved"]
        for kind, pauses in sorted(self.pauses.items()):
            times = sorted(pauses)
            report[f"pause_after_{kind}_s"] = {
                "streams": len(times), "p50": round(times[len(times) // 2], 3),
                "p90": round(times[len(times) * 9 // 10], 3), "most": round(times[-1], 3),
            }  # fmt: skip
        return report


def run(
    num_kills: int,
    num_stops: int,
    seed: int,
    num_streams: int = 32,
    watchdog: float = 10.0,
    max_tokens: int = 96,
    arguments: tuple[str, ...] = (),
    num_updates: int = 0,
    isas: str = "",
) -> dict[str, Any]:
    """The whole campaign. Returns its report."""
    began = time.monotonic()
    options = ["--data-parallel-size", str(NUM_REPLICAS), "--num-gpu-blocks-override", "1024"]
    options += ["--watchdog-timeout", str(watchdog), "--max-restarts", "1000000", "--uvicorn-log-level", "critical"]
    options += ["--speculative-config", SPECULATION]
    program = (sys.executable, "-m", "tests.campaigns.fleet_server", isas) if isas else ()
    with serve(*options, *arguments, program=program) as served:
        campaign = FleetCampaign(served, num_streams, seed, max_tokens)
        if num_updates:
            asyncio.run(campaign.change(OTHER))
            campaign.others = asyncio.run(campaign.streams())
            campaign.problems += [f"the other bits: {other.error}" for other in campaign.others if not is_whole(other)]
            asyncio.run(campaign.change({}))
        asyncio.run(campaign.undisturbed())
        updates = ["update to other bits", "update to the same bits"]
        left = ["kill"] * num_kills + ["stop"] * num_stops + [updates[at % 2] for at in range(num_updates)]
        campaign.noise.shuffle(left)
        while left and len(campaign.problems) < 20:
            before = campaign.counts["faults"]
            asyncio.run(campaign.round(left[:1]))
            # If the streams were over before it came, it comes again.
            left = left[campaign.counts["faults"] - before :]
            print(f"{campaign.counts['faults']} faults, {campaign.counts['streams']} streams, "
                  f"{campaign.counts['wrong']} wrong", file=sys.stderr, flush=True)  # fmt: skip
        campaign.settle()
        if campaign.counts["probes that were red"]:
            campaign.problems.append(f"{campaign.counts['probes that were red']} probes were red")
        minutes = round((time.monotonic() - began) / 60, 2)
        known = {"seed": seed, "streams_at_once": num_streams, "watchdog_s": watchdog, "arguments": list(arguments)}
        report = campaign.report(minutes=minutes, replicas=NUM_REPLICAS, isas=isas or "the machine's best", **known)
        return report | {"campaign": "C-5-fleet replicas that die and are replaced"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--stops", type=int, default=2)
    parser.add_argument("--updates", type=int, default=0)
    parser.add_argument("--isas", default="", help="instruction sets of the replicas, such as scalar,avx2,avx512")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--watchdog", type=float, default=10.0)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    parser.add_argument("arguments", nargs="*", help="further arguments of headrace serve, after --")
    options = parser.parse_args()
    report = run(
        options.kills,
        options.stops,
        options.seed,
        options.streams,
        options.watchdog,
        options.max_tokens,
        tuple(options.arguments),
        options.updates,
        options.isas,
    )
    return concluded(report, options.out)


if __name__ == "__main__":
    sys.exit(main())
