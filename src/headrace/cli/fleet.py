"""`headrace fleet status` and `update`: the engines behind a running server, and new ones in their place.

Both talk to the server, by `GET /fleet` and `POST /fleet/update`. httpx is imported when a command runs.
"""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from headrace.cli.models import call, print_table
from headrace.cli.options import options
from headrace.cli.remote import ADDRESS, ApiKey, CaCert, Url
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError

POLL_S = 0.5
FIXED = (
    "model", "tokenizer", "revision", "device", "seed", "skip_tokenizer_init", "scheduling_policy", "record_schedule",
    "max_record_bytes",
)  # fmt: skip
"""Settings that an update leaves as they are. A copy of the list in `fleet.engines.update`, whose import takes a
second."""
COLUMNS = ("REPLICA", "STATE", "AGE", "OPEN", "KV CACHE", "HIT RATE", "MOVED", "RESTARTS", "FINGERPRINT")

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def root() -> None:
    """See and update the engines behind a running server."""


@app.command()
def status(
    url: Url = ADDRESS,
    api_key: ApiKey = None,
    cacert: CaCert = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's reply as JSON.")] = False,
) -> None:
    """Show the engines of a server, a row for each. MOVED: requests that came from, and went to, other replicas."""
    fleet = call("GET", url, "/fleet", api_key, cacert=cacert)
    if as_json:
        print(json.dumps(fleet, indent=1))
        return
    show(fleet)


@app.command()
@options(EngineConfig, skip=FIXED)
def update(
    ctx: typer.Context,
    url: Url = ADDRESS,
    api_key: ApiKey = None,
    cacert: CaCert = None,
    patience: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Time in which requests may end in an old engine before they go on in another one; 30 by default.",
        ),
    ] = None,
    **fields: Any,
) -> None:
    """Put new engines into the place of a server's, one after the other, while requests run.

    They read the model's files anew. Flags that are given hold for the new engines; for the others, those hold with
    which the server was started. Exit status 1 if a new engine did not start; those that were replaced by then stay.
    """
    settings = {name: value for name, value in fields.items() if is_given(ctx, name)}
    body = {"settings": plain(settings), "wait": False} | ({} if patience is None else {"patience": patience})
    fleet = call("POST", url, "/fleet/update", api_key, body, cacert)
    num = -1
    while True:
        progress = fleet["update"]
        if progress["num_replaced"] != num:
            num = progress["num_replaced"]
            print(f"{num} of {progress['num_replicas']} engines are replaced", flush=True)
        if progress["state"] != "running":
            break
        time.sleep(POLL_S)
        fleet = call("GET", url, "/fleet", api_key, cacert=cacert)
    if progress["state"] == "failed":
        raise HeadraceError(f"the update failed: {progress['error']}")
    print(f"done in {progress['seconds']:.1f} s\n")
    show(fleet)


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether a flag was on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as JSON has them."""
    import msgspec

    values: dict[str, Any] = msgspec.to_builtins(settings)
    return values


def show(fleet: dict[str, Any]) -> None:
    """Print the engines as a table, and lines about all of them."""
    rows = [row(replica) for replica in fleet["replicas"]]
    print_table(COLUMNS, rows)
    router = f"router {fleet['router']}" if fleet["router"] else "a single engine"
    print(f"\n{fleet['model']}: {router}, {fleet['num_queued']} requests queued, {fleet['num_moved']} moved so far")
    progress = fleet["update"]
    if progress is not None:
        flags = " ".join(f"{name}={json.dumps(value)}" for name, value in progress["settings"].items())
        about = f", with {flags}" if flags else ""
        why = f": {progress['error']}" if progress["error"] else ""
        num, total = progress["num_replaced"], progress["num_replicas"]
        print(f"update: {progress['state']}, {num} of {total} engines replaced{about}{why}")


def row(replica: dict[str, Any]) -> tuple[str, ...]:
    queries = replica["prefix_cache_queries"]
    return (
        str(replica["replica"]),
        replica["phase"],
        age(replica["age"]) if replica["phase"] in ("ready", "leaving") else "",
        str(replica["num_open"]),
        f"{100 * replica['kv_cache_usage']:.0f} %",
        f"{100 * replica['prefix_cache_hits'] / queries:.0f} %" if queries else "",
        f"{replica['num_moved_here']} in, {replica['num_moved_away']} out",
        str(replica["num_restarts"]),
        replica["fingerprint"][:12],
    )


def age(seconds: float) -> str:
    """Return a time in its two largest units, such as 3 h 20 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60)} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"
