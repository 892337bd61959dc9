"""Quantised checkpoints made by others' writers, and what transformers computes with their dequantised weights.

compressed-tensors, bitsandbytes and transformers' fp8 write what they would write for a user. The packers of auto-round
(GPTQ, both versions) and AutoAWQ are loaded without the rest of their packages, which want other versions of much:
`pip install --no-deps auto-round autoawq`. What no writer here gives (act-order) is packed by hand.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.harness import save_random
from torch import Tensor
from transformers import AutoModelForCausalLM

CONFIG = {
    "model_type": "llama",
    "vocab_size": 199,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
TOKEN_IDS = [(7 * i * i + 3 * i) % 199 for i in range(60)]


class Written(NamedTuple):
    """A checkpoint, and transformers' logits [len(TOKEN_IDS), vocab] of the weights that it stands for."""

    directory: Path
    logits: Tensor


def need(package: str) -> Any:
    """The package, or the test is skipped."""
    return pytest.importorskip(package, exc_type=ImportError)


def part_of(package: str, module: str, **attributes: dict[str, Any]) -> Any:
    """One module of an installed package, whose own __init__ files (and those named) are not run."""
    part = importlib.util.find_spec(package)
    if part is None or not part.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    root = Path(next(iter(part.submodule_search_locations)))
    before = dict(sys.modules)
    try:
        for name, values in {package: {}, **attributes}.items():
            shell = types.ModuleType(name)
            shell.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            shell.__dict__.update(values)
            sys.modules[name] = shell
        return importlib.import_module(module)
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in (package, module.split(".")[0]):
                del sys.modules[name]


def is_quantised(name: str) -> bool:
    return name.endswith("_proj.weight")


def logits_of(model: Any) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(torch.tensor([TOKEN_IDS])).logits[0].float()
    return result


