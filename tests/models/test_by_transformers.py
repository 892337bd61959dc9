"""Models that transformers computes: right, the same bits in every company, and refused where that cannot be."""

from __future__ import annotations

import importlib.util
import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import foreign_types
from tests.support.foreign_types import check, open_llm, prompts, save_tiny, scores
from tests.support.harness import RandomModels

from headrace import transformers_models
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.transformers_models import model, pieces
from headrace.transformers_models.memory import Plan, UnknownMemoryError, leaves

TYPES = ("gpt_neox", "bloom", "mpt", "rwkv", "mamba")
"""Rotary positions, ALiBi by two ways, and two kinds of states; headrace has a file for none."""


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "neox"
    save_tiny("gpt_neox", directory)
    return directory


@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_is_right_in_every_company(model_type: str, tmp_path: Path) -> None:
    assert check(model_type, tmp_path) == foreign_types.Outcome(model_type, "right")


def test_control_another_weight_is_wrong(neox: Path) -> None:
    """Negative control."""
    from transformers import GPTNeoXForCausalLM

    theirs = GPTNeoXForCausalLM.from_pretrained(neox, attn_implementation="eager").eval()
    texts = prompts(199)
    with closing(open_llm(neox)) as llm:
        rows = scores(llm, texts, of_prompts=True)
    assert not foreign_types.compare(theirs, texts, rows)
    with torch.no_grad():
        theirs.gpt_neox.layers[1].mlp.dense_4h_to_h.weight[0, 0] += 0.1
    assert "differs" in foreign_types.compare(theirs, texts, rows)


def test_auto_takes_transformers_for_a_type_without_a_file_and_says_so_once(
    neox: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), closing(open_llm(neox, model_impl="auto")) as llm:
        assert llm.core.info.backend.startswith("transformers-")
    lines = [record.getMessage() for record in caplog.records if "one row at a time" in record.getMessage()]
    assert len(lines) == 1
    assert "headrace has no model file for model_type gpt_neox" in lines[0]


def test_auto_takes_the_model_file_where_there_is_one(tmp_path: Path) -> None:
    directory = RandomModels(tmp_path)["llama"]
    texts, answers = prompts(199), []
    for impl in ("auto", "headrace", "transformers"):
        with closing(open_llm(directory, model_impl=impl)) as llm:
            assert llm.core.info.backend.startswith("transformers") == (impl == "transformers")
            answers.append([row.answer for row in scores(llm, texts)])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantised_layers_keep_the_law(neox: Path, form: str) -> None:
    texts = prompts(199)
    with closing(open_llm(neox)) as llm:
        plain = scores(llm, texts, of_prompts=True)
    with closing(open_llm(neox, quantization=form)) as llm:
        rows = scores(llm, texts, of_prompts=True)
        alone = [scores(llm, [text], of_prompts=True)[0] for text in texts]
    assert rows == alone
    apart = max(abs(a - b) for a, b in zip(plain[0].logprobs, rows[0].logprobs, strict=False))
    assert 0 < apart < 3


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"backend": "cpu"}, "backend", "auto or torch_ref"),
        ({"enable_lora": True}, "enable_lora", "left out"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size", "1 for a model that transformers computes"),
        ({"speculative_config": {"method": "mtp"}}, "speculative_config.method", "one of ngram, suffix"),
        ({"model_impl": "other"}, "model_impl", "one of auto, headrace, transformers"),
    ],
)
def test_settings_that_the_path_lacks_are_refused(neox: Path, changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        open_llm(neox, **changes)
    assert field in str(caught.value)


def test_threads_change_no_bit(neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of the tiny model are cut, as those of a large one are."""
    monkeypatch.setattr(pieces, "PIECE", 1024)
    texts, rows = prompts(199), []
    for num_threads in (1, 2):
        with closing(open_llm(neox, num_threads=num_threads)) as llm:
            rows.append(scores(llm, texts))
    assert rows[0] == rows[1]


def test_steps_are_as_short_as_the_trial_says(neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "MAX_ROWS", 3)
    texts = prompts(199)
    with closing(open_llm(neox)) as llm:
        assert llm.core.info.max_num_batched_tokens == 3
        short = scores(llm, texts)
    monkeypatch.setattr(model, "MAX_ROWS", 512)
    with closing(open_llm(neox, max_num_batched_tokens=200, enable_chunked_prefill=False)) as llm:
        assert llm.core.info.max_num_batched_tokens == 200
        assert scores(llm, texts) == short


def test_speculation_by_tokens_changes_nothing(neox: Path) -> None:
    texts = prompts(199)
    answers = []
    for spec in (None, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}):
        with closing(open_llm(neox, speculative_config=spec)) as llm:
            answers.append([row.logprobs for row in scores(llm, texts)])
    assert answers[0] == answers[1]


def test_without_transformers_the_error_names_the_extra(neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_models, "is_installed", lambda: False)
    with pytest.raises(CheckpointError, match=r"headrace\[transformers\]"):
        open_llm(neox, model_impl="auto")
    with pytest.raises(RequestError, match=r"headrace\[transformers\]"):
        open_llm(neox)
    with pytest.raises(CheckpointError, match="'gpt_neox' is not supported"):
        open_llm(neox, model_impl="headrace")


def changed(source: Path, target: Path, **values: Any) -> Path:
    """A copy of a folder with other values in its config.json."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | values))
    return target


def test_S_04_a_config_brings_no_code(neox: Path, tmp_path: Path) -> None:
    directory = changed(
        neox, tmp_path / "m", auto_map={"AutoModelForCausalLM": "evil.Evil"}, attn_implementation="evil/kernels",
        _attn_implementation="evil/kernels", experts_implementation="evil/kernels",
    )  # fmt: skip
    (directory / "evil.py").write_text("raise SystemExit(7)")
    with closing(open_llm(directory)) as llm:
        assert scores(llm, [[11, 12, 13]])[0].answer


def test_S_04_kernels_of_the_hub_are_switched_off(neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import hub_kernels

    monkeypatch.setattr(hub_kernels, "_kernels_enabled", True)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find("json" if name == "kernels" else name))
    with closing(open_llm(neox)):
        assert not hub_kernels._kernels_enabled
    monkeypatch.delattr(hub_kernels, "_kernels_enabled")
    with pytest.raises(CheckpointError, match="uninstall the package kernels"):
        open_llm(neox)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"vocab_size": 2**28}, "describes .* weights, and the files hold"),
        ({"num_hidden_layers": 3}, "describes|lacks"),
        ({"num_hidden_layers": 10**9}, "expected at most 4096"),
        ({"hidden_act": "no_such"}, "transformers cannot load this gpt_neox"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"model_type": "no_such"}, "no causal model of model_type 'no_such'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(neox: Path, tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_llm(changed(neox, tmp_path / "m", **values))


