"""Pipelines of processes: the determinism law over ranks that have layers, and what happens when one of them ends,
stands still, falls out of step or can not compute a call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.campaigns.ranks import FORMS
from tests.formats.gguf.models import convert
from tests.parallel.test_law import k_form
from tests.support import ranks, wrong_stages
from tests.support.harness import RandomModels
from tests.support.law import assert_same, make_core, make_requests, run
from tests.support.ranks import (
    PP,
    check_closing,
    check_end,
    check_in_a_small_cache,
    check_of_a_packed_file,
    check_standstill,
    few,
    group_of,
    requests_of,
)  # fmt: skip
from tests.support.shallow import shallow
from tests.support.stored import mixed

from headrace import LLM, SamplingParams, models
from headrace.engine.core import EngineCore
from headrace.parallel import group, pipeline
from headrace.parallel.program import RankLostError
from headrace.protocol.errors import CheckpointError, RequestError

bits = functools.partial(ranks.bits, field=PP)
check = functools.partial(ranks.check, field=PP)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num", [2, 3])
def test_stages_change_no_bit(num: int, form: str) -> None:
    check(list(few()), num, model=shallow(3), **FORMS[form])


def test_k_quants(tmp_path: Path) -> None:
    check(list(few()), 2, model=str(convert(Path(shallow(2)), tmp_path / "k.gguf", k_form)))


def test_inputs_in_an_order_of_their_own(tmp_path: Path) -> None:
    check(list(few()), 2, model=str(mixed(Path(shallow(2)), tmp_path / "mixed")))


@pytest.mark.parametrize("name", ["falcon_h1", "gpt_oss", "nemotron_h", "qwen3_5_moe_text"])
def test_states_windows_and_experts(name: str, random_models: RandomModels) -> None:
    """Cached prefixes, whose states are kept, and windows whose blocks are given back; chunks and preemption too."""
    form = {"model": str(random_models[name]), "skip_tokenizer_init": True, "max_num_seqs": 8}
    requests = requests_of(models.find(name).TINY["vocab_size"])
    expected = bits(requests, **form)
    assert_same(bits(requests, 2, max_num_batched_tokens=48, **form), expected)
    core = make_core(pipeline_parallel_size=2, **form)
    assert_same(run(core, requests, preempt_every=4), expected)
    core.close()


def test_with_speculation_grammars_penalties_chunks_and_a_small_cache() -> None:
    check_in_a_small_cache(PP)


def test_each_stage_reads_its_matrices_of_a_packed_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_of_a_packed_file(shallow(3), 3, PP, "int4", tmp_path, caplog)


def test_offline_with_hidden_states_and_prompt_logprobs() -> None:
    prompts = ["Once upon", "The dog ran over the hill and"]
    params, result = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=2), []
    for num in (1, 2):
        llm = LLM(shallow(2), pipeline_parallel_size=num, num_gpu_blocks_override=64, max_model_len=512)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        vectors = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
        result.append(([(o.outputs[0].token_ids, repr(o.prompt_logprobs)) for o in outputs], vectors))
        llm.close()
    assert result[0] == result[1]


WRONG_STAGES = (sys.executable, "-m", "tests.support.wrong_stages")


@pytest.mark.parametrize("mode", ["rounded", "reverse"])
def test_control_what_breaks_the_law_is_noticed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden rows in bfloat16 between the stages, and pieces in the wrong order."""
    expected = ranks.alone()
    monkeypatch.setattr(group, "COMMAND", (*WRONG_STAGES, mode))
    wrong_stages.patch(mode, monkeypatch.setattr)
    with pytest.raises(AssertionError, match="differ"):
        assert_same(bits(list(few()), 2, model=shallow(2)), expected)


def test_the_program_of_the_control_breaks_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "COMMAND", (*WRONG_STAGES, "right"))
    assert_same(bits(list(few()), 2, model=shallow(2)), ranks.alone())


# Faults.


@pytest.fixture
def core() -> Iterator[EngineCore]:
    core = make_core(model=shallow(3), pipeline_parallel_size=3, distributed_timeout=1.0)
    yield core
    core.close()


def test_a_stage_that_ends_takes_the_others_with_it_and_the_next_step_says_so(core: EngineCore) -> None:
    check_end(core, r"rank 1 ended \(SIGKILL\)")


@pytest.mark.parametrize("rank", [1, 2])
def test_a_stage_that_stands_still_is_given_up_after_the_timeout(rank: int, core: EngineCore) -> None:
    check_standstill(core, rank, f"timeout: rank {rank} gave no rows for 1 s")


def test_stages_out_of_step_find_it_out(core: EngineCore) -> None:
    group = group_of(core)
    core.add(make_requests()[0])
    send = group.send

    def send_another(call: Any) -> None:
        send(msgspec.structs.replace(call, call_id=call.call_id + 1))

    group.send = send_another
    with pytest.raises(RankLostError, match="out of step"):
        core.step()


def test_a_call_that_a_stage_can_not_compute_ends_its_request_alone(core: EngineCore) -> None:
    """Rank 1 fails for one token: the request that has it fails, and the others go on with their bits."""
    requests = make_requests()[::18]
    expected = run(core, requests)
    group = group_of(core)
    send, bad = group.send, requests[1].prompt_token_ids[:2]
    assert [r.prompt_token_ids[:2] for r in requests].count(bad) == 1

    def send_nonsense(call: Any) -> None:
        if isinstance(call, pipeline.Forward) and bad in [ids[:2] for ids in call.token_ids]:
            # A table that has no block: fills fail there, and on rank 0 they would not.
            call = msgspec.structs.replace(call, tables=[[] for _ in call.tables])
        send(call)

    group.send = send_nonsense
    again = [msgspec.structs.replace(r, request_id=f"again {r.request_id}", cache_salt="other") for r in requests]
    for request in again:
        core.add(request)
    finished: dict[str, Any] = {}
    while core.has_work():
        finished |= core.step().finished
    reasons = {name: finish.reason for name, finish in finished.items()}
    assert reasons.pop(again[1].request_id) == "error", reasons
    assert set(reasons.values()) == {"length"}
    group.send = send
    assert_same(run(core, requests), expected)


def test_closing_ends_all_stages() -> None:
    check_closing(make_core(model=shallow(2), pipeline_parallel_size=2))


def test_a_model_that_can_not_be_loaded_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        make_core(model=str(tmp_path), pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend": "torch_ref"}, "pipeline_parallel_size: 2 is not allowed; it must be 1 on backend torch_ref"),
        ({"tensor_parallel_size": 2}, "pipeline_parallel_size: 2 .* 1 with tensor_parallel_size 2"),
        ({"save_packed": True}, "save_packed"),
        ({"speculative_config": {"method": "early_exit", "num_speculative_tokens": 2}}, "speculative_config.method"),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size: 3 .* at most 2, the 2 layers of the model"),
        ({"pipeline_parallel_size": 65}, "pipeline_parallel_size: 65 is not allowed; it must be at most 64"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size"),
        ({"quantization": None, "activations": "int8"}, "activations"),
    ],
)
def test_what_stages_can_not_do_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_core(**({"model": shallow(2), "pipeline_parallel_size": 2} | fields))
