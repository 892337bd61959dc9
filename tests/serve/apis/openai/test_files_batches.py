"""/v1/files and /v1/batches: OpenAI's own client against a live server over the fake engine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.support.server import HTTP, Live, child, inproc

from headrace.protocol.config import ServerConfig
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.serve.apis.openai import batches, storage
from headrace.serve.storage import multipart
from headrace.serve.storage.store import Store, StoreFullError
from headrace.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Wer fährt so spät?"}]


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=240) as openai_client:
        yield openai_client


def line(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"/v1/chat/completions": {"messages": MESSAGES}, "/v1/completions": {"prompt": "a"}}.get(
        url, {"input": "x"}
    )
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "fake"} | fields | body}


def jsonl(lines: list[Any]) -> bytes:
    return b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    return client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch").id


def finish(live: Live, client: openai.OpenAI, batch_id: str, seconds: float = 20) -> Any:
    live.wait(lambda: client.batches.retrieve(batch_id).status in batches.ENDED, seconds)
    return client.batches.retrieve(batch_id)


def outputs(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    lines = client.files.content(file_id).text.strip().split("\n")
    result = {output["custom_id"]: output for output in map(json.loads, lines)}
    assert len(result) == len(lines)
    return result


def test_files_come_and_go(client: openai.OpenAI) -> None:
    content = b'{"a": "\xc3\xa4"}\r\n--x\r\n\r\n\n' * 50
    result = client.files.create(file=("täglich.jsonl", content), purpose="batch")
    assert (result.bytes, result.purpose, result.object, result.status) == (len(content), "batch", "file", "processed")
    assert client.files.retrieve(result.id).filename.startswith("t")
    assert client.files.content(result.id).read() == content
    assert result.id in [file.id for file in client.files.list()]
    assert result.id in [file.id for file in client.files.list(purpose="batch", limit=2)]
    assert result.id not in [file.id for file in client.files.list(purpose="vision")]
    assert client.files.delete(result.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(result.id)


def test_lists_are_paged(client: openai.OpenAI) -> None:
    ids = [client.files.create(file=(f"{i}.jsonl", b"x"), purpose="user_data").id for i in range(5)]
    pages = client.files.list(purpose="user_data", limit=2, order="asc")
    assert [file.id for file in pages.data] == ids[:2]
    assert [file.id for file in pages] == ids
    assert [file.id for file in client.files.list(purpose="user_data", limit=2)] == ids[::-1]
    with pytest.raises(openai.BadRequestError):
        client.files.list(limit=0)
    with pytest.raises(openai.NotFoundError):
        client.files.list(after="file-" + "0" * 32)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a\\b", "..", "file-" + "0" * 32 + ".json"])
def test_S_08_a_file_s_name_is_no_path(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    config = ServerConfig(log_stats_interval=0, storage_dir=str(tmp_path / "kept"))
    with Live(inproc(), tokenizer, config) as server:
        reply = HTTP.post(server.url + "/v1/files", files={"file": (name, b"x")}, data={"purpose": "batch"})
        assert reply.status_code == 200, reply.text
        file_id = reply.json()["id"]
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    result = sorted(str(path.relative_to(tmp_path)) for path in files)
    assert result == [f"kept/files/{file_id}.bin", f"kept/files/{file_id}.json"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "multipart/form-data; boundary=x"),
        (b"--x\r\n\r\nabc", "multipart/form-data; boundary=x"),
        (b"--x\r\nno header\r\n\r\nabc\r\n--x--", "multipart/form-data; boundary=x"),
        (b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\nabc\r\n--x--', "multipart/form-data; boundary=x"),
        (b"{}", "application/json"),
        (b"--x--", "multipart/form-data"),
        (b"--x\r\n" * 99 + b"--x--", "multipart/form-data; boundary=x"),
        (b"--\xc3\xa4--", "multipart/form-data; boundary=\u00e4".encode().decode("latin-1")),
    ],
)
def test_bad_uploads_are_refused(live: Live, body: bytes, kind: str) -> None:
    reply = HTTP.post(live.url + "/v1/files", content=body, headers={"content-type": kind.encode("latin-1")})
    assert reply.status_code == 400, reply.text
    reply = HTTP.post(live.url + "/v1/files", files={"file": ("a", b"x")}, data={"purpose": "fine-tune"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "purpose"


def form(*parts: tuple[str, bytes], boundary: str = "x") -> tuple[str, bytes]:
    """Content type and body of a form; each part is its header lines and its content."""
    body = b"".join(f"--{boundary}\r\n{head}\r\n\r\n".encode() + content + b"\r\n" for head, content in parts)
    return f"multipart/form-data; boundary={boundary}", body + f"--{boundary}--\r\n".encode()


def field(name: str) -> str:
    return f'Content-Disposition: form-data; name="{name}"'


def numbered(num_parts: int) -> list[tuple[str, bytes]]:
    return [(field(f"f{number}"), b"1") for number in range(num_parts)]


FILE = 'Content-Disposition: form-data; name="file"; filename="a.jsonl"'


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (form(*numbered(multipart.MAX_PARTS)), form(*numbered(multipart.MAX_PARTS + 1))),
        (form((field("a"), b"v" * 4096)), form((field("a"), b"v" * 4097))),
        (form((field("n" * 80), b"v")), form((field("n" * 81), b"v"))),
        (form((field("n"), b"v")), form((field(""), b"v"))),
        (
            form((field("a") + "\r\nX-More: " + "y" * 4096, b"v")),
            form((field("a") + "\r\nX-More: " + "y" * 8192, b"v")),
        ),
        (form(*numbered(1), boundary="b" * 256), form(*numbered(1), boundary="b" * 257)),
        (form((field("a"), b"v"), (field("b"), b"v")), form((field("a"), b"v"), (field("a"), b"v"))),
        (form((field("a"), b"v"), (FILE, b"v")), form((field("file"), b"v"), (FILE, b"v"))),
        (form((field("a"), "\u00e4".encode())), form((field("a"), b"\xe4"))),
        (form((FILE, b"\r\n--.x")), form((FILE, b"\r\n--x."))),
        (form((FILE, b"\r\n-- x")), form((FILE, b"\r\n--x \r\n"))),
        (form(*numbered(2)), (form(*numbered(2))[0], form(*numbered(2))[1].removesuffix(b"--\r\n"))),
        (form(*numbered(2)), ("multipart/mixed; boundary=x", form(*numbered(2))[1])),
        (form(*numbered(2)), ("multipart/form-data; boundary=", form(*numbered(2), boundary="")[1])),
    ],
)
def test_bounds_of_forms(good: tuple[str, bytes], bad: tuple[str, bytes]) -> None:
    fields, uploads = multipart.parse_form(*good)
    assert fields or uploads
    with pytest.raises(RequestError):
        multipart.parse_form(*bad)


@pytest.mark.parametrize("preamble", [b"", b"\r\n", b"A note for old mail programs.\r\n"])
def test_an_upload_is_stored_byte_for_byte(preamble: bytes) -> None:
    content = bytes(range(256)) * 9 + b"\r\n--\r\n-x\r\n\r--x\n--x\r\n"
    head = FILE.replace("a.jsonl", 't\u00e4glich; \\"1\\".jsonl') + "\r\nContent-Type: application/octet-stream"
    content_type, body = form((head, content), (field("purpose"), b"batch"))
    fields, uploads = multipart.parse_form(content_type, preamble + body)
    assert uploads == {"file": multipart.UploadedPart('t\u00e4glich; "1".jsonl', content)}
    assert fields == {"purpose": "batch"}


def test_a_batch_of_every_kind(live: Live, client: openai.OpenAI) -> None:
    bodies = {"/v1/chat/completions": {"max_tokens": 5}, "/v1/completions": {"max_tokens": 5}}
    bodies |= {"/v1/embeddings": {}, "/v1/responses": {"max_output_tokens": 5}}
    for url, body in bodies.items():
        file_id = upload(client, [line(f"q{i}", url, **body) for i in range(7)])
        inputs: Any = {"input_file_id": file_id, "endpoint": url, "completion_window": "24h"}
        result = client.batches.create(**inputs, metadata={"of": "a test"})
        assert result.status == "validating"
        done = finish(live, client, result.id)
        assert done.status == "completed", done
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (7, 7, 0)
        assert done.error_file_id is None
        assert done.metadata == {"of": "a test"}
        outcome = outputs(client, done.output_file_id)
        assert sorted(outcome) == [f"q{i}" for i in range(7)]
        assert all(output["response"]["status_code"] == 200 for output in outcome.values())
    assert result.id in [batch.id for batch in client.batches.list(limit=2)]


def test_answers_are_those_of_a_plain_call(live: Live, client: openai.OpenAI) -> None:
    file_id = upload(client, [line("one", max_tokens=12, seed=4), line("two", max_tokens=12)])
    result = client.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h")
    outcome = outputs(client, finish(live, client, result.id).output_file_id)
    for custom_id in ("one", "two"):
        # A line without a seed got one, and tells it.
        body = outcome[custom_id]["response"]["body"]
        plain = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=12, seed=body["seed"])  # type: ignore[arg-type]
        assert body["choices"][0]["message"]["content"] == plain.choices[0].message.content


def test_failing_lines_go_to_the_error_file(live: Live, client: openai.OpenAI) -> None:
    lines = [
        line("good", max_tokens=3),
        line("bad", max_tokens=-3),
        line("other", model="nope"),
        line("s", stream=True),
    ]
    result = client.batches.create(
        input_file_id=upload(client, lines), endpoint="/v1/chat/completions", completion_window="24h"
    )
    done = finish(live, client, result.id)
    assert done.status == "completed"
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 3)
    assert list(outputs(client, done.output_file_id)) == ["good"]
    errors = outputs(client, done.error_file_id)
    assert {name: errors[name]["response"]["status_code"] for name in errors} == {"bad": 400, "other": 404, "s": 400}
    assert errors["bad"]["response"]["body"]["error"]["param"] == "max_tokens"


def test_a_batch_with_a_bad_line_asks_nothing(live: Live, client: openai.OpenAI) -> None:
    lines = [line("a"), b"{not json", line("a"), line("b", "/v1/completions"), {"custom_id": "c"}, line("d")]
    before = live.metric("request_success_total")
    result = client.batches.create(
        input_file_id=upload(client, lines), endpoint="/v1/chat/completions", completion_window="24h"
    )
    done = finish(live, client, result.id)
    assert done.status == "failed"
    assert done.errors is not None
    assert [(error.line, error.param) for error in done.errors.data or []] == [
        (2, "body"), (3, "custom_id"), (4, "url"), (5, "method"),
    ]  # fmt: skip
    assert (done.output_file_id, done.error_file_id) == (None, None)
    assert live.metric("request_success_total") == before


def test_refusals(live: Live, client: openai.OpenAI) -> None:
    file_id = upload(client, [line("a")])
    good = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for wrong, param in (
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ):
        reply = live.post("/v1/batches", good | wrong)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert live.post("/v1/batches", good | {"input_file_id": "file-" + "1" * 32}).status_code == 404


def test_cancel_keeps_what_was_answered(tokenizer: Tokenizer) -> None:
    config = ServerConfig(log_stats_interval=0, max_batch_concurrency=2)
    with Live(inproc(delay=0.005), tokenizer, config) as server, openai_of(server) as client:
        lines = [line(f"q{i}", max_tokens=40, ignore_eos=True) for i in range(40)]
        inputs: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        result = client.batches.create(input_file_id=upload(client, lines), **inputs)
        second = client.batches.create(input_file_id=upload(client, lines), **inputs)
        server.wait(lambda: (client.batches.retrieve(result.id).request_counts or result).completed >= 2)  # type: ignore[union-attr]
        assert client.batches.cancel(result.id).status in ("cancelling", "cancelled")
        assert client.batches.cancel(second.id).status in ("cancelling", "cancelled")
        done = finish(server, client, result.id)
        assert done.status == "cancelled"
        assert 2 <= len(outputs(client, done.output_file_id)) == done.request_counts.completed < 40
        assert finish(server, client, second.id).output_file_id is None
        server.wait(lambda: server.client.num_unfinished == 0)
        with pytest.raises(openai.BadRequestError):
            client.batches.cancel(result.id)


def openai_of(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=240)


def test_expired_lines_are_told(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "HOUR_S", 1)
    config = ServerConfig(log_stats_interval=0, max_batch_concurrency=2)
    with Live(inproc(delay=0.005), tokenizer, config) as server, openai_of(server) as client:
        lines = [line(f"q{i}", max_tokens=200, ignore_eos=True) for i in range(40)]
        file_id = upload(client, lines)
        result = client.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="1h")
        done = finish(server, client, result.id)
        assert done.status == "expired"
        errors = outputs(client, done.error_file_id)
        assert {output["error"]["code"] for output in errors.values()} == {"batch_expired"}
        known = outputs(client, done.output_file_id) if done.output_file_id else {}
        assert sorted([*errors, *known]) == sorted(f"q{i}" for i in range(40))


def test_others_go_first(tokenizer: Tokenizer) -> None:
    """While requests wait in the engine's queue no new line is begun, and no more than so many are open."""
    config = ServerConfig(log_stats_interval=0, max_batch_concurrency=3)
    with Live(inproc(delay=0.003, max_num_seqs=4), tokenizer, config) as server, openai_of(server) as client:
        lines = [line(f"q{i}", max_tokens=20, ignore_eos=True) for i in range(30)]
        inputs: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        result = client.batches.create(input_file_id=upload(client, lines), **inputs)
        most = 0

        def enough() -> bool:
            nonlocal most
            most = max(most, server.client.num_unfinished)
            counts = client.batches.retrieve(result.id).request_counts
            return counts is not None and counts.completed >= 6

        server.wait(enough)
        assert 0 < most <= 3
        assert finish(server, client, result.id).status == "completed"


