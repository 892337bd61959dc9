"""A file of requests answered into a file of outputs, which tells what is left to do when the work was broken off.

The output file grows by whole lines, each written at once; its last line may be torn by a kill, and is mended. Requests
that have their answer are not asked again; those that failed by the server's own fault are. Knows files and lines, and
no engine. Called by `headrace run-batch`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from headrace.protocol.errors import HeadraceError, RequestError
from headrace.serve.gates.limits import MAX_BODY_BYTES
from headrace.serve.storage.batch_lines import Answerer, Line, answers, has_failed, read_line, refusal


@dataclass(slots=True)
class Report:
    """What became of a file. `num_failed` counts the errors in the whole output, earlier runs' included."""

    num_lines: int = 0
    num_known: int = 0
    num_completed: int = 0
    num_failed: int = 0


@dataclass(slots=True)
class Known:
    """What an output file has already: the ids that are answered, and the numbers of lines that were no requests."""

    custom_ids: set[str] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)
    num_failed: int = 0


def check_paths(source: Path, target: Path) -> None:
    """Raises `RequestError` for files that can not be read and written."""
    if not source.is_file():
        raise RequestError("INPUT", str(source), "a file of JSON lines")
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise RequestError("OUTPUT", str(target), "a file in a folder that is there")
    if target.exists() and os.path.samefile(source, target):
        raise RequestError("OUTPUT", str(target), "another file than INPUT")


async def answer_file(
    source: Path, target: Path, answerer: Answerer, concurrency: int, show: Callable[[int, int], None]
) -> Report:
    """Answer what `target` does not have yet. `show` is told (lines done, lines in all).

    Raises `HeadraceError` if another run writes the file, `RequestError` if it is something else than an output,
    and what ends the engine.
    """
    report = Report()
    with open(source, "rb") as file:
        total = sum(1 for number, raw in _raw_lines(file) if raw.strip())
    with _locked(target):
        known = mend(target)
    with _locked(target) as out:

        def write(output: dict[str, Any]) -> None:
            out.write(msgspec.json.encode(output) + b"\n")
            failed = has_failed(output)
            report.num_failed += failed
            report.num_completed += not failed
            show(report.num_known + report.num_completed + report.num_failed, total)

        report.num_failed = known.num_failed
        report.num_lines = total
        with open(source, "rb") as file:
            lines = _lines_to_ask(file, answerer, known, report, write)
            async with contextlib.aclosing(answers(lines, answerer.answer, concurrency)) as found:
                async for _, output in found:
                    write(output)
    return report


def mend(target: Path) -> Known:
    """Read an output file, and leave in it what counts: whole lines, no failures of the server's.

    Raises `RequestError` for a file that is no output of a batch.
    """
    known = Known()
    kept: list[bytes] = []
    raw = target.read_bytes() if target.exists() else b""
    lines = raw.split(b"\n")
    for number, text in enumerate(lines, 1):
        output = _output(text)
        if output is None:
            # Of a last line without its end nobody knows what it was going to be.
            if text and number < len(lines):
                raise RequestError("OUTPUT", f"line {number}", "an output of run-batch; this file is something else")
            continue
        if output["response"] is None and isinstance(output.get("line"), int):
            known.numbers.add(output["line"])
        elif isinstance(output["response"], dict) and output["response"].get("status_code", 500) < 500:
            known.custom_ids.add(output["custom_id"])
        else:
            continue
        known.num_failed += has_failed(output)
        kept.append(text + b"\n")
    mended = b"".join(kept)
    if mended != raw:
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            part.write_bytes(mended)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    return known


def _output(text: bytes) -> dict[str, Any] | None:
    """One line of an output file, or None if it is none."""
    try:
        output = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return output if isinstance(output, dict) and "custom_id" in output and "response" in output else None


def _lines_to_ask(
    file: BinaryIO, answerer: Answerer, known: Known, report: Report, write: Callable[[dict[str, Any]], None]
) -> Iterator[Line]:
    """The requests that have no answer yet. What is no request is written to the output as an error."""
    seen: dict[str, int] = {}
    for number, raw in _raw_lines(file):
        if not raw.strip():
            continue
        custom_id = None
        try:
            line = read_line(raw, number, tuple(answerer.routes))
            custom_id = line.custom_id
            if custom_id in seen:
                raise RequestError("custom_id", custom_id, f"used once; line {seen[custom_id]} has it too")
        except RequestError as error:
            if number in known.numbers:
                continue
            write(refusal(number, custom_id, error.code, f"line {number}: {error}"))
            continue
        seen[custom_id] = number
        if custom_id in known.custom_ids:
            report.num_known += 1
            continue
        yield line


def _raw_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers; one that is too long is cut where that is certain."""
    number = 0
    while raw := file.readline(MAX_BODY_BYTES + 2):
        number += 1
        whole = raw
        while not raw.endswith(b"\n") and (raw := file.readline(MAX_BODY_BYTES)):
            pass
        yield number, whole.rstrip(b"\r\n")


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[BinaryIO]:
    """The file, to write at its end, by nobody else at the same time."""
    with open(target, "ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HeadraceError(f"{target} is being written by another run") from error
        yield file
