"""`Report`: the items of a stage and their results, in a JSON file that is whole after each item."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Result = dict[str, Any]
NO_TIME = "left out: no time"


def read(path: Path) -> dict[str, Any]:
    """Return a stage's file; one without items where there is none."""
    if not path.exists():
        return {"head": {}, "items": []}
    record: dict[str, Any] = json.loads(path.read_text())
    return record


class Report:
    """Items already in the file are not run again, so another process can go on where one ended.

    Args:
        end: when the stage's time is over (`time.time()`).
        only: parts of the names of items to run, divided by |; empty: all run.
    """

    def __init__(self, path: Path, end: float, only: str = "") -> None:
        self.path, self.end, self.only = path, end, only
        record = read(path)
        self.items: list[Result] = record["items"]
        self.head: Result = record["head"]
        for item in self.items:
            if item["status"] == "running" and time.time() > self.end:
                item["status"] = "left out: the stage's time ended within it"
            elif item["status"] == "running":
                item |= {"status": "failed", "error": "the process ended or hung"}

    def _is_chosen(self, name: str) -> bool:
        return any(part in name for part in self.only.split("|"))

    def wants(self, name: str) -> bool:
        """Return whether an item of that name is to run, and has not run yet."""
        return self._is_chosen(name) and all(item["name"] != name for item in self.items)

    def run(
        self,
        name: str,
        measure: Callable[[], Result],
        is_free: bool = False,
        is_needed: bool = False,
        seconds: float = 0.0,
    ) -> Result | None:
        """Run one item and keep what it returns. A failure is recorded, and the stage goes on.

        is_free: it takes no time and no GPU, so it runs also when the time is over. is_needed: by others, so it runs
        whatever names are to run. seconds: what it takes at most, by experience: with less time left it is left out.

        An item fails by raising, or by a result whose "fault" is not empty. Raises `SystemExit` if the GPU answers no
        more: only another process can use it then.
        """
        if not self._is_chosen(name) and not is_needed:
            return None
        earlier = next((item for item in self.items if item["name"] == name), None)
        if earlier is not None:
            return earlier
        item: Result = {"name": name, "status": "running"}
        self.items.append(item)
        if time.time() + seconds > self.end and not is_free:
            item["status"] = NO_TIME
            self._write(item)
            return None
        self._write()
        began, is_dead = time.time(), False
        try:
            item |= measure()
            if not is_free:
                synchronize()
            item["status"] = "failed" if item.get("fault") else "ok"
        except Exception as error:
            lines = traceback.format_exception_only(error)
            place = traceback.extract_tb(error.__traceback__)[-1]
            item |= {"status": "failed", "error": lines[-1].strip()[:500], "at": f"{place.filename}:{place.lineno}"}
            is_dead = not answers()
        item["seconds"] = round(time.time() - began, 2)
        self._write(item)
        if is_dead:
            raise SystemExit(3)
        return item

    def result_of(self, name: str) -> Result:
        """Return what an item of this stage measured; nothing if it failed or was left out."""
        return next((item for item in self.items if item["name"] == name and item["status"] == "ok"), {})

    def close(self) -> int:
        """Print the table of the items. Returns how many failed."""
        self._write()
        print(f"\n{self.path.stem}: {self.head.get('name', '')}")
        width = max((len(item["name"]) for item in self.items), default=0)
        for item in self.items:
            print(f"  {item['name']:{width}}  {item['status']:6}  {shown(item)}")
        failed: int = sum(item["status"] == "failed" for item in self.items)
        left = sum(item["status"].startswith("left") for item in self.items)
        print(f"  {len(self.items)} items, {failed} failed, {left} left out; {self.path}", flush=True)
        return failed

    def _write(self, item: Result | None = None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        spare = self.path.with_suffix(".part")
        spare.write_text(json.dumps({"head": self.head, "items": self.items}, indent=1) + "\n")
        os.replace(spare, self.path)
        if item is not None:
            left = max(self.end - time.time(), 0)
            print(f"[{left:3.0f} s left] {item['name']}: {item['status']}  {shown(item)}", flush=True)


def shown(item: Result) -> str:
    """The figures of an item in a line."""
    if "error" in item:
        return str(item["error"]).splitlines()[0][:160]
    hidden = ("name", "status", "seconds")
    return "  ".join(
        f"{key}={number(value)}"
        for key, value in item.items()
        if key not in hidden and not isinstance(value, dict | list) and value not in (None, "")
    )


def number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def answers() -> bool:
    """Return whether the GPU still computes; after some faults it does not in this process."""
    try:
        synchronize()
    except Exception:
        return False
    return True
