"""R-28: disks that are full, slow, read-only or broken under a running server: storage, batches, responses, the log."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.server import HTTP, Live, inproc, lines_of

from headrace.engine import logs
from headrace.engine.logs import Sink
from headrace.protocol.config import ServerConfig
from headrace.serve.apis.openai import batches, responses_ends
from headrace.serve.storage import disk
from headrace.serve.storage.space import StorageError
from headrace.serve.storage.store import Store
from headrace.text.tokenizer import Tokenizer

# What a disk does that is full, over its quota, broken, or mounted read-only again by the kernel.
ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS]


@contextlib.contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond it: a write ends in the middle, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Disk:
    """The calls by which a store reaches its folder, each of which may fail."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error = 0
        self._folder = str(folder)
        for name in ("open", "replace", "unlink"):
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))
        monkeypatch.setattr("builtins.open", self._failing(open))
        monkeypatch.setattr("io.open", self._failing(open))

    def _failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **more: Any) -> Any:
            if self.error and not isinstance(path, int) and str(path).startswith(self._folder):
                raise OSError(self.error, os.strerror(self.error), str(path))
            return real(path, *args, **more)

        return call


def state(store: Store) -> dict[str, Any]:
    return {each: (store.metadata(each), store.body(each)) for each in store} | {"bytes": store.num_bytes}


def reopened(store: Store, folder: Path) -> dict[str, Any]:
    """What a server that starts now finds."""
    store.close()
    other = Store("x_", folder, max_items=9, max_bytes=10**6)
    result = state(other)
    other.close()
    return result


def changes(store: Store, entry_id: str) -> list[Callable[[], object]]:
    return [
        lambda: store.put(store.new_id(), {"new": 1}, b"n" * 5000),
        lambda: store.set_body(entry_id, b"o" * 5000),
        lambda: store.write(entry_id, b"a" * 5000, 6),
        lambda: store.set_metadata(entry_id, {"long": "t" * 5000}),
    ]


def test_R_28_a_write_that_breaks_off_changes_nothing(tmp_path: Path) -> None:
    store = Store("x_", tmp_path, max_items=9, max_bytes=10**6)
    entry_id = store.new_id()
    store.put(entry_id, {"a": 1}, b"first\n")
    before = state(store)
    for change in changes(store, entry_id):
        with files_up_to(1000), pytest.raises(StorageError):
            change()
        assert state(store) == before
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.name != ".lock") == [".bin", ".json"]
    store.write(entry_id, b"second\n", 6)
    assert store.body(entry_id) == b"first\nsecond\n"
    after = state(store)
    assert reopened(store, tmp_path) == after


def test_R_28_control_a_plain_write_would_leave_a_part(tmp_path: Path) -> None:
    with files_up_to(1000), pytest.raises(OSError, match="too large"):
        (tmp_path / "x").write_bytes(b"a" * 5000)
    assert (tmp_path / "x").stat().st_size == 1000


