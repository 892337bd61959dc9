"""Layers packed by hand as their writers pack them stand for the weights that they were packed from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.formats.quantised.layouts import LAYOUTS, Stored
from tests.formats.quantised.right import read

from headrace.protocol.errors import CheckpointError
from headrace.quant.base import QWeight

FACTS = ("l.shape", "l.bitmask", "l.packing", "l.nbits", "l.axis", "l.group_size", "l.quant_scale")


def distance(result: QWeight, stored: Stored) -> float:
    weight = result.dequantize()
    assert weight.shape == stored.weight.shape
    return float((weight - stored.weight).abs().max() / stored.weight.abs().max())


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_codes_stand_for_the_weights(name: str) -> None:
    stored = LAYOUTS[name]()
    content = read((stored.config, stored.tensors))
    assert (content.scales is None) == (name == "hqq, groups of outputs")
    assert distance(content, stored) < 1e-6


@pytest.mark.parametrize("name", LAYOUTS)
def test_control_a_changed_tensor_is_seen(name: str) -> None:
    """Negative control: each of the layer's tensors matters."""
    stored = LAYOUTS[name]()
    for part, tensor in stored.tensors.items():
        if part in FACTS:  # refused if they change alone
            continue
        bits = tensor.view(torch.uint8) if tensor.dtype in (torch.float8_e4m3fn, torch.bfloat16) else tensor
        bits = bits.reshape(1) if bits.dim() == 0 else bits
        other = bits.roll(1, 0) if len(bits.unique(dim=0)) > 1 else bits + 1
        changed = stored.tensors | {part: other.view(tensor.dtype).reshape(tensor.shape)}
        assert distance(read((stored.config, changed)), stored) > 1e-3, part


@pytest.mark.parametrize(
    ("method", "key", "rule"), [("gptq", "dynamic", "-:.*l$"), ("auto-round", "extra_config", "l")]
)
def test_a_rule_can_leave_a_layer_plain(method: str, key: str, rule: str) -> None:
    plain = torch.randn(8, 16)
    config = {"quant_method": method, "bits": 4, "group_size": 8, "packing_format": "auto_round"}
    settings = {} if rule.startswith("-:") else {"bits": 16}
    weight = read((config | {key: {rule: settings, ".*": {"bits": 2}}}, {"l.weight": plain, "l.qweight": plain}))
    assert weight.scales is None
    assert torch.equal(weight.codes, plain)


def test_the_first_rule_decides_and_a_name_precedes_patterns() -> None:
    stored = LAYOUTS["dynamic"]()
    rules = stored.config["dynamic"]
    swapped = stored.config | {"dynamic": {".*": rules[".*"]} | rules}
    with pytest.raises(Exception, match="l.scales has shape"):
        read((swapped, stored.tensors))
    stored = LAYOUTS["auto-round"]()
    extra = {".*": {"bits": 2}} | stored.config["extra_config"]
    assert distance(read((stored.config | {"extra_config": extra}, stored.tensors)), stored) < 1e-6


@pytest.mark.parametrize(
    ("name", "part", "text"),
    [
        ("sparse-24-bitmask", "l.bitmask", "does not mark half of each row"),
        ("marlin-24, groups", "l.meta", "has one place twice in four"),
    ],
)
def test_places_that_are_not_two_in_four_are_refused(name: str, part: str, text: str) -> None:
    stored = LAYOUTS[name]()
    wrong = torch.zeros_like(stored.tensors[part])
    with pytest.raises(CheckpointError, match=rf"{part}.*{text}"):
        read((stored.config, stored.tensors | {part: wrong}))


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("packing", [ord(letter) for letter in "5bit_u8"], "packing, .* is '5bit_u8', expected one of 8bit_u8"),
        ("packing", [ord(letter) for letter in "2bit_u8"], "W_q is uint8 with shape"),
        ("nbits", 9, "nbits 9"),
        ("axis", 2, "axis 2"),
        ("group_size", 0, "group_size is 0"),
        ("group_size", 7, "group_size is 7"),
        ("group_size", 32, r"scale has shape \[128, 1\], expected \[256, 1\]"),
        ("quant_scale", 1, "quantised themselves"),
        ("shape", [0, 128], r"shape is \[0, 128\]"),
    ],
)
def test_facts_of_hqq_that_do_not_fit_are_refused(part: str, value: Any, text: str) -> None:
    stored = LAYOUTS["hqq"]()
    wrong = torch.tensor(value, dtype=stored.tensors[f"l.{part}"].dtype)
    with pytest.raises(CheckpointError, match=text):
        read((stored.config, stored.tensors | {f"l.{part}": wrong}))


def test_sparse_floats_are_dense_weights() -> None:
    stored = LAYOUTS["sparse-24-bitmask"]()
    values = stored.tensors["l.compressed"].bfloat16()
    parts = {"l.compressed": values, "l.bitmask": stored.tensors["l.bitmask"], "l.shape": stored.tensors["l.shape"]}
    config = {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}
    content = read((config, parts))
    assert content.scales is None
    factors = stored.tensors["l.weight_scale"]
    torch.testing.assert_close(content.dequantize() * factors, stored.weight)


def test_factors_of_the_inputs_are_those_of_columns() -> None:
    """torchao's AWQ and SmoothQuant divide the weights by what they multiply the inputs with."""
    stored = LAYOUTS["torchao int4"]()
    factors = torch.rand(stored.weight.shape[1]) + 0.5
    content = read((stored.config, stored.tensors | {"l._weight_act_pre_scale": factors}))
    torch.testing.assert_close(content.dequantize(), stored.weight * factors)
