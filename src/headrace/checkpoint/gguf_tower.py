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
}
"""By llama.cpp's name of the projector."""


def read(file: GGUF, kind: str, values: Mapping[str, Any]) -> Reading:
    """Return the tensors of a file with the projector `kind`, and `values`, its config.json. A tensor that has no name
    here keeps the file's, so that no model takes it."""
    names, vision = NAMES[kind], values["vision_config"]
    hidden, head_dim = vision["hidden_size"], vision["hidden_size"] // vision["num_attention_heads"]
    down = file.tensors.get("v.blk.0.ffn_down.weight")
    is_swapped = names.swaps and down is not None and down.shape[0] == hidden
    other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if is_swapped else {}
    parts: dict[str, Part] = {}
    for name, info in file.tensors.items():
        shape = tuple(reversed(info.shape))
        stem, _, suffix = name.rpartition(".")
        block, ours = BLOCK.fullmatch(name), name
        if name in names.whole:
            ours, num_ones = names.whole[name]
            shape = (1,) * num_ones + tuple(size for size in shape if size != 1)
        elif block is not None and block[2] in names.layer:
            part = names.layer[other.get(block[2], block[2])]
            ours = f"{names.root}.{block[1]}.{part}.{block[3]}"
        elif suffix in ("weight", "bias") and stem in names.ends:
            ours = f"{names.ends[stem]}.{suffix}"
        if len(shape) == 4:
            shape = (shape[0], math.prod(shape[1:]))
        if ours in parts:
            raise file.fault("name of a tensor", name, f"the only one that is {ours}")
        parts[ours] = Part(info, shape)
    turned = head_dim if kind == "pixtral" else 0
    return Reading({"head_dim": head_dim}, parts, turned)


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
        if factors == [None] * len(factors):
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
