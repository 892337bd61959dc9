"""How commands reach a running server: its address, a key, and the CA that its certificate comes from.

Knows no route. httpx and ssl are imported when a command runs. Called by every command with `--url`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace import env
from headrace.protocol.errors import HeadraceError, RequestError

if TYPE_CHECKING:
    import ssl

    import httpx

ADDRESS = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option("--url", metavar="URL", help="The server's address.")]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", metavar="TEXT", help="Its key; better given in HEADRACE_API_KEY.")
]
CaCert = Annotated[
    Path | None,
    typer.Option(
        "--cacert",
        metavar="FILE",
        help="PEM file of the CA of an https server, in place of the system's; so does the variable SSL_CERT_FILE.",
    ),
]


def is_url(text: str) -> bool:
    """Return whether a text is a server's address, and not the name of a model."""
    return text.startswith(("http://", "https://"))


def address_of(url: str) -> str:
    """Return an address without a slash at its end. Raises `RequestError` for what is none."""
    if not is_url(url):
        raise RequestError("url", url, "an address that begins with http:// or https://, such as http://127.0.0.1:8000")
    return url.rstrip("/")


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the headers that send a key: `api_key`, or else the first in HEADRACE_API_KEY."""
    key = first_key(api_key)
    return {"Authorization": f"Bearer {key}"} if key else {}


def first_key(api_key: str | None) -> str | None:
    """Return `api_key`, or else the first key in HEADRACE_API_KEY; None if there is none."""
    return api_key or next(iter((env.api_key() or "").split()), None)


def verification(url: str, cacert: Path | str | None) -> ssl.SSLContext | bool:
    """Return what httpx checks the certificate of a server at `url` with. Raises `RequestError` for a bad file.

    The system's authorities, or those of SSL_CERT_FILE, which OpenSSL reads itself. To load them takes longer than
    most calls, and nothing is checked over http."""
    if not url.startswith("https://"):
        if cacert is not None:
            raise RequestError("cacert", str(cacert), "left out for an address that begins with http://")
        return False
    import ssl

    try:
        return ssl.create_default_context(cafile=cacert)
    except OSError as error:  # ssl.SSLError is one
        bound = f"a PEM file of certificates ({error.strerror or error})"
        raise RequestError("cacert", str(cacert), bound) from error


def client_of(url: str, cacert: Path | str | None, read_seconds: float | None = None) -> httpx.Client:
    """Return a client for the server at `url`, which waits `read_seconds` for each part of a reply (None: for ever).
    It takes no proxy and no password from the environment."""
    import httpx

    timeout = httpx.Timeout(10.0, read=read_seconds)
    return httpx.Client(timeout=timeout, verify=verification(url, cacert), trust_env=False)


def models_of(client: httpx.Client, url: str, headers: dict[str, str]) -> list[dict[str, Any]]:
    """Return the entries of the server's /v1/models, at least one. Raises `NoServerError` where none answers, and
    `HeadraceError` where it refuses the key."""
    import httpx

    try:
        reply = client.get(f"{url}/v1/models", headers=headers, timeout=10.0)
        if reply.status_code == 200:
            if models := [{**model, "id": str(model["id"])} for model in reply.json()["data"]]:
                return models
            problem = "it lists no model"
        elif reply.status_code in (401, 403):
            key = "its key was not accepted" if headers else "it needs a key"
            raise HeadraceError(f"{url}: {key}; give it in HEADRACE_API_KEY or by --api-key")
        else:
            problem = f"it answered {reply.status_code}: {reply.text[:200]}"
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise NoServerError(f"no server at {url}: {problem}")


class NoServerError(HeadraceError):
    """No server answers at an address."""

    code = "no_server"


def reason(reply: Any) -> str:
    """Return the message of an error reply, or its text if it has none."""
    try:
        error = reply.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return str(reply.text)[:200]
