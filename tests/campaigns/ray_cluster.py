"""The campaign of a Ray cluster (C-5-ray): replicas, a node and the head are killed while streams of every kind run.

`python -m tests.campaigns.ray_cluster --kills 5 --seed 1 --out FILE` starts a Ray cluster with token authentication, of
three nodes at addresses of this host's loopback, and deploys an app.yaml with three engines by `headrace deploy`. It
lets streams of C-5's kinds run undisturbed, and then again and again while an engine's actor is killed (SIGKILL), then
while all processes of a node are, and last those of the head. Every stream must end with the text, token ids and
log-probabilities of the undisturbed run, to the bit. Before that, a cluster without tokens must be refused by `deploy`,
and clients with a wrong token, or none, by the cluster; and a flood must bring more engines. Needs the extra ray. What
it counted it prints as JSON; the exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from bench.record import commit
from tests.campaigns.faults import STREAM_S, Campaign, concluded, is_live
from tests.support.serving import Served, free_port, gauge

NUM_ENGINES = 3
HEAD = "127.0.1.1"
"""Ray takes 127.0.0.1 for the address of the machine."""
HEAD_PROGRAMS = ("/gcs_server", "/dashboard/dashboard.py", "/monitor.py", "ray.util.client.server")
START_S = 300.0
FLOOD_S = 60.0
SCALING_S = 240.0
MAX_HEADLESS_S = 90.0
"""How long the front is watched after the head is gone: longer than Ray lets nodes live without one by default."""
APP = """\
name: campaign
models:
  - model: {model}
    min_replicas: {engines}
    num_cpus: 1
    resources: {{engine: 1}}
    engine: {{num-threads: 1, num-gpu-blocks-override: 1024}}
front:
  host: 127.0.1.2
  port: {port}
  num_cpus: 0
  resources: {{front: 1}}
  server: {{uvicorn-log-level: warning, watchdog-timeout: 20}}
"""
SCALED = """\
name: campaign
models:
  - model: builtin
    max_replicas: {engines}
    target_queue_seconds: 0.5
    upscale_delay_seconds: 2
    downscale_delay_seconds: 10
    engine: {{num-threads: 1, num-gpu-blocks-override: 1024, max-num-seqs: 4}}
