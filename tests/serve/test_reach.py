"""TLS and a path before all routes: what a client sees of them, in which errors bad files end, and that the gates hold
behind both."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import ssl
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.docs import pages
from tests.security import rig
from tests.support.certificates import certificates
from tests.support.server import HTTP, Live, inproc, lines_of
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.protocol.config import ServerConfig
from headrace.protocol.errors import RequestError
from headrace.serve.gates import accept
from headrace.serve.process import url_of
from headrace.serve.reach import Reach
from headrace.text.tokenizer import Tokenizer

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}


def reach(**more: Any) -> Reach:
    """The reach of a server by TLS under /llm."""
    names = {"ssl_certfile": "server.pem", "ssl_keyfile": "server.key"} | more
    files = {name: str(certificates() / value) if name in FILES else value for name, value in names.items() if value}
    return Reach(**{"root_path": "/llm", **files})


FILES = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer) -> Iterator[Live]:
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0), reach=reach()) as live:
        yield live


@pytest.fixture
def trusting() -> Iterator[httpx.Client]:
    """A client that trusts the CA alone."""
    context = ssl.create_default_context(cafile=certificates() / "ca.pem")
    with httpx.Client(verify=context, timeout=60, trust_env=False) as client:
        yield client


# -- TLS -----------------------------------------------------------------------------------------------------------


def test_calls_and_streams_go_through_tls(live: Live, trusting: httpx.Client) -> None:
    assert live.url == f"https://127.0.0.1:{live.port}/llm"
    reply = trusting.post(f"{live.url}/v1/chat/completions", json=CHAT)
    assert reply.json()["usage"]["completion_tokens"] == 8
    with trusting.stream("POST", f"{live.url}/v1/chat/completions", json=CHAT | {"stream": True}) as stream:
        assert "data: [DONE]" in list(lines_of(stream))


def test_another_ca_and_plain_http_get_no_answer(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    context = ssl.create_default_context(cafile=certificates() / "other.pem")
    with (
        caplog.at_level(logging.INFO, "headrace.server"),
        httpx.Client(verify=context, trust_env=False) as client,
        pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        client.get(f"{live.url}/v1/models")
    with pytest.raises(httpx.TransportError):
        HTTP.get(live.url.replace("https", "http"))
    assert HTTP.get(f"{live.url}/health/live").status_code == 200
    assert not caplog.records, "clients that do not come in fill no log"


def test_a_key_without_its_password_and_other_files_at_fault_are_named(tmp_path: Path) -> None:
    plain, empty = str(tmp_path / "plain.pem"), str(tmp_path / "absent.pem")
    Path(plain).write_text("no certificate")
    for more, field, words in (
        ({"ssl_certfile": empty}, "ssl_certfile", "No such file"),
        ({"ssl_keyfile": empty}, "ssl_keyfile", "No such file"),
        ({"ssl_certfile": plain}, "ssl_certfile", "a PEM file of a certificate"),
        ({"ssl_keyfile": plain}, "ssl_certfile", "--ssl-keyfile one of its key"),
        ({"ssl_keyfile": None}, "ssl_certfile", "and its key"),
        ({"ssl_keyfile": "other.key"}, "ssl_keyfile", "the key of --ssl-certfile"),
        ({"ssl_keyfile": "locked.key"}, "ssl_keyfile_password", "the key is encrypted"),
        ({"ssl_keyfile": "locked.key", "ssl_keyfile_password": "shut"}, "ssl_keyfile_password", "the password of"),
        ({"ssl_ca_certs": plain}, "ssl_ca_certs", "a PEM file of certificates"),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            reach(**more).context()
        assert caught.value.field == field, more
        assert "shut" not in str(caught.value)
    for right in ({}, {"ssl_keyfile": "locked.key", "ssl_keyfile_password": "open"}):
        assert isinstance(reach(**right).context(), ssl.SSLContext)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"ssl_keyfile": "k.pem"}, "ssl_keyfile"),
        ({"ssl_keyfile_password": "secret"}, "ssl_keyfile_password"),
        ({"ssl_ca_certs": "c.pem"}, "ssl_ca_certs"),
        ({"ssl_certfile": "c.pem", "ssl_cert_reqs": 2}, "ssl_cert_reqs"),
        *(
            ({"root_path": path}, "root_path")
            for path in ("llm", "/a b", "/a//b", "/a?b", "/ä", "/a%20b", "http://h/a")
        ),
    ],
)
def test_flags_that_would_do_nothing_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        Reach(**fields)
    assert caught.value.field == field
    assert "secret" not in str(caught.value)


def test_a_client_needs_a_certificate_where_one_is_needed(tokenizer: Tokenizer, trusting: httpx.Client) -> None:
    needs = reach(ssl_ca_certs="ca.pem", ssl_cert_reqs=2)
    assert needs.context().verify_mode is ssl.CERT_REQUIRED  # type: ignore[union-attr]
    listening = Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0), reach=needs)
    context = ssl.create_default_context(cafile=certificates() / "ca.pem")
    context.load_cert_chain(certificates() / "client.pem")
    with pytest.MonkeyPatch.context() as patch, httpx.Client(verify=context, trust_env=False) as known:
        # `Live` waits for the server with this client.
        patch.setattr("tests.support.server.HTTP", known)
        with listening as live:
            assert known.get(f"{live.url}/v1/models").status_code == 200
            with pytest.raises(httpx.TransportError):
                trusting.get(f"{live.url}/v1/models")


def test_an_idle_client_does_not_delay_the_end(tokenizer: Tokenizer, trusting: httpx.Client) -> None:
    """It reads nothing, and so never answers the end of TLS; the server's end has two seconds in `Live`."""
    live = Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0), reach=reach())
    with live:
        assert trusting.get(f"{live.url}/v1/models").status_code == 200
        [connection] = live.server.server_state.connections
    assert connection.transport.is_closing()  # type: ignore[union-attr]
    assert connection not in live.server.server_state.connections, "its end was seen, and not cut off"


