"""S-18: with a key set, every route needs it, whatever its path looks like, but /health/live and the page's files."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from tests.support.server import HTTP, Live, inproc

from headrace.engine.tenants import Limits, Rates
from headrace.protocol.config import ServerConfig
from headrace.serve.gates import auth
from headrace.serve.gates.auth import ApiKeyGate, KeyRing, is_public
from headrace.serve.gates.calls import CallGate, HeaderGate
from headrace.serve.gates.overload import Overload
from headrace.text.tokenizer import Tokenizer

KEY = "sesame-1234"
RIGHT = {"authorization": f"Bearer {KEY}"}
WRONG: list[dict[str, str]] = [
    {},
    {"authorization": ""},
    {"authorization": KEY},
    {"authorization": f"Basic {KEY}"},
    {"authorization": "Bearer"},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"authorization": f"Bearer {KEY}5"},
    {"authorization": f"Bearer {KEY.upper()}"},
    {"x-api-key": KEY[:-1]},
    {"x-api-key": f"Bearer {KEY}"},
    # Whatever is given must be right.
    {"x-api-key": KEY, "authorization": f"Bearer {KEY}5"},
    {"x-api-key": "other", "authorization": f"Bearer {KEY}"},
]
TRICKS = [
    "//v1/models",
    "/v1/models/",
    "/v1/%6dodels",
    "/v1/./models",
    "/health/live/../../v1/models",
    "/health/live/x",
]


@pytest.fixture(scope="module")
def locked(tokenizer: Tokenizer) -> Iterator[Live]:
    with Live(inproc(), tokenizer, ServerConfig(api_key=KEY, log_stats_interval=0)) as live:
        yield live


def routes(app: Starlette) -> list[tuple[str, str]]:
    """(method, path) of everything that the application answers."""
    return [
        (method, path.replace("{name:path}", "fake"))
        for route in app.routes
        for path in [getattr(route, "path", "")]
        for method in getattr(route, "methods", None) or {"GET"}
    ]


def uncovered(url: str, app: Starlette) -> list[tuple[str, str]]:
    """Routes that answer a stranger."""
    return [(m, p) for m, p in routes(app) if not is_public(p) and HTTP.request(m, url + p).status_code != 401]


def test_S_18_every_route_in_the_table_needs_the_key(locked: Live) -> None:
    assert len(routes(locked.app)) >= 13
    assert uncovered(locked.url, locked.app) == []


@pytest.mark.sampled(5)
@pytest.mark.parametrize("headers", WRONG)
def test_S_18_wrong_keys(locked: Live, headers: dict[str, str]) -> None:
    for method, path in [*routes(locked.app), *((m, p) for p in TRICKS for m in ("GET", "HEAD", "OPTIONS", "POST"))]:
        if not is_public(path):
            reply = HTTP.request(method, locked.url + path, headers=headers)
            # What the client itself makes of a path may be the public one.
            if not is_public(reply.request.url.path):
                assert reply.status_code == 401, (method, path)
                if method != "HEAD":
                    assert "the API key is missing or wrong" in json.dumps(reply.json()["error"])


def test_S_18_raw_paths_do_not_get_round_it(locked: Live) -> None:
    for path in [
        *TRICKS,
        "/health/live%2f..%2f..%2fv1/models",
        "/health/live;/v1/models",
        "http://x/v1/models",
        "/inspector/../v1/models",
    ]:
        with socket.create_connection(("127.0.0.1", locked.port), timeout=30) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            assert client.recv(4096).startswith(b"HTTP/1.1 4"), path


def test_S_18_two_headers_are_none(locked: Live) -> None:
    headers = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer other")]
    assert HTTP.get(locked.url + "/v1/models", headers=headers).status_code == 401
    twice = [("x-api-key", KEY), ("x-api-key", KEY)]
    assert HTTP.get(locked.url + "/v1/models", headers=twice).status_code == 401


def test_the_key_opens_and_the_probe_needs_none(locked: Live) -> None:
    assert HTTP.get(locked.url + "/health/live").status_code == 200
    assert HTTP.get(locked.url + "/v1/models", headers=RIGHT).status_code == 200
    assert HTTP.get(locked.url + "/v1/models", headers={"authorization": f"bearer {KEY}"}).status_code == 200
    assert HTTP.get(locked.url + "/v1/models", headers={"x-api-key": KEY}).status_code == 200
    assert HTTP.get(locked.url + "/v1/models", headers=RIGHT | {"x-api-key": KEY}).status_code == 200
    body = {"prompt": "x", "max_tokens": 1}
    assert HTTP.post(locked.url + "/v1/completions", json=body, headers=RIGHT).status_code == 200


def test_the_key_may_come_from_the_environment(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", KEY)
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        assert HTTP.get(live.url + "/v1/models").status_code == 401
        assert HTTP.get(live.url + "/v1/models", headers=RIGHT).status_code == 200


def test_control_a_gate_with_a_hole_is_noticed(locked: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "is_public", lambda path: path == "/metrics" or is_public(path))
    assert set(uncovered(locked.url, locked.app)) == {("GET", "/metrics"), ("HEAD", "/metrics")}


def test_unknown_routes_are_told_from_known_ones_only_with_the_key(locked: Live) -> None:
    assert HTTP.get(locked.url + "/no/such").status_code == 401
    assert HTTP.get(locked.url + "/no/such", headers=RIGHT).status_code == 404


def test_the_gate_lets_the_lifespan_through() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    keys = ApiKeyGate(KeyRing.of(KEY, None, None), Rates(Limits()))
    gate = CallGate(
        app, HeaderGate(None, []), keys, most=0, apis=[], life=SimpleNamespace(draining=False, overload=Overload())
    )
    asyncio.run(gate({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]
