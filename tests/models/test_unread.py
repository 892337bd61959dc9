"""Keys of config.json that no model file reads: transformers' configuration classes know all that may matter."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.test_against_transformers import RARE_VARIANTS, VARIANTS
from tests.support.harness import SAME_AS, load, save_random
from transformers import LlamaConfig, PreTrainedConfig, cache_utils, masking_utils, modeling_rope_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headrace import models
from headrace.checkpoint.names import text_config
from headrace.models.config import ModelConfig
from headrace.models.rope import frequencies_of
from headrace.models.unread import HARMLESS, Alias, Unread, Values, log_unread, verify
from headrace.plan.counting import NUM_POSITIONS, ONE_ROW, CountingOps, CountingWeights, cache_of
from headrace.plan.forms import Forms
from headrace.protocol.errors import CheckpointError

SHARED = (cache_utils, masking_utils, modeling_rope_utils)
"""Modules of transformers that read configs of all types."""
MULTIMODAL = re.compile(r"(image|video|vision|audio|boi|eoi|boa|eoa|mm|projector|out_hidden)_.*")
"""Keys of the outer config of a model with a tower."""


def class_of(model_type: str) -> tuple[Any, Any]:
    """The class of a type's config, and of its text."""
    whole = CONFIG_MAPPING[SAME_AS.get(model_type, model_type)]
    return whole, whole.sub_configs.get("text_config", whole)


def keys_of(kind: Any) -> set[str]:
    """The keys that a class takes of a config.json; not those that it makes itself, as properties."""
    names = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    return {name for name in names if not isinstance(getattr(kind, kind.attribute_map.get(name, name), None), property)}


def build(values: dict[str, Any]) -> tuple[Values, Any]:
    """The values of a config with the keys that its model reads when it is made, and the model."""
    config = ModelConfig(text_config(values, models.names()))
    module = models.find(config.values["model_type"])
    model = module.Model(config, CountingWeights(Forms("bfloat16", None, None)), CountingOps(), NUM_POSITIONS)
    config.max_positions()
    return config.values, model


COPIED = {"nemotron_h": {"expand", "time_step_limit"}}
"""Keys that a class copies from older names, and its model does not read."""
FURTHER: dict[str, dict[str, Any]] = {
    "gemma4": {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1, "use_double_wide_mlp": True},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 40},
    "qwen2_5_vl": {"use_sliding_window": True, "max_window_layers": 0},
}
"""Values that make a model read more keys than other tests' configs do."""


@cache
def read_by(model_type: str) -> set[str]:
    """Keys that a model reads with any of the tests' configs, or with a switch of its class turned over."""
    tiny = models.find(model_type).TINY
    _, kind = class_of(model_type)
    changes = [{}, *(change for _, name, change in VARIANTS + RARE_VARIANTS if name == model_type)]
    switches = {field.name: field.default for field in dataclasses.fields(kind) if isinstance(field.default, bool)}
    changes += [{name: not tiny.get("text_config", tiny).get(name, value)} for name, value in switches.items()]
    changes += [{"layer_types": None}, {"layer_types": None, "use_sliding_window": True}, FURTHER.get(model_type, {})]
    read = set[str]()
    for change in changes:
        values = tiny | ({"text_config": tiny["text_config"] | change} if "text_config" in tiny else change)
        config = ModelConfig(text_config(values, models.names()))
        try:
            model = models.find(model_type).Model
            model(config, CountingWeights(Forms("bfloat16", None, None)), CountingOps(), NUM_POSITIONS)
        except CheckpointError:  # of a switch that is refused; what was read before counts
            pass
        config.values.get("max_position_embeddings")
        read |= config.values.read
    return read


def mentions(kind: Any, key: str) -> bool:
    """Whether transformers' model, the class of its config, or what all models share reads a key or another name of
    it."""
    modules = [importlib.import_module(kind.__module__.replace("configuration_", "modeling_")), *SHARED]
    names = "|".join([key, *(alias for alias, meant in kind.attribute_map.items() if meant == key)])
    pattern = re.compile(rf"""config\.({names})\b|["']({names})["']""")
    if any(pattern.search(inspect.getsource(module)) for module in modules):
        return True
    return re.search(rf"self\.({names})\b", inspect.getsource(kind)) is not None


def uncovered(kind: Any, keys: set[str], read: set[str], rules: Any) -> list[str]:
    """The keys that transformers reads, that headrace does not read and that no list names."""
    rest = keys - read - HARMLESS.keys() - {rule.key for rule in rules}
    return sorted(key for key in rest if mentions(kind, key))


@pytest.mark.parametrize("model_type", models.names())
def test_each_key_of_the_class_is_read_or_named(model_type: str) -> None:
    whole, kind = class_of(model_type)
    rules = models.find(model_type).Model.unread
    assert uncovered(kind, keys_of(kind) - COPIED.get(model_type, set()), read_by(model_type), rules) == []
    if whole is not kind:
        outer = {key for key in keys_of(whole) if not MULTIMODAL.fullmatch(key)}
        assert uncovered(whole, outer, read_by(model_type), rules) == []


