"""S-35: the token of the hub goes to the hub that was configured, and to no host that it points to."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace import hub
from headrace.protocol.errors import ModelNotFoundError

TOKEN = "hf_xyzzyxyzzyxyzzyxyzzyxyzzyxyzzyxyzz"
COMMIT = "a" * 40
CONFIG = b'{"model_type": "llama"}'


class Host(ThreadingHTTPServer):
    """A hub with one file, or a host to which it redirects downloads of that file.

    Attributes:
        seen: what was sent as authorization with each call, by its path.
        elsewhere: where paths that begin with `moved` are; None: all is here.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.seen: list[tuple[str, str]] = []
        self.elsewhere, self.moved = "", "/"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    server: Host

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        here = self.server
        here.seen.append((self.path, self.headers.get("authorization", "")))
        headers = {"etag": '"1234"', "x-repo-commit": COMMIT}
        status, body = 200, CONFIG
        if here.elsewhere and self.path.startswith(here.moved):
            status, body = 302, b""
            headers |= {"location": here.elsewhere + self.path, "x-linked-etag": '"1234"'}
            headers["x-linked-size"] = str(len(CONFIG))
        elif "/tree/" in self.path:
            output: Any = [{"type": "file", "path": "config.json", "size": len(CONFIG), "oid": "1234"}]
            body = json.dumps(output).encode()
        elif self.path.startswith("/api/"):
            output = {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": "config.json"}]}
            body = json.dumps(output).encode()
        self.send_response(status)
        for name, value in (headers | {"content-length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Host, Host]]:
    """The hub that is configured, and another host."""
    constants = pytest.importorskip("huggingface_hub.constants")
    result = Host(), Host()
    place = f"http://127.0.0.1:{result[0].server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", place)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", place + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    # A list that the hub's client reads once a day, without the token, and keeps beside the user's other files.
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "harnesses.json"), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield result
    for each in result:
        each.shutdown()
        each.server_close()


@pytest.mark.parametrize("moved", ["/owner/", "/api/"])
def test_S_35_the_token_is_sent_to_no_other_host(hosts: tuple[Host, Host], moved: str) -> None:
    ours, other = hosts
    ours.elsewhere, ours.moved = f"http://localhost:{other.server_port}", moved
    if moved == "/owner/":
        assert (hub.resolve("owner/name") / "config.json").read_bytes() == CONFIG
        assert other.seen
    else:
        # Only files lie elsewhere; to follow a list there, or to refuse, is as good.
        with contextlib.suppress(ModelNotFoundError):
            hub.resolve("owner/name")
    seen = {messages for path, messages in ours.seen if "owner/name" in path}
    assert seen == {f"Bearer {TOKEN}"}, "the control: every call about the model has it here"
    assert [messages for _, messages in other.seen if messages] == []
