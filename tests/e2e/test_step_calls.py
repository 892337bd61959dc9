"""How much Python runs in a decode step of the native backend: function calls, counted, so that no clock is needed."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from tests.support.law import make_core

from headrace.engine.core import EngineCore
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request

MOST = 400


def count_calls(core: EngineCore, num_steps: int) -> tuple[Counter[str], Counter[str]]:
    """Calls of Python functions (and resumed generators), and of functions written in C, of all steps together."""
    python: Counter[str] = Counter()
    c: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            python[f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_qualname}"] += 1
        elif event == "c_call":
            c[arg.__qualname__] += 1

    before = sys.getprofile()
    for _ in range(num_steps):
        sys.setprofile(profile)
        try:
            core.step()
        finally:
            sys.setprofile(before)
    return python, c


def decoding(num_sequences: int, temperature: float = 0.0) -> EngineCore:
    """An engine whose sequences are all in mid-answer."""
    core = make_core()
    for i in range(num_sequences):
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=100, ignore_eos=True)
        core.add(Request(request_id=str(i), prompt_token_ids=[0, 518, 485, 264, 428, 17, 411 + i], params=params))
    for _ in range(5):
        core.step()
    return core


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_sequences", [1, 8])
def test_a_decode_step_calls_few_python_functions(num_sequences: int, temperature: float) -> None:
    core = decoding(num_sequences, temperature)
    num_steps = 32  # two blocks, so that the cost of new blocks is in it
    python, c = count_calls(core, num_steps)
    core.close()
    output = f"{python.total() / num_steps:.1f} Python and {c.total() / num_steps:.1f} C calls a step"
    assert python.total() / num_steps <= MOST, (output, python.most_common(12))


def test_control_calls_for_each_layer_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tape every operator is a call, and each is several."""
    core = decoding(1)
    program = core.executor.program  # type: ignore[attr-defined]
    nodes, right = program.tape.nodes, program.tape.run_range

    def run(dims: list[int], num_threads: int) -> None:
        for node in nodes:
            for value in node.fields.values():
                program.tape.resolve(value)
            right(node.index, node.index + 1, dims, num_threads)

    monkeypatch.setattr(program.tape, "run", run)
    python, _ = count_calls(core, 8)
    core.close()
    assert python.total() / 8 > MOST
