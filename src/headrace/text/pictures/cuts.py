"""How a picture becomes the inputs of a tower: sizes and tiles, by the rules of the family's image processor.

A rule takes a picture of Pillow's in RGB and the values of preprocessor_config.json. The order of the resizings and
their filters decide the numbers, so they are the processor's own. Knows no model. Called by `sandbox`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SIDE = 4096
"""Pixels of a side that idefics3's processor resizes a picture to at most."""
MAX_TILES = 64
MAX_RATIO = 200
"""Of the sides of a picture that Qwen's processor takes."""
MAX_QWEN_PATCHES = 2**14
"""Patches of a picture that Qwen's towers take: one that has more is made smaller, where their processor makes it so
from `size.longest_edge` on."""
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
"""The numbers of Pillow's filters, as in preprocessor_config.json."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)


class Tiles(NamedTuple):
    """The inputs made of one picture, and how many lines and columns of them are tiles: 0 for a picture as a whole."""

    images: list[Image]
    lines: int = 0
    columns: int = 0


class Settings:
    """The values of preprocessor_config.json, each verified. Raises ValueError naming the key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def integer(self, *names: str, default: int | None = None, high: int = 2**14) -> int:
        """Return the number under `names`, one inside the other; older files have one number for all."""
        value: Any = self._values
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else value
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise ValueError(f"{'.'.join(names)} is {value!r:.40}, expected an integer from 1 to {high}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise ValueError(f"{name} is {value!r:.40}, expected a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        return default if value is None else bool(value)

    def has(self, *names: str) -> bool:
        """Return whether there is a value under `names`, one inside the other."""
        value: Any = self._values
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value is not None

    def colour(self, name: str, default: Sequence[float]) -> tuple[int, ...]:
        """Return a colour of three numbers from 0 to 1 as bytes, rounded down."""
        value = self._values.get(name) or default
        if not isinstance(value, list | tuple) or len(value) != 3 or not all(0 <= part <= 1 for part in value):
            raise ValueError(f"{name} is {value!r:.80}, expected three numbers from 0 to 1")
        return tuple(int(part * 255) for part in value)

    def filter(self, default: int) -> int:
        """Return the number of the filter for resizing."""
        value = self._values.get("resample")
        return value if isinstance(value, int) and 0 <= value <= 5 else default


def _up_to(size: int, step: int) -> int:
    return -(-size // step) * step


def idefics3(image: Image, settings: Settings) -> Tiles:
    """The longer side becomes size.longest_edge, and both sides multiples of a tile's; the tiles, and the picture as a
    whole, made as small as a tile."""
    tile, resample = settings.integer("max_image_size", "longest_edge", default=364), settings.filter(LANCZOS)
    if settings.flag("do_resize", True):
        longest = settings.integer("size", "longest_edge", default=4 * 364)
        image = image.resize(_idefics3_size(*image.size, longest), resample)
    if not settings.flag("do_image_splitting", True):
        return Tiles([image.resize((tile, tile), resample)])
    width, height = image.size
    ratio = width / height
    if width >= height:
        width = _up_to(width, tile)
        height = _up_to(int(width / ratio), tile)
    else:
        height = _up_to(height, tile)
        width = _up_to(int(height * ratio), tile)
    if (width // tile) * (height // tile) > MAX_TILES:
        raise ValueError(f"{width // tile} x {height // tile} tiles, expected at most {MAX_TILES}")
    image = image.resize((width, height), resample)
    if max(width, height) <= tile:
        return Tiles([image])
    return Tiles([*tiles_of(image, tile), image.resize((tile, tile), resample)], height // tile, width // tile)


def _idefics3_size(width: int, height: int, longest: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > MAX_SIDE:
        width, height = MAX_SIDE, int(MAX_SIDE / ratio)
    elif height > width and height > MAX_SIDE:
        width, height = int(MAX_SIDE * ratio), MAX_SIDE
    return max(width, 1), max(height, 1)


def tiles_of(image: Image, size: int) -> list[Image]:
    """Return the tiles of a picture whose sides are multiples of `size`, line by line."""
    width, height = image.size
    corners = [(left, top) for top in range(0, height, size) for left in range(0, width, size)]
    return [image.crop((left, top, left + size, top + size)) for left, top in corners]


def internvl(image: Image, settings: Settings) -> Tiles:
    """As many tiles as fit the picture's shape best, and the picture as a whole, made as small as a tile. The family's
    processor does so whatever `crop_to_patches` is."""
    tile, resample = settings.integer("size", "height", default=384), settings.filter(BICUBIC)
    most = settings.integer("max_patches", default=12, high=MAX_TILES)
    if most == 1:
        return Tiles([image.resize((tile, tile), resample)])
    columns, lines = _best_grid(*image.size, tile, settings.integer("min_patches", default=1), most)
    tiles = tiles_of(image.resize((columns * tile, lines * tile), resample), tile)
    return Tiles([*tiles, image.resize((tile, tile), resample)] if len(tiles) > 1 else tiles)


def _best_grid(width: int, height: int, tile: int, least: int, most: int) -> tuple[int, int]:
    """Return the columns and lines whose ratio is nearest to the picture's; of equals the one with more tiles, while
    these cover less than twice the picture."""
    grids = [(c, n) for c in range(1, most + 1) for n in range(1, most + 1) if least <= c * n <= most]
    best, nearest = (1, 1), math.inf
    for columns, lines in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / lines)
        is_covered = width * height > 0.5 * tile * tile * columns * lines
        if distance < nearest or (distance == nearest and is_covered):
            best, nearest = (columns, lines), distance
    return best


def pixtral(image: Image, settings: Settings) -> Tiles:
    """At most size.longest_edge on a side, and both sides multiples of a patch's."""
    longest = settings.integer("size", "longest_edge", default=1024)
    patch = settings.integer("patch_size", "height", default=16)
    width, height = image.size
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        width, height = math.floor(width / ratio), math.floor(height / ratio)
    size = max(_up_to(width, patch), patch), max(_up_to(height, patch), patch)
    return Tiles([image.resize(size, settings.filter(BICUBIC))])


def llava(image: Image, settings: Settings) -> Tiles:
    """The whole picture: made a square with the mean colour if `do_pad`; resized to size, or until its shorter side is
    size.shortest_edge; and its middle cut out if `do_center_crop`."""
    if settings.flag("do_pad", False):
        image = _squared(image, settings.colour("image_mean", CLIP_MEAN))
    width, height = image.size
    if settings.flag("do_resize", True):
        width, height = _llava_size(width, height, settings)
        image = image.resize((width, height), settings.filter(BICUBIC))
    if settings.flag("do_center_crop", settings.has("crop_size")):
        crop_width, crop_height = (settings.integer("crop_size", side, default=224) for side in ("width", "height"))
        left, top = (width - crop_width) // 2, (height - crop_height) // 2
        image = image.crop((left, top, left + crop_width, top + crop_height))
    return Tiles([image])


def _squared(image: Image, colour: tuple[int, ...]) -> Image:
    from PIL import Image as images

    side = max(image.size)
    square = images.new("RGB", (side, side), colour)
    square.paste(image, ((side - image.size[0]) // 2, (side - image.size[1]) // 2))
    return square


def _llava_size(width: int, height: int, settings: Settings) -> tuple[int, int]:
    if settings.has("size", "height"):
        return settings.integer("size", "width"), settings.integer("size", "height")
    shorter = settings.integer("size", "shortest_edge", default=224)
    if width <= height:
        return shorter, int(shorter * height / width)
    return int(shorter * width / height), shorter


def qwen(image: Image, settings: Settings) -> Tiles:
    """Both sides multiples of a row's, and pixels between size.shortest_edge and size.longest_edge."""
    patch = settings.integer("patch_size", default=14)
    side = patch * settings.integer("merge_size", default=2)
    # A resized picture has at most as many patches as a tower takes.
    least, most = (
        settings.integer(*names, default=default, high=2**30)
        for names, default in (
            (("min_pixels",) if settings.has("min_pixels") else ("size", "shortest_edge"), 56 * 56),
            (("max_pixels",) if settings.has("max_pixels") else ("size", "longest_edge"), 28 * 28 * 1280),
        )
    )
    most = min(most, MAX_QWEN_PATCHES * patch**2)
    width, height = image.size
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ValueError(f"{width} x {height} pixels, expected sides of at most {MAX_RATIO} to 1")
    resizes, new = settings.flag("do_resize", True), [height, width]
    if not resizes and (width % side or height % side):
        raise ValueError(f"{width} x {height} pixels, expected multiples of {side}")
    if resizes:
        new = _qwen_size(height, width, side, least, most)
    if new[0] * new[1] > MAX_QWEN_PATCHES * patch**2:
        raise ValueError(
            f"{new[1]} x {new[0]} pixels, expected at most {MAX_QWEN_PATCHES} patches of {patch} x {patch}"
        )
    return Tiles([image.resize((new[1], new[0]), settings.filter(BICUBIC)) if resizes else image])


def _qwen_size(height: int, width: int, side: int, least: int, most: int) -> list[int]:
    new = [round(size / side) * side for size in (height, width)]
    if new[0] * new[1] > most:
        beta = math.sqrt(height * width / most)
        new = [max(side, math.floor(size / beta / side) * side) for size in (height, width)]
    elif new[0] * new[1] < least:
        beta = math.sqrt(least / (height * width))
        new = [math.ceil(size * beta / side) * side for size in (height, width)]
    return new


def llama4(image: Image, settings: Settings) -> Tiles:
    """Tiles of the canvas that lets the picture grow least, or shrink least, which lies in its upper left; and the
    whole picture, as small as a tile."""
    from PIL import Image as images

    tile, resample = settings.integer("size", "height", default=336), settings.filter(BILINEAR)
    most, largest = (
        settings.integer("max_patches", default=16, high=MAX_TILES),
        settings.flag("resize_to_max_canvas", False),
    )
    lines, columns = _best_canvas(*image.size, tile, most, largest)
    canvas = images.new("RGB", (columns * tile, lines * tile))
    # A picture does not grow beyond a tile.
    bounds = [side if largest else min(max(had, tile), side) for had, side in zip(image.size, canvas.size, strict=True)]
    canvas.paste(image.resize(_within(*image.size, bounds[0], bounds[1]), resample))
    if lines * columns == 1:
        return Tiles([canvas])
    return Tiles([*tiles_of(canvas, tile), image.resize((tile, tile), resample)], lines, columns)


def _best_canvas(width: int, height: int, tile: int, most: int, largest: bool) -> tuple[int, int]:
    """Return the lines and columns of tiles. The processor compares numbers of single precision."""
    scales = {}
    for lines in range(1, most + 1):
        for columns in range(1, most // lines + 1):
            across, down = array("f", [columns * tile / width, lines * tile / height])
            scales[lines, columns] = min(across, down)
    grown = [scale for scale in scales.values() if scale >= 1]
    best = max(scales.values()) if not grown else max(grown) if largest else min(grown)
    return min((grid for grid, scale in scales.items() if scale == best), key=lambda grid: grid[0] * grid[1])


def _within(width: int, height: int, most_across: int, most_down: int) -> tuple[int, int]:
    """Return the size of a picture that reaches one of two bounds."""
    across, down = most_across / width, most_down / height
    if across < down:
        return most_across, max(1, min(math.floor(height * across), most_down))
    return max(1, min(math.floor(width * down), most_across)), most_down


def gemma3(image: Image, settings: Settings) -> Tiles:
    """The whole picture, resized to a square. The family's processor makes no crops whatever `do_pan_and_scan` is."""
    size = settings.integer("size", "width", default=224), settings.integer("size", "height", default=224)
    return Tiles([image.resize(size, settings.filter(BILINEAR))])


CUTS: dict[str, Callable[[Image, Settings], Tiles]] = {
    "idefics3": idefics3,
    "smolvlm": idefics3,
    "internvl": internvl,
    "mistral3": pixtral,
    "pixtral": pixtral,
    "llava": llava,
    "llama4": llama4,
    "qwen2_5_vl": qwen,
    "qwen3_vl": qwen,
    "qwen3_vl_moe": qwen,
    "qwen3_5": qwen,
    "qwen3_5_moe": qwen,
    "gemma3": gemma3,
}
"""The rules by model_type."""
