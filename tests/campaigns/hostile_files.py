"""The campaign of hostile files (C-18): models and stored entries that were tampered with, behind a server's doors.

`python -m tests.campaigns.hostile_files --cases 2000 --live 40 --seed 1` changes one file of a sound folder at a time
(`hostile`), and asks for what is in it.

Most cases go through a server in a worker process with fake engines, by its routes: the model is listed, shown, loaded
and asked, and then an engine is made of it. The worker is bounded in memory and, for each case, in processor time. A
sample (`--live`) is dropped into the models folder of a `headrace serve`, or its storage.

Every reply is an answer or a refusal in words that name the file or a field; no process exceeds its bounds; nothing
hangs or dies; the server answers its probes within `PROBE_S` throughout; another model's answers stay the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from bench.tied import tied
from tests.campaigns import hostile, hostile_server
from tests.campaigns.hostile import CHAT, GROWTH, NAME, Case, fault_of
from tests.support.gated import Server, serving
from tests.support.server import write_tokenizer

from headrace.engine.build import build_engine
from headrace.engine.library.model_folder import ModelFolder
from headrace.protocol.errors import HeadraceError
from headrace.serve import loading
from headrace.text.templates import new_process
from headrace.text.tokenizer import Tokenizer

MEMORY = 3_500_000_000
"""Bytes of address space of a worker, of which torch takes one thousand million."""
CPU_S = 20.0
"""Seconds of processor time of one case, in a worker."""
STILL_S = 60.0
ENOUGH = 1000
PLANTS = ("", "key-error", "spin", "memory", "leak")
"""Faults that are planted as a control: each has to be noticed."""


# -- in a worker -----------------------------------------------------------------------------------------------------


class Faults(logging.Handler):
    """The tracebacks that the server logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            self.lines.append(f"a traceback in the log: {record.exc_info[0].__name__}: {record.exc_info[1]}"[:300])


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """A fault in the reader of a model's facts."""
    sound = ModelFolder.facts

    def facts(self: ModelFolder, name_of_model: str) -> Any:
        if name_of_model == NAME:
            match name:
                case "key-error":
                    return {}["absent"]  # type: ignore[var-annotated]
                case "spin":
                    while True:
                        pass
                case "memory":
                    bytearray(MEMORY)
                case "leak":
                    _leaked.append(os.urandom(GROWTH + 2**26))
        return sound(self, name_of_model)

    with mock.patch.object(ModelFolder, "facts", facts) if name else contextlib.nullcontext():
        yield


_leaked: list[bytes] = []
GROUPS = {
    "responses": ("responses", "/input_items"), "files": ("files", "/content"),
    "conversations": ("conversations", "/items"), "batches": ("batches", ""),
}  # fmt: skip
"""The routes of the entries in each folder of the storage."""


async def asked(server: Server, case: Case) -> list[str]:
    """Ask for a model by every door. Returns what was wrong."""
    problems = []
    for route, body in (
        ("GET /v1/models", None),
        ("GET /api/tags", None),
        ("POST /api/show", {"model": NAME}),
        ("POST /v1/chat/completions", CHAT),
        ("POST /tokenize", {"model": NAME, "prompt": "aaaa x"}),
    ):
        reply = await server.call(route, body)
        if fault := fault_of(case, reply.status_code, reply.text):
            problems.append(f"{route}: {fault}")
    await server.lifespan.models.unload(NAME)
    return problems


async def restored(base: Path, folder: Path, tokenizer: Tokenizer, root: Path, case: Case) -> list[str]:
    """Start a server over stored entries, and read them all."""
    problems = []
    async with serving(tokenizer, root, storage_dir=str(folder)) as server:
        for path in sorted((base / "stored").glob("*/*.json")):
            name = path.stem
            group, more = GROUPS[path.parent.name]
            routes = [f"GET /v1/{group}/{name}", *([f"GET /v1/{group}/{name}{more}"] if more else [])]
            routes += [f"GET /v1/{group}"] if group in ("files", "batches") else []
            for route in routes:
                reply = await server.call(route)
                if route.endswith("/content"):
                    continue  # the bytes of a file are its owner's
                if fault := fault_of(case, reply.status_code, reply.text):
                    problems.append(f"{route}: {fault}")
    return problems


async def store(base: Path, tokenizer: Tokenizer, root: Path) -> None:
    """Have a server write some entries into the folder that is then changed."""
    async with serving(tokenizer, root, storage_dir=str(base / "stored")) as server:
        await server.until(lambda: server.client.is_alive)
        body = {"model": "fake", "input": "aaaa", "max_output_tokens": 4, "store": True}
        assert (await server.call("POST /v1/responses", body)).status_code == 200
        items = [{"type": "message", "role": "user", "content": "aaaa"}]
        assert (await server.call("POST /v1/conversations", {"items": items})).status_code == 200
        ask = {"model": "fake", "prompt": "aaaa", "max_tokens": 4}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": ask}
        form = {"files": {"file": ("x.jsonl", json.dumps(line).encode())}, "data": {"purpose": "batch"}}
        reply = await server.http.post("/v1/files", **form)  # type: ignore[arg-type]
        assert reply.status_code == 200, reply.text
        batch = {"input_file_id": reply.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await server.call("POST /v1/batches", batch)).status_code == 200
        while (await server.call("GET /v1/batches")).json()["data"][0]["status"] != "completed":
            await asyncio.sleep(0.05)


def build(case: Case, folder: Path) -> list[str]:
    """Make an engine of a model. Returns what was wrong."""
    try:
        build_engine(hostile.engine_config(folder, case.kind)).close()
    except HeadraceError as error:
        fault = fault_of(case, 400, str(error))
        return [f"the engine: {fault}"] if fault else []
    except Exception as error:
        return [f"the engine: {type(error).__name__}: {error}"[:300]]
    return []


