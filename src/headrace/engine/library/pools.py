"""The type of the cache, and how its memory is divided among the pools of its kinds. Called by `engine.library.load`.

A kind that keeps all positions gets the memory that is left: the other kinds need as much as `max_num_seqs` sequences
hold, and a share for cached prefixes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from headrace import models
from headrace.backends.base import Backend
from headrace.core.tables import SNAPSHOT_EVERY
from headrace.protocol.config import KV_ALIASES, EngineConfig
from headrace.protocol.errors import RequestError
from headrace.protocol.kinds import CacheKind
from headrace.quant.schemes import FP8_CACHE, cache_scheme

MIN_AUTO_MODEL_LEN = 1024
MAX_EMPTY_BLOCKS = 2**18
"""Most blocks of a model whose layers keep states alone: they have numbers and no bytes."""
LEAST_CHUNK = 256
"""Rows of a prompt for which the pool of a window has room at least."""

logger = logging.getLogger(__name__)


def longest_table(kinds: Sequence[CacheKind], num_blocks: int, max_model_len: int, block_size: int) -> int:
    """Return the entries of the longest table: a sequence may be longer than a pool whose blocks it gives back."""
    longest = -(-max_model_len // block_size)
    return longest if kinds[0].window else min(num_blocks, longest)


def token_bytes(backend: Backend, model: models.Model, block_size: int, kv_dtype: str) -> int:
    """Return the bytes that the kinds of blocks keep of a token, before any window has passed it."""
    kinds = [index for index, kind in enumerate(model.kinds) if not kind.is_state]
    return sum(backend.block_bytes(model, kind, block_size, kv_dtype) for kind in kinds) // block_size


def bounds_of(kind: CacheKind, config: EngineConfig, max_model_len: int) -> tuple[int, int]:
    """Return the fewest blocks (or slots) with which a kind works, and the most that are of use to it."""
    size, num_seqs = config.block_size, config.max_num_seqs
    whole = -(-max_model_len // size)
    if kind.is_state:
        # A sequence reads one slot and writes another. Snapshots need one slot for each prompt, and one for each
        # interval of its length.
        return 2, num_seqs * (3 + -(-max_model_len // SNAPSHOT_EVERY))
    if not kind.window or not config.enable_chunked_prefill:
        return whole, num_seqs * whole
    span, chunk = -(-kind.window // size) + 1, min(config.max_num_batched_tokens, max_model_len)
    least = min(whole, span + -(-min(chunk, LEAST_CHUNK) // size))
    # Twice the windows of all sequences: positions that one has passed stay cached for the next.
    return least, min(num_seqs * whole, 2 * num_seqs * span + -(-chunk // size))


def choose_pool_sizes(
    config: EngineConfig, model: models.Model, max_model_len: int, backend: Backend, kv_dtype: str, max_pieces: int
) -> tuple[int, ...]:
    """Blocks (or slots) of each kind of the cache: by the override, or as many as the given memory or the backend's
    budget holds.

    Of the budget no more is used than max_num_seqs sequences of max_model_len fill. If not even one such sequence fits,
    and no length was set, the context is narrowed to the cache, down to 1024 tokens. Raises `RequestError`
    otherwise.
    """
    bounds = [bounds_of(kind, config, max_model_len) for kind in model.kinds]
    each = [backend.block_bytes(model, kind, config.block_size, kv_dtype) for kind in range(len(model.kinds))]
    least = bounds[0][0]
    if config.num_gpu_blocks_override is not None:
        num_blocks = value = config.num_gpu_blocks_override
        field, needed = "num_gpu_blocks_override", least
        others = [max(low, min(num_blocks, high)) for low, high in bounds[1:]]
    else:
        field, value = "kv_cache_memory_bytes", config.kv_cache_memory_bytes or 0
        if config.kv_cache_memory_bytes is None:
            field, value = "max_model_len", kv_budget(config, model, backend, max_pieces, max_model_len)
        others = divide(value - least * each[0], bounds[1:], each[1:])
        num_others = sum(num * size for num, size in zip(others, each[1:], strict=True))
        num_blocks, needed = max(0, value - num_others) // max(each[0], 1), least * each[0] + num_others
        if not each[0]:
            num_blocks = max(least, min(bounds[0][1], MAX_EMPTY_BLOCKS))
        if field == "max_model_len":
            num_blocks = min(num_blocks, bounds[0][1])
    if num_blocks >= least:
        return num_blocks, *others
    fits = num_blocks * config.block_size
    if config.max_model_len is None and fits >= MIN_AUTO_MODEL_LEN:
        num_bytes = sum(num * size for num, size in zip((num_blocks, *others), each, strict=True))
        logger.warning(
            "the context is %d tokens, which is what the KV cache of %d bytes holds; the model has %d. "
            "Set max_model_len or kv_cache_memory_bytes to choose",
            fits, num_bytes, max_model_len,
        )  # fmt: skip
        return num_blocks, *others
    if field == "max_model_len":
        bound = f"at most {fits}, which is what the KV cache of {value} bytes holds; or set kv_cache_memory_bytes"
        raise RequestError(field, max_model_len, bound)
    raise RequestError(field, value, f"at least {needed}, to hold one sequence of max_model_len {max_model_len}")


def kv_budget(config: EngineConfig, model: models.Model, backend: Backend, max_pieces: int, max_model_len: int) -> int:
    """Return the bytes of a cache whose size is not set."""
    if backend.device == "cpu" and config.gpu_memory_utilization != EngineConfig().gpu_memory_utilization:
        logger.warning("gpu_memory_utilization has no effect on a CPU: kv_cache_memory_bytes sets the KV cache's size")
    return backend.kv_budget(
        model, max_pieces, config.max_num_batched_tokens, max_model_len, config.gpu_memory_utilization
    )


def divide(room: int, bounds: Sequence[tuple[int, int]], each: Sequence[int]) -> list[int]:
    """Return the sizes of the pools after the first: the least size of each, and a part of the rest up to the largest
    useful size. Half of the `room` beyond all least sizes, kind 0's included, is divided so; every kind gets the same
    part."""
    lows = [low for low, _ in bounds]
    spare = room - sum(low * size for low, size in zip(lows, each, strict=True))
    more = sum((high - low) * size for (low, high), size in zip(bounds, each, strict=True))
    share = min(1.0, max(0, spare) / 2 / more) if more else 0.0
    return [low + int((high - low) * share) for low, high in bounds]


def choose_kv_dtype(kv_dtype: str, backend: Backend, quantization_config: dict[str, Any] | None = None) -> str:
    """Return `kv_dtype`, or for "auto" the type that the checkpoint's config names for the cache, else the model's
    dtype.

    Raises `RequestError` for one that the backend lacks, and `CheckpointError` for a config that makes no sense."""
    stated = cache_scheme(quantization_config)
    if kv_dtype == "auto":
        if stated is None:
            return backend.dtype
        if stated == FP8_CACHE and FP8_CACHE in backend.kv_dtypes:
            # k_scale and v_scale stand for a whole layer: the scales that each token and head has here are finer.
            logger.info(
                "the checkpoint's config wants its cache in %s: here each token and head has a scale, k_scale and "
                "v_scale are not used; --kv-cache-dtype %s leaves it in floats",
                stated,
                backend.dtype,
            )
            return FP8_CACHE
        logger.warning(
            "the checkpoint's config wants its cache in %s, which the backend %s does not have: it stays in %s",
            stated,
            backend.name,
            backend.dtype,
        )
        return backend.dtype
    kv_dtype = KV_ALIASES.get(kv_dtype, kv_dtype)
    if kv_dtype not in backend.kv_dtypes:
        raise RequestError(
            "kv_cache_dtype", kv_dtype, f"one of auto, {', '.join(backend.kv_dtypes)} on backend {backend.name}"
        )
    return kv_dtype
