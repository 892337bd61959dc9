"""Takes the turns of a plan: starts and stops the processes, measures, and writes every sample down as it comes.

The journal is JSON lines, so a run that was cut short can go on (`done`). Memory is shared out by what is free: when a
process is to start and there is no room, the one that is needed last goes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.compare import figures, limits, serve
from bench.compare.environments import OURS, PEERS, Workshop
from bench.compare.figures import FOREIGN_LIMIT
from bench.compare.plan import WORKS, Contender, Turn, hopeless, next_use
from bench.compare.shapes import SHAPES, Shape
from bench.compare.workers import Watch, Worker, WorkerError, first_token, wait_until_quiet
from bench.peers.protocol import NUM_CONTEXT, NUM_DEEP

LOAD_SECONDS = 300.0
RESERVE_BYTES = 3 * 2**30
# What a kind of process is asked for beside the defaults of `Job`.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "memory": {"kv_tokens": figures.MEMORY_KV_TOKENS, "max_len": figures.MEMORY_KV_TOKENS},
    "prefix": {"prefix_caching": True},
    "context": {
        "kv_cache_dtype": "int8",
        "num_seqs": 1,
        "max_len": NUM_CONTEXT + NUM_DEEP,
        "kv_tokens": NUM_CONTEXT + NUM_DEEP + 64,
    },
}

WorkerKey = tuple[str, str, str, str]


class Journal:
    """The samples of a run, in memory and on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples: list[dict[str, Any]] = []
        if path.exists():
            self.samples = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def add(self, sample: Mapping[str, Any]) -> None:
        kept = {**sample, "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        self.samples.append(kept)
        with self.path.open("a") as file:
            print(json.dumps(kept), file=file)

    def done(self) -> set[tuple[int, str, str, str, str]]:
        """(round, shape, work, peer, quant) of every turn taken, failed ones too."""
        return {
            (s["round"], s["shape"], s["work"], s["peer"], s["quant"])
            for s in self.samples
            if "peer" in s and (s.get("kept") or "error" in s)
        }


class Conductor:
    """Args:
    say: is told one line for each turn.
    measure_seconds: a measurement that takes longer is given up.
    tries: measurements of a turn at most, while others disturb it.
    quiet_seconds: how long to wait for a quiet moment before each.
    budget_seconds: for the whole run; None has no end.
    """

    def __init__(
        self,
        workshop: Workshop,
        journal: Journal,
        say: Callable[[str], None],
        *,
        measure_seconds: float,
        tries: int,
        quiet_seconds: float,
        budget_seconds: float | None,
    ) -> None:
        self._workshop = workshop
        self._journal = journal
        self._say = say
        self._measure_seconds = measure_seconds
        self._tries = tries
        self._quiet_seconds = quiet_seconds
        self._start = time.monotonic()
        self._budget = budget_seconds
        self._workers: dict[WorkerKey, Worker] = {}
        self._broken: dict[tuple[str, ...], str] = {}
        self._taken: dict[tuple[str, str, Contender], float] = {}
        self._peaks: dict[WorkerKey, float] = {}
        self._started: set[WorkerKey] = set()

    def run(self, rounds: Iterable[Sequence[Turn]]) -> None:
        listed = [list(turns) for turns in rounds]
        everything = [turn for turns in listed for turn in turns]
        done = self._journal.done()
        place = 0
        try:
            for turns in listed:
                if self._left() <= 0:
                    self._say(f"time is over, {len(everything) - place} turns are left out")
                    break
                self._limits()
                for turn in turns:
                    place += 1
                    key = (turn.round, turn.shape, turn.work, turn.contender.peer, turn.contender.quant)
                    if key in done:
                        continue
                    elapsed = time.monotonic() - self._start
                    title = (
                        f"[{place}/{len(everything)} {elapsed / 60:.1f} min] {turn.shape} {turn.work} {turn.contender}"
                    )
                    if why := self._why_not(turn):
                        self._say(f"{title}: {why}")
                        continue
                    self._say(f"{title}: {self._turn(turn, everything[place:])}")
        finally:
            for worker in list(self._workers):
                self._close(worker)

    def _left(self) -> float:
        return float("inf") if self._budget is None else self._budget - (time.monotonic() - self._start)

    def _why_not(self, turn: Turn) -> str:
        """Why a turn is left out, if it is."""
        broken = self._broken.get(turn.worker) or self._broken.get((*turn.worker, turn.work))
        if broken:
            return f"left out, it failed before: {broken}"
        expected = self._taken.get((turn.shape, turn.work, turn.contender), 5.0)
        if expected > self._left():
            return "left out, no time is left"
        found = figures.figures(self._journal.samples, turn.shape, turn.work)
        own = next((f for f in found if f.contender == turn.contender), None)
        best = next((f for f in found if not f.contender.ours), None)
        if own is None or best is None or turn.contender.ours:
            return ""
        if hopeless(own.value, best.value, expected, WORKS[turn.work].higher):
            return f"left out, {own.value:.1f} is far from the best"
        return ""

    def _limits(self) -> None:
        for _ in range(self._tries):
            wait_until_quiet(self._quiet_seconds)
            watch = Watch()
            found = limits.probe(self._workshop.environment(PEERS[OURS]), seconds=0.4)
            foreign = watch.share()
            self._journal.add({"work": "limits", **found, "foreign": round(foreign, 4)})
            if foreign <= FOREIGN_LIMIT:
                break
        told = ", ".join(f"{name} {v:.3g}" if isinstance(v, float) else f"{v}" for name, v in found.items())
        self._say(f"limits: {told} (others {foreign:.1%})")

    def _turn(self, turn: Turn, coming: Sequence[Turn]) -> str:
        """Measure until it was undisturbed, keep the least disturbed sample, and say what came of it."""
        shape = SHAPES[turn.shape]
        base = {
            "shape": turn.shape,
            "work": turn.work,
            "peer": turn.contender.peer,
            "quant": turn.contender.quant,
            "round": turn.round,
        }
        start = time.monotonic()
        found: list[dict[str, Any]] = []
        try:
            for _ in range(self._tries):
                begin = time.monotonic()
                found.append(self._measure(turn, shape, coming))
                took = time.monotonic() - begin
                dear = self._budget is not None and took > min(0.03 * self._budget, self._left())
                if found[-1]["foreign"] <= FOREIGN_LIMIT or dear:
                    break
        except WorkerError as error:
            if not found and self._left() <= 0:
                return "left out, time is over"
            if not found:
                self._broken.setdefault((*turn.worker, turn.work), str(error))
                self._journal.add({**base, "error": str(error)})
                return f"failed: {error}"
        finally:
            self._taken[turn.shape, turn.work, turn.contender] = (time.monotonic() - start) / max(1, len(found))
        best = min(found, key=lambda sample: float(sample["foreign"]))
        for sample in found:
            self._journal.add({**base, **sample, "kept": sample is best})
        disturbed = f", others took {best['foreign']:.0%}" if best["foreign"] > FOREIGN_LIMIT else ""
        return f"{best['value']:.4g} {WORKS[turn.work].unit}{disturbed}"

    def _measure(self, turn: Turn, shape: Shape, coming: Sequence[Turn]) -> dict[str, Any]:
        kind = WORKS[turn.work].kind
        seconds = min(self._measure_seconds, max(self._left(), 1.0))
        if kind == "serve":
            self._make_room(float(3 * 2 * (shape.layer_weights + shape.head_weights)), coming)
            wait_until_quiet(self._quiet_seconds)
            return serve.measure(self._workshop, shape, turn.contender, seconds)
        if kind == "first_token":
            return self._first_token(turn, shape, seconds)
        worker = self._worker(turn, shape, coming)
        try:
            if turn.work not in worker.warm and kind != "memory":
                _checked(worker.ask(seconds, work=turn.work, warm=True))
                worker.warm.add(turn.work)
            wait_until_quiet(self._quiet_seconds)
            watch = Watch(worker.process.pid)
            reply = _checked(worker.ask(seconds, work=turn.work))
        except WorkerError:
            if worker.process.poll() is not None:
                self._workers.pop(turn.worker, None)
            raise
        foreign = watch.share()
        self._peaks[turn.worker] = max(self._peaks.get(turn.worker, 0.0), reply["peak_rss_mib"] * 2.0**20)
        if kind == "memory":
            self._close(turn.worker)
        told = {name: worker.ready.get(name) for name in ("weight_bytes", "load_s")}
        return {**told, **reply, "foreign": round(foreign, 4)}

    def _first_token(self, turn: Turn, shape: Shape, seconds: float) -> dict[str, Any]:
        peer = PEERS[turn.contender.peer]
        job = self._workshop.job(peer, shape, turn.contender.quant, "first_token")
        command, log = self._workshop.command(peer, job), self._workshop.log(peer, "first-token")
        if turn.worker not in self._started:  # once for the page cache and the bytecode
            first_token(command, self._workshop.environment(peer), log, seconds)
            self._started.add(turn.worker)
        wait_until_quiet(self._quiet_seconds)
        watch = Watch()
        reply = first_token(command, self._workshop.environment(peer), log, seconds)
        return {**reply, "foreign": round(watch.share(), 4)}

    def _worker(self, turn: Turn, shape: Shape, coming: Sequence[Turn]) -> Worker:
        key = turn.worker
        if key in self._workers:
            return self._workers[key]
        peer = PEERS[turn.contender.peer]
        plain = 3.0 * (shape.layer_weights + shape.head_weights)
        self._make_room(self._peaks.get(key, plain), coming)
        job = self._workshop.job(peer, shape, turn.contender.quant, "work") | dict(KINDS.get(key[1], {}))
        log = self._workshop.log(peer, f"{shape.name}-{turn.contender.quant}")
        patience = min(LOAD_SECONDS, max(self._left(), 1.0))
        try:
            worker = Worker(self._workshop.command(peer, job), self._workshop.environment(peer), log, patience)
        except WorkerError as error:
            if self._left() > 0:
                self._broken[key] = str(error)
            raise
        self._workers[key] = worker
        return worker

    def _make_room(self, wanted: float, coming: Sequence[Turn]) -> None:
        """Close whoever is needed last until so many bytes are free, and some beside them."""
        while self._workers and psutil.virtual_memory().available < wanted + RESERVE_BYTES:
            self._close(max(self._workers, key=lambda key: next_use(key, coming)))

    def _close(self, key: WorkerKey) -> None:
        self._workers.pop(key).close()


def _checked(reply: dict[str, Any]) -> dict[str, Any]:
    if "error" in reply:
        raise WorkerError(str(reply["error"]))
    return reply
