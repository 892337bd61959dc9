"""The section of docs/compatibility.md on clients, from bench/results/clients.json, which `python -m tests.clients`
writes. Called by `tests.programs.compatibility`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.clients.table import CLIENTS, FEATURES

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "clients.json"
HEAD = """
## Clients

Each client was installed into an environment of its own and tried against two live servers: one with the built-in
model, and one whose model answers by rule, for what a small model does not do. `make test-clients` runs the scripts of
[tests/clients](../tests/clients) again (at most 20 minutes, with the network) and writes this section from
[clients.json](../bench/results/clients.json). A number refers to the notes below; "no" is something that fails.

"""
CLOSING = """
What a column shows:

"""

Results = dict[str, Any]


def load() -> Results:
    """Return what the last run counted."""
    results: Results = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


def faults(results: Results) -> list[str]:
    """Return what is missing or has no reason: a client or a feature of the table without a cell, a cell that is not
    green and does not say why."""
    lines = []
    for client in CLIENTS:
        row = results["clients"].get(client.name)
        if row is None:
            lines.append(f"{client.name}: not run")
            continue
        for feature in FEATURES:
            cell = row["cells"].get(feature)
            if cell is None:
                lines.append(f"{client.name}, {feature}: not tried")
            elif cell["ok"] is not True and not cell["reason"].strip():
                lines.append(f"{client.name}, {feature}: no reason")
    names = {client.name for client in CLIENTS}
    return lines + [f"{name}: not in the table" for name in results["clients"] if name not in names]


def section(results: Results) -> str:
    """Return the section: the matrix, its notes, and the meaning of the columns."""
    features = list(FEATURES)
    text = HEAD + f"| client | version | {' | '.join(features)} |\n" + "|---" * (len(features) + 2) + "|\n"
    notes: dict[str, int] = {}
    for client in CLIENTS:
        row = results["clients"].get(client.name, {"version": "", "cells": {}})
        cells = [_cell(row["cells"].get(feature), notes) for feature in features]
        text += f"| {client.name} | {row['version']} | {' | '.join(cells)} |\n"
    text += "\n" + "".join(f"{number}. {note}\n" for note, number in notes.items())
    return text + CLOSING + "".join(f"- {feature}: {meaning}.\n" for feature, meaning in FEATURES.items())


def _cell(cell: dict[str, Any] | None, notes: dict[str, int]) -> str:
    if cell is None:
        return "not tried"
    if cell["ok"]:
        return "yes"
    number = notes.setdefault(cell["reason"].replace("|", "/"), len(notes) + 1)
    return f"- ({number})" if cell["ok"] is None else f"no ({number})"
