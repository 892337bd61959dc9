"""`headrace generate`: one prompt, one answer, without a server. Streams text, or prints one JSON object."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headrace.cli.options import options
from headrace.config import EngineConfig
from headrace.sampling.params import SamplingParams

SAMPLING = (
    "max_tokens temperature top_p top_k min_p seed min_tokens ignore_eos stop stop_token_ids logprobs "
    "prompt_logprobs include_stop_str_in_output skip_special_tokens"
).split()


@options(SamplingParams, EngineConfig, only=tuple(SAMPLING), skip=("seed_of_engine",))
def generate(
    model: Annotated[str, typer.Argument(help="A directory, a hub id, or 'builtin'.")] = "builtin",
    **fields: Any,
) -> None:
    """Complete one prompt without a server."""
