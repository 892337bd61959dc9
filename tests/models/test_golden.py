"""Real trained models against logits worked out in float64 by an independent program (shared data, if it is there)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.support.harness import BACKENDS, DATA, follow, load, make_batch, run, scattered_tables

MODELS = {
    "TinyStories-656K": (DATA / "models" / "TinyStories-656K", DATA / "models" / "TinyStories-656K" / "golden.json"),
    "stories260K": (DATA / "models" / "derived" / "stories260K-hf", DATA / "models" / "stories260K" / "golden.json"),
}
pytestmark = pytest.mark.skipif(not (DATA / "models").is_dir(), reason="no shared data beside the repository")


def cases(name: str) -> Any:
    return json.loads(MODELS[name][1].read_text())["cases"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_golden_logits_and_logprobs(name: str, backend: str) -> None:
    runner = load(MODELS[name][0], backend=backend, dtype="float32")
    for case in cases(name):
        logits = follow(runner, case["prompt_ids"], [len(case["prompt_ids"])])
        expected = torch.tensor(case["last_logits"], dtype=torch.float64)
        assert (logits[-1].double() - expected).abs().max() <= 1e-4, case["prompt"]
        logprobs = logits.double().log_softmax(-1)
        for i, value in enumerate(case["prompt_logprobs"]):
            if value is not None:
                assert logprobs[i - 1, case["prompt_ids"][i]].item() == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_golden_greedy_continuations_of_all_prompts_at_once(name: str, backend: str) -> None:
    runner = load(MODELS[name][0], backend=backend, dtype="float32")
    output = cases(name)
    known = [list(case["prompt_ids"]) for case in output]
    done = [0] * len(output)
    lengths = [len(k) + len(case["greedy_ids"]) for k, case in zip(known, output, strict=True)]
    tables = scattered_tables(lengths, runner.block_size, runner.program.num_blocks, seed=3)
    while alive := [i for i in range(len(output)) if len(known[i]) < lengths[i]]:
        batch = make_batch([(i, done[i], known[i][done[i] :], tables[i]) for i in alive])
        for i, token_id in zip(alive, run(runner, batch).token_ids, strict=True):
            done[i] = len(known[i])
            known[i].append(token_id)
    for tokens, case in zip(known, output, strict=True):
        assert tokens[len(case["prompt_ids"]) :] == case["greedy_ids"], case["prompt"]
