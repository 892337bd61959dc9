"""Lists of models while files are read: nothing waits for long, nothing is read twice, and the end comes at once."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.test_facts import write

from headrace.engine.library.facts_reader import FactsReader
from headrace.engine.library.model_facts import ModelFacts
from headrace.protocol.errors import CheckpointError, ChildFailedError
from headrace.serve.call import listing
from headrace.serve.call.listing import NO_FACTS, Listing

FACTS = ModelFacts(format="gguf", family="llama", size=1, digest="d", modified=1.0)


def test_S_28_a_list_has_what_is_read_in_time_and_leaves_out_what_can_not_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listing, "LIST_S", 0.2)
    release, calls = threading.Event(), list[str]()

    def slow() -> ModelFacts:
        release.wait(30)
        return FACTS

    def bad() -> ModelFacts:
        raise CheckpointError("bad: its header is not JSON")

    def down() -> ModelFacts:
        raise ChildFailedError("a process of the server failed and is started again")

    reads: dict[str, Callable[[], ModelFacts | None]] = {"a": lambda: FACTS, "bad": bad, "down": down}
    reads |= {"none": lambda: None, "slow": slow, "last": lambda: FACTS}

    async def scenario() -> None:
        readings = Listing()

        def facts(name: str) -> asyncio.Future[ModelFacts]:
            calls.append(name)
            return asyncio.ensure_future(readings.facts(name, reads[name]))

        for _ in range(2):
            listed = await readings.of(list(reads), facts)
            assert listed == {"a": FACTS, "down": NO_FACTS, "none": NO_FACTS, "slow": NO_FACTS, "last": NO_FACTS}
        release.set()
        # A call that needs the facts waits for the reading that runs.
        assert await readings.facts("slow", bad) == FACTS
        assert (await readings.of(list(reads), facts)) == {
            "a": FACTS, "down": NO_FACTS, "none": NO_FACTS, "slow": FACTS, "last": FACTS,
        }  # fmt: skip
        readings.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(scenario(), 60))
    assert caplog.text.count("bad is not listed: bad: its header is not JSON") == 1


def test_S_28_the_end_of_the_server_ends_a_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = FactsReader()
    monkeypatch.setattr(listing.facts_reader, "shared", lambda: reader)
    reader.facts(write(tmp_path / "a"))
    # It stands still, and no watchdog ends it.
    reader.process.watchdog.timeout = 0.0
    os.kill(reader.process.pid or 0, signal.SIGSTOP)

    async def scenario() -> None:
        readings = Listing()
        path = write(tmp_path / "b")
        calls = [asyncio.ensure_future(readings.facts(name, lambda: reader.facts(path))) for name in "abc"]
        await asyncio.sleep(0.1)
        assert not any(call.done() for call in calls)
        await asyncio.to_thread(readings.close)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[0], ChildFailedError)
        assert all(isinstance(result, asyncio.CancelledError) for result in results[1:])

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert reader.process.pid is None
