"""`SchedulerOptions`: the numbers of one scheduler. Made by the composition roots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from headrace.protocol.kinds import CacheKind
from headrace.protocol.params import SamplingParams


class SchedulerOptions(NamedTuple):
    """The cache has `num_blocks` blocks of `block_size` slots; the pools of further kinds of cache have `more_blocks`.

    A step computes at most `max_num_batched_tokens` tokens of at most `max_num_seqs` sequences, and no more than
    `long_prefill_token_threshold` of one (0: no limit). `max_model_len` is lowered to what the pools can hold. With
    `enable_chunked_prefill` off, a sequence starts only if its whole gap fits the step. `policy` orders by arrival
    ("fcfs"), by priority, or by tenants' shares ("fair"), then arrival; a sequence that was overtaken `max_overtaking`
    times goes before all others. `vocab_size` is the number of log-probabilities that -1 stands for.
    `speculates`: the executor returns draft tokens. `runs_ahead` returns whether the
    executor can go on after a token that it draws with these parameters before that is known here; None: never.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kinds: tuple[CacheKind, ...] = (CacheKind(),)
    more_blocks: tuple[int, ...] = ()
    eos_token_ids: Iterable[int] = ()
    policy: str = "fcfs"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_overtaking: int = 32
    cache_key: bytes = b""
    cache_fingerprint: bytes = b""
    vocab_size: int = 0
    speculates: bool = False
    runs_ahead: Callable[[SamplingParams], bool] | None = None
