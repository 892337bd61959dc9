"""The metadata of a tower for pictures in a GGUF file, as llama.cpp's converter writes them: `read` gives them as the
values of a config.json and of a preprocessor_config.json.

What the file leaves out is what the family's image processor takes for it. Reads no tensors, only their shapes. Called
by `forms`, and by `engine.library.towers`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from headrace import gguf
from headrace.gguf import GGUF

PREFIX = "clip.vision."
MAX_LAYERS = 512
MAX_SIZE = 2**17
MAX_PIXELS = 2**13
"""Pixels of a side of the tower's input."""
MAX_SIDE = 128
"""Patches of a side."""
MAX_TILES = 64
MAX_HEAD = 1024
"""Numbers of a head that turns: each place has an angle for every second one."""


class Projector(NamedTuple):
    """A tower's file. kind: its projector. values: its config.json; settings: its preprocessor_config.json."""

    file: GGUF
    kind: str
    values: dict[str, Any]
    settings: dict[str, Any]


def read(path: Path) -> Projector:
    """Read the metadata of the tower at `path`. Raises `CheckpointError` for a file of another architecture or with
    another projector than those of `KINDS`, and for values out of range, naming file, key, value and bound."""
    file = gguf.read(path)
    architecture = file.text("general.architecture")
    if architecture != "clip":
        raise file.fault("general.architecture", architecture, "clip, that of a tower for pictures")
    if not file.flag("clip.has_vision_encoder"):
        value = file.flag("clip.has_vision_encoder")
        raise file.fault("clip.has_vision_encoder", value, "true: sounds are not read")
    # The oldest files have LLaVA's and do not name it.
    kind = file.text("clip.projector_type") or file.text(PREFIX + "projector_type") or "mlp"
    if kind not in KINDS:
        raise file.fault("clip.projector_type", kind, f"one of {', '.join(KINDS)}")
    tower = _Tower(file)
    values, settings = KINDS[kind](tower)
    return Projector(
        file, kind, values, {"image_mean": tower.colour("mean"), "image_std": tower.colour("std")} | settings
    )


