"""The text that methods are calibrated on: out of a file, or the model's own words; cut into pieces of token ids.

The model's own words are what it says to nothing at temperature 1, as in Liu et al. 2023 ("LLM-QAT: Data-Free
Quantization Aware Training for Large Language Models", section 3.1): text like what it was trained on, without any of
it. The noise is keyed by seeds 0, 1, 2, ..., so that it is the same text each time. Knows no tokenizer and no engine:
both are handed in. Called by `cli.quantize`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from headrace.protocol.errors import RequestError

MAX_FILE_BYTES = 256 * 2**20
BATCH = 16
"""Texts that the model is asked for at once."""
MAX_EMPTY = 4
"""Batches in a row that may bring nothing."""


def read_texts(path: Path) -> list[str | list[int]]:
    """The texts of a file: each line's "text" or "token_ids" of a .jsonl, or the whole of any other as one.

    Raises `RequestError` for what can not be read so.
    """
    field, shown = "calibration", str(path)
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise RequestError(field, shown, f"a file of at most {MAX_FILE_BYTES} bytes, not {size}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(field, shown, f"a readable UTF-8 file ({error})") from error
    if path.suffix != ".jsonl":
        return [text]
    texts: list[str | list[int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                field, shown, f'one JSON object with a "text" a line (line {number}: {error})'
            ) from error
        found: Any = value.get("text", value.get("token_ids")) if isinstance(value, dict) else None
        known = isinstance(found, list) and all(type(token_id) is int and token_id >= 0 for token_id in found)
        if not isinstance(found, str) and not known:
            raise RequestError(field, shown, f'one JSON object with a "text" a line; line {number} is none')
        texts.append(found)
    return texts


def cut(texts: Iterable[Sequence[int]], length: int, num_tokens: int) -> list[list[int]]:
    """Pieces of at most `length` tokens, num_tokens in all if there are as many. Raises `RequestError` for none."""
    pieces: list[list[int]] = []
    left = num_tokens
    for ids in texts:
        for first in range(0, len(ids), length):
            piece = list(ids[first : first + min(length, left)])
            if len(piece) > 1:  # a token alone sees nothing
                pieces.append(piece)
                left -= len(piece)
            if left < 1:
                return pieces
    if not pieces:
        raise RequestError("calibration", "", "a text of some tokens")
    return pieces


def own_words(answer: Callable[[range], Sequence[Sequence[int]]], length: int, num_tokens: int) -> list[list[int]]:
    """What the model says to nothing. answer: token ids of a text for each of some seeds."""

    def told() -> Iterator[Sequence[int]]:
        empty, left = 0, num_tokens
        for batch in count():
            found = [ids for ids in answer(range(batch * BATCH, (batch + 1) * BATCH)) if len(ids) > 1]
            empty = 0 if found else empty + 1
            if empty == MAX_EMPTY:
                raise RequestError("calibration", None, "a FILE: the model ends its own texts before they begin")
            yield from found
            left -= sum(map(len, found))
            if left < 1:
                return

    return cut(told(), length, num_tokens)
