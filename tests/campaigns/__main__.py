"""`python -m tests.campaigns TIER`: the campaigns that prove what docs/reliability.md promises, with their counts.

A campaign is a function of the tier's numbers and a seed that returns its counts; `violations` is 0 where all is well.
Counts are written into bench/results/campaign-TIER.json, which the docs quote, each with its seed, minutes, commit,
host and the hash of the code that it exercises. Long tiers may be run in pieces: `--only` runs some campaigns and
leaves the counts of the others; `--share 0.05 --seed 7 --add` runs a twentieth and puts it beside what other seeds
counted.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple

from bench.record import commit
from bench.tied import tied
from rich.console import Console
from rich.table import Table
from tests.campaigns import page

from headrace import doctor

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
TIERS = ("commit", "nightly", "release")
HOST = ("name", "cores_allowed")
"""What each piece says of the machine that counted it."""

Counts = dict[str, Any]


class Campaign(NamedTuple):
    """`numbers` are the sizes at each tier; `run` is called with one and the seed; `touches` is what it tries."""

    about: str
    numbers: dict[str, Any]
    run: Callable[[Any, int], Counts]
    touches: tuple[str, ...] = ("src", "csrc")


def simulate(size: tuple[int, int], seed: int) -> Counts:
    from tests.programs.sim.__main__ import run_and_replay

    num_seeds, num_steps = size
    first = seed * 10**6
    events: Counter[str] = Counter()
    steps = tokens = 0
    bad: list[str] = []
    with Pool(2) as pool:
        seeds = range(first, first + num_seeds)
        for report in pool.imap_unordered(partial(run_and_replay, num_steps=num_steps), seeds, chunksize=4):
            events.update(report.events)
            steps += report.num_steps
            tokens += report.num_tokens
            if report.violation:
                bad.append(f"seed {report.seed}: {report.violation}")
    return {
        "seeds": num_seeds,
        "steps": steps,
        "tokens_compared": tokens,
        "events": dict(sorted(events.items())),
        "violations": len(bad),
        "examples": bad[:5],
    }


def short_waits(num: int, seed: int) -> Counts:
    from tests.programs.sim.waits import run_programs

    counts, violations = run_programs(seed * 10**6, num, 2)
    return counts | {"violations": len(violations), "examples": violations[:5]}


def combinations(num: int, seed: int) -> Counts:
    from tests.campaigns.differential import run_campaign

    counts = run_campaign(num, seed)
    return counts | {"violations": counts["differing"]}


def pictures(num: int, seed: int) -> Counts:
    from tests.campaigns.pictures import run_campaign

    counts = run_campaign(num, seed)
    return counts | {"violations": counts["differing"]}


def drafters(num_prompts: int, seed: int) -> Counts:
    from tests.campaigns.speculation import run_campaign

    counts = run_campaign(num_prompts)
    return counts | {"violations": counts["differing"]}


def gguf(num: int, seed: int) -> Counts:
    import torch
    from tests.programs.fuzz_gguf import campaign

    torch.set_num_threads(1)
    counts = campaign(num, seed, 0, ROOT / "build" / "fuzz-gguf")
    return {"mutations": num} | dict(counts) | {"violations": num - counts["read"] - counts["refused"]}


def live_faults(num: int, seed: int) -> Counts:
    from tests.campaigns.faults import run

    # A stopped engine is found after the watchdog's ten seconds: fewer of those.
    kinds_of_eight = ("kill", "segv", "stop", "kill", "abort", "kill", "memory", "segv")
    report = run(num, seed, kinds=kinds_of_eight, per_round=4)
    known = {name: report[name] for name in ("streams_at_once", "watchdog_s", "restarts", "recovery_s")}
    kinds = {name: count for name, count in report["counts"].items() if name != "faults"}
    result = {"faults": report["counts"].get("faults", 0), "by_kind": kinds} | known
    result |= {f"sig{kind}": kinds.get(f"faults: {kind}", 0) for kind in ("kill", "stop", "segv")}
    result |= {"streams_compared": kinds.get("streams", 0)}
    return result | {"violations": len(report["problems"]), "examples": report["problems"][:5]}


def faults_of_replicas(size: tuple[int, int, int], seed: int) -> Counts:
    from tests.campaigns.fleets import run

    num_kills, num_stops, num_updates = size
    report = run(num_kills, num_stops, seed, num_updates=num_updates)
    known = {name: report[name] for name in ("replicas", "streams_at_once", "watchdog_s", "restarts", "recovery_s")}
    counts = report["counts"]
    result = {"faults": counts.get("faults", 0), "streams_compared": counts.get("streams", 0), "by_kind": counts}
    return result | known | {"violations": len(report["problems"]), "examples": report["problems"][:5]}


def faults_of_children(num: int, seed: int) -> Counts:
    from tests.campaigns.children import run_campaign

    return run_campaign(num, seed)


def state_machines(size: tuple[int, int], seed: int) -> Counts:
    from tests.campaigns.machines import run_campaign

    return run_campaign(size, seed)


def load(num: int, seed: int) -> Counts:
    from tests.campaigns.load import run_campaign

    return run_campaign(num, seed)


def parsers(counts: dict[str, int], seed: int) -> Counts:
    from tests.campaigns.parsers import run_campaign

    return run_campaign(counts, seed)


def overload(seconds: float, seed: int) -> Counts:
    from tests.campaigns.operations import overload

    return overload(seconds, seed)


def soak(size: tuple[float, float, float], seed: int) -> Counts:
    """With its control beside it: the same with 200 bytes leaked of every request, which has to be noticed."""
    from tests.campaigns.operations import soak

    with ThreadPoolExecutor(1) as control:
        leaking = control.submit(soak, (min(size[0], 60.0), *size[1:]), seed, leak=200)
        counts = soak(size, seed)
        leaky = leaking.result()
    counts |= {f"with_the_leak_{name}": leaky[name] for name in ("bytes_a_request", "objects_a_request")}
    if not any("memory grows" in each or "objects are left" in each for each in leaky["examples"]):
        counts["violations"] += 1
        counts["examples"] = [*counts["examples"], "the planted leak was not noticed"]
    return counts


def module(name: str, function: str = "run_campaign") -> Callable[[Any, int], Counts]:
    """Return the campaign of a module beside this one, which is imported when it runs."""
    return lambda size, seed: getattr(importlib.import_module(f"tests.campaigns.{name}"), function)(size, seed)


def planted(kind: str, seed: int) -> Counts:
    """Bugs planted in the scheduler, the blocks and the guesses: each is caught by the invariant that it breaks."""
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests/core").rglob("test_planted_*.py"))]
    done = subprocess.run(
        tied([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", *files]),
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    caught = sum(line.startswith("PASSED") for line in lines)
    missed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"planted": caught + len(missed), "caught": caught, "violations": len(missed), "examples": missed[:5]}


PARSERS: dict[str, dict[str, int]] = {
    "commit": {"bodies": 10_000, "frames": 500_000, "safetensors": 100_000, "configs": 100_000, "tokenizers": 5_000,
               "constraints": 100_000, "templates": 300},
    "nightly": {"bodies": 500_000, "frames": 5_000_000, "safetensors": 5_000_000, "configs": 1_000_000,
                "tokenizers": 100_000, "constraints": 1_000_000, "templates": 20_000},
    "release": {"bodies": 5_000_000, "frames": 50_000_000, "safetensors": 50_000_000, "configs": 10_000_000,
                "tokenizers": 1_000_000, "constraints": 10_000_000, "templates": 200_000},
}  # fmt: skip
CAMPAIGNS: dict[str, Campaign] = {
    "C-1": Campaign(
        "simulation of the real scheduler (seeds, steps)",
        {"commit": (300, 1000), "nightly": (20_000, 1000), "release": (400_000, 1000)},
        simulate,
        ("src/headrace/core", "src/headrace/protocol/step.py"),
    ),
    "C-2": Campaign(
        "state machines against naive models (examples of each, steps)",
        {"commit": (200, 50), "nightly": (5000, 50), "release": (20_000, 100)},
        state_machines,
    ),
    "C-3": Campaign(
        "differential generations over pairs", {"commit": 3000, "nightly": 40_000, "release": 120_000}, combinations
    ),
    "C-3-pictures": Campaign(
        "the same with pictures (generations)", {"commit": 1000, "nightly": 10_000, "release": 60_000}, pictures
    ),
    "C-3-drafters": Campaign(
        "every drafter against no guesses (prompts)", {"commit": 20, "nightly": 200, "release": 2000}, drafters
    ),
    "C-4": Campaign(
        "HTTP requests of every sort of client", {"commit": 5000, "nightly": 200_000, "release": 1_000_000}, load
    ),
    "C-5": Campaign(
        "faults of a live engine's process under 32 streams",
        {"commit": 40, "nightly": 1000, "release": 20_000},
        live_faults,
    ),
    "C-5-fleet": Campaign(
        "replicas of a fleet that are killed, stopped and replaced under 32 streams (kills, stops, updates)",
        {"commit": (5, 2, 2), "nightly": (50, 20, 20), "release": (1000, 400, 200)},
        faults_of_replicas,
    ),
    "C-5-children": Campaign(
        "faults of the processes of templates, grammars and tokenizers, and of the server",
        {"commit": 40, "nightly": 500, "release": 5000},
        faults_of_children,
    ),
    "C-6": Campaign("damaged inputs of every other parser", PARSERS, parsers),
    "C-6-gguf": Campaign("damaged GGUF files", {"commit": 20_000, "nightly": 1_000_000, "release": 10_000_000}, gguf),
    "C-7": Campaign("ten times the load (seconds)", {"commit": 15.0, "nightly": 1200.0, "release": 7200.0}, overload),
    "C-8": Campaign(
        "memory under 80 % of the load (seconds, bytes a request, MiB an hour)",
        {"commit": (60.0, 2000.0, 500.0), "nightly": (7200.0, 20.0, 1.0), "release": (86_400.0, 20.0, 1.0)},
        soak,
    ),
    "C-8-long": Campaign(
        "one answer (tokens)", {"commit": 16_000, "nightly": 50_000, "release": 120_000}, module("long")
    ),
    "C-9": Campaign(
        "drain and restart (cycles)", {"commit": 6, "nightly": 200, "release": 1000}, module("operations", "drain")
    ),
    "C-10": Campaign(
        "ranks of one model that are killed and stopped under 32 streams (kills, stops)",
        {"commit": (6, 2), "nightly": (50, 20), "release": (1000, 400)},
        module("ranks", "run_faults"),
    ),
    "C-10-stages": Campaign(
        "ranks of one pipeline that are killed and stopped under 32 streams (kills, stops)",
        {"commit": (6, 2), "nightly": (50, 20), "release": (1000, 400)},
        module("ranks", "run_stage_faults"),
    ),
    "C-10-bits": Campaign(
        "generations by several ranks against one process",
        {"commit": 400, "nightly": 4000, "release": 40_000},
        module("ranks", "compare"),
    ),
    "C-10-hosts": Campaign(
        "ranks on two hosts whose network is cut, silent, slow and lossy, and that are killed, under 16 streams",
        {"commit": 6, "nightly": 100, "release": 2000},
        module("hosts"),
    ),
    "C-10-experts": Campaign(
        "generations by ranks with whole experts against one process",
        {"commit": 300, "nightly": 3000, "release": 30_000},
        module("ranks", "compare_experts"),
    ),
    "C-11": Campaign(
        "comparisons of keys by time", {"commit": 20_000, "nightly": 200_000, "release": 1_000_000}, module("isolation")
    ),
    "C-12": Campaign("planted bugs", {"commit": "all", "nightly": "all", "release": "all"}, planted),
    "C-6-stalls": Campaign(
        "bodies that hold up the event loop",
        {"commit": 200, "nightly": 5000, "release": 50_000},
        module("stalls"),
        ("src/headrace/serve", "src/headrace/engine", "src/headrace/text/outputs.py"),
    ),
    "C-13": Campaign(
        "random clients on a virtual clock",
        {"commit": 20_000, "nightly": 1_000_000, "release": 10_000_000},
        module("connections", "schedules"),
        ("src/headrace/serve/gates",),
    ),
    "C-15": Campaign(
        "the storage after a crash of the machine (states)",
        {"commit": 3000, "nightly": 200_000, "release": 2_000_000},
        module("crashes"),
        ("src/headrace/serve/storage", "src/headrace/serve/apis/openai"),
    ),
    "C-16": Campaign(
        "programs of two holders, with and without one of them",
        {"commit": 300, "nightly": 10_000, "release": 100_000},
        module("interference"),
        ("src/headrace/serve", "src/headrace/engine"),
    ),
    "C-17": Campaign(
        "random walks over the states of a server (walks, walks with a server of its own)",
        {"commit": (1000, 8), "nightly": (10_000, 200), "release": (100_000, 2000)},
        module("states"),
        ("src/headrace/serve", "src/headrace/engine", "src/headrace/fleet"),
    ),
    "C-18": Campaign(
        "hostile files behind a server's doors (files through workers, files dropped into a server's folder)",
        {"commit": (300, 12), "nightly": (5000, 200), "release": (100_000, 4000)},
        module("hostile_files"),
        ("src/headrace/checkpoint", "src/headrace/serve", "src/headrace/text", "src/headrace/engine/library"),
    ),
    "C-19": Campaign(
        "programs of several holders, one of whom sends short requests: their waits in steps",
        {"commit": 500, "nightly": 10_000, "release": 100_000},
        short_waits,
        ("src/headrace/core", "src/headrace/protocol/step.py"),
    ),
}


def code_hash(touches: tuple[str, ...]) -> str:
    """Of what is under test: the sources in these files and folders."""
    output = hashlib.sha256()
    for place in touches:
        for path in sorted([ROOT / place, *(ROOT / place).rglob("*")]):
            if path.is_file() and path.suffix in (".py", ".cpp", ".h"):
                output.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return output.hexdigest()[:16]


def scaled(numbers: Any, share: float) -> Any:
    """A part of a campaign's size: of a pair the first number, of a table all."""
    if isinstance(numbers, tuple):
        return (scaled(numbers[0], share), *numbers[1:])
    if isinstance(numbers, dict):
        return {name: scaled(number, share) for name, number in numbers.items()}
    if isinstance(numbers, int):
        return max(1, round(numbers * share))
    return numbers * share if isinstance(numbers, float) else numbers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__.split("\n")[0])
    parser.add_argument("tier", choices=TIERS)
    parser.add_argument("--only", help="names of campaigns, with commas between")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="this part of the tier's sizes")
    parser.add_argument("--add", action="store_true", help="leave what other seeds counted beside this")
    parser.add_argument("--out", type=Path, help="where the counts go (default: bench/results/campaign-TIER.json)")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(CAMPAIGNS)
    for name in names:
        if name not in CAMPAIGNS:
            parser.error(f"--only {name}: one of {', '.join(CAMPAIGNS)}")
    out = args.out or RESULTS / f"campaign-{args.tier}.json"
    console = Console()
    cpu = doctor.examine()["cpu"]
    host = {name: cpu[name] for name in HOST}
    bad = 0
    for name in names:
        campaign = CAMPAIGNS[name]
        size = scaled(campaign.numbers[args.tier], args.share)
        console.print(f"[bold]{name}[/] {campaign.about}: {size}")
        output = {"seed": args.seed, "commit": commit(), "code": code_hash(campaign.touches), "host": host}
        begin = time.monotonic()
        piece = campaign.run(size, args.seed) | output
        piece["minutes"] = round((time.monotonic() - begin) / 60, 2)
        bad += piece["violations"]
        keep(out, args.tier, name, piece, args.add)
    console.print(shown(json.loads(out.read_text())))
    if args.out is None:
        page.write()
    return 1 if bad else 0


