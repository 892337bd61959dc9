"""A proxy that notes what arrives: method, path, key and model of each request, and the status of its reply."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

DROPPED = frozenset({"connection", "transfer-encoding", "keep-alive", "date", "server"})


class Arrival(NamedTuple):
    """A request. key: as the client sent it, by whichever header."""

    method: str
    path: str
    key: str
    model: str
    status: int


class Recorder(NamedTuple):
    """A running proxy: its address, and what has arrived so far."""

    url: str
    arrivals: list[Arrival]


@contextmanager
def recording(target: str) -> Iterator[Recorder]:
    """A proxy before the server at `target`, on a free port of this machine."""
    place = urlsplit(target)
    arrivals: list[Arrival] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            link = http.client.HTTPConnection(place.hostname or "", place.port, timeout=600)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            with contextlib.closing(link):
                link.request(self.command, self.path, body, headers)
                self.answer(link.getresponse(), body)

        def answer(self, reply: http.client.HTTPResponse, body: bytes) -> None:
            key = self.headers.get("authorization", "").removeprefix("Bearer ") or self.headers.get("x-api-key", "")
            arrivals.append(Arrival(self.command, self.path, key, model_of(body), reply.status))
            self.close_connection = True
            self.send_response(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in DROPPED:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            while piece := reply.read1(65536):
                self.wfile.write(piece)
                self.wfile.flush()

        do_GET = do_POST = do_HEAD = do_DELETE = pass_on

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Recorder(f"http://127.0.0.1:{server.server_address[1]}", arrivals)
    finally:
        server.shutdown()
        server.server_close()


def model_of(body: bytes) -> str:
    """The model that a request names; empty if it has none."""
    try:
        return str(json.loads(body)["model"])
    except (ValueError, KeyError, TypeError):
        return ""
