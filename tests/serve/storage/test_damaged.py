"""Stored entries whose files were damaged: they are left out, in the log, and all others are served."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.serve.test_models_folder import write_model
from tests.support.gated import Server, serving

from headrace.serve.storage.store import Store
from headrace.text.tokenizer import Tokenizer

DAMAGE: dict[str, list[dict[str, Any]]] = {
    "files": [{"created_at": "x"}, {"filename": 5}, {"purpose": None}, {"created_at": 1e308}],
    "batches": [{"status": 7}, {"request_counts": None}, {"_sizes": {"output_file_id": -1}}, {"expires_at": "never"},
                {"id": "batch_0"}, {"endpoint": None}],
    "conversations": [{"object": 1}, {"metadata": "x"}, {"created_at": None}, {"id": "conv_1"}],
}  # fmt: skip
LISTS = {"files": "GET /v1/files", "batches": "GET /v1/batches"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_model(tmp_path / "models" / "tiny")
    return tmp_path / "models"


async def upload(server: Server) -> str:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "fake", "prompt": "x"}}
    files = {"file": ("x.jsonl", json.dumps(line).encode())}
    reply = await server.http.post("/v1/files", files=files, data={"purpose": "batch"})
    return str(reply.json()["id"])


async def batch(server: Server) -> str:
    body = {"input_file_id": await upload(server), "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = str((await server.call("POST /v1/batches", body)).json()["id"])

    async def is_over() -> bool:
        return bool((await server.call(f"GET /v1/batches/{batch_id}")).json()["status"] == "completed")

    while not await is_over():
        await asyncio.sleep(0.01)
    return batch_id


async def conversation(server: Server) -> str:
    item = {"type": "message", "role": "user", "content": "hello"}
    return str((await server.call("POST /v1/conversations", {"items": [item]})).json()["id"])


MAKERS = {"files": upload, "batches": batch, "conversations": conversation}


async def stored(tokenizer: Tokenizer, root: Path, folder: Path, group: str, num: int = 2) -> list[str]:
    """The ids of some entries that a server has stored."""
    async with serving(tokenizer, root, storage_dir=str(folder)) as server:
        await server.until(lambda: server.client.is_alive)
        return [await MAKERS[group](server) for _ in range(num)]


@pytest.mark.parametrize("group", list(DAMAGE))
def test_a_damaged_entry_is_left_out_and_the_others_are_served(
    group: str, tokenizer: Tokenizer, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kept"

    async def go() -> None:
        first, second = await stored(tokenizer, root, folder, group)
        path = folder / group / f"{first}.json"
        sound = json.loads(path.read_text())
        for change in DAMAGE[group]:
            caplog.clear()
            path.write_text(json.dumps(sound | change))
            async with serving(tokenizer, root, storage_dir=str(folder)) as server:
                assert (await server.call(f"GET /v1/{group}/{first}")).status_code == 404
                assert (await server.call(f"GET /v1/{group}/{second}")).status_code == 200
                if group in LISTS:
                    names = [each["id"] for each in (await server.call(LISTS[group])).json()["data"]]
                    assert second in names
                    assert first not in names
            assert f"{first} in {folder / group} is left out" in caplog.text
            assert path.exists(), "it is for a person to look at"

    asyncio.run(go())


def test_a_damaged_batch_holds_up_no_other(tokenizer: Tokenizer, root: Path, tmp_path: Path) -> None:
    async def go() -> None:
        folder = tmp_path / "kept"
        [first] = await stored(tokenizer, root, folder, "batches", 1)
        path = folder / "batches" / f"{first}.json"
        card = json.loads(path.read_text())
        del card["status"]
        path.write_text(json.dumps(card))
        async with serving(tokenizer, root, storage_dir=str(folder)) as server:
            await server.until(lambda: server.client.is_alive)
            await batch(server)
            assert (await server.call("GET /health/ready")).status_code == 200

    asyncio.run(go())


def test_control_without_the_check_such_a_batch_holds_up_all(
    tokenizer: Tokenizer, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Store.__init__

    def unchecked(self: Store, *args: Any, **options: Any) -> None:
        options.pop("kind", None)
        real(self, *args, **options)

    async def go() -> None:
        folder = tmp_path / "kept"
        [first] = await stored(tokenizer, root, folder, "batches", 1)
        (folder / "batches" / f"{first}.json").write_text("{}")
        monkeypatch.setattr(Store, "__init__", unchecked)
        async with serving(tokenizer, root, storage_dir=str(folder)) as server:
            await server.until(lambda: server.client.is_alive)
            body = {"input_file_id": await upload(server), "endpoint": "/v1/completions", "completion_window": "24h"}
            assert (await server.call("POST /v1/batches", body)).status_code == 500

    asyncio.run(go())


@pytest.mark.parametrize("text", [b"\xb4", b'{"filename": "\xb4"}', b"[" * 3000, b"", b"[]"])
def test_metadata_that_are_no_text_do_not_end_the_server(
    text: bytes, tokenizer: Tokenizer, root: Path, tmp_path: Path
) -> None:
    async def go() -> None:
        folder = tmp_path / "kept"
        [first] = await stored(tokenizer, root, folder, "files", 1)
        (folder / "files" / f"{first}.json").write_bytes(text)
        async with serving(tokenizer, root, storage_dir=str(folder)) as server:
            assert (await server.call(f"GET /v1/files/{first}")).status_code == 404
            assert (await server.call("GET /v1/files")).status_code == 200

    asyncio.run(go())


@pytest.mark.parametrize("body", [b"{", b"{}\n", b'{"id": "a"}', b'["', b"\x00\n", b"[" * 3000])
def test_a_damaged_conversation_is_not_found_and_can_be_deleted(
    body: bytes, tokenizer: Tokenizer, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def go() -> None:
        folder = tmp_path / "kept"
        [first] = await stored(tokenizer, root, folder, "conversations", 1)
        (folder / "conversations" / f"{first}.bin").write_bytes(body)
        async with serving(tokenizer, root, storage_dir=str(folder)) as server:
            path = f"/v1/conversations/{first}"
            for route in (f"GET {path}/items", f"GET {path}/items/x", f"DELETE {path}/items/x"):
                reply = await server.call(route)
                assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
            assert f"the stored conversation {first} can not be read" in caplog.text
            assert (await server.call(f"GET {path}")).status_code == 200
            assert (await server.call(f"DELETE {path}")).status_code == 200

    asyncio.run(go())
