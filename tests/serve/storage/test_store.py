"""Bodies that are copied in pieces are whole, whatever their size; locks end when they are released."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.tied import tied

from headrace.protocol.errors import HeadraceError
from headrace.serve.storage import batch_file, disk
from headrace.serve.storage import store as module
from headrace.serve.storage.batch_lines import Answerer
from headrace.serve.storage.store import Store


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("num_pieces", [0, 1, 3])
def test_a_body_in_memory_is_what_was_written(num_pieces: int, more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 8)
    store = Store("file-", None, max_items=2, max_bytes=1000)
    body = bytes(range(max(0, 8 * num_pieces + more)))
    one, two = store.new_id(), store.new_id()
    store.put(one, {}, body)
    store.put(two, {}, b"abc")
    store.set_body(two, body)
    assert store.body(one) == store.body(two) == body
    for begin in {0, len(body) // 2, len(body)}:
        store.write(one, body[::-1], begin)
        assert store.body(one) == body[:begin] + body[::-1]
        store.set_body(one, body)


@contextlib.contextmanager
def child_with_all_descriptors() -> Iterator[None]:
    """A child that has what a fork leaves in it until its program begins."""
    inherited = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    child = subprocess.Popen(tied(["sleep", "600"]), pass_fds=[number for number in inherited if number > 2])
    try:
        yield
    finally:
        child.kill()
        child.wait()


def test_a_child_that_was_forked_meanwhile_keeps_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store("file-", tmp_path, max_items=2, max_bytes=1000)
    with child_with_all_descriptors():
        with pytest.raises(HeadraceError, match="used by another server"):
            Store("file-", tmp_path, max_items=2, max_bytes=1000)
        store.close()
        other = Store("file-", tmp_path, max_items=2, max_bytes=1000)
    # The control: a descriptor that is closed alone leaves the lock to the child.
    monkeypatch.setattr(disk, "unlock", lambda descriptor: None)
    with child_with_all_descriptors():
        other.close()
        with pytest.raises(HeadraceError, match="used by another server"):
            Store("file-", tmp_path, max_items=2, max_bytes=1000)


def test_a_file_of_answers_is_locked_again_beside_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.touch()
    with contextlib.ExitStack() as stack:
        mend = batch_file.mend

        def slow_mend(path: Path) -> batch_file.Known:
            stack.enter_context(child_with_all_descriptors())
            return mend(path)

        monkeypatch.setattr(batch_file, "mend", slow_mend)
        for _ in range(2):
            asyncio.run(batch_file.answer_file(source, target, Answerer({}), 1, lambda done, total: None))
        monkeypatch.setattr(disk, "unlock", lambda descriptor: None)
        with pytest.raises(HeadraceError, match="written by another run"):
            asyncio.run(batch_file.answer_file(source, target, Answerer({}), 1, lambda done, total: None))
