"""Parts of replies that several APIs share, built from `RequestState`s: choices, log-probabilities, usage and timings.

Pure functions from state to plain dicts, used for whole replies and for chunks of a stream, so that the two agree.
Knows no HTTP and no engine.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.protocol.step import Request, TokenLogprob
from headrace.text.outputs import RequestState
from headrace.text.tokenizer import TokenBytes, Tokenizer

# JSON has no infinity. OpenAI's clients know this number as "as good as impossible".
LOWEST_LOGPROB = -9999.0


def event(body: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def clamp(logprob: float) -> float:
    """A log-probability that JSON can carry: NaN and minus infinity become `LOWEST_LOGPROB`."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """One token alone as text. A part of a character shows as its bytes, as OpenAI shows it, so that two such
    tokens stay two."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def usage(groups: Sequence[Sequence[RequestState]]) -> dict[str, Any]:
    """Counts over all prompts (each once, however many answers it has) and all answers."""
    num_prompt = sum(len(group[0].request.prompt_token_ids) for group in groups)
    num_completion = sum(len(state.token_ids) for group in groups for state in group)
    num_cached = sum(group[0].num_cached_tokens for group in groups)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def timings(groups: Sequence[Sequence[RequestState]]) -> dict[str, Any]:
    """llama-server's `timings`, over the whole call: from the first answer's start to the last one's end.

    `prompt_ms` ends with the first token, which `predicted_n` counts all the same.
    """
    states = [state for group in groups for state in group]
    counts = usage(groups)
    cache_n = counts["prompt_tokens_details"]["cached_tokens"]
    prompt_n, predicted_n = counts["prompt_tokens"] - cache_n, counts["completion_tokens"]
    starts = [s.metrics.first_scheduled_time for s in states if s.metrics.first_scheduled_time is not None]
    firsts = [s.metrics.first_token_time for s in states if s.metrics.first_token_time is not None]
    lasts = [s.metrics.last_token_time for s in states if s.metrics.last_token_time is not None]
    prompt_ms = 1e3 * (min(firsts) - min(starts)) if starts and firsts else 0.0
    predicted_ms = 1e3 * (max(lasts) - min(firsts)) if firsts and lasts else 0.0
    return {
        "cache_n": cache_n,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n else 0.0,
        "prompt_per_second": 1e3 * prompt_n / prompt_ms if prompt_ms else 0.0,
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / predicted_n if predicted_n else 0.0,
        "predicted_per_second": 1e3 * predicted_n / predicted_ms if predicted_ms else 0.0,
    }


def chat_logprobs(tokenizer: Tokenizer | None, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token_id)
        raw = text.encode() if tokenizer is None else tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": clamp(logprob), "bytes": list(raw)}

    return {
        "content": [
            one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*alternative) for alternative in entry.top]}
            for entry in entries
        ]
    }


class CompletionLogprobs:
    """`choices[].logprobs` of a text completion, piece by piece.

    It remembers where in the text it is, in characters: a token that the text leaves out is no longer than nothing,
    and a token that is part of a character counts as none until it is whole.

    Args:
        echoed: the prompt as the reply's text begins with it, or None if it does not: then `add` is told only of
            generated tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, num_top: int, request: Request, echoed: str | None) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._echoed = echoed or ""
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        if tokenizer is not None:
            params, before = request.params, request.prompt_token_ids if echoed is None else []
            self._reader = TokenBytes(tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens)
            for token_id in before[-4:]:
                self._utf8.decode(self._reader.read(token_id))
            self._reader.first = self._reader.first and not before

    def add(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """The next tokens; an entry of None is the prompt's first token, which nothing came before."""
        tokens = [token_text(self._tokenizer, token_id) for token_id in token_ids]
        offsets = []
        for token_id, token in zip(token_ids, tokens, strict=True):
            offsets.append(self._offset)
            self._offset += self._width(token_id, token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else clamp(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _width(self, token_id: int, token: str) -> int:
        if self._tokenizer is None:
            return len(token)
        data = self._reader.read(token_id)
        if not data and self._echoed.startswith(token, self._offset):
            return len(token)  # a special token that the client has spelt in the prompt
        return len(self._utf8.decode(data))

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        # OpenAI's shape is keyed by text, so of two tokens with the same text the likelier one stays.
        top: dict[str, float] = {}
        wanted = (
            [(entry.token_id, entry.logprob)] if self._num_top == 0 else [*entry.top, (entry.token_id, entry.logprob)]
        )
        for token_id, logprob in wanted:
            top.setdefault(token_text(self._tokenizer, token_id), clamp(logprob))
        return top


def prompt_logprobs(tokenizer: Tokenizer | None, state: RequestState) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: for each token of the prompt, ids to entries; None for the first."""
    entries = state.prompt_entries()
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": clamp(x.logprob), "rank": x.rank, "decoded_token": x.decoded_token}
            for token_id, x in entry.items()
        }
        for entry in entries
    ]
