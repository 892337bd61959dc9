"""The small trained model that ships with the package, so that a first run works offline.

A Llama in Hugging Face's layout; MODEL_CARD.md describes it, and training/ made it. To keep the package small
its weights are stored in `model.u8`: a byte for each, which picks one of 256 bfloat16 numbers, its tensor's own.
`directory` writes them out once, as the bfloat16 checkpoint that every other part of headrace reads. Called by `hub`.
Standard library only.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from headrace.protocol.errors import CheckpointError

ABOUT = "the built-in model writes small stories, to show what the engine does; it can not answer questions"
PATH: Path = Path(__file__).parent
STORED, LEVELS, DIGEST = "model.u8", ".levels", "sha256"
BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@functools.cache
def directory() -> Path:
    """Return the built-in model as a plain checkpoint: bfloat16 in model.safetensors, and the files of `BESIDE`.

    It lies in ~/.cache/headrace, or, where that can not be written, in a private folder among the temporary files. It
    is written at the first call, and again if a byte of it differs from what was shipped. Raises
    `CheckpointError` if it can be written nowhere, or if `model.u8` is damaged.
    """
    header, data, digest = _shipped()
    reasons = []
    for folder in (_cache, _temporary):
        try:
            checkpoint = folder() / f"builtin-{digest[:16]}"
            checkpoint.mkdir(parents=True, exist_ok=True)
            for name in BESIDE:
                _write(checkpoint / name, (PATH / name).read_bytes())
            weights = checkpoint / "model.safetensors"
            if not weights.is_file() or hashlib.sha256(weights.read_bytes()).hexdigest() != digest:
                _write(weights, _checked(header, data, digest))
            return checkpoint
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
            reasons.append(str(error))
    raise CheckpointError(f"the built-in model's weights can be written nowhere: {'; '.join(reasons)}")


def read(path: Path) -> tuple[dict[str, Any], memoryview]:
    """Return header and data of a safetensors file, whatever its name."""
    whole = memoryview(path.read_bytes())
    end = 8 + int.from_bytes(whole[:8], "little")
    header: dict[str, Any] = json.loads(bytes(whole[8:end]))
    return header, whole[end:]


def unpacked(header: dict[str, Any], data: memoryview) -> bytes:
    """Return the safetensors file with each tensor of bytes replaced by its levels; the others unchanged."""
    names = [name for name in header if name != "__metadata__" and not name.endswith(LEVELS)]
    parts, entries, at = [], {}, 0
    for name in names:
        begin, end = header[name]["data_offsets"]
        part = bytes(data[begin:end])
        if header[name]["dtype"] == "U8":
            begin, end = header[name + LEVELS]["data_offsets"]
            levels = bytes(data[begin:end])
            wide = bytearray(2 * len(part))
            wide[0::2], wide[1::2] = part.translate(levels[0::2]), part.translate(levels[1::2])
            part = bytes(wide)
        entries[name] = {"dtype": "BF16", "shape": header[name]["shape"], "data_offsets": [at, at + len(part)]}
        parts.append(part)
        at += len(part)
    text = json.dumps({"__metadata__": {"format": "pt"}} | entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers begin at a multiple of 8 bytes
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _shipped() -> tuple[dict[str, Any], memoryview, str]:
    try:
        header, data = read(PATH / STORED)
        return header, data, str(header["__metadata__"][DIGEST])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{PATH / STORED} can not be read, install headrace again: {error!r}") from error


def _checked(header: dict[str, Any], data: memoryview, digest: str) -> bytes:
    try:
        plain, why = unpacked(header, data), "its numbers are not those that were shipped"
    except (ValueError, KeyError, TypeError) as error:
        plain, why = b"", repr(error)
    if hashlib.sha256(plain).hexdigest() != digest:
        raise CheckpointError(f"{PATH / STORED} is damaged, install headrace again: {why}")
    return plain


def _cache() -> Path:
    return Path.home() / ".cache" / "headrace"


def _temporary() -> Path:
    path = Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if path.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{path} is not this user's alone")
    return path


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically, as several processes may do it at once; a file with the same bytes is left alone."""
    if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
        return
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
