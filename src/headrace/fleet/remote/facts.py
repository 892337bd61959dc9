"""The bounds of the numbers with which an engine on another host begins: `check` refuses an engine beyond them.

Called by `link` at the handshake; all that counts on `EngineInfo` later may then do so without a look at each number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from headrace.fleet.remote.wire import Loaded
from headrace.protocol.adapters import MAX_LORA_RANK, MAX_LORAS
from headrace.protocol.kinds import POLICIES
from headrace.protocol.step import ALL_ROWS, POOLINGS, SPARSE_POOLINGS, EngineInfo
from headrace.secure.handshake import HandshakeError

MAX_BYTES = 2**50
MAX_SECONDS = 86_400
MAX_LETTERS = 4096
MAX_KINDS = 64


class Range(NamedTuple):
    """Allowed numbers, ends included."""

    low: float
    high: float


BOUNDS = {
    "max_model_len": Range(1, 2**30),
    "vocab_size": Range(1, 2**24),
    "block_size": Range(1, 2**20),
    "num_blocks": Range(1, 2**40),
    "max_num_seqs": Range(1, 2**20),
    "max_num_batched_tokens": Range(1, 2**30),
    "max_logprobs": Range(-1, 2**24),
    "hidden_size": Range(0, 2**24),
    "weight_bytes": Range(0, MAX_BYTES),
    "kv_token_bytes": Range(0, MAX_BYTES),
}
"""Of the single numbers of `EngineInfo`: far above those of any model, and below those at which a list of that length
would be a fault."""
TEXTS = ("model", "dtype", "kv_cache_dtype", "quantization", "activations", "backend", "device", "version", "pictures")


def check(loaded: Loaded) -> None:
    """Raise `HandshakeError` for the first number that no engine has."""
    info = loaded.info
    numbers = [(f"info.{name}", getattr(info, name), bound) for name, bound in BOUNDS.items()]
    for field, value, bound in [*numbers, *_more(info), ("seconds", loaded.seconds, Range(0, MAX_SECONDS))]:
        # The comparison is false for NaN.
        if not bound.low <= value <= bound.high:
            raise _refusal(field, value, f"from {bound.low:g} to {bound.high:,.15g}")
    texts = [(f"info.{name}", getattr(info, name)) for name in TEXTS]
    for field, text in [*texts, ("weights", loaded.weights)]:
        if len(text) > MAX_LETTERS:
            raise _refusal(field, text[:20] + "...", f"of at most {MAX_LETTERS} letters")
    for name, adapter in info.adapters.items():
        if max(map(len, (name, adapter.digest, adapter.base, adapter.path))) > MAX_LETTERS:
            raise _refusal("info.adapters", name[:20] + "...", f"of at most {MAX_LETTERS} letters")
    for each in (text for pair in info.vectors.prompts.items() for text in pair):
        if len(each) > MAX_LETTERS:
            raise _refusal("info.vectors.prompts", each[:20] + "...", f"of at most {MAX_LETTERS} letters")
    for label in info.classes.labels if info.classes is not None else ():
        if len(label) > MAX_LETTERS:
            raise _refusal("info.classes", label[:20] + "...", f"of at most {MAX_LETTERS} letters")
    kinds = info.pooling.split("+") if info.pooling else []
    if len(set(kinds) & set(POOLINGS)) < len(kinds) and info.pooling not in (*SPARSE_POOLINGS, ALL_ROWS):
        known = f"one or several of {', '.join(POOLINGS)}, or one of {', '.join((*SPARSE_POOLINGS, ALL_ROWS))}"
        raise _refusal("info.pooling", info.pooling[:80], known)
    if info.scheduling_policy not in POLICIES:
        raise _refusal("info.scheduling_policy", info.scheduling_policy[:80], f"one of {', '.join(POLICIES)}")


def _more(info: EngineInfo) -> Iterator[tuple[str, float, Range]]:
    """Yield the numbers of `info` that are in lists."""
    yield "the length of info.eos_token_ids", len(info.eos_token_ids), Range(0, 1024)
    yield from (("info.eos_token_ids", each, Range(0, info.vocab_size - 1)) for each in info.eos_token_ids)
    yield "the length of info.adapters", len(info.adapters), Range(0, MAX_LORAS)
    for adapter in info.adapters.values():
        yield "info.adapters.rank", adapter.rank, Range(1, MAX_LORA_RANK)
        yield "info.adapters.num_layers", adapter.num_layers, Range(1, 2**20)
    if info.classes is not None:
        yield "the length of info.classes", len(info.classes.labels), Range(1, 2**16)
        yield "info.classes.second_type", info.classes.second_type, Range(0, info.vocab_size)
    yield "the length of info.vectors.prompts", len(info.vectors.prompts), Range(0, 1024)
    yield "info.vectors.dimensions", info.vectors.dimensions or 1, Range(1, max(1, info.hidden_size))
    yield "the length of info.kinds", len(info.kinds), Range(1, MAX_KINDS)
    yield from (("info.kinds.window", kind.window, Range(0, 2**30)) for kind in info.kinds)
    yield "the length of info.more_blocks", len(info.more_blocks), Range(0, len(info.kinds) - 1)
    yield from (("info.more_blocks", each, Range(0, 2**40)) for each in info.more_blocks)


def _refusal(field: str, value: object, bound: str) -> HandshakeError:
    return HandshakeError(f"it can not be used: {field} is {value!r}, and must be {bound}", is_final=True)
