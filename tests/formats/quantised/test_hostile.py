"""Checkpoints that are wrong in one place: each gives a CheckpointError that names the tensor and what was expected."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.formats.quantised.right import E4M3, F16, F32, I32, U8, good, note, packed_config, read, state
from torch import Tensor

from headrace.protocol.errors import CheckpointError

METHODS = list(good())


@pytest.mark.parametrize("method", METHODS)
def test_the_layers_that_are_broken_below_are_right(method: str) -> None:
    weight = read(good()[method])
    assert weight.shape == (32, 128)
    assert torch.isfinite(weight.dequantize()).all()
    assert weight.dequantize().std() > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_left_alone_is_read_as_it_is(method: str) -> None:
    config, _ = good()[method]
    plain = torch.randn(8, 16)
    weight = read((config, {"head.weight": plain}), "head")
    assert weight.scales is None
    assert torch.equal(weight.codes, plain)


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ("awq", "modules_to_not_convert", ["mlp.l"]),
        ("compressed-tensors", "ignore", ["re:.*mlp"]),
        ("compressed-tensors", "ignore", ["layers.3.mlp.l"]),
        ("fp8", "modules_to_not_convert", ["mlp"]),
        ("bitsandbytes", "llm_int8_skip_modules", ["l"]),
        ("mxfp4", "modules_to_not_convert", ["layers.3"]),
    ],
)
def test_lists_of_layers_left_alone_are_followed(method: str, key: str, value: list[str]) -> None:
    config, tensors = good()[method]
    name = "layers.3.mlp.l"
    renamed = {tensor_name.replace("l.", f"{name}.", 1): tensor for tensor_name, tensor in tensors.items()}
    assert read((config, renamed), name).scales is not None
    plain = torch.randn(8, 16)
    weight = read((config | {key: value}, renamed | {f"{name}.weight": plain}), name)
    assert weight.scales is None
    assert torch.equal(weight.codes, plain)


def without_one(method: str) -> list[tuple[str, str]]:
    # Without its format an int8 layer is taken to lie row after row; a GPTQ layer without g_idx has no act-order.
    optional = {
        "l.weight_zero_point",
        "l.group_size",
        "l.weight_format",
        "l.g_idx",
        "l._weight_zero_point",
        "l._weight_per_tensor_scale",
    }
    return [(method, name) for name in good()[method][1] if name not in optional]


@pytest.mark.parametrize(("method", "name"), [case for method in METHODS for case in without_one(method)])
def test_a_missing_tensor_is_named(method: str, name: str) -> None:
    config, tensors = good()[method]
    left = {key: tensor for key, tensor in tensors.items() if key != name}
    with pytest.raises(CheckpointError, match=r"^l\.\S+ (is missing|is stored as|has shape|has \d+ words)|codes with"):
        read((config, left))


def all_but(*names: str) -> list[tuple[str, str]]:
    return [(method, name) for method in METHODS for name in good()[method][1] if name not in names]


STATE = "l.weight.quant_state.bitsandbytes__nf4"


WHOLE = (("modelopt", "l.weight"), ("bitnet", "l.weight"))
"""Weights with one scale, which leaves their shape to the model."""


@pytest.mark.parametrize(("method", "name"), [case for case in all_but(STATE) if case not in WHOLE])
def test_a_tensor_of_another_shape_is_named_with_both(method: str, name: str) -> None:
    config, tensors = good()[method]
    tensor = tensors[name]
    wider = torch.cat([tensor.view(U8), tensor.view(U8)]).view(tensor.dtype) if tensor.dim() else tensor.repeat(2, 3)
    with pytest.raises(CheckpointError, match=r"^l\.(.|\n)*(shape|is \[)"):
        read((config, tensors | {name: wider}))


@pytest.mark.parametrize(("method", "name"), all_but("l.weight_shape", "l.weight_format"))
def test_a_tensor_of_another_type_is_named(method: str, name: str) -> None:
    config, tensors = good()[method]
    other = tensors[name].float().to(torch.int16)
    with pytest.raises(CheckpointError, match=r"^l\..*(stored as|is int16|is \[0)"):
        read((config, tensors | {name: other}))


def poisoned(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        result = tensor.clone()
        result.view(-1)[0] = value
        return result

    return change


SCALES = [
    ("gptq", "l.scales"), ("awq", "l.scales"), ("compressed-tensors", "l.weight_scale"),
    ("compressed-tensors-int8", "l.weight_scale"), ("bitsandbytes", "l.weight.absmax"),
    ("bitsandbytes-double", "l.weight.nested_absmax"), ("bitsandbytes-int8", "l.SCB"), ("fp8", "l.weight_scale_inv"),
    ("modelopt", "l.weight_scale"), ("modelopt-nvfp4", "l.weight_scale_2"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "name"), SCALES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_is_no_number_is_refused(method: str, name: str, value: float) -> None:
    config, tensors = good()[method]
    with pytest.raises(CheckpointError, match=rf"{name} has a scale that is not finite; shape \["):
        read((config, tensors | {name: poisoned(value)(tensors[name])}))


@pytest.mark.parametrize(("method", "name"), SCALES)
def test_scales_of_nothing_but_zeros_are_refused_and_one_zero_is_not(method: str, name: str) -> None:
    config, tensors = good()[method]
    with pytest.raises(CheckpointError, match=rf"{name} has only zeros; shape \["):
        read((config, tensors | {name: torch.zeros_like(tensors[name])}))
    if tensors[name].numel() > 1:
        weight = read((config, tensors | {name: poisoned(0.0)(tensors[name])}))
        assert (weight.dequantize()[0] == 0).any()


def test_mxfp4_has_no_scale_that_is_no_number() -> None:
    config, tensors = good()["mxfp4"]
    with pytest.raises(CheckpointError, match="l.weight_scales has a scale that is not finite"):
        read((config, tensors | {"l.weight_scales": poisoned(255)(tensors["l.weight_scales"])}))


@pytest.mark.parametrize("wrong", [-1, 2, 2**31 - 1])
def test_a_group_index_out_of_range_is_refused(wrong: int) -> None:
    config, tensors = good()["gptq"]
    g_idx = tensors["l.g_idx"].clone()
    g_idx[5] = wrong
    with pytest.raises(CheckpointError, match=r"l\.g_idx has groups .* shape \[128\], expected 0 to 1"):
        read((config, tensors | {"l.g_idx": g_idx}))


@pytest.mark.parametrize("unfilled", [0, -1])
@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_a_group_index_that_was_never_filled_has_no_effect(method: str, unfilled: int) -> None:
    """Of writers without act-order. Every input with the scale of group 0 would be another model."""
    config, tensors = good()[method]
    name = "l.g_idx" if method == "gptq" else "l.weight_g_idx"
    plain = read((config, {key: value for key, value in tensors.items() if key != name}))
    index = torch.full((128,), unfilled, dtype=torch.int32)
    assert np.array_equal(read((config, tensors | {name: index})).dequantize(), plain.dequantize())
    swapped = torch.arange(128, dtype=torch.int32).flip(0) // 64
    assert not np.array_equal(read((config, tensors | {name: swapped})).dequantize(), plain.dequantize())


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"bits": 9}, "bits is 9"),
    ("gptq", {"bits": "4"}, "bits is '4'"),
    ("gptq", {"bits": True}, "bits is True"),
    ("gptq", {"bits": None}, "bits is None"),
    ("gptq", {"group_size": 0}, "group_size is 0"),
    ("gptq", {"group_size": 32}, r"l\.scales has shape \[2, 32\], expected \[4, 32\]"),
    ("gptq", {"bits": 8}, r"l\.scales has shape"),
    ("gptq", {"bits": 3}, r"l\.qweight has shape \[16, 32\], expected a multiple of 3 rows"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    ("gptq", {"checkpoint_format": ["gptq"]}, "checkpoint_format"),
    ("gptq", {"dynamic": ["-:x"]}, "dynamic is"),
    ("gptq", {"dynamic": {"l": 4}}, "dynamic has 4"),
    ("gptq", {"dynamic": {"l": {"bits": 12}}}, "bits is 12"),
    ("gptq", {"dynamic": {"(": {}}}, "no regular expression"),
    ("auto-round", {"packing_format": "auto_round:mlx"}, "packing_format is 'auto_round:mlx'"),
    ("auto-round", {"extra_config": [1]}, "extra_config is"),
    ("auto-round", {"extra_config": {"l": 3}}, "extra_config has 3"),
    ("auto-round", {"data_type": "mx_int"}, "data_type is 'mx_int'"),
    ("auto-round", {"rotation_config": {"a": 1}}, "rotation_config"),
    ("auto-round", {"bits": "4"}, "bits is '4'"),
    ("quark-fp8", {"global_quant_config": 4}, "weight of l is 4"),
    ("quark-fp8", {"global_quant_config": {"weight": [{}, {}]}}, "two stages are not supported"),
    ("quark-fp8", {"layer_quant_config": ["l"]}, "layer_quant_config is"),
    ("quark-fp8", {"global_quant_config": {"weight": {"dtype": "fp6_e3m2"}}}, "dtype is 'fp6_e3m2'"),
    ("quark-fp8", {"exclude": "head"}, "exclude is 'head'"),
    ("quark-uint4", {"export": {"pack_method": "rows"}}, "pack_method is 'rows'"),
    (
        "quark-uint4",
        {"global_quant_config": {"weight": {"dtype": "uint4", "qscheme": "per_group", "group_size": "64"}}},
        "group_size is '64'",
    ),
    ("torchao-int8", {"note": note("Int4OpaqueTensor")}, "_type is 'Int4OpaqueTensor', expected one of"),
    (
        "torchao-int8",
        {"note": note("Int8Tensor", block_size=[1, 64])},
        r"scale has shape \[32, 4\], expected \[32, 2\]",
    ),
    ("torchao-int8", {"note": [1]}, "holds list, not an object"),
    ("torchao-int8", {"note": note("IntxUnpackedToInt8Tensor", target_dtype="int9")}, "target_dtype"),
    ("torchao-tiles", {"note": note("Int4TilePackedTo4dTensor", shape=[33, 128])}, "shape is"),
    ("torchao-mxfp8", {"note": note("MXTensor", block_size=32, elem_dtype="float6")}, "elem_dtype is"),
    ("awq", {"bits": 5}, "bits is 5"),
    ("awq", {"version": "gemv"}, "version is 'gemv'"),
    ("awq", {"group_size": -2}, "group_size is -2"),
    ("awq", {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
    ("compressed-tensors", packed_config(num_bits=9), "num_bits is 9"),
    ("compressed-tensors", packed_config(num_bits=1), "num_bits is 1"),
    (
        "compressed-tensors",
        packed_config(num_bits=5),
        r"weight_packed has 16 words for 128 codes of 5 bits, expected 20",
    ),
    ("compressed-tensors", packed_config(group_size=0), "group_size is 0"),
    ("compressed-tensors", packed_config(strategy="channel"), "weight_scale has shape"),
    ("compressed-tensors", packed_config(strategy="block", block_structure=[0, 1]), "block_structure"),
    ("compressed-tensors", packed_config(strategy="block"), "block_structure"),
    ("compressed-tensors", packed_config(strategy="token"), "weight_scale has shape"),
    ("compressed-tensors", {"config_groups": None}, "config_groups"),
    ("compressed-tensors", {"config_groups": {"g": {"targets": ["Linear"], "weights": 4}}}, "weights are 4"),
    ("compressed-tensors", {"ignore": ["re:" + "l" * 2**17]}, "too complicated"),
    ("compressed-tensors", {"ignore": [r"re:(l)*(\1)*"]}, "groupref is not supported"),
    ("mlx", {"l": {"bits": 7}}, "bits 7, group_size 32; expected"),
    ("mlx", {"mode": "nf4"}, "mode is 'nf4'"),
    ("modelopt", {"quant_method": "exl3"}, "quant_method 'exl3' is not supported; take the model unquantised, as GGUF"),
    ("compressed-tensors", {"ignore": [3]}, "ignore"),
    ("compressed-tensors", {"format": "sparse-bitmask"}, "sparse-bitmask"),
    ("compressed-tensors", packed_config(num_bits=6) | {"format": "marlin-24"}, "num_bits is 6, expected 4 or 8"),
    ("compressed-tensors", {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config"),
    ("compressed-tensors", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    ("fp8", {"weight_block_size": [0, 128]}, "weight_block_size"),
    ("fp8", {"weight_block_size": 128}, "weight_block_size"),
    ("fp8", {"weight_block_size": [128, 128]}, r"weight_scale_inv has shape \[2, 2\], expected"),
    ("fp8", {"weight_block_size": None}, r"weight_scale_inv has shape \[2, 2\], expected"),
]


@pytest.mark.parametrize(("method", "changes", "text"), CONFIGS, ids=lambda part: str(part)[:40])
def test_a_config_that_does_not_fit_is_refused(method: str, changes: dict[str, Any], text: str) -> None:
    config, tensors = good()[method]
    with pytest.raises(CheckpointError, match=text):
        read((config | changes, tensors))


@pytest.mark.parametrize(
    "text",
    [
        b"{", b"[]", b"null", b"[" * 9000, b'{"quant_type": "fp4"}', b'{"quant_type": "nf4"}',
        json.dumps({"quant_type": "nf4", "blocksize": 0, "shape": [32, 128]}).encode(),
        json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": [32, -128]}).encode(),
        json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": [2**31 - 1, 2**31 - 1]}).encode(),
        json.dumps({"quant_type": "nf4", "blocksize": 2**40, "shape": [32, 128]}).encode(), b" " * 20_000, b"\xff\xfe",
    ],
    ids=repr,
)  # fmt: skip
def test_a_state_of_bitsandbytes_that_lies_is_refused(text: bytes) -> None:
    config, tensors = good()["bitsandbytes"]
    with pytest.raises(CheckpointError, match=r"^l\.weight"):
        read((config, tensors | {STATE: torch.frombuffer(bytearray(text), dtype=U8)}))


@pytest.mark.parametrize("offset", [None, "0.1", float("nan"), float("inf"), True, 10**400])
def test_an_offset_of_scales_that_is_no_number_is_refused(offset: Any) -> None:
    config, tensors = good()["bitsandbytes-double"]
    with pytest.raises(CheckpointError, match="nested_offset|not JSON|128 digits"):
        read((config, tensors | {STATE: state("nf4", nested_blocksize=256, nested_offset=offset)}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_config_is_refused_or_read(data: st.DataObject) -> None:
    """No error but a CheckpointError, whatever stands under a key that the reader looks at."""
    config, tensors = good()[data.draw(st.sampled_from(METHODS))]
    weights = config.get("config_groups", {}).get("group_0", {}).get("weights", {})
    response = config.get("note", {})
    places = (config, weights, response, response.get("_data"), config.get("dynamic"), config.get("extra_config"))
    places += (config.get("global_quant_config", {}).get("weight"),)
    place = data.draw(st.sampled_from([place for place in places if place]))
    names = [*place, "modules_to_not_convert", "ignore", "checkpoint_format", "sparsity_config", "block_structure"]
    names += ["dynamic", "extra_config", "packing_format", "data_type"] if place is config else []
    key = data.draw(st.sampled_from([name for name in names if name != "quant_method"]))
    place[key] = data.draw(JSON)
    try:
        weight = read((config, tensors))
    except CheckpointError:
        return
    assert weight.dequantize().dtype == torch.float32


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_tensors_are_refused_or_read(data: st.DataObject) -> None:
    config, tensors = good()[data.draw(st.sampled_from(METHODS))]
    name = data.draw(st.sampled_from(sorted(tensors)))
    shape = data.draw(st.lists(st.integers(0, 40), max_size=4))
    dtype = data.draw(st.sampled_from([U8, torch.int8, I32, torch.int64, F16, F32, E4M3, torch.bool]))
    tensors[name] = data.draw(st.sampled_from([torch.zeros(shape), torch.full(shape, 3.0)])).to(dtype)
    try:
        weight = read((config, tensors))
    except CheckpointError:
        return
    assert weight.dequantize().dtype == torch.float32
