"""Lengths of a body (S-19): one form of each is read, on the wire too, and all others end the connection."""

from __future__ import annotations

import asyncio

import h11
import pytest
from tests.campaigns.connections import Schedule, Server, VirtualLoop, virtual

from headrace.serve.gates import framing
from headrace.serve.gates.framing import StrictBuffer, has_one_length

HEAD = b"POST /read HTTP/1.1\r\nHost: a\r\n%s\r\n"
NEXT = b"GET /quick HTTP/1.1\r\nHost: a\r\n\r\n"

PLAIN = [b"5", b" 5", b"\t5 \t", b"0", b"00005"]
SIGNS = [b"+5", b"-5", b"5.0", b"0x5", b"5e0", b"5_0", b"5 5", b"5\x0b5", "\u0665".encode(), b"five", b"\xb25"]
LISTS = [b"5, 5", b"5,5", b"5,", b",5", b",", b"5, 6", b"5;5", b"5\t,\t5"]
EMPTY = [b"", b" ", b"\t"]
TWICE = [b"Content-Length: 5\r\nContent-Length: 5\r\n", b"Content-Length: 5\r\ncontent-length: 6\r\n"]
CHUNKS = [
    b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    b"Content-Length: 5\r\nX: y\r\nTRANSFER-ENCODING: chunked\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
]
REFUSED = [b"Content-Length:%s\r\n" % value for value in SIGNS + LISTS + EMPTY] + TWICE + CHUNKS


def lines(headers: bytes, version: bytes = b"1.1") -> list[bytes]:
    return (HEAD.replace(b"1.1", version) % headers).removesuffix(b"\r\n\r\n").split(b"\r\n")


@pytest.mark.parametrize("headers", [b"Content-Length:%s\r\n" % value for value in PLAIN] + [b"", b"X: 5, 5\r\n"])
def test_one_length_or_none_is_read(headers: bytes) -> None:
    assert has_one_length(lines(headers))


@pytest.mark.parametrize("headers", REFUSED)
def test_S_19_every_other_form_of_a_length_is_refused(headers: bytes) -> None:
    assert not has_one_length(lines(headers))


def test_S_19_chunks_are_of_http_1_1() -> None:
    chunks = b"Transfer-Encoding: chunked\r\n"
    assert has_one_length(lines(chunks))
    assert not has_one_length(lines(chunks, b"1.0"))


def test_lengths_in_trailers_are_checked_too() -> None:
    buffer = StrictBuffer()
    buffer += b"Content-Length: 5, 5\r\n\r\n"
    with pytest.raises(h11.RemoteProtocolError, match="two ways"):
        buffer.maybe_extract_lines()


def replies(headers: bytes) -> list[bytes]:
    """The statuses of all replies to a request with a body of five bytes and one right behind it."""

    async def run(loop: VirtualLoop) -> bytes:
        wire = Server(loop).connect(Schedule([], "silence", reads_all=True, num_replies=None))
        wire.send(HEAD % headers + b"hello" + NEXT)
        while wire.lost_at is None:
            await asyncio.sleep(1)
        return bytes(wire.received)

    with virtual() as loop:
        received = loop.run_until_complete(run(loop))
    return [reply[:3] for reply in received.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("headers", REFUSED)
def test_S_19_no_request_follows_a_length_of_two_readings(headers: bytes) -> None:
    assert replies(headers) == [b"400"]


def test_a_request_follows_a_plain_length() -> None:
    assert replies(b"Content-Length: 5\r\n") == [b"200", b"200"]


def test_S_19_control_h11_alone_reads_lists_and_equal_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "has_one_length", lambda lines: True)
    for headers in (b"Content-Length: 5, 5\r\n", TWICE[0]):
        assert replies(headers) == [b"200", b"200"]
