"""Reads adapters in llama.cpp's layout: a GGUF file whose `general.type` is "adapter", by convert_lora_to_gguf.py.

Names of layers are those of the model's GGUF files. Rows of B of q and k, which the converter puts in pairs for
families whose models it stores so, are put back into the checkpoint's order. Knows files and shapes; must not know
models. Called by `checkpoint.adapters`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from headrace import gguf
from headrace.backends.adapters import LayerAdapter
from headrace.checkpoint import gguf_latent
from headrace.checkpoint.gguf_config import GEMMA, MUSE
from headrace.checkpoint.gguf_families import DECODER, FAMILIES, QWEN_MOE
from headrace.checkpoint.gguf_parts import FLOATS, Part
from headrace.checkpoint.gguf_rows import GGUFFile, Rows
from headrace.gguf import GGUF
from headrace.models.rope import pair_order
from headrace.protocol.errors import CheckpointError
from headrace.quant.formats import gguf_blocks

LAYERS: dict[str, Mapping[str, str]] = {
    "llama": DECODER,
    **dict.fromkeys(("qwen2", "qwen3", "qwen2vl", "qwen3vl", "gemma"), DECODER),
    **dict.fromkeys(("qwen2moe", "qwen3moe"), QWEN_MOE),
    **dict.fromkeys(("gemma2", "gemma3"), GEMMA),
    "muse-glimmer": MUSE,
    **dict.fromkeys(gguf_latent.ARCHITECTURES, gguf_latent.LAYER),
    **{name: family.layer for name, family in FAMILIES.items()},
}
"""By architecture: the model's name of each layer's matrices by the file's."""
PAIRS = {
    "llama": ("llama", "mistral", "mixtral"),
    "muse-glimmer": ("muse_glimmer",),
    **{name: (family.model_type,) for name, family in FAMILIES.items() if family.pairs},
}
"""Architectures whose rows of q and k lie in pairs, and the types of their models."""
NAME = re.compile(r"blk\.(0|[1-9]\d{0,3})\.([a-z_0-9]+)\.weight\.lora_([ab])")


class Base(NamedTuple):
    """Of the model that adapters are for. turned: rows of each head of q and k that turn together, of `head_dim`.
    ordered: names of the layers whose rows the model itself puts into another order than the checkpoint's."""

    model_type: str
    head_dim: int
    turned: int
    ordered: frozenset[str] = frozenset()


def read(path: Path, base: Base | None) -> dict[str, LayerAdapter]:
    """Read the layers of an adapter; with None for `base`, rows stay as they lie. Raises `CheckpointError`."""
    file = gguf.read(path)
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (kind := file.text(key)) != expected:
            raise file.fault(key, kind, repr(expected))
    if "adapter.alora.invocation_tokens" in file.fields:
        raise file.fault("adapter.alora.invocation_tokens", "there", "left out: activated LoRA begins in mid-prompt")
    architecture = file.text("general.architecture") or ""
    if architecture not in LAYERS:
        raise file.fault("general.architecture", architecture, "one of " + ", ".join(LAYERS))
    is_paired = architecture in PAIRS
    if base is not None and is_paired != any(base.model_type in types for types in PAIRS.values()):
        raise file.fault("general.architecture", architecture, f"that of a model of the type {base.model_type!r}")
    alpha = file.real("adapter.lora.alpha") or 0.0
    sides: dict[str, dict[str, NDArray[Any]]] = {}
    for name, info in file.tensors.items():
        match = NAME.fullmatch(name)
        layer = None if match is None else LAYERS[architecture].get(match[2])
        if match is None or layer is None:
            raise CheckpointError(
                f"{file.name}: {name} is not computed here: adapters of the matrices of attention and MLP are"
            )
        shape = tuple(reversed(info.shape))
        if len(shape) != 2 or 0 in shape:
            raise file.fault(f"shape of {name}", info.shape, "of 2 dimensions above 0")
        rows = _numbers(file, name, Part(info, shape))
        sides.setdefault(f"model.layers.{match[1]}.{layer}", {})[match[3]] = rows
    layers: dict[str, LayerAdapter] = {}
    for layer, pair in sides.items():
        if len(pair) < 2:
            raise CheckpointError(f"{file.name}: {layer} has no lora_{({'a', 'b'} - pair.keys()).pop()}")
        a, b = pair["a"], pair["b"]
        if len(a) != b.shape[1]:
            raise CheckpointError(
                f"{file.name}: {layer} has A {list(a.shape)} and B {list(b.shape)} of different ranks"
            )
        if base is not None and is_paired and layer.endswith((".q_proj", ".k_proj")) and layer not in base.ordered:
            if len(b) % base.head_dim:
                raise CheckpointError(f"{file.name}: {layer} has {len(b)} outputs, in heads of {base.head_dim}")
            b = b[pair_order(len(b), base.head_dim, base.turned)]
        # llama.cpp multiplies by 1 where there is no alpha.
        layers[layer] = LayerAdapter(a, b, alpha / len(a) if alpha else 1.0)
    if not layers:
        raise CheckpointError(f"{file.name} has no adapters")
    return layers


def _numbers(file: GGUF, name: str, part: Part) -> NDArray[Any]:
    """Return a copy of a matrix as plain floats. Raises `CheckpointError`."""
    if part.info.type not in FLOATS and part.info.type not in gguf_blocks.TYPES:
        raise file.fault(f"type of {name}", part.info.type, "one of floats and blocks")
    weight = Rows(GGUFFile(file), part).read(0, part.shape[0])
    numbers: NDArray[Any] = weight.codes if part.info.type in FLOATS else weight.dequantize()
    return numbers.copy()
