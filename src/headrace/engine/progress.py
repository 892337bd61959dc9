"""The progress of tasks that take seconds to hours: a bar on a terminal, and lines of the log elsewhere.

Knows no task. Called by the loader of models and by commands that take minutes.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import Protocol

from headrace import env

LOG_INTERVAL_S = 5.0
"""Seconds from one line of progress in the log to the next."""


class Progress(Protocol):
    """A function that a long task calls with (steps done, steps in all, the name of the next)."""

    def __call__(self, num_done: int, total: int, label: str = "", /) -> None: ...


@contextlib.contextmanager
def progress_bar(
    title: str, is_visible: bool = True, logger: logging.Logger | None = None, has_long_steps: bool = False
) -> Iterator[Progress]:
    """Yield a function that moves a bar on stderr, if `is_visible` and stderr is a terminal.

    Without a terminal the function writes a line every `LOG_INTERVAL_S`, to `logger`, or to stderr if that is None;
    with `has_long_steps` a line for each step too."""
    if not is_visible:
        yield lambda num_done, total, label="": None
        return
    if not env.is_terminal(2):
        yield _lines(title, logger, has_long_steps)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(_rate(task.speed) if task.speed else "")

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), Rate(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, TextColumn("{task.fields[label]}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, label="")
        yield lambda num_done, total, label="": bar.update(task, completed=num_done, total=total, label=label)


def _lines(title: str, logger: logging.Logger | None, has_long_steps: bool) -> Progress:
    start = last = time.monotonic()
    first: int | None = None
    step = ""

    def show(num_done: int, total: int, label: str = "") -> None:
        nonlocal last, first, step
        now, is_new, step = time.monotonic(), has_long_steps and label != step, label
        # What an earlier run did counts for no rate.
        first = num_done if first is None else first
        if now < last + LOG_INTERVAL_S and not is_new:
            return
        last = now
        if logger is None:
            # Long steps are not of one length.
            rate = 0.0 if has_long_steps else (num_done - first) / max(1e-3, now - start)
            print(_line(title, num_done, total, rate, label), file=sys.stderr, flush=True)
            return
        fields = {"num_done": num_done, "num_total": total}
        logger.info(
            "%s: %d of %d (%d%%)", title, num_done, total, 100 * num_done / max(1, total), extra={"fields": fields}
        )

    return show


def _line(title: str, num_done: int, total: int, rate: float, label: str) -> str:
    parts = [f"{title}: {num_done:,} of {total:,} ({100 * num_done // max(1, total)} %)"]
    if rate > 0:
        parts += [_rate(rate), f"{(total - num_done) / rate:,.0f} s left at this rate"]
    return ", ".join([*parts, *([label] if label else [])])


def _rate(speed: float) -> str:
    return f"{speed:.1f}/s" if speed >= 0.1 else f"{1 / speed:.0f} s each"
