"""S-16: pictures that requests name by their address come from named hosts of the public network alone."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.protocol.errors import RequestError
from headrace.serve.call import fetching
from headrace.serve.call.fetching import fetch, is_public

PRIVATE = (
    "127.0.0.1 10.1.2.3 172.16.0.9 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 ::1 :: "
    "fe80::1%eth0 fd00::1 ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 2002:7f00:1:: 64:ff9b::7f00:1 64:ff9b::a00:1"
).split()


class Canary(http.server.BaseHTTPRequestHandler):
    """Counts what reaches it, and replies as the path says."""

    def do_GET(self) -> None:
        self.server.hits.append((self.path, self.headers["host"]))  # type: ignore[attr-defined]
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", "http://127.0.0.1/secret")
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        self.wfile.write(b"x" * 4096 if self.path == "/large" else b"picture")

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""


@pytest.fixture
def canary() -> Iterator[Any]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Canary)
    server.hits = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def got(url: str, *domains: str) -> bytes:
    return asyncio.run(fetch(url, "image", domains))


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


def test_public_addresses() -> None:
    assert is_public("93.184.215.14")
    assert is_public("2606:2800:21f:cb07:6820:80da:af6b:8b2c")
    assert is_public("::ffff:93.184.215.14")


@pytest.mark.parametrize(
    "form",
    [
        "http://127.0.0.1:{port}/a",
        "http://localhost:{port}/a",
        "http://0x7f000001:{port}/a",
        "http://2130706433:{port}/a",
        "http://0177.0.0.1:{port}/a",
        "http://0:{port}/a",
        "http://[::1]:{port}/a",
        "http://[::ffff:127.0.0.1]:{port}/a",
        "http://user@127.0.0.1:{port}/a",
        "http://good.example\\@127.0.0.1:{port}/a",
        "http://good.example:80@127.0.0.1:{port}/a",
        "http://127.0.0.1:{port}#@good.example/",
        "HTTP://LOCALHOST:{port}/a",
    ],
)
def test_no_form_of_an_address_reaches_the_own_machine(form: str, canary: Any) -> None:
    url = form.format(port=canary.server_address[1])
    names = ["good.example", "127.0.0.1", "localhost", "0x7f000001", "2130706433", "0177.0.0.1", "0", "::1"]
    for domains in ((), ("good.example",), (*names, "::ffff:127.0.0.1")):
        with pytest.raises(RequestError):
            got(url, *domains)
    assert canary.hits == []


def test_a_name_that_resolves_to_the_own_machine(canary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["93.184.215.14", "127.0.0.1"])

    async def resolve(*_: Any, **__: Any) -> list[Any]:
        return [(2, 1, 6, "", (next(answers), 0))]

    class Loop(asyncio.SelectorEventLoop):
        getaddrinfo = resolve  # type: ignore[assignment]

    # The address that was checked is the one that is connected to: there is no second look at the name.
    connected = []

    async def read(place: Any, address: str, field: str) -> bytes:
        connected.append(address)
        return b""

    monkeypatch.setattr(fetching, "read_reply", read)
    with asyncio.Runner(loop_factory=Loop) as runner:
        assert runner.run(fetch("http://rebind.example/a", "image", ["rebind.example"])) == b""
        with pytest.raises(RequestError, match="addresses are public"):
            runner.run(fetch("http://rebind.example/a", "image", ["rebind.example"]))
    assert connected == ["93.184.215.14"]
    assert canary.hits == []


def test_what_a_host_replies(canary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "is_public", lambda address: True)
    port = canary.server_address[1]
    assert got(f"http://localhost:{port}/a?b=1", "localhost") == b"picture"
    assert canary.hits == [("/a?b=1", f"localhost:{port}")]  # control: with this the tests above would hit
    with pytest.raises(RequestError, match="status 302"):
        got(f"http://localhost:{port}/moved", "localhost")
    with pytest.raises(RequestError, match="status 404"):
        got(f"http://localhost:{port}/none", "localhost")
    monkeypatch.setattr(fetching, "MAX_BYTES", 1000)
    with pytest.raises(RequestError, match="at most 1000 bytes"):
        got(f"http://localhost:{port}/large", "localhost")
    with pytest.raises(RequestError, match="can be fetched"):
        got("http://localhost:1/a", "localhost")
    monkeypatch.setattr(fetching, "TIMEOUT_S", 0.0)
    with pytest.raises(RequestError, match="comes within"):
        got(f"http://localhost:{port}/a", "localhost")


def test_hosts_that_no_flag_names() -> None:
    for url in ("https://good.example/a", "https://good.example.evil/a", "https://evil/good.example"):
        with pytest.raises(RequestError, match="allowed-media-domains"):
            got(url, "other.example")
    with pytest.raises(RequestError, match="without a user"):
        got("https://me:secret@good.example/a", "good.example")
