"""From a `Request` to a `Sequence`: what is refused at the door, and where a sequence ends at the latest.

Pure functions; called by the scheduler alone. That the token ids exist in the model is `engine.core.verify`'s matter.
"""

from __future__ import annotations

from headrace.core.finish import stop_ids
from headrace.core.prefix import PrefixCache
from headrace.core.sequence import NEVER, Sequence
from headrace.protocol.errors import ContextLengthError, RequestError
from headrace.protocol.step import Request


def make_sequence(
    request: Request, seq_id: int, max_model_len: int, eos_token_ids: frozenset[int], cache: PrefixCache
) -> Sequence:
    """A waiting sequence without blocks.

    Raises `RequestError` for an empty prompt or too many resumed tokens, and `ContextLengthError` for a prompt that
    leaves no room for a token (so it could never run).
    """
    num_prompt = len(request.prompt_token_ids)
    if not num_prompt:
        raise RequestError("prompt_token_ids", [], "at least one token")
    if num_prompt >= max_model_len:
        raise ContextLengthError("prompt", num_prompt, f"at most {max_model_len - 1} tokens long")
    max_len = min(num_prompt + (request.params.max_tokens or NEVER), max_model_len)
    if num_prompt + len(request.resume_token_ids) > max_len:
        bound = f"at most {max_len - num_prompt} tokens long"
        raise RequestError("resume_token_ids", len(request.resume_token_ids), bound)
    root = cache.root(request.cache_salt)
    seq = Sequence(request, seq_id, max_len, stop_ids(request.params, eos_token_ids), root)
    if request.group:
        seq.family = cache.family_key(root, request.group, request.prompt_token_ids)
    return seq


def verify_numbers(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_overtaking: int,
    max_model_len: int,
    long_prefill_token_threshold: int,
    policy: str,
) -> None:
    """Raises `ValueError` for numbers that no scheduler can work with."""
    for name, value, least in (
        ("max_num_seqs", max_num_seqs, 1),
        ("max_num_batched_tokens", max_num_batched_tokens, 1),
        ("max_overtaking", max_overtaking, 1),
        ("max_model_len", max_model_len, 2),
        ("long_prefill_token_threshold", long_prefill_token_threshold, 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if policy not in ("fcfs", "priority", "fair"):
        raise ValueError(f"policy must be fcfs, priority or fair, got {policy!r}")
