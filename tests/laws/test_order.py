"""The order of tests whose file is marked `in_order`, where a plugin shuffles the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import conftest


class Step:
    """Stands in for a test that pytest has collected."""

    def __init__(self, file: str, marks: tuple[str, ...]) -> None:
        self.path, self.nodeid, self.marks = Path(file), f"{file}::{id(self)}", marks

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


def test_steps_keep_their_order_and_others_are_shuffled() -> None:
    steps, others = [Step("a.py", ("in_order",)) for _ in range(4)], [Step("b.py", ()) for _ in range(2)]
    for item in [*steps, *others]:
        conftest.pytest_itemcollected(item)  # type: ignore[arg-type]
    items: list[Any] = [steps[2], others[1], steps[0], steps[3], others[0], steps[1]]
    conftest.pytest_collection_modifyitems(items)
    assert items == [steps[0], others[1], steps[1], steps[2], others[0], steps[3]]
