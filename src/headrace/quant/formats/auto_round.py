"""auto-round's own checkpoints (Cheng et al. 2023, SignRound): the layouts of others under one config.

`packing_format` names the layout: GPTQ's words with zero points less one ("auto_round:auto_gptq") or as they are
("auto_round", "auto_round:gptqmodel"), or AWQ's ("auto_round:auto_awq"). Where `data_type` says floats, the layers are
8-bit floats, or blocks of 4- and 8-bit floats as compressed-tensors has them. `extra_config` has the settings of single
layers, by name or by a pattern that is searched for; 16 bits leave a layer plain.
"""

from __future__ import annotations

import re
from typing import Any

from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import PLAIN, type_name
from headrace.quant.base import QWeight, Tensors
from headrace.quant.formats import awq, fp8, gptq
from headrace.quant.formats.compressed_tensors import MXFP4, NVFP4, four_bit_blocks
from headrace.quant.layer_names import entry_of, matches
from headrace.quant.packing import checked, overridden, plain_weight, two_sizes, whole

SPARE = re.compile(r".*\.(input_scale|input_global_scale|act_scales?|act_max)")
WORDS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq",
}
"""The layouts of whole numbers."""
FLOATS = re.compile(r"(fp|mx_fp|nv_fp)(4|8)?(_e4m3|_e5m2|_rceil|_with_static_gs)?")
SETTINGS = ("bits", "group_size", "sym", "data_type")


def read(tensors: Tensors, name: str, config: dict[str, Any]) -> QWeight:
    """The layer's codes; plain floats if extra_config gives it 16 bits, or if it is stored as floats."""
    if config.get("rotation_config"):
        raise CheckpointError("quantization_config: rotation_config (rotated weights) is not supported")
    config = _settings_of(name, config)
    if whole(config, "bits") >= 16:
        return plain_weight(tensors, name)
    kind, layout = config.get("data_type", "int"), config.get("packing_format", "auto_round:auto_gptq")
    if isinstance(kind, str) and FLOATS.fullmatch(kind):
        return _floats(tensors, name, kind, config.get("group_size"))
    if kind != "int":
        raise CheckpointError(
            f"config.json: quantization_config.data_type is {kind!r:.80}, expected int, fp, mx_fp or nv_fp"
        )
    if not isinstance(layout, str) or layout not in WORDS:
        raise CheckpointError(
            f"config.json: quantization_config.packing_format is {layout!r:.80}, expected {', '.join(WORDS)}"
        )
    words = {"bits": config["bits"], "group_size": config.get("group_size")}
    if WORDS[layout] == "awq":
        return awq.read(tensors, name, words | {"version": "gemm"})
    return gptq.read(tensors, name, words | {"checkpoint_format": WORDS[layout]})


def _settings_of(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The config with the layer's entry of extra_config; a pattern counts if no entry has its name."""
    extra = config.get("extra_config") or {}
    if not isinstance(extra, dict):
        raise CheckpointError(
            f"config.json: quantization_config.extra_config is {extra!r:.80}, expected settings by layer"
        )
    if (settings := entry_of(extra, name)) is not None:
        return overridden(config, settings, "extra_config", *SETTINGS)
    for pattern, settings in extra.items():
        if settings and matches(pattern, name, anywhere=True):
            return overridden(config, settings, "extra_config", *SETTINGS)
    return config


def _floats(tensors: Tensors, name: str, kind: str, size: Any) -> QWeight:
    """size: the group_size, inputs or [outputs, inputs] that share a scale."""
    if tensors.has(f"{name}.weight_packed"):
        return four_bit_blocks(tensors, name, NVFP4 if kind.startswith("nv") else MXFP4)
    weight = checked(tensors, f"{name}.weight", (None, None), *fp8.FLOATS, *PLAIN)
    if type_name(weight) in PLAIN:
        return plain_weight(tensors, name)
    block = two_sizes(size, "config.json: quantization_config.group_size") if isinstance(size, list) else None
    scale = f"{name}.weight_scale" if tensors.has(f"{name}.weight_scale") else f"{name}.weight_scale_inv"
    group = size if isinstance(size, int) and size > 0 else None
    return fp8.of_floats(weight, tensors(scale), scale, block, group)
