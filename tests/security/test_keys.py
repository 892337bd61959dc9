"""S-18: deny by default, whatever the route; classes of keys; comparison in constant time; files of keys."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from tests.security import rig
from tests.support.server import HTTP, Live, inproc

from headrace.protocol.config import ServerConfig
from headrace.protocol.errors import RequestError
from headrace.serve import routing
from headrace.serve.gates import auth
from headrace.serve.gates.auth import KeyRing
from headrace.text.tokenizer import Tokenizer


def wrongly_open(live: Live, key: str | None) -> list[tuple[str, str, int]]:
    """Routes that answer `key` otherwise than `ACCESS` says."""
    headers = {} if key is None else rig.bearer(key)
    actual = []
    for method, path in rig.routes(live.app):
        access = rig.access_of(method, path)
        status = rig.call(live, method, path, headers=headers).status_code
        refused = status in (401, 403)
        opens = access == "public" or (key is not None and key in rig.OPENS.get(access, ()))
        right = 401 if key is None else 403
        if refused == opens or (refused and status != right):
            actual.append((method, path, status))
    return actual


def test_S_18_every_route_is_in_the_table_of_access(locked: Live) -> None:
    """A new route is red until it is said who may use it, and what a body of it is."""
    assert rig.uncovered(locked.app) == set()


def test_S_18_control_a_new_route_is_red_until_it_is_covered(tokenizer: Tokenizer, key_file: str) -> None:
    def function(*parameters: str) -> Response:
        return Response("new")

    live = Live(inproc(), tokenizer, ServerConfig(api_key_file=key_file, log_stats_interval=0))
    routing.post(live.app, "/v1/new", function)
    routing.add(live.app, "/new/{name:path}", function, ("GET", "PUT"))
    assert rig.uncovered(live.app) == {
        "POST /v1/new",
        "POST /v1/new (its body)",
        "GET /new/{name:path}",
        "PUT /new/{name:path}",
    }
    with live:
        with pytest.raises(KeyError, match="new"):
            wrongly_open(live, None)
        # It is closed already, and the administrator's where nobody said otherwise.
        expected = {None: [401, 401], rig.PROBE: [403, 403], rig.ALICE: [200, 403], rig.ROOT: [200, 200]}
        for key, statuses in expected.items():
            headers = {} if key is None else rig.bearer(key)
            requests = [("POST", "/v1/new"), ("PUT", "/new/x")]
            assert [rig.call(live, *each, headers=headers).status_code for each in requests] == statuses


@pytest.mark.parametrize("key", [None, rig.ALICE, rig.PROBE, rig.ROOT])
def test_S_18_each_class_of_keys_opens_its_own_routes_only(locked: Live, key: str | None) -> None:
    assert wrongly_open(locked, key) == []


def test_S_18_control_a_route_of_the_wrong_class_is_noticed(locked: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    class_of = auth.class_of
    monkeypatch.setattr(auth, "class_of", lambda m, p: "any" if p == "/metrics" else class_of(m, p))
    assert wrongly_open(locked, rig.ALICE) == [("GET", "/metrics", 200), ("HEAD", "/metrics", 200)]
    monkeypatch.setattr(auth, "PUBLIC_PATHS", frozenset({"/health/live", "/api/tags"}))
    assert ("GET", "/api/tags", 200) in wrongly_open(locked, None)


def test_S_18_a_route_that_nobody_classed_is_the_administrators() -> None:
    assert auth.class_of("POST", "/reset_prefix_cache") == "admin"
    assert auth.class_of("GET", "//v1/models") == "admin"
    assert auth.class_of("POST", "/metrics") == "admin"
    assert auth.class_of("GET", "/healthy") == "admin"


GIVEN = [
    ({}, 401),
    ({"authorization": f"Bearer {rig.ALICE}x"}, 401),
    ({"authorization": f"Bearer {rig.ALICE[:-1]}"}, 401),
    ({"authorization": f"Bearer {rig.ALICE}, Bearer {rig.ALICE}"}, 401),
    ({"authorization": rig.ALICE}, 401),
    ({"x-api-key": rig.ALICE, "authorization": f"Bearer {rig.BOB}"}, 401),
    ({"cookie": f"authorization=Bearer {rig.ALICE}"}, 401),
    ({"x-forwarded-for": "127.0.0.1", "x-original-url": "/health/live"}, 401),
    ({"authorization": "Bearer " + "x" * 10_000}, 401),
    ({"authorization": f"Bearer {'x' * 20_000}"}, 431),
]


@pytest.mark.parametrize(("headers", "status"), GIVEN)
def test_S_18_what_is_not_a_key_opens_nothing(locked: Live, headers: dict[str, str], status: int) -> None:
    for method, path in rig.routes(locked.app):
        if rig.access_of(method, path) != "public":
            assert rig.call(locked, method, path, headers=headers).status_code == status, (method, path)


def test_S_18_other_spellings_of_a_path_need_a_key_too(locked: Live) -> None:
    for method, path in rig.routes(locked.app):
        if rig.access_of(method, path) == "public":
            continue
        path = rig.concrete(path)
        spelled = [path + "/", "/" + path, path + "?x=/health/live", path + ";/health/live", path + "/../health/live"]
        spelled += [
            "/health/live/.." + path,
            "/health/live%2f.." + path,
            "/%2e" + path,
            path.upper(),
            "http://x" + path,
        ]
        spelled += [path.replace("/", "/%2f", 1), path.replace("e", "%65")]
        for each in spelled[:: 1 if path == "/v1/models" else 4]:
            reply = rig.raw(locked, rig.head(method, each, "Connection: close"))
            assert reply[9:12] in (b"401", b"400"), (method, each, reply[:60])
    closed, ours = "Connection: close", f"Authorization: Bearer {rig.ALICE}"
    others = {
        rig.head("OPTIONS", "*", closed): b"401",
        rig.head("OPTIONS", "/v1/models", closed): b"401",
        rig.head("POST", "/v1/completions", closed, "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n": b"401",
        rig.head("GET", "/v1/models", closed).replace(b"localhost", b"a/?x="): b"421",
        rig.head("GET", "/v1/models", closed, ours, "authorization: x"): b"401",
        rig.head("GET", "/v1/models", closed, ours): b"200",
    }
    assert {text: rig.raw(locked, text)[9:12] for text in others} == others
    # It may have hung up before all of the key was sent.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        reply = rig.raw(locked, rig.head("GET", "/v1/models", closed, "Authorization: Bearer " + "x" * 10_000_000))
        assert reply[9:12] in (b"", b"431")


def test_S_18_all_keys_of_a_ring_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of one length, by `hmac.compare_digest`, and every one of them, whichever fits."""
    seen: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        seen.append((len(a), len(b)))
        return real(a, b)

    ring = KeyRing.of([f"key{i}" for i in range(8)], None, None)
    monkeypatch.setattr(hmac, "compare_digest", counting)
    for inputs in (b"key0", b"key7", b"", b"x" * 100_000):
        seen.clear()
        ring.find(inputs)
        assert seen == [(32, 32)] * 8, inputs[:10]
    source = Path(auth.__file__).read_text()
    assert "digest ==" not in source
    assert "== digest" not in source


