"""The progress bar of commands that take minutes. Knows no command; loading a model has a bar of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol


class Progress(Protocol):
    """A function that a long task calls with (steps done, steps in all, what comes next)."""

    def __call__(self, num_done: int, total: int, label: str = "", /) -> None: ...


@contextlib.contextmanager
def progress_bar(title: str, is_visible: bool = True) -> Iterator[Progress]:
    """Yield a function that moves a bar on stderr; it does nothing unless `is_visible` and stderr is a terminal."""
    if not is_visible or not sys.stderr.isatty():
        yield lambda num_done, total, label="": None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, TextColumn("{task.fields[label]}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, label="")
        yield lambda num_done, total, label="": bar.update(task, completed=num_done, total=total, label=label)
