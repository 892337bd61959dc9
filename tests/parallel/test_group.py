"""The processes of a group: gathers, and what happens when one of them ends, stands still, or falls out of step."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import CONFIG, llama_tensors, write_llama
from tests.support.law import make_core
from tests.support.ranks import check_closing, check_end, check_out_of_step, check_standstill
from tests.support.shallow import shallow

from headrace import LLM, SamplingParams
from headrace.backends.native import require_native
from headrace.engine.core import EngineCore
from headrace.parallel.program import RankLostError
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.runner.faults import StepFaults


@pytest.fixture
def core() -> Iterator[EngineCore]:
    core = make_core(model=shallow(2), tensor_parallel_size=3, distributed_timeout=1.0)
    yield core
    core.close()


def test_a_rank_that_ends_takes_the_others_with_it_and_the_next_step_says_so(core: EngineCore) -> None:
    check_end(core, r"rank 1 ended \(SIGKILL\)")


def test_a_rank_that_stands_still_is_given_up_after_the_timeout(core: EngineCore) -> None:
    check_standstill(core, 2, "timeout")


def test_ranks_out_of_step_find_it_out(core: EngineCore) -> None:
    check_out_of_step(core)


def test_closing_ends_all_ranks() -> None:
    check_closing(make_core(model=shallow(1), tensor_parallel_size=2))


def test_offline_and_the_callers_thread_is_free_again_afterwards() -> None:
    before = os.sched_getaffinity(0)
    llm = LLM(shallow(1), tensor_parallel_size=2, num_gpu_blocks_override=64, max_model_len=512)
    prompts, params = ["Once upon", "The dog"], SamplingParams(max_tokens=4, temperature=0.0)
    texts = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    vectors = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
    if len(before) >= 2:
        assert len(os.sched_getaffinity(0)) < len(before)
    llm.close()
    assert os.sched_getaffinity(0) == before
    alone = LLM(shallow(1), num_gpu_blocks_override=64, max_model_len=512)
    assert texts == [output.outputs[0].token_ids for output in alone.generate(prompts, params, use_tqdm=False)]
    assert vectors == [output.outputs.embedding for output in alone.embed(prompts, use_tqdm=False)]
    alone.close()


def test_an_engine_without_its_ranks_says_why_it_ends() -> None:
    code = "from headrace.engine import child, logs; logs.set_up('warning'); child.end_without_ranks('rank 1 ended')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "rank 1 ended" in done.stderr


def test_a_lost_rank_is_no_requests_fault() -> None:
    assert StepFaults().reason(RankLostError("rank 1 ended"), 1) == ""


def test_a_model_that_can_not_be_loaded_is_an_error_of_its_own(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError):
        make_core(model=str(tmp_path), tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend": "torch_ref"}, "tensor_parallel_size: 2 is not allowed; it must be 1 on backend torch_ref"),
        ({"save_packed": True}, "save_packed"),
        ({"speculative_config": {"method": "early_exit", "num_speculative_tokens": 2}}, "speculative_config.method"),
        ({"tensor_parallel_size": 65}, "tensor_parallel_size: 65 is not allowed; it must be at most 64"),
    ],
)
def test_what_ranks_can_not_do_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_core(**({"model": shallow(1), "tensor_parallel_size": 2} | fields))


def test_more_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    """Each rank reads the config before it can refuse it, so the model has few heads."""
    sizes = {"num_attention_heads": 1, "num_key_value_heads": 1}
    write_llama(tmp_path, llama_tensors(CONFIG | sizes), **sizes)
    with pytest.raises(
        RequestError, match="tensor_parallel_size: 2 is not allowed; it must be at most 1, the attention"
    ):
        make_core(model=str(tmp_path), skip_tokenizer_init=True, tensor_parallel_size=2)


@pytest.mark.parametrize("field", [{"tensor_parallel_size": 0}, {"distributed_timeout": 0.0}])
def test_a_config_of_no_ranks_or_no_time_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(field))):
        EngineConfig(**field)


def test_the_memory_of_a_group_is_checked() -> None:
    ranks = require_native().Ranks
    memory = os.memfd_create("test")
    try:
        for rank, world, slot in ((2, 2, 4096), (0, 65, 4096), (0, 2, 100)):
            with pytest.raises(ValueError, match=r"ranks|whole pages"):
                ranks(memory, rank, world, slot, 1.0, False)
        with pytest.raises(ValueError, match="shorter"):
            ranks(memory, 0, 2, 4096, 1.0, False)
    finally:
        os.close(memory)