@pytest.mark.parametrize("model_type", models.names())
def test_a_rule_is_of_a_key_that_is_not_read_and_harmless_by_default(model_type: str) -> None:
    _, kind = class_of(model_type)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    for rule in models.find(model_type).Model.unread:
        assert rule.key not in read_by(model_type)
        assert rule.key not in HARMLESS
        if isinstance(rule, Alias):
            assert kind.attribute_map[rule.key] == rule.name
            assert rule.name in read_by(model_type)
        elif rule.key in defaults:
            assert defaults[rule.key] in (rule.harmless, None)


def test_control_a_key_that_nobody_reads_is_noticed() -> None:
    _, kind = class_of("ernie4_5_moe")
    rules = models.find("ernie4_5_moe").Model.unread
    read = read_by("ernie4_5_moe")
    assert uncovered(kind, keys_of(kind), read - {"moe_k"}, rules) == ["moe_k"]
    assert uncovered(kind, keys_of(kind), read, rules[1:]) == ["moe_norm_min"]


def test_keys_of_all_configs_of_transformers_are_harmless() -> None:
    assert {field.name for field in dataclasses.fields(PreTrainedConfig)} <= HARMLESS.keys()


def read_late(model_type: str) -> set[str]:
    """Keys that a model first reads in a forward pass."""
    values, model = build(models.find(model_type).TINY)
    before = set(values.read)
    model.logits(model.forward(ONE_ROW, [cache_of(shape) for shape in model.cache_shapes]), None)
    return values.read - before


@pytest.mark.parametrize("model_type", models.names())
def test_a_model_reads_its_config_when_it_is_made(model_type: str) -> None:
    """So that what it has not read then has no effect, and a wrong value is refused while loading."""
    assert read_late(model_type) == set()


def test_control_a_key_that_is_read_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(model: Any, rows: Any) -> Any:
        model.config.flag("late", False)
        return model.embed(rows.token_ids)

    monkeypatch.setattr(models.find("granite").Model, "enter", enter)
    assert read_late("granite") == {"late"}


def test_values_note_what_is_read_of_them() -> None:
    values = Values({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5})
    assert (values.get("a"), values["b"], "c" in values) == (1, 2, True)
    assert (values | {"f": 6})["d"] == 4
    assert values.read == {"a", "b", "c", "d"}


RULES = (Unread("clip_qkv", None, "bounds of queries, keys and values"), Alias("num_experts_per_tok", "moe_k"))


@pytest.mark.parametrize("values", [{}, {"clip_qkv": None}, {"num_experts_per_tok": 3, "moe_k": 2}])
def test_harmless_values_are_taken(values: dict[str, Any]) -> None:
    verify(values, RULES)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"clip_qkv": 8.0},
            "clip_qkv is 8.0, expected null: headrace does not have bounds of queries, keys and values",
        ),
        ({"clip_qkv": 8.0}, '{"clip_qkv": null} in the file, or by --hf-overrides, runs the model without'),
        ({"num_experts_per_tok": 3}, 'headrace reads moe_k instead: set {"moe_k": 3} in the file, or by --hf-overr'),
    ],
)
def test_values_that_would_change_the_output_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        verify(values, RULES)


def test_a_key_that_nobody_knows_is_logged_once_and_one_that_matters_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_random(models.find("gemma2").TINY, tmp_path)
    with caplog.at_level(logging.INFO, "headrace"):
        load(tmp_path, hf_overrides={"invented": 3, "empty": None})
    assert [r.message for r in caplog.records if r.name == "headrace.models.unread"] == [
        "config.json: without effect on this model: invented"
    ]
    with pytest.raises(CheckpointError, match="use_bidirectional_attention is true, expected false"):
        load(tmp_path, hf_overrides={"use_bidirectional_attention": True})


def test_what_is_logged_leaves_out_all_that_is_known(caplog: pytest.LogCaptureFixture) -> None:
    values = Values({"clip_qkv": None, "num_experts_per_tok": 2, "dtype": "float32", "hidden_size": 8})
    assert values["hidden_size"] == 8
    with caplog.at_level(logging.INFO, "headrace"):
        log_unread(values, RULES)
    assert not caplog.records


ROPE = {
    "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "attention_factor": 1.1, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.5,
    "truncate": False, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip


@pytest.mark.parametrize("kind", modeling_rope_utils.ROPE_INIT_FUNCTIONS)
def test_each_setting_of_a_rope_is_read(kind: str) -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=256)
    theirs, ours = set[str](), set[str]()
    settings = ROPE | {"rope_type": kind}
    # A magnitude that is given hides what it is otherwise made of.
    for each in (settings, {key: value for key, value in settings.items() if key != "attention_factor"}):
        config.rope_parameters = Values(each, theirs)
        modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=128)
        for longest in (64, 256):
            frequencies_of(ModelConfig(Values(each, ours)), 8, 256, longest)
    assert len(theirs) > 2
    assert theirs - {"type"} <= ours  # the older name of rope_type, which `ModelConfig.rope` takes


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("kimi_k2", "scoring_func", "x"),
    ],
)
def test_values_that_transformers_passes_over_are_refused(model_type: str, key: str, value: Any) -> None:
    """The models' own code reads them, so that a file with another value is another model."""
    with pytest.raises(CheckpointError, match=key):
        verify({key: value}, models.find(model_type).Model.unread)
