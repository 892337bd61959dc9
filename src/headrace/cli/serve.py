"""`headrace serve`: the OpenAI-compatible server. Makes the two configs and hands them to `serve.app`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headrace.cli.options import build, options
from headrace.protocol.config import EngineConfig, ServerConfig


@options(EngineConfig, ServerConfig)
def serve(
    model: Annotated[str, typer.Argument(help="A directory, a hub id, or 'builtin'.")] = "builtin",
    **fields: Any,
) -> None:
    """Serve a model over HTTP, with OpenAI's API."""
    engine_config = build(EngineConfig, fields | {"model": model})
    server_config = build(ServerConfig, fields)
    # Bad values are refused above, before the server's libraries are loaded.
    from headrace.serve.app import serve as run

    run(engine_config, server_config)
