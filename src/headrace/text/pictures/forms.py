"""`PictureForm`: how a model's prompt names a picture. Its chat template writes one mark for it, which becomes the text
that the model was trained with, with a placeholder token for each row of the tower's.

The rules are those of the families' processors. Called by `reading`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from headrace import hub
from headrace.protocol.errors import CheckpointError
from headrace.text.pictures import projectors

FILES = hub.PICTURE_FILES


class Grid(NamedTuple):
    """The inputs of one picture: (height, width) of each, and how many lines and columns of them are tiles."""

    sizes: list[tuple[int, int]]
    lines: int
    columns: int


class Words(NamedTuple):
    """The texts of a family's tokens. mark: written by the template for a picture. token: the placeholder of a row."""

    mark: str
    token: str
    begin: str = ""
    end: str = ""
    line_end: str = ""
    between: str = ""


class PictureForm(NamedTuple):
    """family: the model_type. settings: the values of preprocessor_config.json. patch: pixels of a patch's side; merge:
    patches of a side that become one row."""

    family: str
    settings: dict[str, Any]
    words: Words
    patch: int
    merge: int

    def rows_of(self, height: int, width: int) -> int:
        """Return the rows of an input of this size."""
        side = self.patch * self.merge
        return (height // side) * (width // side)

    def text(self, grid: Grid) -> str:
        """Return the text that stands for a picture in a prompt."""
        return TEXTS[self.family](self, grid)


def _idefics3(form: PictureForm, grid: Grid) -> str:
    words = form.words
    *tiles, whole = [words.token * form.rows_of(*size) for size in grid.sizes]
    text = ""
    for place, tile in enumerate(tiles):
        line, column = divmod(place, grid.columns)
        text += f"{words.begin}<row_{line + 1}_col_{column + 1}>{tile}" + "\n" * (column + 1 == grid.columns)
    return text + "\n" * bool(tiles) + f"{words.begin}<global-img>{whole}{words.begin}"


def _one_run(form: PictureForm, grid: Grid) -> str:
    words = form.words
    return words.begin + words.token * sum(form.rows_of(*size) for size in grid.sizes) + words.end


def _lines(form: PictureForm, grid: Grid) -> str:
    words, side = form.words, form.patch * form.merge
    [(height, width)] = grid.sizes
    lines = [words.token * (width // side)] * (height // side)
    return words.line_end.join(lines) + words.end


def _llama4(form: PictureForm, grid: Grid) -> str:
    words, rows = form.words, form.words.token * form.rows_of(*grid.sizes[-1])
    line = words.between.join([rows] * grid.columns) + words.line_end
    return words.begin + line * grid.lines + words.mark + rows + words.end


def _gemma3(form: PictureForm, grid: Grid) -> str:
    return f"\n\n{_one_run(form, grid)}\n\n"


TEXTS: dict[str, Callable[[PictureForm, Grid], str]] = {
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "internvl": _one_run,
    "mistral3": _lines,
    "pixtral": _lines,
    "llava": _one_run,
    "llama4": _llama4,
    "qwen2_5_vl": _one_run,
    "qwen3_vl": _one_run,
    "qwen3_vl_moe": _one_run,
    "qwen3_5": _one_run,
    "qwen3_5_moe": _one_run,
    "gemma3": _gemma3,
}
"""By model_type."""
SEEN_WHOLE = ("gemma3",)
"""Families whose text's rows see the whole picture that they stand in, also what is behind them."""
WORDS = {
    "idefics3": Words("<image>", "<image>", "<fake_token_around_image>"),
    "smolvlm": Words("<image>", "<image>", "<fake_token_around_image>"),
    "internvl": Words("<IMG_CONTEXT>", "<IMG_CONTEXT>", "<img>", "</img>"),
    "mistral3": Words("[IMG]", "[IMG]", "", "[IMG_END]", "[IMG_BREAK]"),
    "pixtral": Words("[IMG]", "[IMG]", "", "[IMG_END]", "[IMG_BREAK]"),
    "llava": Words("<image>", "<image>"),
    "llama4": Words(
        "<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_y_separator|>", "<|tile_x_separator|>"
    ),
    "gemma3": Words("<start_of_image>", "<image_soft_token>", "<start_of_image>", "<end_of_image>"),
}
QWEN = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families whose template writes what stands around a picture's rows."""
WORDS |= dict.fromkeys(QWEN, Words("<|image_pad|>", "<|image_pad|>"))


PATCHES = {"idefics3": 32, "smolvlm": 32, "internvl": 14, "llama4": 14, "qwen2_5_vl": 14}
"""Pixels of a patch's side where config.json leaves them out."""
SIDES = {"internvl": 448, "llava": 224, "llama4": 448, "gemma3": 224}
"""Pixels of a side of the tower's input where config.json leaves them out, for towers that take one size."""
LONGEST, MAX_PATCHES = ("mistral3", "pixtral"), 128
"""Families whose towers take all sizes, and the patches of a side that these take at most."""
CLIP_TYPE = "clip_vision_model"
MAX_NUMBER = 2**14


class Texts(Protocol):
    """A tokenizer, as far as forms need it."""

    def token_to_id(self, token: str) -> int | None: ...


def read_form(directory: Path, tokenizer: Texts, projector: Path | None = None) -> PictureForm | None:
    """Return the form of the model in `directory`; None for one whose pictures are not read, or that has no settings
    for them. projector: a GGUF file with its tower. Raises `CheckpointError` for files that are malformed."""
    if projector is not None:
        _, _, values, settings = projectors.read(projector)
    elif directory.is_dir():
        values, settings = hub.read_json(directory / "config.json"), picture_settings(directory)
    else:
        return None
    family, tower = str(values.get("model_type")), values.get("vision_config")
    if isinstance(tower, Mapping) and family == "llava" and tower.get("model_type") == "pixtral":
        family = "pixtral"
    if family not in TEXTS or not isinstance(tower, Mapping) or not settings:
        return None
    words = WORDS[family]
    absent = [word for word in words if word and tokenizer.token_to_id(word) is None]
    if absent:
        raise CheckpointError(f"{directory}: the tokenizer lacks {absent[0]!r}, which stands for pictures")
    default = 32 if family == "llava" and tower.get("model_type", CLIP_TYPE) == CLIP_TYPE else PATCHES.get(family, 16)
    patch = _number(tower, "patch_size", default)
    if family in QWEN:
        merge = _number(tower, "spatial_merge_size", 2)
        settings = settings | {"patch_size": patch, "merge_size": merge}
        return PictureForm(family, settings, words, patch, merge)
    if family in ("internvl", "llama4"):
        ratio = tower.get("pixel_shuffle_ratio", 0.5) if family == "llama4" else values.get("downsample_ratio", 0.5)
        merge = int(1 / ratio) if isinstance(ratio, float) and 0.01 < ratio <= 1 else 1
    elif family in ("llava", "pixtral"):
        merge = 1
    elif family == "gemma3":
        merge = _number(tower, "image_size", 224) // patch // math.isqrt(_number(values, "mm_tokens_per_image", 256))
    else:
        merge = _number(values, "scale_factor" if family in ("idefics3", "smolvlm") else "spatial_merge_size", 2)
    _verify_sizes(family, settings, tower, patch)
    if family in ("idefics3", "smolvlm"):
        _verify_tile(settings, patch, merge)
    if family in ("mistral3", "pixtral"):
        settings = settings | {"patch_size": {"height": patch * merge, "width": patch * merge}}
    return PictureForm(family, settings, words, patch, merge)


def _verify_sizes(family: str, settings: Mapping[str, Any], tower: Mapping[str, Any], patch: int) -> None:
    """Raises `CheckpointError` for settings that make inputs of sizes which the tower does not take."""
    if settings.get("do_resize") is False and (family in SIDES or family in LONGEST):
        raise CheckpointError("preprocessor_config.json: do_resize is false, expected true")
    key, size = "size", settings.get("size")
    if family == "llava" and settings.get("do_center_crop", True) and "crop_size" in settings:
        key, size = "crop_size", settings["crop_size"]
    if family in SIDES:
        side = _number(tower, "image_size", SIDES[family])
        stated = [size.get("height"), size.get("width")] if isinstance(size, Mapping) else [size, size]
        if stated != [side, side]:
            raise CheckpointError(
                f"preprocessor_config.json: {key} is {size!r:.80}, expected the tower's image_size, {side}"
            )
    if family in LONGEST:
        longest = size.get("longest_edge") if isinstance(size, Mapping) else size
        if type(longest) is not int or not 1 <= longest <= MAX_PATCHES * patch:
            raise CheckpointError(
                f"preprocessor_config.json: size is {size!r:.80}, expected a longest_edge from 1 to "
                f"{MAX_PATCHES * patch}, {MAX_PATCHES} patches"
            )


def _verify_tile(settings: Mapping[str, Any], patch: int, merge: int) -> None:
    """Raises `CheckpointError` for tiles whose patches cannot be joined."""
    stated = settings.get("max_image_size", {})
    tile = stated.get("longest_edge", 364) if isinstance(stated, Mapping) else stated
    if type(tile) is not int or not patch * merge <= tile <= MAX_NUMBER or tile // patch % merge:
        raise CheckpointError(
            f"preprocessor_config.json: max_image_size is {stated!r:.80}, expected a longest_edge of a multiple of "
            f"{merge} patches of {patch} pixels"
        )


def _number(values: Mapping[str, Any], name: str, default: int) -> int:
    """Return a number of config.json that may be written as a pair of equal ones."""
    value = values.get(name, default)
    value = value[0] if isinstance(value, list) and value else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_NUMBER:
        raise CheckpointError(f"config.json: {name} is {value!r:.80}, expected an integer from 1 to {MAX_NUMBER}")
    return value


def picture_settings(directory: Path) -> dict[str, Any]:
    """Return the values for pictures of the processor's files; older ones have them in a file of their own."""
    values: dict[str, Any] = {}
    for name in FILES:
        if (directory / name).is_file():
            read = hub.read_json(directory / name)
            values |= read if name == FILES[0] else read.get("image_processor") or {}
    return values


HALF = (0.5, 0.5, 0.5)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class Norm(NamedTuple):
    """The numbers of pixels: (pixel * scale - mean) / deviation, by channel. rounds: each step rounds to bfloat16."""

    scale: float
    mean: Sequence[float]
    deviation: Sequence[float]
    rounds: bool = False


def norm_of(settings: Mapping[str, Any], family: str) -> Norm:
    """Return how the family's processor makes numbers of pixels. Raises `CheckpointError`."""
    mean, deviation = CLIP if family in ("internvl", "mistral3", "pixtral", "llava", *QWEN) else (HALF, HALF)
    if settings.get("do_normalize", True):
        mean, deviation = settings.get("image_mean") or mean, settings.get("image_std") or deviation
    else:
        mean, deviation = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    scale = settings.get("rescale_factor") or 1 / 255
    for name, values in (("image_mean", mean), ("image_std", deviation), ("rescale_factor", [scale] * 3)):
        if len(values) != 3 or not all(isinstance(each, int | float) and 0 <= each < 1e4 for each in values):
            raise CheckpointError(f"preprocessor_config.json: {name} is {values!r:.80}, expected positive numbers")
    is_scaled = settings.get("do_rescale", True)
    rounds = family == "llama4" and is_scaled and settings.get("do_normalize", True)
    return Norm(float(scale) if is_scaled else 1.0, mean, deviation, rounds)
