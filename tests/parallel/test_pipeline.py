"""Pipelines of processes: the determinism law over ranks that have layers, and what happens when one of them ends,
stands still, falls out of step or can not compute a call."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.campaigns.ranks import FORMS
from tests.e2e.test_law_speculation import varied
from tests.formats.gguf.models import convert
from tests.parallel import test_law
from tests.parallel.test_group import group_of, is_gone, until
from tests.parallel.test_law import few, k_form, requests_of
from tests.support import wrong_stages
from tests.support.harness import RandomModels
from tests.support.law import assert_same, make_core, make_requests, run
from tests.support.shallow import shallow
from tests.support.stored import mixed

from headrace import LLM, SamplingParams, models
from headrace.engine.core import EngineCore
from headrace.parallel import group, pipeline
from headrace.parallel.program import RankLostError
from headrace.protocol.errors import CheckpointError, RequestError

bits = functools.partial(test_law.bits, field="pipeline_parallel_size")
check = functools.partial(test_law.check, field="pipeline_parallel_size")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_stages_change_no_bit(ranks: int, form: str) -> None:
    check(list(few()), ranks, model=shallow(3), **FORMS[form])


def test_k_quants(tmp_path: Path) -> None:
    check(list(few()), 2, model=str(convert(Path(shallow(2)), tmp_path / "k.gguf", k_form)))


def test_inputs_in_an_order_of_their_own(tmp_path: Path) -> None:
    check(list(few()), 2, model=str(mixed(Path(shallow(2)), tmp_path / "mixed")))


@pytest.fixture(scope="module")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> RandomModels:
    return RandomModels(tmp_path_factory.mktemp("models"))


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
    requests = [msgspec.structs.replace(r, params=varied(r.params, i)) for i, r in enumerate(make_requests()[::5])]
    more = {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 70, "max_model_len": 512, "block_size": 8}
    spec = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    alone = make_core(model=shallow(2), enable_prefix_caching=False)
    expected = run(alone, requests)
    alone.close()
    core = make_core(model=shallow(2), pipeline_parallel_size=2, speculative_config=spec, **more)
    assert_same(run(core, requests, preempt_every=5), expected)
    stats = core.stats()
    assert stats.num_preemptions > 3
    assert stats.num_draft_tokens > 0
    core.close()


def test_each_stage_reads_its_matrices_of_a_packed_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = shutil.copytree(shallow(3), tmp_path / "model")
    form = {"model": str(path), "quantization": "int4"}
    alone = bits(list(few()), save_packed=True, **form)
    assert len(list(path.glob("*.packed"))) == 1
    caplog.clear()
    assert_same(bits(list(few()), 3, **form), alone)
    assert not [record for record in caplog.records if "is not used" in record.getMessage()]


def test_offline_with_hidden_states_and_prompt_logprobs() -> None:
    prompts = ["Once upon", "The dog ran over the hill and"]
    params, result = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=2), []
    for ranks in (1, 2):
        llm = LLM(shallow(2), pipeline_parallel_size=ranks, num_gpu_blocks_override=64, max_model_len=512)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        vectors = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
        result.append(([(o.outputs[0].token_ids, repr(o.prompt_logprobs)) for o in outputs], vectors))
        llm.close()
    assert result[0] == result[1]


@pytest.mark.parametrize("mode", ["rounded", "reverse"])
def test_control_what_breaks_the_law_is_noticed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden rows in bfloat16 between the stages, and pieces in the wrong order."""
    alone = bits(list(few()), model=shallow(2))
    program = (sys.executable, "-m", "tests.support.wrong_stages")
    monkeypatch.setattr(group, "COMMAND", (*program, "right"))
    assert_same(bits(list(few()), 2, model=shallow(2)), alone)
    monkeypatch.setattr(group, "COMMAND", (*program, mode))
    wrong_stages.patch(mode, monkeypatch.setattr)
    with pytest.raises(AssertionError, match="differ"):
        assert_same(bits(list(few()), 2, model=shallow(2)), alone)


# Faults.


@pytest.fixture
def core() -> Iterator[EngineCore]:
    core = make_core(model=shallow(3), pipeline_parallel_size=3, distributed_timeout=1.0)
    yield core
    core.close()


def test_a_stage_that_ends_takes_the_others_with_it_and_the_next_step_says_so(core: EngineCore) -> None:
    requests = make_requests()[:2]
    run(core, requests[:1])
    pids = group_of(core).pids
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: all(map(is_gone, pids)))
    core.add(requests[1])
    with pytest.raises(RankLostError, match=r"rank 1 ended \(SIGKILL\)"):
        core.step()


@pytest.mark.parametrize("rank", [1, 2])
def test_a_stage_that_stands_still_is_given_up_after_the_timeout(rank: int, core: EngineCore) -> None:
    pids = group_of(core).pids
    os.kill(pids[rank - 1], signal.SIGSTOP)
    core.add(make_requests()[0])
    with pytest.raises(RankLostError, match=f"timeout: rank {rank} gave no rows for 1 s"):
        core.step()
    until(lambda: all(map(is_gone, pids)))


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
    core = make_core(model=shallow(2), pipeline_parallel_size=2)
    pids = group_of(core).pids
    core.close()
    core.close()
    assert all(map(is_gone, pids))


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
