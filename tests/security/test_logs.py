"""S-22: nothing that a client sent makes a line of its own in the log, and no prompt or key is in it."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest
from tests.security import rig
from tests.support.server import HTTP, Live, logged

from headrace.engine import generation
from headrace.engine.logs import LineFormatter, escaped

CANARY = "xyzzy-prompt-of-a-client"
FORGED = "x\r\nINFO     11-21 20:00:00 headrace.server: all is well\x1b[2J\u2028\x85\u202e"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    with logged("text") as text:
        yield text


def send_everywhere(live: Live, word: str, key: str) -> int:
    num = 0
    for path in rig.posts():
        for body in rig.planted(rig.body_of(path), word):
            rig.call(live, "POST", path, json=body, headers=rig.bearer(key) | {"x-request-id": word[:20].strip()})
            num += 1
    rig.raw(live, rig.head("GET", "/" + CANARY, "Authorization: Bearer " + CANARY, "Connection: close"))
    rig.raw(live, CANARY.encode() + b"\r\n\r\n")
    return num


def test_S_22_prompts_and_keys_are_not_logged(locked: Live, log: io.StringIO) -> None:
    assert send_everywhere(locked, CANARY, rig.ALICE) > 60
    logging.getLogger("headrace.server").info("the end")
    assert "the end" in log.getvalue()
    assert CANARY not in log.getvalue()
    assert not [key for key in (rig.ALICE, rig.BOB, rig.ROOT) if key in log.getvalue()]


def test_S_22_nor_when_something_breaks_that_nobody_foresaw(
    locked: Live, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **more: object) -> None:
        try:
            raise KeyError(CANARY)
        except KeyError as error:
            raise ValueError(f"in {CANARY}\r\nINFO forged") from error

    monkeypatch.setattr(generation.TextClient, "check_room", broken)
    body = {"prompt": CANARY, "max_tokens": 2}
    reply = HTTP.post(locked.url + "/v1/completions", json=body, headers=rig.bearer(rig.ALICE))
    assert reply.status_code == 500
    assert CANARY not in reply.text
    text = log.getvalue()
    assert CANARY not in text
    assert "\nINFO forged" not in text
    # The places are there, and the kinds of both errors.
    assert "in broken" in text
    assert re.search(r"^KeyError: \(\d+ characters", text, re.M)
    assert re.search(r"^ValueError: \(\d+ characters", text, re.M)


def test_S_22_control_an_open_log_does_tell(locked: Live) -> None:
    record = logging.LogRecord("headrace", logging.ERROR, __file__, 1, "failed", (), None)
    try:
        raise ValueError(CANARY + "\nINFO forged")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    assert CANARY + "\\nINFO forged" in LineFormatter(shows_messages=True).format(record)
    record.exc_text = None
    assert CANARY not in LineFormatter().format(record)


def test_S_22_no_line_is_forged(locked: Live, log: io.StringIO) -> None:
    send_everywhere(locked, FORGED, rig.ALICE)
    logging.getLogger("headrace.server").warning("model %s is not here", FORGED)
    lines = log.getvalue().split("\n")
    assert all(re.match(r"(DEBUG|INFO|WARNING|ERROR) +\d\d-\d\d [\d:]+ [\w.]+: ", line) for line in lines if line), (
        lines
    )
    assert not any("all is well" in line and "model x" not in line for line in lines)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", log.getvalue())


def test_escaped_text_can_be_read() -> None:
    assert escaped("Größe 5 µm\t\r\n\x1b") == "Größe 5 µm\\t\\r\\n\\x1b"
    assert escaped("\ud800\u2029") == "\\ud800\\u2029"


def test_S_22_headers_of_replies_hold_nothing_of_a_clients(locked: Live) -> None:
    for word in ("a\x01b", "ü", "a" * 300, "a b"):
        reply = HTTP.get(locked.url + "/v1/models", headers=rig.bearer(rig.ALICE) | {"x-request-id": word.encode()})
        assert word not in str(reply.headers)
    for method, path in rig.routes(locked.app):
        headers = rig.call(locked, method, path, headers=rig.bearer(rig.ROOT)).headers
        assert "server" not in headers or headers["server"] == "uvicorn"
        assert "x-powered-by" not in headers
