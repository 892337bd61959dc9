"""S-19, S-20: headers, bodies, framing, time and JSON, on every route."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest
from tests.security import rig
from tests.support.server import HTTP, Live, inproc

from headrace.protocol.config import ServerConfig
from headrace.serve.gates import calls, connection, limits
from headrace.serve.gates.connection import Wait
from headrace.text.tokenizer import Tokenizer

CONNECTION = "Connection: close"


def status(text: bytes) -> int:
    return int(text[9:12]) if text.startswith(b"HTTP/1.1 ") else 0


def test_S_19_headers_are_bounded_on_every_route(live: Live) -> None:
    many = {f"x-{index}": "1" for index in range(calls.MAX_HEADERS)}
    large = {"x-large": "y" * calls.MAX_HEADER_BYTES}
    for method, path in rig.routes(live.app):
        for group in (many, large):
            assert rig.call(live, method, path, headers=group).status_code == 431, (method, path)
        assert rig.call(live, method, path, query="x=" + "y" * calls.MAX_TARGET_BYTES).status_code == 414


def test_S_19_headers_without_an_end_are_a_431(live: Live) -> None:
    text = rig.raw(live, b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"x-a: " + b"y" * 200_000)
    assert status(text) == 431
    assert json.loads(text.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"


SMUGGLED = [
    rig.head("POST", "{}", "Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\nGET / HTTP/1.1\r\n",
    rig.head("POST", "{}", "Content-Length: 2", "Content-Length: 3") + b"{}x",
    rig.head("POST", "{}", "Content-Length: 2", "Content-Length: 2") + b"{}" + rig.head("GET", "/v1/models"),
    rig.head("POST", "{}", "Content-Length: 2, 2") + b"{}" + rig.head("GET", "/v1/models"),
    rig.head("POST", "{}", "Content-Length: +2") + b"{}",
    rig.head("POST", "{}", "Transfer-Encoding: chunked, identity") + b"0\r\n\r\n",
    rig.head("POST", "{}", "Transfer-Encoding: xchunked") + b"0\r\n\r\n",
    rig.head("POST", "{}", "Transfer-Encoding : chunked") + b"0\r\n\r\n",
    rig.head("POST", "{}", "Host: other") + b"",
    b"POST {} HTTP/1.1\r\n\r\n",
]


@pytest.mark.parametrize("text", SMUGGLED)
def test_S_19_framing_that_can_be_read_in_two_ways_is_refused(live: Live, text: bytes) -> None:
    for path in rig.posts():
        reply = rig.raw(live, text.replace(b"{}", rig.concrete(path).encode(), 1))
        assert status(reply) in (400, 501), reply[:80]
        # One answer, and the connection is over: nothing that follows was taken for a request.
        assert reply.count(b"HTTP/1.1 ") == 1


@pytest.fixture
def hasty(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        monkeypatch.setitem(connection.SECONDS, Wait.HEADERS, 0.3)
        monkeypatch.setattr(limits, "BODY_IDLE_S", 0.3)
        yield live


def trickle(live: Live, text: bytes, pause: float, seconds: float) -> bytes:
    """Send a byte at a time until the server hangs up; what it said."""
    reply = b""
    with socket.create_connection(("127.0.0.1", live.port), timeout=seconds) as client:
        client.settimeout(pause)
        end = time.monotonic() + seconds
        for index in range(10**6):
            try:
                data = client.recv(4096)
            except TimeoutError:
                data = None
            except ConnectionResetError:
                # It hung up with bytes of ours unread, and that may overtake its answer.
                return reply
            if data == b"":
                return reply
            reply += data or b""
            if time.monotonic() > end:
                return reply + b"(still open)"
            try:
                client.sendall(text[index : index + 1] or b"x")
            except OSError:
                return reply
    return reply


def test_S_19_headers_that_trickle_are_given_up(hasty: Live) -> None:
    text = trickle(hasty, b"GET /health/live HTTP/1.1\r\nx-a: " + b"y" * 10**5, 0.02, 20)
    assert status(text) == 408
    assert not text.endswith(b"(still open)")


def test_S_19_a_connection_that_says_nothing_is_given_up(hasty: Live) -> None:
    assert status(rig.raw(hasty, b"", 20)) == 408
    # And one that was answered, and begins again.
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=20) as client:
        client.sendall(rig.head("GET", "/health/live"))
        text = client.recv(4096)
        assert status(text) == 200
        while b"}" not in text:
            text += client.recv(4096)
        client.sendall(b"GET /hea")
        text = client.recv(4096)
        assert status(text) == 408
        # The rest of the answer, and then the end.
        while client.recv(4096):
            pass


def test_S_19_control_without_the_timer_they_stay(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connection.SECONDS, Wait.HEADERS, 3600.0)
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        assert trickle(live, b"GET / HTTP/1.1\r\nx-a: " + b"y" * 10**5, 0.02, 1.5).endswith(b"(still open)")


def test_S_19_bodies_that_stop_or_trickle_are_given_up(hasty: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    start = rig.head("POST", "/v1/completions", "Content-Length: 1000000", "Content-Type: application/json")
    assert status(rig.raw(hasty, start + b"{", 20)) == 408
    monkeypatch.setattr(limits, "MIN_BODY_RATE", 10**6)
    text = trickle(hasty, start + b"{" * 10**5, 0.01, 20)
    assert not text.endswith(b"(still open)")
    assert not text or status(text) == 408


def test_S_19_a_body_after_its_reply_is_given_up(hasty: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def until_closed(seconds: float) -> bool:
        with socket.create_connection(("127.0.0.1", hasty.port), timeout=seconds) as client:
            client.sendall(rig.head("GET", "/health/live", "Content-Length: 10"))
            assert status(client.recv(4096)) == 200
            client.sendall(b"x")
            try:
                while client.recv(4096):
                    pass
            except TimeoutError:
                return False
            return True

    monkeypatch.setitem(connection.SECONDS, Wait.REST, 0.3)
    assert until_closed(60)
    monkeypatch.setitem(connection.SECONDS, Wait.REST, 3600)
    assert not until_closed(1)


def test_S_19_a_client_that_reads_nothing_is_given_up(hasty: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    for wait in (Wait.REPLY, Wait.END):
        monkeypatch.setitem(connection.SECONDS, wait, 0.5)
    Live.wait(lambda: not hasty.server.server_state.connections)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", hasty.port))
        with contextlib.suppress(TimeoutError, ConnectionError):
            client.settimeout(1)
            client.sendall(rig.head("GET", "/openapi.json") * 500)
        Live.wait(lambda: not hasty.server.server_state.connections)


def test_S_19_what_the_system_holds_is_unread_too(hasty: Live) -> None:
    """The process sees its own buffer shrink in steps of megabytes, each of which a slow client needs long for."""
    Live.wait(lambda: not hasty.server.server_state.connections)
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=20) as client:
        client.sendall(rig.head("GET", "/openapi.json") * 150)
        Live.wait(lambda: any(each.flow.write_paused for each in hasty.server.server_state.connections))  # type: ignore[union-attr]
        (open_connection,) = hasty.server.server_state.connections
        assert isinstance(open_connection, connection.Connection)
        before = open_connection._unsent()
        assert before > 2 * open_connection.transport.get_write_buffer_size() > 0
        for _ in range(16):
            client.recv(2**16)
        Live.wait(lambda: open_connection._unsent() < before)


def test_S_19_many_that_trickle_keep_nobody_out(live: Live) -> None:
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", live.port))) for _ in range(64)]
        for client in slow:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nx-a: ")
        body = {"prompt": "x", "max_tokens": 2}
        assert all(live.post("/v1/completions", body).status_code == 200 for _ in range(8))


def test_S_19_connections_are_bounded_by_open_files(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    assert connection.max_connections() > 100
    Live.wait(lambda: not HTTP.get(live.url + "/load").json()["server_load"])
    monkeypatch.setattr(connection, "max_connections", lambda: 0)
    text = rig.raw(live, rig.head("GET", "/health/live"))
    assert status(text) == 503
    assert b"too_many_connections" in text


HOSTILE = [
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"a": 1, "a": 2}',
    b'{"a": NaN}',
    b'{"a": 1e999}',
    b'{"a": "\\ud800"}',
    b"\xff\xfe{}",
    b'{"a": 1' + b"".join(b',"k%d":1' % index for index in range(limits.MAX_KEYS)) + b"}",
    b'{"a": ' + b"9" * 100_000 + b"}",
    b"{} {}",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:16]))
def test_S_20_hostile_json_on_every_route(live: Live, text: bytes) -> None:
    for path in rig.posts():
        reply = rig.call(live, "POST", path, content=text, headers={"content-type": "application/json"})
        assert reply.status_code == 400, (path, reply.text[:200])
    assert live.client.is_alive


MEMBERS = [
    b'"x": 1, "x": 2',
    b'"x": NaN',
    b'"x": -Infinity',
    b'"x": 1e999',
    b'"x": "\\ud800"',
    b'"x": ' + b"[" * limits.MAX_DEPTH + b"]" * limits.MAX_DEPTH,
    b'"x": {' + b",".join(b'"k%d":1' % index for index in range(limits.MAX_KEYS + 1)) + b"}",
]


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: repr(member[:16]))
def test_S_20_a_body_that_is_right_but_for_its_json_is_refused_on_every_route(live: Live, member: bytes) -> None:
    """Unknown fields are ignored, so nothing else refuses these bodies."""
    headers = {"content-type": "application/json"}
    for path in rig.BODIES:
        start = json.dumps(rig.body_of(path)).encode()[:-1] + b", "
        assert rig.call(live, "POST", path, content=start + b'"x": 1}', headers=headers).status_code < 300, path
        assert rig.call(live, "POST", path, content=start + member + b"}", headers=headers).status_code == 400, path


def test_S_17_compressed_bodies_are_refused_unread_on_every_route(live: Live) -> None:
    for coding in ("gzip", "deflate", "br", "zstd", "gzip, gzip"):
        for path in [*rig.posts(), "/v1/files"]:
            reply = rig.call(
                live, "POST", path, content=b"\x1f\x8b" + b"\x00" * 99, headers={"content-encoding": coding}
            )
            assert reply.status_code == 415, (path, coding)
