"""Paged attention in spans of 128 positions, counted from position 0 of the sequence.

A row at position p goes through the same spans, of the same shape and in the same order, whether it is alone, in a
chunk or in a batch, so its bits are the same. A group has rows with equal numbers of spans: either rows of many
sequences, each with its own keys, or neighbours of one sequence that share the keys. Called by `ops` only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.backends.base import Scoring
from headrace.backends.torch_ref.batch import ForwardBatch
from headrace.backends.torch_ref.cache import LayerCache
from headrace.backends.torch_ref.rowwise import elementwise, padded, products, row_sums

SPAN = 128
MAX_GATHER = 2**18  # cached positions * kv_heads * head_dim gathered at once for one group: 1 MiB, to stay in the cache


@dataclass(frozen=True, slots=True)
class Group:
    """Rows [R] that see `num_spans` spans. `slots` [B * num_spans * 128] with B = R, or 1 if the keys are shared;
    `hidden` [num_spans, 1, R, 1, 128] is True for keys that a row does not see; `distances` [R, num_spans * 128] are
    the keys' positions less the row's."""

    rows: Tensor
    slots: Tensor
    hidden: Tensor
    distances: Tensor
    num_spans: int
    shared: bool


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Neighbouring rows of chunk `chunk_id` whose positions lie in one span, as do the last positions that they see:
    `row` is the first one's index, `top` what its last one sees last."""

    chunk_id: int
    row: int
    first: int
    last: int
    low: int
    top: int


def first_seen(position: Any, window: int | None) -> Any:
    """The first position that rows see, or a number below 0. A `window` below 0: of chunks of that many positions."""
    if window is None:
        return position * 0
    return position - window + 1 if window > 0 else position // -window * -window


def last_seen(starts: list[int], lens: list[int], ahead: int) -> list[int]:
    """Return the last position that each row sees: `ahead` of its own, as far as its chunk has them."""
    pairs = zip(starts, lens, strict=True)
    return [min(p + ahead, start + n - 1) for start, n in pairs for p in range(start, start + n)]


