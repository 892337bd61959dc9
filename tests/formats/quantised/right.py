"""One right layer of every format that is read, which the tests of damaged checkpoints and configs start from."""

from __future__ import annotations

import json
from typing import Any

import torch
from numpy.typing import NDArray
from tests.support.tensors import array
from torch import Tensor

from headrace.backends.torch_ref.tensors import weight_of
from headrace.protocol.errors import CheckpointError
from headrace.quant.base import QWeight, find_format

I32, U8, F16, F32, E4M3 = torch.int32, torch.uint8, torch.float16, torch.float32, torch.float8_e4m3fn
Good = tuple[dict[str, Any], dict[str, Tensor]]


class Held:
    """`quant.base.Tensors` over a dict."""

    def __init__(self, tensors: dict[str, Tensor], notes: dict[str, str] | None = None) -> None:
        self.tensors, self._notes = tensors, notes or {}

    def __call__(self, name: str) -> NDArray[Any]:
        if name not in self.tensors:
            raise CheckpointError(f"{name} is missing from the checkpoint")
        return array(self.tensors[name])

    def has(self, name: str) -> bool:
        return name in self.tensors

    def notes(self, name: str) -> dict[str, str]:
        return self._notes


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=I32)


def scales(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return (torch.rand(shape) * 0.01 + 0.001).to(dtype)


def state(kind: str, **changes: Any) -> Tensor:
    values = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": [32, 128]} | changes
    return torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=U8)


def packed_config(**weights: Any) -> dict[str, Any]:
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": args}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": []}


def note(kind: str, **values: Any) -> dict[str, Any]:
    """What torchao says of a layer in the metadata of its file."""
    return {"_type": kind, "_data": {"block_size": [1, 32]} | values}


