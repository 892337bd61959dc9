"""Reads traces of real traffic: the arrival and length of requests, and the common prefixes of their prompts.

Azure's CSV (Patel et al. 2024, Splitwise) has TIMESTAMP, ContextTokens, GeneratedTokens. Mooncake's JSON lines (Qin et
al. 2024, arXiv:2407.00079) have timestamp in milliseconds, input_length, output_length, and `hash_ids`, a number for
each block of 512 tokens that stands for all tokens up to its end. Called by `headrace simulate` and `headrace bench`.
"""

from __future__ import annotations

import csv
import datetime
import io
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.protocol.errors import RequestError

MOONCAKE_TOKENS = 512
MAX_TOKENS = 2**24


class Call(NamedTuple):
    """A request of a trace: seconds after the first, tokens of prompt and answer, and the keys of the prompt's blocks
    of `MOONCAKE_TOKENS` tokens; no keys where nothing is known of them."""

    time: float
    num_prompt: int
    num_new: int
    keys: tuple[int, ...] = ()

    def token_ids(self, number: int) -> list[int]:
        """Return a prompt of these sizes. Prompts share the tokens of common keys. Without keys, a request's `number`
        makes its tokens unlike all others."""
        if not self.keys:
            return [-1 - number] * self.num_prompt
        tokens = [key for key in self.keys for _ in range(MOONCAKE_TOKENS)]
        return (tokens + [tokens[-1]] * (self.num_prompt - len(tokens)))[: self.num_prompt]


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read(path: Path, duration: float = 0.0, speed_up: float = 1.0) -> list[Call]:
    """Return the calls of the first `duration` seconds (0: all), by time, `speed_up` times as fast as they came.

    Raises `RequestError` for a file that is absent or is no trace."""
    if not path.is_file():
        raise RequestError("--trace", str(path), "a file: Azure's CSV or Mooncake's JSON lines")
    text = path.read_text(encoding="utf-8", errors="replace")
    calls = _mooncake(path, text) if text.lstrip().startswith("{") else _azure(path, text)
    calls.sort(key=lambda call: call.time)
    if not calls:
        raise RequestError("--trace", str(path), "a trace with requests")
    first = calls[0].time
    calls = [call._replace(time=(call.time - first) / speed_up) for call in calls]
    return [call for call in calls if not duration or call.time < duration]


def _azure(path: Path, text: str) -> list[Call]:
    rows = csv.DictReader(io.StringIO(text))
    calls = []
    for number, row in enumerate(rows, 2):
        try:
            # Seven digits of a second are more than Python reads.
            time = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=datetime.UTC).timestamp()
            calls.append(_call(path, number, time, int(row["ContextTokens"]), int(row["GeneratedTokens"]), []))
        except (KeyError, TypeError, ValueError) as error:
            columns = "a line with TIMESTAMP, ContextTokens, GeneratedTokens"
            raise RequestError("--trace", f"{path}:{number}", f"{columns} ({error})") from None
    return calls


def _mooncake(path: Path, text: str) -> list[Call]:
    calls = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError as error:
            raise RequestError("--trace", f"{path}:{number}", f"a line of Mooncake's trace ({error})") from None
        time = row.timestamp / 1000
        calls.append(_call(path, number, time, row.input_length, row.output_length, row.hash_ids))
    return calls


def _call(path: Path, number: int, time: float, num_prompt: int, num_new: int, keys: list[int]) -> Call:
    if not 0 <= min(num_prompt, num_new) <= max(num_prompt, num_new) <= MAX_TOKENS:
        raise RequestError("--trace", f"{path}:{number}", f"a line with lengths from 0 to {MAX_TOKENS}")
    # A request has one token of prompt and of answer at least.
    return Call(time, max(1, num_prompt), max(1, num_new), tuple(keys))
