"""`headrace run-batch`: answers a file of requests in OpenAI's batch format, without a server and without HTTP.

Requests go through the code of /v1/batches, so the answers are the same. The output grows by whole lines, and requests
that it already answers are skipped: the same command resumes a run that was killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import build, options
from headrace.engine.progress import progress_bar
from headrace.protocol.config import EngineConfig, ServerConfig

if TYPE_CHECKING:
    from headrace.serve.storage.batch_file import Report

SOME_FAILED = 3
"""Exit status of a complete run whose output has lines with an error."""


# The server's settings that change an answer.
TEXT_SETTINGS = (
    "served_model_name",
    "chat_template",
    "default_chat_template_kwargs",
    "prefill_assistant",
    "generation_config",
    "override_generation_config",
    "tool_call_parser",
    "reasoning_parser",
    "enable_auto_tool_choice",
)


@options(EngineConfig, ServerConfig, skip=("model", *(set(ServerConfig.__struct_fields__) - set(TEXT_SETTINGS))))
def run_batch(
    input_path: Annotated[Path | None, typer.Argument(metavar="INPUT", help="A file of requests, one a line.")] = None,
    output_path: Annotated[Path | None, typer.Argument(metavar="OUTPUT", help="The file of answers.")] = None,
    *,
    input_file: Annotated[Path | None, typer.Option("-i", "--input-file", metavar="FILE", help="INPUT.")] = None,
    output_file: Annotated[Path | None, typer.Option("-o", "--output-file", metavar="FILE", help="OUTPUT.")] = None,
    model: Annotated[str, typer.Option(metavar="TEXT", help="A directory, a hub id, or 'builtin'.")] = "builtin",
    max_concurrency: Annotated[
        int | None, typer.Option(metavar="INT", min=1, help="Requests open at once; max_num_seqs if not given.")
    ] = None,
    **fields: Any,
) -> None:
    """Answer a file of requests (OpenAI's batch format). The same command resumes an interrupted run."""
    source = _one("INPUT", "-i", input_path, input_file)
    target = _one("OUTPUT", "-o", output_path, output_file)
    engine = build(EngineConfig, fields | {"model": model})
    server = build(ServerConfig, fields)
    from headrace.serve.storage import batch_file

    batch_file.check_paths(source, target)
    report = asyncio.run(_run(source, target, engine, server, max_concurrency or engine.max_num_seqs))
    print(
        f"{report.num_lines} lines: {report.num_known} answered before, {report.num_completed} answered now, "
        f"{report.num_failed} errors in {target}",
        file=sys.stderr,
    )
    if report.num_failed:
        raise typer.Exit(SOME_FAILED)


def _one(name: str, flag: str, argument: Path | None, option: Path | None) -> Path:
    paths = [path for path in (argument, option) if path is not None]
    if len(paths) != 1:
        raise typer.BadParameter(f"give {name} once, as an argument or by {flag}")
    return paths[0]


async def _run(source: Path, target: Path, engine: EngineConfig, server: ServerConfig, concurrency: int) -> Report:
    from headrace.engine.build import build_engine
    from headrace.engine.client import InprocClient
    from headrace.engine.library.model_settings import with_adapter
    from headrace.serve.apis.openai.storage import offline_answerer
    from headrace.serve.loading import ModelParts, RunningModel, default_params, load_text, served_adapters
    from headrace.serve.storage.batch_file import answer_file

    # Lines beyond the queue's bound wait here, and not in the engine.
    engine = with_adapter(engine)
    client = InprocClient(lambda: build_engine(engine), max_num_queued_reqs=2 * concurrency + 1)
    text = load_text(engine, server)
    parts = ModelParts(text.tokenizer, text.template, default_params(engine, server), engine.seed, notes=text.notes)
    model = RunningModel(client, server, engine.model, parts)
    model.served.adapters = served_adapters(engine)
    await client.start()
    try:
        model.begin()
        with progress_bar("Requests") as show:
            return await answer_file(source, target, offline_answerer(model), concurrency, show)
    finally:
        await client.close()
