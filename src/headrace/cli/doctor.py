"""`headrace doctor`: prints what `headrace.doctor` finds out, as a table or as JSON."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def doctor(
    model: Annotated[str, typer.Argument(help="Model to look for.")] = "builtin",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    with_limits: Annotated[
        bool, typer.Option("--limits", help="Measure what memory and CPU can do at most; takes some 10 seconds.")
    ] = False,
) -> None:
    """Show versions, CPU, memory, backends and model: what to paste into a bug report."""
    from headrace.doctor import examine, limits, show, show_limits

    report = examine(model)
    measured = limits() if with_limits else []
    if as_json:
        print(json.dumps(report | {"limits": measured} if with_limits else report, indent=2))
    else:
        show(report)
        if measured:
            print()
            show_limits(measured)
