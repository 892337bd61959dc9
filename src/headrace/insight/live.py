"""`Feed`: the place that viewers of a running engine subscribe to; `BlockMap`: the state of its KV blocks.

A viewer gets a snapshot, then each step as JSON. Called by the observers of the journal. Knows no HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.core.blocks import CACHED, DROPPED, EVICTED, FORGOTTEN, PINNED, TAKEN
from headrace.core.journal import RESET, BlockEvent, Step
from headrace.protocol.errors import QueueFullError

MAX_VIEWERS = 16
MAX_PENDING = 64


Words = tuple[int, list[str], list[str]]
"""Of a column: the texts of its guesses, and those of the tokens that its answer got."""


class BlockMap:
    """`tables` maps each holder to its blocks, in the order of its block table, and their references; holder 0 is the
    step in flight. `cached` are the blocks that the prefix cache has, in use or not."""

    def __init__(self) -> None:
        self.tables: dict[int, dict[int, int]] = {}
        self.cached: set[int] = set()

    @property
    def holders(self) -> dict[int, Counter[int]]:
        """Each block in use with its holders and their references."""
        holders: dict[int, Counter[int]] = {}
        for user, table in self.tables.items():
            for block, num in table.items():
                holders.setdefault(block, Counter())[user] = num
        return holders

    def apply(self, events: list[BlockEvent]) -> None:
        """Follow the events of one step. They begin with `RESET`."""
        before: BlockEvent = (RESET, [], [])
        for kind, users, blocks in events:
            if kind in (DROPPED, PINNED) and len(blocks) == 1 and before == (TAKEN, users, before[2][:1]):
                self._replace(users[0], blocks[0], before[2][0])
            before = (kind, list(users), list(blocks))
            if kind in (TAKEN, DROPPED, PINNED):
                for index, block in enumerate(blocks):
                    user = users[index if len(users) > 1 else 0]
                    if kind != TAKEN:
                        self._add(block, user, -1)
                    if kind != DROPPED:
                        self._add(block, 0 if kind == PINNED else user, 1)
            elif kind == CACHED:
                self.cached.update(blocks)
            elif kind == EVICTED:
                self.cached.difference_update(blocks)
            elif kind == FORGOTTEN:
                self.cached.clear()
            elif kind == RESET:
                self.tables.clear()
                self.cached.clear()

    def snapshot(self, step_id: int) -> dict[str, Any]:
        """Return the state after a step, as plain data: its blocks are events, as in a step."""
        events: list[BlockEvent] = [(RESET, [0], [])]
        for user, table in self.tables.items():
            events.append((TAKEN, [user], [block for block, num in table.items() for _ in range(num)]))
        return {"step_id": step_id, "blocks": [*events, (CACHED, [0], sorted(self.cached))]}

    def _replace(self, user: int, block: int, other: int) -> None:
        """Move `other`, which was just taken in place of `block`, to its place in the table."""
        table = self.tables.get(user, {})
        if block in table and block != other:
            num = table.pop(other)
            self.tables[user] = {
                each: n for old in table for each, n in (((other, num),) if old == block else ()) + ((old, table[old]),)
            }

    def _add(self, block: int, user: int, num: int) -> None:
        table = self.tables.setdefault(user, {})
        num += table.get(block, 0)
        if num:
            table[block] = num
        else:
            table.pop(block, None)
            if not table:
                del self.tables[user]


class Viewer:
    """One reader of a `Feed`. `take` returns the steps since its last call, as JSON."""

    def __init__(self, snapshot: Callable[[], bytes]) -> None:
        self._snapshot = snapshot
        self._pending: list[bytes] | None = None

    def put(self, delta: bytes) -> None:
        """Add a step. A viewer that is `MAX_PENDING` steps late gets a fresh snapshot instead."""
        if self._pending is not None:
            self._pending.append(delta)
            if len(self._pending) > MAX_PENDING:
                self._pending = None

    def take(self) -> list[bytes]:
        pending, self._pending = self._pending, []
        return [self._snapshot()] if pending is None else pending


class Feed:
    """The steps of an engine for at most `MAX_VIEWERS` viewers: a snapshot of the blocks, then each step, encoded once
    for all. `watch` is called with True before the first viewer, and with False after the last."""

    def __init__(self, watch: Callable[[bool], None]) -> None:
        self._watch = watch
        self._viewers: list[Viewer] = []
        self._blocks = BlockMap()
        self._step_id = 0

    def subscribe(self) -> Viewer:
        """Return a new viewer. Raises `QueueFullError` if there are `MAX_VIEWERS`."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise QueueFullError(f"at most {MAX_VIEWERS} viewers watch at once", retry_after=1)
        if not self._viewers:
            self._blocks = BlockMap()
            self._watch(True)
        viewer = Viewer(self._snapshot)
        self._viewers.append(viewer)
        return viewer

    @property
    def is_watched(self) -> bool:
        return bool(self._viewers)

    def unsubscribe(self, viewer: Viewer) -> None:
        self._viewers.remove(viewer)
        if not self._viewers:
            self._watch(False)

    def follow(self, step: Step, words: Callable[[], list[Words]] = list) -> None:
        """Pass a step on; `words` returns those of its guesses. Costs nothing while there is no viewer."""
        if not self._viewers:
            return
        self._step_id = step.step_id
        self._blocks.apply(step.blocks or [])
        delta = msgspec.json.encode({"step": as_dict(step) | {"words": words()}})
        for viewer in self._viewers:
            viewer.put(delta)

    def _snapshot(self) -> bytes:
        return msgspec.json.encode({"snapshot": self._blocks.snapshot(self._step_id)})


def as_dict(step: Step) -> dict[str, Any]:
    """Return a step by the names of its fields."""
    return {name: getattr(step, name) for name in step.__struct_fields__}
