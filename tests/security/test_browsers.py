"""S-33: what a web page can make a browser send: names that were bound to this machine, and calls from other pages."""

from __future__ import annotations

import pytest
from tests.security import rig
from tests.support.server import HTTP, Live, inproc

from headrace.protocol.config import ServerConfig
from headrace.protocol.errors import RequestError
from headrace.serve.gates.calls import HeaderGate, allowed_hosts, allowed_origins, flag_values
from headrace.text.tokenizer import Tokenizer

EVIL = {"origin": "https://evil.example"}
SIMPLE = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "text/json"]


def test_S_33_a_name_that_was_bound_to_this_machine_opens_nothing(live: Live) -> None:
    for host in (
        "evil.example",
        f"evil.example:{live.port}",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "x@y",
    ):
        for method, path in rig.routes(live.app):
            reply = rig.call(live, method, path, headers={"host": host})
            assert reply.status_code in (400, 421), (method, path, host)
    for host in (f"localhost:{live.port}", "127.0.0.1", "[::1]:80", "app.localhost", "LOCALHOST.", "192.168.1.7"):
        assert HTTP.get(live.url + "/health/live", headers={"host": host}).status_code == 200, host


def test_S_33_names_that_are_allowed(tokenizer: Tokenizer) -> None:
    config = ServerConfig(allowed_hosts=["chat.example"], log_stats_interval=0)
    with Live(inproc(), tokenizer, config) as live:
        assert HTTP.get(live.url + "/health", headers={"host": "Chat.Example:443"}).status_code == 200
        assert HTTP.get(live.url + "/health", headers={"host": "x.example"}).status_code == 421
    assert allowed_hosts("127.0.0.1", None) == allowed_hosts("127.0.0.1", []) != allowed_hosts("localhost", None)
    # Where other machines come by any name, the key keeps them out.
    assert allowed_hosts("0.0.0.0", None) is None
    assert allowed_hosts("0.0.0.0", ["a.example"]) is not None
    assert allowed_hosts("127.0.0.1", ["*"]) is None


def answered(live: Live, headers: dict[str, str]) -> list[tuple[str, str]]:
    """Unsafe routes that do not refuse a page."""
    unsafe = [(method, path) for method, path in rig.routes(live.app) if method not in rig.READS]
    assert len(unsafe) > 30
    return [(m, p) for m, p in unsafe if rig.call(live, m, p, headers=headers).status_code != 403]


@pytest.mark.parametrize(
    "headers",
    [
        EVIL,
        {"origin": "null"},
        {"origin": "http://localhost:1"},
        {"origin": "file://"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"origin": "https://127.0.0.1.evil.example"},
    ],
)
def test_S_33_other_pages_may_not_call_any_unsafe_route(live: Live, headers: dict[str, str]) -> None:
    assert answered(live, headers) == []


def test_S_33_control_a_gate_without_the_check_is_noticed(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeaderGate, "_check_origin", lambda self, path, headers, allowed: None)
    assert len(answered(live, EVIL)) > 30


def test_S_33_a_page_of_another_place_is_not_told_what_it_reads(live: Live) -> None:
    reply = HTTP.get(live.url + "/v1/models", headers=EVIL)
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_S_33_no_preflight_is_granted(live: Live) -> None:
    for method, path in rig.routes(live.app):
        requests = EVIL | {"access-control-request-method": method}
        assert rig.call(live, "OPTIONS", path, headers=requests).status_code == 403


@pytest.mark.parametrize("kind", SIMPLE)
def test_S_33_a_page_must_ask_before_it_sends_json(live: Live, kind: str) -> None:
    """Bodies of these kinds a browser sends without a preflight, so from a page none is taken for JSON."""
    headers = {"origin": "http://localhost", "content-type": kind}
    for path in rig.posts():
        assert rig.call(live, "POST", path, content=b"{}", headers=headers).status_code == 415, path
    body = b'{"prompt": "x", "max_tokens": 1}'
    # Who is no browser may leave it out, as curl does.
    assert rig.call(live, "POST", "/v1/completions", content=body, headers={"content-type": kind}).status_code == 200


def test_pages_that_are_allowed(tokenizer: Tokenizer) -> None:
    page = "https://chat.example"
    config = ServerConfig(api_key="k", allowed_origins=[f'["{page}"]', "http://localhost:3000/"], log_stats_interval=0)
    body = {"prompt": "x", "max_tokens": 1}
    with Live(inproc(), tokenizer, config) as live:
        requests = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        grant = HTTP.options(live.url + "/v1/completions", headers={"origin": page} | requests)
        assert (grant.status_code, grant.headers["access-control-allow-origin"]) == (200, page)
        assert grant.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "access-control-allow-credentials" not in grant.headers
        for origin, status in (
            (page, 200),
            ("http://localhost:3000", 200),
            (live.url, 200),
            ("https://x.example", 403),
        ):
            headers = rig.bearer("k") | {"origin": origin}
            reply = HTTP.post(live.url + "/v1/completions", json=body, headers=headers)
            assert reply.status_code == status, origin
            assert (reply.headers.get("access-control-allow-origin") == origin) == (status == 200)
        # The key is needed all the same, and a page may read that it is.
        refused = HTTP.post(live.url + "/v1/completions", json=body, headers={"origin": page})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, page)
        bad = requests | {"origin": page, "access-control-request-headers": "x\x01"}
        assert "access-control-allow-headers" not in HTTP.options(live.url + "/", headers=bad).headers


def test_any_page_may_if_it_is_said(tokenizer: Tokenizer) -> None:
    with Live(inproc(), tokenizer, ServerConfig(allowed_origins=["*"], log_stats_interval=0)) as live:
        reply = live.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=EVIL)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize("inputs", ["evil.example", "https://a b", "https://x/path", "[1]", "["])
def test_origins_that_are_none_are_refused(inputs: str) -> None:
    with pytest.raises(RequestError):
        allowed_origins([inputs])


def test_lists_come_in_either_form() -> None:
    assert flag_values(['["a", "b"]', "c"]) == ["a", "b", "c"]
    assert flag_values(None) == []