class _Tower:
    """The metadata that all towers have, each verified. sides: patches of a side of the input."""

    def __init__(self, file: GGUF) -> None:
        self.file = file
        self.hidden, self.heads = self.number("embedding_length"), self.number("attention.head_count")
        self.image, self.patch = self.number("image_size", high=MAX_PIXELS), self.number("patch_size", high=MAX_PIXELS)
        self.sides = self.image // self.patch
        if self.hidden % self.heads:
            self.refuse("attention.head_count", self.heads, f"a divisor of embedding_length, {self.hidden}")
        if self.sides < 1:
            self.refuse("patch_size", self.patch, f"at most image_size, {self.image}")
        self.vision: dict[str, Any] = {
            "hidden_size": self.hidden,
            "intermediate_size": self.number("feed_forward_length"),
            "num_hidden_layers": self.number("block_count", high=MAX_LAYERS),
            "num_attention_heads": self.heads,
            "image_size": self.image,
            "patch_size": self.patch,
        }
        eps = file.real(PREFIX + "attention.layer_norm_epsilon")
        if eps is not None:
            if not 0 <= eps < 1:
                self.refuse("attention.layer_norm_epsilon", eps, "from 0 to 1")
            self.vision["layer_norm_eps"] = eps

    def refuse(self, name: str, value: object, bound: str) -> None:
        raise self.file.fault(PREFIX + name, value, bound)

    def number(self, name: str, default: int | None = None, high: int = MAX_SIZE) -> int:
        value = self.file.integer(PREFIX + name, 1, high)
        value = default if value is None else value
        if value is None:
            raise self.file.fault(PREFIX + name, None, f"there, an integer from 1 to {high}")
        return value

    def act(self, gelu: str, other: str) -> str:
        """Return the activation: `gelu` or SiLU where the file has a flag for it, else `other`."""
        if self.file.flag("clip.use_silu"):
            return "silu"
        return gelu if self.file.flag("clip.use_gelu") else other

    def colour(self, name: str) -> list[float]:
        """Return the mean or the deviation of pixels, for red, green and blue."""
        key = f"{PREFIX}image_{name}"
        values = self.file.reals(key, 3)
        least = 0.0 if name == "mean" else 1e-6
        if values is None or len(values) != 3 or not all(least <= value <= 1e3 for value in values):
            raise self.file.fault(key, None if values is None else list(values), f"three numbers from {least} to 1000")
        return list(values)

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def outputs(self, tensor: str) -> int:
        """Return the rows of a matrix: what its layer gives."""
        info = self.file.tensors.get(tensor)
        if info is None or len(info.shape) != 2:
            raise self.file.fault(tensor, None if info is None else info.shape, "there, with 2 dimensions")
        return info.shape[1]

    def merging(self, name: str, default: int) -> int:
        """Return how many patches of a side become one row."""
        factor = self.number(name, default, MAX_TILES)
        if self.sides % factor:
            self.refuse(name, factor, f"a divisor of image_size / patch_size, {self.sides}")
        return factor

    def check_places(self, num_extra: int) -> None:
        """Raise `CheckpointError` for a table of places of another size than the input's patches with `num_extra`."""
        if self.sides > MAX_SIDE:
            self.refuse("image_size", self.image, f"at most {MAX_SIDE} times patch_size, {self.patch}")
        name, num = "v.position_embd.weight", self.sides**2 + num_extra
        info = self.file.tensors.get(name)
        shape = None if info is None else info.shape
        if shape is None or shape[:2] != (self.hidden, num) or any(size != 1 for size in shape[2:]):
            raise self.file.fault(f"shape of {name}", shape, f"({self.hidden}, {num}), as image_size makes it")

    def check_turns(self) -> None:
        """Raise `CheckpointError` for heads that cannot turn by line and column."""
        head_dim = self.hidden // self.heads
        if head_dim % 4 or head_dim > MAX_HEAD:
            bound = f"one whose heads have a multiple of 4 numbers up to {MAX_HEAD}: embedding_length is {self.hidden}"
            self.refuse("attention.head_count", self.heads, bound)

    def values(self, model_type: str, width: str, **outer: Any) -> dict[str, Any]:
        """Return a config.json. width: the last matrix, whose rows are as wide as the text's."""
        text = {"hidden_size": self.outputs(width)}
        return {"model_type": model_type, "vision_config": self.vision, "text_config": text, **outer}


Values = dict[str, Any]


def _idefics3(tower: _Tower) -> tuple[Values, Values]:
    tower.check_places(0)
    factor, tile = tower.merging("projector.scale_factor", 2), tower.image
    longest = tower.number("preproc_image_size", 4 * tile, 2**14)
    tower.vision["hidden_act"] = tower.act("gelu_pytorch_tanh", "gelu_pytorch_tanh")
    settings = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
    return tower.values("idefics3", "mm.model.fc.weight", scale_factor=factor), settings


def _internvl(tower: _Tower) -> tuple[Values, Values]:
    tower.check_places(1)
    factor, tile = tower.merging("projector.scale_factor", 2), tower.image
    tower.vision |= {
        "hidden_act": tower.act("gelu", "gelu"),
        "attention_bias": tower.has("v.blk.0.attn_q.bias"),
        "use_qk_norm": tower.has("v.blk.0.attn_q_norm.weight"),
        "norm_type": "layer_norm" if tower.has("v.blk.0.ln1.bias") else "rms_norm",
    }
    least, most = tower.number("preproc_min_tiles", 1, MAX_TILES), tower.number("preproc_max_tiles", 12, MAX_TILES)
    if least > most:
        tower.refuse("preproc_min_tiles", least, f"at most preproc_max_tiles, {most}")
    settings = {"size": {"height": tile, "width": tile}, "min_patches": least, "max_patches": most}
    return tower.values("internvl", "mm.model.mlp.3.weight", downsample_ratio=1 / factor), settings


