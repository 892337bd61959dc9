"""What the server sends of the page: to whom, with which headers, and from which sources. No browser is needed."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.inspector import browser
from tests.security import rig
from tests.support.server import HTTP, Live, inproc

from headrace.protocol.config import ServerConfig
from headrace.serve.inspector.page import FOLDER
from headrace.text.tokenizer import Tokenizer

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
RUNNING = "headrace is running\n"
SUFFIXES = (".js", ".css", ".woff2")
FILES = [f"/inspector/{path.relative_to(FOLDER)}" for path in FOLDER.rglob("*") if path.suffix in SUFFIXES]


@pytest.fixture(scope="module")
def locked(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with keys."""
    keys = rig.write_keys(tmp_path_factory.mktemp("keys"))
    with Live(inproc(), tokenizer, ServerConfig(api_key_file=keys, log_stats_interval=0)) as live:
        yield live


def stale(folder: Path) -> list[str]:
    """Libraries that are not those of SOURCES.md, by their digests, or are missing in it or in the folder."""
    rows = re.findall(r"(?m)^\| (\S+) \|.*\| ([0-9a-f]{64}) \|$", (folder / "SOURCES.md").read_text(encoding="utf-8"))
    libraries = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.suffix in SUFFIXES
    }
    return sorted({name for name, _ in libraries.items() ^ dict(rows).items()})


def test_the_libraries_are_those_of_their_packages(tmp_path: Path) -> None:
    assert stale(FOLDER / "vendor") == []
    shutil.copytree(FOLDER / "vendor", tmp_path, dirs_exist_ok=True)
    with (tmp_path / "uplot.js").open("a") as file:
        file.write("\n")
    (tmp_path / "other.js").touch()
    (tmp_path / "katex/fonts/other.woff2").touch()
    assert stale(tmp_path) == ["katex/fonts/other.woff2", "other.js", "uplot.js"]


def loosened(reply: httpx.Response) -> list[str]:
    """Directives of the policy of a reply that let in more than the server's own files, and missing headers."""
    policy = dict(part.strip().partition(" ")[::2] for part in reply.headers["content-security-policy"].split(";"))
    strict = {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'"}
    strict |= dict.fromkeys(("script-src", "style-src", "connect-src", "font-src"), "'self'") | {
        "img-src": "'self' data:"
    }
    strict["x-content-type-options"] = "nosniff"
    policy["x-content-type-options"] = reply.headers.get("x-content-type-options", "")
    return [name for name, _ in policy.items() ^ strict.items()]


def test_the_policy_lets_in_nothing_from_outside(locked: Live) -> None:
    for path in ("/", "/inspect", *FILES):
        assert loosened(HTTP.get(locked.url + path, headers=BROWSER)) == [], path
    headers = dict(HTTP.get(locked.url + "/inspect").headers)
    headers["content-security-policy"] += "; script-src 'self' 'unsafe-inline'"
    assert "script-src" in loosened(httpx.Response(200, headers=headers))


def test_the_files_name_no_other_host() -> None:
    for path in FOLDER.glob("*.*"):
        if path.suffix in (".js", ".css", ".html"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), (
                path
            )
            assert path.suffix != ".html" or not re.search(r"<script(?![^>]*\ssrc=)|\son\w+=|\sstyle=", text), path


def test_a_browser_gets_the_page_and_others_what_they_had(locked: Live) -> None:
    assert "<!doctype html>" in HTTP.get(locked.url, headers=BROWSER).text
    for accept in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        assert HTTP.get(locked.url, headers=accept).text == RUNNING
    assert HTTP.head(locked.url).status_code == 200
    first = HTTP.get(locked.url, headers=BROWSER)
    again = HTTP.get(locked.url, headers=BROWSER | {"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_S_24_the_page_needs_no_key_and_its_data_do(locked: Live) -> None:
    for path in ("/", "/inspect", *FILES):
        assert HTTP.get(locked.url + path, headers=BROWSER).status_code == 200, path
    data = sorted(path.removeprefix("GET ") for path in rig.ACCESS if path.startswith("GET /inspect/"))
    assert "/inspect/live" in data
    for path in data:
        statuses = [
            HTTP.get(locked.url + path, headers=BROWSER | headers).status_code
            for headers in ({}, rig.bearer("wrong"), rig.bearer(rig.PROBE), rig.bearer(rig.ALICE))
        ]
        assert statuses == [401, 401, 403, 403], path
    assert HTTP.get(f"{locked.url}/inspector/%2e%2e/page.py").status_code in (401, 404)
    assert HTTP.get(f"{locked.url}/inspector/page.py").status_code == 404


def test_without_the_inspector_there_is_no_page(tokenizer: Tokenizer) -> None:
    config = ServerConfig(inspector=False, log_stats_interval=0)
    with Live(inproc(), tokenizer, config) as live:
        assert HTTP.get(live.url, headers=BROWSER).text == RUNNING
        for path in ("/inspect", *FILES):
            assert HTTP.get(live.url + path, headers=BROWSER).status_code == 404


def test_a_missing_browser_skips_the_tests_unless_it_must_be_there(tmp_path: Path) -> None:
    browser.require(tmp_path, ("pathlib",), True)
    for program, packages in ((tmp_path / "no", ()), (tmp_path, ("no_such_package",))):
        with pytest.raises(pytest.skip.Exception, match="no"):
            browser.require(program, packages, False)
        with pytest.raises(pytest.fail.Exception, match="not installed"):
            browser.require(program, packages, True)
