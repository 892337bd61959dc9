"""Administrators and the log learn where the server's files lie, and no other caller, whatever breaks in any API.

The models are real ones, each with a fault of its own, and engines load them in this process.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.security.rig import ALICE, ROOT, bearer, write_keys
from tests.serve.test_models_folder import Folded
from tests.support.checkpoints import write_llama
from tests.support.server import HTTP, write_tokenizer

from headrace.engine.build import build_engine
from headrace.engine.client import InprocClient
from headrace.engine.library.model_folder import ModelFolder
from headrace.engine.tenants import Tenant, acting_as
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, HeadraceError, ModelNotFoundError, RequestError
from headrace.protocol.speculation import SpeculativeConfig
from headrace.serve import errors, loading
from headrace.serve.errors import CallError, text_of, without_paths
from headrace.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def first_of_its_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test's holders have had no line of the log yet."""
    monkeypatch.setattr(errors, "hidden_paths", errors.HiddenPaths())


def cut_weights(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def bad_config(model: Path) -> None:
    (model / "config.json").write_text("{")


def bad_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")


def bad_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for %}")


def bad_advice(model: Path) -> None:
    (model / "generation_config.json").write_text('{"temperature": -7}')


def bad_settings(model: Path) -> None:
    (model / "headrace.json").write_text("[]")


def bad_index(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"w": "absent.safetensors"}}')


def bad_gguf(model: Path) -> None:
    shutil.rmtree(model)
    model.mkdir()
    (model / "a.gguf").write_bytes(b"GGUF" + bytes(40))


def draft(model: Path) -> None:
    """It is sound, but its draft model is missing."""


