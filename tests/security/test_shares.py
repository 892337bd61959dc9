"""S-39: what one holder of a key stores and batches neither ends, evicts nor holds up what another one does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.security import rig
from tests.support.server import HTTP, Live, inproc, logged

from headrace.protocol.config import ServerConfig
from headrace.protocol.errors import RequestError
from headrace.serve.apis.openai import batches, storage
from headrace.serve.gates.auth import KeyRing
from headrace.serve.storage.fair_semaphore import FairSemaphore
from headrace.serve.storage.store import Store
from headrace.text.tokenizer import Tokenizer

KEYS = "".join(f"[{name}]\nkey = '{name}'\n" for name in ("alice", "bob", "carol"))


@pytest.fixture
def shared(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(batches, "DISK_AGAIN_S", 0.02)
    monkeypatch.setattr(storage, "MAX_RESPONSES", 3)
    keys = rig.write_keys(tmp_path, KEYS + "tokens_per_minute = 40\n")
    config = ServerConfig(api_key_file=keys, max_storage_bytes=150_000, max_batch_concurrency=2, log_stats_interval=0)
    with Live(inproc(delay=0.001), tokenizer, config) as live:
        yield live


def post(live: Live, key: str, path: str, body: Any) -> Any:
    reply = HTTP.post(live.url + path, json=body, headers=rig.bearer(key))
    assert reply.status_code == 200, reply.text
    return reply.json()


def get(live: Live, key: str, path: str) -> Any:
    return HTTP.get(live.url + path, headers=rig.bearer(key)).json()


def upload(live: Live, key: str, content: bytes) -> Any:
    files, data = {"file": ("in.jsonl", content)}, {"purpose": "batch"}
    return HTTP.post(live.url + "/v1/files", files=files, data=data, headers=rig.bearer(key)).json()


def requests(number: int, num_tokens: int) -> bytes:
    body = {"prompt": "x", "max_tokens": num_tokens, "ignore_eos": True}
    fields = {"method": "POST", "url": "/v1/completions", "body": body}
    return b"\n".join(json.dumps(fields | {"custom_id": f"q{i}"}).encode() for i in range(number))


def start(live: Live, key: str, file_id: str) -> str:
    """-> the id of a batch."""
    expected = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id: str = post(live, key, "/v1/batches", expected)["id"]
    return batch_id


def fill(live: Live, key: str, least: int) -> list[str]:
    """Upload until not even a file of `least` bytes fits. -> the ids of the files."""
    ids = []
    size = 16_384
    while size >= least:
        reply = upload(live, key, b"z" * size)
        if "id" in reply:
            ids.append(reply["id"])
        else:
            assert reply["error"]["code"] == "storage_full"
            size //= 4
    return ids


def test_S_39_a_full_share_is_nobody_elses_and_a_batch_waits_for_room(shared: Live) -> None:
    num_lines = 30
    inputs = {key: upload(shared, key, requests(num_lines, 20))["id"] for key in ("alice", "bob")}
    ids = fill(shared, "alice", 4096)  # no room for all outputs
    bobs = start(shared, "bob", inputs["bob"])
    with logged("text") as text:
        alices = start(shared, "alice", inputs["alice"])
        shared.wait(lambda: f"batch {alices} waits: storage: it is full" in text.getvalue())
        shared.wait(lambda: get(shared, "bob", f"/v1/batches/{bobs}")["status"] == "completed")
        assert get(shared, "alice", f"/v1/batches/{alices}")["status"] in ("validating", "in_progress")
        for file_id in ids:
            assert HTTP.delete(f"{shared.url}/v1/files/{file_id}", headers=rig.bearer("alice")).status_code == 200
        shared.wait(lambda: get(shared, "alice", f"/v1/batches/{alices}")["status"] == "completed")
    assert text.getvalue().count("waits") <= 2
    for key, batch_id in (("alice", alices), ("bob", bobs)):
        batch = get(shared, key, f"/v1/batches/{batch_id}")
        assert batch["request_counts"] == {"total": num_lines, "completed": num_lines, "failed": 0}
        path = f"{shared.url}/v1/files/{batch['output_file_id']}/content"
        lines = HTTP.get(path, headers=rig.bearer(key)).text.splitlines()
        assert sorted(json.loads(line)["custom_id"] for line in lines) == sorted(f"q{i}" for i in range(num_lines))


def evicted(live: Live) -> bool:
    """Whether Bob's responses drive out Alice's."""
    body = {"input": "x", "max_output_tokens": 2}
    first = post(live, "alice", "/v1/responses", body)["id"]
    bobs = [post(live, "bob", "/v1/responses", body)["id"] for _ in range(5)]
    left = [each for each in bobs if "output" in get(live, "bob", f"/v1/responses/{each}")]
    assert left == bobs[-len(left) :]
    assert len(left) <= 3
    return "output" not in get(live, "alice", f"/v1/responses/{first}")


def test_S_39_responses_give_way_to_ones_own_only(shared: Live) -> None:
    assert not evicted(shared)


def test_S_39_control_one_share_for_all_is_noticed(shared: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    make_room = Store._make_room

    def for_all(store: Store, owner: str, *args: Any) -> None:
        owned = list(store._entries.values())
        owners = [entry.owner for entry in owned]
        for entry in owned:
            entry.owner = "all"
        store._num_items["all"] = len(owned)
        make_room(store, "all", *args)
        for entry, name in zip(owned, owners, strict=True):
            entry.owner = name

    monkeypatch.setattr(Store, "_make_room", for_all)
    assert evicted(shared)


def test_S_39_a_batch_that_waits_for_its_rate_holds_up_no_other(shared: Live) -> None:
    carols = start(shared, "carol", upload(shared, "carol", requests(8, 60))["id"])  # of 40 tokens a minute
    shared.wait(lambda: get(shared, "carol", f"/v1/batches/{carols}")["request_counts"]["completed"] >= 1)
    bobs = start(shared, "bob", upload(shared, "bob", requests(8, 5))["id"])
    shared.wait(lambda: get(shared, "bob", f"/v1/batches/{bobs}")["status"] == "completed", 20)
    assert get(shared, "carol", f"/v1/batches/{carols}")["status"] == "in_progress"
    assert post(shared, "carol", f"/v1/batches/{carols}/cancel", {})["status"] in ("cancelling", "cancelled")
    shared.wait(lambda: get(shared, "carol", f"/v1/batches/{carols}")["status"] == "cancelled")


def test_S_39_control_a_permit_that_is_never_granted_holds_up_others(
    shared: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FairSemaphore, "_grant", lambda self: None)
    bobs = start(shared, "bob", upload(shared, "bob", requests(1, 1))["id"])
    with pytest.raises(AssertionError, match="not so"):
        shared.wait(lambda: get(shared, "bob", f"/v1/batches/{bobs}")["status"] == "completed", 0.5)


def test_shares_are_equal_but_for_holders_with_their_own(tmp_path: Path) -> None:
    def shares(text: str, whole: int) -> dict[str, int]:
        return KeyRing.of(None, None, rig.write_keys(tmp_path, text)).storage_shares(whole)

    keys_file = KEYS + "max_storage_bytes = 40\n[probe]\nkey = 'p'\nclasses = ['metrics']\n"
    assert shares(KEYS, 90) == {"alice": 30, "bob": 30, "carol": 30}
    assert shares(keys_file, 100) == {"alice": 30, "bob": 30, "carol": 40}
    assert KeyRing(()).storage_shares(100) == {}
    with pytest.raises(RequestError, match="max_storage_bytes: 41 is not allowed; it must be at least 42"):
        shares(keys_file, 41)
    with pytest.raises(RequestError, match="carol.max_storage_bytes"):
        shares(KEYS + "max_storage_bytes = 0\n", 100)


# -- ids


def overwritten(live: Live, key: str) -> bool:
    """Whether a response that is not stored can take the place of Alice's."""
    body = {"max_output_tokens": 4, "store": True}
    response = post(live, "alice", "/v1/responses", body | {"input": "first"})
    before = get(live, "alice", f"/v1/responses/{response['id']}")
    name = response["id"].partition("_")[2]
    reply = HTTP.post(
        live.url + "/v1/responses",
        json={"input": "other", "store": False, "request_id": name, "max_output_tokens": 9},
        headers=rig.bearer(key) | {"x-request-id": name},
    )
    assert reply.status_code == 200
    after = get(live, "alice", f"/v1/responses/{response['id']}")
    return bool(reply.json()["id"] == response["id"] or after != before)


@pytest.mark.parametrize("key", ["alice", "bob"])
def test_S_25_no_id_of_a_callers_names_a_stored_response(shared: Live, key: str) -> None:
    assert not overwritten(shared, key)


def test_S_25_a_store_takes_new_ids_of_its_own_only(tmp_path: Path) -> None:
    store = Store("resp_", tmp_path, max_items=9, max_bytes=10**6)
    used = store.new_id()
    store.put(used, {}, b"first")
    for entry_id in (used, "resp_x", "resp_../../x", "file-" + "0" * 32, used + "\n"):
        with pytest.raises(ValueError, match="no new id"):
            store.put(entry_id, {}, b"second")
    assert store.body(used) == b"first"
    store.close()
