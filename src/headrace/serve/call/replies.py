"""Structs and functions that the replies of several APIs share: usage, timings and log-probabilities.

They are built from `RequestState`s, for whole replies and for chunks of a stream alike, so that the two agree; the
OpenAPI document is made from the same structs. A field whose type has `UnsetType` is left out of the JSON where it is
`UNSET`. Knows no HTTP, no engine and no API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from headrace.protocol.step import TokenLogprob
from headrace.serve.call.parsing import WarningLines
from headrace.text.outputs import RequestState
from headrace.text.tokenizer import Tokenizer

# JSON has no infinity. OpenAI's API has this number for "next to impossible".
LOWEST_LOGPROB = -9999.0


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(msgspec.Struct, kw_only=True):
    """Milliseconds and tokens, as llama-server has them."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class PromptProgress(msgspec.Struct, kw_only=True):
    """The progress of a prompt's computation, as llama-server has it: `processed` of `total` tokens are computed,
    `cache` of them were in the prefix cache; `time_ms` since the first began."""

    total: int
    cache: int
    processed: int
    time_ms: int


FollowPrompt = Callable[[str, Callable[[int, int, int, float], None]], Callable[[], object]]
"""Calls a function with the numbers of `PromptProgress` as a request's prompt begins, and after each step that computed
a part of it. Returns a function that ends the calls."""


class TopLogprob(msgspec.Struct, kw_only=True, gc=False):
    """One alternative. A reply may have a million of them, so the garbage collector does not track them."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatTokenLogprob(TopLogprob, kw_only=True, gc=False):
    top_logprobs: tuple[TopLogprob, ...]


class TokenPiece(msgspec.Struct, kw_only=True):
    """A token and its text; `piece` is a list of bytes where the token is a part of a character."""

    id: int
    piece: str | list[int]


class Tokenized(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: Sequence[int | TokenPiece]
    token_strs: list[str] | UnsetType = UNSET
    warnings: WarningLines = UNSET


def clamp(logprob: float) -> float:
    """Return a log-probability that JSON can carry: NaN and minus infinity become `LOWEST_LOGPROB`."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """Return one token alone as text. A part of a character is shown by its bytes, as in OpenAI's API, so that two such
    tokens differ."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def usage(groups: Sequence[Sequence[RequestState]]) -> Usage:
    """Count the tokens of all prompts (each once, however many answers it has) and of all answers."""
    num_prompt = sum(len(group[0].request.prompt_token_ids) for group in groups)
    num_completion = sum(len(state.token_ids) for group in groups for state in group)
    num_cached = sum(group[0].num_cached_tokens for group in groups)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
    )


def timings(groups: Sequence[Sequence[RequestState]]) -> Timings:
    """Measure the whole call, from the first answer's start to the last one's end.

    `prompt_ms` ends with the first token, which `predicted_n` counts too; the rates count the tokens after it.
    """
    states = [state for group in groups for state in group]
    counts = usage(groups)
    cache_n = counts.prompt_tokens_details.cached_tokens
    prompt_n, predicted_n = counts.prompt_tokens - cache_n, counts.completion_tokens
    starts = [s.metrics.first_scheduled_time for s in states if s.metrics.first_scheduled_time is not None]
    firsts = [s.metrics.first_token_time for s in states if s.metrics.first_token_time is not None]
    lasts = [s.metrics.last_token_time for s in states if s.metrics.last_token_time is not None]
    prompt_ms = 1e3 * (min(firsts) - min(starts)) if starts and firsts else 0.0
    predicted_ms = 1e3 * (max(lasts) - min(firsts)) if firsts and lasts else 0.0
    num_timed = predicted_n - len(firsts) if predicted_ms else 0
    return Timings(
        cache_n=cache_n,
        prompt_n=prompt_n,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=prompt_ms / prompt_n if prompt_n else 0.0,
        prompt_per_second=1e3 * prompt_n / prompt_ms if prompt_ms else 0.0,
        predicted_n=predicted_n,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=predicted_ms / num_timed if num_timed else 0.0,
        predicted_per_second=1e3 * num_timed / predicted_ms if num_timed else 0.0,
    )


def prompt_timings(progress: PromptProgress, prompt_ms: float) -> Timings:
    """Return the times of a call whose prompt is being computed."""
    prompt_n = progress.processed - progress.cache
    return Timings(
        cache_n=progress.cache,
        prompt_n=prompt_n,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=prompt_ms / prompt_n if prompt_n else 0.0,
        prompt_per_second=1e3 * prompt_n / prompt_ms if prompt_ms else 0.0,
        predicted_n=0,
        predicted_ms=0.0,
        predicted_per_token_ms=0.0,
        predicted_per_second=0.0,
    )


def chat_logprobs(tokenizer: Tokenizer | None, entries: Sequence[TokenLogprob]) -> list[ChatTokenLogprob]:
    """Return `choices[].logprobs.content` of a chat completion."""

    def spelled(token_id: int) -> tuple[str, tuple[int, ...]]:
        text = token_text(tokenizer, token_id)
        return text, tuple(text.encode() if tokenizer is None else tokenizer.token_bytes(token_id))

    def top(token_id: int, logprob: float) -> TopLogprob:
        text, data = spelled(token_id)
        return TopLogprob(token=text, logprob=clamp(logprob), bytes=data)

    rows = []
    for entry in entries:
        alternatives = tuple(top(token_id, logprob) for token_id, logprob in entry.top)
        text, data = spelled(entry.token_id)
        rows.append(ChatTokenLogprob(token=text, logprob=clamp(entry.logprob), bytes=data, top_logprobs=alternatives))
    return rows
