"""Edits of logits: penalties by what the sequence holds, biases, bans and masks. Before any filter.

Every edit touches the token ids that it is about, except the masks. Histories are arrays of the token ids so far,
prompt included. Knows no noise, no batch, no text. Called by `sampler`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

MAX_DRY_EXCESS = 50
"""A repetition counts for no more tokens than as many beyond the allowed length: the penalty is out of all bounds
long before, and the work stays bounded."""

_LEAST = float(np.finfo(np.float32).min)


def tally(history: I64, num_prompt: int, params: SamplingParams) -> tuple[I64, I64]:
    """Token ids, ascending, among the last `repeat_last_n`, and how often the answer has each there."""
    start = 0 if params.repeat_last_n < 0 else max(0, len(history) - params.repeat_last_n)
    token_ids, places = np.unique(history[start:], return_inverse=True)
    return token_ids, np.bincount(places[max(0, num_prompt - start) :], minlength=len(token_ids))


def penalized(values: F64, counts: I64, params: SamplingParams) -> F64:
    """Logits of tokens that were seen, `counts` times in the answer, after the penalties, as vLLM has them.

    A repetition penalty r divides logits above 0, and multiplies others, of tokens in prompt or answer (Keskar et al.
    2019, section 4.1); then frequency_penalty times the token's count in the answer, and presence_penalty if there is
    one, are subtracted (OpenAI's API reference). With `repeat_last_n` only as many last tokens are seen.
    """
    if params.repetition_penalty != 1.0:
        values = np.where(values > 0.0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        values = values - params.frequency_penalty * counts
        values = values - params.presence_penalty * (counts > 0)
    return values


def dried(values: F64, lengths: I64, params: SamplingParams) -> F64:
    """Logits of tokens that would prolong a repetition of `lengths` tokens after DRY (p-e-w, text-generation-webui
    #5677): each loses dry_multiplier * dry_base ** (length - dry_allowed_length)."""
    with np.errstate(over="ignore"):
        penalty = params.dry_multiplier * np.power(params.dry_base, lengths - float(params.dry_allowed_length))
    cut: F64 = values - penalty
    return cut


def repetitions(history: I64, params: SamplingParams) -> tuple[I64, I64]:
    """Token ids, ascending, that would prolong a repetition, and for each the most last tokens that it repeats.

    A token prolongs n tokens if those, then the token, came before. Sequence breakers are in no repetition. Only
    those of at least dry_allowed_length tokens are told.
    """
    if params.dry_penalty_last_n >= 0:
        history = history[max(0, len(history) - params.dry_penalty_last_n) :]
    none = np.empty(0, np.int64)
    breakers = np.array(params.dry_sequence_breaker_ids or [], np.int64)
    if len(history) < 2 or history[-1] in breakers:
        return none, none
    at = np.flatnonzero(history[:-1] == history[-1])
    at = at[~np.isin(history[at + 1], breakers)]
    lengths = np.ones(len(at), np.int64)
    alive = np.arange(len(at))
    for back in range(1, min(len(history), params.dry_allowed_length + MAX_DRY_EXCESS)):
        same = history[-1 - back]
        if not len(alive) or same in breakers:
            break
        alive = alive[at[alive] >= back]
        alive = alive[history[at[alive] - back] == same]
        lengths[alive] = back + 1
    enough = lengths >= params.dry_allowed_length
    nexts, inverse = np.unique(history[at[enough] + 1], return_inverse=True)
    most = np.zeros(len(nexts), np.int64)
    np.maximum.at(most, inverse, lengths[enough])
    return nexts, most


def edit(stage: str, x: F32, history: I64, num_prompt: int, params: SamplingParams) -> None:
    """The stage "penalties" or "dry" on a whole row of logits, in place: computed in float64, rounded once."""
    token_ids, amounts = _found(stage, history, num_prompt, params)
    if len(token_ids) and int(token_ids[-1]) >= len(x):
        inside = token_ids < len(x)
        token_ids, amounts = token_ids[inside], amounts[inside]
    values = _STAGES[stage](x[token_ids].astype(np.float64), amounts, params)
    # What was allowed stays so; a token that is out already stays out.
    x[token_ids] = np.where(values > -np.inf, np.clip(values, _LEAST, -_LEAST), values)


def edit_some(stage: str, token_ids: I64, values: F64, history: I64, num_prompt: int, params: SamplingParams) -> F64:
    """The same for the logits `values` of the ascending `token_ids` alone."""
    known, amounts = _found(stage, history, num_prompt, params)
    places = np.minimum(np.searchsorted(token_ids, known), len(token_ids) - 1)
    there = token_ids[places] == known
    places, amounts = places[there], amounts[there]
    values = values.copy()
    values[places] = np.maximum(_STAGES[stage](values[places], amounts, params), _LEAST)
    return values


def _found(stage: str, history: I64, num_prompt: int, params: SamplingParams) -> tuple[I64, I64]:
    return repetitions(history, params) if stage == "dry" else tally(history, num_prompt, params)


_STAGES = {"penalties": penalized, "dry": dried}


def biased(x: F32, bias: dict[int, float]) -> None:
    """Add `logit_bias`, in place. Raises `RequestError` for a token id beyond the row."""
    token_ids = np.fromiter(bias, np.int64, len(bias))
    if int(token_ids.max()) >= len(x):
        raise RequestError("logit_bias", int(token_ids.max()), f"a token id below {len(x)}")
    x[token_ids] = x[token_ids].astype(np.float64) + np.fromiter(bias.values(), np.float64, len(bias))


def allow_only(x: F32, token_ids: list[int]) -> None:
    """Everything but `token_ids` becomes -inf, in place."""
    keep = np.array(token_ids, np.int64)
    keep = keep[keep < len(x)]
    values = x[keep]
    x.fill(-np.inf)
    x[keep] = values


def masked(x: F32, mask: NDArray[np.uint32]) -> None:
    """Tokens whose bit in `mask` (bit t % 32 of word t // 32) is not set become -inf, in place."""
    bits = np.unpackbits(mask.astype("<u4", copy=False).view(np.uint8), bitorder="little", count=len(x))
    x[bits == 0] = -np.inf


def banned(params: SamplingParams, history: I64, num_prompt: int, position: int, eos_token_ids: list[int]) -> list[int]:
    """Token ids that must not come here: ends before min_tokens, the last tokens of bad words, repeated n-grams."""
    found: list[int] = []
    if position - num_prompt < params.min_tokens:
        # As vLLM: the ends of a text stay out of reach under ignore_eos too.
        found += [*eos_token_ids, *(params.stop_token_ids or ())]
    for word in params.bad_words_token_ids or ():
        lead = len(word) - 1
        if not lead or (len(history) >= lead and history[len(history) - lead :].tolist() == word[:-1]):
            found.append(word[-1])
    size = params.no_repeat_ngram_size
    if size and len(history) >= size:
        ends = np.arange(size - 1, len(history))
        for back in range(1, size):
            ends = ends[history[ends - back] == history[-back]]
        found += history[ends].tolist()
    return found


def replayed(params: SamplingParams, num_generated: int) -> int | None:
    """The token of `trace_decode_token_ids` that comes after so many of the answer; None if there is none."""
    trace = params.trace_decode_token_ids or ()
    return trace[num_generated] if 0 <= num_generated < len(trace) else None


def forced(params: SamplingParams, history: I64) -> int | None:
    """The token of the end of reasoning that must come now, since its budget is spent; else None.

    Reasoning is open if its start came after its last end. The budget counts the tokens after the start.
    """
    if params.thinking_token_budget is None or params.thinking_token_ids is None:
        return None
    start, end = params.thinking_token_ids
    began = _last(history, start)
    if began < 0:
        return None
    since = history[began + len(start) :]
    if _last(since, end) >= 0 or len(since) < params.thinking_token_budget:
        return None
    # How much of the end is there already.
    for done in range(min(len(end) - 1, len(since)), 0, -1):
        if since[len(since) - done :].tolist() == end[:done]:
            return end[done]
    return end[0]


def _last(history: I64, run: list[int]) -> int:
    """Where `run` begins for the last time; -1 if it does not come."""
    starts = np.flatnonzero(history[: max(0, len(history) - len(run) + 1)] == run[0])
    for offset, token_id in enumerate(run[1:], 1):
        starts = starts[history[starts + offset] == token_id]
    return int(starts[-1]) if len(starts) else -1


def processed(x: F32, params: SamplingParams, history: I64, num_prompt: int) -> F32:
    """The row after the caller's own `logits_processors`, each handed a copy.

    Raises `RequestError` if one fails, or gives something else than a row of the same width without a NaN.
    """
    known, width = history.tolist(), len(x)
    for processor in params.logits_processors or ():
        name = getattr(processor, "__name__", type(processor).__name__)
        try:
            x = np.asarray(processor(known[:num_prompt], known[num_prompt:], x.copy()), np.float32)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise RequestError("logits_processors", name, f"a function that does not fail ({why})") from error
        if x.shape != (width,) or not x.max() < np.inf:
            raise RequestError("logits_processors", name, f"one that gives {width} logits, no NaN and no infinity")
    return x
