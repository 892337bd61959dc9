"""The campaign of ranks on several hosts (C-10-hosts): their network is cut, slow and lossy, and their hosts die.

`python -m tests.campaigns.hosts --faults 100 --seed 1 --out bench/results/hosts-faults.json` needs root. It makes two
network namespaces, in which the server with rank 0 and `headrace rank` run as on two hosts, and runs the streams of C-5
against the server. Faults:

    cut      the link is down (`ip link set down` of a veth) until the loss is noticed
    blip     the same for a part of the timeout
    silence  no packet passes, both ways or one way, until that is noticed: a relay between TUN devices loses them
    delay, loss, double  of some packets for a while, by the relay
    kill, stop  of the rank's process (SIGKILL, SIGSTOP)
    host-kill   of `headrace rank`, which is started again

Every stream must end with the bits of the undisturbed run, by one process. A death must be noticed within 1 s, silence
within the timeout and 5 s; 30 s after the end of the fault the server must be ready again. It prints its counts as
JSON; the exit status is 1 if anything was wrong. The namespaces have no names: they end with the processes in them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from bench.tied import tied
from tests.campaigns.faults import Campaign, concluded, is_live
from tests.campaigns.ranks import LONGEST_S, NOTICED_S, SILENCE_S
from tests.campaigns.relay import Relay
from tests.docs.pages import ROOT, blocks, commands
from tests.support.serving import Served, serve
from tests.support.shallow import shallow

KINDS_OF_VETH = ("cut", "blip", "cut", "kill", "host-kill", "cut", "stop", "blip")
KINDS_OF_TUN = ("silence", "delay", "loss", "double", "silence", "loss", "delay")
DEATHS = ("kill", "host-kill")
PORT = 7070
ADDRESSES = {"veth": ("10.77.0.1", "10.77.0.2"), "tun": ("10.78.0.1", "10.78.0.2")}
PAGE = "howto-scale.md"
MODEL = (shallow(2), "--served-model-name", "builtin")


class Links(NamedTuple):
    """The interfaces between the two hosts, of the same name on both, and what carries the packets of the second."""

    holder: int
    relay: Relay

    def inside(self, *words: str) -> list[str]:
        """A command on the other host."""
        return ["nsenter", "--target", str(self.holder), "--net", "--", *words]


def run(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def links() -> Iterator[Links]:
    """The other host, and the links to it."""
    holder = subprocess.Popen(tied(["unshare", "--net", "--kill-child", "cat"]), stdin=subprocess.PIPE)
    try:
        ours = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{holder.pid}/ns/net") == ours:
            time.sleep(0.01)
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "veth", "type", "veth", "peer", "name", "veth", "netns", str(holder.pid))
        relay = Relay(holder.pid, "tun")
        result = Links(holder.pid, relay)
        try:
            run(*result.inside("ip", "link", "set", "lo", "up"))
            for name, (here, there) in ADDRESSES.items():
                more = ["peer", there] if name == "tun" else []
                run("ip", "address", "add", here + ("" if more else "/24"), *more, "dev", name)
                more = ["peer", here] if name == "tun" else []
                run(*result.inside("ip", "address", "add", there + ("" if more else "/24"), *more, "dev", name))
                run("ip", "link", "set", name, "up")
                run(*result.inside("ip", "link", "set", name, "up"))
            yield result
        finally:
            relay.close()
    finally:
        assert holder.stdin is not None
        holder.stdin.close()
        holder.wait(10)


def certificates(folder: Path) -> None:
    """The files of the page, with the addresses of rank 0."""
    names = ",".join(f"IP:{here}" for here, _ in ADDRESSES.values())
    for block in blocks(PAGE, (ROOT / "docs" / PAGE).read_text("utf-8")):
        for words in commands(block.text) if block.language == "bash" else ():
            if words[0] == "openssl":
                changed = [word.replace("DNS:localhost,IP:127.0.0.1", names) for word in words]
                subprocess.run(changed, cwd=folder, check=True, capture_output=True)
    (folder / "fleet.secret").chmod(0o600)


class HostCampaign(Campaign):
    """Rounds of streams against a server whose rank 1 is on another host."""

    def __init__(
        self, served: Served, num_streams: int, seed: int, max_tokens: int, network: Links, name: str, timeout: float,
        folder: Path,
    ) -> None:  # fmt: skip
        super().__init__(served, num_streams, seed, max_tokens)
        self._links, self._name, self._timeout, self._folder = network, name, timeout, folder
        self.rank = subprocess.Popen(tied(["true"]))
        self.num_losses = 0
        self._is_far = False

    async def _strike(self, kind: str) -> None:
        engine = await self._engine()
        if engine is None or not await self._until_ready(LONGEST_S):
            self.problems.append(f"not ready before {kind}")
            return
        self.counts["faults"] += 1
        self.counts[f"faults: {kind}"] += 1
        began = time.monotonic()
        await getattr(self, "_" + kind.replace("-", "_"))(engine)
        ended = time.monotonic()
        if not await self._until_ready(LONGEST_S):
            self.problems.append(f"not ready {LONGEST_S:.0f} s after {kind}")
        if not is_live(engine):
            self.num_losses += 1
            self.recoveries.append(time.monotonic() - ended)
            self.counts[f"groups lost: {kind}"] += 1
        self.noticed.setdefault(f"whole {kind}", []).append(time.monotonic() - began)

    async def _until_ready(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        async with httpx.AsyncClient(timeout=10) as client:
            while not await self._is_ready(client):
                if time.monotonic() > end:
                    return False
                await asyncio.sleep(0.05)
        return True

    async def _notice(self, kind: str, engine: psutil.Process) -> None:
        """Wait until the loss of the group is noticed, which must happen."""
        began = time.monotonic()
        while is_live(engine) and time.monotonic() - began < self._timeout + SILENCE_S + LONGEST_S:
            await asyncio.sleep(0.02)
        took = time.monotonic() - began
        self.noticed.setdefault(kind, []).append(took)
        self.problems += late(kind, took, self._timeout)

    async def _cut(self, engine: psutil.Process) -> None:
        self._set("down")
        await self._notice("cut", engine)
        await asyncio.sleep(self.noise.choice([0.0, 1.0, 3.0]))
        self._set("up")

    async def _blip(self, engine: psutil.Process) -> None:
        self._set("down")
        await asyncio.sleep(self.noise.uniform(0.05, 0.7) * self._timeout)
        self._set("up")

    def _set(self, state: str) -> None:
        """Of the one end of the link or the other."""
        words = ("ip", "link", "set", self._name, state)
        if state == "down":
            self._is_far = self.noise.random() < 0.5
        run(*(self._links.inside(*words) if self._is_far else words))

    async def _silence(self, engine: psutil.Process) -> None:
        self._links.relay.set(loss=self.noise.choice([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]]))
        await self._notice("silence", engine)
        self._links.relay.set()

    async def _for_a_while(self, **rule: list[float]) -> None:
        self._links.relay.set(**rule)
        await asyncio.sleep(self.noise.uniform(0.5, 3.0))
        self._links.relay.set()

    async def _delay(self, engine: psutil.Process) -> None:
        seconds = self.noise.uniform(0.01, 0.3)
        await self._for_a_while(delay=[seconds, seconds])

    async def _loss(self, engine: psutil.Process) -> None:
        share = self.noise.uniform(0.02, 0.4)
        await self._for_a_while(loss=[share, self.noise.choice([0.0, share])])

    async def _double(self, engine: psutil.Process) -> None:
        await self._for_a_while(double=[1.0, self.noise.random()], delay=[0.02, 0.02])

    async def _kill(self, engine: psutil.Process) -> None:
        self._process().send_signal(signal.SIGKILL)
        await self._notice("kill", engine)

    async def _stop(self, engine: psutil.Process) -> None:
        self._process().send_signal(signal.SIGSTOP)
        await self._notice("stop", engine)

    async def _host_kill(self, engine: psutil.Process) -> None:
        self.rank.kill()
        self.rank.wait()
        await self._notice("host-kill", engine)
        await asyncio.sleep(self.noise.choice([0.0, 2.0]))
        self.start_rank()

    def _process(self) -> psutil.Process:
        """The rank's process, as soon as it is there."""
        for _ in range(1000):
            for child in psutil.Process(self.rank.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "headrace.engine.rank" in child.cmdline():
                        return child
            time.sleep(0.01)
        raise LookupError("the rank has no process")

    def start_rank(self) -> None:
        self.rank = start_rank(self._links, self._name, self._folder)


def late(kind: str, took: float, timeout: float) -> list[str]:
    """What is wrong with the seconds after which a fault was noticed."""
    most = NOTICED_S if kind in DEATHS else timeout + SILENCE_S
    return [f"{kind}: noticed after {took:.2f} s, at most {most}"] if took > most else []


def start_rank(network: Links, name: str, folder: Path) -> subprocess.Popen[bytes]:
    """`headrace rank` on the other host."""
    program = str(Path(sys.executable).parent / "headrace")
    words = [program, "rank", MODEL[0], "--rank", "1", "--world", "2", *flags(name, folder, "front")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        tied(network.inside(*words, "--num-threads", "1")), env=environment, stdin=subprocess.DEVNULL,
        stderr=(folder / "rank.log").open("ab"),
    )  # fmt: skip


def flags(name: str, folder: Path, side: str) -> list[str]:
    files = {
        "fleet-secret-file": "fleet.secret",
        "tls-cert": f"{side}.pem",
        "tls-key": f"{side}.key",
        "tls-ca": "ca.pem",
    }
    words = ["--rendezvous", f"{ADDRESSES[name][0]}:{PORT}", "--distributed-interface", name]
    return words + [word for flag, file in files.items() for word in (f"--{flag}", str(folder / file))]


def part(
    kinds: list[str], name: str, network: Links, seed: int, timeout: float, num_streams: int, max_tokens: int,
    per_round: int, folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """Faults of one link. Returns a report."""
    began = time.monotonic()
    options = ("--max-restarts", "1000000", "--uvicorn-log-level", "critical", "--num-gpu-blocks-override", "1024")
    with serve(*MODEL, *options) as alone:
        reference = HostCampaign(alone, num_streams, seed, max_tokens, network, name, timeout, folder)
        asyncio.run(reference.undisturbed())
    rank = start_rank(network, name, folder)
    ranks = ("--tensor-parallel-size", "2", "--distributed-timeout", str(timeout), *flags(name, folder, "engine"))
    campaign: HostCampaign | None = None
    try:
        with serve(*MODEL, *options, *ranks) as served:
            campaign = HostCampaign(served, num_streams, seed, max_tokens, network, name, timeout, folder)
            campaign.rank, campaign.expected, campaign.problems = rank, reference.expected, reference.problems
            campaign.rounds(kinds, per_round, f"{name}: ")
            campaign.settle()
            return campaign.report(minutes=round((time.monotonic() - began) / 60, 2), groups_lost=campaign.num_losses)
    finally:
        last = rank if campaign is None else campaign.rank
        last.terminate()
        last.wait(20)


def inside(num: int, seed: int, timeout: float, num_streams: int, max_tokens: int, per_round: int) -> dict[str, Any]:
    """The whole campaign, in a network namespace of this process. Returns its report."""
    noise = random.Random(seed)
    kinds = (KINDS_OF_VETH + KINDS_OF_TUN) * (num // len(KINDS_OF_VETH + KINDS_OF_TUN) + 1)
    parts = {"veth": [kind for kind in kinds[:num] if kind in KINDS_OF_VETH]}
    parts["tun"] = [kind for kind in kinds[:num] if kind in KINDS_OF_TUN]
    reports = {}
    with tempfile.TemporaryDirectory() as name, links() as network:
        folder = Path(name)
        certificates(folder)
        for link, of_link in parts.items():
            noise.shuffle(of_link)
            if of_link:
                result = part(of_link, link, network, seed, timeout, num_streams, max_tokens, per_round, folder)
                reports[link] = result
                if result["problems"]:
                    sys.stderr.write((folder / "rank.log").read_text("utf-8")[-4000:])
    problems = [f"{link}: {each}" for link, report in reports.items() for each in report["problems"]]
    return {
        "campaign": "C-10 faults of ranks on two hosts",
        "seed": seed,
        "distributed_timeout_s": timeout,
        "streams_at_once": num_streams,
        "links": reports,
        "faults": sum(report["counts"].get("faults", 0) for report in reports.values()),
        "streams_compared": sum(report["counts"].get("streams", 0) for report in reports.values()),
        "problems": problems,
    }


def can_run() -> bool:
    """Whether this user may make network namespaces and TUN devices."""
    tools = all(map(shutil.which, ("ip", "unshare", "nsenter")))
    return (
        tools and os.geteuid() == 0 and Path("/dev/net/tun").exists() and not subprocess.call(["unshare", "-n", "true"])
    )


def outside(*arguments: str) -> dict[str, Any]:
    """The campaign in a network namespace of its own. Returns its report."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = ["unshare", "--net", "--kill-child", sys.executable, "-m", "tests.campaigns.hosts", "--inside"]
        done = subprocess.run([*command, *arguments, "--out", file.name], stdout=subprocess.DEVNULL, check=False)
        text = Path(file.name).read_text("utf-8")
    if not text:
        raise RuntimeError(f"the campaign ended with exit status {done.returncode}")
    report: dict[str, Any] = json.loads(text)
    return report


def run_campaign(num: int, seed: int) -> dict[str, Any]:
    """For `tests.campaigns`."""
    if not can_run():
        return {"faults": 0, "by_kind": {"left out: needs root and /dev/net/tun": 1}, "violations": 0, "examples": []}
    report = outside("--faults", str(num), "--seed", str(seed))
    kinds: dict[str, int] = {}
    for each in report["links"].values():
        for kind, count in each["counts"].items():
            kinds[kind] = kinds.get(kind, 0) + count
    known = {name: report[name] for name in ("faults", "streams_compared", "distributed_timeout_s")}
    known |= {f"noticed_s_{link}": each["noticed_s"] for link, each in report["links"].items()}
    return known | {"by_kind": kinds, "violations": len(report["problems"]), "examples": report["problems"][:5]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--per-round", type=int, default=2, help="faults while the same streams run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        numbers = (
            options.faults,
            options.seed,
            options.timeout,
            options.streams,
            options.max_tokens,
            options.per_round,
        )
        return concluded(inside(*numbers), options.out)
    if not can_run():
        parser.error("it needs root, ip, unshare, nsenter and /dev/net/tun")
    words = sys.argv[1:]
    if options.out is not None:
        at = next(i for i, word in enumerate(words) if word.startswith("--out"))
        del words[at : at + (1 if "=" in words[at] else 2)]
    return concluded(outside(*words), options.out)


if __name__ == "__main__":
    sys.exit(main())