front: {{host: 127.0.1.1, port: {port}, num_cpus: 0, server: {{uvicorn-log-level: warning}}}}
"""
CALL = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "model": "builtin"}
CLIENT = "import ray; ray.init(address={address!r}, log_to_driver=False); print('connected to', len(ray.nodes()))"


class Cluster:
    """Nodes of Ray on this host, started by the commands of docs/howto-scale.md, each with an address of its own."""

    def __init__(self, folder: Path, mode: str = "token", reconnect_s: int = 0) -> None:
        self.port = free_port()
        self.address = f"{HEAD}:{self.port}"
        self.folder = folder
        self.raylets: dict[str, psutil.Process] = {}
        self.environment = os.environ | {
            "HOME": str(folder),
            "RAY_AUTH_MODE": mode,
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        if reconnect_s:
            self.environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(reconnect_s)
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            self.environment.pop(name, None)

    def run(self, *words: str, status: int | None = 0, **variables: str) -> str:
        """Run a command that is installed beside this Python. Returns what it printed."""
        command = [str(Path(sys.executable).parent / words[0]), *words[1:]]
        done = subprocess.run(
            command, env=self.environment | variables, capture_output=True, text=True, timeout=2 * START_S
        )
        text = done.stdout + done.stderr
        if status is not None and done.returncode != status:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{text[-3000:]}")
        return text

    def start(self, host: str, **resources: float) -> None:
        """Start a node at an address; the first is the head."""
        place = ["--address", self.address] if self.raylets else ["--head", "--port", str(self.port)]
        if not self.raylets:
            place += ["--include-dashboard=false", "--temp-dir", str(self.folder / "ray")]
        before = {process.pid for process in raylets()}
        size = ["--num-cpus", "4", "--object-store-memory", str(80 * 2**20)]
        self.run("ray", "start", *place, "--node-ip-address", host, *size, "--resources", json.dumps(resources),
                 "--disable-usage-stats")  # fmt: skip
        [self.raylets[host]] = [process for process in raylets() if process.pid not in before]

    def kill(self, host: str) -> int:
        """Kill all processes of a node at once, and of the head those that only it has. Returns how many there were."""
        raylet = self.raylets.pop(host)
        victims = [raylet]
        with contextlib.suppress(psutil.NoSuchProcess):
            victims += raylet.children(recursive=True)
        if host == HEAD:
            victims += [each for each in psutil.process_iter() if self._is_of_head(each)]
        for each in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        return len(victims)

    def _is_of_head(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            return str(self.folder / "ray") in words and any(name in words for name in HEAD_PROGRAMS)
        return False

    def actors(self, deployment: str) -> dict[str, list[psutil.Process]]:
        """The processes of a deployment's replicas, by the address of their node."""
        result: dict[str, list[psutil.Process]] = {}
        for host, raylet in self.raylets.items():
            with contextlib.suppress(psutil.Error):
                for child in raylet.children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if f"ServeReplica:campaign{deployment}" in " ".join(child.cmdline()) and is_live(child):
                            result.setdefault(host, []).append(child)
        return result

    def stop(self) -> None:
        for host in list(self.raylets):
            self.kill(host)
        for each in psutil.process_iter():
            if self._is_of_session(each):
                with contextlib.suppress(psutil.Error):
                    each.kill()

    def _is_of_session(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return process.pid != os.getpid() and str(self.folder / "ray") in " ".join(process.cmdline())
        return False


def raylets() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() == "raylet" and is_live(process):
                yield process


class RayCampaign(Campaign):
    """Rounds of streams against the front of a deployment in `cluster`."""

    def __init__(self, cluster: Cluster, url: str, num_streams: int, seed: int, max_tokens: int) -> None:
        super().__init__(Served(url, os.getpid()), num_streams, seed, max_tokens)
        self.cluster = cluster

    async def _strike(self, kind: str) -> None:
        began = time.monotonic()
        self.counts["open requests at the faults"] += int(gauge(self.served.url, "headrace:replica_requests"))
        if kind == "replica":
            engines = [each for group in self.cluster.actors("-builtin:engine").values() for each in group]
            self.noise.choice(engines).send_signal(signal.SIGKILL)
        else:
            host = {"node": "127.0.1.3", "head": HEAD}[kind]
            self.counts[f"engines on the {kind}"] = len(self.cluster.actors("-builtin:engine").get(host, []))
            self.counts[f"processes of the {kind}"] = self.cluster.kill(host)
        self.counts["faults"] += 1
        self.counts[f"faults: {kind}"] += 1
        if kind == "replica":
            await asyncio.sleep(0.5)
            await self.until_whole(began)

    async def until_whole(self, began: float) -> None:
        """Wait until Ray Serve has replaced what is lost, and the front uses it."""
        async with httpx.AsyncClient(timeout=30) as client:
            while (num := await self._num_up(client)) < NUM_ENGINES:
                if time.monotonic() - began > STREAM_S:
                    self.problems.append(f"{num} engines {STREAM_S:.0f} s after a fault")
                    return
                await asyncio.sleep(0.1)
        self.recoveries.append(time.monotonic() - began)

    async def _num_up(self, client: httpx.AsyncClient) -> int:
        if len([each for group in self.cluster.actors("-builtin:engine").values() for each in group]) < NUM_ENGINES:
            return 0
        lines = (await client.get(f"{self.served.url}/metrics")).text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("headrace:replica_up{")]
        return int(sum(values))


