"""The tensors of a tower for pictures in a GGUF file, by the names that the model files of towers have for them.

What llama.cpp's converter changes is undone here: rows of Pixtral's q and k in pairs, matrices up and down under each
other's name in old files, convolutions with four dimensions. Knows names and shapes, no models. Called by
`engine.library.towers`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.gguf_keys import Reading
from headrace.checkpoint.gguf_parts import Part
from headrace.checkpoint.gguf_rows import Rows
from headrace.checkpoint.gguf_source import GGUFFormat
from headrace.gguf import GGUF
from headrace.models.weights import Linear
from headrace.quant.arrays import floats
from headrace.quant.base import QWeight

if TYPE_CHECKING:
    from headrace.backends.base import Backend

F32 = NDArray[np.float32]
BLOCK = re.compile(r"v\.blk\.(0|[1-9]\d{0,3})\.([a-z_0-9]+)\.(weight|bias)")
SIGLIP = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


class Names(NamedTuple):
    """The names of a projector's tensors. root: of a layer; layer, ends: by the file's names, without the kind. whole:
    tensors with the kind, and how many dimensions of 1 stand before their shape here. swaps: old files have up and down
    under each other's name."""

    root: str
    layer: dict[str, str]
    ends: dict[str, str]
    whole: Mapping[str, tuple[str, int]] = MappingProxyType({})
    swaps: bool = False