def test_clients_that_begin_no_handshake_keep_no_others_out(
    live: Live, trusting: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "HANDSHAKES_OF_PEER", 3)
    with contextlib.ExitStack() as silent:
        links = [silent.enter_context(socket.create_connection(("127.0.0.1", live.port))) for _ in range(3)]
        late = silent.enter_context(socket.create_connection(("127.0.0.1", live.port)))
        late.settimeout(30)
        assert late.recv(1) == b"", "the fourth is closed at once"
        assert len(links) == 3
    Live.wait(lambda: trusting.get(f"{live.url}/health/live").status_code == 200)


def test_a_client_that_leaves_in_mid_stream_leaves_no_fault(
    live: Live, trusting: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    body = CHAT | {"stream": True, "max_tokens": 1500, "ignore_eos": True}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with trusting.stream("POST", f"{live.url}/v1/chat/completions", json=body) as stream:
                next(stream.iter_lines())
        # Without a close of TLS, and with a reset.
        context = ssl.create_default_context(cafile=certificates() / "ca.pem")
        with socket.create_connection(("127.0.0.1", live.port)) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            secure = context.wrap_socket(raw, server_hostname="127.0.0.1")
            secure.sendall(b"GET /llm/v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert secure.recv(12) == b"HTTP/1.1 200"
            secure.close()
        Live.wait(lambda: live.metric("num_requests_running") == 0)
    assert not [(record.getMessage(), record.exc_info) for record in caplog.records if record.levelno >= logging.ERROR]


def test_the_certificates_of_the_page(tmp_path: Path) -> None:
    """The commands of docs/howto-deploy.md make a CA and a certificate that the server takes and clients trust."""
    certificates()
    text = (pages.DOCS / "howto-deploy.md").read_text(encoding="utf-8")
    every = [
        words for block in pages.blocks("", text) if block.language == "bash" for words in pages.commands(block.text)
    ]
    for words in [words for words in every if words[0] == "openssl"]:
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    files = {"ssl_certfile": str(tmp_path / "server.pem"), "ssl_keyfile": str(tmp_path / "server.key")}
    assert isinstance(Reach(**files).context(), ssl.SSLContext)
    verify = ["openssl", "verify", "-CAfile", "ca.pem", "-verify_hostname", "models.example", "server.pem"]
    subprocess.run(verify, cwd=tmp_path, check=True, capture_output=True)


# -- the path ------------------------------------------------------------------------------------------------------


def test_the_routes_are_under_the_path_and_without_it(live: Live, trusting: httpx.Client) -> None:
    place = f"https://127.0.0.1:{live.port}"
    for path in ("/llm/v1/models", "/v1/models", "/llm/health", "/llm/api/tags", "/llm/props"):
        assert trusting.get(place + path).status_code == 200, path
    for path in ("/llmx/v1/models", "/llm/llm/v1/models", "/other/v1/models"):
        assert trusting.get(place + path).status_code == 404, path
    moved = trusting.get(f"{place}/llm?a=1")
    assert (moved.status_code, moved.headers["location"]) == (307, "/llm/?a=1")


def test_a_page_finds_its_files_under_the_path(live: Live, trusting: httpx.Client) -> None:
    """Every file that the page and its modules name is there, reckoned from the page as a browser does."""
    seen: set[str] = set()
    waiting = [f"{live.url}/", f"{live.url}/inspect"]
    while waiting:
        address = waiting.pop()
        if address in seen:
            continue
        seen.add(address)
        reply = trusting.get(address, headers={"accept": "text/html"})
        assert reply.status_code == 200, address
        names = re.findall(r'(?:src|href)="([\w./-]+\.(?:js|css))"|(?:from|import) "([\w./-]+)"', reply.text)
        waiting += [str(httpx.URL(address).join(first or second)) for first, second in names]
    assert len(seen) > 20
    assert all(address.startswith(live.url) for address in seen)
    scripts = [trusting.get(address).text for address in seen if address.endswith(".js") and "vendor" not in address]
    assert not [text for script in scripts for text in re.findall(r'(?:fetch\(|href=)["`]/\w+', script)]
    docs = trusting.get(f"{live.url}/docs").text
    assert 'href="openapi.json"' in docs


def test_the_gates_see_the_routes_paths(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A key opens the same behind the path as without it; nothing is public that was not."""
    config = ServerConfig(api_key_file=rig.write_keys(tmp_path), log_stats_interval=0)
    with Live(inproc(), tokenizer, config, reach=Reach(root_path="/llm/")) as locked:
        place = f"http://127.0.0.1:{locked.port}"
        paths = ("/v1/models", "/metrics", "/health", "/health/live", "/", "/inspect", "/fleet", "/slots", "/none")
        for key in (None, rig.ALICE, rig.ROOT):
            headers = {} if key is None else rig.bearer(key)
            for path in paths:
                behind, plain = (HTTP.get(f"{place}{base}{path}", headers=headers).status_code for base in ("/llm", ""))
                assert behind == plain, (key, path)
        assert HTTP.get(f"{place}/llm/v1/models").status_code == 401


def test_the_address_in_the_log_is_the_clients(live: Live) -> None:
    assert url_of("0.0.0.0", 8, reach()) == "https://127.0.0.1:8/llm"
    assert url_of("::1", 8, Reach(root_path="/a/b/")) == "http://[::1]:8/a/b"


# -- commands ------------------------------------------------------------------------------------------------------


def run(*words: str, variables: dict[str, str] | None = None, text: str = "") -> Any:
    return CliRunner().invoke(app, list(words), input=text, env=variables)


def test_commands_reach_a_server_behind_both(live: Live, tmp_path: Path) -> None:
    ca = str(certificates() / "ca.pem")
    size = ("--num-prompts", "2", "--random-input-len", "8", "--random-output-len", "4", "--tokenizer", "builtin")
    chat = ("--backend", "openai-chat")
    for words in (
        ("top", "--url", live.url, "--once"),
        ("top", live.url, "--once"),
        ("chat", live.url, "--max-tokens", "4"),
        ("chat", "--url", live.url, "--max-tokens", "4"),
        ("ps", "--url", live.url),
        ("list", "--url", f"{live.url}/"),
        ("launch", "claude", "--url", live.url, "--print"),
        ("bench", "serve", "--url", live.url, *size, *chat),
    ):
        done = run(*words, "--cacert", ca, text="Hello\n")
        assert (done.exit_code, done.exception) == (0, None), (words, done.output)
        named = run(*words, variables={"SSL_CERT_FILE": ca}, text="Hello\n")
        assert named.exit_code == 0, (words, named.output)
        strange = run(*words, "--cacert", str(certificates() / "other.pem"), text="Hello\n")
        assert strange.exit_code == 1, words
        assert "CERTIFICATE_VERIFY_FAILED" in str(strange.exception), words
    for words in (
        ("ps", "--url", "http://127.0.0.1:1", "--cacert", ca),
        ("ps", "--url", live.url, "--cacert", "/none"),
    ):
        done = run(*words)
        assert isinstance(done.exception, RequestError)
        assert done.exception.field == "cacert"
    assert "export NODE_EXTRA_CA_CERTS=" in run("launch", "pi", "--url", live.url, "--print", "--cacert", ca).stdout
