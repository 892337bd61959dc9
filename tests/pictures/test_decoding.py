"""Pictures from strangers: forms, turns and frames, and files that would take too much, in a process with bounds."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image
from tests.support.picture_model import encoded, noisy

from headrace.protocol.errors import RequestError
from headrace.text.pictures import reading
from headrace.text.pictures.forms import WORDS, PictureForm
from headrace.text.pictures.marks import PictureInput
from headrace.text.pictures.reading import Cut, PictureReader, from_base64, from_data_url, spans_of

FORM = PictureForm("idefics3", {"do_resize": False, "max_image_size": {"longest_edge": 8}}, WORDS["idefics3"], 2, 2)


@pytest.fixture(scope="module")
def reader() -> Iterator[PictureReader]:
    result = PictureReader(FORM)
    yield result
    result.process.close()


def whole(cut: Cut) -> Image.Image:
    """A picture of one tile."""
    [view] = cut.views
    return Image.frombytes("RGB", (view.width, view.height), view.pixels)


def halves(left: Any, right: Any, mode: str = "RGB") -> Image.Image:
    image = Image.new(mode, (8, 8), left)
    image.paste(right, (4, 0, 8, 8))
    return image


RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


@pytest.mark.parametrize(
    ("data", "left", "right"),
    [
        (encoded(halves(RED, BLUE), "PNG"), RED, BLUE),
        (encoded(halves(RED, BLUE), "WEBP", lossless=True), RED, BLUE),
        (encoded(halves(RED, BLUE), "JPEG", quality=100, subsampling=0), RED, BLUE),
        (encoded(halves(RED, BLUE), "GIF", save_all=True, append_images=[halves(BLUE, RED)]), RED, BLUE),
        (encoded(halves(255, 0, "L"), "PNG"), WHITE, (0, 0, 0)),
        (encoded(halves(RED, BLUE).convert("P", palette=Image.Palette.ADAPTIVE), "PNG"), RED, BLUE),
        (encoded(halves((*RED, 255), (*BLUE, 0), "RGBA"), "PNG"), RED, WHITE),
        (encoded(halves(1, 0, "1"), "PNG"), WHITE, (0, 0, 0)),
        (encoded(halves(RED, BLUE).convert("CMYK"), "JPEG", quality=100), RED, BLUE),
    ],
    ids=["png", "webp", "jpeg", "gif", "grey", "palette", "transparent", "bits", "cmyk"],
)
def test_forms_of_files(reader: PictureReader, data: bytes, left: Any, right: Any) -> None:
    image = whole(reader.cut(data, "image"))
    for place, colour in (((0, 3), left), ((7, 3), right)):
        seen = image.getpixel(place)
        assert isinstance(seen, tuple)
        assert max(abs(a - b) for a, b in zip(seen, colour, strict=True)) < 8


def test_a_photo_is_turned_as_its_exif_says(reader: PictureReader) -> None:
    image = halves(RED, BLUE)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the left side is up
    seen = whole(reader.cut(encoded(image, "PNG", exif=exif), "image"))
    assert seen.getpixel((3, 0)) == RED
    assert seen.getpixel((3, 7)) == BLUE
    assert whole(reader.cut(encoded(image, "PNG"), "image")).getpixel((0, 3)) == RED  # control


def png_of(width: int, height: int, data: bytes) -> bytes:
    """A PNG that declares any size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_S_16_a_bomb_is_refused_by_its_declared_size(reader: PictureReader) -> None:
    for width, height in ((60_000, 60_000), (2**31 - 1, 1), (8193, 8192)):
        with pytest.raises(RequestError, match=f"{width} x {height} pixels, expected at most"):
            reader.cut(png_of(width, height, zlib.compress(b"")), "image")
    assert whole(reader.cut(encoded(halves(RED, BLUE), "PNG"), "image")).getpixel((0, 0)) == RED


def test_a_file_that_takes_too_long_ends_its_process_alone(
    reader: PictureReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_CPU_SECONDS", 0.05)
    slow = PictureReader(FORM)
    data = encoded(Image.new("RGB", (8000, 8000), RED), "JPEG")  # half a second on a fast machine
    with pytest.raises(RequestError, match=r"more than 0\.05 s of processor time"):
        slow.cut(data, "image")
    # The next one is read: by a new process.
    assert whole(slow.cut(encoded(halves(RED, BLUE), "PNG"), "image")).size == (8, 8)
    slow.process.close()


def test_files_that_are_cut_or_changed_are_read_or_refused(reader: PictureReader) -> None:
    rng = random.Random(3)
    forms: list[tuple[str, dict[str, Any]]] = [("PNG", {}), ("JPEG", {}), ("WEBP", {}), ("GIF", {})]
    originals = [encoded(noisy(1, 24, 16), form, **options) for form, options in forms]
    num_refused = 0
    for turn in range(160):
        data = bytearray(originals[turn % len(originals)])
        for _ in range(rng.choice((1, 3, 20))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if turn % 3 == 0:
            del data[rng.randrange(len(data)) :]
        try:
            assert reader.cut(bytes(data), "image").views
        except RequestError as error:
            num_refused += error.field == "image"
    assert 20 < num_refused < 160
    assert reader.process.num_faults == 0


@pytest.mark.parametrize(
    ("url", "bound"),
    [
        ("data:image/png;base64,@@", "in base64"),
        ("data:text/plain;base64,AAAA", "a picture, of image/png"),
        ("data:image/png", "a data URL"),
        ("file:///etc/passwd", "a data URL"),
        ("/etc/passwd", "a data URL"),
    ],
)
def test_urls_that_hold_no_picture(url: str, bound: str) -> None:
    with pytest.raises(RequestError, match=bound):
        from_data_url(url, "image")


def test_data_in_base64_and_in_percents() -> None:
    assert from_data_url("data:image/png;base64,aGk=", "image") == b"hi"
    assert from_data_url("data:image/gif,%47IF", "image") == b"GIF"
    with pytest.raises(RequestError, match="at most"):
        from_base64("A" * (2 * reading.MAX_BYTES), "image")


def test_an_address_is_not_fetched_here(reader: PictureReader) -> None:
    with pytest.raises(RequestError, match="nothing is fetched"):
        reader.read(PictureInput("image", "https://a.example/b.png", "image_url"))


def test_more_pixels_than_a_request_may_have(reader: PictureReader, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = reader.cut(encoded(noisy(1, 24, 16), "PNG"), "image")
    assert len(cut.views) == 7
    assert (cut.lines, cut.columns) == (2, 3)
    monkeypatch.setattr(reading, "MAX_CUT_BYTES", 3 * 8 * 8 * 7)
    assert reader.text("<image>", [cut])
    with pytest.raises(RequestError, match="fewer or smaller"):
        reader.text("<image><image>", [cut, cut])


def test_spans() -> None:
    assert spans_of([]) == []
    assert spans_of([3, 4, 5, 9, 11, 12]) == [(3, 3), (9, 1), (11, 2)]
