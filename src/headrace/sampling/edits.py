"""Edits of logits: penalties by the tokens of the sequence, biases, bans and masks. Before any filter.

Every edit but a mask touches only the token ids that it names. Histories are arrays of the token ids so far,
prompt included. Knows no noise, no batch, no text. Called by `sampler`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.sampling.filters import F32, F64, I64

MAX_DRY_EXCESS = 50
"""Tokens of a repetition beyond the allowed length that count. The penalty is greater than any logit long before,
and the work stays bounded."""

_LEAST = float(np.finfo(np.float32).min)


def tally(history: I64, num_prompt: int, params: SamplingParams) -> tuple[I64, I64]:
    """Return the token ids, ascending, among the last `repeat_last_n`, and how often each is in the answer there."""
    start = 0 if params.repeat_last_n < 0 else max(0, len(history) - params.repeat_last_n)
    token_ids, places = np.unique(history[start:], return_inverse=True)
    return token_ids, np.bincount(places[max(0, num_prompt - start) :], minlength=len(token_ids))


def penalized(values: F64, counts: I64, params: SamplingParams) -> F64:
    """Return the logits of tokens that came before, `counts` times in the answer, after vLLM's penalties.

    A repetition penalty r divides logits above 0, and multiplies others, of tokens in prompt or answer (Keskar et al.
    2019, section 4.1); then frequency_penalty times the token's count in the answer, and presence_penalty if there is
    one, are subtracted (OpenAI's API reference). With `repeat_last_n` only as many last tokens count.
    """
    if params.repetition_penalty != 1.0:
        values = np.where(values > 0.0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        values = values - params.frequency_penalty * counts
        values = values - params.presence_penalty * (counts > 0)
    return values


def dry_penalized(values: F64, lengths: I64, params: SamplingParams) -> F64:
    """Return the logits, after DRY, of tokens that would prolong a repetition of `lengths` tokens (p-e-w,
    text-generation-webui #5677): each loses dry_multiplier * dry_base ** (length - dry_allowed_length)."""
    with np.errstate(over="ignore"):
        penalty = params.dry_multiplier * np.power(params.dry_base, lengths - float(params.dry_allowed_length))
    logits: F64 = values - penalty
    return logits


def repetitions(history: I64, params: SamplingParams) -> tuple[I64, I64]:
    """Return the token ids, ascending, that would prolong a repetition, and for each the most last tokens it repeats.

    A token prolongs n tokens if those, then the token, came before. Sequence breakers are in no repetition. Only
    repetitions of at least dry_allowed_length tokens count.
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
    """Apply the stage "penalties" or "dry" to a whole row of logits, in place: computed in float64, rounded once."""
    token_ids, amounts = _amounts(stage, history, num_prompt, params)
    if len(token_ids) and int(token_ids[-1]) >= len(x):
        inside = token_ids < len(x)
        token_ids, amounts = token_ids[inside], amounts[inside]
    values = _STAGES[stage](x[token_ids].astype(np.float64), amounts, params)
    # A penalty bans no token, and a banned one stays banned.
    x[token_ids] = np.where(values > -np.inf, np.clip(values, _LEAST, -_LEAST), values)


def edit_some(stage: str, token_ids: I64, values: F64, history: I64, num_prompt: int, params: SamplingParams) -> F64:
    """Return the same for the logits `values` of the ascending `token_ids` alone."""
    penalized_ids, amounts = _amounts(stage, history, num_prompt, params)
    places = np.minimum(np.searchsorted(token_ids, penalized_ids), len(token_ids) - 1)
    present = token_ids[places] == penalized_ids
    places, amounts = places[present], amounts[present]
    values = values.copy()
    values[places] = np.maximum(_STAGES[stage](values[places], amounts, params), _LEAST)
    return values


def _amounts(stage: str, history: I64, num_prompt: int, params: SamplingParams) -> tuple[I64, I64]:
    return repetitions(history, params) if stage == "dry" else tally(history, num_prompt, params)


_STAGES = {"penalties": penalized, "dry": dry_penalized}


def biased(x: F32, bias: dict[int, float]) -> None:
    """Add `logit_bias`, in place. Raises `RequestError` for a token id beyond the row."""
    token_ids = np.fromiter(bias, np.int64, len(bias))
    if int(token_ids.max()) >= len(x):
        raise RequestError("logit_bias", int(token_ids.max()), f"a token id below {len(x)}")
    x[token_ids] = x[token_ids].astype(np.float64) + np.fromiter(bias.values(), np.float64, len(bias))


def allow_only(x: F32, token_ids: list[int]) -> None:
    """Set the logits of all tokens except `token_ids` to -inf, in place."""
    keep = np.array(token_ids, np.int64)
    keep = keep[keep < len(x)]
    values = x[keep]
    x.fill(-np.inf)
    x[keep] = values


def masked(x: F32, mask: NDArray[np.uint32]) -> None:
    """Set the logits of tokens whose bit in `mask` (bit t % 32 of word t // 32) is 0 to -inf, in place."""
    bits = np.unpackbits(mask.astype("<u4", copy=False).view(np.uint8), bitorder="little", count=len(x))
    x[bits == 0] = -np.inf


def banned(params: SamplingParams, history: I64, num_prompt: int, position: int, eos_token_ids: list[int]) -> list[int]:
    """Return the token ids that must not come here: ends before min_tokens, last tokens of bad words, repeated
    n-grams."""
    token_ids: list[int] = []
    if position - num_prompt < params.min_tokens:
        # As vLLM: ends of text are banned under ignore_eos too.
        token_ids += [*eos_token_ids, *(params.stop_token_ids or ())]
    for word in params.bad_words_token_ids or ():
        lead = len(word) - 1
        if not lead or (len(history) >= lead and history[len(history) - lead :].tolist() == word[:-1]):
            token_ids.append(word[-1])
    size = params.no_repeat_ngram_size
    if size and len(history) >= size:
        ends = np.arange(size - 1, len(history))
        for back in range(1, size):
            ends = ends[history[ends - back] == history[-back]]
        token_ids += history[ends].tolist()
    return token_ids


def replayed(params: SamplingParams, num_generated: int) -> int | None:
    """Return the token of `trace_decode_token_ids` after `num_generated` tokens of the answer; None without one."""
    trace = params.trace_decode_token_ids or ()
    return trace[num_generated] if 0 <= num_generated < len(trace) else None


def forced(params: SamplingParams, history: I64) -> int | None:
    """Return the token of the end of reasoning that must come now because the budget is spent; else None.

    Reasoning is open if its start came after its last end. The budget counts the tokens after the start.
    """
    if params.thinking_token_budget is None or params.thinking_token_ids is None:
        return None
    start, end = params.thinking_token_ids
    begin = _last(history, start)
    if begin < 0:
        return None
    since = history[begin + len(start) :]
    if _last(since, end) >= 0 or len(since) < params.thinking_token_budget:
        return None
    # The first tokens of the end may be there already.
    for num_done in range(min(len(end) - 1, len(since)), 0, -1):
        if since[len(since) - num_done :].tolist() == end[:num_done]:
            return end[num_done]
    return end[0]


def _last(history: I64, run: list[int]) -> int:
    """Return where `run` begins for the last time; -1 if it does not come."""
    starts = np.flatnonzero(history[: max(0, len(history) - len(run) + 1)] == run[0])
    for offset, token_id in enumerate(run[1:], 1):
        starts = starts[history[starts + offset] == token_id]
    return int(starts[-1]) if len(starts) else -1


def processed(x: F32, params: SamplingParams, history: I64, num_prompt: int) -> F32:
    """Return the row after the caller's own `logits_processors`, each of which gets a copy.

    Raises `RequestError` if one fails, or returns anything but a row of the same width without a NaN.
    """
    token_ids, width = history.tolist(), len(x)
    for processor in params.logits_processors or ():
        name = getattr(processor, "__name__", type(processor).__name__)
        try:
            x = np.asarray(processor(token_ids[:num_prompt], token_ids[num_prompt:], x.copy()), np.float32)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise RequestError("logits_processors", name, f"a function that does not fail ({why})") from error
        if x.shape != (width,) or not x.max() < np.inf:
            raise RequestError("logits_processors", name, f"one that gives {width} logits, no NaN and no infinity")
    return x
