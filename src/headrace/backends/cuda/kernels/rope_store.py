"""Rotary embedding (Su et al. 2021) of queries and keys, and the store of keys and values in the cache, in one launch.

One program for HEADS heads of one row: of its queries, keys or values. A head lies in registers as its left numbers
[PAIRS] from FIRST on, which turn with the right ones [PAIRS], and the rest that does not turn, so that each thread
reads and writes the same places. Without a cache queries are turned alone. Keys and values become codes as
`torch_ref.rounded.as_stored` defines them, to the bit: divisions are exact, and fp8 is rounded by integers, since the
GPUs' conversions saturate where the definition does not, and sm_80 has none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.base import HeadForm, HeadNorm, Heads
from headrace.backends.cuda.cache import LayerCache
from headrace.backends.cuda.kernels.early import await_inputs
from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch
from headrace.backends.torch_ref.rowwise import row_sums

MOST = {"int8": 127.0, "fp8_e4m3": 448.0}
"""The largest code of the types with scales."""

INFINITY_BITS = tl.constexpr(0x7F800000)
TO_INTEGER = tl.constexpr(12582912.0)
"""1.5 * 2^23: a float32 sum with it is rounded to an integer, ties to even."""


@triton.jit
def _load(x, inside, left, rest, FIRST: tl.constexpr, PAIRS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load the three parts of heads whose first numbers are at `x` [HEADS, 1]."""
    pair = inside & (left < PAIRS)
    a = tl.load(x + FIRST + left, mask=pair, other=0.0).to(tl.float32)
    b = tl.load(x + FIRST + PAIRS + left, mask=pair, other=0.0).to(tl.float32)
    c = tl.load(x + rest, mask=inside & (rest < HEAD_DIM), other=0.0).to(tl.float32)
    return a, b, c


@triton.jit
def _store(x, a, b, c, inside, left, rest, FIRST: tl.constexpr, PAIRS: tl.constexpr, HEAD_DIM: tl.constexpr):
    pair = inside & (left < PAIRS)
    tl.store(x + FIRST + left, a.to(x.dtype.element_ty), mask=pair)
    tl.store(x + FIRST + PAIRS + left, b.to(x.dtype.element_ty), mask=pair)
    tl.store(x + rest, c.to(x.dtype.element_ty), mask=inside & (rest < HEAD_DIM))


@triton.jit
def _turned(
    a, b, c, weight, eps, offset, cos, sin, position, left, rest,
    FIRST: tl.constexpr, PAIRS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Norm the heads where there is a weight, and rotate them where there are angles."""
    if weight is not None:
        mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)) / HEAD_DIM
        scale = tl.rsqrt(mean + eps)[:, None]
        u, v, w = _load(weight, True, left, rest, FIRST, PAIRS, HEAD_DIM)
        a, b, c = a * scale * (u + offset), b * scale * (v + offset), c * scale * (w + offset)
    if cos is not None:
        x = tl.load(cos + position * PAIRS + left, mask=left < PAIRS, other=0.0)
        y = tl.load(sin + position * PAIRS + left, mask=left < PAIRS, other=0.0)
        a, b = a * x - b * y, b * x + a * y
    return a, b, c


@triton.jit
def _bits(x):
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _fp8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Round to fp8 with MANTISSA bits of fraction, ties to even, and return the code without the sign.

    A sum with a number whose last place is the smallest fp8 number rounds those below the normal ones.
    """
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = _bits(x)
    normal = bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)
    normal = (normal >> DROPPED) - ((127 - BIAS) << MANTISSA)
    LEAST: tl.constexpr = 2.0 ** (24 - MANTISSA - BIAS)
    small = _bits(tl.abs(x) + LEAST) - ((151 - MANTISSA - BIAS) << 23)
    return tl.where(bits < ((128 - BIAS) << 23), small, normal)


@triton.jit
def _code(x, inverse, KIND: tl.constexpr, MOST: tl.constexpr):
    if MOST is not None:
        x = tl.minimum(tl.maximum(x * inverse, -MOST), MOST)
    if KIND == "int8":
        x = tl.where(x == x, (x + TO_INTEGER) - TO_INTEGER, 0.0).to(tl.int8)
    if KIND == "fp8_e4m3":
        x = (_fp8(x, 3, 7) | tl.where(x < 0, 0x80, 0)).to(tl.uint8)
    if KIND == "fp8_e5m2":
        code = tl.where(_bits(x) > INFINITY_BITS, 0x7F, tl.minimum(_fp8(x, 2, 15), 0x7C))
        x = (code | tl.where(x < 0, 0x80, 0)).to(tl.uint8)
    return x