def test_an_old_and_a_new_key_of_one_holder_both_open(locked: Live) -> None:
    for key in (rig.ALICE, "alice-old-key"):
        assert HTTP.get(locked.url + "/v1/models", headers=rig.bearer(key)).status_code == 200
        assert HTTP.get(locked.url + "/v1/models", headers={"x-api-key": key}).status_code == 200


def test_keys_of_the_command_line(tokenizer: Tokenizer) -> None:
    both = ServerConfig(api_key=["one-key", "two-key"], admin_api_key="chief", log_stats_interval=0)
    with Live(inproc(), tokenizer, both) as live:
        for key in ("one-key", "two-key", "chief"):
            assert HTTP.get(live.url + "/v1/models", headers=rig.bearer(key)).status_code == 200
            assert HTTP.get(live.url + "/metrics", headers=rig.bearer(key)).status_code == 200
        refused = HTTP.post(live.url + "/api/push", headers=rig.bearer("one-key"))
        assert (refused.status_code, "admin" in refused.json()["error"]) == (403, True)
        assert HTTP.post(live.url + "/api/push", headers=rig.bearer("chief")).status_code == 501


def allowed(live: Live, key: str) -> list[str]:
    """The routes of an administrator that `key` opens, of three."""
    calls = [("GET", "/inspect/cache"), ("GET", "/server_info"), ("POST", "/wake_up")]
    opened = [f"{m} {p}" for m, p in calls if rig.call(live, m, p, headers=rig.bearer(key)).status_code == 200]
    assert rig.call(live, "GET", "/v1/models", headers=rig.bearer(key)).status_code == 200
    return opened


@pytest.mark.parametrize("from_environment", [False, True])
def test_S_18_of_several_keys_none_is_an_administrators_unless_one_is_named(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, from_environment: bool
) -> None:
    caplog.set_level("INFO")
    keys = ["one-key", "two-key"]
    settings: dict[str, Any] = {} if from_environment else {"api_key": keys}
    if from_environment:
        monkeypatch.setenv("HEADRACE_API_KEY", " one-key \t two-key\n")
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0, **settings)) as live:
        assert [allowed(live, key) for key in keys] == [[], []]
        refused = HTTP.get(live.url + "/inspect/cache", headers=rig.bearer("two-key"))
        assert (refused.status_code, "class admin" in refused.text) == (403, True)
    assert caplog.text.count("--admin-api-key KEY names one") == 1


def test_the_only_key_is_an_administrators(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0, api_key=["one-key"])) as live:
        assert len(allowed(live, "one-key")) == 3
    assert "--admin-api-key" not in caplog.text


def test_several_administrators_are_named(tokenizer: Tokenizer) -> None:
    config = ServerConfig(log_stats_interval=0, api_key="one-key", admin_api_key=["chief", "deputy"])
    with Live(inproc(), tokenizer, config) as live:
        assert [len(allowed(live, key)) for key in ("chief", "deputy", "one-key")] == [3, 3, 0]


