"""The composition root: numbers that contradict each other are refused."""

from __future__ import annotations

import pytest

from headrace.compose import build_engine
from headrace.config import EngineConfig
from headrace.errors import RequestError


def test_R_09_the_pool_holds_the_told_context_or_there_is_no_engine() -> None:
    with pytest.raises(RequestError, match=r"num_gpu_blocks_override: 5 .* at least 6, to hold one sequence"):
        build_engine(EngineConfig(num_gpu_blocks_override=5, max_model_len=81))
    core = build_engine(EngineConfig(num_gpu_blocks_override=5, max_model_len=80))
    assert core.info.max_model_len == core.scheduler.max_model_len == 80
    core.close()


def test_R_27_no_chunked_prefill_needs_a_budget_for_the_longest_prompt() -> None:
    with pytest.raises(RequestError, match=r"max_num_batched_tokens: 512 .* at least max_model_len"):
        build_engine(EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=512))
    core = build_engine(EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=2048))
    core.close()