NAMES = {
    "idefics3": Names(
        "vision_model.encoder.layers",
        SIGLIP,
        {
            "v.patch_embd": "vision_model.embeddings.patch_embedding",
            "v.position_embd": "vision_model.embeddings.position_embedding",
            "v.post_ln": "vision_model.post_layernorm",
            "mm.model.fc": "connector.modality_projection.proj",
        },
        swaps=True,
    ),
    "internvl": Names(
        "vision_tower.encoder.layer",
        {
            "attn_q": "attention.q_proj",
            "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj",
            "attn_out": "attention.projection_layer",
            "attn_q_norm": "attention.q_norm",
            "attn_k_norm": "attention.k_norm",
            "ln1": "layernorm_before",
            "ln2": "layernorm_after",
            "ls1": "lambda_1",
            "ls2": "lambda_2",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        {
            "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
            "mm.model.mlp.0": "multi_modal_projector.layer_norm",
            "mm.model.mlp.1": "multi_modal_projector.linear_1",
            "mm.model.mlp.3": "multi_modal_projector.linear_2",
        },
        {
            "v.class_embd": ("vision_tower.embeddings.cls_token", 2),
            "v.position_embd.weight": ("vision_tower.embeddings.position_embeddings", 1),
        },
    ),
    "pixtral": Names(
        "vision_tower.transformer.layers",
        {
            "attn_q": "attention.q_proj",
            "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj",
            "attn_out": "attention.o_proj",
            "ln1": "attention_norm",
            "ln2": "ffn_norm",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        {
            "v.patch_embd": "vision_tower.patch_conv",
            "v.pre_ln": "vision_tower.ln_pre",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
            "mm.input_norm": "multi_modal_projector.norm",
            "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
        },
    ),
    "mlp": Names(
        "vision_tower.encoder.layers",
        SIGLIP,
        {
            "v.patch_embd": "vision_tower.embeddings.patch_embedding",
            "v.position_embd": "vision_tower.embeddings.position_embedding",
            "v.pre_ln": "vision_tower.pre_layrnorm",
            "v.post_ln": "vision_tower.post_layernorm",
            "mm.0": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        {"v.class_embd": ("vision_tower.embeddings.class_embedding", 0)},
        swaps=True,
    ),
    "llama4": Names(
        "vision_model.model.layers",
        {
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_out": "self_attn.o_proj",
            "ln1": "input_layernorm",
            "ln2": "post_attention_layernorm",
            # gguf-py's table of 2026, which has the name for Gemma 4 too.
            "attn_post_norm": "post_attention_layernorm",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        {
            "v.patch_embd": "vision_model.patch_embedding.linear",
            "v.pre_ln": "vision_model.layernorm_pre",
            "v.post_ln": "vision_model.layernorm_post",
            "mm.model.mlp.1": "vision_model.vision_adapter.mlp.fc1",
            "mm.model.mlp.2": "vision_model.vision_adapter.mlp.fc2",
            "mm.model.fc": "multi_modal_projector.linear_1",
        },
        {
            "v.class_embd": ("vision_model.class_embedding", 0),
            "v.position_embd.weight": ("vision_model.positional_embedding_vlm", 0),
        },
    ),
}
"""By llama.cpp's name of the projector."""
UNUSED = {"v.token_embd.img_break"}
"""The embedding of [IMG_BREAK], which the text has too."""
VECTORS = re.compile(r".+\.lambda_[12]\.weight")


def read(file: GGUF, kind: str, values: Mapping[str, Any]) -> Reading:
    """Return the tensors of a file with the projector `kind`, and `values`, its config.json. A tensor that has no name
    here keeps the file's, so that no model takes it."""
    names, vision = NAMES[kind], values["vision_config"]
    hidden, head_dim = vision["hidden_size"], vision["hidden_size"] // vision["num_attention_heads"]
    down = file.tensors.get("v.blk.0.ffn_down.weight")
    is_swapped = names.swaps and down is not None and down.shape[:1] == (hidden,)
    other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if is_swapped else {}
    parts: dict[str, Part] = {}
    for name, info in file.tensors.items():
        if name in UNUSED:
            continue
        shape = tuple(reversed(info.shape))
        stem, _, suffix = name.rpartition(".")
        block, ours = BLOCK.fullmatch(name), name
        if name in names.whole:
            ours, num_ones = names.whole[name]
            shape = (1,) * num_ones + tuple(size for size in shape if size != 1)
        elif block is not None and block[2] in names.layer:
            part = names.layer[other.get(block[2], block[2])]
            ours = f"{names.root}.{block[1]}.{part}.{block[3]}"
            ours = ours.removesuffix(".weight") if VECTORS.fullmatch(ours) else ours
        elif suffix in ("weight", "bias") and stem in names.ends:
            ours = f"{names.ends[stem]}.{suffix}"
        if len(shape) == 4:
            shape = (shape[0], math.prod(shape[1:]))
        if ours in parts:
            raise file.fault("name of a tensor", name, f"the only one that is {ours}")
        parts[ours] = Part(info, shape)
    # Of Llama 4 the converter leaves q and k as they are in the checkpoint.
    return Reading({"head_dim": head_dim}, parts, head_dim if kind == "pixtral" else 0, reorders=kind == "llama4")


class TowerFormat(GGUFFormat):
    """`quantising.Format` of a tower. spare: tensors that it may leave. scaled: as `TowerCheckpoint` has it."""

    def __init__(
        self,
        file: GGUF,
        reading: Reading,
        backend: Backend,
        exact: bool,
        spare: re.Pattern[str],
        scaled: Mapping[str, str],
    ) -> None:
        super().__init__(file, reading, backend, exact)
        self._spare, self._scaled = spare, scaled

    def layers(self, linear: Linear) -> list[Rows]:
        layers = super().layers(linear)
        for place, (name, num_out, _) in enumerate(linear.layers()):
            factors = self._factors(f"{name}.weight", num_out)
            if factors is not None:
                layers[place] = Scaled(layers[place], factors)
        return layers

    def bias(self, linear: Linear) -> F32:
        factors = [self._factors(f"{name}.bias", num_out) for name, num_out, _ in linear.layers()]
        bias = super().bias(linear)
        if all(each is None for each in factors):
            return bias
        nums = [num_out for _, num_out, _ in linear.layers()]
        ones = (np.ones(num, np.float32) if each is None else each for num, each in zip(nums, factors, strict=True))
        return np.asarray(bias * np.concatenate(list(ones)), np.float32)

    def is_spare(self, name: str) -> bool:
        return self._spare.fullmatch(name) is not None

    def _factors(self, name: str, num_out: int) -> F32 | None:
        for pattern, other in self._scaled.items():
            match = re.fullmatch(pattern, name)
            if match is not None and (factors := match.expand(other)) in self.parts.names:
                return np.array(floats(self.small(factors, (num_out,))), np.float32)
        return None


class Scaled(Rows):
    """Rows that are multiplied by the numbers of another tensor (LayerScale, Touvron et al. 2021), as floats."""

    def __init__(self, rows: Rows, factors: F32) -> None:
        super().__init__(rows.file, rows.part, rows.order)
        self._stored, self._factors, self.kind = rows, factors, "F32"

    def read(self, first: int, last: int) -> QWeight:
        numbers = floats(self._stored.read(first, last).dequantize())
        return QWeight(np.ascontiguousarray(numbers * self._factors[first:last, None]))
