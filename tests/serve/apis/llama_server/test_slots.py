"""Slots and their session files over HTTP: saved, restored, erased, each holder's apart, never outside the folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.security import rig
from tests.support.server import HTTP, Live, inproc

from headrace.engine import sessions
from headrace.protocol.config import ServerConfig
from headrace.protocol.errors import RequestError
from headrace.serve.apis.llama_server.slots import Folder
from headrace.text.tokenizer import Tokenizer

PROMPT = "A long prompt that fills more than two blocks of sixteen tokens each."


@pytest.fixture
def saving(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Live]:
    config = ServerConfig(log_stats_interval=0, slot_save_path=str(tmp_path / "kept"), max_storage_bytes=3000)
    with Live(inproc(), tokenizer, config) as live:
        yield live


def act(live: Live, action: str, slot: int | str = 0, key: str | None = None, **body: Any) -> httpx.Response:
    headers = rig.bearer(key) if key else {}
    return HTTP.post(f"{live.url}/slots/{slot}?action={action}", json=body, headers=headers)


def complete(live: Live, key: str | None = None, **more: Any) -> dict[str, Any]:
    headers = rig.bearer(key) if key else {}
    body = {"prompt": PROMPT, "n_predict": 4, "seed": 1} | more
    reply = HTTP.post(live.url + "/completion", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.json()
    return result


def test_saved_forgotten_and_restored_it_is_found_again(saving: Live) -> None:
    first = complete(saving)
    assert (first["id_slot"], first["timings"]["cache_n"]) == (0, 0)
    saved = act(saving, "save", filename="one.bin").json()
    # Of 69 + 4 tokens the last is not computed.
    assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (0, "one.bin", 72)
    assert saved["timings"]["save_ms"] > 0
    saving.client.reset_prefix_cache()
    erased = act(saving, "erase").json()
    [warning] = erased.pop("warnings")
    assert erased == {"id_slot": 0, "n_erased": 72}
    assert "the prefix cache, which all slots share, keeps their blocks" in warning
    assert act(saving, "erase").json() == {"id_slot": 0, "n_erased": 0}
    restored = act(saving, "restore", slot=3, filename="one.bin").json()
    assert (restored["id_slot"], restored["n_restored"], restored["n_read"]) == (3, 72, saved["n_written"])
    again = complete(saving)
    assert (again["content"], again["timings"]["cache_n"]) == (first["content"], 64)
    # The slot has the tokens too.
    assert act(saving, "save", slot=3, filename="one.bin").json()["n_saved"] == 72


def test_an_erase_needs_no_body(saving: Live) -> None:
    complete(saving)
    reply = HTTP.post(saving.url + "/slots/0?action=erase")
    assert (reply.status_code, reply.json()["n_erased"]) == (200, 72)
    assert HTTP.post(saving.url + "/slots/0?action=save").status_code == 400, "a file needs a name"


def test_a_prompt_shorter_than_a_block_is_kept_too(saving: Live) -> None:
    result = complete(saving, prompt="short", n_predict=3)
    assert act(saving, "save", filename="short").json()["n_saved"] == 7
    saving.client.reset_prefix_cache()
    assert act(saving, "restore", slot=2, filename="short").json()["n_restored"] == 7
    assert complete(saving, prompt="short", n_predict=3)["content"] == result["content"]


def test_a_slot_is_named_streamed_and_taken_in_order(saving: Live) -> None:
    assert complete(saving, id_slot=5)["id_slot"] == 5
    assert act(saving, "save", slot=5, filename="five").json()["n_saved"] == 72
    assert complete(saving, prompt=[PROMPT, "b", "c"], id_slot=1)[1]["id_slot"] == 0  # type: ignore[index]
    reply = saving.post("/completion", {"prompt": PROMPT + "!", "n_predict": 4, "stream": True, "id_slot": 7})
    assert '"id_slot":7' in reply.text
    assert act(saving, "save", slot=7, filename="five").json()["n_saved"] == 73
    assert act(saving, "save", slot=90, filename="five").json()["n_saved"] == 0


@pytest.mark.parametrize(
    ("action", "slot", "body", "words"),
    [
        ("drop", 0, {"filename": "x"}, "action: 'drop' is not allowed; it must be one of save, restore, erase"),
        ("save", 128, {"filename": "x"}, "id_slot: 128 is not allowed; it must be a slot from 0 to 127"),
        ("save", "one", {"filename": "x"}, "id_slot: 'one' is not allowed"),
        ("save", 0, {}, "filename: None is not allowed"),
        ("restore", 0, {"filename": "absent"}, "a session file that can be used: there is no such file"),
        ("save", 0, {"filename": 5}, "filename: "),
    ],
)
def test_refusals_name_field_and_bound(saving: Live, action: str, slot: Any, body: dict[str, Any], words: str) -> None:
    reply = act(saving, action, slot, **body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def test_a_cache_that_no_file_can_hold_is_not_the_files_fault(saving: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    complete(saving)
    why = "the server runs with --no-enable-prefix-caching"

    # `tests/engine/test_sessions.py` sees the engine of such a server reply so.
    moved = sessions.SessionMoved(error=why, moves_none=True)
    monkeypatch.setattr(sessions, "move", lambda core, order: moved)
    for action in ("save", "restore"):
        message = act(saving, action, filename="x").json()["error"]["message"]
        assert message.startswith(f"action: '{action}' is not allowed")
        assert why in message
        assert "filename" not in message


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", ".hidden", "..", ".", "", "a\x00b", "a\\..\\b", "é", "x" * 129, "-x", "a\n"]
)
def test_S_21_a_name_never_leaves_the_folder(saving: Live, tmp_path: Path, name: str) -> None:
    (tmp_path / "x").write_text("secret")
    for action in ("save", "restore"):
        reply = act(saving, action, filename=name)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, 400)
        assert "secret" not in reply.text
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "x"]


def test_a_damaged_file_is_refused_by_its_checksum(saving: Live, tmp_path: Path) -> None:
    complete(saving)
    act(saving, "save", filename="one")
    raw = (tmp_path / "kept" / "one").read_bytes()
    (tmp_path / "kept" / "one").write_bytes(raw[:-40] + bytes([raw[-40] ^ 1]) + raw[-39:])
    reply = act(saving, "restore", filename="one")
    assert "the file is damaged: its checksum does not fit" in reply.json()["error"]["message"]


def test_files_are_bounded_by_the_storage(saving: Live, tmp_path: Path) -> None:
    complete(saving)
    size = act(saving, "save", filename="one").json()["n_written"]
    assert 1500 < size < 3000
    reply = act(saving, "save", filename="two")
    assert (reply.status_code, "the storage is full" in reply.text) == (400, True)
    # In the place of the first there is room.
    assert act(saving, "save", filename="one").status_code == 200
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["one"]


def test_S_25_each_holder_has_slots_and_files_of_its_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = ServerConfig(
        log_stats_interval=0, slot_save_path=str(tmp_path / "kept"), api_key_file=rig.write_keys(tmp_path)
    )
    with Live(inproc(), tokenizer, config) as live:
        complete(live, rig.ALICE)
        assert act(live, "save", key=rig.BOB, filename="one").json()["n_saved"] == 0
        assert act(live, "save", key=rig.ALICE, filename="one").json()["n_saved"] == 72
        assert act(live, "restore", key=rig.BOB, filename="one").json()["n_restored"] == 0
        live.client.reset_prefix_cache()
        assert act(live, "restore", key=rig.ALICE, filename="one").json()["n_restored"] == 72
        assert complete(live, rig.BOB)["timings"]["cache_n"] == 0
        assert complete(live, rig.ALICE)["timings"]["cache_n"] == 64
        assert act(live, "save", key=rig.PROBE, filename="one").status_code == 403


def test_without_the_flag_there_are_no_slots(live: Live) -> None:
    reply = act(live, "save", filename="x")
    assert (reply.status_code, "--slot-save-path" in reply.text) == (501, True)
    result = complete(live, id_slot=2)
    assert result["id_slot"] == -1
    assert result["warnings"] == ["id_slot: ignored: a prefix is found wherever it was computed; see --slot-save-path"]


def test_a_folder_that_can_not_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="slot_save_path"):
        Folder.of(str(tmp_path / "file" / "x"), 1, {})
