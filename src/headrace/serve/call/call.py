"""`Call`: what a request asks of the model, whichever API it came by; typed, with nothing of HTTP or JSON.

The request module of each API builds a `ChatCall` or a `TextCall` from its own JSON, `serve.call.service` answers it,
and answers read from it what to tell. An API that has other names for the engine's fields says so in `spelling`, and
errors and warnings about them use its names.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import RequestError
from headrace.serve.call.parsing import Warnings
from headrace.serve.call.schema import StreamOptions
from headrace.text.templates import ChatMessage
from headrace.text.tools.choice import ToolUse


class Call(msgspec.Struct, kw_only=True):
    """What chats and text completions have in common.

    `sampling` holds the fields of `SamplingParams` that the request gives; for others the model's own defaults hold.
    `form` is the form of the answer. `add_special_tokens` None: where a prompt usually has them. `timeout` is in
    seconds from `arrival_time`, which is monotonic. `spelling` maps names of the engine's fields to those of the
    request.
    """

    model: str | None = None
    sampling: dict[str, Any] = {}
    form: StructuredOutputs | None = None
    beam: BeamSearchParams | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    timeout: float | None = None
    cache_salt: str = ""
    request_id: str | None = None
    warnings: Warnings = msgspec.field(default_factory=Warnings)
    spelling: Mapping[str, str] = {}
    arrival_time: float = msgspec.field(default_factory=time.monotonic)

    @property
    def logprobs(self) -> int | None:
        """Alternatives to tell of at each token; None: no log-probabilities."""
        return self.sampling.get("logprobs")

    @property
    def prompt_logprobs(self) -> int | None:
        """The same for the prompt."""
        return self.sampling.get("prompt_logprobs")

    def warn(self, field: str, why: str) -> None:
        """Note that `field`, the engine's name, is given and does nothing."""
        self.warnings.add(spell(field, self.spelling), why)


class TextCall(Call, kw_only=True):
    """Texts, or lists of token ids, to be gone on with. `fills_context`: without max_tokens an answer may be as long
    as the context has room after the longest prompt."""

    prompts: list[str | list[int]]
    echo: bool = False
    fills_context: bool = False


class ChatCall(Call, kw_only=True):
    """A conversation to be gone on with. `template_variables` are further variables of the chat template.
    `add_generation_prompt` None: unless the final message is continued."""

    messages: list[ChatMessage]
    tools: ToolUse = msgspec.field(default_factory=lambda: ToolUse.of(None, None, True))
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    template_variables: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


def spell(field: str, spelling: Mapping[str, str]) -> str:
    """Return the name that the request has for a field of the engine's, or for the whole that the field is in."""
    whole = field.partition(".")[0]
    name = spelling.get(field) or spelling.get(whole, whole)
    return field if name == whole else name


@contextlib.contextmanager
def spelled(spelling: Mapping[str, str]) -> Iterator[None]:
    """In the block, a `RequestError` about a field of the engine's is raised under the name of the request's field."""
    try:
        yield
    except RequestError as error:
        name = spell(error.field, spelling)
        if name == error.field:
            raise
        raise error.renamed(name) from error