def write(
    directory: Path,
    quantization_config: dict[str, Any],
    packed: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]],
    is_quantised: Callable[[str], bool] = is_quantised,
) -> Written:
    """A random model whose layers `packed(name, weight)` turns into tensors and the weights that they stand for."""
    model = save_random(CONFIG, directory)
    tensors = load_file(directory / "model.safetensors")
    result: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        if not is_quantised(name):
            result[name] = weight
            continue
        stem = name.removesuffix(".weight")
        parts, dequantised = packed(stem, weight)
        result |= {f"{stem}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        with torch.no_grad():
            model.get_parameter(name).copy_(dequantised)
    save_file(result, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"quantization_config": quantization_config}
    (directory / "config.json").write_text(json.dumps(config))
    return Written(directory, logits_of(model))


def affine(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """float16 scales and whole zero points (of codes 0 ... 2^bits - 1) [out, groups], found in the plainest way."""
    x = weight.reshape(weight.shape[0], -1, group)
    low, high = x.amin(-1), x.amax(-1)
    if symmetric:
        scale = torch.maximum(high, -low) / (2 ** (bits - 1) - 1)
        return scale.half().float(), torch.full_like(scale, 2 ** (bits - 1))
    scale = ((high - low) / (2**bits - 1)).half().float()
    # From 1 on: the first version of GPTQ's layout can not say 0.
    return scale, torch.round(-low / scale).clamp(1, 2**bits - 1)


def gptq(directory: Path, bits: int, group: int, symmetric: bool, version: int) -> Written:
    shells = {"auto_round.utils": {"get_packing_device": lambda device=None: "cpu"}}
    module = "auto_round_extension.torch.qlinear_torch" + ("_zp" if version == 1 else "")
    writer = part_of("auto_round", module, **shells)

    def packed(_: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        num_out, num_in = weight.shape
        size = num_in if group == -1 else group
        linear = torch.nn.Linear(num_in, num_out, bias=False)
        linear.weight.data = weight
        scale, zero = affine(weight, bits, size, symmetric)
        layer = writer.QuantLinear(bits, group, num_in, num_out, False)
        layer.device = "cpu"
        layer.pack(linear, scale, zero)
        parts = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
        parts["g_idx"] = torch.arange(num_in, dtype=torch.int32) // size
        # The layer's own forward pass tells what its codes stand for; in float32, lest it rounds them.
        layer.scales = layer.scales.float()
        with torch.inference_mode():
            return parts, layer(torch.eye(num_in)).float().reshape(num_in, num_out).t()

    layout = "gptq" if version == 1 else "gptq_v2"
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False}
    return write(directory, config | {"checkpoint_format": layout}, packed)


def act_order(directory: Path, group: int = 64) -> Written:
    """GPTQ with g_idx as act-order leaves it: by hand, as the layout is described."""

    def packed(_: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        num_in = weight.shape[1]
        order = torch.randperm(num_in, generator=torch.Generator().manual_seed(num_in))
        g_idx = torch.empty(num_in, dtype=torch.int64)
        g_idx[order] = torch.arange(num_in) // group
        scale, zero = affine(weight[:, order], 4, group, False)
        codes = (torch.round(weight / scale[:, g_idx]) + zero[:, g_idx]).clamp(0, 15).long()
        words = sum(codes[:, i::8] << (4 * i) for i in range(8)).t()
        zeros = sum((zero[i::8].long() - 1) << (4 * i) for i in range(8)).t()
        parts = {"qweight": words, "qzeros": zeros, "g_idx": g_idx}
        result = {name: torch.where(part >= 2**31, part - 2**32, part).to(torch.int32) for name, part in parts.items()}
        return result | {"scales": scale.t().half()}, (codes - zero[:, g_idx]) * scale[:, g_idx]

    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": False, "desc_act": True}
    return write(directory, config, packed)


def mlx(directory: Path, bits: int, group: int) -> Written:
    """As mlx-lm writes it, by hand: the table of embeddings and the head are quantised too."""

    def packed(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        x = weight.reshape(len(weight), -1, group)
        low, high = x.amin(-1), x.amax(-1)
        scale = ((high - low) / (2**bits - 1)).half().float()
        bias = low.half().float()
        codes = torch.round((x - bias[..., None]) / scale[..., None]).clamp(0, 2**bits - 1)
        dense = (codes * scale[..., None] + bias[..., None]).reshape(weight.shape)
        stream = codes.reshape(len(weight), -1).to(torch.int64)[..., None] >> torch.arange(bits) & 1
        powers = 1 << torch.arange(32, dtype=torch.int64)
        words = (stream.reshape(len(weight), -1, 32) * powers).sum(-1).to(torch.uint32)
        return {"weight": words, "scales": scale.half(), "biases": bias.half()}, dense

    settings = {"quant_method": "mlx", "bits": bits, "group_size": group}
    return write(
        directory, settings, packed, lambda name: name.endswith(("_proj.weight", "tokens.weight", "head.weight"))
    )


def awq(directory: Path, group: int) -> Written:
    need("accelerate")
    shells: dict[str, dict[str, Any]] = {
        "awq.utils": {},
        "awq.utils.utils": {"get_best_device": lambda: "cpu"},
        "awq.modules": {},
        "awq.modules.linear": {},
        "awq.modules.triton": {},
    }
    writer = part_of("awq", "awq.modules.linear.gemm", **shells)

    def packed(_: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight
        scale, zero = affine(weight, 4, group, False)
        codes = torch.round(weight / scale.repeat_interleave(group, 1)) + zero.repeat_interleave(group, 1)
        linear.weight.data = (codes.clamp(0, 15) - zero.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)
        layer = writer.WQLinear_GEMM.from_linear(linear, 4, group, False, scale.t(), zero.t())
        parts = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
        library_weight = writer.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, group)
        return parts, library_weight.t()

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return write(directory, config | {"modules_to_not_convert": None}, packed)


def compressed(directory: Path, layout: str, **weights: Any) -> Written:
    """compressed-tensors: its own scales, its own compressor, its own decompressor."""
    need("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    writer = BaseCompressor.get_value_from_registry(layout)

    def packed(_: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight.shape
        if args.strategy == "block":
            height, width = args.block_structure
            pieces = weight.reshape(rows // height, height, columns // width, width)
            low, high = pieces.amin((1, 3)), pieces.amax((1, 3))
        else:
            size = {"tensor": rows * columns, "channel": columns}.get(str(args.strategy), args.group_size)
            pieces = weight.reshape(1 if args.strategy == "tensor" else rows, -1, size)
            low, high = pieces.amin(-1), pieces.amax(-1)
            if args.strategy == "tensor":
                low, high = low.reshape(1), high.reshape(1)
        extra, outer = {}, None
        if args.strategy == "tensor_group":
            outer = torch.tensor([448.0 * 6.0]) / weight.abs().max()
            extra = {"weight_global_scale": outer}
        scale, zero = calculate_qparams(low, high, args, global_scale=outer)
        state = {"weight": weight, "weight_scale": scale.float(), **extra}
        if not args.symmetric:
            state["weight_zero_point"] = zero
        result = writer.compress(state, scheme)
        if outer is not None:  # decompress multiplies in bfloat16
            from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
            from compressed_tensors.quantization.lifecycle.forward import dequantize

            library_codes = unpack_fp4_from_uint8(result["weight_packed"], rows, columns, torch.float32)
            return result, dequantize(library_codes, result["weight_scale"].float(), args=args, global_scale=outer)
        return result, writer.decompress(dict(result), scheme)["weight"].float()

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=layout, ignore=["lm_head"], quantization_status="compressed"
    )
    return write(directory, json.loads(config.model_dump_json()), packed)


def bitsandbytes(directory: Path, **options: Any) -> Written:
    """Through transformers, from the plain model to the saved one and back."""
    need("bitsandbytes")
    need("accelerate")
    from transformers import BitsAndBytesConfig

    plain = directory / "plain"
    save_random(CONFIG, plain)
    options = {"bnb_4bit_compute_dtype": torch.float32} | options
    settings = {"dtype": torch.float32, "device_map": "cpu", "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=BitsAndBytesConfig(**options), **settings)
    model.save_pretrained(directory / "quantised")
    back = AutoModelForCausalLM.from_pretrained(directory / "quantised", **settings)
    return Written(directory / "quantised", logits_of(back.dequantize().eval()))


def fp8(directory: Path, block: tuple[int, int] | None, scale_fmt: str | None = None) -> Written:
    """transformers' writer and reader of finegrained_fp8."""
    from transformers.integrations import finegrained_fp8

    config = types.SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    quantiser = types.SimpleNamespace(quantization_config=config)
    writer = finegrained_fp8.Fp8Quantize(quantiser)
    reader = finegrained_fp8.Fp8Dequantize(quantiser)

    def packed(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts = writer._quantize_one(f"{name}.weight", weight)
        result = {key.removeprefix(f"{name}."): part for key, part in parts.items()}
        library_weight = reader._dequantize_one(result["weight"], result["weight_scale_inv"], torch.float32)
        if block is None:
            result["weight_scale_inv"] = result["weight_scale_inv"].reshape(())
        return result, library_weight

    stated = None if block is None else list(block)
    config_json = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": stated}
    return write(directory, config_json | {"modules_to_not_convert": ["lm_head"]}, packed)
