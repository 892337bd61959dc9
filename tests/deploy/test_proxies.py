"""The proxies of `deploy/` before a server, on ports of their own: the page's calls and those of every API pass, and a
foreign page's do not. Skipped where nginx or HAProxy is not installed, but for the reading of their files."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.programs.rolling import Proxy
from tests.security import rig
from tests.support.server import HTTP, Live, inproc

from headrace.protocol.config import ServerConfig
from headrace.text.tokenizer import Tokenizer

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
STREAMS = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/completions": "data: [DONE]",
    "/v1/messages": "event: message_stop",
    "/v1/responses": "event: response.incomplete",
    "/api/chat": '"done":true',
    "/api/generate": '"done":true',
    "/completion": '"stop":true',
}


class Front:
    """A proxy before a server, as a page that it has served sees it."""

    def __init__(self, live: Live, port: int) -> None:
        self.live, self.url = live, f"http://127.0.0.1:{port}"
        self.page = {"origin": self.url, "sec-fetch-site": "same-origin", "content-type": "application/json"}

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None, **more: Any) -> Any:
        return HTTP.post(self.url + path, json=body, headers=self.page | (headers or {}), **more)


@pytest.fixture(scope="module", params=["nginx", "haproxy"])
def program(request: pytest.FixtureRequest) -> str:
    if not shutil.which(request.param):
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer) -> Iterator[Live]:
    with Live(inproc(max_model_len=512), tokenizer, ServerConfig(log_stats_interval=0)) as result:
        yield result


@pytest.fixture(scope="module")
def front(program: str, live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    proxy = Proxy(program, tmp_path_factory.mktemp(program), [live.port, live.port])
    try:
        yield Front(live, proxy.port)
    finally:
        proxy.process.terminate()
        proxy.process.wait(timeout=60)


def test_the_page_comes_through(front: Front) -> None:
    assert front.url != front.live.url
    for path in ("/", "/inspect", "/inspector/app.js", "/inspector/vendor/preact-htm.js", "/docs"):
        ours, theirs = (HTTP.get(url + path, headers={"accept": "text/html"}) for url in (front.live.url, front.url))
        assert (theirs.status_code, theirs.text) == (200, ours.text), path
        assert theirs.headers["content-type"] == ours.headers["content-type"]
        policy = "content-security-policy"
        assert theirs.headers.get(policy) == ours.headers.get(policy)


def test_the_calls_of_the_page_and_of_every_api_come_through(front: Front) -> None:
    passed = 0
    for path in rig.posts():
        direct = HTTP.post(front.live.url + path, json=rig.body_of(path)).status_code
        assert front.post(path, rig.body_of(path)).status_code == direct, path
        passed += direct == 200
    assert passed > 15
    for path in ("/v1/models", "/api/tags", "/props", "/metrics", "/inspect/cache"):
        assert HTTP.get(front.url + path, headers={"sec-fetch-site": "same-origin"}).status_code == 200, path
    # A page that is called by another name of the same proxy.
    named = {
        "origin": front.url.replace("127.0.0.1", "localhost"),
        "host": front.url[7:].replace("127.0.0.1", "localhost"),
    }
    assert front.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, named).status_code == 200
    # An upload of a form.
    headers = front.page | {"content-type": "multipart/form-data; boundary=x"}
    form = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
    form += b'content-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\r\n--x--\r\n'
    assert HTTP.post(front.url + "/v1/files", content=form, headers=headers).status_code == 200


@pytest.mark.parametrize("path", STREAMS)
def test_streams_come_through_to_their_ends(front: Front, path: str) -> None:
    reply = front.post(path, rig.body_of(path) | {"stream": True})
    assert (reply.status_code, STREAMS[path] in reply.text.replace(": true", ":true")) == (200, True), reply.text[-300:]


def test_a_page_of_another_place_does_not_come_through(front: Front) -> None:
    for origin in ("http://evil.example", "http://127.0.0.1", "http://127.0.0.1:1", "null"):
        reply = front.post("/v1/completions", {"prompt": "x"}, {"origin": origin, "sec-fetch-site": "cross-site"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "origin_not_allowed"), origin
    bound = HTTP.get(front.url + "/v1/models", headers={"host": "evil.example"})
    assert (bound.status_code, "--allowed-hosts evil.example" in bound.text) == (421, True)


def test_control_a_proxy_that_drops_the_port_is_noticed(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which("nginx"):
        pytest.skip("nginx is not installed")
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *more: read(self, *more).replace("Host $named;", "Host $host;"))
    proxy = Proxy("nginx", tmp_path, [live.port, live.port])
    try:
        assert Front(live, proxy.port).post("/v1/completions", {"prompt": "x"}).status_code == 403
    finally:
        proxy.process.terminate()
        proxy.process.wait(timeout=60)


def lost_names(nginx: str) -> list[str]:
    """Values of Host that nginx passes on and that are not what the client sent."""
    passed = re.findall(r"proxy_set_header Host (\S+);", nginx)
    named = re.search(r"map \$http_host (\$\w+) \{\s+default \$http_host;\s+\"\" \$host;\s+\}", nginx)
    places = nginx.count("proxy_pass ")
    return [each for each in passed if named is None or each != named[1]] + ["none"] * (places - len(passed))


def test_the_files_pass_names_on_as_they_came() -> None:
    nginx = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    assert lost_names(nginx) == []
    assert lost_names(nginx.replace("Host $named;", "Host $host;", 1)) == ["$host"]
    assert lost_names(nginx.replace("proxy_set_header Host $named;", "", 1)) == ["none"]
    # HAProxy passes Host on unless a rule sets it.
    assert not re.search(r"(?i)(set|replace|del)-header host\b", (DEPLOY / "haproxy.cfg").read_text(encoding="utf-8"))
