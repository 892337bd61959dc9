"""Draws one token for each row of logits: mask, temperature, min-p, top-k, top-p, and keyed Gumbel noise.

The tokens are the same as `sampling.sampler`'s for the same logits. Kept tokens are a head of the ranking by logit
(equal ones by lower id), so a filter is one cut in the ranking, which is found digit by digit as in a radix sort. Mass
is counted in integers (`sampling.filters.weights`), so sums have no order; products and sums of float64 are not fused.
The logarithm of a GPU may differ in its last bit from a CPU's: where the two best sums lie within `MARGIN`, the row is
left to the host. One program a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch
from headrace.backends.step import Draw
from headrace.sampling import filters, noise

MARGIN = 1e-9
DRAWS, MASKED, LEFT = 1, 2, -1
"""Bits of a row's flags: draw with noise (else take the likeliest), and look at the mask. -1: the row is left out."""


@triton.jit
def _scaled(x, greatest, temperature):
    return (x.to(tl.float64) - greatest) / temperature


@triton.jit
def _weights(scaled):
    """`sampling.filters.weights`: round(exp(scaled) * 2**44), by the same products and sums."""
    t = tl.maximum(scaled, -700.0)
    z = t * 1.4426950408889634 + 6755399441055744.0
    n = z - 6755399441055744.0
    t = t - n * 0.6931471803691238
    t = t - n * 1.9082149292705877e-10
    p = t * 0.0 + 2.08767569878681e-09
    p = p * t + 2.505210838544172e-08
    p = p * t + 2.755731922398589e-07
    p = p * t + 2.7557319223985893e-06
    p = p * t + 2.48015873015873e-05
    p = p * t + 0.0001984126984126984
    p = p * t + 0.001388888888888889
    p = p * t + 0.008333333333333333
    p = p * t + 0.041666666666666664
    p = p * t + 0.16666666666666666
    p = p * t + 0.5
    p = p * t + 1.0
    p = p * t + 1.0
    power = (z.to(tl.int64, bitcast=True) - 0x4338000000000000 + (1023 + 44)) << 52
    p = p * power.to(tl.float64, bitcast=True) + 4503599627370496.0
    return p.to(tl.int64, bitcast=True) - 0x4330000000000000