def good() -> dict[str, Good]:
    """Of each method a layer "l" [32, 128] that is right. "note" in a config stands for the metadata of its file."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": True}
    g_idx = (torch.arange(128) // 64).to(I32)
    return {
        "gptq": (
            gptq,
            {
                "l.qweight": words(16, 32),
                "l.qzeros": words(2, 4),
                "l.scales": scales(2, 32, dtype=F16),
                "l.g_idx": g_idx,
            },
        ),
        "awq": (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
            {"l.qweight": words(128, 4), "l.qzeros": words(2, 4), "l.scales": scales(2, 32, dtype=F16)},
        ),
        "compressed-tensors": (
            packed_config(),
            {
                "l.weight_packed": words(32, 16),
                "l.weight_scale": scales(32, 2),
                "l.weight_shape": torch.tensor([32, 128]),
            },
        ),
        "compressed-tensors-int8": (
            packed_config(num_bits=8, strategy="channel", group_size=None),
            {"l.weight": torch.randint(-128, 127, (32, 128), dtype=torch.int8), "l.weight_scale": scales(32, 1)},
        ),
        "bitsandbytes": (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            {
                "l.weight": torch.randint(0, 255, (2048, 1), dtype=U8),
                "l.weight.absmax": scales(64),
                "l.weight.quant_map": torch.linspace(-1, 1, 16),
                "l.weight.quant_state.bitsandbytes__nf4": state("nf4"),
            },
        ),
        "bitsandbytes-double": (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            {
                "l.weight": torch.randint(0, 255, (2048, 1), dtype=U8),
                "l.weight.absmax": torch.randint(0, 255, (64,), dtype=U8),
                "l.weight.nested_absmax": scales(1),
                "l.weight.nested_quant_map": torch.linspace(-1, 1, 256),
                "l.weight.quant_map": torch.linspace(-1, 1, 16),
                "l.weight.quant_state.bitsandbytes__nf4": state("nf4", nested_blocksize=256, nested_offset=0.1),
            },
        ),
        "bitsandbytes-int8": (
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            {
                "l.weight": torch.randint(-127, 127, (32, 128), dtype=torch.int8),
                "l.SCB": scales(32),
                "l.weight_format": torch.tensor(0, dtype=U8),
            },
        ),
        "fp8": (
            {"quant_method": "fp8", "weight_block_size": [16, 64], "modules_to_not_convert": ["head"]},
            {"l.weight": torch.randn(32, 128).to(E4M3), "l.weight_scale_inv": scales(2, 2)},
        ),
        "modelopt": (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            {"l.weight": torch.randn(32, 128).to(E4M3), "l.weight_scale": scales()},
        ),
        "modelopt-nvfp4": (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            {
                "l.weight": torch.randint(0, 255, (32, 64), dtype=U8),
                "l.weight_scale": torch.rand(32, 8).to(E4M3),
                "l.weight_scale_2": scales(),
            },
        ),
        "mxfp4": (
            {"quant_method": "mxfp4", "modules_to_not_convert": ["head"]},
            {
                "l.weight_blocks": torch.randint(0, 255, (32, 4, 16), dtype=U8),
                "l.weight_scales": torch.randint(100, 130, (32, 4), dtype=U8),
            },
        ),
        "compressed-tensors-bitmask": (
            packed_config(num_bits=8, strategy="channel", group_size=None)
            | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            {
                "l.compressed": torch.randint(-128, 127, (32, 64), dtype=torch.int8),
                "l.bitmask": torch.full((32, 16), 0b01010110, dtype=U8),
                "l.shape": torch.tensor([[32], [128]]),
                "l.weight_scale": scales(32, 1),
            },
        ),
        "bitnet": (
            {"quant_method": "bitnet", "modules_to_not_convert": ["head"], "linear_class": "bitlinear"},
            {
                # Codes 0 to 2 of four outputs.
                "l.weight": sum(torch.randint(0, 3, (8, 128), dtype=U8) << 2 * i for i in range(4)),
                "l.weight_scale": torch.tensor([1.5], dtype=torch.bfloat16),
            },
        ),
        "hqq": (
            {"quant_method": "hqq", "skip_modules": ["head"]},
            {
                "l.W_q": torch.randint(0, 255, (32, 64), dtype=U8),
                "l.scale": scales(64, 1),
                "l.zero": scales(64, 1),
                "l.shape": torch.tensor([32, 128]),
                "l.packing": torch.tensor([ord(letter) for letter in "4bit_u8"], dtype=U8),
                "l.nbits": torch.tensor(4, dtype=I32),
                "l.axis": torch.tensor(1, dtype=I32),
                "l.group_size": torch.tensor(64, dtype=I32),
            },
        ),
        "quark-uint4": (
            {
                "quant_method": "quark",
                "exclude": ["head"],
                "export": {"pack_method": "reorder"},
                "global_quant_config": {"weight": {"dtype": "uint4", "qscheme": "per_group", "group_size": 64}},
                "layer_quant_config": {},
            },
            {"l.weight": words(128, 4), "l.weight_scale": scales(2, 32), "l.weight_zero_point": words(2, 4)},
        ),
        "quark-fp8": (
            {
                "quant_method": "quark",
                "exclude": ["he*"],
                "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}},
            },
            {"l.weight": torch.randn(32, 128).to(E4M3), "l.weight_scale": scales(32)},
        ),
        "gptq-dynamic": (
            gptq | {"bits": 8, "dynamic": {"-:head": {}, r"+:l$": {"bits": 4, "group_size": 32}}},
            {"l.qweight": words(16, 32), "l.qzeros": words(4, 4), "l.scales": scales(4, 32, dtype=F16)},
        ),
        "modelopt-mxfp8": (
            {"quant_method": "modelopt", "quant_algo": "MXFP8"},
            {
                "l.weight": torch.randn(32, 128).to(E4M3),
                "l.weight_scale": torch.randint(100, 130, (32, 4), dtype=U8),
            },
        ),
        "auto-round": (
            {
                "quant_method": "auto-round",
                "packing_format": "auto_round",
                "bits": 4,
                "group_size": 128,
                "data_type": "int",
                "extra_config": {"l": {"group_size": 64}, "head": {"bits": 16}},
            },
            {"l.qweight": words(16, 32), "l.qzeros": words(2, 4), "l.scales": scales(2, 32, dtype=F16)},
        ),
        "auto-round-mxfp8": (
            {
                "quant_method": "auto-round",
                "packing_format": "auto_round:llm_compressor",
                "bits": 8,
                "group_size": 32,
                "data_type": "mx_fp",
            },
            {
                "l.weight": torch.randn(32, 128).to(E4M3),
                "l.weight_scale": torch.randint(100, 130, (32, 4), dtype=U8),
            },
        ),
        "modelopt-blocks": (
            {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
            {"l.weight": torch.randn(32, 128).to(E4M3), "l.weight_scale": scales(1, 1, 4, 1)},
        ),
        "fbgemm": (
            {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["head"]},
            {"l.weight": torch.randn(32, 128).to(E4M3), "l.weight_scale": scales(32, 1)},
        ),
        "mlx": (
            {"quant_method": "mlx", "bits": 8, "group_size": 32, "head": False, "l": {"bits": 4, "group_size": 64}},
            {
                "l.weight": words(32, 16).view(torch.uint32),
                "l.scales": scales(32, 2, dtype=F16),
                "l.biases": scales(32, 2, dtype=F16),
            },
        ),
        "mlx-mxfp4": (
            {"quant_method": "mlx", "bits": 4, "group_size": 32, "mode": "mxfp4"},
            {
                "l.weight": words(32, 16).view(torch.uint32),
                "l.scales": torch.randint(100, 130, (32, 4), dtype=U8),
            },
        ),
        "torchao-int8": (
            {"quant_method": "torchao", "note": note("Int8Tensor")},
            {
                "l._weight_qdata": torch.randint(-128, 127, (32, 128), dtype=torch.int8),
                "l._weight_scale": scales(32, 4),
                "l._weight_zero_point": torch.zeros(32, 4, dtype=torch.int8),
            },
        ),
        "torchao-int4": (
            {"quant_method": "torchao", "note": note("Int4Tensor", shape=[32, 128])},
            {
                "l._weight_qdata": torch.randint(-128, 127, (32, 64), dtype=torch.int8),
                "l._weight_scale": scales(4, 32),
                "l._weight_zero_point": scales(4, 32),
            },
        ),
        "torchao-tiles": (
            {"quant_method": "torchao", "note": note("Int4TilePackedTo4dTensor", shape=[32, 128])},
            {"l._weight_qdata": words(4, 8, 32, 4), "l._weight_scale_and_zero": scales(32, 32, 2)},
        ),
        "torchao-mxfp8": (
            {
                "quant_method": "torchao",
                "note": note("MXTensor", block_size=32, elem_dtype={"_type": "torch.dtype", "_data": "float8_e4m3fn"}),
            },
            {
                "l._weight_qdata": torch.randn(32, 128).to(E4M3),
                "l._weight_scale": torch.randint(100, 130, (32, 4), dtype=U8),
            },
        ),
        "torchao-nvfp4": (
            {"quant_method": "torchao", "note": note("NVFP4Tensor", block_size=16)},
            {
                "l._weight_qdata": torch.randint(0, 255, (32, 64), dtype=U8),
                "l._weight_scale": torch.rand(32, 8).to(E4M3),
                "l._weight_per_tensor_scale": scales(),
            },
        ),
    }


def read(case: Good, name: str = "l") -> QWeight:
    config, tensors = case
    notes = {f"{name}.weight": json.dumps(config["note"])} if "note" in config else {}
    return weight_of(find_format(config).read(Held(tensors, notes), name, config))
