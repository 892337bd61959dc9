"""The progress of tasks that take seconds to hours: a bar on a terminal, and lines of the log elsewhere.

Knows no task. Called by the loader of models and by commands that take minutes.
"""

from __future__ import annotations

import contextlib
import logging
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
def progress_bar(title: str, is_visible: bool = True, logger: logging.Logger | None = None) -> Iterator[Progress]:
    """Yield a function that moves a bar on stderr, if `is_visible` and stderr is a terminal.

    Without a terminal the function writes a line to `logger` every `LOG_INTERVAL_S`, and nothing if that is None."""
    if not is_visible or not env.is_terminal(2):
        yield _lines(title, logger if is_visible else None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, TextColumn("{task.fields[label]}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, label="")
        yield lambda num_done, total, label="": bar.update(task, completed=num_done, total=total, label=label)


def _lines(title: str, logger: logging.Logger | None) -> Progress:
    last = time.monotonic()

    def show(num_done: int, total: int, label: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if logger is None or now < last + LOG_INTERVAL_S:
            return
        last = now
        fields = {"num_done": num_done, "num_total": total}
        logger.info(
            "%s: %d of %d (%d%%)", title, num_done, total, 100 * num_done / max(1, total), extra={"fields": fields}
        )

    return show