FAULTS: list[Callable[[Path], None]] = [
    cut_weights, no_weights, bad_config, bad_tokenizer, bad_template, bad_advice, bad_settings, bad_index, bad_gguf,
    draft,
]  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    "stream": ("/v1/chat/completions", CHAT | {"stream": True}),
    "responses": ("/v1/responses", {"input": "a", "stream": True}),
    "embeddings": ("/v1/embeddings", {"input": "a"}),
    "anthropic": ("/v1/messages", CHAT),
    "ollama": ("/api/generate", {"prompt": "a"}),
    "ollama chat": ("/api/chat", CHAT),
    "ollama show": ("/api/show", {}),
    "llama-server": ("/completion", {"prompt": "a", "n_predict": 1}),
    "tokenize": ("/tokenize", {"prompt": "a"}),
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Folded]:
    root = tmp_path_factory.mktemp("a house") / "models of ours"
    root.mkdir()
    for fault in FAULTS:
        model = root / fault.__name__
        model.mkdir()
        write_llama(model)
        write_tokenizer(model)
        fault(model)
    spec = SpeculativeConfig(
        method="draft_model", model=str(root.parent / "drafts" / "absent"), num_speculative_tokens=2
    )

    def client(engine: EngineConfig, server: Any) -> InprocClient:
        changes = {"speculative_config": spec} if Path(engine.model).name == "draft" else {}
        config = {name: getattr(engine, name) for name in EngineConfig.__struct_fields__}
        small = {"num_gpu_blocks_override": 16, "max_model_len": 64, "backend": "torch_ref"}
        return InprocClient(lambda: build_engine(EngineConfig(**config | small | changes)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "ProcessClient", client)
        with Folded(root, tokenizer, api_key_file=str(write_keys(root.parent))) as live:
            yield live


def reply_to(house: Folded, call: str, model: str, key: str) -> str:
    path, body = CALLS[call]
    return str(house.post(path, body | {"model": model}, headers=bearer(key)).text)


@pytest.mark.parametrize("fault", FAULTS)
def test_S_22_no_api_tells_where_the_files_of_a_model_lie(fault: Callable[[Path], None], house: Folded) -> None:
    place = str(house.root.parent)
    replies = {call: reply_to(house, call, fault.__name__, ALICE) for call in CALLS}
    assert {call: text for call, text in replies.items() if place in text or "/drafts" in text} == {}
    if fault not in (bad_template,):
        assert any("error" in text for text in replies.values()), replies
    for listed in ("/v1/models", "/api/tags", f"/v1/models/{fault.__name__}"):
        assert place not in HTTP.get(house.url + listed, headers=bearer(ALICE)).text


def test_S_22_control_without_the_door_they_are_told(house: Folded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "without_paths", lambda text: text)
    monkeypatch.setattr(ModelFolder, "without_root", lambda folder, text: text)
    place = str(house.root)
    failing = {fault.__name__ for fault in FAULTS if place in reply_to(house, "completions", fault.__name__, ALICE)}
    assert failing >= {"cut_weights", "no_weights", "bad_config", "bad_settings", "bad_index", "bad_advice"}
    assert "/drafts/absent" in reply_to(house, "completions", "draft", ALICE)


def test_S_22_administrators_and_the_log_have_them(house: Folded, caplog: pytest.LogCaptureFixture) -> None:
    draft = str(house.root.parent / "drafts" / "absent")
    assert draft in reply_to(house, "completions", "draft", ROOT)
    caplog.clear()
    text = reply_to(house, "completions", "draft", ALICE)
    assert draft not in text
    assert "absent" in text, "the name of a file is a help"
    assert draft in caplog.text


def test_S_22_a_batch_line_and_a_stored_response_tell_no_more(house: Folded) -> None:
    body = {"model": "cut_weights", "prompt": "a"}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    file = HTTP.post(
        house.url + "/v1/files", data={"purpose": "batch"}, files={"file": json.dumps(line)}, headers=bearer(ALICE)
    ).json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    card = house.post("/v1/batches", batch, headers=bearer(ALICE)).json()
    place = f"{house.url}/v1/batches/{card['id']}"
    house.wait(lambda: HTTP.get(place, headers=bearer(ALICE)).json()["status"] in ("completed", "failed"))
    card = HTTP.get(place, headers=bearer(ALICE)).json()
    output = HTTP.get(f"{house.url}/v1/files/{card['error_file_id']}/content", headers=bearer(ALICE)).text
    assert "can not be loaded" in output
    assert str(house.root.parent) not in output
    request = {"model": "cut_weights", "input": "a", "background": True}
    assert str(house.root.parent) not in house.post("/v1/responses", request, headers=bearer(ALICE)).text


PATHS = [
    ("/srv/models/bad/model.safetensors is cut", "model.safetensors is cut"),
    ("bad: '/srv/models/bad': [Errno 2]", "bad: 'bad': [Errno 2]"),
    ("(/srv/a/b.json), ~/c/d.json; /srv/e/", "(b.json), d.json; ..."),
    ("/srv/a/b:12", "b:12"),
    ("/srv/our old models/a/b is cut, as in c/d", "b is cut, as in c/d"),
    ("see https://host/a/b and a/b, n/a", "see https://host/a/b and a/b, n/a"),
    ("see GET /v1/models, /api/blobs/x, /docs", "see GET /v1/models, /api/blobs/x, /docs"),
]


@pytest.mark.parametrize(("text", "expected"), PATHS)
def test_S_22_paths_become_names_and_routes_stay(text: str, expected: str) -> None:
    assert without_paths(text) == expected
    for kind in (CheckpointError, ModelNotFoundError, HeadraceError):
        assert text_of(kind(text)) == expected
    with acting_as(Tenant("root", is_admin=True)):
        assert text_of(CheckpointError(text)) == text


def test_S_22_the_words_of_the_caller_stay(caplog: pytest.LogCaptureFixture) -> None:
    """To take them away would show which of the caller's paths are the server's."""
    error = RequestError("stop", "/srv/models/x", "a model that can be read: /srv/models/x/config.json is missing")
    assert text_of(error) == (
        "stop: '/srv/models/x' is not allowed; it must be a model that can be read: config.json is missing"
    )
    assert "/srv/models/x/config.json is missing" in caplog.text
    assert text_of(CallError(404, "not_found", "there is no /a/b here")) == "there is no /a/b here"


@pytest.mark.parametrize("is_limited", [True, False])
def test_S_22_of_each_holder_one_line_a_minute_tells_of_hidden_paths(
    is_limited: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(errors, "time", SimpleNamespace(monotonic=lambda: clock.now))
    if not is_limited:
        monkeypatch.setattr("headrace.engine.tenants.MINUTE_S", 0.0)
    for name in ("alice", "bob", "alice", "alice", "bob"):
        with acting_as(Tenant(name)):
            assert text_of(ModelNotFoundError(f"{name}: /etc/passwd")) == f"{name}: passwd"
    clock.now += 60.0
    with acting_as(Tenant("alice")):
        text_of(ModelNotFoundError("later: /etc/passwd"))
    lines = [message.partition("does not see")[2] for message in caplog.messages]
    if is_limited:
        more = " (and 2 more since the last such line)"
        assert lines == [": alice: /etc/passwd", ": bob: /etc/passwd", f"{more}: later: /etc/passwd"]
    else:
        assert len(lines) == 6


def test_the_log_is_not_told_of_what_is_shown_anyway(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        text_of(CheckpointError("config.json is missing"))
    assert not caplog.text