async def work(base: Path, numbers: range, seed: int, kinds: list[str]) -> None:
    """Do the cases of a worker, and print a line before and after each."""
    faults = Faults()
    for name in ("headrace.server", "headrace.engine", "asyncio"):
        logging.getLogger(name).addHandler(faults)
        logging.getLogger(name).propagate = False
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        tokenizer = Tokenizer.load(write_tokenizer(place))
        root = place / "models"
        root.mkdir()
        if "stored" in kinds and not (base / "stored").exists():
            await store(base, tokenizer, root)
        process = new_process()
        with mock.patch.object(loading, "new_process", return_value=process):
            async with serving(tokenizer, root) as server:
                await server.until(lambda: server.client.is_alive)
                for number in numbers:
                    kind = kinds[number % len(kinds)]
                    print(json.dumps({"begins": number, "kind": kind}), flush=True)
                    target = place / "stored" if kind == "stored" else root / NAME
                    before, faults.lines = peak(), []
                    case = hostile.mutate(base, target, kind, seed, number)
                    if kind == "stored":
                        problems = await restored(base, target, tokenizer, root, case)
                    else:
                        problems = await asked(server, case) + await asyncio.to_thread(build, case, target)
                    if (grown := peak() - before) > GROWTH:
                        problems.append(f"memory grew by {grown:,} bytes")
                    shutil.rmtree(target)
                    print(json.dumps({"ends": number, "case": case, "problems": problems + faults.lines}), flush=True)
        process.close()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- over the workers ------------------------------------------------------------------------------------------------


class Worker:
    """A worker process, whose lines are read as they come."""

    def __init__(self, base: Path, numbers: range, seed: int, kinds: list[str], plant: str) -> None:
        words = [sys.executable, "-m", "tests.campaigns.hostile_files", "--worker", str(base)]
        words += ["--first", str(numbers.start), "--cases", str(numbers.stop), "--seed", str(seed)]
        words += ["--kinds", ",".join(kinds), "--plant", plant]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(tied(words), stdout=subprocess.PIPE, stderr=self.errors, env=environment)
        self.lines: list[dict[str, Any]] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with contextlib.suppress(ValueError):
                self.lines.append(json.loads(line))

    def used(self) -> float:
        """The processor time of the worker so far."""
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(self.process.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def until_next(self, seen: int) -> str:
        """Wait for the line after the first `seen`. Returns why none comes."""
        begin, used = time.monotonic(), self.used()
        while len(self.lines) <= seen:
            if self.process.poll() is not None:
                self.reader.join(10)
                if len(self.lines) > seen:
                    return ""
                self.errors.seek(0)
                last = self.errors.read().decode("utf-8", "replace").strip().splitlines()[-1:]
                return f"the worker ends with status {self.process.returncode}: {last}"
            if seen and self.used() - used > CPU_S:
                return f"it takes more than {CPU_S:g} s of processor time"
            if time.monotonic() - begin > STILL_S and self.used() - used < 1.0:
                return "it stands still"
            time.sleep(0.01)
        return ""

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join(10)
        self.errors.close()
        if self.process.stdout is not None:
            self.process.stdout.close()


def through_workers(
    base: Path, num: int, seed: int, kinds: list[str], plant: str = ""
) -> tuple[Counter[str], list[str]]:
    """Do `num` cases; a worker that dies or hangs is replaced."""
    counts: Counter[str] = Counter()
    problems: list[str] = []
    first = 0
    while first < num and len(problems) < ENOUGH:
        worker, seen = Worker(base, range(first, num), seed, kinds, plant), 0
        try:
            while first < num:
                reason = worker.until_next(seen)
                if reason:
                    last = worker.lines[-1] if worker.lines else {}
                    counts["workers lost"] += 1
                    problems.append(f"{last.get('kind')} {seed}/{last.get('begins')}: {reason}")
                    if "begins" not in last:
                        return counts, problems
                    first = last["begins"] + 1
                    break
                line = worker.lines[seen]
                seen += 1
                if "ends" in line:
                    first = line["ends"] + 1
                    kind, file, how = line["case"]
                    counts["cases"] += 1
                    counts[f"of {kind}"] += 1
                    problems += [f"{kind} {seed}/{line['ends']} ({file}, {how}): {each}" for each in line["problems"]]
        finally:
            worker.end()
    return counts, problems


def run_campaign(size: tuple[int, int], seed: int, kinds: list[str] | None = None, plant: str = "") -> dict[str, Any]:
    """So many cases through workers, and so many through a server of its own."""
    kinds = kinds or list(hostile.KINDS)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        hostile.sound(base)
        counts, problems = through_workers(base, size[0], seed, kinds, plant)
        more, others = hostile_server.through_server(
            base, size[1], seed, [kind for kind in kinds if kind in hostile_server.KINDS]
        )
    result = {name.replace(" ", "_"): count for name, count in sorted((counts + more).items())}
    problems += others
    by_kind = Counter(each.split()[1 if each.startswith("live") else 0] for each in problems)
    return result | {"by_kind": dict(by_kind), "violations": len(problems), "examples": problems[:20]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.hostile_files", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--live", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(hostile.KINDS))
    parser.add_argument("--plant", default="", choices=PLANTS)
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if args.worker is not None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        with planted(args.plant):
            asyncio.run(work(args.worker, range(args.first, args.cases), args.seed, kinds))
        return 0
    counts = run_campaign((args.cases, args.live), args.seed, kinds, args.plant)
    print(json.dumps(counts, indent=1))
    return 1 if counts["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