@triton.jit
def _gumbel(token, seed, position):
    """`sampling.noise`: the Gumbel variate of each token id under a key (Philox4x32-10)."""
    c0 = (token >> 1).to(tl.uint32)
    c1 = tl.zeros_like(c0) + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = tl.zeros_like(c0) + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c3 = tl.zeros_like(c0)
    k0 = tl.zeros_like(c0) + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = tl.zeros_like(c0) + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32)), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, tl.full(c0.shape, 0xCD9E8D57, tl.uint32)), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    odd = (token & 1) == 1
    word = (tl.where(odd, c2, c0).to(tl.uint64) << 32) | tl.where(odd, c3, c1).to(tl.uint64)
    u = ((word >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(u))


@triton.jit
def _load(logits, masks, token, width, masked):
    """Logits, -inf where a token is not allowed; -0 becomes 0, which ranks like it."""
    inside = token < width
    x = tl.load(logits + token, mask=inside, other=float("-inf")) + 0.0
    if masked:
        word = tl.load(masks + (token >> 5), mask=inside, other=0)
        x = tl.where((word >> (token & 31)) & 1 == 1, x, float("-inf"))
    return x


@triton.jit
def _key(x):
    """An unsigned number for each logit, in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _same_head(key, cut, shift: tl.constexpr):
    """Whether the bits above the digit at `shift` are the same."""
    return (key.to(tl.uint64) >> (shift + 8)) == (cut.to(tl.uint64) >> (shift + 8))


@triton.jit
def _before(key, cut, num, seen):
    """Whether a token lies before a cut: its key is above `cut`, or it is one of the first `num` that equal it. `seen`
    counts the equal ones of earlier blocks. -> mask, how many are equal."""
    equal = (key == cut).to(tl.int32)
    place = seen + tl.cumsum(equal, 0) - equal
    return (key > cut) | ((equal == 1) & (place < num)), tl.sum(equal, 0)


@triton.jit
def _digit(counts, before, target):
    """The digit at which the sum of `counts`, from the highest on top of `before`, reaches `target`, and the sum above
    it. Sums are compared as float64, as in `filters`."""
    digit = tl.arange(0, 256)
    upto = before + tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    here = (upto.to(tl.float64) >= target) & ((upto - counts).to(tl.float64) < target)
    return tl.sum(tl.where(here, digit, 0), 0), tl.sum(tl.where(here, upto - counts, 0), 0)


@triton.jit
def _choose(
    logits, ld, masks, ld_masks, reals, wholes, scratch, ids, margins, sizes, width, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    logits += row * ld
    masks += row * ld_masks
    scratch += row * 256
    temperature, floor, top_p = tl.load(reals + 3 * row), tl.load(reals + 3 * row + 1), tl.load(reals + 3 * row + 2)
    top_k, flags = tl.load(wholes + 4 * row), tl.load(wholes + 4 * row + 3)
    if flags < 0:
        return
    seed, position = tl.load(wholes + 4 * row + 1), tl.load(wholes + 4 * row + 2)
    masked = (flags & 2) == 2
    lane = tl.arange(0, BLOCK)
    digits = tl.arange(0, 256)

    lanes_most = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, width, BLOCK):
        x = _load(logits, masks, start + lane, width, masked)
        lanes_most = tl.maximum(lanes_most, x)
    greatest_logit = tl.max(lanes_most, 0)
    greatest = tl.maximum(greatest_logit, -3e38).to(tl.float64)  # -inf where no token is allowed

    # Without top_k every token lies before the first cut.
    cut_k = tl.zeros([], tl.uint32)
    num_k = width
    if (flags & 1) == 0:
        cut_k, num_k = tl.max(_key(tl.zeros([1], tl.float32) + greatest_logit), 0), 1
    elif (top_k > 0) & (top_k < width):
        before = tl.zeros([], tl.int64)
        for shift in tl.static_range(24, -1, -8):
            counts = tl.zeros([256], tl.int32)
            for start in tl.range(0, width, BLOCK):
                key = _key(_load(logits, masks, start + lane, width, masked))
                match = (start + lane < width) & (
                    (key.to(tl.uint64) >> (shift + 8)) == (cut_k.to(tl.uint64) >> (shift + 8))
                )
                counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=match)
            digit, before = _digit(counts.to(tl.int64), before, top_k.to(tl.float64))
            cut_k |= digit.to(tl.uint32) << shift
        num_k = (top_k - before).to(tl.int32)

    cut_p = tl.zeros([], tl.uint32)
    num_p = width
    if ((flags & 1) == 1) & (top_p < 1.0):
        target = tl.zeros([], tl.float64)
        before = tl.zeros([], tl.int64)
        for shift in tl.static_range(24, -1, -8):
            tl.store(scratch + digits, tl.zeros([256], tl.int64))
            tl.debug_barrier()
            seen = 0
            for start in tl.range(0, width, BLOCK):
                x = _load(logits, masks, start + lane, width, masked)
                key = _key(x)
                head, num = _before(key, cut_k, num_k, seen)
                seen += num
                scaled = _scaled(x, greatest, temperature)
                head &= (scaled > float("-inf")) & (scaled >= floor) & (start + lane < width)
                head &= _same_head(key, cut_p, shift)
                mass = tl.where(head, _weights(scaled), 0)
                tl.atomic_add(scratch + ((key >> shift) & 255).to(tl.int32), mass, mask=head, sem="relaxed")
            tl.debug_barrier()
            counts = tl.load(scratch + digits, cache_modifier=".cg")
            if shift == 24:
                target = top_p * tl.sum(counts, 0).to(tl.float64)
            digit, before = _digit(counts, before, target)
            cut_p |= digit.to(tl.uint32) << shift
            tl.debug_barrier()
        # The cut's own tokens weigh the same: it takes as many as reach the target.
        bits = tl.where(cut_p >= 2147483648, cut_p ^ 2147483648, cut_p ^ 4294967295).to(tl.int32, bitcast=True)
        weight = _weights(_scaled(bits.to(tl.float32, bitcast=True), greatest, temperature))
        num = ((target - before.to(tl.float64)) / weight.to(tl.float64)).to(tl.int64) - 2
        num = tl.maximum(num, 1)
        for _ in tl.static_range(6):
            num += ((before + num * weight).to(tl.float64) < target).to(tl.int64)
        num_p = tl.minimum(num, width).to(tl.int32)

    lanes_best = tl.full([BLOCK], float("-inf"), tl.float64)
    lanes_second = tl.full([BLOCK], float("-inf"), tl.float64)
    lanes_id = tl.zeros([BLOCK], tl.int32) + width
    seen_k = 0
    seen_p = 0
    for start in tl.range(0, width, BLOCK):
        token = start + lane
        x = _load(logits, masks, token, width, masked)
        key = _key(x)
        head, num = _before(key, cut_k, num_k, seen_k)
        seen_k += num
        head_p, num = _before(key, cut_p, num_p, seen_p)
        seen_p += num
        total = tl.zeros([BLOCK], tl.float64)
        if (flags & 1) == 1:
            total = _scaled(x, greatest, temperature)
            head &= head_p & (total >= floor)
            total += _gumbel(token, seed, position)
        total = tl.where(head & (x > float("-inf")) & (token < width), total, float("-inf"))
        better = total > lanes_best
        lanes_second = tl.where(better, lanes_best, tl.maximum(lanes_second, total))
        lanes_id = tl.where(better, token, lanes_id)
        lanes_best = tl.where(better, total, lanes_best)
    best = tl.max(lanes_best, 0)
    winner = tl.min(tl.where(lanes_best == best, lanes_id, width), 0)
    rest = tl.where(lanes_id == winner, lanes_second, lanes_best)
    tl.store(ids + row, tl.where(best > float("-inf"), winner, -1))
    tl.store(margins + row, best - tl.maximum(tl.max(rest, 0), -1e300))


def _twin(a: Arguments) -> None:
    """The sampler's own functions, row by row."""
    for row in range(int(a.sizes[a.DIM])):
        x = a.logits[row, : a.width].numpy().copy()
        (temperature, floor, top_p), (top_k, seed, position, flags) = a.reals[row].tolist(), a.wholes[row].tolist()
        if flags & MASKED:
            allowed = np.unpackbits(a.masks[row].numpy().view(np.uint8), bitorder="little")[: a.width]
            x[allowed == 0] = -np.inf
        if flags < 0:
            continue
        best = int(np.argmax(x))
        a.margins[row] = torch.inf
        if x[best] == -np.inf:
            a.ids[row] = -1
        elif not flags & DRAWS:
            a.ids[row] = best
        else:
            pool = filters.select(x, float(x[best]), filters.Cut(temperature, floor, top_k, top_p))
            sums = pool.scaled + noise.gumbel(noise.bits(seed % 2**64, position, pool.token_ids))
            order = filters.largest(sums, 2)
            a.ids[row] = int(pool.token_ids[order[0]])
            a.margins[row] = float(sums[order[0]] - sums[order[-1]]) if len(order) > 1 else torch.inf


KERNEL = Kernel(_choose, _twin, (Config({"BLOCK": 2048}, 8),), fuse=False)


class Packed(NamedTuple):
    """How rows are drawn, as `pack` writes it: reals float64 [S, 3], wholes int64 [S, 4], masks int32
    [S, ceil(V / 32)]."""

    reals: Tensor
    wholes: Tensor
    masks: Tensor


def choose(
    logits: Tensor,
    packed: Packed,
    scratch: Tensor,
    ids: Tensor,
    margins: Tensor,
    sizes: Tensor,
    dim: int,
    config: Config | None = None,
) -> Launch:
    """Draw a token from each row of logits [S, V] float32: ids int32 [S], -1 where none is allowed.

    scratch int64 [S, 256].
    margins float64 [S]: by how much the best sum of scaled logit and noise exceeds the next; huge without another.
    """
    arguments: dict[str, Argument] = {
        "logits": logits, "ld": logits.stride(0), "masks": packed.masks, "ld_masks": packed.masks.stride(0),
        "reals": packed.reals, "wholes": packed.wholes, "scratch": scratch, "ids": ids, "margins": margins,
        "sizes": sizes, "width": logits.shape[1], "DIM": dim,
    }  # fmt: skip
    return Launch(KERNEL, (logits.shape[0],), arguments, config or KERNEL.configs[0])


def pack(
    indices: list[int],
    draws: list[Draw],
    reals: NDArray[np.float64],
    wholes: NDArray[np.int64],
    masks: NDArray[np.int32],
) -> None:
    """Write the numbers of the rows `indices` into the arrays that the kernel reads; other rows are left out."""
    wholes[:, 3] = LEFT
    for i, each in zip(indices, draws, strict=True):
        reals[i] = each.temperature, each.floor, each.top_p
        flags = (DRAWS if each.temperature > 0 else 0) | (MASKED if each.mask is not None else 0)
        wholes[i] = each.top_k, np.uint64(each.seed).astype(np.int64), each.position, flags
        if each.mask is not None:
            masks[i] = each.mask.view(np.int32)