def refusals(folder: Path, campaign: Counter[str], problems: list[str]) -> None:
    """A cluster without tokens is refused by `deploy`."""
    folder.mkdir()
    cluster = Cluster(folder, "disabled")
    (folder / "app.yaml").write_text(APP.format(model="builtin", engines=1, port=free_port()))
    try:
        cluster.start(HEAD)
        text = cluster.run("headrace", "deploy", str(folder / "app.yaml"), "--address", cluster.address, status=1)
        campaign["open cluster refused"] = int("takes commands without a token" in text and "get-auth-token" in text)
    finally:
        cluster.stop()
    if not campaign["open cluster refused"]:
        problems.append(f"deploy to an open cluster: {text[-500:]}")


def scaling(folder: Path, problems: list[str]) -> dict[str, Any]:
    """A flood of calls of a minute against one engine of four sequences: others come, all calls are answered, and the
    others go when it is over. Last, the deployment is removed."""
    folder.mkdir()
    cluster, port = Cluster(folder), free_port()
    app = folder / "app.yaml"
    app.write_text(SCALED.format(engines=NUM_ENGINES, port=port))
    numbers: list[tuple[int, int]] = []

    def num_engines() -> int:
        return sum(map(len, cluster.actors("").values())) - 1

    async def work() -> Counter[int]:
        calls = asyncio.create_task(flood(f"http://127.0.1.1:{port}", FLOOD_S))
        began = time.monotonic()
        while time.monotonic() - began < SCALING_S and not (calls.done() and num_engines() == 1):
            if not numbers or numbers[-1][1] != num_engines():
                numbers.append((round(time.monotonic() - began), num_engines()))
            await asyncio.sleep(0.5)
        numbers.append((round(time.monotonic() - began), num_engines()))
        return await calls

    try:
        cluster.run("ray", "get-auth-token", "--generate")
        cluster.start(HEAD)
        cluster.run("headrace", "deploy", str(app), "--address", cluster.address)
        statuses = asyncio.run(work())
        if not {number for _, number in numbers} >= {1, NUM_ENGINES} or num_engines() != 1 or set(statuses) != {200}:
            problems.append(f"scaling: engines {numbers}, at last {num_engines()}; replies {statuses}")
        cluster.run("headrace", "deploy", str(app), "--address", cluster.address, "--delete")
        end = time.monotonic() + 60
        while any(cluster.actors("").values()) and time.monotonic() < end:
            time.sleep(0.5)
        if left := cluster.actors(""):
            problems.append(f"left of a deployment that was removed: {left}")
    finally:
        cluster.stop()
    return {"engines_by_second": numbers, "replies": dict(statuses)}


async def flood(url: str, seconds: float) -> Counter[int]:
    """Calls of 48 clients for so many seconds. Returns how many replies had which status."""
    statuses: Counter[int] = Counter()
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(timeout=STREAM_S, limits=httpx.Limits(max_connections=None)) as client:

        async def call(seed: int) -> None:
            while time.monotonic() < end:
                reply = await client.post(f"{url}/v1/completions", json=CALL | {"seed": seed})
                statuses[reply.status_code] += 1

        await asyncio.gather(*map(call, range(48)))
    return statuses


def strangers(cluster: Cluster, counts: Counter[str], problems: list[str]) -> None:
    """Clients with the right token, a wrong one and none. The first is the control."""
    cases = {
        "right token": {},
        "wrong token": {"RAY_AUTH_TOKEN": secrets.token_hex(16)},
        "no token": {"RAY_AUTH_MODE": "disabled"},
    }
    for name, variables in cases.items():
        code = CLIENT.format(address=cluster.address)
        text = cluster.run("python", "-c", code, status=None, **variables)
        counts[f"{name} let in"] = int("connected to" in text)
        if ("connected to" in text) is not (name == "right token"):
            problems.append(f"{name}: {text[-500:]}")
    app = str(cluster.folder / "app.yaml")
    text = cluster.run("headrace", "deploy", app, "--address", cluster.address, status=1,
                       RAY_AUTH_TOKEN=secrets.token_hex(16))  # fmt: skip
    counts["deploy with a wrong token refused"] = 1


