"""`headrace doctor`: prints what `headrace.doctor` finds out, as a table or as JSON."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def doctor(
    model: Annotated[str, typer.Argument(help="Model to look for.")] = "builtin",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, CPU, memory, backends and model: what to paste into a bug report."""
    from headrace.doctor import examine, show

    report = examine(model)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