def keep(out: Path, tier: str, name: str, piece: Counts, add: bool) -> None:
    """Into the file as it is now: another campaign may have ended meanwhile. What others counted keeps its host, which
    older files have once, for all that they had then."""
    known = json.loads(out.read_text()) if out.exists() else {}
    results: dict[str, list[Counts]] = known.get("campaigns", {})
    for other in itertools.chain.from_iterable(results.values()):
        if "host" in known:
            other.setdefault("host", {key: known["host"][key] for key in HOST})
    others = [other for other in results.get(name, []) if other["seed"] != piece["seed"]] if add else []
    results[name] = [*others, piece]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"tier": tier, "campaigns": dict(sorted(results.items()))}, indent=1) + "\n")


def shown(report: dict[str, Any]) -> Table:
    """What the terminal shows at the end."""
    table = Table("campaign", "what", "count", "violations", "minutes", title=f"campaign-{report['tier']}")
    for name, pieces in sorted(report["campaigns"].items(), key=lambda one: page.in_order(one[0])):
        counts = page.summed(pieces)
        output = page.told(counts)
        row = (CAMPAIGNS[name].about, "\n".join(output[:4]), str(counts["violations"]), f"{counts['minutes']:.1f}")
        table.add_row(name, *row)
    return table


if __name__ == "__main__":
    sys.exit(main())