@triton.jit
def _put(
    cache, scales, a, b, c, scale, slot, head, inside, left, rest,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    place = (slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    _store(cache + place * HEAD_DIM, a, b, c, inside, left, rest, FIRST, PAIRS, HEAD_DIM)
    if MOST is not None:
        tl.store(scales + place, scale, mask=inside)


@triton.jit
def _keep(
    cache, scales, a, b, c, head, inside, left, rest, row, slots, copy_begin, copy_slots,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Write keys or values to the row's slot and to its further ones, as codes with their scale."""
    inverse = 1.0
    scale = 1.0
    if MOST is not None:
        # The largest of the bit patterns is the largest number, and NaN where there is one.
        most = tl.maximum(tl.maximum(tl.max(_bits(a), 1), tl.max(_bits(b), 1)), tl.max(_bits(c), 1))
        most = most.to(tl.float32, bitcast=True)[:, None]
        # torch divides a number by a tensor as the product with the reciprocal.
        inverse = tl.where(most > 0, tl.div_rn(1.0, tl.where(most > 0, most, 1.0)) * MOST, 0.0)
        scale = tl.div_rn(most, MOST)
    a, b, c = _code(a, inverse, KIND, MOST), _code(b, inverse, KIND, MOST), _code(c, inverse, KIND, MOST)
    slot = tl.load(slots + row).to(tl.int64)
    _put(
        cache, scales, a, b, c, scale, slot, head, inside, left, rest,
        KV_HEADS, HEAD_DIM, FIRST, PAIRS, BLOCK_SIZE, MOST,
    )  # fmt: skip
    if copy_begin is not None:
        for i in range(tl.load(copy_begin + row), tl.load(copy_begin + row + 1)):
            slot = tl.load(copy_slots + i).to(tl.int64)
            _put(
                cache, scales, a, b, c, scale, slot, head, inside, left, rest,
                KV_HEADS, HEAD_DIM, FIRST, PAIRS, BLOCK_SIZE, MOST,
            )  # fmt: skip


@triton.jit
def _rope_store(
    qkv, ld, slots, positions, copy_begin, copy_slots, cos, sin, q_weight, q_eps, q_offset, k_weight, k_eps, k_offset,
    keys, values, key_scales, value_scales, sizes,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    FIRST: tl.constexpr, PAIRS: tl.constexpr, VALUE_FIRST: tl.constexpr, VALUE_PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr, VALUE_REST: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr, MOST: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes):
        return
    QUERIES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KEYS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    group = tl.program_id(1)
    position = tl.load(positions + row).to(tl.int64)
    left = tl.arange(0, BLOCK_PAIRS)[None, :]
    rest = tl.arange(0, BLOCK_REST)[None, :]
    rest = tl.where(rest < FIRST, rest, rest + 2 * PAIRS)
    member = tl.arange(0, HEADS)[:, None]
    if group < QUERIES:
        head = group * HEADS + member
        inside = head < NUM_HEADS
        x = qkv + row * ld + head * HEAD_DIM
        a, b, c = _load(x, inside, left, rest, FIRST, PAIRS, HEAD_DIM)
        a, b, c = _turned(a, b, c, q_weight, q_eps, q_offset, cos, sin, position, left, rest, FIRST, PAIRS, HEAD_DIM)
        _store(x, a, b, c, inside, left, rest, FIRST, PAIRS, HEAD_DIM)
    elif KV_HEADS > 0:
        if group < QUERIES + KEYS:
            head = (group - QUERIES) * HEADS + member
            inside = head < KV_HEADS
            x = qkv + row * ld + (NUM_HEADS + head) * HEAD_DIM
            a, b, c = _load(x, inside, left, rest, FIRST, PAIRS, HEAD_DIM)
            a, b, c = _turned(
                a, b, c, k_weight, k_eps, k_offset, cos, sin, position, left, rest, FIRST, PAIRS, HEAD_DIM
            )  # fmt: skip
            _keep(
                keys, key_scales, a, b, c, head, inside, left, rest, row, slots, copy_begin, copy_slots,
                KV_HEADS, HEAD_DIM, FIRST, PAIRS, BLOCK_SIZE, KIND, MOST,
            )  # fmt: skip
        elif values is not None:
            head = (group - QUERIES - KEYS) * HEADS + member
            inside = head < KV_HEADS
            x = qkv + row * ld + (NUM_HEADS + KV_HEADS) * HEAD_DIM + head * VALUE_DIM
            rest = tl.arange(0, VALUE_REST)[None, :]
            rest = tl.where(rest < VALUE_FIRST, rest, rest + 2 * VALUE_PAIRS)
            a, b, c = _load(x, inside, left, rest, VALUE_FIRST, VALUE_PAIRS, VALUE_DIM)
            _keep(
                values, value_scales, a, b, c, head, inside, left, rest, row, slots, copy_begin, copy_slots,
                KV_HEADS, VALUE_DIM, VALUE_FIRST, VALUE_PAIRS, BLOCK_SIZE, KIND, MOST,
            )  # fmt: skip


def _twin(a: Arguments) -> None:
    rows = int(a.sizes[0])
    begin, end = a.NUM_HEADS * a.HEAD_DIM, (a.NUM_HEADS + a.KV_HEADS) * a.HEAD_DIM
    numbers = a.qkv[:rows].to(torch.float32, copy=True)
    query = numbers[:, :begin].reshape(rows, a.NUM_HEADS, a.HEAD_DIM)
    key = numbers[:, begin:end].reshape(rows, a.KV_HEADS, a.HEAD_DIM)
    query, key = _normed(query, a.q_weight, a.q_eps, a.q_offset), _normed(key, a.k_weight, a.k_eps, a.k_offset)
    if a.cos is not None and a.sin is not None:
        places = a.positions[:rows].long()
        angles = a.cos[places].unsqueeze(1), a.sin[places].unsqueeze(1)
        query, key = _rotated(query, *angles, a.FIRST), _rotated(key, *angles, a.FIRST)
    a.qkv[:rows, :begin] = query.flatten(1)
    if not a.KV_HEADS:
        return
    row_ids, all_slots = torch.arange(rows, device=a.qkv.device), a.slots[:rows]
    if a.copy_begin is not None and a.copy_slots is not None:
        counts = a.copy_begin[1 : rows + 1] - a.copy_begin[:rows]
        row_ids = torch.cat([row_ids, torch.repeat_interleave(row_ids, counts)])
        all_slots = torch.cat([all_slots, a.copy_slots[a.copy_begin[0] : a.copy_begin[rows]]])
    blocks, offsets = (all_slots // a.BLOCK_SIZE).long(), (all_slots % a.BLOCK_SIZE).long()
    stored = [(key, a.keys, a.key_scales)]
    if a.values is not None:
        value = numbers[:, end : end + a.KV_HEADS * a.VALUE_DIM].reshape(rows, a.KV_HEADS, a.VALUE_DIM)
        stored.append((value, a.values, a.value_scales))
    for part, cache, scales in stored:
        codes, scale = coded(part, a.KIND)
        cache[blocks, :, offsets] = codes[row_ids].view(cache.dtype) if cache.itemsize == 1 else codes[row_ids]
        if scales is not None and scale is not None:
            scales[blocks, :, offsets] = scale[row_ids]


def _normed(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(row_sums(x * x) / x.shape[-1] + eps) * (weight.float() + offset)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, first: int) -> Tensor:
    pairs = cos.shape[-1]
    before, left, right, behind = torch.split(x, [first, pairs, pairs, x.shape[-1] - first - 2 * pairs], -1)
    return torch.cat([before, left * cos - right * sin, right * cos + left * sin, behind], -1)


def coded(x: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """Return x [..., D] float32 in the cache's type `kind`, and for types with scales one for each head."""
    if kind not in MOST:
        return x.to({"fp8_e5m2": torch.float8_e5m2, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(
            kind, torch.float32)), None  # fmt: skip
    most = MOST[kind]
    amax = x.abs().amax(-1, keepdim=True)
    numbers = (x * torch.where(amax > 0, most / amax, 0)).clamp(-most, most)
    codes = torch.round(numbers).to(torch.int8) if kind == "int8" else numbers.to(torch.float8_e4m3fn)
    return codes, (amax / most).squeeze(-1)


# One configuration for each size of heads: the sums of a norm follow from the layout of its tile.
KERNEL = Kernel(_rope_store, _twin, (Config({"HEADS": 8}, 2), Config({"HEADS": 2}, 2)), fuse=False)
LARGE = 256
"""Heads with more numbers are taken by the second configuration."""


def rope_store(
    qkv: Tensor,
    heads: Heads,
    cache: LayerCache | None,
    slots: Tensor | None,
    positions: Tensor,
    sizes: Tensor,
    num_rows: int,
    form: HeadForm = HeadForm(),
    *,
    copies: tuple[Tensor, Tensor] | None = None,
) -> Launch:
    """Turn queries and keys of qkv [R, heads]; queries stay in their columns, keys and values go to the cache. Without
    a cache and slots there are queries alone; values that are part of the keys are not there.

    sizes: int32, numbers of rows in device memory; sizes[0] counts here, at most `num_rows`.
    slots, positions: int32 [R]; a slot is block * block_size + offset.
    copies: int32 begin [R + 1] and slots; row r is also written to slots[begin[r] : begin[r + 1]].
    Between the norm and the rotation, and before the codes, numbers are float32.
    """
    head_dim, value_dim, (rope_table, q_norm, k_norm) = heads.head_dim, heads.value_size, form
    pairs, first = (head_dim // 2, 0) if rope_table is None else (rope_table.cos.shape[1], rope_table.first)
    # Values are read as keys are, or as what does not turn.
    value_pairs, value_first = (pairs, first) if value_dim == head_dim else (0, 0)
    cos, sin = (None, None) if rope_table is None else rope_table[:2]
    of_query, of_key = q_norm or HeadNorm(None, 0.0, 0.0), k_norm or HeadNorm(None, 0.0, 0.0)
    copy_begin, copy_slots = (None, None) if copies is None or cache is None else copies
    keys, key_scales, values, value_scales, kind, block_size = None, None, None, None, "", 1
    if cache is not None:
        keys, key_scales, kind, block_size = cache.keys, cache.key_scales, cache.dtype, cache.block_size
        keys = keys.view(torch.uint8) if kind.startswith("fp8") else keys
    if cache is not None and not cache.shares_key:
        values, value_scales = cache.values, cache.value_scales
        values = values.view(torch.uint8) if kind.startswith("fp8") else values
    arguments: dict[str, Argument] = {
        "qkv": qkv, "ld": qkv.stride(0), "slots": slots, "positions": positions, "copy_begin": copy_begin,
        "copy_slots": copy_slots, "cos": cos, "sin": sin,
        "q_weight": of_query.weight, "q_eps": of_query.eps, "q_offset": of_query.offset,
        "k_weight": of_key.weight, "k_eps": of_key.eps, "k_offset": of_key.offset,
        "keys": keys, "values": values, "key_scales": key_scales, "value_scales": value_scales,
        "sizes": sizes, "NUM_HEADS": heads.num_heads, "KV_HEADS": heads.num_kv_heads, "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim, "FIRST": first, "PAIRS": pairs, "VALUE_FIRST": value_first, "VALUE_PAIRS": value_pairs,
        "BLOCK_PAIRS": triton.next_power_of_2(pairs), "BLOCK_REST": _rest(head_dim, pairs),
        "VALUE_REST": _rest(value_dim, value_pairs), "BLOCK_SIZE": block_size, "KIND": kind, "MOST": MOST.get(kind),
    }  # fmt: skip
    config = KERNEL.configs[max(head_dim, value_dim) > LARGE]
    per_tile = config.tiles["HEADS"]
    groups = triton.cdiv(heads.num_heads, per_tile) + (1 + (values is not None)) * triton.cdiv(
        heads.num_kv_heads, per_tile
    )
    return Launch(KERNEL, (num_rows, groups), arguments, config)


def _rest(size: int, pairs: int) -> int:
    """Return the columns of a tile for the numbers of a head that do not turn."""
    return int(triton.next_power_of_2(max(size - 2 * pairs, 1)))
