"""Files of strangers: regular files alone are opened, and JSON is measured before it is parsed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace import foreign
from headrace.foreign import Limits
from headrace.protocol.errors import CheckpointError

LIMITS = Limits(num_bytes=200, texts=4, containers=3, values=6, depth=2, digits=5)
FITS = b'{"a": [12345, "b", null]}'
TOO_MUCH = {
    "texts": (b'{"a": "b", "c": "d", "e": 1}', "5 texts and keys"),
    "containers": (b'{"a": [[], []]}', "4 lists and objects"),
    "values": (b'{"a": [1, 2, 3, 4, 5, 6]}', "7 values"),
    "depth": (b'{"a": [[]]}', "deeply nested JSON"),
    "digits": (b'{"a": 123456}', "more than 5 digits"),
    "digits of a fraction": (b'{"a": 0.123456}', "more than 5 digits"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_S_28_json_that_is_too_much_is_never_parsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, words = TOO_MUCH[name]
    assert json.loads(data), "it is JSON"
    monkeypatch.setattr(foreign, "json", None)
    with pytest.raises(CheckpointError, match=f"the file has .*{words}.*; it must be JSON .*at most"):
        foreign.parse_object(data, "the file", LIMITS)


def test_S_28_control_what_fits_is_parsed_and_texts_do_not_count_as_what_they_hold() -> None:
    assert foreign.parse_object(FITS, "it", LIMITS) == json.loads(FITS)
    text = {"a": "[[[[{{{{,,,,,,,,,,1234567890" + '\\"[['}
    assert foreign.parse_object(json.dumps(text).encode(), "it", LIMITS) == text


@pytest.mark.parametrize("data", [b"", b"[1]", b"nul", b"\xff{}", b'{"a": 1', b"\x00" * 9])
def test_S_28_what_is_no_object_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="^the file "):
        foreign.parse_object(data, "the file", LIMITS)


@pytest.mark.parametrize("text", [r"\ud83d", r"\ude00", r"\ud83dx\ude00", r"\ud83d\ud83d\ude00", r"\uD83D\\\uDE00"])
@pytest.mark.parametrize("form", ['{"a": ["b", "%s"]}', '{"a": {"%s": 1}}'])
def test_S_28_half_a_surrogate_pair_is_refused(text: str, form: str) -> None:
    """Python's parser takes it, and a text with it can be neither sent nor stored."""
    data = (form % text).encode()
    assert json.loads(data), "it is JSON"
    with pytest.raises(
        CheckpointError, match=r"^the file has half a surrogate pair in the text '.*; it must be Unicode"
    ):
        foreign.parse_object(data, "the file", LIMITS)


@pytest.mark.parametrize("text", [r"\ud83d\ude00", r"\uD83D\uDE00", r"\\ud83d", r"\ud7ff\ue000", "\U0001f600"])
def test_S_28_control_whole_pairs_are_read(text: str) -> None:
    data = f'{{"a": "{text}"}}'.encode()
    assert foreign.parse_object(data, "it", LIMITS) == json.loads(data)


def test_S_28_infinity_is_read_for_it_is_in_configs() -> None:
    """Mamba's configs have it; each field says whether it may be infinite."""
    assert foreign.parse_object(b'{"a": Infinity}', "it", LIMITS) == {"a": float("inf")}


def test_S_28_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 200)
    assert foreign.read_bytes(path, 200) == b"x" * 200
    path.write_bytes(b"x" * 201)
    with pytest.raises(CheckpointError, match="a has 201 bytes; at most 200 are read"):
        foreign.read_bytes(path, 200)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def circle(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [pipe, directory, device, circle])
def test_S_28_nothing_but_a_file_is_opened_and_nothing_is_waited_for(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json (is no regular file|can not be opened)"):
        foreign.read_object(tmp_path / "config.json", LIMITS)


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    """So the hub's cache has them."""
    (tmp_path / "blob").write_bytes(FITS)
    (tmp_path / "config.json").symlink_to(tmp_path / "blob")
    assert foreign.read_object(tmp_path / "config.json", LIMITS)
    with pytest.raises(CheckpointError, match="absent is missing"):
        foreign.read_object(tmp_path / "absent", LIMITS)


def test_runs_of_digits_are_measured_in_one_pass() -> None:
    """A regex for the digits above the bound would read each of these runs from each of its digits: for minutes."""
    limits = LIMITS._replace(num_bytes=2**24, values=10_000, digits=4300)
    data = b"[" + b",".join([b"9" * 4300] * 1900) + b"]"
    foreign.check_size(data, limits)
    with pytest.raises(foreign.JSONSizeError, match="more than 4300 digits"):
        foreign.check_size(data[:-1] + b",1" + b"9" * 4300 + b"]", limits)