def test_a_key_beside_a_file_without_an_administrator_is_none(folder: Path) -> None:
    path = rig.write_keys(folder, "[a]\nkey = 'x'\n")
    ring = KeyRing.of("one-key", None, path)
    assert not ring.has_admin
    assert KeyRing.of("one-key", None, None).has_admin
    assert KeyRing.of(None, None, rig.write_keys(folder)).has_admin


def generated(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The keys that the log shows."""
    return re.findall(r"API key of this server.*: ([0-9a-f]{32})$", caplog.text, re.MULTILINE)


@pytest.mark.parametrize("level", ["INFO", "CRITICAL"])
def test_a_key_is_made_where_there_is_none_and_shown_once(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    caplog.set_level(level, "headrace.server")
    config = ServerConfig(host="0.0.0.0", generate_api_key=True, log_stats_interval=0)
    with Live(inproc(), tokenizer, config) as live:
        [key] = generated(caplog)
        assert len(allowed(live, key)) == 3
        for path, status in (("/v1/models", 401), ("/health/live", 200), ("/inspect/cache", 401)):
            assert HTTP.get(live.url + path).status_code == status
        replies = [
            rig.call(live, method, path, headers=rig.bearer(key)).text
            for method, path in rig.routes(live.app)
            if method == "GET" and path != "/inspect/live"
        ]
        assert not [text for text in replies if key in text]
        assert caplog.text.count(key) == 1
    assert "no API key is set" not in caplog.text
    caplog.clear()
    with Live(inproc(), tokenizer, config) as live:
        assert generated(caplog) != [key]


def test_no_key_is_made_where_one_is_set(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, key_file: str
) -> None:
    def open_to(key: str, **settings: Any) -> bool:
        config = ServerConfig(host="0.0.0.0", generate_api_key=True, log_stats_interval=0, **settings)
        with Live(inproc(), tokenizer, config) as live:
            return HTTP.get(live.url + "/v1/models", headers=rig.bearer(key)).status_code == 200

    assert open_to("one-key", api_key=["one-key"])
    assert open_to("chief", admin_api_key="chief")
    assert open_to(rig.ALICE, api_key_file=key_file)
    monkeypatch.setenv("HEADRACE_API_KEY", "from-environment")
    assert open_to("from-environment")
    assert generated(caplog) == []


def test_S_22_no_key_is_kept_or_told(locked: Live) -> None:
    ring = KeyRing.of(["one-key"], "chief", None)
    assert "one-key" not in repr(ring.keys)
    assert ring.find(b"one-key") == ring.keys[1]
    with pytest.raises(RequestError) as caught:
        KeyRing.of("my secret key", None, None)
    assert "secret" not in str(caught.value)


BAD_FILES = [
    "",
    "[a]",
    "[a]\nkey = 5",
    "[a]\nkey = ''",
    "[a]\nkey = 'with blank'",
    "[a]\nkey = 'x'\nclasses = ['root']",
    "[a]\nkey = 'x'\nclasses = []",
    "[a]\nkey = 'x'\nrequests_per_minute = 0",
    "[a]\nkey = 'x'\nunknown = 1",
    "[a]\nkey = 'x'\n[b]\nkey = 'x'",
    "['a/b']\nkey = 'x'",
    "[admin]\nkey = 'x'",
    "[key-1]\nkey = 'x'",
    "[a]\nsha256 = 'abc'",
    "key = 'x'",
    "not toml",
    "\x00",
]


@pytest.mark.parametrize("text", BAD_FILES)
def test_files_of_keys_that_make_no_sense_are_refused(folder: Path, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        KeyRing.of(None, None, rig.write_keys(folder, text))
    assert "'x'" not in str(caught.value)


def test_a_file_may_hold_digests_and_must_be_there(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    path = rig.write_keys(folder, f"[a]\nsha256 = '{digest}'\nclasses = ['metrics']\ntokens_per_minute = 5\n")
    ring = KeyRing.of(None, None, path)
    result = ring.find(b"secret")
    assert result is not None
    assert (result.name, result.classes, ring.limits["a"].tokens) == ("a", {"metrics"}, 5)
    assert ring.find(digest.encode()) is None
    assert not caplog.records
    Path(path).chmod(0o644)
    KeyRing.of(None, None, path)
    assert "can be read by every user" in caplog.text
    with pytest.raises(RequestError, match="FileNotFoundError"):
        KeyRing.of(None, None, str(folder / "nothing"))


def test_an_open_server_tells_when_strangers_can_reach_it(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    result: list[Any] = [Live(inproc(), tokenizer, ServerConfig(host="0.0.0.0"))]
    assert "no API key is set" in caplog.text
    caplog.clear()
    result += [
        Live(inproc(), tokenizer, ServerConfig()),
        Live(inproc(), tokenizer, ServerConfig(host="::", api_key="k")),
    ]
    assert "no API key" not in caplog.text
    for live in result:
        live.socket.close()