def test_a_type_without_a_memory_is_refused_with_the_reason(tmp_path: Path) -> None:
    save_tiny("openai-gpt", tmp_path)
    with pytest.raises(CheckpointError, match="OpenAIGPTLMHeadModel cannot run token by token: it keeps no memory"):
        open_llm(tmp_path)


def test_a_type_that_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    assert check("reformer", tmp_path) == foreign_types.Outcome(
        "reformer", "refused", f"model_type reformer cannot run here: {transformers_models.REFUSED['reformer']}"
    )


def test_pickled_weights_are_refused(neox: Path, tmp_path: Path) -> None:
    directory = changed(neox, tmp_path / "m")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="a pickle"):
        open_llm(directory)


def test_a_plan_tells_positions_states_and_counts() -> None:
    def memory(num: int) -> dict[str, Any]:
        return {"keys": torch.zeros(1, 2, num, 4), "state": torch.full((3, 5), float(num)), "num": num, "size": 7}

    plan = Plan(memory(4), memory(5), 5)
    assert (list(plan.by_position), list(plan.states)) == ([("keys",)], [("state",)])
    rebuilt = leaves(plan.rebuilt(9, {("keys",): torch.zeros(1, 2, 9, 4), ("state",): torch.zeros(3, 5)}))
    assert (rebuilt[("num",)], rebuilt[("size",)], rebuilt[("keys",)].shape[2]) == (9, 7, 9)


@pytest.mark.parametrize(
    ("earlier", "later", "words"),
    [
        ({"a": torch.zeros(1, 4, 2)}, {"a": torch.zeros(1, 6, 2)}, "a grows from"),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.zeros(2)}, "b comes and goes"),
        ({"a": torch.zeros(2), "n": 3}, {"a": torch.zeros(2), "n": 5}, "n is 3, and 5"),
        ({"a": torch.zeros(2, dtype=torch.int64)}, {"a": torch.zeros(2, dtype=torch.int64)}, "a has numbers of"),
        ({"n": 1}, {"n": 1}, "nothing is carried"),
    ],
)
def test_a_memory_of_another_kind_is_refused(earlier: Any, later: Any, words: str) -> None:
    with pytest.raises(UnknownMemoryError, match=words):
        Plan(earlier, later, 5)
