"""C-8-long: one answer of very many tokens, whose steps get slower by what attention reads and by nothing else.

The built-in model with its context made wider, one sequence, through engine, sampler and text. Each step is timed in
three parts: the native call (the model), the rest of the engine's step (scheduler, runner, sampling), and the text. The
native part has to be a straight line over the context, and a steeper one where keys and values do not lie in the
processor's caches any more; the others may grow by little of what that line grows by. They
are timed in a run whose native call does nothing: a longer read leaves less of all else in the processor's caches, so
that code which does the same as ever gets slower beside it.
What a part costs is processor time, and the least of some runs and some windows of steps: what else the machine does
makes steps slower, never faster.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from tests.support.law import make_core

from headrace import hub
from headrace.engine.core import EngineCore
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request
from headrace.text.outputs import Delta, RequestState
from headrace.text.tokenizer import Tokenizer

WINDOW, BIN = 25, 1000
"""Steps whose mean is one time, and steps of which the least such time is kept."""
MAX_BEND = 0.05
"""How far a time may be from its line, as a share of the line's last."""
MAX_DEARER = 2.0
"""How much more of the time a token may take whose keys and values lie beyond the processor's caches. With this, a part
that grows with the square is seen when it is half of the last step."""
MAX_HOST_SHARE = 0.1
"""Growth of scheduler, runner, sampling and text, as a share of the native call's growth."""
MAX_BYTES = 400
"""Memory that may be taken for a token, besides its place in the cache: what was answered is kept until the end."""
FIRST = 5
"""Bins that are left out: there the cache still lies in the processor's own."""
IDLE = (False, True, False, True, False)
"""Whether the model does nothing in an answer."""


class Step(NamedTuple):
    """Seconds of one step's parts."""

    native: float
    engine: float
    text: float


class TimedTape:
    """A tape that knows how long it ran; `idle`, it leaves what the last run wrote."""

    def __init__(self, tape: Any) -> None:
        self._tape = tape
        self.seconds = 0.0
        self.idle = False

    def run(self, *arguments: Any) -> None:
        begin = time.thread_time()
        if not self.idle:
            self._tape.run(*arguments)
        self.seconds += time.thread_time() - begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)


