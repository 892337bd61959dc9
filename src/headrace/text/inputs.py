"""Turns a caller's prompt and parameters into complete `Request`s: checks ids, draws seeds, makes `n` requests.

The texts in the parameters (bad words, DRY's sequence breakers, the marks of reasoning) become token ids here, for the
engine knows no text. Pure functions of their arguments, called by `LLM`, `AsyncLLM` and the HTTP server, so that the
same call means the same request everywhere. Knows the tokenizer, `EngineInfo`, and no asyncio.
"""

from __future__ import annotations

import copy
import random
import secrets
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NotRequired, TypedDict

import msgspec

from headrace.grammar.salted import SaltedCache
from headrace.protocol import bounds
from headrace.protocol.errors import ContextLengthError, RequestError
from headrace.protocol.parameters import MAX_INT32
from headrace.protocol.params import SamplingParams
from headrace.protocol.pictures import Picture
from headrace.protocol.step import EngineInfo, Pooling, Request
from headrace.text.reasoning import THINK
from headrace.text.tokenizer import Tokenizer

# Below 2**53 with room for n, so that a client whose JSON numbers are doubles can send the seed of a reply back.
SEED_LIMIT = 2**53 - 2**16

IMAGES = "multi_modal_data"
"""The key of a prompt's pictures, which `pictures.offline` reads."""
DRY_BREAKERS = ("\n", ":", '"', "*")
"""DRY's sequence breakers for requests that name none, as in llama-server."""
_BREAKERS: SaltedCache[list[int]] = SaltedCache(64)


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, and its text if there is one."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | dict[str, Any]


def draw_seed() -> int:
    return secrets.randbelow(SEED_LIMIT)


def seed_source(seed: int | None) -> Callable[[], int]:
    """Return the source of seeds for requests without one: random for None, else a sequence that `seed` determines."""
    if seed is None:
        return draw_seed
    noise = random.Random(seed)
    return lambda: noise.randrange(SEED_LIMIT)


