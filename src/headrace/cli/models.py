"""`headrace list`, `ps`, `show`, `pull` and `rm`: the models of a running server, through its Ollama API.

The server knows its folder and the loaded models, so each command talks to it. httpx is imported when a command runs.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.remote import ADDRESS, ApiKey, CaCert, Url, address_of, authorization, client_of, reason
from headrace.protocol.errors import HeadraceError

Name = Annotated[str, typer.Argument(metavar="MODEL", help="A model's name, as headrace list shows it.")]
SIZES = ((10**9, "GB"), (10**6, "MB"), (10**3, "KB"))
AGES = ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


def list_models(url: Url = ADDRESS, api_key: ApiKey = None, cacert: CaCert = None) -> None:
    """List the models of a server, loaded or not."""
    models = call("GET", url, "/api/tags", api_key, cacert=cacert)["models"]
    rows = [(m["name"], m["digest"][:12], size(m["size"]), _about(m), f"{_age(m['modified_at'])} ago") for m in models]
    print_table(("NAME", "ID", "SIZE", "MODEL", "MODIFIED"), rows)


def ps(url: Url = ADDRESS, api_key: ApiKey = None, cacert: CaCert = None) -> None:
    """List the models that are loaded on a server."""
    models = call("GET", url, "/api/ps", api_key, cacert=cacert)["models"]
    rows = [(m["name"], m["digest"][:12], size(m["size"]), str(m["context_length"]), _until(m)) for m in models]
    print_table(("NAME", "ID", "MEMORY", "CONTEXT", "UNTIL"), rows)


def show(model: Name, url: Url = ADDRESS, api_key: ApiKey = None, cacert: CaCert = None) -> None:
    """Show what a server knows of a model."""
    facts = call("POST", url, "/api/show", api_key, {"model": model}, cacert)
    details = facts["details"]
    lines = {
        "architecture": details["family"],
        "parameters": details["parameter_size"],
        "context length": facts["model_info"].get(f"{details['family']}.context_length"),
        "embedding length": facts["model_info"].get(f"{details['family']}.embedding_length"),
        "quantization": details["quantization_level"],
        "format": details["format"],
        "capabilities": ", ".join(facts["capabilities"]),
        "sampling": facts["parameters"].replace("\n", ", "),
    }
    for name, value in lines.items():
        if value:
            print(f"{name:<18}{value}")


def pull(model: Name, url: Url = ADDRESS, api_key: ApiKey = None, cacert: CaCert = None) -> None:
    """Fetch a model from the hub into a server's models folder: OWNER/NAME, or OWNER/NAME:Q4_K_M for a GGUF file."""
    is_terminal = sys.stdout.isatty()
    last = ""
    for event in _lines(url, "/api/pull", api_key, {"model": model}, cacert):
        text = str(event["status"])
        if is_terminal and event.get("total"):
            text += f" {100 * event.get('completed', 0) // event['total']:3d} % of {size(event['total'])}"
        if text == last:
            continue
        same = is_terminal and last.split(" %")[0][:-4] == text.split(" %")[0][:-4]
        print(
            ("\r" if same else "\n" if last and is_terminal else "") + text, end="" if is_terminal else "\n", flush=True
        )
        last = text
    if is_terminal:
        print()


def rm(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...")],
    url: Url = ADDRESS,
    api_key: ApiKey = None,
    cacert: CaCert = None,
) -> None:
    """Delete models from a server's models folder."""
    for model in models:
        call("DELETE", url, "/api/delete", api_key, {"model": model}, cacert)
        print(f"deleted {model}")


def size(num_bytes: int) -> str:
    """Return a size in the largest unit that fits, such as 2.9 MB."""
    for unit, name in SIZES:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"


def call(
    method: str,
    url: str,
    path: str,
    api_key: str | None,
    body: dict[str, Any] | None = None,
    cacert: Path | None = None,
) -> Any:
    """Return the server's reply; None for an empty one. Raises `HeadraceError`."""
    text = "\n".join(_send(method, url, path, api_key, body, cacert))
    return json.loads(text) if text else None


def _lines(
    url: str, path: str, api_key: str | None, body: dict[str, Any], cacert: Path | None
) -> Iterator[dict[str, Any]]:
    """Yield the lines of a streamed reply. Raises `HeadraceError`, also for a line that is an error."""
    for line in _send("POST", url, path, api_key, body, cacert):
        event = json.loads(line)
        if "error" in event:
            raise HeadraceError(str(event["error"]))
        yield event


def _send(
    method: str, url: str, path: str, api_key: str | None, body: dict[str, Any] | None, cacert: Path | None
) -> Iterator[str]:
    import httpx

    address = address_of(url)
    try:
        with (
            client_of(address, cacert) as client,
            client.stream(method, address + path, json=body, headers=authorization(api_key)) as reply,
        ):
            if reply.status_code >= 400:
                reply.read()
                raise HeadraceError(reason(reply) or f"the server answered {reply.status_code}")
            yield from (line for line in reply.iter_lines() if line)
    except httpx.HTTPError as error:
        raise HeadraceError(f"no server at {url}: {error}; start one with headrace serve") from error


def _about(model: dict[str, Any]) -> str:
    details = model["details"]
    return " ".join(filter(None, (details["family"], details["parameter_size"], details["quantization_level"])))


def _age(date: str) -> str:
    seconds = max(0.0, (datetime.now(UTC) - _time(date)).total_seconds())
    unit, name = next((each for each in AGES if seconds >= each[0]), AGES[-1])
    number = int(seconds // unit)
    return f"{number} {name}{'' if number == 1 else 's'}"


def _until(model: dict[str, Any]) -> str:
    end = _time(model["expires_at"])
    if end.year == 9999:
        return "the server ends"
    return f"{math.ceil(max(0.0, (end - datetime.now(UTC)).total_seconds()))} s from now"


def _time(date: str) -> datetime:
    return datetime.fromisoformat(date.replace("Z", "+00:00"))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their heads, in columns."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        print("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
