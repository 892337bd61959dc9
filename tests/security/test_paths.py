"""S-16, S-21, S-35: no URL is fetched, and no path of a client's is opened."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.laws import rules
from tests.security import rig
from tests.support.server import HTTP, Live, inproc

from headrace.protocol.config import ServerConfig
from headrace.text.tokenizer import Tokenizer

SECRET = "root-of-all-evil-4711"


class Canary:
    """Listens, and counts who comes."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.num_hits = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self.socket.accept()
            except OSError:
                return
            self.num_hits += 1
            client.close()


@pytest.fixture
def canary() -> Iterator[Canary]:
    result = Canary()
    yield result
    result.socket.close()


def test_S_16_no_route_fetches_a_url(live: Live, canary: Canary) -> None:
    port = canary.socket.getsockname()[1]
    hosts = ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "0", "[::ffff:127.0.0.1]", "x@127.0.0.1"]
    for url in [f"http://{host}:{port}/a.png" for host in hosts]:
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "input_image", "image_url": url},
            {"type": "image", "source": {"type": "url", "url": url}},
            {"type": "input_file", "file_url": url},
            {"type": "video_url", "video_url": {"url": url}},
        ]
        for path in rig.posts() if url.startswith("http://127") else ["/v1/chat/completions", "/v1/responses"]:
            body = rig.body_of(path)
            inputs = [*rig.planted(body, url), *rig.planted(body, parts)]
            inputs += [body | {"images": [url]}, body | {"input_file_id": url}, body | {"media": {"url": url}}]
            for each in inputs:
                assert rig.call(live, "POST", path, json=each).status_code < 500, (path, each)
    assert canary.num_hits == 0
    with socket.create_connection(("127.0.0.1", port)):
        pass
    Live.wait(lambda: canary.num_hits == 1)


CLIENTS = frozenset("httpx requests aiohttp urllib3 ftplib smtplib http.client urllib.request".split())
# The ways out of the house: models, when the server starts, by the hub's token; and pictures, from the hosts alone that
# a flag of the server names (tests/serve/call/test_fetching.py).
MAY_FETCH = {"hub": "huggingface_hub", "doctor": "huggingface_hub", "serve.call.fetching": "httpx"}


def fetchers(module: str, source: str) -> list[str]:
    """What a module could fetch with."""
    result = []
    for _, name in rules.imports(source, module):
        wide = any(rules.under(name, client) for client in CLIENTS)
        if wide or rules.under(name, "huggingface_hub"):
            result.append(name.partition(".")[0])
    return result


def test_S_16_S_35_nothing_that_serves_can_fetch() -> None:
    """Commands that are clients themselves have one; the server, the engine and what they import have none."""
    for module, source in rules.sources():
        if not rules.under(module, "cli"):
            assert {*fetchers(module, source)} <= {MAY_FETCH.get(module)}, module
    assert fetchers("server.x", "import httpx\nfrom urllib.request import urlopen\nimport http.client") == [
        "httpx",
        "urllib",
        "http",
    ]


@pytest.fixture(scope="module")
def storing(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Path]]:
    folder = tmp_path_factory.mktemp("storage")
    (folder / "secret").write_text(SECRET)
    inside = folder / "kept"
    (inside / "files").mkdir(parents=True)
    (inside / "files" / f"file-{'a' * 32}.bin").symlink_to(folder / "secret")
    (inside / "files" / f"file-{'a' * 32}.json").write_text('{"filename": "x", "purpose": "batch"}')
    config = ServerConfig(storage_dir=str(inside), log_stats_interval=0)
    with Live(inproc(), tokenizer, config) as live:
        yield live, folder


def payloads(secret: Path) -> list[str]:
    """Names of a file outside, in all spellings."""
    ups = ["../" * depth + "secret" for depth in range(1, 5)]
    result = [
        str(secret),
        f"file://{secret}",
        f"file://../../{secret.name}",
        "file-" + "a" * 32,
        "~/x",
        "x\x00y",
        ".",
        "",
    ]
    result += ups + [up.replace("/", "\\") for up in ups] + [up.replace("..", "%2e%2e") for up in ups]
    result += [up.replace("/", "%2f") for up in ups] + [up.replace("..", "....//") for up in ups]
    result += (
        [up.replace(".", "\u2024") for up in ups] + ["file-" + up for up in ups] + ["/proc/self/environ", "hf://a/b"]
    )
    return result


def test_S_21_no_path_of_a_clients_is_opened(storing: tuple[Live, Path]) -> None:
    live, folder = storing
    inputs = payloads(folder / "secret")
    templates = [(m, p) for m, p in rig.routes(live.app) if re.search(r"{(?:\w+_id|name:path)}", p)]
    assert len(templates) > 10
    for method, template in templates:
        for name in inputs:
            path = re.sub(r"{[\w:]+}", quote(name, safe="%"), template)
            reply = HTTP.request(method, live.url + path)
            # An empty name, or a dot that the client itself took away, leaves another route.
            assert reply.status_code in (400, 404, 405, 501) or name in (".", "", "~/x", *inputs[8:12]), (method, path)
            assert SECRET not in reply.text
    for path in rig.posts():
        for name in inputs if path in rig.FORMS else inputs[:4]:
            for body in rig.planted(rig.body_of(path), name):
                reply = rig.call(live, "POST", path, json=body)
                assert reply.status_code < 500
                assert SECRET not in reply.text
    names = {path.name for path in (folder / "kept").rglob("*") if path.is_file() and not path.is_symlink()}
    assert all(re.fullmatch(r"\.lock|(file-|batch_|resp_|conv_)[0-9a-f]{32}\.(json|bin)", name) for name in names), (
        names
    )


def test_S_21_what_is_outside_and_what_is_not_there_sound_the_same(storing: tuple[Live, Path]) -> None:
    live, folder = storing
    for path in ("/v1/files/{}", "/v1/files/{}/content", "/v1/batches/{}", "/v1/responses/{}", "/v1/models/{}"):
        output = set()
        for name in ("../secret", "../absent", f"file-{'a' * 32}", f"file-{'b' * 32}", str(folder), "/no/such"):
            reply = HTTP.get(live.url + path.format(quote(name, safe="")))
            text = reply.json()["error"]["message"].replace(repr(name), "NAME").replace(repr(name[:77] + "..."), "NAME")
            # A reply about a route repeats the client's own path.
            text = re.sub(r"^there is no /.* here; .*", "there is no PATH", text)
            output.add((reply.status_code, re.sub(r"'[^']*'", "NAME", text)))
        # A slash in the name makes it no id at all: there is no such route.
        assert {status for status, _ in output} == {404}, path
        assert len(output) <= 2, output


def test_S_21_names_of_uploads_are_labels(storing: tuple[Live, Path]) -> None:
    live, folder = storing
    for name in ("../../../secret", "/etc/passwd", "C:secret"):
        response = HTTP.post(live.url + "/v1/files", files={"file": (name, b"mine")}, data={"purpose": "user_data"})
        assert response.json()["filename"] == name
        assert HTTP.get(live.url + f"/v1/files/{response.json()['id']}/content").content == b"mine"
    assert (folder / "secret").read_text() == SECRET
