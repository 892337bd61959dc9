"""Steps for a Runner over the tiny llama of `checkpoints`, written by hand, and a model of which one token is sick."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.checkpoints import llama_tensors, write_llama

from headrace.engine.library.load import build_runner
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import ScheduledBatch
from headrace.runner.runner import Runner

GREEDY = SamplingParams(temperature=0.0, max_tokens=100, seed=1, logprobs=1)
ASKS = SamplingParams(temperature=0.0, max_tokens=100, seed=1, prompt_logprobs=2)
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


SICK = 49
"""The token whose embedding is replaced in `sick`."""


def make_runner(directory: Path, backend: str, **options: Any) -> Runner:
    fields: dict[str, Any] = {"num_gpu_blocks_override": 40, "block_size": 4} | options
    return build_runner(EngineConfig(model=str(directory), backend=backend, **fields))[0]


def sick(tmp_path: Path, backend: str, value: float) -> Runner:
    """The same model, but for the embedding of one token."""
    tensors = llama_tensors()
    tensors["model.embed_tokens.weight"][SICK] = value
    return make_runner(write_llama(tmp_path, tensors), backend)


def batch_of(*chunks: tuple[int, list[int], list[int]], **columns: Any) -> ScheduledBatch:
    """Chunks of (start, token ids, block table)."""
    fields: dict[str, Any] = {
        "step_id": 7,
        "seq_ids": list(range(len(chunks))),
        "starts": [start for start, _, _ in chunks],
        "lens": [len(ids) for _, ids, _ in chunks],
        "token_ids": [t for _, ids, _ in chunks for t in ids],
        "block_tables": [table for _, _, table in chunks],
        "samples": [True] * len(chunks),
        "params": [GREEDY] * len(chunks),
        "num_prompts": [start + len(ids) for start, ids, _ in chunks],
        "copies": [],
    }
    return ScheduledBatch(**(fields | columns))


A, B, C = list(range(5)), list(range(20, 25)), list(range(10, 15))
