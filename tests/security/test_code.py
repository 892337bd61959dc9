"""S-01, S-03, S-04, S-06: bytes that came over a socket become no code, and no field of a request reaches a loader."""

from __future__ import annotations

import base64
import pickle
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import huggingface_hub
import pytest
from tests.security import rig
from tests.support.server import HTTP, Live

from headrace import hub


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def test_S_01_pickles_in_every_field_of_every_route_are_bytes(live: Live, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    bombs = [pickle.dumps(Bomb(canary), protocol) for protocol in (0, 2, 5)]
    for bomb in bombs:
        rig.raw(live, bomb, 0.3)
        for path in rig.posts():
            for kind in (
                "application/json",
                "application/octet-stream",
                "application/x-pickle",
                "application/x-msgpack",
            ):
                reply = rig.call(live, "POST", path, content=bomb, headers={"content-type": kind})
                assert reply.status_code == 400, path
    text = base64.b64encode(bombs[1]).decode()
    for path in rig.posts():
        for body in rig.planted(rig.body_of(path), text):
            assert rig.call(live, "POST", path, json=body).status_code < 500, path
    reply = HTTP.post(live.url + "/v1/files", files={"file": ("x.pkl", bombs[0])}, data={"purpose": "batch"})
    assert HTTP.get(live.url + f"/v1/files/{reply.json()['id']}/content").content == bombs[0]
    assert not canary.exists()
    assert live.client.is_alive


def test_S_01_control_the_pickle_works(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(Bomb(canary))).close()  # noqa: S301
    assert canary.exists()


# Replies that are lists, or the API's own object, which have no place for warnings.
SILENT = {"/embedding", "/embeddings", "/api/show", "/api/pull", "/api/embed", "/api/embeddings"}
SILENT |= {"/embed", "/similarity"}
HOSTILE_NAMES = ["/etc", "../..", "evil/model", "https://evil.example/model", "file:///etc", "builtin\x00", "hf://a/b"]


def test_S_04_no_field_of_a_request_reaches_a_loader(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a request names, nothing is resolved, fetched or imported for it."""
    loaded: list[object] = []
    for owner, name in ((hub, "resolve"), (hub, "resolve_tokenizer"), (huggingface_hub, "snapshot_download")):
        monkeypatch.setattr(owner, name, lambda *args, **more: loaded.append(args))
    modules = set(sys.modules)
    extra = {"revision": "main", "code_revision": "evil", "trust_remote_code": True, "auto_map": {"x": "evil.Evil"}}
    for path in rig.posts():
        for name in HOSTILE_NAMES[:3]:
            for body in (*rig.planted(rig.body_of(path), name), rig.body_of(path) | {"model": name} | extra):
                assert rig.call(live, "POST", path, json=body).status_code < 500, (path, body)
    for name in HOSTILE_NAMES:
        assert HTTP.get(live.url + "/v1/models/" + quote(name, safe="")).status_code == 404
    assert loaded == []
    files = [getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - modules]
    house = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]))
    assert [file for file in files if file and not file.startswith(house)] == []


def test_S_07_a_template_of_a_requests_own_is_refused_on_every_route(live: Live) -> None:
    """Only the model's template is rendered, in its sandbox; see tests/text/test_sandbox.py for what it holds."""
    evil = "{{ cycler.__init__.__globals__.os.popen('id').read() }}"
    for path in rig.posts():
        for name in ("chat_template", "template"):
            reply = rig.call(live, "POST", path, json=rig.body_of(path) | {name: evil, "stream": False})
            assert "uid=" not in reply.text
            assert reply.status_code < 500, path
            # A field that is not refused is named as ignored, where the reply has a place for it.
            assert reply.status_code != 200 or name in reply.text or path in SILENT, path
        body = rig.body_of(path) | {"chat_template_kwargs": {"tokenize": True, "messages": evil}}
        assert "uid=" not in rig.call(live, "POST", path, json=body).text
