"""From a caller's prompt and parameters to complete `Request`s: ids checked, seed drawn, `n` answers fanned out.

Pure functions of their arguments, used alike by `LLM`, `AsyncLLM` and the HTTP server, so that the same call means
the same request everywhere. Knows the tokenizer; knows no engine beyond `EngineInfo`, and no asyncio.
"""

from __future__ import annotations

import random
import secrets
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.protocol import bounds
from headrace.protocol.errors import ContextLengthError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import EngineInfo, Pooling, Request
from headrace.text.tokenizer import Tokenizer
from headrace.text.words import THINK, with_token_ids

# Kept below 2**53 with room for n, so that JSON readers with doubles can send a told seed back.
SEED_LIMIT = 2**53 - 2**16

Prompt = str | Sequence[int] | dict[str, Any]


def draw_seed() -> int:
    return secrets.randbelow(SEED_LIMIT)


def seed_source(seed: int | None) -> Callable[[], int]:
    """Where requests without a seed get theirs: fresh for None, else a sequence that `seed` alone decides."""
    if seed is None:
        return draw_seed
    noise = random.Random(seed)
    return lambda: noise.randrange(SEED_LIMIT)


def new_request_id() -> str:
    """Fresh and unguessable, whatever id the client has chosen (S-25)."""
    return str(uuid.uuid4())


def prompt_size(prompt: Prompt) -> int:
    """Characters or ids of a prompt in any of its forms; 0 for what is no prompt."""
    if isinstance(prompt, dict):
        return max((len(given) for given in prompt.values() if isinstance(given, Sequence)), default=0)
    return len(prompt) if isinstance(prompt, Sequence) else 0


def prompt_ids(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    info: EngineInfo,
    *,
    add_special_tokens: bool = True,
    truncate_prompt_tokens: int | None = None,
) -> tuple[str | None, list[int]]:
    """Text (None for a prompt of ids) and token ids of `prompt`: a text, ids, or vLLM's dict form of either.

    A dict with both is the ids, and the text that they came from. `truncate_prompt_tokens` keeps that many of the last
    ids; -1 means as many as fit. The text of what was cut is None. Raises `RequestError`.
    """
    text: str | None = None
    given: Any
    if isinstance(prompt, dict):
        known = [name for name in ("prompt_token_ids", "prompt") if name in prompt]
        if not known:
            raise RequestError("prompt", sorted(prompt), "a dict with 'prompt' or 'prompt_token_ids'")
        given = prompt[known[0]]
        if known[0] == "prompt_token_ids":
            text = prompt.get("prompt")
            if isinstance(given, str):
                raise RequestError("prompt_token_ids", given, "a list of token ids")
    else:
        given = prompt
    if isinstance(given, str):
        bounds.check("text", given, "prompt")
        if tokenizer is None:
            raise RequestError("prompt", given, "token ids, for the engine runs without a tokenizer")
        text = given
        token_ids = tokenizer.encode(given, add_special_tokens=add_special_tokens)
    else:
        if not isinstance(given, Sequence) or isinstance(given, bytes):
            raise RequestError("prompt", given, "a text or a list of token ids")
        token_ids = list(given)
        for token_id in token_ids:
            bounds.check("token_id", token_id, "prompt")
    if truncate_prompt_tokens is not None:
        keep = info.max_model_len - 1 if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        if not keep:
            raise RequestError("truncate_prompt_tokens", keep, "at least 1, for no prompt is empty, or -1")
        if keep < len(token_ids):
            text, token_ids = None, token_ids[-keep:]
    if not token_ids:
        raise RequestError("prompt", given, "at least one token long")
    if len(token_ids) >= info.max_model_len:
        raise ContextLengthError("prompt", len(token_ids), f"at most {info.max_model_len - 1} tokens long")
    return text, token_ids


def make_requests(
    token_ids: list[int],
    params: SamplingParams,
    info: EngineInfo,
    *,
    priority: int = 0,
    cache_salt: str = "",
    draw: Callable[[], int] = draw_seed,
    pooling: Pooling = "",
    tokenizer: Tokenizer | None = None,
    marks: tuple[str, str] = THINK,
) -> list[Request]:
    """The `n` requests that answer one prompt: answer i has seed + i, and none depends on the others.

    With `best_of` they are as many, and tell of log-probabilities, so that `outputs.best` can choose. Fills in the
    seed (drawn if none is given), max_tokens (None is the rest of the context), and token ids for the texts in
    `params`; `marks` are those of the model's reasoning. Raises `RequestError`.
    """
    if not isinstance(params, SamplingParams):
        raise RequestError("sampling_params", params, "a SamplingParams, or a list of them")
    bounds.check("priority", priority)
    if priority and info.scheduling_policy != "priority":
        raise RequestError("priority", priority, "0 or left out, unless the engine has --scheduling-policy priority")
    room = info.max_model_len - len(token_ids)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    # A context that ends before min_tokens ends the answer all the same.
    min_tokens = min(params.min_tokens, max_tokens)
    seed = draw() if params.seed is None else params.seed
    count = params.best_of or params.n
    group = new_request_id() if count > 1 else ""
    logprobs = 0 if count > params.n and params.logprobs is None else params.logprobs
    params = with_token_ids(params, tokenizer, info.vocab_size, marks)
    return [
        Request(
            request_id=new_request_id(),
            prompt_token_ids=token_ids,
            params=msgspec.structs.replace(
                params,
                n=1,
                best_of=None,
                seed=(seed + index) % 2**63,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                logprobs=logprobs,
            ),
            priority=priority,
            cache_salt=cache_salt,
            group=group,
            pooling=pooling,
        )
        for index in range(count)
    ]