def widened(folder: Path, num_positions: int) -> Path:
    """The built-in model, whose config says that it knows so many positions."""
    for path in hub.resolve("builtin").iterdir():
        if path.is_file() and path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((hub.resolve("builtin") / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = num_positions
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def anonymous() -> int:
    """Bytes of this process's own memory."""
    return int(psutil.Process().memory_full_info().uss)


def steps(core: EngineCore, tape: TimedTape, request: Request, tokenizer: Tokenizer) -> Iterator[tuple[Step, int]]:
    """Each step's parts and how many tokens there are after it."""
    state = RequestState(request, tokenizer)
    core.add(request)
    while core.has_work():
        tape.seconds = 0.0
        begin = time.thread_time()
        output = core.step()
        done = time.thread_time()
        finish = output.finished.get(request.request_id)
        token_ids = output.token_ids[0] if output.token_ids else []
        state.feed(Delta(0.0, 0.0, output.end_time, token_ids=token_ids, finish=finish))
        yield Step(tape.seconds, done - begin - tape.seconds, time.thread_time() - done), len(state.token_ids)


def least(seconds: list[float]) -> list[tuple[float, float]]:
    """(context, seconds) of each bin."""
    result = []
    for first in range(0, len(seconds) - BIN + 1, BIN):
        means = [statistics.fmean(seconds[at : at + WINDOW]) for at in range(first, first + BIN, WINDOW)]
        result.append((first + BIN / 2, min(means)))
    return result


def line(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """(seconds at 0, seconds a token of context, the largest distance from that line as a share of its last)."""
    slope, start = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return start, slope, max(abs(y - start - slope * x) for x, y in points) / (start + slope * points[-1][0])


def last_cache() -> int:
    """Bytes of the processor's largest cache."""
    file = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return int(file.read_text().strip().removesuffix("K")) * 1024 if file.is_file() else 32 << 20


def judge(parts: dict[str, list[float]], token_bytes: int, cache: int) -> tuple[dict[str, Any], list[str]]:
    """What the times say, and what is wrong with that. Times are seconds of each step, by part; `token_bytes` of keys
    and values are read for each token of the context, and `cache` bytes may be in the processor's."""
    points = {name: least(seconds)[FIRST:] for name, seconds in parts.items()}
    lines = {name: line(result) for name, result in points.items()}
    slope = lines["native"][1]
    others = sum(lines[name][1] for name in lines if name != "native")
    output: dict[str, Any] = {"native_us_at": {int(x): round(y * 1e6) for x, y in least(parts["native"])[::5]}}
    output |= {f"{name}_us": round(at * 1e6, 1) for name, (at, _, _) in lines.items()}
    output |= {f"{name}_us_per_1000_tokens": round(grows * 1e9, 2) for name, (_, grows, _) in lines.items()}
    output["host_share_of_growth"] = round(others / slope, 4)
    problems = []
    # Other things are in the cache too, and between the two it holds a part.
    places = {"in_cache": (0, cache / 3), "beyond_it": (cache, float("inf"))}
    slopes = {}
    for name, (least_bytes, most_bytes) in places.items():
        result = [(x, y) for x, y in points["native"] if least_bytes <= x * token_bytes <= most_bytes]
        if len(result) > 3:
            start, slopes[name], bend = line(result)
            output |= {f"us_per_1000_tokens_{name}": round(slopes[name] * 1e9, 2), f"bend_{name}": round(bend, 4)}
            if bend > MAX_BEND:
                problems.append(
                    f"{name}, a step is far from the line {start:.2e} s + {slopes[name]:.2e} s a token: {bend:.1%}"
                )
    if len(slopes) == 2 and slopes["beyond_it"] > MAX_DEARER * slopes["in_cache"]:
        problems.append(f"a token takes {slopes['in_cache']:.2e} s at first, and {slopes['beyond_it']:.2e} s later")
    if not slopes:
        problems.append("too few steps to tell a line")
    if others > MAX_HOST_SHARE * slope:
        problems.append(f"beside attention, a step grows by {others:.2e} s a token, attention by {slope:.2e} s")
    return output, problems


def run_campaign(num_tokens: int, seed: int) -> dict[str, Any]:
    """One answer of `num_tokens`: thrice to time the model, and twice to time all else."""
    params = SamplingParams(temperature=0.8, seed=seed, max_tokens=num_tokens, ignore_eos=True, stop=["\x00never"])
    times: dict[bool, list[list[Step]]] = {False: [], True: []}
    memory: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = widened(Path(place), num_tokens + 64)
        tokenizer = Tokenizer.load(folder)
        prompt = tokenizer.encode("Once upon a time")
        core = make_core(model=str(folder), num_gpu_blocks_override=num_tokens // 16 + 8, max_model_len=num_tokens + 64)
        with closing(core):
            program: Any = core.executor.program  # type: ignore[attr-defined]
            stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in program.cache.layers)
            stored //= program.num_blocks * program.block_size
            program.tape = tape = TimedTape(program.tape)
            counts = []
            for index, idle in enumerate(IDLE):
                request = Request(request_id=f"long{index}", prompt_token_ids=prompt, params=params)
                result = []
                num = 0
                tape.idle = False
                for step, num in steps(core, tape, request, tokenizer):
                    tape.idle = idle
                    result.append(step)
                    if not index and num % BIN == 0 and num > num_tokens // 5:
                        memory.append((num, anonymous()))
                times[idle].append(result)
                counts.append(num)
    parts = {
        name: [min(step[at] for step in same) for same in zip(*times[name != "native"], strict=True)]
        for at, name in enumerate(Step._fields)
    }
    output, problems = judge(parts, stored, last_cache())
    # The cache takes its memory as it is written.
    grows = statistics.linear_regression(*zip(*memory, strict=True)).slope - stored
    if set(counts) != {num_tokens}:
        problems.append(f"{counts} tokens came")
    if grows > MAX_BYTES:
        problems.append(f"memory grows by {grows:.0f} bytes a token")
    output |= {"tokens": num_tokens, "answers": len(counts), "bytes_a_token": round(grows, 1)}
    return output | {"violations": len(problems), "examples": problems}
