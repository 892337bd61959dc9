"""Values in place of config.json's: the same as a changed file, to the bit; and weights that are quantised while
loading."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import CONFIG, write_llama

from headrace import LLM, SamplingParams
from headrace.checkpoint.overrides import overridden
from headrace.engine.library import load
from headrace.models.config import ModelConfig
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.schemes import F8_SCHEMES, SCHEMES

PROMPT = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]


def bits(model: Path | str, **config: Any) -> list[Any]:
    llm = LLM(str(model), skip_tokenizer_init=True, num_threads=1, num_gpu_blocks_override=32, **config)
    try:
        params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True, seed=1)
        [output] = llm.generate(PROMPT, params, use_tqdm=False)
        answer = output.outputs[0]
        return [answer.token_ids, answer.cumulative_logprob, llm.core.info.max_model_len]
    finally:
        llm.close()


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "yarn": ({"rope_scaling": YARN}, {"rope_scaling": YARN}),
    "theta": ({"rope_theta": 500.0}, {"rope_theta": 500.0}),
    "linear": ({"rope_scaling": {"factor": 4.0}}, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "norm": ({"rms_norm_eps": 0.1}, {"rms_norm_eps": 0.1}),
    "both": ({"rope_parameters": {"rope_theta": 99.0} | YARN}, {"rope_scaling": YARN, "rope_theta": 99.0}),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("layout", ["old", "new"])
def test_an_override_is_like_a_changed_file(tmp_path: Path, name: str, layout: str) -> None:
    overrides, changed = CHANGES[name]
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}} if layout == "new" else {}
    plain, other = write_llama(tmp_path / "a", **new), write_llama(tmp_path / "b", **changed)
    by_override = bits(plain, hf_overrides=overrides)
    assert by_override == bits(other)
    assert by_override != bits(plain), "it does change the bits"


def test_keywords_of_vllms_set_them(tmp_path: Path) -> None:
    plain = write_llama(tmp_path / "a")
    assert bits(plain, rope_scaling=YARN) == bits(plain, hf_overrides={"rope_scaling": YARN})
    assert bits(plain, rope_theta=500.0) == bits(plain, hf_overrides={"rope_theta": 500.0})


def test_packed_files_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = write_llama(tmp_path / "a")
    with caplog.at_level(logging.WARNING, "headrace"):
        bits(plain, hf_overrides={"rms_norm_eps": 0.1}, quantization="int8", save_packed=True)
    assert "save_packed has no effect with hf_overrides" in caplog.text
    assert sorted(path.name for path in plain.iterdir()) == ["config.json", "model.safetensors"]


def test_the_layers_of_full_attention_are_meant() -> None:
    kinds = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    changed = overridden({"rope_parameters": kinds}, {"rope_scaling": {"factor": 8.0}})
    assert changed["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_theta": 1e4},
    }


def test_null_takes_a_scaling_away_and_a_type_stays() -> None:
    values = CONFIG | {"rope_scaling": YARN}
    assert ModelConfig(overridden(values, {"rope_scaling": None})).rope.values["rope_type"] == "default"
    scaling = ModelConfig(overridden(values, {"rope_scaling": {"factor": 4.0}})).rope.values
    assert (scaling["rope_type"], scaling["factor"]) == ("yarn", 4.0)
    nested = overridden({"num_experts_per_tok": 8}, {"text_config": {"num_experts_per_tok": 4}})
    assert nested["num_experts_per_tok"] == 4
    with pytest.raises(CheckpointError, match="hf_overrides.rope_scaling is 5, expected an object"):
        overridden(values, {"rope_scaling": 5})


def test_names_without_effect_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headrace"):
        overridden(CONFIG, {"torch_dtype": "float16", "rmsnorm_eps": 1})
    assert "hf_overrides.torch_dtype has no effect here" in caplog.text
    assert "hf_overrides.rmsnorm_eps: config.json has no such value" in caplog.text


@pytest.mark.parametrize(
    ("name", "form"), [("fp8", "fp8-channel"), ("bitsandbytes", "nf4"), ("fp8_per_block", "fp8-g128")]
)
def test_plain_weights_are_quantised_while_loading(
    tmp_path: Path, name: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = write_llama(tmp_path / "a", hidden_size=64, intermediate_size=64, tensors=_wide())
    with caplog.at_level(logging.INFO, "headrace"):
        quantised = bits(plain, quantization=name)
    assert f"{name} becomes {form}, the nearest form here" in caplog.text
    assert quantised == bits(plain, quantization=form)
    assert load.as_stored(EngineConfig(quantization=name), name, ()).quantization is None, "a checkpoint's own method"
    with pytest.raises(RequestError, match=f"quantization: '{name}' .* the checkpoint's own method is awq"):
        load.as_stored(EngineConfig(quantization=name), "awq", ())


@pytest.mark.parametrize(("name", "form"), [("fp8", "int8-channel"), ("fp8_per_block", "int8-g128")])
def test_a_backend_without_floats_of_8_bits_takes_whole_numbers(
    name: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(quantization=name)
    with caplog.at_level(logging.WARNING, "headrace"):
        assert load.as_stored(config, "none", SCHEMES | F8_SCHEMES).quantization == f"fp8{form[4:]}"
        assert not caplog.text
        assert load.as_stored(config, "none", SCHEMES).quantization == form
    assert f"{name} becomes {form}, the nearest form here" in caplog.text
    assert load.form_name(config, ModelConfig({}), SCHEMES) == form


def _wide() -> dict[str, Any]:
    from tests.support.checkpoints import llama_tensors

    return llama_tensors(CONFIG | {"hidden_size": 64, "intermediate_size": 64})


def test_a_gguf_files_context_is_cut(shared_data: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = shared_data / "models" / "derived" / "gguf" / "stories260K.F16.gguf"
    with caplog.at_level(logging.WARNING, "headrace"):
        *_, length = bits(file, max_model_len=8192)
    assert length == 512
    assert "max_model_len: 8192 is more than the model's context, so it is 512" in caplog.text
