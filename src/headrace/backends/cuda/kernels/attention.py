"""Causal attention over the paged cache, with an online softmax in base 2 (FlashAttention-2, Dao 2023; FlashDecoding).

A row's keys are summed in spans of SPAN positions counted from position 0, a span in tiles of TILE keys, and the spans
are merged in ascending order. Programs walk through a work list (`spans.work_list`). An item is a tile of rows of one
sequence with all its spans, or with one: then the partial sums go to the scratch, and the last program to arrive merges
them by the same formula. A tile or span that a row does not see leaves the row's sums exactly as they were, so a row
has the same bits in any tile, split or not. A key may be cut in two parts, whose products are added in this order, and
the heads that share a key may be cut in pieces (`spans.group_rows`): both follow from the heads' sizes alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.cuda.cache import LayerCache
from headrace.backends.cuda.kernels.early import await_inputs
from headrace.backends.cuda.kernels.rows import opaque
from headrace.backends.cuda.kernels.spans import ITEM, LARGE, SPAN, Scratch, group_rows, num_pieces, tile_keys
from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch
from headrace.backends.torch_ref.attention import first_seen
from headrace.backends.torch_ref.rowwise import elementwise, padded, products, row_sums

LOG2_E = math.log2(math.e)
NOTHING = tl.constexpr(float("-inf"))
"""The largest score of no scores."""
_SPAN, _ITEM, _SUMS = tl.constexpr(SPAN), tl.constexpr(ITEM), tl.constexpr(8)
_LOG2_E = tl.constexpr(LOG2_E)
MOST_WIDTH = 512
"""Numbers of a key that are multiplied at once; more of them are a second part."""

PART = tl.constexpr(64)
"""Numbers of queries and keys that are multiplied at once in float32, where heads are large."""


@triton.jit
def _merged(top, total, o, span_top, span_total, span_o):
    """Add a span's sums to the sums of the spans before it."""
    most = tl.maximum(top, span_top)
    base = tl.where(most == NOTHING, 0.0, most)
    before, now = tl.exp2(top - base), tl.exp2(span_top - base)
    total = tl.fma(total, before, span_total * now)
    return most, total, tl.fma(o, before[:, None], span_o * now[:, None])


@triton.jit
def _loaded(x, inside, MASKED: tl.constexpr):
    """Load numbers; without MASKED all are inside."""
    return tl.load(x, mask=inside, other=0.0) if MASKED else tl.load(x)


