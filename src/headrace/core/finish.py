"""When a sequence ends: the rules, as pure functions of ints.

Stop strings are not here: only the server knows text. The names and the order of the rules are vLLM's: nothing
stops a sequence before `min_tokens`, the end-of-sequence token comes before `stop_token_ids`, and both before length.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Finish

LENGTH = Finish("length")
STOP = Finish("stop")


def is_pooled(pooling: str, num_computed: int, num_tokens: int) -> bool:
    """Whether a sequence is done that samples nothing: it ends when its prompt is computed."""
    return bool(pooling) and num_computed == num_tokens


def stop_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Every token id that may end a sequence with these parameters."""
    return frozenset(() if params.ignore_eos else eos_token_ids).union(params.stop_token_ids or ())


def finish_after(
    token_id: int, num_generated: int, full: bool, params: SamplingParams, eos_token_ids: Iterable[int]
) -> Finish | None:
    """How a sequence ends whose last token is `token_id`, or None if it goes on.

    `num_generated` counts that token, and tokens resumed with the request. `full` says that there is room for
    no more: max_tokens or the context is reached.
    """
    if num_generated >= params.min_tokens:
        if not params.ignore_eos and token_id in eos_token_ids:
            return STOP
        if params.stop_token_ids and token_id in params.stop_token_ids:
            return Finish("stop", stop_reason=token_id)
    return LENGTH if full else None
