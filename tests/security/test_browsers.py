"""S-33: what a web page can make a browser send: names that were bound to this machine, and calls from other pages."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from tests.security import rig
from tests.support.server import HTTP, Live, inproc

from headrace.protocol.config import ServerConfig
from headrace.protocol.errors import RequestError
from headrace.serve.gates.calls import HeaderGate, allowed_hosts, allowed_origins, flag_values
from headrace.text.tokenizer import Tokenizer

EVIL = {"origin": "https://evil.example"}
SIMPLE = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "text/json"]


BOUND = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "x@y",
    "headrace-service",
)
NAMES = ("localhost:80", "127.0.0.1", "[::1]:80", "app.localhost", "LOCALHOST.", "192.168.1.7", socket.gethostname())


@pytest.fixture(params=["127.0.0.1", "0.0.0.0", "127.0.0.1,::"])
def without_key(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Iterator[Live]:
    """Servers without a key, for each kind of address to listen on; these listen on this machine all the same."""
    with Live(inproc(), tokenizer, ServerConfig(host=request.param, log_stats_interval=0)) as result:
        yield result


def bound(live: Live, under: str = "/") -> list[tuple[str, str, str]]:
    """Routes that answer a page whose name was bound to the server's address."""
    calls = [(method, path, host) for method, path in rig.routes(live.app) for host in BOUND if path.startswith(under)]
    return [
        (method, path, host)
        for method, path, host in calls
        if rig.call(live, method, path, headers={"host": host}).status_code != 421
    ]


def test_S_33_a_name_that_was_bound_to_this_machine_opens_nothing(without_key: Live) -> None:
    assert bound(without_key) == []
    for host in NAMES:
        assert HTTP.get(without_key.url + "/health/live", headers={"host": host}).status_code == 200, host


def test_S_33_control_a_server_that_goes_by_any_name_is_noticed(tokenizer: Tokenizer) -> None:
    config = ServerConfig(host="0.0.0.0", allowed_hosts=["*"], log_stats_interval=0)
    with Live(inproc(), tokenizer, config) as live:
        assert ("GET", "/inspect/cache", "evil.example") in bound(live, "/inspect/cache")


def test_S_33_the_refusal_of_a_name_says_how_to_allow_it(live: Live) -> None:
    error = HTTP.get(live.url + "/v1/models", headers={"host": "headrace:8000"}).json()["error"]
    assert error["code"] == "host_not_allowed"
    assert error["message"] == (
        "host: 'headrace' is no name of this server; call it by an IP address or localhost, or start it with "
        "--allowed-hosts headrace"
    )
    odd = HTTP.get(live.url + "/v1/models", headers={"host": "a b"}).json()["error"]["message"]
    assert "a b" not in odd
    assert odd.endswith("--allowed-hosts NAME")


def test_with_a_key_a_server_for_other_machines_goes_by_any_name(tokenizer: Tokenizer) -> None:
    """As a service of compose or Kubernetes, such as headrace:8000; a page that binds its name there has no key."""
    config = ServerConfig(host="0.0.0.0", api_key="k", log_stats_interval=0)
    with Live(inproc(), tokenizer, config) as live:
        named = {"host": "headrace:8000"}
        assert HTTP.get(live.url + "/metrics", headers=named | rig.bearer("k")).status_code == 200
        assert HTTP.get(live.url + "/metrics", headers=named).status_code == 401


def test_S_33_names_that_are_allowed(tokenizer: Tokenizer) -> None:
    config = ServerConfig(allowed_hosts=["chat.example"], log_stats_interval=0)
    with Live(inproc(), tokenizer, config) as live:
        assert HTTP.get(live.url + "/health", headers={"host": "Chat.Example:443"}).status_code == 200
        assert HTTP.get(live.url + "/health", headers={"host": "x.example"}).status_code == 421
    for has_keys in (False, True):
        local = allowed_hosts("127.0.0.1", None, has_keys)
        assert local == allowed_hosts("127.0.0.1", [], has_keys) != allowed_hosts("localhost", None, has_keys)
        assert local is not None
        assert allowed_hosts("0.0.0.0", ["a.example"], has_keys) == {"a.example", *local, "0.0.0.0"} - {"127.0.0.1"}
        assert allowed_hosts("127.0.0.1", ["*"], has_keys) is None
    # Where other machines come by any name, the key keeps strangers out.
    assert allowed_hosts("0.0.0.0", None, True) is None
    assert allowed_hosts("0.0.0.0", None, False) is not None


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
