"""`python -m headrace.cli.reference DIRECTORY` writes flags.md and limits.md, from the command line itself and from the
table of bounds. A test fails when the files in docs/ are not what this writes."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from headrace import env
from headrace.cli.main import app
from headrace.protocol.bounds import BOUNDS, MAX_INT, Bound


def commands(command: Any = None, path: str = "headrace") -> Iterator[tuple[str, Any]]:
    """(words on the command line, command) of every command that does something, in the order of `--help`."""
    command = command or typer.main.get_command(app)
    children = getattr(command, "commands", {})
    if not children:
        yield path, command
    for name, child in children.items():
        yield from commands(child, f"{path} {name}")


def flags(command: Any) -> list[tuple[str, str, str]]:
    """(names, default, help) of each option of a command but --help."""
    rows = []
    for parameter in command.params:
        if parameter.param_type_name != "option":
            continue
        names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
        default = parameter.default
        if default is None or default == () or default == []:
            text = ""
        elif isinstance(default, bool):
            text = "on" if default else "off"
        else:
            text = f"`{default}`"
        rows.append((names, text, parameter.help or ""))
    return rows


def flags_page() -> str:
    lines = [
        "# Flags",
        "",
        "Written by `make docs` from the command line itself; a test fails when this page is stale.",
        "Whole numbers may be written for people: `32k` is 32,000 and `32K` is 32,768.",
    ]
    for path, command in commands():
        arguments = [p for p in command.params if p.param_type_name == "argument" and not p.hidden]
        words = "".join(f" [{p.name.upper()}]" if not p.required else f" {p.name.upper()}" for p in arguments)
        lines += ["", f"## `{path}{words}`", "", inspect.cleandoc(command.help or ""), ""]
        lines += ["| flag | default | meaning |", "|---|---|---|"]
        lines += [f"| {names} | {default} | {text} |" for names, default, text in flags(command)]
    lines += ["", "## Environment", "", "| variable | meaning |", "|---|---|"]
    for _, function in inspect.getmembers(env, inspect.isfunction):
        name, _, text = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0].partition(": ")
        lines.append(f"| `{name}` | {' '.join(text.split())} |")
    lines.append("| `HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE` | read by `huggingface_hub` when a model is fetched |")
    return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    if value is None:
        return ""
    if value == MAX_INT:
        return "2^63 - 1"
    if float(value).is_integer() and math.log2(abs(value) or 1).is_integer() and abs(value) >= 2**20:
        return f"{'-' if value < 0 else ''}2^{int(math.log2(abs(value)))}"
    if value == 2**31 - 1:
        return "2^31 - 1"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def limits_page() -> str:
    lines = [
        "# Limits",
        "",
        "Every number and size that a request can carry, from `headrace/protocol/bounds.py`, by which the server and",
        "the engine check it. A value outside its range is refused with HTTP 400, naming field, value and range.",
        "Written by `make docs`; a test fails when this page is stale.",
        "",
    ]
    for title, kinds in (("Values", ("int", "float")), ("Sizes", ("size",))):
        lines += [f"## {title}", "", "| field | kind | from | to | default | meaning |", "|---|---|---|---|---|---|"]
        lines += [row(bound) for bound in BOUNDS.values() if bound.kind in kinds]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def row(bound: Bound) -> str:
    cells = (f"`{bound.name}`", bound.kind, number(bound.low), number(bound.high), number(bound.default), bound.doc)
    return "| " + " | ".join(cells) + " |"


PAGES = {"flags.md": flags_page, "limits.md": limits_page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(sys.argv[1]) / name).write_text(page(), encoding="utf-8")