@pytest.mark.parametrize("error", ERRORS)
def test_R_28_a_disk_that_fails_fails_calls_and_loses_nothing(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store("x_", tmp_path, max_items=9, max_bytes=10**6)
    ids = [store.new_id() for _ in range(2)]
    for entry_id in ids:
        store.put(entry_id, {"a": 1}, b"body")
    before = state(store)
    folder = Disk(tmp_path, monkeypatch)
    folder.error = error
    others: list[Callable[[], object]] = [lambda: store.delete(ids[0]), lambda: store.body(ids[0])]
    for change in changes(store, ids[0]) + others:
        with pytest.raises(StorageError) as caught:
            change()
        assert str(tmp_path) not in str(caught.value)
    store.discard(ids[1])
    folder.error = 0
    assert ids[1] not in store
    del before[ids[1]]
    assert state(store) | {"bytes": 0} == before | {"bytes": 0}
    # What could not be deleted is there again, and not silently gone.
    assert set(reopened(store, tmp_path)) == {*ids, "bytes"}


def line(number: int) -> bytes:
    body = {"prompt": "x", "max_tokens": 60, "seed": number, "ignore_eos": True}
    result = {"custom_id": f"q{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(result).encode() + b"\n"


LINES = b"".join(line(number) for number in range(12))


@pytest.mark.parametrize(
    ("number", "status", "code"), [(errno.ENOSPC, 507, "disk_full"), (errno.EIO, 503, "storage_failed")]
)
def test_R_28_over_http(
    number: int, status: int, code: str, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers go on, what needs the disk is refused, and a batch waits and then has every line once."""
    monkeypatch.setattr(batches, "DISK_AGAIN_S", 0.05)
    config = ServerConfig(log_stats_interval=0, storage_dir=str(tmp_path), max_batch_concurrency=2)
    with Live(inproc(delay=0.004), tokenizer, config) as live:
        files, data = {"file": ("a", LINES)}, {"purpose": "batch"}
        file_id = HTTP.post(live.url + "/v1/files", files=files, data=data).json()["id"]
        body = live.post("/v1/responses", {"input": "x", "max_output_tokens": 2}).json()
        expected = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = live.post("/v1/batches", expected).json()["id"]

        def batch() -> Any:
            return HTTP.get(f"{live.url}/v1/batches/{batch_id}").json()

        live.wait(lambda: batch()["request_counts"]["completed"] >= 3)
        stream = {"input": "x", "max_output_tokens": 40, "stream": True, "text": {"format": {"type": "text"}}}
        folder = Disk(tmp_path, monkeypatch)
        with HTTP.stream("POST", live.url + "/v1/responses", json=stream, timeout=240) as reply:
            events = lines_of(reply)
            next(events)
            folder.error = number
            lines = [line for line in events if line.startswith("data: ")]
        last = json.loads(lines[-1][6:])
        assert last["type"] in ("response.completed", "response.incomplete")
        # It was answered, and is not kept as one that runs for ever; the caller reads so.
        assert last["response"]["store"] is False
        assert last["response"]["warnings"][-1].startswith("store: the response is not kept: storage: ")
        assert HTTP.get(f"{live.url}/v1/responses/{last['response']['id']}").status_code == 404
        refused = [
            HTTP.post(live.url + "/v1/files", files=files, data=data),
            HTTP.get(f"{live.url}/v1/files/{file_id}/content"),
            HTTP.delete(f"{live.url}/v1/files/{file_id}"),
            live.post("/v1/batches", expected),
            live.post("/v1/responses", {"input": "x", "max_output_tokens": 2, "background": True}),
            live.post("/v1/conversations", {}),
            HTTP.get(f"{live.url}/v1/responses/{body['id']}"),
            HTTP.delete(f"{live.url}/v1/responses/{body['id']}"),
            live.post(f"/v1/batches/{batch_id}/cancel", {}),
        ]
        assert [(each.status_code, each.json()["error"]["code"]) for each in refused] == [(status, code)] * 9
        assert str(tmp_path) not in "".join(each.text for each in refused)
        assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
        for _ in range(2):
            stored = live.post("/v1/responses", {"input": "x", "max_output_tokens": 2})
            assert (stored.status_code, stored.json()["store"], stored.json()["status"]) == (200, False, "incomplete")
            assert stored.json()["warnings"][-1].startswith("store: the response is not kept: storage: ")
            assert str(tmp_path) not in stored.text
        assert live.post("/v1/responses", {"input": "x", "max_output_tokens": 2, "store": False}).status_code == 200
        assert HTTP.get(live.url + "/health/ready").status_code == 200
        time.sleep(0.2)
        assert batch()["status"] == "in_progress"
        folder.error = 0
        live.wait(lambda: batch()["status"] == "completed")
        assert batch()["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        answered = HTTP.get(f"{live.url}/v1/files/{batch()['output_file_id']}/content").text.strip().split("\n")
        assert sorted(json.loads(line)["custom_id"] for line in answered) == sorted(f"q{i}" for i in range(12))
        filenames = {each["filename"] for each in HTTP.get(live.url + "/v1/files").json()["data"]}
        assert filenames == {"a", f"{batch_id}_output.jsonl"}
        assert HTTP.get(f"{live.url}/v1/responses/{body['id']}").json() == body


class Faults:
    """The operations of the storage's disk, of which the one with the number `at`, or all from there on, fail."""

    OPS = ("create", "write", "truncate", "replace", "sync")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.num, self.error, self.goes_on = -1, 0, errno.ENOSPC, False
        for name in self.OPS:
            monkeypatch.setattr(disk, name, self._failing(getattr(disk, name)))

    def _failing(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self.num += 1
            if self.at >= 0 and (self.num == self.at + 1 or (self.goes_on and self.num > self.at)):
                raise OSError(self.error, os.strerror(self.error))
            real(*args)

        return call

    def arm(self, at: int, error: int, goes_on: bool) -> None:
        self.at, self.num, self.error, self.goes_on = at, 0, error, goes_on


def whole(live: Live, body: dict[str, Any]) -> dict[str, Any]:
    """The response to a body, whether streamed or not."""
    if not body.get("stream"):
        reply = live.post("/v1/responses", body)
        assert reply.status_code == 200, reply.text
        result: dict[str, Any] = reply.json()
        return result
    with HTTP.stream("POST", live.url + "/v1/responses", json=body, timeout=240) as reply:
        assert reply.status_code == 200
        last = [each for each in lines_of(reply) if each.startswith("data: ")][-1]
    result = json.loads(last[6:])["response"]
    return result


def answers_that_do_not_say_so(live: Live, faults: Faults) -> list[str]:
    """Fail each operation of the disk in turn. -> what is wrong with the answers: each must come whole, and be stored
    or say that it is not."""
    wrong = []
    for form in ({}, {"stream": True}, {"conversation": True}):
        for goes_on, error in ((False, errno.ENOSPC), (True, errno.EDQUOT), (True, errno.EROFS), (False, errno.EIO)):
            at, is_beyond = 0, False
            while not is_beyond:
                body = {"input": "x", "max_output_tokens": 3, "seed": 1} | form
                if "conversation" in form:
                    faults.arm(-1, 0, False)
                    body["conversation"] = live.post("/v1/conversations", {}).json()["id"]
                faults.arm(at, error, goes_on)
                reply = whole(live, body)
                is_beyond = faults.num <= at
                faults.arm(-1, 0, False)
                place = f"{form} {os.strerror(error)} from {at} on: {reply}"
                if reply["status"] != "incomplete" or not reply["output"]:
                    wrong.append(place)
                warned = {each.partition(":")[0] for each in reply.get("warnings", [])}
                lookup = HTTP.get(f"{live.url}/v1/responses/{reply['id']}")
                is_stored = lookup.status_code == 200 and lookup.json() == reply
                if (reply["store"], "store" in warned) != (is_stored, not is_stored):
                    wrong.append(place)
                if "conversation" in form:
                    items = HTTP.get(f"{live.url}/v1/conversations/{body['conversation']}/items").json()["data"]
                    if ("conversation" in warned) == (len(items) == 2):
                        wrong.append(place)
                at += 1
    return wrong


def test_R_28_each_answer_comes_and_is_stored_or_says_that_it_is_not(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch)
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0, storage_dir=str(tmp_path))) as live:
        assert answers_that_do_not_say_so(live, faults) == []


def test_R_28_control_an_answer_that_is_silently_not_stored_is_noticed(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses_ends, "is_not_kept", lambda answer, error: None)
    faults = Faults(monkeypatch)
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0, storage_dir=str(tmp_path))) as live:
        assert answers_that_do_not_say_so(live, faults)


