"""How clients reach the server: by TLS or not, and under which path.

Knows no routes and no model. The flags are made into a command's options by `cli.serve`; `serve.process` opens its
sockets with the context, and serves the application under the path. The command line imports it: it needs msgspec
alone.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace.protocol.errors import RequestError

PROTOCOLS = ["http/1.1"]
"""What the server speaks behind TLS."""
PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)
Application = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """The flags; their names are vLLM's. Raises `RequestError` for a path that is none."""

    ssl_certfile: Annotated[
        str | None,
        msgspec.Meta(
            description="PEM file of the server's certificate, with those of its authorities behind it: the server "
            "speaks https only.",
            extra={"metavar": "FILE"},
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        msgspec.Meta(
            description="PEM file of the certificate's key, if it is not in that file.", extra={"metavar": "FILE"}
        ),
    ] = None
    ssl_keyfile_password: Annotated[
        str | None, msgspec.Meta(description="Password of the key; other users of this machine can see it.")
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        msgspec.Meta(
            description="PEM file of the authorities from which clients' certificates must come; see --ssl-cert-reqs.",
            extra={"metavar": "FILE"},
        ),
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        msgspec.Meta(description="Certificates of clients: 0 none, 1 checked if there is one, 2 needed.", ge=0, le=2),
    ] = 0
    root_path: Annotated[
        str,
        msgspec.Meta(
            description="Path under which clients reach the server, such as /llm: the routes are there, and also "
            "without it, for a proxy that takes it away.",
            extra={"metavar": "PATH"},
        ),
    ] = ""

    def __post_init__(self) -> None:
        path = self.root_path.rstrip("/")
        if path and (
            not path.startswith("/") or "//" in path or any(c in path for c in "?#% \\") or not path.isascii()
        ):
            raise RequestError(
                "root_path", self.root_path, "a path that begins with /, such as /llm, of plain characters"
            )
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
                if getattr(self, name) is not None:
                    value = "(not shown)" if name == "ssl_keyfile_password" else getattr(self, name)
                    raise RequestError(name, value, "left out without --ssl-certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise RequestError("ssl_cert_reqs", self.ssl_cert_reqs, "0 without --ssl-ca-certs")

    @property
    def scheme(self) -> str:
        """The scheme of the server's addresses."""
        return "http" if self.ssl_certfile is None else "https"

    @property
    def path(self) -> str:
        """The path before every route, without a slash at its end; empty if there is none."""
        return self.root_path.rstrip("/")

    def context(self) -> ssl.SSLContext | None:
        """Read the files, and return the context of the connections; None without TLS. Raises `RequestError`."""
        if self.ssl_certfile is None:
            return None
        _check_file("ssl_certfile", self.ssl_certfile)
        if self.ssl_keyfile is not None:
            _check_file("ssl_keyfile", self.ssl_keyfile)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(PROTOCOLS)

        is_locked = False

        def password() -> str:
            # Without a function, OpenSSL asks on the terminal.
            nonlocal is_locked
            is_locked = True
            if self.ssl_keyfile_password is None:
                raise RequestError("ssl_keyfile_password", None, "given: the key is encrypted")
            return self.ssl_keyfile_password

        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password)
        except ssl.SSLError as error:
            raise self._file_error(error, is_locked) from error
        if self.ssl_ca_certs is not None:
            _check_file("ssl_ca_certs", self.ssl_ca_certs)
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except ssl.SSLError as error:
                raise RequestError(
                    "ssl_ca_certs", self.ssl_ca_certs, f"a PEM file of certificates ({error})"
                ) from error
            context.verify_mode = ssl.VerifyMode(self.ssl_cert_reqs)
        return context

    def _file_error(self, error: ssl.SSLError, is_locked: bool) -> RequestError:
        """Return the error for a certificate and a key that OpenSSL refuses. `is_locked`: the key has a password."""
        if error.reason == "KEY_VALUES_MISMATCH":
            return RequestError("ssl_keyfile", self.ssl_keyfile or self.ssl_certfile, "the key of --ssl-certfile")
        if is_locked:
            return RequestError("ssl_keyfile_password", "(not shown)", "the password of the key")
        key = ", and --ssl-keyfile one of its key" if self.ssl_keyfile else " and its key"
        bound = f"a PEM file of a certificate{key} ({error.reason or error})"
        return RequestError("ssl_certfile", self.ssl_certfile, bound)


def _check_file(name: str, path: str) -> None:
    """Raise `RequestError` unless a file can be read: OpenSSL does not say which of two can not."""
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except OSError as error:
        raise RequestError(name, path, f"a file that can be read ({error.strerror})") from error


class UnderPath:
    """Takes the path before every route away, where a call has it; some proxies have done so already.

    The path without a slash behind it is sent to the one with it, from which the page's links are reckoned. The gates
    and routes see paths as if there were no such path, so `root_path` of ASGI stays empty."""

    def __init__(self, app: Application, path: str) -> None:
        self._app, self._path = app, path

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (scope["path"] + "/").startswith(self._path + "/"):
            if scope["path"] == self._path and scope["method"] in ("GET", "HEAD"):
                await _redirect(self._path + "/", scope, send)
                return
            raw = scope.get("raw_path")
            prefix = self._path.encode()
            scope = {**scope, "path": scope["path"][len(self._path) :] or "/"}
            if raw is not None and raw.startswith(prefix):
                scope["raw_path"] = raw[len(prefix) :] or b"/"
        await self._app(scope, receive, send)


async def _redirect(path: str, scope: MutableMapping[str, Any], send: Any) -> None:
    query = scope.get("query_string", b"")
    place = path.encode() + (b"?" + query if query else b"")
    headers = [(b"location", place), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 307, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
