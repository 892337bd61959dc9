"""`headrace doctor`: prints the report of `headrace.doctor` and the verdicts of `cli.checkup`, as table or JSON."""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any

import typer


def doctor(
    model: Annotated[str, typer.Argument(help="Model to look for.")] = "builtin",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    with_limits: Annotated[
        bool, typer.Option("--limits", help="Measure the limits of memory and CPU; takes some 10 seconds.")
    ] = False,
    with_forms: Annotated[
        bool,
        typer.Option(
            "--forms",
            help="Load MODEL in several forms, and measure speed and loss of each; up to a minute for a small model.",
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="Address that a server will listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port that a server will listen on.", min=0, max=65535)] = 8000,
) -> None:
    """Show versions, CPU, memory, backends and model, and problems with them. Paste the output into a bug report.

    Exit status 1 if something does not work.
    """
    import msgspec

    from headrace.cli import checkup
    from headrace.doctor import examine, limits, show, show_limits

    report = examine(model)
    measured = limits() if with_limits else []
    of_forms = _forms(model) if with_forms else {}
    checks = checkup.check_all(report, host, port)
    if as_json:
        more: dict[str, Any] = {"limits": measured} if with_limits else {}
        more |= {"forms": of_forms} if with_forms else {}
        print(json.dumps(report | {"checks": msgspec.to_builtins(checks)} | more, indent=2))
    else:
        show(report)
        if measured:
            print()
            show_limits(measured)
        if of_forms:
            print()
            _show_forms(of_forms)
        else:
            print(f"\nspeed and loss of each form of the weights: headrace doctor {model} --forms")
        print()
        checkup.show(checks)
    if checkup.is_bad(checks):
        raise typer.Exit(1)


def _forms(model: str) -> dict[str, Any]:
    """Return the rows of the forms of a model, or the problem with it."""
    from headrace.cli import forms
    from headrace.engine.progress import progress_bar
    from headrace.protocol.errors import HeadraceError

    try:
        with progress_bar(f"forms of {model}", logger=logging.getLogger("headrace")) as show_progress:
            return {"rows": forms.measure(model, show_progress)}
    except HeadraceError as error:
        return {"problem": str(error)}


def _show_forms(measured: dict[str, Any]) -> None:
    from headrace.cli import forms

    if "rows" in measured:
        forms.show(measured["rows"])
    else:
        print(f"forms: {measured['problem']}")
