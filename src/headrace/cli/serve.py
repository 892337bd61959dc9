"""`headrace serve`: the OpenAI-compatible server. Makes the two configs and hands them to `serve.app`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from headrace import builtin
from headrace.cli.engine import FrontFlags, RankFlags, remote_client, rendezvous_of
from headrace.cli.options import build, options
from headrace.other_engines import translate
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.serve.reach import Reach


class ServeCommand(TyperCommand):
    """A command that takes the flags of vLLM and llama-server too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ours = {
            name: not option.is_flag
            for option in self.params
            if isinstance(option, TyperOption)
            for name in (*option.opts, *option.secondary_opts)
        }
        words, ctx.meta["notes"] = translate(args, ours)
        return super().parse_args(ctx, words)


@options(EngineConfig, ServerConfig, Reach, FrontFlags, RankFlags)
def serve(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="A directory, a hub id, or 'builtin' (the default, unless --models-dir is set)."),
    ] = None,
    **fields: Any,
) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    Exit status: 0 after a signal and the drain that it begins, 1 if the server could not start (no such model, a port
    in use) or its engine died too often, 2 for a flag or a value at fault, 130 (Ctrl-C) or 143 (SIGTERM) if a further
    signal cut the drain.
    """
    name = EngineConfig().model if model is None else model
    places: dict[str, Any] = {"model": name, "rendezvous": rendezvous_of(fields)}
    engine_config = build(EngineConfig, fields | places)
    server_config, reach = build(ServerConfig, fields), build(Reach, fields)
    make_client = remote_client(engine_config, server_config, build(FrontFlags, fields))
    # Bad values are refused above, before the server's libraries are loaded.
    from headrace.serve.app import serve as run

    has_model = model is not None or server_config.models_dir is None
    is_builtin = has_model and engine_config.model == "builtin"
    notes = [f"{builtin.ABOUT}; give another: headrace serve MODEL"] if is_builtin else []
    remote = {} if make_client is None else {"make_client": make_client}
    run(engine_config, server_config, [*ctx.meta["notes"], *notes], has_model, reach=reach, **remote)
