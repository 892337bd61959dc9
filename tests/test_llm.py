"""`LLM`'s faces: shapes of its outputs, and what it says to callers who got something wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams, hub
from headrace.protocol.errors import CheckpointError, HeadraceError, RequestError
from headrace.protocol.step import Request

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    result = LLM("builtin", num_gpu_blocks_override=64)
    yield result
    result.close()


def test_a_chat_tells_the_prompt_that_it_became(llm: LLM) -> None:
    [output] = llm.chat(CHAT, SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt is not None
    assert "Hi" in output.prompt
    assert llm.get_tokenizer().encode(output.prompt, add_special_tokens=False) == output.prompt_token_ids


@pytest.mark.parametrize("prompts", [None, 5, [None], {"prompt": 5}, {"prompt_token_ids": "abc"}, [[5], "x", 3]])
def test_S_11_prompts_of_a_wrong_type_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="^prompt"):
        llm.generate(prompts, SamplingParams(max_tokens=1))


def test_S_11_other_arguments_of_a_wrong_type_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="^sampling_params: "):
        llm.generate("x", {"max_tokens": 1})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="^priority: 'a'"):
        llm.generate("x", priority=["a"])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="^priority: 1 .*--scheduling-policy priority"):
        llm.generate("x", priority=[1])


def test_one_bad_prompt_of_many_is_refused_before_any_work_is_done(llm: LLM) -> None:
    before = llm.get_metrics()
    with pytest.raises(RequestError, match="^prompt: 100000000 "):
        llm.generate([[5, 6], [7, 10**8]], SamplingParams(max_tokens=3), use_tqdm=False)
    after = llm.get_metrics()
    assert (after.num_running, after.num_waiting) == (0, 0)
    assert after.num_batched_tokens == before.num_batched_tokens
    [output] = llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


def test_a_request_is_checked_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Request] = []
    monkeypatch.setattr("headrace.engine.core.verify_model", lambda request, info: checked.append(request))
    llm.generate([[5, 6], [7]], SamplingParams(max_tokens=1, n=2), use_tqdm=False)
    assert len(checked) == len({request.request_id for request in checked}) == 4


def test_a_closed_llm_says_so() -> None:
    llm = LLM("builtin", num_gpu_blocks_override=64)
    llm.close()
    llm.close()
    with pytest.raises(HeadraceError, match="closed"):
        llm.generate("x")


def test_an_iteration_left_open_ends_quietly_after_close() -> None:
    """As when a reader of `headrace generate` closes the pipe: what is thrown there nobody can catch."""
    llm = LLM("builtin", num_gpu_blocks_override=64)
    outputs = llm.stream("x", SamplingParams(max_tokens=50, ignore_eos=True))
    next(outputs)
    llm.close()
    outputs.close()  # type: ignore[attr-defined]


def test_calls_without_parameters_take_those_of_the_model(tmp_path: Path) -> None:
    for file in hub.resolve("builtin").iterdir():
        (tmp_path / file.name).symlink_to(file)
    settings = {"system": "You are Mario.", "sampling": {"top_k": 1, "max_tokens": 5}}
    (tmp_path / "headrace.json").write_text(json.dumps(settings))
    result = LLM(str(tmp_path), num_gpu_blocks_override=64)
    try:
        defaults = result.get_default_sampling_params()
        # generation_config.json advises temperature and top_p.
        assert (defaults.top_k, defaults.max_tokens, defaults.temperature, defaults.top_p) == (1, 5, 0.7, 0.95)
        [plain], [same] = result.generate("Once upon"), result.generate("Once upon", defaults)
        assert plain.outputs[0].token_ids == same.outputs[0].token_ids
        assert len(plain.outputs[0].token_ids) == 5
        assert "You are Mario." in str(result.chat(CHAT)[0].prompt)
        [other] = result.chat([{"role": "system", "content": "You are Luigi."}, *CHAT])
        assert "Mario" not in str(other.prompt)
    finally:
        result.close()
    (tmp_path / "headrace.json").write_text(json.dumps({"sampling": {"top_k": -7}}))
    with pytest.raises(CheckpointError, match="top_k"):
        LLM(str(tmp_path))