def test_R_28_a_response_in_the_background_waits_for_the_disk_and_can_be_read(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses_ends, "DISK_AGAIN_S", 0.05)
    faults = Faults(monkeypatch)
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0, storage_dir=str(tmp_path))) as live:
        body = {"input": "x", "max_output_tokens": 3, "background": True}
        for ends_by in ("", "delete", "cancel"):
            # The entry is written by three operations, its end by others.
            faults.arm(5, errno.ENOSPC, True)
            first = live.post("/v1/responses", body)
            assert first.status_code == 200, first.text
            url = f"{live.url}/v1/responses/{first.json()['id']}"
            live.wait(lambda url=url: HTTP.get(url).json()["status"] == "incomplete" and faults.num > 8)
            ended = HTTP.get(url).json()
            if ends_by == "cancel":
                assert HTTP.post(url + "/cancel", json={}).json() == ended
                assert HTTP.get(url).json() == ended
            faults.arm(-1, 0, False)
            if ends_by == "delete":
                assert HTTP.delete(url).status_code == 200
                assert HTTP.get(url).status_code == 404
                continue
            file = tmp_path / "responses" / f"{ended['id']}.bin"
            live.wait(lambda file=file: b'"incomplete"' in file.read_bytes())
            assert HTTP.get(url).json() == ended


# -- the log


def lines_to(descriptor: int) -> Sink:
    sink = Sink(descriptor)
    sink.setFormatter(logs.LineFormatter())
    return sink


def told(text: str) -> logging.LogRecord:
    return logging.LogRecord("headrace", logging.INFO, __file__, 0, text, (), None)


def test_R_28_a_log_on_a_full_disk_is_dropped_and_counted(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    result = lines_to(full)
    monkeypatch.setattr(logging.getLogger("headrace"), "handlers", [result])
    for _ in range(5):
        result.handle(told("x"))
    live.wait(lambda: result.num_dropped == 5)
    assert (logs.num_dropped(), live.metric("log_lines_dropped_total")) == (5, 5)
    # The disk has room again.
    reader, writer = os.pipe()
    os.dup2(writer, full)
    result.handle(told("well"))
    result.close()
    lines = os.read(reader, 4096).decode().splitlines()
    assert lines[0].endswith("headrace.log: 5 lines of the log could not be written")
    assert (len(lines), lines[1].endswith("well")) == (2, True)
    for each in (full, reader, writer):
        os.close(each)


def test_R_28_a_log_that_nobody_reads_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LAST_LINES_S", 0.05)
    reader, writer = os.pipe()
    result = lines_to(writer)
    for _ in range(logs.MAX_LINES + 3000):
        result.handle(told("x" * 100))
    assert result.num_dropped > 2000
    result.close()
    os.close(reader)  # the thread that waits for it goes on, with EPIPE
    Live.wait(lambda: not result._lines.qsize())
    os.close(writer)
