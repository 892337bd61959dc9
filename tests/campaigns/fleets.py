"""The campaign of a fleet (C-5-fleet): replicas are killed and stopped while streams of every kind run.

`python -m tests.campaigns.fleets --kills 50 --stops 20 --seed 1 --out FILE` starts `headrace serve` with three
replicas, lets 32 streams of C-5's kinds run undisturbed, and then again and again with a replica killed (SIGKILL) or
stopped (SIGSTOP; the watchdog has to find out) at a random moment. Every stream must end with the text, token ids and
log-probabilities of the undisturbed run, to the bit, and `/health/ready` must stay green while a replica serves. What
it counted it prints as JSON; the exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.campaigns.faults import SIGNALS, STREAM_S, Campaign, is_live
from tests.support.serving import gauge, serve

NUM_REPLICAS = 3


class FleetCampaign(Campaign):
    """Rounds of streams against a server with several replicas, with faults in some of them."""

    def replicas(self) -> list[psutil.Process]:
        """The engines' processes that run."""
        return [each for each in self.served.engines() if is_live(each)]

    async def _strike(self, kind: str) -> None:
        replicas = self.replicas()
        if len(replicas) < 2:
            return
        victim = self.noise.choice(replicas)
        victim.send_signal(SIGNALS[kind])
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


def run(
    num_kills: int,
    num_stops: int,
    seed: int,
    num_streams: int = 32,
    watchdog: float = 10.0,
    max_tokens: int = 96,
    arguments: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The whole campaign. Returns its report."""
    began = time.monotonic()
    options = ["--data-parallel-size", str(NUM_REPLICAS), "--num-gpu-blocks-override", "1024"]
    options += ["--watchdog-timeout", str(watchdog), "--max-restarts", "1000000", "--uvicorn-log-level", "critical"]
    with serve(*options, *arguments) as served:
        campaign = FleetCampaign(served, num_streams, seed, max_tokens)
        asyncio.run(campaign.undisturbed())
        left = ["kill"] * num_kills + ["stop"] * num_stops
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
        report = campaign.report(minutes=minutes, replicas=NUM_REPLICAS, **known)
        return report | {"campaign": "C-5-fleet replicas that die"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--stops", type=int, default=2)
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
    )
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
