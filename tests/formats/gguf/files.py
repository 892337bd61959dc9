"""Writes small GGUF files for the tests, right ones and wrong ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence

LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, what: object) -> bytes:
    return string(what) if isinstance(what, str | bytes) else struct.pack("<" + LETTERS[kind], what)


def scalar(key: str | bytes, kind: int, what: object) -> bytes:
    return string(key) + struct.pack("<I", kind) + value(kind, what)


def listed(key: str, kind: int, items: Sequence[object]) -> bytes:
    return string(key) + struct.pack("<IIQ", ARRAY, kind, len(items)) + b"".join(value(kind, item) for item in items)


def tensor(name: str | bytes, shape: Sequence[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_file(
    fields: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    alignment: int = 32,
    version: int = 3,
    num_fields: int | None = None,
    num_tensors: int | None = None,
    magic: bytes = b"GGUF",
) -> bytes:
    """A whole file. The counts are those of `fields` and `tensors`, unless something else is to be claimed."""
    counts = (len(tensors) if num_tensors is None else num_tensors, len(fields) if num_fields is None else num_fields)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def vocabulary(model: str, tokens: Sequence[str | bytes], kinds: Sequence[int] | None = None) -> list[bytes]:
    fields = [scalar("tokenizer.ggml.model", STRING, model), listed("tokenizer.ggml.tokens", STRING, tokens)]
    return fields if kinds is None else [*fields, listed("tokenizer.ggml.token_type", I32, kinds)]
