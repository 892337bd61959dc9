"""Between the APIs of llama.cpp's kind and OpenAI's: names of sampling parameters, and the way back for errors.

`ollama` and `llama_server` call it. Knows no route and no reply.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import msgspec

from headrace.protocol.errors import RequestError
from headrace.serve.call.answers import Answer
from headrace.serve.call.chat_answer import ChatAnswer
from headrace.serve.call.parsing import Body, add_warning, renamed
from headrace.text.parts import Content, Part

# Names that differ, as llama.cpp has them and as this server has them.
NAMES = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens", "num_predict": "max_tokens"}
# Same name, same meaning.
SAME = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "repeat_last_n", "presence_penalty",
    "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay",
    "dynatemp_range", "dynatemp_exponent", "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "samplers", "stop", "ignore_eos",
)  # fmt: skip
# A share of nothing keeps one token there; here a share is above 0, and the least one keeps one token.
LEAST_SHARE = 1e-6


def sampling(options: msgspec.Struct, prefix: str = "") -> dict[str, Any]:
    """OpenAI's and vLLM's parameters for those that `options` has. A seed of -1, and a length of -1 or -2, mean: none.

    Raises `RequestError` for other negative ones, with `prefix` before the name.
    """
    made: dict[str, Any] = {}
    for name in (*SAME, *NAMES):
        value = getattr(options, name, None)
        if value is not None:
            made[NAMES.get(name, name)] = value
    for name in ("top_p", "typical_p"):
        if made.get(name) == 0:
            made[name] = LEAST_SHARE
    for name, low in (("n_predict", -2), ("num_predict", -2), ("seed", -1)):
        value = getattr(options, name, None)
        if value is not None and value < low:
            raise RequestError(prefix + name, value, f"{low} or more")
    if made.get("max_tokens", 0) < 0:
        del made["max_tokens"]
    seed = getattr(options, "seed", None)
    # 2**32 - 1 is how llama.cpp writes -1.
    if seed is not None and seed not in (-1, 2**32 - 1):
        made["seed"] = seed
    return made


@contextlib.contextmanager
def told_as(names: Mapping[str, str], prefix: str = "") -> Iterator[None]:
    """Within it, a `RequestError` names fields as the client's API does: `names` maps from this server's names;
    sampling parameters are under `prefix`."""
    theirs = {ours: prefix + ours for ours in (*SAME, "seed")} | {"repetition_penalty": prefix + "repeat_penalty"}
    theirs |= names
    try:
        yield
    except RequestError as error:
        raise renamed(error, theirs) from error


def warnings(body: Body, answer: Answer | None = None) -> dict[str, Any]:
    """`warnings` for a reply, if there are any: the request's own, and those of what it was translated to."""
    made = list(body.warnings)
    for told in answer.request.warnings if answer is not None else ():
        field, _, why = told.partition(": ")
        add_warning(made, field, why)
    return {"warnings": made} if made else {}


async def parts_of(answer: Answer) -> AsyncIterator[list[Part]]:
    """The parts of a call's one answer; those of a text completion are all content."""
    if isinstance(answer, ChatAnswer):
        async for _, parts in answer.parts():
            yield parts
        return
    async with answer.generation:
        async for pieces in answer.generation:
            for _, piece in pieces:
                yield [Content(piece.text)] if piece.text else []


def arguments_object(text: str) -> dict[str, Any]:
    """A tool call's arguments as an object. What is none, as only a call that was cut off can have, is told as text."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {"_incomplete": text}
