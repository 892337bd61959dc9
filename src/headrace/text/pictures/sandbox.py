"""The program that decodes pictures and cuts them: `python -m headrace.text.pictures.sandbox 10.0`.

A picture's bytes come from strangers, and its decoders are programs in C. They run here, in a process with a bound on
memory, processor time and pixels. Started by `reading` only.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import msgspec

from headrace.text.bounded import MAX_FRAME_BYTES, address_space, serve
from headrace.text.pictures.cuts import CUTS, Settings
from headrace.text.pictures.reading import MAX_MEMORY, MAX_PIXELS, Cut, Job, View

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def main(max_cpu_seconds: float) -> None:
    """Answer jobs until stdin ends."""
    # Decoders are loaded before the process may read no more files.
    from PIL import Image, ImageOps

    _ = ImageOps
    Image.init()
    serve(answer, max_cpu_seconds, address_space() + MAX_MEMORY)


def answer(body: bytes) -> bytes:
    job = msgspec.msgpack.decode(body, type=Job)
    try:
        tiles = CUTS[job.family](opened(job.data), Settings(job.settings))
        views = [View(tile.height, tile.width, tile.tobytes()) for tile in tiles.images]
        if sum(len(view.pixels) for view in views) > MAX_FRAME_BYTES // 2:
            return msgspec.msgpack.encode(Cut(error="one that its model's processor makes smaller"))
        return msgspec.msgpack.encode(Cut(views, tiles.lines, tiles.columns))
    except MemoryError:
        return msgspec.msgpack.encode(Cut(error=f"one that takes less than {MAX_MEMORY >> 20} MiB to decode"))
    except (ValueError, OSError, SyntaxError, EOFError, KeyError, IndexError, TypeError, ArithmeticError) as error:
        return msgspec.msgpack.encode(Cut(error=f"one that can be read: {str(error)[:200]}"))


def opened(data: bytes) -> Image:
    """Return the picture, its first frame, turned as its EXIF says, in RGB, on white where it is transparent. Raises
    ValueError, OSError and other errors of Pillow's for bytes that are no picture."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # counted here
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ValueError(f"it is none of {', '.join(FORMATS)}") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels, expected at most {MAX_PIXELS} in all")
    image.load()
    image = ImageOps.exif_transpose(image)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")


if __name__ == "__main__":
    main(float(sys.argv[1]))