def pieces_of(starts: list[int], lens: list[int], window: int | None, seen: Sequence[int]) -> list[RowSpan]:
    """Cut every chunk where a span ends, and before a row that sees further spans (`seen`: the last position of each
    row). `low` is the first span that some row of the piece sees."""
    pieces = []
    row = 0
    for chunk_id, (start, length) in enumerate(zip(starts, lens, strict=True)):
        first = start
        while first < start + length:
            last = min(start + length, (first // SPAN + 1) * SPAN) - 1
            last = (
                first + bisect_right(seen, seen[row] // SPAN * SPAN + SPAN - 1, row, row + last - first + 1) - row - 1
            )
            low = max(0, first_seen(first, window)) // SPAN
            pieces.append(RowSpan(chunk_id, row, first, last, low, seen[row + last - first]))
            row += last - first + 1
            first = last + 1
    return pieces


def plan(rows: ForwardBatch, kind: int, block_size: int, width: int, window: int | None, ahead: int) -> list[Group]:
    """The groups of a step, with slots of a block kind. `width` is kv_heads * head_dim; it bounds how many rows are
    gathered at once. `window`, `ahead`: as in `Scoring`; where rows have a `seen`, it counts instead of `ahead`."""
    alone: dict[int, list[RowSpan]] = {}
    groups = []
    seen = last_seen(rows.starts, rows.lens, ahead) if rows.seen is None else rows.seen
    for piece in pieces_of(rows.starts, rows.lens, window, seen):
        num_spans = piece.top // SPAN - piece.low + 1
        if piece.first == piece.last:
            alone.setdefault(num_spans, []).append(piece)
        else:
            groups.append(_group([piece], num_spans, rows.block_tables[kind], block_size, window, seen))
    for num_spans, pieces in sorted(alone.items()):
        most = max(1, MAX_GATHER // (num_spans * SPAN * width))
        for i in range(0, len(pieces), most):
            part = pieces[i : i + most]
            groups.append(_group(part, num_spans, rows.block_tables[kind], block_size, window, seen))
    return groups


def _group(
    pieces: list[RowSpan],
    num_spans: int,
    block_tables: Tensor,
    block_size: int,
    window: int | None,
    seen: Sequence[int],
) -> Group:
    device = block_tables.device
    table = torch.tensor([[p.chunk_id, p.low * SPAN, p.top] for p in pieces], device=device)
    keys = table[:, 1:2] + torch.arange(num_spans * SPAN, device=device)
    # Outside of the positions that the rows see, the first and last of their keys are repeated: they belong to the
    # sequence, and `hidden` masks them. Blocks behind a window may be another sequence's by now.
    first = torch.tensor([[max(0, first_seen(p.first, window))] for p in pieces], device=device)
    inside = torch.minimum(keys, table[:, 2:3]).clamp(min=first)
    blocks = block_tables[table[:, 0:1], inside // block_size]
    slots = (blocks * block_size + inside % block_size).view(-1)
    if len(pieces) == 1:
        positions = torch.arange(pieces[0].first, pieces[0].last + 1, device=device)
        index = positions + (pieces[0].row - pieces[0].first)
    else:
        positions = torch.tensor([p.last for p in pieces], device=device)
        index = torch.tensor([p.row for p in pieces], device=device)
    hidden = keys > torch.tensor([seen[row] for row in index.tolist()], device=device)[:, None]
    if window is not None:
        hidden |= keys < first_seen(positions[:, None], window)
    hidden = hidden.view(-1, num_spans, SPAN).transpose(0, 1)[:, None, :, None]
    shared = len(pieces) == 1 and len(positions) > 1
    return Group(index, slots, hidden, keys - positions[:, None], num_spans, shared)


def attention(query: Tensor, cache: LayerCache, rows: ForwardBatch, scoring: Scoring) -> Tensor:
    """query [R, heads, D] over a cache of values of V numbers -> [R, heads, V] float32."""
    _, block_size, num_kv_heads, head_dim = cache.keys.shape
    window = scoring.reach or None
    key = ("plan", cache.kind, window, scoring.ahead, block_size, num_kv_heads * head_dim)
    groups = rows.notes.get(key)
    if groups is None:
        groups = rows.notes[key] = plan(rows, cache.kind, block_size, num_kv_heads * head_dim, window, scoring.ahead)
    out = torch.empty(*query.shape[:2], cache.values.shape[3], dtype=torch.float32, device=query.device)
    for group in groups:
        queries = query.index_select(0, group.rows).float()
        out[group.rows] = _attend(queries, cache, group, scoring)
    return out


def _attend(query: Tensor, cache: LayerCache, group: Group, scoring: Scoring) -> Tensor:
    """One group: query [R, heads, D] -> [R, heads, V]."""
    (num_rows, heads, _), (_, _, num_kv_heads, head_dim) = query.shape, cache.keys.shape
    value_dim = cache.values.shape[3]
    queries = heads // num_kv_heads
    extra = padded(head_dim) - head_dim
    # [kv_heads, R, queries, D]: every product below is [queries, D] x [D, 128] or [queries, 128] x [128, D].
    q = query.view(num_rows, num_kv_heads, queries, head_dim).transpose(0, 1)
    q = F.pad(q, (0, extra)) if extra else q
    keys, values = _gather(cache.keys, group), _gather(cache.values, group)
    scores = _by_span(q.expand(group.num_spans, *q.shape), keys.transpose(-1, -2), group.shared) * scoring.scale
    if scoring.softcap:
        scores = elementwise(torch.tanh, scores / scoring.softcap) * scoring.softcap
    if scoring.bias is not None:
        scores = scores + _biases(scoring.bias.float(), group, num_kv_heads)
    scores = scores.masked_fill(group.hidden, float("-inf"))
    top = scores.amax(dim=(0, -1), keepdim=True)
    sinks = scoring.sinks
    if sinks is not None:
        sinks = sinks.float().view(1, num_kv_heads, 1, queries, 1)
        top = torch.maximum(top, sinks)
    weights = elementwise(torch.exp, scores - top)
    total, out = row_sums(weights), _by_span(weights, values, group.shared)
    # Spans are added in their order, by plain additions.
    sum_total, sum_out = total[0], out[0]
    for span in range(1, group.num_spans):
        sum_total, sum_out = sum_total + total[span], sum_out + out[span]
    if sinks is not None:
        sum_total = sum_total + elementwise(torch.exp, sinks - top)[0]
    mixed = (sum_out / sum_total)[..., :value_dim]
    return mixed.transpose(0, 1).reshape(num_rows, heads, value_dim)


def _biases(bias: Tensor, group: Group, num_kv_heads: int) -> Tensor:
    """bias [heads, 2 * P - 1] -> of each score [num_spans, kv_heads, R, queries, 128]; anything for hidden keys."""
    most = bias.shape[1] // 2
    chosen = bias[:, group.distances.clamp(-most, most) + most]
    return chosen.view(num_kv_heads, -1, len(group.rows), group.num_spans, SPAN).permute(3, 0, 2, 1, 4)


def _gather(part: Tensor, group: Group) -> Tensor:
    """Cached keys or values of a group as float32 [num_spans, kv_heads, B, 128, D], D padded."""
    num_kv_heads, size = part.shape[2:]
    numbers = part.flatten(0, 1).index_select(0, group.slots).view(-1, group.num_spans, SPAN, num_kv_heads, size)
    numbers = numbers.permute(1, 3, 0, 2, 4)
    # One pass turns the axes, widens to float32 and pads.
    out = torch.empty(*numbers.shape[:-1], padded(size), device=part.device)
    out[..., :size] = numbers
    if padded(size) > size:
        out[..., size:] = 0.0
    return out


def _by_span(a: Tensor, b: Tensor, shared: bool) -> Tensor:
    """a [S, kv_heads, R, M, K] times b [S, kv_heads, R or (if shared) 1, K, N] -> [S, kv_heads, R, M, N]."""
    num_spans, num_kv_heads, num_rows, m, k = a.shape
    n = b.shape[-1]
    if not shared:
        return products(a.reshape(-1, m, k), b.flatten(0, 2)).view(num_spans, num_kv_heads, num_rows, m, n)
    out = torch.empty(num_spans, num_kv_heads, num_rows, m, n, device=a.device)
    for span in range(num_spans):
        for head in range(num_kv_heads):
            out[span, head] = products(a[span, head], b[span, head].expand(num_rows, k, n))
    return out