def test_a_batch_lives_through_the_engine_s_death(tokenizer: Tokenizer) -> None:
    link_client = child(delay=0.01)
    with Live(link_client, tokenizer, ServerConfig(log_stats_interval=0)) as server, openai_of(server) as client:
        lines = [line(f"q{i}", max_tokens=20, seed=i) for i in range(40)]
        result = client.batches.create(
            input_file_id=upload(client, lines), endpoint="/v1/chat/completions", completion_window="24h"
        )
        server.wait(lambda: (client.batches.retrieve(result.id).request_counts or result).completed >= 4)  # type: ignore[union-attr]
        os.kill(*link_client.pids, signal.SIGKILL)
        done = finish(server, client, result.id)
        assert server.client.num_restarts == 1
        assert (done.status, done.request_counts.completed) == ("completed", 40)
        outcome = outputs(client, done.output_file_id)
        plain = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=20, seed=30)  # type: ignore[arg-type]
        assert (
            outcome["q30"]["response"]["body"]["choices"][0]["message"]["content"] == plain.choices[0].message.content
        )


def test_a_batch_lives_through_the_server_s_end(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = ServerConfig(log_stats_interval=0, storage_dir=str(tmp_path), max_batch_concurrency=2)
    lines = [line(f"q{i}", max_tokens=30, ignore_eos=True) for i in range(24)]
    with Live(inproc(delay=0.004), tokenizer, config) as first, openai_of(first) as client:
        result = client.batches.create(
            input_file_id=upload(client, lines), endpoint="/v1/chat/completions", completion_window="24h"
        )
        first.wait(lambda: (client.batches.retrieve(result.id).request_counts or result).completed >= 4)  # type: ignore[union-attr]
    # A kill may tear the last line.
    [written] = [
        path for path in (tmp_path / "files").glob("*.bin") if path.read_bytes().startswith(b'{"id":"batch_req')
    ]
    written.write_bytes(written.read_bytes() + b'{"id": "batch_req_torn", "custom_id": "q2')
    with Live(inproc(), tokenizer, config) as second, openai_of(second) as client:
        done = finish(second, client, result.id)
        assert (done.status, done.request_counts.completed) == ("completed", 24)
        assert sorted(outputs(client, done.output_file_id)) == sorted(f"q{i}" for i in range(24))


def test_the_store_is_bounded(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        store = Store("x_", folder, max_items=3, max_bytes=100)
        ids = [store.new_id() for _ in range(4)]
        for entry_id in ids[:3]:
            store.put(entry_id, {}, b"y" * 20)
        with pytest.raises(StoreFullError, match="3 of 3"):
            store.put(ids[3], {}, b"")
        with pytest.raises(StoreFullError):
            store.write(ids[0], b"y" * 40, 20)
        assert store.body(ids[0]) == b"y" * 20
        store.delete(ids[1])
        store.write(ids[0], b"z", 20)
        assert store.num_bytes == 45
        store.write(ids[0], b"uvw", 18)
        assert (store.body(ids[0])[16:], store.num_bytes) == (b"yyuvw", 45)
        store.set_metadata(ids[0], {"a": 1})
        store.set_body(ids[0], b"")
        assert (store.metadata(ids[0]), store.body(ids[0]), store.num_bytes) == ({"a": 1}, b"", 29)
        assert not store.delete("../" + ids[0])
    with pytest.raises(HeadraceError, match="another server"):
        Store("x_", tmp_path, max_items=3, max_bytes=100)
    store.close()
    again = Store("x_", tmp_path, max_items=3, max_bytes=100)
    assert sorted(again) == sorted(store)
    assert again.num_bytes == 29
    again.close()
    with pytest.raises(HeadraceError, match="storage"):
        Store("x_", Path("/dev/null/x"), max_items=3, max_bytes=100)


def test_the_oldest_give_way_where_that_is_wanted() -> None:
    store = Store("x_", None, max_items=2, max_bytes=1000, evict=True)
    ids = [store.new_id() for _ in range(4)]
    for entry_id in ids:
        store.put(entry_id, {}, b"")
    assert list(store) == ids[2:]


def test_S_08_what_is_no_entry_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    secret = tmp_path / "secret"
    secret.write_text('{"a": 1}')
    linked = "x_" + "a" * 32
    (folder / f"{linked}.json").symlink_to(secret)
    (folder / f"{linked}.bin").symlink_to(secret)
    half = "x_" + "b" * 32
    (folder / f"{half}.json").write_text("{}")
    (folder / f"{half}.bin").symlink_to(secret)
    (folder / "notes.txt").write_text("mine")
    (folder / "part-123").write_text("torn")
    store = Store("x_", folder, max_items=9, max_bytes=1000)
    assert list(store) == []
    assert sorted(path.name for path in folder.iterdir() if not path.is_symlink()) == [
        ".lock",
        "notes.txt",
        f"{half}.json",
    ]
    store.close()
    assert secret.read_text() == '{"a": 1}'


def test_a_full_store_refuses_files_and_drops_responses(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MAX_RESPONSES", 3)
    config = ServerConfig(log_stats_interval=0, max_storage_bytes=20_000)
    with Live(inproc(), tokenizer, config) as server:
        data = {"purpose": "batch"}
        for _ in range(2):
            reply = HTTP.post(server.url + "/v1/files", files={"file": ("a", b"x" * 9_000)}, data=data)
            assert reply.status_code == 200
        reply = HTTP.post(server.url + "/v1/files", files={"file": ("a", b"x" * 9_000)}, data=data)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "storage_full")
        body = {"input": "x", "max_output_tokens": 2}
        ids = [server.post("/v1/responses", body).json()["id"] for _ in range(5)]
        status_codes = [HTTP.get(f"{server.url}/v1/responses/{response_id}").status_code for response_id in ids]
        assert status_codes == [404, 404, 200, 200, 200]
