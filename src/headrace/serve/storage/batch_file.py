"""Answers a file of requests into a file of outputs, and continues after an interruption.

The output file grows by whole lines, each written at once, and counted when it is on the disk. A kill may tear its last
line; when the machine loses its power, lines that were not counted may be cut or filled with zeros. The next run
removes them. Requests that have an answer are skipped; those that failed with a server error are run again. Knows files
and lines, and no engine. Called by `headrace run-batch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from headrace.protocol.errors import HeadraceError, RequestError
from headrace.serve.gates.limits import MAX_BODY_BYTES
from headrace.serve.storage import disk
from headrace.serve.storage.batch_lines import Answerer, Line, answers, has_failed, read_line, refusal


@dataclass(slots=True)
class Report:
    """The counts of a run. `num_failed` counts the errors in the whole output, which includes earlier runs."""

    num_lines: int = 0
    num_known: int = 0
    num_completed: int = 0
    num_failed: int = 0


@dataclass(slots=True)
class Known:
    """The contents of an output file: ids with an answer, and the numbers of invalid lines."""

    custom_ids: set[str] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)
    num_failed: int = 0


def check_paths(source: Path, target: Path) -> None:
    """Check that `source` can be read and `target` written. Raises `RequestError`."""
    if not source.is_file():
        raise RequestError("INPUT", str(source), "a file of JSON lines")
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise RequestError("OUTPUT", str(target), "a file in a folder that is there")
    if target.exists() and os.path.samefile(source, target):
        raise RequestError("OUTPUT", str(target), "another file than INPUT")


async def answer_file(
    source: Path, target: Path, answerer: Answerer, concurrency: int, show: Callable[[int, int], None]
) -> Report:
    """Answer the requests that have no output in `target` yet. Calls `show(lines done, lines in all)`.

    Raises `HeadraceError` if another run writes the file, `RequestError` if it is not an output file, and
    `EngineDeadError`.
    """
    report = Report()
    with open(source, "rb") as file:
        total = sum(1 for number, raw in _raw_lines(file) if raw.strip())
    with _locked(target):
        known = mend(target)
    with _locked(target) as out:

        def write(output: dict[str, Any]) -> None:
            disk.append(out, msgspec.json.encode(output) + b"\n")
            failed = has_failed(output)
            report.num_failed += failed
            report.num_completed += not failed

        async def sync() -> None:
            await asyncio.to_thread(disk.sync_file, out)
            show(report.num_known + report.num_completed + report.num_failed, total)

        report.num_failed = known.num_failed
        report.num_lines = total
        disk.sync(target.absolute().parent)
        await sync()
        with open(source, "rb") as file:
            lines = _lines_to_ask(file, answerer, known, report, write)
            async with contextlib.aclosing(answers(lines, answerer.answer, concurrency)) as outputs:
                async for group in outputs:
                    for output in group:
                        write(output)
                    await sync()
            await sync()
    return report


def mend(target: Path) -> Known:
    """Read an output file, and remove its torn line and its server errors.

    Raises `RequestError` for a file that is not an output of a batch.
    """
    known = Known()
    good_lines: list[bytes] = []
    raw = target.read_bytes() if target.exists() else b""
    lines = raw.split(b"\n")
    for number, text in enumerate(lines, 1):
        output = _output(text)
        if output is None:
            # A last line without its end was torn by a kill. Zeros stand for bytes that a crash kept from the disk.
            if text and number < len(lines) and b"\0" not in text:
                raise RequestError("OUTPUT", f"line {number}", "an output of run-batch; this file is something else")
            continue
        if output["response"] is None and isinstance(output.get("line"), int):
            known.numbers.add(output["line"])
        elif isinstance(output["response"], dict) and output["response"].get("status_code", 500) < 500:
            known.custom_ids.add(output["custom_id"])
        else:
            continue
        known.num_failed += has_failed(output)
        good_lines.append(text + b"\n")
    content = b"".join(good_lines)
    if content != raw:
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            disk.create(part, content)
            shutil.copymode(target, part)
            disk.replace(part, target)
            disk.sync(target.absolute().parent)
        finally:
            disk.unlink(part)
    return known


def _output(text: bytes) -> dict[str, Any] | None:
    """Return the output in a line of the file, or None if the line has none."""
    try:
        output = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return output if isinstance(output, dict) and "custom_id" in output and "response" in output else None


def _lines_to_ask(
    file: BinaryIO, answerer: Answerer, known: Known, report: Report, write: Callable[[dict[str, Any]], None]
) -> Iterator[Line]:
    """Yield the requests that have no answer yet. Invalid lines are written to the output as errors."""
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
    """Yield (line number from 1, line). A line over the limit is cut one byte after the limit."""
    number = 0
    while raw := file.readline(MAX_BODY_BYTES + 2):
        number += 1
        whole = raw
        while not raw.endswith(b"\n") and (raw := file.readline(MAX_BODY_BYTES)):
            pass
        yield number, whole.rstrip(b"\r\n")


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[int]:
    """Open the file for appending, under an exclusive lock. Raises `HeadraceError` if another run has the lock."""
    with open(target, "ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HeadraceError(f"{target} is being written by another run") from error
        try:
            yield file.fileno()
        finally:
            disk.unlock(file.fileno())