def new_request_id() -> str:
    """Return a fresh id that cannot be guessed, whatever id the client has chosen (S-25)."""
    return str(uuid.uuid4())


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt, or several, as a list. Raises `RequestError`."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError("prompts", prompts, "a text, a list of token ids, or a list of such prompts")
    listed = list(prompts)
    if listed and all(isinstance(token_id, int) for token_id in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def one_each(name: str, values: Any, count: int) -> list[Any]:
    """Return a value for each of `count` prompts: the same one, or those of a list. Raises `RequestError`."""
    if not isinstance(values, (list, tuple)):
        return [values] * count
    if len(values) != count:
        raise RequestError(name, len(values), f"one, or one for each of the {count} prompts")
    return list(values)


def prompt_size(prompt: Prompt) -> int:
    """Return the number of characters or ids of a prompt in any of its forms; 0 for any other value."""
    if isinstance(prompt, dict):
        return max((len(value) for value in prompt.values() if isinstance(value, Sequence)), default=0)
    return len(prompt) if isinstance(prompt, Sequence) else 0


def is_text(prompt: Prompt) -> bool:
    """Return whether a prompt is to be tokenised."""
    return isinstance(prompt, str) or (isinstance(prompt, dict) and "prompt_token_ids" not in prompt)


def prompt_ids(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    info: EngineInfo,
    *,
    add_special_tokens: bool = True,
    truncate_prompt_tokens: int | None = None,
) -> tuple[str | None, list[int]]:
    """Return the text (None for a prompt of ids) and the token ids of `prompt`: a text, ids, or vLLM's dict of either.

    A dict with both holds the ids, and the text that they came from. `truncate_prompt_tokens` keeps that many of the
    last ids; -1 keeps as many as fit. A prompt that was cut has no text. Raises `RequestError`.
    """
    text: str | None = None
    content: Any
    if isinstance(prompt, dict):
        fields: dict[str, Any] = {**prompt}
        if fields.get(IMAGES):
            raise RequestError(IMAGES, "given", "left out of this call: generate and chat read pictures")
        names = [name for name in ("prompt_token_ids", "prompt") if name in fields]
        if not names:
            raise RequestError("prompt", sorted(fields), "a dict with 'prompt' or 'prompt_token_ids'")
        content = fields[names[0]]
        if names[0] == "prompt_token_ids":
            text = fields.get("prompt")
            if isinstance(content, str):
                raise RequestError("prompt_token_ids", content, "a list of token ids")
    else:
        content = prompt
    if isinstance(content, str):
        bounds.check("text", content, "prompt")
        if tokenizer is None:
            raise RequestError("prompt", content, "token ids, for the engine runs without a tokenizer")
        text = content
        if truncate_prompt_tokens is None:
            check_bytes(content, tokenizer, info.max_model_len)
        token_ids = tokenizer.encode(content, add_special_tokens=add_special_tokens)
    else:
        if not isinstance(content, Sequence) or isinstance(content, bytes):
            raise RequestError("prompt", content, "a text or a list of token ids")
        token_ids = list(content)
        if not bounds.are_ids(token_ids, MAX_INT32):
            for token_id in token_ids:
                bounds.check("token_id", token_id, "prompt")
    if truncate_prompt_tokens is not None:
        keep = info.max_prompt_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        if not keep:
            raise RequestError("truncate_prompt_tokens", keep, "at least 1, for no prompt is empty, or -1")
        if keep < len(token_ids):
            # An encoder's texts begin and end with tokens of their own.
            text, token_ids = None, token_ids[-keep:] if info.generates else token_ids[: keep - 1] + token_ids[-1:]
    if not token_ids:
        raise RequestError("prompt", content, "at least one token long")
    if len(token_ids) > info.max_prompt_len:
        bound = f"at most {info.max_prompt_len} tokens long"
        raise ContextLengthError("prompt", len(token_ids), bound, info.max_model_len, len(token_ids))
    return text, token_ids


def check_bytes(text: str, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Raise `ContextLengthError` for a text of so many bytes that its tokens cannot fit; that saves the tokenising."""
    if tokenizer.max_token_bytes is None:
        return
    most = (max_model_len - 1) * tokenizer.max_token_bytes
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    if num_bytes > most:
        bound = f"at most {max_model_len - 1} tokens long, which is at most {most} bytes"
        least = -(-num_bytes // tokenizer.max_token_bytes)
        raise ContextLengthError("prompt", f"{num_bytes} bytes", bound, max_model_len, least)


class RequestOptions(NamedTuple):
    """The further data of a call's requests, apart from prompt and parameters.

    draw: returns a seed where a call has none. tokenizer: encodes the texts in the parameters. marks: the marks of the
    model's reasoning. call_id: the beginning of the requests' ids, which no client chooses, so that a recording has
    them under the reply's id. adapter: the digest of the one that answers. pictures: those of the one prompt.
    """

    priority: int = 0
    cache_salt: str = ""
    draw: Callable[[], int] = draw_seed
    pooling: Pooling = ""
    tokenizer: Tokenizer | None = None
    marks: tuple[str, str] = THINK
    call_id: str = ""
    adapter: str = ""
    pictures: Sequence[Picture] = ()


def make_requests(
    token_ids: list[int], params: SamplingParams, info: EngineInfo, options: RequestOptions = RequestOptions()
) -> list[Request]:
    """Return the `n` requests that answer one prompt: answer i has seed + i, and none depends on the others.

    With `best_of` there are that many, with log-probabilities, so that `outputs.best` can choose. Fills in the seed
    (drawn if there is none), max_tokens (None is the rest of the context), and token ids for the texts in `params`.
    Raises `RequestError`.
    """
    if not isinstance(params, SamplingParams):
        raise RequestError("sampling_params", params, "a SamplingParams, or a list of them")
    priority, cache_salt, call_id = options.priority, options.cache_salt, options.call_id
    bounds.check("priority", priority)
    if priority and info.scheduling_policy != "priority":
        raise RequestError("priority", priority, "0 or left out, unless the engine has --scheduling-policy priority")
    room = max(1, info.max_model_len - len(token_ids))
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    # The end of the context ends the answer even before min_tokens.
    min_tokens = min(params.min_tokens, max_tokens)
    seed = options.draw() if params.seed is None else params.seed
    count = params.best_of or params.n
    group = new_request_id() if count > 1 else ""
    logprobs = 0 if count > params.n and params.logprobs is None else params.logprobs
    params = with_token_ids(params, options.tokenizer, info.vocab_size, options.marks, cache_salt)
    params = msgspec.structs.replace(
        params, n=1, best_of=None, max_tokens=max_tokens, min_tokens=min_tokens, logprobs=logprobs
    )
    return [
        Request(
            request_id=f"{call_id}.{secrets.token_hex(8)}" if call_id else new_request_id(),
            prompt_token_ids=token_ids,
            params=_with_seed(params, (seed + index) % 2**63),
            priority=priority,
            cache_salt=cache_salt,
            adapter=options.adapter,
            pictures=list(options.pictures),
            group=group,
            pooling=options.pooling,
        )
        for index in range(count)
    ]


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    """Return a copy with another seed. The other fields are not checked again, for lists of ids may be long."""
    copied = copy.copy(params)
    msgspec.structs.force_setattr(copied, "seed", seed)
    return copied


def with_token_ids(
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    marks: tuple[str, str] = THINK,
    cache_salt: str = "",
) -> SamplingParams:
    """Return the parameters with token ids for each of their texts that lacks them. `marks` begin and end reasoning.

    Raises `RequestError` for a text that needs a tokenizer where there is none.
    """
    changes: dict[str, object] = {}
    if params.bad_words and params.bad_words_token_ids is None:
        known = _required(tokenizer, "bad_words", params.bad_words)
        changes["bad_words_token_ids"] = [ids for word in params.bad_words for ids in spellings(known, word)]
    if params.dry_multiplier > 0.0 and params.dry_sequence_breaker_ids is None:
        texts = params.dry_sequence_breakers
        if texts:
            _required(tokenizer, "dry_sequence_breakers", texts)
        if tokenizer is not None:
            breaker_ids = breakers(tokenizer, DRY_BREAKERS if texts is None else tuple(texts), cache_salt)
            changes["dry_sequence_breaker_ids"] = [i for i in breaker_ids if i < vocab_size]
    if params.thinking_token_budget is not None and params.thinking_token_ids is None:
        known = _required(tokenizer, "thinking_token_budget", params.thinking_token_budget)
        changes["thinking_token_ids"] = (mark_ids(known, marks[0]), mark_ids(known, marks[1]))
    return msgspec.structs.replace(params, **changes) if changes else params


def spellings(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """Return the token ids of a word as it begins a text and as it comes after a space, as vLLM does."""
    variants: list[list[int]] = []
    for text in (word, " " + word.lstrip()):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        if token_ids and token_ids not in variants:
            variants.append(token_ids)
    return variants


def mark_ids(tokenizer: Tokenizer, mark: str) -> list[int]:
    """Return the ids of a mark: its own token if it has one, else the tokens of its text."""
    token_id = tokenizer.token_to_id(mark)
    return tokenizer.encode(mark, add_special_tokens=False) if token_id is None else [token_id]


def breakers(tokenizer: Tokenizer, texts: tuple[str, ...], cache_salt: str = "") -> list[int]:
    """Return the ids, ascending, of the tokens that contain one of `texts`; for a text that no token contains, its last
    token's id."""
    known = _BREAKERS.get(cache_salt, (tokenizer, texts))
    if known is not None:
        return known
    spelled = _all_token_bytes(tokenizer)
    ids: set[int] = set()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        containing = [token_id for token_id, token in enumerate(spelled) if data in token]
        ids.update(containing or tokenizer.encode(text, add_special_tokens=False)[-1:])
    _BREAKERS.put(cache_salt, (tokenizer, texts), sorted(ids))
    return sorted(ids)


@lru_cache(maxsize=4)
def _all_token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    return [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]


def _required(tokenizer: Tokenizer | None, field: str, value: object) -> Tokenizer:
    if tokenizer is None:
        raise RequestError(field, value, "left out, for the engine runs without a tokenizer; or give token ids")
    return tokenizer
