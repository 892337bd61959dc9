"""The rules of a request: the checks of a new one, the `Sequence` that it becomes, and when that ends.

`verify_fit` compares lengths and widths with the scheduler's numbers, `verify_model` token ids and counts with the
model's. The scheduler calls `verify_fit`, the engine `verify_model`, and `engine.core.verify` both of them, for the
front end's side of the process border.

Stop strings are not here: only the server has text. The names and the order of the rules of an end are vLLM's: nothing
stops a sequence before `min_tokens`, the end-of-sequence token comes before `stop_token_ids`, and both before length.
The scheduler and `core.beams` call these. Pure functions, but for `append_known`: they know no queue.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.kinds import num_beam_blocks
from headrace.core.prefix import PrefixCache
from headrace.core.sequence import NEVER, Sequence
from headrace.protocol.beam import check_combination
from headrace.protocol.bounds import MAX_REPLY_LOGPROBS, MAX_USUAL_LOGPROBS, check
from headrace.protocol.errors import ContextLengthError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.pictures import flaw, named, wholes_of
from headrace.protocol.step import ALL_ROWS, POOLINGS, EngineInfo, Finish, Request


def verify_numbers(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    long_prefill_token_threshold: int,
    enable_chunked_prefill: bool,
) -> None:
    """Check a scheduler's own numbers. Raises `ValueError`."""
    for name, value, least in (
        ("max_num_seqs", max_num_seqs, 1),
        ("max_num_batched_tokens", max_num_batched_tokens, 1),
        ("max_model_len", max_model_len, 2),
        ("long_prefill_token_threshold", long_prefill_token_threshold, 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if not enable_chunked_prefill and max_num_batched_tokens < max_model_len:
        raise ValueError(
            f"without chunked prefill max_num_batched_tokens ({max_num_batched_tokens}) must be at least "
            f"max_model_len ({max_model_len})"
        )


def verify_fit(
    request: Request, max_model_len: int, max_num_seqs: int, num_blocks: int, block_size: int, most: int = NEVER
) -> None:
    """Check that a request can run at all, alone in a scheduler of this size. A beam holds at `most` so many blocks.

    Raises `RequestError` for an empty prompt, too many resumed tokens or too wide a beam search, and
    `ContextLengthError` for a prompt that leaves no room for a token.
    """
    num_prompt, num_resumed = len(request.prompt_token_ids), len(request.resume_token_ids)
    if not num_prompt:
        raise RequestError("prompt", [], "at least one token long")
    most_prompt = max_model_len - (not request.pooling)
    if num_prompt > most_prompt:
        bound = f"at most {most_prompt} tokens long"
        raise ContextLengthError("prompt", num_prompt, bound, max_model_len, num_prompt)
    max_len = max_len_of(request, max_model_len)
    if num_prompt + num_resumed > max_len:
        raise RequestError("resume_token_ids", num_resumed, f"at most {max_len - num_prompt} tokens long")
    if request.beam is None:
        return
    if num_resumed:
        raise RequestError("resume_token_ids", num_resumed, "none for a beam search")
    width = request.beam.beam_width
    if width > max_num_seqs:
        raise RequestError("beam_width", width, f"at most {max_num_seqs} (--max-num-seqs)")
    claim = min(num_beam_blocks(width, num_prompt, max_len, block_size), width * most)
    if claim > num_blocks:
        bound = f"such that the beams' {claim} blocks fit the cache's {num_blocks}: narrower, or with less max_tokens"
        raise RequestError("beam_width", width, bound)


def verify_wholes(request: Request, most: int) -> None:
    """Check that a step of `most` rows can compute each picture that must not be cut. Raises `RequestError`."""
    wholes = wholes_of(request.pictures) if request.pictures else []
    longest = max((stop - first for first, stop in wholes), default=0)
    if longest > most:
        bound = f"at most {most} for a picture, which a step must compute whole (--max-num-batched-tokens)"
        raise RequestError("pictures", f"{longest} rows", bound)


def verify_model(request: Request, info: EngineInfo) -> None:
    """Check that the model can serve a request: its token ids, against the width of the logits and not of the
    tokenizer, the counts of log-probabilities and candidates, and the fields that a pooled request or a search must not
    set.

    The ranges of the parameters are checked when a `SamplingParams` is made. Raises `RequestError`.
    """
    params = request.params
    if request.pooling not in ("", ALL_ROWS, info.pooling, *POOLINGS):
        raise RequestError("pooling", request.pooling, f"one of {', '.join(POOLINGS)}")
    if request.pooling == ALL_ROWS:
        check("row_numbers", len(request.prompt_token_ids) * info.hidden_size, "prompt")
    if not request.pooling and not info.generates:
        raise RequestError("model", info.model, "a model that answers: this one gives vectors or classes")
    if request.pictures and not info.pictures:
        raise RequestError("pictures", len(request.pictures), "none: the model reads text only")
    if reason := flaw(request.pictures, len(request.prompt_token_ids)):
        raise RequestError("pictures", reason, "pictures in their order, each in places of its own")
    if request.pooling and params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs", params.prompt_logprobs, "left out of a request for hidden states")
    fields = [("prompt", request.prompt_token_ids), ("resume_token_ids", request.resume_token_ids)]
    fields.append(("stop_token_ids", params.stop_token_ids or []))
    fields.append(("logit_bias", list(params.logit_bias or ())))
    fields.append(("allowed_token_ids", params.allowed_token_ids or []))
    fields.append(("dry_sequence_breakers", params.dry_sequence_breaker_ids or []))
    fields.append(("trace_decode_token_ids", params.trace_decode_token_ids or []))
    fields += [("bad_words", token_ids) for token_ids in params.bad_words_token_ids or ()]
    fields += [("thinking_token_ids", token_ids) for token_ids in params.thinking_token_ids or ()]
    for field, token_ids in fields:
        if not token_ids or 0 <= min(token_ids) <= max(token_ids) < info.vocab_size:
            continue
        for token_id in token_ids:
            if not 0 <= token_id < info.vocab_size:
                raise RequestError(field, token_id, f"a token id from 0 to {info.vocab_size - 1}")
    for field in ("logprobs", "prompt_logprobs"):
        count = getattr(params, field)
        # -1 is the whole vocabulary.
        num_logprobs = info.vocab_size if count == -1 else count
        if num_logprobs is not None and info.max_logprobs != -1 and num_logprobs > info.max_logprobs:
            raise RequestError(field, count, f"at most {info.max_logprobs} (--max-logprobs)")
    if request.beam is not None:
        check_combination(params)
        if request.pooling:
            raise RequestError("pooling", request.pooling, "left out of a beam search")
        num_candidates = request.beam.num_kept(len(stop_ids(params, info.eos_token_ids)))
        if num_candidates > info.vocab_size:
            bound = f"less: the model has {info.vocab_size} tokens to choose from"
            raise RequestError("beam_width", request.beam.beam_width, bound)
    if params.seed is None or params.max_tokens is None:
        raise RequestError("params", "seed or max_tokens unset", "complete when it reaches the engine")


def verify_size(requests: Iterable[Request], vocab_size: int) -> None:
    """Check the log-probabilities of a call's answers, if there are more of a token than APIs have: a reply holds them
    all. Raises `RequestError`."""
    for field in ("prompt_logprobs", "logprobs"):
        num = count = 0
        for request in requests:
            width = getattr(request.params, field) or 0
            if not 0 <= width <= MAX_USUAL_LOGPROBS:
                count = width
                length = request.params.max_tokens if field == "logprobs" else len(request.prompt_token_ids)
                num += (length or 0) * (vocab_size if width < 0 else width)
        if num > MAX_REPLY_LOGPROBS:
            bound = f"such that a call has at most {MAX_REPLY_LOGPROBS} of them in all, and not {num}"
            raise RequestError(field, count, bound)


def max_len_of(request: Request, max_model_len: int) -> int:
    """Return the number of tokens, prompt included, at which the sequence ends at the latest."""
    return min(len(request.prompt_token_ids) + (request.params.max_tokens or NEVER), max_model_len)


def make_sequence(
    request: Request, seq_id: int, max_model_len: int, most: int, eos_token_ids: frozenset[int], cache: PrefixCache
) -> Sequence:
    """Return a waiting sequence without blocks, for a request that has passed `verify_fit`. A step computes at most
    `most` tokens of it. Raises as `verify_wholes`."""
    verify_wholes(request, most)
    root = cache.root(request.cache_salt, request.adapter)
    stops = stop_ids(request.params, eos_token_ids)
    seq = Sequence(request, seq_id, max_len_of(request, max_model_len), stops, root)
    if request.group:
        seq.family = cache.family_key(root, request.group, named(request.prompt_token_ids, request.pictures))
    return seq


LENGTH = Finish("length")
STOP = Finish("stop")


def stop_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Return every token id that may end a sequence with these parameters."""
    return frozenset(() if params.ignore_eos else eos_token_ids).union(params.stop_token_ids or ())


def finish_after(
    token_id: int, num_generated: int, full: bool, params: SamplingParams, eos_token_ids: Iterable[int]
) -> Finish | None:
    """Return how a sequence ends with its last token `token_id`, or None if it goes on.

    `num_generated` counts that token and the tokens resumed with the request. `full`: max_tokens or the end of the
    context is reached.
    """
    if num_generated >= params.min_tokens:
        if not params.ignore_eos and token_id in eos_token_ids:
            return STOP
        if params.stop_token_ids and token_id in params.stop_token_ids:
            return Finish("stop", stop_reason=token_id)
    return LENGTH if full else None


def finish_of(seq: Sequence, eos_token_ids: frozenset[int]) -> Finish | None:
    """Return how `seq` ends with its last token, or None if it goes on."""
    num = len(seq.tokens)
    return finish_after(seq.tokens[-1], num - seq.num_prompt, num >= seq.max_len, seq.params, eos_token_ids)


def append_known(
    more: dict[int, list[int]],
    flight: list[Sequence],
    seqs: list[Sequence],
    added: list[list[int]],
    ends: list[tuple[Sequence, Finish]],
    eos_token_ids: frozenset[int],
) -> None:
    """Append the tokens `more[i]` to flight[i], each under the rules of an end: they were sampled after accepted draft
    tokens, or a grammar forces them.

    `added` holds the tokens that each of `seqs` got in this step, and `ends` the sequences that end with it; both are
    extended. Tokens after an end are dropped.
    """
    places = {id(seq): place for place, seq in enumerate(seqs)}
    for seq, _ in ends:
        places.pop(id(seq), None)
    for index, token_ids in more.items():
        seq = flight[index]
        place = places.get(id(seq), -1)
        for token_id in token_ids if place >= 0 else ():
            seq.tokens.append(token_id)
            added[place].append(token_id)
            finish = finish_of(seq, eos_token_ids)
            if finish:
                ends.append((seq, finish))
                break
