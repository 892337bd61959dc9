"""R-28: writes that run together fit on a disk together, and what does not fit is a 507 in the words of its API."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import http.client
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tests.serve.test_models_folder import Folded
from tests.support.server import HTTP, Live

from headrace import hub
from headrace.engine.library.model_folder import ModelFolder
from headrace.protocol.config import ServerConfig
from headrace.serve import inspection
from headrace.serve.apis.llama_server.slots import Folder
from headrace.serve.storage import space
from headrace.serve.storage.space import ORPHAN_S, RESERVE_BYTES, DiskFullError, Room, sweep
from headrace.text.tokenizer import Tokenizer

SIZE = 100_000
NUM_UPLOADS = 6


class Usage(NamedTuple):
    free: int


class SmallDisk:
    """A disk on which there were `free` bytes beside the files of `folder`, which only grows."""

    def __init__(self, folder: Path, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.size = folder, free
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(self.free))

    @property
    def free(self) -> int:
        return self.size - sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def test_what_is_promised_to_one_write_is_not_there_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(tmp_path, 1000, monkeypatch)
    with Room(tmp_path) as first, Room(tmp_path, reserve=200) as second:
        first.take(500)
        with pytest.raises(DiskFullError):
            second.take(301)
        second.take(300)
        with pytest.raises(DiskFullError):
            first.take(201)
        assert (first.take_up_to(500), first.take_up_to(1), second.take_up_to(1)) == (200, 0, 0)
        # The disk counts what is written, and the promise does so no more.
        (tmp_path / "a").write_bytes(b"x" * 300)
        second.wrote(300)
        disk.size += 10
        assert first.take_up_to(50) == 10
    with Room(tmp_path) as last:
        last.take(710)


def test_promises_of_many_threads_never_exceed_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SmallDisk(tmp_path, 1000, monkeypatch)
    nums: list[int] = []

    def take(room: Room) -> None:
        for _ in range(100):
            nums.append(room.take_up_to(7))

    with Room(tmp_path) as room:
        threads = [threading.Thread(target=take, args=(room,)) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert sum(nums) == 1000
    assert not space.promised.total()


def uploads(live: Live, announces: bool) -> list[int]:
    """Send files of `SIZE` bytes at once: the first half of each, and when all have it, the rest. -> the statuses."""
    calls = []
    for number in range(NUM_UPLOADS):
        body = bytes([number]) * SIZE
        call = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
        call.putrequest("POST", f"/api/blobs/sha256:{hashlib.sha256(body).hexdigest()}")
        call.putheader("content-length" if announces else "transfer-encoding", str(SIZE) if announces else "chunked")
        call.endheaders()
        calls.append((call, body))

    def send(call: http.client.HTTPConnection, part: bytes) -> None:
        with contextlib.suppress(OSError):  # it was refused already
            call.send(part if announces else b"%x\r\n%s\r\n" % (len(part), part))

    for call, body in calls:
        send(call, body[: SIZE // 2])
    time.sleep(0.2)
    statuses = []
    for call, body in calls:
        send(call, body[SIZE // 2 :])
        try:
            if not announces:
                call.send(b"0\r\n\r\n")
            statuses.append(call.getresponse().status)
        except OSError:
            statuses.append(507)
        call.close()
    return statuses


@pytest.mark.parametrize("announces", [True, False])
def test_R_28_uploads_at_once_leave_the_reserve_free(
    announces: bool, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(tmp_path, RESERVE_BYTES + 7 * SIZE // 2, monkeypatch)
    with Folded(tmp_path, tokenizer) as live:
        statuses = uploads(live, announces)
        assert set(statuses) == {201, 507}
        assert 1 <= statuses.count(201) <= 3
        assert disk.free >= RESERVE_BYTES
        # Nothing is left of what was refused, and no promise.
        live.wait(lambda: not space.promised.total())
        assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == statuses.count(201)
        body = b"y" * (disk.free - RESERVE_BYTES)
        address = f"{live.url}/api/blobs/sha256:{hashlib.sha256(body).hexdigest()}"
        refused = HTTP.post(address, content=body + b"z")
        assert (refused.status_code, refused.json()) == (
            507,
            {"error": "storage: the disk is full; nothing was changed"},
        )
        assert HTTP.post(address, content=body).status_code == 201


def test_R_28_control_without_promises_they_take_the_reserve(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(tmp_path, RESERVE_BYTES + 7 * SIZE // 2, monkeypatch)
    monkeypatch.setattr(Room, "take", lambda self, num_bytes: None)
    with Folded(tmp_path, tokenizer) as live:
        assert uploads(live, announces=True) == [201] * NUM_UPLOADS
        assert disk.free < RESERVE_BYTES


@pytest.mark.parametrize("announces", [True, False])
def test_R_28_uploads_together_are_bounded(announces: bool, tmp_path: Path, tokenizer: Tokenizer) -> None:
    with Folded(tmp_path, tokenizer, max_blob_bytes=5 * SIZE // 2) as live:
        statuses = uploads(live, announces)
        assert set(statuses) == {201, 507}
        assert 1 <= statuses.count(201) <= 2
        blobs = list((tmp_path / ".blobs").iterdir())
        assert len(blobs) == statuses.count(201)
        body = b"y" * (2 * SIZE)
        address = f"{live.url}/api/blobs/sha256:{hashlib.sha256(body).hexdigest()}"
        refused = HTTP.post(address, content=body)
        assert (refused.status_code, f"may take {5 * SIZE // 2} bytes" in refused.json()["error"]) == (507, True)
        # What a model was made of counts no more.
        for blob in blobs:
            os.link(blob, tmp_path / blob.name)
        assert HTTP.post(address, content=body).status_code == 201
    # The files of an earlier server that no model has are deleted at the start.
    ModelFolder(str(tmp_path))
    assert not (tmp_path / ".blobs").exists()
    assert len(list(tmp_path.iterdir())) == len(blobs)


@pytest.mark.parametrize("is_locked", [True, False])
def test_a_server_keeps_the_uploads_of_another_on_its_folder_and_control_without_the_lock(
    is_locked: bool, tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    body = b"y" * SIZE
    address = f"/api/blobs/sha256:{hashlib.sha256(body).hexdigest()}"
    caplog.set_level("INFO", "headrace.engine.library")
    with Folded(tmp_path, tokenizer) as first:
        if not is_locked:
            first.folder.close()
        upload = first.folder.new_file()
        unfinished = first.folder.root / ".unfinished" / "model"
        unfinished.mkdir(parents=True)
        assert HTTP.post(first.url + address, content=body).status_code == 201
        with Folded(tmp_path, tokenizer):
            assert HTTP.head(first.url + address).status_code == (200 if is_locked else 404)
            assert upload.exists() is unfinished.exists() is is_locked
    assert ("is used by another server too" in caplog.text) is is_locked
    # The next one has the folder to itself.
    ModelFolder(str(tmp_path)).close()
    assert not upload.exists()
    assert not unfinished.exists()


def test_a_folder_that_can_not_be_locked_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    upload = ModelFolder(str(tmp_path)).new_file()

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    ModelFolder(str(tmp_path)).close()
    assert upload.exists()
    assert "can not be locked" in caplog.text


def form(live: Live) -> Any:
    return HTTP.post(live.url + "/v1/files", files={"file": ("a", b"{}")}, data={"purpose": "batch"})


CALLS: dict[str, tuple[Callable[[Live], Any], Callable[[Any], str]]] = {
    "files": (form, lambda body: body["error"]["code"]),
    "conversations": (lambda live: live.post("/v1/conversations", {}), lambda body: body["error"]["code"]),
    "slots": (
        lambda live: live.post("/slots/0?action=save", {"filename": "a"}),
        lambda body: "disk_full" if body["error"]["code"] == 507 else str(body),
    ),
    "recording": (
        lambda live: HTTP.post(live.url + "/inspect/recording", content=b"x" * 100),
        lambda body: body["error"]["code"],
    ),
}


def test_R_28_a_full_disk_is_a_507_in_the_words_of_each_api(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: dict[str, Any] = {"storage_dir": str(tmp_path / "s"), "slot_save_path": str(tmp_path / "slots")}
    with Folded(tmp_path / "m", tokenizer, stays=True, **folders) as live:
        assert live.post("/completion", {"prompt": "x" * 100, "n_predict": 2, "id_slot": 0}).status_code == 200
        real = shutil.disk_usage
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0))
        for name, (call, code_of) in CALLS.items():
            reply = call(live)
            assert (reply.status_code, code_of(reply.json())) == (507, "disk_full"), (name, reply.text)
            assert str(tmp_path) not in reply.text
        answer = live.post("/v1/responses", {"input": "x", "max_output_tokens": 2})
        assert (answer.status_code, answer.json()["store"]) == (200, False)
        monkeypatch.setattr(shutil, "disk_usage", real)
        for name, (call, _) in CALLS.items():
            assert call(live).status_code == (400 if name == "recording" else 200)


def test_R_28_a_model_that_does_not_fit_is_not_fetched(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program that fetches says so, and the reply is a 507."""
    import huggingface_hub

    sibling = SimpleNamespace(rfilename="model.gguf", size=100, lfs=None, blob_id="x")
    info = SimpleNamespace(siblings=[sibling], sha="y")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **more: info)
    SmallDisk(tmp_path, 99, monkeypatch)
    assert hub.main(["owner/name", str(tmp_path)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    run = asyncio.create_subprocess_exec

    async def fetches(*command: str, **more: Any) -> asyncio.subprocess.Process:
        assert hub.__name__ in command
        return await run(sys.executable, "-c", f"print({last!r})", **more)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fetches)
    with Folded(tmp_path, tokenizer) as live:
        reply = live.post("/api/pull", {"model": "owner/name", "stream": False})
    assert (reply.status_code, reply.json()) == (507, {"error": "storage: the disk is full; nothing was changed"})


def test_R_28_files_that_an_earlier_process_has_left_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {name: tmp_path / name for name in ("old", "new", "kept")}
    for path in names.values():
        path.write_bytes(b"x")
    past = time.time() - 2 * ORPHAN_S
    for name in ("old", "kept"):
        os.utime(names[name], (past, past))
    sweep([names["old"], names["new"], tmp_path / "missing", tmp_path])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "new"]
    # At the start of a server: unfinished session files, also of holders, and recordings that were replayed.
    left = [tmp_path / ".a.part", tmp_path / "holder-1" / ".b.part", tmp_path / f"{inspection.RECORDING}x"]
    (tmp_path / "holder-1").mkdir()
    for path in left:
        path.write_bytes(b"x")
        os.utime(path, (past, past))
    Folder.of(str(tmp_path), 1, {})
    monkeypatch.setattr(inspection.tempfile, "gettempdir", lambda: str(tmp_path))
    inspection.Inspection(None).close()  # type: ignore[arg-type]
    assert [path for path in left if path.exists()] == []
    assert ServerConfig().max_blob_bytes is None
