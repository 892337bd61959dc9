"""Settings name layers as the checkpoint's own modules are named, in lists, patterns and keys."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.formats.quantised import formats
from tests.formats.quantised.right import Good, good, packed_config, read
from tests.models.test_quantised import distance
from tests.support.harness import follow, load

from headrace.protocol.errors import CheckpointError
from headrace.quant import patterns
from headrace.quant.layer_names import names_of

LAYER = "model.layers.3.mlp.l"
INNER = "model.language_model.layers.3.mlp.l"
OLDER = "language_model.model.layers.3.mlp.l"


def test_a_layer_has_its_names_below_all_prefixes() -> None:
    assert names_of(LAYER) == (LAYER, INNER, OLDER, "model.text_model." + LAYER.removeprefix("model."))
    assert names_of("lm_head") == ("lm_head", "language_model.lm_head")
    assert names_of("transformer.h.0.mlp") == ("transformer.h.0.mlp",)
    assert "model.language_model.layers.1.mlp.experts.down_proj" in names_of("model.layers.1.mlp.experts.7.down_proj")
    assert "model.layers.1.block_sparse_moe.input_linear" in names_of(
        "model.layers.1.block_sparse_moe.experts.0.gate_up_proj"
    )


def under(method: str, name: str = LAYER, **changes: Any) -> Good:
    """The right layer of a method as the layer `name`, with changes of the settings."""
    config, tensors = good()[method]
    return config | changes, {f"{name}{part.removeprefix('l')}": tensor for part, tensor in tensors.items()}


LEFT: list[tuple[str, str, Any]] = [
    ("awq", "modules_to_not_convert", ["{}"]),
    ("fp8", "modules_to_not_convert", ["{}"]),
    ("fbgemm", "modules_to_not_convert", ["{}"]),
    ("bitsandbytes", "llm_int8_skip_modules", ["{}"]),
    ("bitsandbytes-int8", "llm_int8_skip_modules", ["{}"]),
    ("mxfp4", "modules_to_not_convert", ["{}"]),
    ("hqq", "skip_modules", ["{}"]),
    ("compressed-tensors", "ignore", ["{}"]),
    ("compressed-tensors", "ignore", ["re:^{}$"]),
    ("compressed-tensors-int8", "ignore", ["re:^(?!vision).*language_model.*"]),
    ("gptq", "dynamic", {"-:^{}": {}}),
    ("auto-round", "extra_config", {"{}": {"bits": 16}}),
    ("auto-round", "extra_config", {"^{}$": {"bits": 16}}),
    ("quark-uint4", "exclude", ["{}"]),
    ("quark-uint4", "exclude", ["*language_model*"]),
    ("quark-uint4", "layer_quant_config", {"{}": {"weight": None}}),
    ("torchao-int8", "modules_to_not_convert", ["{}"]),
    ("mlx", "{}", False),
]


@pytest.mark.parametrize("prefixed", [INNER, OLDER])
@pytest.mark.parametrize(("method", "key", "value"), LEFT, ids=lambda part: str(part)[:40])
def test_a_layer_is_left_plain_by_its_other_names(method: str, key: str, value: Any, prefixed: str) -> None:
    def named(part: Any) -> Any:
        if isinstance(part, str):
            return part.replace("{}", prefixed)
        if isinstance(part, list):
            return [named(each) for each in part]
        return {named(name): each for name, each in part.items()} if isinstance(part, dict) else part

    plain = {f"{LAYER}.weight": torch.randn(8, 16)}
    config, tensors = under(method)
    assert read((config, tensors), LAYER).scales is not None
    assert read((config | {named(key): named(value)}, tensors | plain), LAYER).scales is None


@pytest.mark.parametrize("prefixed", [INNER, OLDER])
def test_a_layer_takes_its_settings_by_its_other_names(prefixed: str) -> None:
    config, tensors = under("gptq-dynamic", dynamic={rf"+:{re.escape(prefixed)}": {"bits": 4, "group_size": 32}})
    assert read((config, tensors), LAYER).group == 32
    groups = packed_config()["config_groups"] | {
        "group_1": {
            "targets": [prefixed],
            "weights": packed_config(group_size=32)["config_groups"]["group_0"]["weights"],
        }
    }
    config, tensors = under("compressed-tensors", config_groups=groups)
    tensors[f"{LAYER}.weight_scale"] = torch.rand(32, 4)
    assert read((config, tensors), LAYER).group == 32
    settings = {"quant_method": "mlx", "bits": 8, "group_size": 32, prefixed: {"bits": 4, "group_size": 64}}
    _, tensors = under("mlx")
    assert read((settings, tensors), LAYER).bits == 4


def test_a_model_below_a_prefix_has_the_logits_of_the_plain_one(tmp_path: Path) -> None:
    """The settings of one layer are under its name in the checkpoint, as GPTQModel writes them of vision models."""
    written = formats.gptq(tmp_path, 4, 32, True, 2)
    path = tmp_path / "model.safetensors"
    moved = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in load_file(path).items()}
    save_file(moved, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    stated = config.pop("quantization_config")
    rules = {r"+:model\.language_model\.layers\.\d+\..*": {"bits": stated["bits"], "group_size": stated["group_size"]}}
    outer = {
        "model_type": "vision",
        "text_config": config,
        "quantization_config": stated | {"bits": 8, "dynamic": rules},
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    logits = follow(load(tmp_path, backend="torch_ref", dtype="float32"), formats.TOKEN_IDS, [len(formats.TOKEN_IDS)])
    assert distance(logits, written.logits) < 4e-3


PIECES = st.recursive(
    st.sampled_from(["a", "b", r"\.", ".", "[ab]", "[^a]", r"\w", r"\d", "$", "^", r"\b"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda each: f"({'|'.join(each)})"),
        inner.map(lambda each: f"(?:{each})*"),
        inner.map(lambda each: f"(?:{each})+?"),
        inner.map(lambda each: f"(?:{each}){{1,2}}"),
        inner.map(lambda each: f"(?={each})"),
        inner.map(lambda each: f"(?!{each})"),
        inner.map(lambda each: f"(?i:{each})"),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(PIECES, st.text("abA.1", max_size=6), st.booleans())
def test_patterns_match_as_those_of_re(pattern: str, name: str, anywhere: bool) -> None:
    expected = (re.search if anywhere else re.match)(pattern, name) is not None
    assert patterns.matches_by_places(pattern, name, anywhere=anywhere) == expected
    assert patterns.matches(pattern, name, anywhere=anywhere) == expected


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(a*)*b", "(.*a){12}b", "((a*)*)*c", "a*a*a*a*a*a*a*a*a*b"])
def test_a_pattern_that_doubles_the_ways_is_matched(pattern: str) -> None:
    name = "a" * 80
    assert patterns.matches(pattern, name) == (pattern == "(a+)+$")
    assert patterns.matches(pattern, name + "bc") == pattern.endswith("b")


def test_a_long_list_of_layers_is_matched() -> None:
    pattern = rf".*layers\.({'|'.join(map(str, range(0, 4000, 2)))})\.mlp"
    assert patterns.matches(pattern, "model.layers.3998.mlp")
    assert not patterns.matches(pattern, "model.layers.3997.mlp")


@pytest.mark.parametrize("pattern", ["(", "(a)*\\1", "(?>a)*b*", "x" * 2**17, "(" * 5000 + ")" * 5000])
def test_a_pattern_that_is_none_or_too_complicated_is_refused(pattern: str) -> None:
    with pytest.raises(CheckpointError, match="is no regular expression|too complicated to be matched safely"):
        patterns.matches(pattern, "aaab")
