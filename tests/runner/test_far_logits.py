"""Rows of logits that lie on a device: the runner fetches those whose numbers are needed, and no others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.checkpoints import write_llama
from tests.support.steps import ASKS, IDS, A, B, C, batch_of, make_runner

from headrace.backends.step import Chunks, Draw, HostLogits
from headrace.protocol.params import SamplingParams
from headrace.runner.runner import Runner
from headrace.sampling.filters import Cut
from headrace.sampling.sampler import Sampler


class FarLogits:
    """Logits as a device gives them: what is fetched is noted and copied; the rest can not be read."""

    on_host = False

    def __init__(self, logits: HostLogits, fetched: list[list[int]]) -> None:
        self.finite, self.best = logits.finite, logits.best
        self._logits, self._fetched = logits, fetched

    def fetch(self, indices: list[int] | None = None) -> NDArray[np.float32]:
        indices = list(range(len(self.best))) if indices is None else indices
        self._fetched.append(indices)
        return self._logits.rows[indices]

    def draw(self, indices: list[int], draws: list[Draw]) -> list[int]:
        """This device draws nothing."""
        return [-1] * len(indices)


def moved_away(runner: Runner) -> list[list[int]]:
    """Put the runner's logits on a device; return the list of what will be fetched."""
    program: Any = runner.program
    forward, logits = program.forward, program.logits
    fetched: list[list[int]] = []

    def far_forward(chunks: Chunks, rows: list[int]) -> Any:
        finite, result = forward(chunks, rows)
        return finite, FarLogits(result, fetched)

    program.forward = far_forward
    program.logits = lambda rows: FarLogits(logits(rows), fetched)
    return fetched


GREEDY = SamplingParams(temperature=0.0)
PARAMS: dict[str, tuple[SamplingParams, list[int]]] = {
    "greedy": (GREEDY, []),
    "log-probabilities": (SamplingParams(temperature=0.0, logprobs=2), [1]),
    "a draw": (SamplingParams(temperature=1.0, seed=7), [1]),
    "a bias": (SamplingParams(temperature=0.0, logit_bias={5: 100.0}), [1]),
    "an end that is banned": (SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=[2]), [1]),
    "a replayed answer": (SamplingParams(temperature=0.0, trace_decode_token_ids=[3, 4]), [1]),
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("backend", ["cpu", "torch_ref"])
def test_rows_are_fetched_that_are_needed(name: str, backend: str, tmp_path: Path) -> None:
    params, needed = PARAMS[name]
    near, far = (make_runner(write_llama(tmp_path), backend) for _ in range(2))
    fetched = moved_away(far)
    step = batch_of((0, IDS, A), (0, IDS[:7], B), (0, IDS[:3], C), params=[GREEDY, params, GREEDY])
    assert far.run(step) == near.run(step)
    assert fetched == ([needed] if needed else [])


def test_prompt_rows_are_fetched_for_their_log_probabilities(tmp_path: Path) -> None:
    near, far = (make_runner(write_llama(tmp_path), "cpu") for _ in range(2))
    fetched = moved_away(far)
    step = batch_of((0, IDS, A), params=[ASKS], samples=[False])
    assert far.run(step) == near.run(step)
    assert sum(map(len, fetched)) == len(IDS) - 1
    assert math.isfinite(far.run(step).column("prompt_logprobs")[0][0].logprob)


def test_control_a_bias_that_is_forgotten_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = (make_runner(write_llama(tmp_path), "cpu") for _ in range(2))
    moved_away(far)
    monkeypatch.setattr(Sampler, "cut_of", lambda self, row: Cut(temperature=0.0))
    step = batch_of((0, IDS, A), params=[PARAMS["a bias"][0]])
    assert far.run(step) != near.run(step)


def test_rows_that_follow_each_other_are_not_copied() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    logits = HostLogits(rows, [True] * 4, [2] * 4)
    for indices in (None, [0, 1], [2], [1, 2, 3], []):
        assert np.shares_memory(logits.fetch(indices), rows) == (indices != [])
        assert (logits.fetch(indices) == rows[range(4) if indices is None else indices]).all()
    assert (logits.fetch([3, 0]) == rows[[3, 0]]).all()
