"""`headrace doctor`: prints the report of `headrace.doctor` and the verdicts of `cli.checkup`, as table or JSON."""

from __future__ import annotations

import json
import logging
from typing import Annotated

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

    from headrace.cli import checkup, forms
    from headrace.doctor import examine, limits, show, show_limits
    from headrace.engine.progress import progress_bar

    report = examine(model)
    measured = limits() if with_limits else []
    of_forms = []
    if with_forms:
        with progress_bar(f"forms of {model}", logger=logging.getLogger("headrace")) as show_progress:
            of_forms = forms.measure(model, show_progress)
    checks = checkup.check_all(report, host, port)
    if as_json:
        more = {"limits": measured} if with_limits else {}
        more |= {"forms": of_forms} if with_forms else {}
        print(json.dumps(report | {"checks": msgspec.to_builtins(checks)} | more, indent=2))
    else:
        show(report)
        if measured:
            print()
            show_limits(measured)
        if of_forms:
            print()
            forms.show(of_forms)
        print()
        checkup.show(checks)
    if checkup.is_bad(checks):
        raise typer.Exit(1)
