"""Run the turns of a plan: start and stop the processes, measure, and write each sample to the journal.

The journal is JSON lines, so a run that was cut short can go on (`done`). When a process is to start and memory is
short, the process that is needed last is closed. A disturbed sample is measured again, for every contender alike.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.compare import figures, limits, serve
from bench.compare.disturbance import best_pace, is_disturbed, until_undisturbed
from bench.compare.environments import OURS, PEERS, Workshop
from bench.compare.plan import WORKS, Contender, Turn, hopeless, next_use
from bench.compare.shapes import SHAPES, Shape
from bench.compare.workers import Conditions, Worker, WorkerError, first_token, wait_until_quiet
from bench.peers.protocol import NUM_CONTEXT, NUM_DEEP

LOAD_SECONDS = 300.0
RESERVE_BYTES = 3 * 2**30
# Fields of `Job` by kind of process, where they are not the defaults.
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
        entry = {**sample, "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        self.samples.append(entry)
        with self.path.open("a") as file:
            print(json.dumps(entry), file=file)

    def done(self) -> set[tuple[int, str, str, str, str]]:
        """(round, shape, work, peer, quant) of every turn that failed or has an undisturbed sample."""
        best = self.best_pace()
        return {
            (s["round"], s["shape"], s["work"], s["peer"], s["quant"])
            for s in self.samples
            if "peer" in s and ("error" in s or not is_disturbed(s, best))
        }

    def best_pace(self) -> float:
        return best_pace(self.samples)


class Conductor:
    """Runs the turns of a plan on one machine.

    Args:
        say: takes one line for each turn.
        measure_seconds: the longest measurement; a longer one fails.
        num_tries: measurements of a turn at most, while each is disturbed; the same for peers and for ours.
        quiet_seconds: the longest wait for a quiet moment before each measurement.
        budget_seconds: for the whole run; None has no end.
    """

    def __init__(
        self,
        workshop: Workshop,
        journal: Journal,
        say: Callable[[str], None],
        *,
        measure_seconds: float,
        num_tries: int,
        quiet_seconds: float,
        budget_seconds: float | None,
    ) -> None:
        self._workshop = workshop
        self._journal = journal
        self._say = say
        self._measure_seconds = measure_seconds
        self._num_tries = num_tries
        self._quiet_seconds = quiet_seconds
        self._start = time.monotonic()
        self._budget = budget_seconds
        self._workers: dict[WorkerKey, Worker] = {}
        self._broken: dict[tuple[str, ...], str] = {}
        self._durations: dict[tuple[str, str, Contender], float] = {}
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
        expected = self._durations.get((turn.shape, turn.work, turn.contender), 5.0)
        if expected > self._left():
            return "left out, no time is left"
        listed = figures.figures(self._journal.samples, turn.shape, turn.work)
        if figures.compared_by_bits(turn.shape, turn.work):
            listed = [f for f in listed if f.contender.bits == turn.contender.bits]
        figure = next((f for f in listed if f.contender == turn.contender), None)
        best = next((f for f in listed if not f.contender.ours), None)
        if figure is None or best is None or turn.contender.ours:
            return ""
        if hopeless(figure.value, best.value, expected, WORKS[turn.work].higher):
            return f"left out, {figure.value:.1f} is far from the best"
        return ""

    def _limits(self) -> None:
        for sample in until_undisturbed(self._probe, self._num_tries, self._journal.best_pace):
            self._journal.add(sample)
        rates = ", ".join(f"{name} {sample[name]:.3g}" for name in ("bandwidth", "int8") if name in sample)
        self._say(f"limits: {rates or sample['error']} (others {sample['foreign']:.1%})")

    def _probe(self) -> dict[str, Any]:
        wait_until_quiet(self._quiet_seconds)
        conditions = Conditions()
        rates = limits.probe(self._workshop.environment(PEERS[OURS]), seconds=0.4)
        return {"work": "limits", **rates, **conditions.facts()}

    def _turn(self, turn: Turn, coming: Sequence[Turn]) -> str:
        """Measure until a sample is undisturbed, write every sample to the journal, and return the line to say."""
        base = {
            "shape": turn.shape,
            "work": turn.work,
            "peer": turn.contender.peer,
            "quant": turn.contender.quant,
            "round": turn.round,
        }
        start = time.monotonic()
        samples: list[dict[str, Any]] = []
        try:
            measure = functools.partial(self._measure, turn, SHAPES[turn.shape], coming)
            for sample in until_undisturbed(measure, self._num_tries, self._journal.best_pace):
                samples.append({**base, **sample})
                self._journal.add(samples[-1])
                if (time.monotonic() - start) / len(samples) > self._left():
                    break
        except WorkerError as error:
            if self._left() <= 0:
                return "left out, time is over"
            self._broken.setdefault((*turn.worker, turn.work), str(error))
            self._journal.add({**base, "error": str(error)})
            return f"failed: {error}"
        finally:
            self._durations[turn.shape, turn.work, turn.contender] = (time.monotonic() - start) / max(1, len(samples))
        last = samples[-1]
        best = self._journal.best_pace()
        if is_disturbed(last, best):
            pace = f", {last['pace'] / best:.0%} of the best pace" if "pace" in last else ""
            return f"disturbed {len(samples)} times, no figure: others took {last['foreign']:.0%}{pace}"
        again = f" ({len(samples) - 1} disturbed before)" if len(samples) > 1 else ""
        return f"{last['value']:.4g} {WORKS[turn.work].unit}{again}"

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
            conditions = Conditions(worker.process.pid)
            reply = _checked(worker.ask(seconds, work=turn.work))
        except WorkerError:
            if worker.process.poll() is not None:
                self._workers.pop(turn.worker, None)
            raise
        facts = conditions.facts()
        self._peaks[turn.worker] = max(self._peaks.get(turn.worker, 0.0), reply["peak_rss_mib"] * 2.0**20)
        if kind == "memory":
            self._close(turn.worker)
        details = {name: worker.ready.get(name) for name in ("weight_bytes", "load_s", "instructions")}
        return {**details, **reply, **facts}

    def _first_token(self, turn: Turn, shape: Shape, seconds: float) -> dict[str, Any]:
        peer = PEERS[turn.contender.peer]
        job = self._workshop.job(peer, shape, turn.contender.quant, "first_token")
        command, log = self._workshop.command(peer, job), self._workshop.log(peer, "first-token")
        if turn.worker not in self._started:  # once for the page cache and the bytecode
            first_token(command, self._workshop.environment(peer), log, seconds)
            self._started.add(turn.worker)
        wait_until_quiet(self._quiet_seconds)
        conditions = Conditions()
        reply = first_token(command, self._workshop.environment(peer), log, seconds)
        return {**reply, **conditions.facts()}

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

    def _make_room(self, num_bytes: float, coming: Sequence[Turn]) -> None:
        """Close the worker that is needed last, until so many bytes and a reserve are free."""
        while self._workers and psutil.virtual_memory().available < num_bytes + RESERVE_BYTES:
            self._close(max(self._workers, key=lambda key: next_use(key, coming)))

    def _close(self, key: WorkerKey) -> None:
        self._workers.pop(key).close()


def _checked(reply: dict[str, Any]) -> dict[str, Any]:
    if "error" in reply:
        raise WorkerError(str(reply["error"]))
    return reply
