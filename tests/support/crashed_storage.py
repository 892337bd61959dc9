"""A scenario over files, a batch and responses, recorded, and the judge of what a server finds after a crash of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tests.support.crashes import Recording, State, restore

from headrace.protocol.errors import RequestError
from headrace.serve.apis.openai.batches import ENDED, OUTPUTS, Batches
from headrace.serve.apis.openai.files import Files
from headrace.serve.storage import disk
from headrace.serve.storage.batch_lines import Answerer
from headrace.serve.storage.store import Store
from headrace.serve.storage.writers import Writers

URL = "/v1/completions"
T = TypeVar("T")
Snapshot = dict[str, dict[str, Any]]


class Direct(Writers):
    """Without threads: one call after the other anyhow."""

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)


class House:
    """Stores in a folder, as a server has them. `snapshots` has what clients may see after each change of them, and how
    many operations the disk had done by then."""

    def __init__(self, folder: Path, operations: Callable[[], int] = lambda: 0) -> None:
        self.responses = Store("resp_", folder / "responses", max_items=2, max_bytes=10**6, evict=True)
        file_store = Store("file-", folder / "files", max_items=99, max_bytes=10**6)
        self.files = Files(file_store)
        self.prompts: list[str] = []
        batch_store = Store("batch_", folder / "batches", max_items=99, max_bytes=10**6)
        self.writers = Direct()
        answerer = Answerer({URL: self._answer})
        self.batches = Batches(batch_store, self.files, self.writers, answerer, 3, lambda: 0)
        self.stores = {"files": file_store, "batches": batch_store, "responses": self.responses}
        self.operations = operations
        self.snapshots: list[tuple[int, Snapshot]] = [(operations(), self.seen())]
        for store in self.stores.values():
            for name in ("put", "set_metadata", "set_body", "write", "delete"):
                setattr(store, name, self._noted(getattr(store, name)))

    def _noted(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            result = change(*args)
            self.snapshots.append((self.operations(), self.seen()))
            return result

        return noted

    async def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.prompts.append(body["prompt"])
        for _ in range(body["seed"] % 5):
            await asyncio.sleep(0)
        if body["prompt"].startswith("bad"):
            raise RequestError("prompt", body["prompt"], "good")
        return {"text": body["prompt"].upper()}

    def card(self, batch_id: str) -> dict[str, Any]:
        return self.stores["batches"].metadata(batch_id) or {}

    def counted(self, batch_id: str) -> list[bytes]:
        """The output lines that a batch counts."""
        card = self.card(batch_id)
        ids = [card.get(name) for name in (*OUTPUTS, "output_file_id", "error_file_id")]
        sizes = card.get("_sizes", {})
        bodies = [self.stores["files"].body(each) for each in ids[2:] if each]
        if sizes and card["status"] not in ENDED:
            bodies = [
                self.stores["files"].body(card[name])[: sizes[name]]
                for name in sizes
                if card[name] in self.stores["files"]
            ]
        return sorted(line for body in bodies for line in body.splitlines())

    def seen(self) -> Snapshot:
        """What clients may see."""
        files = {each.id: (each.filename, self.stores["files"].body(each.id)) for each in self.files.listed()}
        responses = {each: self.responses.body(each) for each in self.responses}
        cards = {each: self.card(each) for each in self.stores["batches"]}
        fields = ("status", "request_counts", "output_file_id", "error_file_id")
        batches = {each: ([card[field] for field in fields], self.counted(each)) for each, card in cards.items()}
        return {"files": files, "responses": responses, "batches": batches}

    async def finish(self) -> None:
        """Run the batches to their ends."""
        self.batches.start()
        while any(self.card(each)["status"] not in ENDED for each in self.stores["batches"]):
            await asyncio.sleep(0)
        await self.batches.close()

    def close(self) -> None:
        self.writers.close()
        for store in self.stores.values():
            store.close()


class Scenario:
    """A recorded run. `lines` are the prompts of its batch."""

    def __init__(self, folder: Path, seed: int, num_lines: int, without: str = "\n") -> None:
        draw = random.Random(seed)
        self.lines = [f"{draw.choice(('good', 'good', 'bad'))} {seed}.{number}" for number in range(num_lines)]
        self.record(folder, without, first=True)

    def record(self, folder: Path, without: str = "\n", first: bool = False) -> None:
        """Run the scenario, or what a server does that starts in a folder that a crash left."""
        for name in ("files", "batches", "responses"):
            (folder / name).mkdir(exist_ok=True)
        self.recording = Recording(folder, without)
        with recorded(self.recording):
            house = House(folder, lambda: len(self.recording.ops))
            try:
                asyncio.run(self._work(house) if first else house.finish())
            finally:
                house.close()
        self.snapshots = house.snapshots

    def continue_from(self, num_ops: int, state: State, folder: Path) -> None:
        """Start a server from a state, and record its run in place of the first one."""
        before, _ = self.around(num_ops)
        restore(state, folder)
        self.record(folder)
        # What was seen before the crash has to be there after the next one.
        self.snapshots.insert(0, (0, before))

    async def _work(self, house: House) -> None:
        run, responses = house.writers.run, house.responses
        fields = [{"custom_id": each, "method": "POST", "url": URL, "body": {"prompt": each}} for each in self.lines]
        text = b"".join(json.dumps(each).encode() + b"\n" for each in fields)
        file = await run(house.files.create, "in.jsonl", "batch", text)
        expected = {"input_file_id": file.id, "endpoint": URL, "completion_window": "24h"}
        await run(house.batches.create, expected)
        ids = [responses.new_id() for _ in range(4)]
        for number, entry_id in enumerate(ids):  # the third and fourth make the oldest give way
            await run(responses.put, entry_id, {}, b"begun %d" % number)
            await run(responses.set_body, entry_id, b"done %d, and longer" % number)
        await run(responses.delete, ids[3])
        await house.finish()
        other = await run(house.files.create, "other.txt", "user_data", b"other")
        await run(house.files.delete, other.id)
        house.snapshots.append((len(self.recording.ops), house.seen()))

    def around(self, num_ops: int) -> tuple[Snapshot, Snapshot]:
        """What clients may have seen when the disk had done so many operations, and after the change in progress."""
        before = [seen for ops, seen in self.snapshots if ops <= num_ops]
        after = [seen for ops, seen in self.snapshots if ops > num_ops]
        return before[-1] if before else self.snapshots[0][1], after[0] if after else self.snapshots[-1][1]

    def judge(self, num_ops: int, state: State, folder: Path) -> str:
        """Start a server from a state. -> what is wrong, or nothing."""
        restore(state, folder)
        with recorded(Recording(folder)):
            try:
                house = House(folder)
            except Exception as error:
                return f"the server does not start: {type(error).__name__}: {error}"
            try:
                return self._judge(house, *self.around(num_ops))
            finally:
                house.close()

    def _judge(self, house: House, before: Snapshot, after: Snapshot) -> str:
        try:
            wrong = contradicts(house.snapshots[0][1], before, after)
            counted = {json.loads(line)["custom_id"] for _, lines in before["batches"].values() for line in lines}
            if wrong:
                return wrong
            asyncio.run(house.finish())
            if again := counted & set(house.prompts):
                return f"lines that were counted are answered again: {sorted(again)}"
            for (status, counts, *_), lines in house.seen()["batches"].values():
                ids = sorted(json.loads(line)["custom_id"] for line in lines)
                if status != "completed" or ids != sorted(self.lines):
                    return f"{status}, lines lost or doubled: {sorted(set(self.lines) - set(ids))}, {len(ids)} lines"
                if counts["completed"] + counts["failed"] != len(ids):
                    return f"the counts are wrong: {counts}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


@contextlib.contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    """Put a recording in the place of the disk's calls. Damaged entries are expected and not logged."""
    real, disk.os = disk.os, recording  # type: ignore[assignment]
    logger = logging.getLogger("headrace.server")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        disk.os = real
        logger.setLevel(level)


def contradicts(result: Snapshot, before: Snapshot, after: Snapshot) -> str:
    """Whether a server shows something that is neither as before the change in progress, nor as after it."""
    for kind in result:
        for entry_id in result[kind].keys() | before[kind].keys() | after[kind].keys():
            texts = [each[kind].get(entry_id) for each in (result, before, after)]
            if texts[0] not in texts[1:]:
                return f"{kind}: {texts[0]!r:.200} is neither {texts[1]!r:.200} nor {texts[2]!r:.200}"
    return ""
