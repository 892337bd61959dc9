"""`python -m bench.recording [MODEL]`: what a step costs to note for a crash report, and to record for a replay.

Both are timed where they happen, so that the machine's other work, which changes whole runs by far more than they cost,
is in the step's time and in theirs alike. Prints one JSON object for each number of streams: microseconds of a step, of
its note and of its record, and their shares in percent.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

from headrace.engine.build import build_engine
from headrace.engine.child import BlackBoxExecutor
from headrace.engine.core import EngineCore
from headrace.engine.records.black_box import BlackBox
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request

PROMPT_LEN = 64


class Timed:
    """A function, and the seconds that its calls took since they were asked for last."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._function(*arguments)
        finally:
            self._seconds += time.perf_counter() - start

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def measure(core: EngineCore, num_streams: int, num_steps: int) -> dict[str, Any]:
    """Decode steps of `num_streams` streams."""
    recorder: Any = core._recorder  # type: ignore[attr-defined]
    recording = [Timed(recorder.begin), Timed(recorder.end)]
    recorder.begin, recorder.end = recording
    box = BlackBox.make()
    inner: Any = core.executor
    noted: Any = BlackBoxExecutor(core, box)
    core.executor = noted
    run, recorded = [Timed(inner.start), Timed(inner.finish)], [Timed(noted.start), Timed(noted.finish)]
    inner.start, inner.finish = run
    noted.start, noted.finish = recorded
    for i in range(num_streams):
        params = SamplingParams(seed=i, max_tokens=num_steps + 10, ignore_eos=True)
        prompt = [(7 * i + j) % 400 + 3 for j in range(PROMPT_LEN)]
        core.add(Request(request_id=f"{num_streams}.{i}", prompt_token_ids=prompt, params=params))
    steps, notes, records = [], [], []
    while core.has_work():
        start = time.perf_counter()
        core.step()
        steps.append(time.perf_counter() - start)
        outside, inside = (sum(each.take() for each in timed) for timed in (recorded, run))
        notes.append(outside - inside)
        records.append(sum(each.take() for each in recording))
    core.executor = inner
    del inner.start, inner.finish
    del recorder.begin, recorder.end
    box.close()
    step, note, record = (1e6 * quantiles(each[5:-5], n=10)[0] for each in (steps, notes, records))
    return {
        "streams": num_streams,
        "steps": len(steps),
        "step_us": round(step, 1),
        "note_us": round(note, 2),
        "record_us": round(record, 2),
        "note_percent": round(100 * note / step, 3),
        "record_percent": round(100 * record / step, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="builtin")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "schedule")
        core = build_engine(EngineConfig(model=args.model, record_schedule=path, max_num_seqs=64, max_model_len=1024))
        for num_streams in args.streams:
            print(json.dumps(measure(core, num_streams, args.steps)), flush=True)
        core.close()


if __name__ == "__main__":
    main()
