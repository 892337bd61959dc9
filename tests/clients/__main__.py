"""`python -m tests.clients [--only NAME ...] [--fresh]`: tries every client of the table.

Environments lie in build/clients and are made once; `--fresh` makes them again, with the newest versions. Clients run
one after the other against two servers of this checkout. What came of it is kept in bench/results/clients.json, and
docs/compatibility.md is written from that. Exit status 1: a cell is red.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.record import commit
from bench.tied import tied
from tests.clients import page
from tests.clients.table import CLIENTS, FEATURES, Client
from tests.programs import compatibility
from tests.support.serving import free_port, serve

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "clients"
SCRIPTS = Path(__file__).parent / "scripts"
MAX_INSTALL_S = 300
# Environments of more megabytes are removed after their run.
MAX_KEPT_MB = 1_000


class InstallError(Exception):
    """A client does not install here."""


def environment(client: Client, fresh: bool) -> Path:
    """Return the folder of the client's own environment, which is made if need be. Raises `InstallError`."""
    folder = CACHE / client.script.partition(".")[0]
    if client.kind == "headrace" or ((folder / "complete").exists() and not fresh):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.kind == "js":
        _install(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *client.packages], folder)
    else:
        uv = CACHE / "uv" / "bin" / "uv"
        if not uv.exists():
            _install([sys.executable, "-m", "venv", str(CACHE / "uv")], CACHE)
            _install([str(CACHE / "uv" / "bin" / "python"), "-m", "pip", "install", "--quiet", "uv"], CACHE)
        _install([str(uv), "venv", "--quiet", "--python", sys.executable, "."], folder)
        constraints = ["--constraint", str(Path(__file__).parent / "constraints.txt")]
        _install([str(uv), "pip", "install", "--quiet", "--python", ".", *constraints, *client.packages], folder)
    (folder / "complete").touch()
    return folder


def _install(command: list[str], folder: Path) -> None:
    variables = dict(os.environ)
    for pip, uv in (("PIP_FIND_LINKS", "UV_FIND_LINKS"), ("PIP_INDEX_URL", "UV_DEFAULT_INDEX")):
        if pip in variables:
            variables.setdefault(uv, variables[pip])
    try:
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=MAX_INSTALL_S)
    except (subprocess.TimeoutExpired, FileNotFoundError) as error:
        raise InstallError(f"it does not install here: {error}") from None
    if done.returncode:
        raise InstallError(f"it does not install here: {' '.join(done.stderr.split())[-300:]}")


def version(client: Client, folder: Path) -> str:
    """Return the installed version of the client's first package."""
    if client.kind == "headrace":
        return ""
    package = client.packages[0].partition("[")[0]
    if client.kind == "js":
        described = json.loads((folder / "node_modules" / package / "package.json").read_text(encoding="utf-8"))
        return str(described["version"])
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    words = [str(folder / "bin" / "python"), "-c", code, package]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def attempt(client: Client, folder: Path, variables: dict[str, str]) -> dict[str, Any]:
    """Run the client's script and return its cells. Features that it does not report get the end of its errors."""
    script = SCRIPTS / client.script
    if client.script.endswith(".mjs"):
        # Modules of JavaScript are looked up from the script's own folder on.
        for path in SCRIPTS.glob("*.mjs"):
            shutil.copy(path, folder)
        words = ["node", client.script]
    else:
        python = sys.executable if client.kind != "python" else str(folder / "bin" / "python")
        words = [python, str(script)]
    folder.mkdir(parents=True, exist_ok=True)
    variables = os.environ | variables | {"CLIENT_SECONDS": str(client.feature_seconds), "CLIENT_FOLDER": str(folder)}
    variables["CLIENT_FEATURES"] = ";".join(FEATURES)
    with open(folder / "output.txt", "w+", encoding="utf-8") as output, open(folder / "errors.txt", "w+") as errors:
        try:
            process = subprocess.run(
                tied(words), cwd=folder, env=variables, stdout=output, stderr=errors, timeout=client.seconds
            )
            ending = f"the script ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            ending = f"the script was stopped after {client.seconds} s"
        output.seek(0)
        cells = {line["feature"]: line for line in map(_parse, output) if line}
        errors.seek(0)
        last = " ".join(errors.read().split())[-200:]
    blank = {"ok": False, "reason": f"{ending}: {last}"}
    return {feature: _without(cells.get(feature, blank), "feature") for feature in FEATURES}


def _parse(line: str) -> dict[str, Any] | None:
    if not line.startswith('{"feature"'):
        return None
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def _without(cell: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in cell.items() if key != name}


@contextmanager
def scripted(key: str) -> Iterator[str]:
    """The address of a server whose model answers by rule."""
    port = free_port()
    words = [sys.executable, "-m", "tests.clients.scripted", "--port", str(port), "--api-key", key]
    process = subprocess.Popen(tied(words), cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 60
        while not _is_ready(url, key):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the scripted server does not start")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(url: str, key: str) -> bool:
    request = urllib.request.Request(url + "/health/ready", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def megabytes(folder: Path) -> float:
    """Return the size of a folder's files."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def keep(rows: dict[str, Any], minutes: float) -> None:
    """Write the rows in the table's order into clients.json: after each client, so that an end loses no results."""
    ordered = {client.name: rows[client.name] for client in CLIENTS if client.name in rows}
    record = {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "minutes": round(minutes, 1), "clients": ordered}
    page.RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients")
    parser.add_argument("--only", nargs="+", default=[], help="names of clients; the others' cells are kept")
    parser.add_argument("--fresh", action="store_true", help="make the environments again")
    options = parser.parse_args()
    clients = [client for client in CLIENTS if not options.only or client.name in options.only]
    if unknown := set(options.only) - {client.name for client in clients}:
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    CACHE.mkdir(parents=True, exist_ok=True)
    results = page.load() if options.only and page.RESULTS.exists() else {"clients": {}}
    key, start = secrets.token_hex(8), time.monotonic()
    with serve("builtin", "--any-model-name") as server, scripted(key) as scripted_url:
        variables = {"CLIENT_URL": server.url, "CLIENT_SCRIPTED_URL": scripted_url, "CLIENT_KEY": key}
        for client in clients:
            begin = time.monotonic()
            try:
                folder = environment(client, options.fresh)
                row = {"version": version(client, folder), "cells": attempt(client, folder, variables)}
            except InstallError as error:
                cell = {"ok": None, "reason": str(error)}
                row = {"version": "", "cells": dict.fromkeys(FEATURES, cell)}
            else:
                if folder.exists() and megabytes(folder) > MAX_KEPT_MB:
                    shutil.rmtree(folder)
            results["clients"][client.name] = row
            minutes = results.get("minutes", 0.0) if options.only else (time.monotonic() - start) / 60
            keep(results["clients"], minutes)
            red = [feature for feature, cell in row["cells"].items() if cell["ok"] is False]
            print(f"{client.name} {row['version']}: {time.monotonic() - begin:.0f} s", *red, sep="\n  no: ", flush=True)
    rows = results["clients"]
    compatibility.write_kept(ROOT / "docs" / "compatibility.md")
    return 1 if any(cell["ok"] is False for row in rows.values() for cell in row["cells"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
