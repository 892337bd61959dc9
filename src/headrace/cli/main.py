"""Entry of the `headrace` command: its subcommands, and how errors are printed.

A deliberate error (`HeadraceError`) is one line on stderr and exit status 1, or 2 where a value on the command line
is at fault; an error of a disk that is full or fails is one line too. Anything else is a bug and keeps its traceback.
Called by `headrace.__main__`.
"""

from __future__ import annotations

import errno
import sys
from typing import Annotated

import typer

import headrace
from headrace.cli import (
    chat,
    deploy,
    doctor,
    engine,
    explain,
    fleet,
    generate,
    lab,
    launch,
    models,
    plan,
    quantize,
    rank,
    replay,
    run_batch,
    serve,
    simulate,
    top,
    verify,
)
from headrace.cli.bench import commands as bench
from headrace.protocol.errors import HeadraceError, RequestError

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)

app = typer.Typer(
    name="headrace",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=serve.ServeCommand)(serve.serve)
app.command()(engine.engine)
app.command()(rank.rank)
app.command()(deploy.deploy)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(launch.launch)
app.command(name="list")(models.list_models)
app.command()(models.ps)
app.command()(models.show)
app.command()(models.pull)
app.command()(models.rm)
app.command()(run_batch.run_batch)
app.command()(quantize.quantize)
app.command()(verify.verify)
app.command()(replay.replay)
app.command()(explain.explain)
app.command()(top.top)
app.command()(plan.plan)
app.command()(simulate.simulate)
app.command()(lab.lab)
app.command()(doctor.doctor)
app.add_typer(fleet.app, name="fleet")
app.add_typer(bench.app, name="bench")


def _version(is_set: bool) -> None:
    if is_set:
        print(f"headrace {headrace.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """An LLM inference and serving engine: fast on a CPU, bit-exact whatever the load, small enough to read.

    To begin: `headrace serve` serves the built-in model on http://127.0.0.1:8000, and `headrace serve path/to/model`
    another one: a directory, a .gguf file, or a hub id. `headrace doctor` checks the machine.
    """


def main() -> None:
    """Run the command line and leave with its exit status."""
    try:
        app()
    except HeadraceError as error:
        print(f"headrace: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, RequestError) else 1) from None
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("headrace: this needs torch, which is not installed: pip install 'headrace[torch]'", file=sys.stderr)
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        print(f"headrace: {error}", file=sys.stderr)
        raise SystemExit(1) from None