def run(
    num_kills: int, seed: int, num_streams: int, max_tokens: int, reconnect_s: int = 600, model: str = "builtin"
) -> dict[str, Any]:
    """The whole campaign. Returns its report."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hr-", ignore_cleanup_errors=True) as name:
        counts: Counter[str] = Counter()
        problems: list[str] = []
        refusals(Path(name) / "open", counts, problems)
        scaled = scaling(Path(name) / "scaled", problems)
        cluster = Cluster(Path(name), reconnect_s=reconnect_s)
        port = free_port()
        app = Path(name) / "app.yaml"
        app.write_text(APP.format(model=model, engines=NUM_ENGINES, port=port))
        try:
            cluster.run("ray", "get-auth-token", "--generate")
            # The front's place is one that is not killed: its clients are connected to it.
            cluster.start(HEAD, engine=1)
            cluster.start("127.0.1.2", engine=4, front=1)
            cluster.start("127.0.1.3", engine=1)
            strangers(cluster, counts, problems)
            start = time.monotonic()
            print(cluster.run("headrace", "deploy", str(app), "--address", cluster.address), file=sys.stderr)
            deploy_s = time.monotonic() - start
            report = rounds(cluster, f"http://127.0.1.2:{port}", num_kills, seed, num_streams, max_tokens)
        finally:
            cluster.stop()
    report["counts"] = dict(sorted(counts.items())) | report["counts"]
    report["problems"] += problems
    report |= {
        "scaling": scaled,
        "deploy_s": round(deploy_s, 1),
        "minutes": round((time.monotonic() - began) / 60, 2),
        "seed": seed,
    }
    return report | {"commit": commit(), "streams_at_once": num_streams}


def rounds(cluster: Cluster, url: str, num_kills: int, seed: int, num_streams: int, max_tokens: int) -> dict[str, Any]:
    campaign = RayCampaign(cluster, url, num_streams, seed, max_tokens)
    asyncio.run(campaign.until_whole(time.monotonic()))
    campaign.recoveries.clear()
    asyncio.run(campaign.undisturbed())
    for kind in ["replica"] * num_kills + ["node"]:
        before = campaign.counts["faults"]
        while campaign.counts["faults"] == before and len(campaign.problems) < 20:
            asyncio.run(campaign.round([kind]))
        if kind == "node":
            asyncio.run(campaign.until_whole(time.monotonic()))
        show(campaign, kind)
    asyncio.run(campaign.round(["head"]))
    lost = time.monotonic()
    show(campaign, "head")
    # New calls are served, too, until the other nodes end for want of a head.
    asyncio.run(campaign.round([]))
    show(campaign, "after the head")
    served_s = 0.0
    with contextlib.suppress(httpx.TransportError):
        while served_s < MAX_HEADLESS_S and httpx.get(f"{url}/health/ready", timeout=30).status_code == 200:
            served_s = time.monotonic() - lost
            time.sleep(0.5)
    if served_s < MAX_HEADLESS_S:
        campaign.problems.append(f"served for {served_s:.0f} s without a head, not for {MAX_HEADLESS_S:.0f} s")
    times = sorted(campaign.recoveries)
    return {
        "campaign": "C-5-ray replicas, a node and the head of a Ray cluster that are killed",
        "platform": platform.platform(),
        "engines": NUM_ENGINES,
        "counts": dict(sorted(campaign.counts.items())),
        "recovery_s": {"median": round(times[len(times) // 2], 2), "most": round(times[-1], 2)} if times else {},
        "served_without_a_head_s": round(served_s, 1),
        "problems": campaign.problems,
    }


def show(campaign: RayCampaign, kind: str) -> None:
    counts = campaign.counts
    print(f"{kind}: {counts['faults']} faults, {counts['streams']} streams, {counts['wrong']} wrong",
          file=sys.stderr, flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--reconnect", type=int, default=600, help="seconds that nodes live without a head; 0: default")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = run(options.kills, options.seed, options.streams, options.max_tokens, options.reconnect)
    return concluded(report, options.out)


if __name__ == "__main__":
    sys.exit(main())