def _pixtral(tower: _Tower) -> tuple[Values, Values]:
    """Pixtral takes pictures of any size up to that of its training, which the file has as image_size."""
    tower.check_turns()
    merge, has_merger = tower.number("spatial_merge_size", 1, MAX_SIDE), tower.has("mm.patch_merger.weight")
    if merge > 1 and not has_merger:
        tower.refuse("spatial_merge_size", merge, "1 without the tensor mm.patch_merger.weight")
    tower.vision |= {"model_type": "pixtral", "hidden_act": tower.act("gelu", "gelu")}
    settings = {"size": {"longest_edge": min(tower.image, MAX_SIDE * tower.patch)}}
    outer = {"multimodal_projector_bias": tower.has("mm.1.bias"), "vision_feature_layer": -1}
    if has_merger:
        return tower.values("mistral3", "mm.2.weight", spatial_merge_size=merge, **outer), settings
    return tower.values("llava", "mm.2.weight", vision_feature_select_strategy="full", **outer), settings


def _llava(tower: _Tower) -> tuple[Values, Values]:
    """LLaVA 1.5's squares: the picture on one of the mean colour. The file has no layers behind those that count."""
    file, is_clip = tower.file, tower.has("v.class_embd")
    tower.check_places(int(is_clip))
    for name in ("v.image_newline", "model.image_newline"):
        if tower.has(name):
            raise file.fault("name of a tensor", name, "one of LLaVA 1.5: the tiles of LLaVA-NeXT are not read")
    num = tower.vision["num_hidden_layers"]
    stated = file.integers(PREFIX + "feature_layer", MAX_LAYERS)
    chosen = [num] if stated is None else list(stated)
    if len(chosen) != 1 or not 1 <= chosen[0] <= num:
        tower.refuse("feature_layer", chosen[:8], f"one layer, from 1 to {num}")
    if is_clip:
        kind, strategy, act = "clip_vision_model", "default", tower.act("gelu", "quick_gelu")
    else:
        kind, strategy, act = "siglip_vision_model", "full", tower.act("gelu_pytorch_tanh", "gelu_pytorch_tanh")
    tower.vision |= {"model_type": kind, "hidden_act": act}
    side = {"height": tower.image, "width": tower.image}
    settings = {"do_pad": True, "size": side, "crop_size": side, "do_center_crop": True}
    values = tower.values(
        "llava",
        "mm.2.weight",
        multimodal_projector_bias=tower.has("mm.0.bias"),
        vision_feature_layer=chosen[0],
        vision_feature_select_strategy=strategy,
    )
    return values, settings


def _llama4(tower: _Tower) -> tuple[Values, Values]:
    tower.check_places(1)
    tower.check_turns()
    factor, tile, inner = tower.merging("projector.scale_factor", 2), tower.image, tower.vision["intermediate_size"]
    if inner != factor**2 * tower.hidden:
        tower.refuse("feed_forward_length", inner, f"that of joined patches, {factor**2 * tower.hidden}")
    tower.vision |= {
        "pixel_shuffle_ratio": 1 / factor,
        "projector_input_dim": tower.outputs("mm.model.mlp.1.weight"),
        "projector_output_dim": tower.outputs("mm.model.mlp.2.weight"),
    }
    return tower.values("llama4", "mm.model.fc.weight"), {"size": {"height": tile, "width": tile}}


KINDS: dict[str, Callable[[_Tower], tuple[Values, Values]]] = {
    "idefics3": _idefics3,
    "internvl": _internvl,
    "pixtral": _pixtral,
    "mlp": _llava,
    "llama4": _llama4,
}
"""The projectors by llama.cpp's names."""
