"""`headrace lab`: small experiments on the real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NAMES = "cache, lengths, prefix, paging, batching, rounding, precision, experts, sampling, speculation"


def lab(
    name: Annotated[str, typer.Argument(help=f"One of {NAMES}.")],
    model: Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub id, or 'builtin'.")] = "builtin",
    small: Annotated[bool, typer.Option("--small", help="The size of the tests: some seconds.")] = False,
    plot: Annotated[Path | None, typer.Option(help="File for a picture (SVG or PNG); needs matplotlib.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run an experiment: what is measured, what textbooks print wrongly about it, and the right figure."""
    import msgspec

    from headrace.labs import base, catalogue

    result = catalogue.run(name, model, small)
    if plot is not None:
        base.plot(result, plot)
    print(msgspec.json.encode(result).decode() if as_json else base.report_of(result))
