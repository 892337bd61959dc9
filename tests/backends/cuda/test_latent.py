"""Machine code of attention over keys that hold the values (multi-head latent attention)."""

from __future__ import annotations

import functools

import torch
from tests.support.cubin import compiled

from headrace.backends.base import LayerShape
from headrace.backends.cuda.cache import KVCache
from headrace.backends.cuda.kernels import attention, spans
from headrace.backends.cuda.launch import Launch


def of_shape(heads: int, kv_heads: int, head_dim: int, value_dim: int) -> list[Launch]:
    """Launches over a cache of bfloat16 whose keys hold the values, in the default configurations."""
    empty = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")
    ints = functools.partial(torch.empty, dtype=torch.int32, device="meta")
    shape = LayerShape(kv_heads, head_dim, value_dim, shares_key=True)
    layer = KVCache([shape], [64], 16, "bfloat16", torch.device("meta")).layers[0]
    return attention.attention(
        empty(512, heads * head_dim), empty(512, heads * value_dim), layer, ints(512), ints(512, spans.ITEM),
        spans.make_scratch(64, heads, kv_heads, head_dim, "meta", value_dim), heads=heads, kv_heads=kv_heads,
        scale=0.1, programs=264,
    )  # fmt: skip


def test_keys_that_begin_between_sixteen_bytes_are_not_loaded_by_sixteen() -> None:
    """Triton 3.6 did so with a key of 38 numbers whose first 32 are its values: a fault of the address on a GPU."""
    [few] = [one for one in of_shape(4, 1, 38, 32) if one.config.name == "BM=16 w4 s5"]
    assert compiled(few, 90).count("LDGSTS.E.BYPASS.128") == 0
    assert compiled(few, 90).count("LDGSTS.E") > 0