@triton.jit
def _add_tiles(
    q, q_rest, query, real, top, total, o, first, stop, end, position,
    keys, values, key_scales, value_scales, table, head, inner, outer, ahead,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, AHEAD: tl.constexpr, IN_PARTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the key tiles from position `first` to `stop`. No key at `end` or behind it is read. Without MASKED every row
    sees every key. `total` [rows, SUMS] has equal columns: a product with ones sums in the same order in any layout of
    threads, which `tl.sum` does not."""
    column, v_column = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    ones = tl.full([TILE, _SUMS], 1.0, tl.float32).to(q.dtype)
    for n in tl.range(first, stop, TILE):
        at = n + tl.arange(0, TILE)
        block = tl.load(table + at // BLOCK, mask=at < end, other=0) if MASKED else tl.load(table + at // BLOCK)
        slot = (block * KV_HEADS + head) * BLOCK + at % BLOCK
        place = slot.to(tl.int64)[:, None]
        inside = (at < end)[:, None]
        if not IN_PARTS:
            # Triton 3.6 takes rows of DIM numbers to be aligned as those of WIDTH are: the mask has their step too.
            whole = inside & (column < FIRST)[None, :] & (column < (DIM if DIM % 8 else WIDTH))[None, :]
            k = _loaded(keys + place * DIM + column[None, :], whole, MASKED or WIDTH > FIRST or DIM % 8 != 0)
        if not SHARED or IN_PARTS:
            v = _loaded(
                values + place * (DIM if SHARED else VALUE_DIM) + v_column[None, :],
                inside & (v_column < VALUE_DIM)[None, :],
                MASKED or VALUE_WIDTH > VALUE_DIM,
            )
        if IN_PARTS:
            s = tl.zeros([query.shape[0], TILE], tl.float32)
            part = tl.arange(0, PART)[None, :]
            for c in tl.static_range(0, DIM, PART):
                x = tl.load(query + c + part, mask=real[:, None] & (c + part < DIM), other=0.0)
                y = tl.load(keys + place * DIM + c + part, mask=inside & (c + part < DIM), other=0.0)
                s = tl.dot(x.to(tl.float32), tl.trans(y.to(tl.float32)), s, input_precision="ieee")
        else:
            if k.dtype != q.dtype:
                k = opaque(k.to(tl.float32).to(q.dtype))
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            if REST:
                rest = FIRST + tl.arange(0, REST)
                y = tl.load(keys + place * DIM + rest[None, :], mask=inside & (rest < DIM)[None, :], other=0.0)
                if y.dtype != q.dtype:
                    y = opaque(y.to(tl.float32).to(q.dtype))
                s = tl.dot(q_rest, tl.trans(y), s, input_precision="ieee")
            if SHARED:
                v = k
        if key_scales is not None:
            s *= tl.load(key_scales + slot, mask=at < end, other=0.0)[None, :]
        if SOFTCAP:
            # The hyperbolic tangent, which is 1 from here on. A comparison lets NaN pass, where a minimum would not.
            power = s * inner
            s = 1.0 - 2.0 / (tl.exp2(tl.where(power > 64.0, 64.0, power)) + 1.0)
        if MASKED:
            if AHEAD:
                seen = (at[None, :] <= position[:, None] + ahead) & (at < end)[None, :]
            else:
                seen = at[None, :] <= position[:, None]
            if WINDOW > 0:
                seen &= at[None, :] > position[:, None] - WINDOW
            if WINDOW < 0:
                seen &= at[None, :] >= (position // -WINDOW * -WINDOW)[:, None]
            s = tl.where(seen, s, NOTHING)
        most = tl.maximum(top, tl.max(s, 1) * outer)
        base = tl.where(most == NOTHING, 0.0, most)
        before = tl.exp2(top - base)
        p = tl.exp2(tl.fma(s, outer, -base[:, None]))
        weights = p.to(q.dtype)
        total = tl.dot(weights, ones, total * before[:, None], input_precision="ieee")
        if value_scales is not None:
            weights = (p * tl.load(value_scales + slot, mask=at < end, other=0.0)[None, :]).to(q.dtype)
        if v.dtype != q.dtype:
            v = opaque(v.to(tl.float32).to(q.dtype))
        o = tl.dot(weights, v, o * before[:, None], input_precision="ieee")
        top = most
    return top, total, o


@triton.jit
def _rows(item, unit, i, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, PIECES: tl.constexpr):
    """Return an item's first row, number of rows and first position, which of the tile's rows `i` are real, and their
    query heads. unit: a key head, or a piece of the heads that share one."""
    num_rows = tl.load(item + 1, volatile=True)
    member = unit % PIECES * GROUP_ROWS + i % GROUP_ROWS
    real = (i // GROUP_ROWS < num_rows) & (member < GROUP)
    row, start = tl.load(item, volatile=True), tl.load(item + 2, volatile=True)
    return row, num_rows, start, real, unit // PIECES * GROUP + member


@triton.jit
def _attention(
    query, ld_query, out, ld_out, keys, values, key_scales, value_scales, sinks, blocks, items, sums, totals, arrived,
    inner, outer, ahead, KIND: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    PIECES: tl.constexpr, DIM: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, AHEAD: tl.constexpr, WIDE: tl.constexpr, IN_PARTS: tl.constexpr,
    BM: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    await_inputs(EARLY)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    UNITS: tl.constexpr = KV_HEADS * PIECES
    if KIND == 0:
        first_item = 1
    else:
        first_item = tl.load(items) + 1
    i, column, v_column = tl.arange(0, BM), tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    for work in tl.range(tl.program_id(0), tl.load(items + KIND) * UNITS, tl.num_programs(0)):
        item = items + (first_item + work // UNITS) * _ITEM
        unit = work % UNITS
        head = unit // PIECES
        table = blocks + tl.load(item + 3)
        first_span, end_span = tl.load(item + 4), tl.load(item + 5)
        row, num_rows, start, real, query_head = _rows(item, unit, i, GROUP, GROUP_ROWS, PIECES)
        position = tl.where(real, start + i // GROUP_ROWS, -1)
        at = (row + i // GROUP_ROWS).to(tl.int64)
        q_row = query + (at * ld_query + query_head * DIM)[:, None]
        q_rest = None
        if IN_PARTS:
            q = tl.zeros([BM, 1], tl.float32)
        else:
            q = tl.load(q_row + column[None, :], mask=real[:, None] & (column < FIRST)[None, :], other=0.0)
            if WIDE:
                q = q.to(tl.float32)
            if REST:
                rest = tl.arange(0, REST)
                inside = real[:, None] & (rest < DIM - FIRST)[None, :]
                q_rest = tl.load(q_row + FIRST + rest[None, :], mask=inside, other=0.0)
                if WIDE:
                    q_rest = q_rest.to(tl.float32)
        end = tl.load(item + 7) if AHEAD else start + num_rows
        low = 0
        if WINDOW > 0:
            low = tl.maximum(start - WINDOW + 1, 0) // TILE * TILE
        if WINDOW < 0:
            low = start // -WINDOW * -WINDOW // TILE * TILE
        top = tl.full([BM], NOTHING, tl.float32)
        total = tl.zeros([BM], tl.float32)
        o = tl.zeros([BM, VALUE_WIDTH], tl.float32)
        low_span = low // _SPAN
        for span in tl.range(tl.maximum(first_span, low_span), end_span):
            m, t = tl.full([BM], NOTHING, tl.float32), tl.zeros([BM, _SUMS], tl.float32)
            s = tl.zeros([BM, VALUE_WIDTH], tl.float32)
            n, stop = tl.maximum(span * _SPAN, low), tl.minimum(span * _SPAN + _SPAN, end)
            if KIND == 1 and WINDOW == 0:
                clear = tl.maximum(tl.minimum(stop, (start + 1) // TILE * TILE), n)
                m, t, s = _add_tiles(
                    q, q_rest, q_row, real, m, t, s, n, clear, end, position, keys, values, key_scales, value_scales,
                    table, head, inner, outer, ahead, KV_HEADS, DIM, FIRST, WIDTH, REST, VALUE_DIM, VALUE_WIDTH,
                    SHARED, BLOCK, TILE, WINDOW, SOFTCAP, AHEAD, IN_PARTS, False,
                )  # fmt: skip
                n = clear
            m, t, s = _add_tiles(
                q, q_rest, q_row, real, m, t, s, n, stop, end, position, keys, values, key_scales, value_scales,
                table, head, inner, outer, ahead, KV_HEADS, DIM, FIRST, WIDTH, REST, VALUE_DIM, VALUE_WIDTH,
                SHARED, BLOCK, TILE, WINDOW, SOFTCAP, AHEAD, IN_PARTS, True,
            )  # fmt: skip
            top, total, o = _merged(top, total, o, m, tl.max(t, 1), s)
        # Read again, so that nothing of it is held in registers in the loops.
        row, num_rows, start, real, query_head = _rows(item, unit, i, GROUP, GROUP_ROWS, PIECES)
        full = real[:, None] & (v_column < VALUE_DIM)[None, :]
        last = end_span > low_span
        if KIND == 0:
            slot = tl.load(item + 6)
            if (slot >= 0) & last:
                # One span of several: the last program to arrive merges all.
                parts = (end - 1) // _SPAN + 1 - low_span
                place = (slot + i // GROUP_ROWS) * HEADS + query_head
                mine = place + (first_span - low_span) * num_rows * HEADS
                tl.store(sums + mine.to(tl.int64)[:, None] * VALUE_DIM + v_column[None, :], o, mask=full)
                tl.store(totals + mine * 2, top, mask=real)
                tl.store(totals + mine * 2 + 1, total, mask=real)
                # All threads' stores come before the count of one thread, and its count before all threads' loads.
                tl.debug_barrier()
                counter = arrived + slot * UNITS + unit
                last = tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
                if last:
                    tl.store(counter, 0)
                    top = tl.full([BM], NOTHING, tl.float32)
                    total = tl.zeros([BM], tl.float32)
                    o = tl.zeros([BM, VALUE_WIDTH], tl.float32)
                    for _ in tl.range(0, parts):
                        m = tl.load(totals + place * 2, mask=real, other=NOTHING, cache_modifier=".cg")
                        t = tl.load(totals + place * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
                        part = sums + place.to(tl.int64)[:, None] * VALUE_DIM + v_column[None, :]
                        s = tl.load(part, mask=full, other=0.0, cache_modifier=".cg")
                        top, total, o = _merged(top, total, o, m, t, s)
                        place += num_rows * HEADS
        if sinks is not None:
            # One more key behind all others, with the value 0.
            sink = tl.load(sinks + query_head, mask=real, other=0.0).to(tl.float32) * _LOG2_E
            most = tl.maximum(top, sink)
            before = tl.exp2(top - most)
            total = tl.fma(total, before, tl.exp2(sink - most))
            o = o * before[:, None]
        # A sum that underflowed is -0 or +0 depending on keys that the row does not see.
        o = o / tl.where(total == 0.0, 1.0, total)[:, None] + 0.0
        at = (row + i // GROUP_ROWS).to(tl.int64)
        to = out + (at * ld_out + query_head * VALUE_DIM)[:, None] + v_column[None, :]
        tl.store(to, o.to(out.dtype.element_ty), mask=full & last)


def _twin(a: Arguments) -> None:
    few, many = a.items[0, :2].tolist()
    chosen = a.items[1 + few : 1 + few + many] if a.KIND else a.items[1 : 1 + few]
    heads = a.KV_HEADS * a.GROUP
    for row, num_rows, start, table, first, end_span, slot, text_end in chosen.tolist():
        rows, end = slice(row, row + num_rows), text_end if a.AHEAD else start + num_rows
        low = max(0, first_seen(start, a.WINDOW or None)) // a.TILE * a.TILE
        q = a.query[rows, : heads * a.DIM].view(num_rows, a.KV_HEADS, a.GROUP, a.DIM).transpose(0, 1).float()
        parts = []
        for span in range(max(first, low // SPAN), end_span):
            at = torch.arange(max(span * SPAN, low), min(span * SPAN + SPAN, end), device=q.device)
            block = a.blocks[table + at // a.BLOCK]
            k, v = (_tiles(x, block, at % a.BLOCK, a.TILE) for x in (a.keys, a.values))
            k_scales, v_scales = (
                None if x is None else _tiles(x, block, at % a.BLOCK, a.TILE) for x in (a.key_scales, a.value_scales)
            )
            at = at[0] + torch.arange(-(-len(at) // a.TILE) * a.TILE, device=q.device)
            position = torch.arange(start, start + num_rows, device=q.device)[:, None]
            seen = (at <= position + a.ahead) & (at < end)
            seen &= at >= first_seen(position, a.WINDOW or None)
            seen = seen.view(num_rows, -1, a.TILE).transpose(0, 1)[:, None, :, None]
            parts.append(_span(q, _Tiles(k, v, k_scales, v_scales), seen, a))
        if slot >= 0 and parts:
            count = (end - 1) // SPAN + 1 - low // SPAN
            places = [slice(slot + i * num_rows, slot + (i + 1) * num_rows) for i in range(count)]
            mine = places[first - low // SPAN]
            top, total, o = (x.transpose(0, 1).flatten(1, 2) for x in parts[0])
            a.sums[mine], a.totals[mine] = o, torch.cat([top, total], -1)
            a.arrived[slot] += 1
            if a.arrived[slot, 0] < count:
                continue
            a.arrived[slot] = 0
            parts = []
            for place in places:
                stored = (a.totals[place][..., :1], a.totals[place][..., 1:], a.sums[place])
                top, total, o = (x.view(num_rows, a.KV_HEADS, a.GROUP, -1).transpose(0, 1) for x in stored)
                parts.append((top, total, o))
        if parts:
            sinks = None if a.sinks is None else a.sinks.float().view(a.KV_HEADS, 1, a.GROUP, 1) * LOG2_E
            mixed = _quotient(parts, sinks).transpose(0, 1)
            a.out[rows, : heads * a.VALUE_DIM] = mixed.reshape(num_rows, -1)


def _quotient(parts: list[tuple[Tensor, Tensor, Tensor]], sinks: Tensor | None) -> Tensor:
    """Merge the spans' largest scores, sums of weights and weighted values, in their order, and then the sinks."""
    top, total, o = (
        torch.full_like(parts[0][0], -torch.inf),
        torch.zeros_like(parts[0][1]),
        torch.zeros_like(parts[0][2]),
    )
    for span_top, span_total, span_o in parts:
        most = torch.maximum(top, span_top)
        base = most.masked_fill(most == -torch.inf, 0.0)
        before, now = elementwise(torch.exp2, top - base), elementwise(torch.exp2, span_top - base)
        top, total, o = most, total * before + span_total * now, o * before + span_o * now
    if sinks is not None:
        most = torch.maximum(top, sinks)
        before = elementwise(torch.exp2, top - most)
        total, o = total * before + elementwise(torch.exp2, sinks - most), o * before
    return o / total + 0.0


class _Tiles(NamedTuple):
    """A span of the cache."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None


def _span(q: Tensor, tiles: _Tiles, seen: Tensor, a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Sum one span for q [kv_heads, R, GROUP, D]; return the largest scores and the sums of weights, of that shape but
    for D = 1, and the weighted values, of VALUE_DIM numbers."""
    keys, values, key_scales, value_scales = tiles
    inner, outer, dtype = a.inner, a.outer, torch.float32 if a.WIDE else a.query.dtype
    head_dim = q.shape[-1]
    s = _products(F.pad(q, (0, keys.shape[-1] - head_dim)).expand(len(keys), *q.shape[:-1], -1), keys.mT)
    if key_scales is not None:
        s = s * key_scales.mT[:, :, None]
    if a.SOFTCAP:
        s = 1.0 - 2.0 / (elementwise(torch.exp2, s * inner) + 1.0)
    s = s.masked_fill(~seen, -torch.inf)
    most = (s.amax(-1, keepdim=True) * outer).cummax(0)[0]
    base = most.masked_fill(most == -torch.inf, 0.0)
    before = elementwise(torch.exp2, torch.cat([torch.full_like(most[:1], -torch.inf), most[:-1]]) - base)
    p = elementwise(torch.exp2, s * outer - base)
    sums = row_sums(p.to(dtype).float())
    if value_scales is not None:
        p = p * value_scales.mT[:, :, None]
    weighted = _products(p.to(dtype).float(), values)[..., : a.VALUE_DIM]
    total, o = torch.zeros_like(sums[0]), torch.zeros_like(weighted[0])
    for tile in range(len(s)):
        total, o = total * before[tile] + sums[tile], o * before[tile] + weighted[tile]
    return most[-1], total, o


def _tiles(x: Tensor, block: Tensor, offset: Tensor, tile: int) -> Tensor:
    """Gather a span of the cache, padded by zeros: float32 [tiles, kv_heads, tile, D], of scales D = 1."""
    x = x[..., None] if x.ndim == 3 else x
    numbers = (x.view(torch.uint8) if x.element_size() == 1 else x)[block, :, offset].view(x.dtype).float()
    extra = padded(x.shape[-1]) - x.shape[-1] if x.shape[-1] > 1 else 0
    numbers = F.pad(numbers, (0, extra, 0, 0, 0, -len(block) % tile))
    return numbers.view(-1, tile, *numbers.shape[1:]).transpose(1, 2).contiguous()


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a [tiles, kv_heads, R, GROUP, K] times b [tiles, kv_heads, K, N], each row of R by itself."""
    out = torch.empty(*a.shape[:-1], b.shape[-1], device=a.device)
    for tile in range(len(b)):
        for head in range(b.shape[1]):
            out[tile, head] = products(a[tile, head], b[tile, head].expand(a.shape[2], *b.shape[2:]))
    return out


def _configs(*options: tuple[int, ...]) -> tuple[Config, ...]:
    return tuple(Config({"BM": rows}, warps, stages, tuple(suited)) for rows, warps, stages, *suited in options)


# Block ids are loaded before keys, so keys are loaded two tiles ahead with 5 stages, and one with 2 or 3.
FEW = Kernel(_attention, _twin, _configs((16, 4, 5, 80, 90), (16, 8, 5), (16, 8, 3)), fuse=False)
"""For small tiles: decode and short chunks."""

MANY = Kernel(
    _attention,
    _twin,
    _configs((128, 8, 3, 90), (64, 8, 2, 80, 90, 120), (64, 8, 3, 80, 90, 100), (128, 8, 5, 90)),
    fuse=False,
)
"""For large tiles: prefill."""


def is_wide(query: torch.dtype, cache: torch.dtype) -> bool:
    """Whether products are computed in float32: for float32 numbers, and where the 16-bit types differ."""
    return query == torch.float32 or (cache.itemsize > 1 and cache != query)


def configs(
    kernel: Kernel, heads: int, kv_heads: int, head_dim: int, query: torch.dtype, cache: torch.dtype,
    capability: int = 90, shared: bool = False,
) -> tuple[Config, ...]:  # fmt: skip
    """Return the configs of FEW or MANY for the shape, the types and the GPU's capability, the default first. head_dim:
    the larger one of keys and values. shared: whether values are a part of the keys.

    Those left out do not fit in registers or shared memory. Caches of fp8 need a capability from 90 on.
    """
    if is_wide(query, cache):
        suited = _configs((16, 8, 1))
    elif head_dim > LARGE and cache.itemsize == 1:
        suited = _configs((16 if kernel is FEW else 32, 8, 1))
    elif head_dim > LARGE and kernel is FEW:
        suited = _configs((16, 8, 2, 80, 90, 100), (16, 8, 1)) if shared else _configs((16, 8, 1))
    elif head_dim > LARGE:
        suited = _configs((32, 8, 2, 80, 90, *([100] if head_dim <= MOST_WIDTH else [])), (16, 8, 1, 100, 120))
        suited = _configs((32, 8, 2, 80, 90, 100), (32, 8, 1, 120)) if shared and head_dim <= MOST_WIDTH else suited
    elif head_dim > 128:
        suited = _configs((16, 8, 3), (16, 8, 1)) if kernel is FEW else _configs((32, 8, 2, 80, 90, 100), (32, 8, 1))
    elif cache.itemsize == 1:
        suited = (
            _configs((16, 8, 5), (16, 8, 3)) if kernel is FEW else _configs((64, 8, 2, 90, 100), (32, 8, 2, 80, 120))
        )
    elif head_dim <= 64 and kernel is MANY:
        suited = _configs((128, 8, 3, 90), (64, 8, 2), (64, 8, 3, 80, 90), (128, 8, 5, 90))
    else:
        suited = kernel.configs
    group = group_rows(heads, kv_heads, head_dim)
    return tuple(
        replace(config, tiles={"BM": max(config.tiles["BM"], group)}) for config in suited if config.fits(capability)
    )


def default_configs(
    heads: int, kv_heads: int, head_dim: int, query: torch.dtype, cache: torch.dtype, capability: int = 90,
    shared: bool = False,
) -> tuple[Config, Config]:  # fmt: skip
    """Return the configs for small and for large tiles."""
    shape = heads, kv_heads, head_dim, query, cache, capability, shared
    return configs(FEW, *shape)[0], configs(MANY, *shape)[0]


def tile_rows(heads: int, kv_heads: int, chosen: tuple[Config, Config], head_dim: int = 0) -> tuple[int, int]:
    """Return the most query rows of small and of large tiles in a work list for `chosen` configs. head_dim: as
    `configs` has it."""
    few, many = (config.tiles["BM"] // group_rows(heads, kv_heads, head_dim) for config in chosen)
    return few, many


def attention(
    query: Tensor,
    out: Tensor,
    cache: LayerCache,
    blocks: Tensor,
    items: Tensor,
    scratch: Scratch,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    ahead: int = 0,
    programs: int,
    chosen: tuple[Config, Config] | None = None,
) -> list[Launch]:
    """Attention of queries [R, heads * D] over the cache -> out [R, heads * V]: launches for small and large tiles.

    blocks: int32, the block ids of all chunks. items: int32, `work_list` of the step, its tiles no larger than
    `tile_rows` of the configs `chosen`. window, negative for chunks, and ahead: as `Scoring` has them; with `ahead` the
    list must be one of texts that rows see to the end. sinks: [heads]. programs: how many run at once, a multiple of
    the GPU's multiprocessors.
    """
    head_dim, value_dim = cache.keys.shape[-1], cache.values.shape[-1]
    size, wide = max(head_dim, value_dim), is_wide(query.dtype, cache.keys.dtype)
    # The values of a shared key are its first part.
    first = value_dim if cache.shares_key else min(head_dim, MOST_WIDTH)
    arguments: dict[str, Argument] = {
        "query": query, "ld_query": query.stride(0), "out": out, "ld_out": out.stride(0), "keys": cache.keys,
        "values": cache.values, "key_scales": cache.key_scales, "value_scales": cache.value_scales, "sinks": sinks,
        "blocks": blocks, "items": items, "sums": scratch.sums, "totals": scratch.totals, "arrived": scratch.arrived,
        "inner": 2 * LOG2_E * scale / softcap if softcap else 0.0, "outer": LOG2_E * (softcap or scale), "ahead": ahead,
        "KV_HEADS": kv_heads, "GROUP": heads // kv_heads, "GROUP_ROWS": group_rows(heads, kv_heads, size),
        "PIECES": num_pieces(heads, kv_heads, size), "DIM": head_dim, "FIRST": first, "WIDTH": width_of(first),
        "REST": width_of(head_dim - first) if head_dim > first else 0, "VALUE_DIM": value_dim,
        "VALUE_WIDTH": width_of(value_dim), "SHARED": cache.shares_key, "BLOCK": cache.block_size,
        "TILE": tile_keys(size, wide), "WINDOW": window, "SOFTCAP": bool(softcap), "AHEAD": bool(ahead),
        "WIDE": wide, "IN_PARTS": wide and size > LARGE,
    }  # fmt: skip
    few, many = chosen or default_configs(heads, kv_heads, size, query.dtype, cache.keys.dtype, shared=cache.shares_key)
    return [
        Launch(FEW, (programs * (1 + (few.num_warps == 4 and size > 64)),), arguments | {"KIND": 0}, few),
        Launch(MANY, (programs,), arguments | {"KIND": 1}, many),
    ]


def width_of(size: int) -> int:
    """Return the columns of a tile for `size` numbers."""
    return int(max(16, triton.next_power_of_2(size)))
