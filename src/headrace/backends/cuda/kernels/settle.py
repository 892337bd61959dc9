"""The last launch of the draw: makes the cuts of top-k and top-p exactly, and draws among what is left.

One program a row, over the tokens that `survey` picked; over all where they found no room, or turn out to be too few
for the nucleus, which takes as long as a pass over the row does, some ten times. Kept tokens are a head of the ranking
by logit (equal ones by lower id), so a filter is one cut in the ranking, which is found digit by digit as in a radix
sort. Mass is counted in integers (`sampling.filters.weights`), so sums have no order.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from headrace.backends.cuda.kernels.noise import gumbel
from headrace.backends.cuda.kernels.ranking import (
    greatest_of,
    has_cut,
    key_of,
    logit_of,
    logits_of,
    merged,
    parameters_of,
    scaled_of,
    weights,
)
from headrace.backends.cuda.launch import Arguments, Config, Kernel
from headrace.sampling import filters, noise

DRAWS, MASKED, LEFT = 1, 2, -1
"""Bits of a row's flags: draw with noise (else take the likeliest), and look at the mask. -1: the row is left out."""


@triton.jit
def _read(logits, masks, picked, place, num, masked, is_whole):
    """Logits: of the whole row, or of the tokens that were picked."""
    if is_whole:
        x = logits_of(logits, masks, place, num, masked)
    else:
        x = tl.load(picked + place, mask=place < num, other=float("-inf"))
    return x


@triton.jit
def _head(key, cut, num, seen):
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
def _cut(
    logits, masks, picked, masses, scratch, num, masked, is_whole, greatest, temperature, floor, cut_k, num_k, least,
    target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The key at which the number of tokens, or their mass, reaches `target`, and what lies above it. Keys are `least`
    or higher. Masses of tokens that were picked lie in memory."""
    lane, digits = tl.arange(0, BLOCK), tl.arange(0, 256)
    low = least
    span = key_of(greatest) - least
    shift = tl.zeros([], tl.int32)
    while (span >> shift) > 255:
        shift += 1
    before = tl.zeros([], tl.int64)
    size = span + 1
    while shift >= 0:
        tl.store(scratch + digits, tl.zeros([256], tl.int64))
        tl.debug_barrier()
        seen = tl.zeros([], tl.int32)
        for start in tl.range(0, num, BLOCK):
            place = start + lane
            x = _read(logits, masks, picked, place, num, masked, is_whole)
            key = key_of(x)
            inside = (place < num) & (key >= low) & (key - low < size)
            weight = tl.full([BLOCK], 1, tl.int64)
            if BY_MASS:
                if is_whole:
                    head, count = _head(key, cut_k, num_k, seen)
                    seen += count
                    scaled = scaled_of(x, greatest, temperature)
                    head &= (scaled > float("-inf")) & (scaled >= floor)
                    weight = tl.where(head, weights(scaled), 0)
                else:
                    weight = tl.load(masses + place, mask=place < num, other=0)
            inside &= weight > 0
            tl.atomic_add(scratch + ((key - low) >> shift), weight, mask=inside, sem="relaxed")
        tl.debug_barrier()
        digit, before = _digit(tl.load(scratch + digits, cache_modifier=".cg"), before, target)
        low += digit.to(tl.int64) << shift
        size = tl.full([], 1, tl.int64) << shift
        shift = tl.where(shift > 0, tl.maximum(shift - 8, 0), -1)
        tl.debug_barrier()
    return low, before


@triton.jit
def _settle(
    logits, ld, masks, ld_masks, reals, wholes, values, highest, offsets, reaches, picked, picked_ids, masses, scratch,
    ids, margins, sizes, width, PARTS: tl.constexpr, LANES: tl.constexpr, ROOM: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    temperature, floor, top_p, top_k, seed, position, flags = parameters_of(reals, wholes, row)
    if (flags < 0) | (has_cut(flags, top_k, top_p, width) == 0):
        return
    logits += row * ld
    masks += row * ld_masks
    scratch += row * 256
    picked += row * ROOM
    picked_ids += row * ROOM
    masses += row * ROOM
    masked = (flags & 2) == 2
    greatest = greatest_of(values, highest, row, masked, PARTS, LANES)
    by_count = (top_k > 0) & (top_k < width)
    lane = tl.arange(0, BLOCK)
    num = tl.load(offsets + row * (PARTS + 1) + PARTS)
    is_whole = num > ROOM
    num = tl.where(is_whole, width, num)
    least = tl.zeros([], tl.int64)
    if is_whole == 0:
        keys = tl.full([BLOCK], 4294967295, tl.int64)
        for start in tl.range(0, num, BLOCK):
            key = key_of(tl.load(picked + start + lane, mask=start + lane < num, other=float("inf")))
            keys = tl.minimum(keys, key)
        least = tl.minimum(tl.min(keys, 0), key_of(greatest))

    # Without top-k every token lies before the first cut.
    cut_k = tl.full([], -1, tl.int64)
    num_k = num
    if by_count & (top_k < num):
        cut_k, before = _cut(
            logits, masks, picked, masses, scratch, num, masked, is_whole, greatest, temperature, floor, cut_k, num_k,
            least, top_k.to(tl.float64), False, BLOCK,
        )  # fmt: skip
        num_k = (top_k - before).to(tl.int32)

    cut_p = tl.full([], -1, tl.int64)
    num_p = num
    if top_p < 1.0:
        lanes = tl.zeros([BLOCK], tl.int64)
        seen = tl.zeros([], tl.int32)
        for start in tl.range(0, num, BLOCK):
            place = start + lane
            x = _read(logits, masks, picked, place, num, masked, is_whole)
            head, count = _head(key_of(x), cut_k, num_k, seen)
            seen += count
            scaled = scaled_of(x, greatest, temperature)
            head &= (scaled > float("-inf")) & (scaled >= floor) & (place < num)
            mass = tl.where(head, weights(scaled), 0)
            if is_whole == 0:
                tl.store(masses + place, mass, mask=place < num)
            lanes += mass
        tl.debug_barrier()
        mass = tl.sum(lanes, 0)
        total = mass
        if by_count == 0:
            total = tl.load(reaches + 2 * row + 1)
        target = top_p * total.to(tl.float64)
        # Where the nucleus reaches further than what was picked, all tokens are looked at.
        is_short = mass.to(tl.float64) < target
        is_whole |= is_short
        num = tl.where(is_short, width, num)
        num_k = tl.where(is_short, width, num_k)
        least = tl.where(is_short, 0, least)
        cut_p, before = _cut(
            logits, masks, picked, masses, scratch, num, masked, is_whole, greatest, temperature, floor, cut_k, num_k,
            least, target, True, BLOCK,
        )  # fmt: skip
        # The cut's own tokens weigh the same: it takes as many as reach the target.
        weight = weights(scaled_of(logit_of(cut_p), greatest, temperature))
        num_p = ((target - before.to(tl.float64)) / weight.to(tl.float64)).to(tl.int64) - 2
        num_p = tl.maximum(num_p, 1)
        for _ in tl.static_range(6):
            num_p += ((before + num_p * weight).to(tl.float64) < target).to(tl.int64)
        num_p = tl.minimum(num_p, width).to(tl.int32)

    lanes_best = tl.full([BLOCK], float("-inf"), tl.float64)
    lanes_second = tl.full([BLOCK], float("-inf"), tl.float64)
    lanes_id = tl.full([BLOCK], 0, tl.int32) + width
    seen_k = tl.zeros([], tl.int32)
    seen_p = tl.zeros([], tl.int32)
    for start in tl.range(0, num, BLOCK):
        place = start + lane
        x = _read(logits, masks, picked, place, num, masked, is_whole)
        key = key_of(x)
        head, count = _head(key, cut_k, num_k, seen_k)
        seen_k += count
        head_p, count = _head(key, cut_p, num_p, seen_p)
        seen_p += count
        scaled = scaled_of(x, greatest, temperature)
        head &= head_p & (scaled > float("-inf")) & (scaled >= floor) & (place < num)
        if tl.max(head.to(tl.int32), 0) > 0:
            token = place
            if is_whole == 0:
                token = tl.load(picked_ids + place, mask=place < num, other=0)
            sum = tl.where(head, scaled + gumbel(token, seed, position), float("-inf"))
            better = sum > lanes_best
            lanes_second = tl.where(better, lanes_best, tl.maximum(lanes_second, sum))
            lanes_id = tl.where(better, token, lanes_id)
            lanes_best = tl.where(better, sum, lanes_best)
    best, winner, rest = merged(lanes_best, lanes_id, lanes_second, width)
    tl.store(ids + row, tl.where(best > float("-inf"), winner, -1))
    tl.store(margins + row, best - tl.maximum(rest, -1e300))


def _twin(a: Arguments) -> None:
    """The sampler's own functions, row by row, whatever the earlier launches found."""
    for row in range(int(a.sizes[a.DIM])):
        x = a.logits[row, : a.width].numpy().copy()
        (temperature, floor, top_p), (top_k, seed, position, flags) = a.reals[row].tolist(), a.wholes[row].tolist()
        if flags < 0:
            continue
        if flags & MASKED:
            allowed = np.unpackbits(a.masks[row].numpy().view(np.uint8), bitorder="little")[: a.width]
            x[allowed == 0] = -np.inf
        best = int(np.argmax(x))
        a.margins[row] = torch.inf
        if x[best] == -np.inf:
            a.ids[row], a.margins[row] = -1, -torch.inf
        elif not flags & DRAWS:
            a.ids[row] = best
        else:
            pool = filters.select(x, float(x[best]), filters.Cut(temperature, floor, top_k, top_p))
            sums = pool.scaled + noise.gumbel(noise.bits(seed % 2**64, position, pool.token_ids))
            order = filters.largest(sums, 2)
            a.ids[row] = int(pool.token_ids[order[0]])
            a.margins[row] = float(sums[order[0]] - sums[order[-1]]) if len(order) > 1 else torch.inf


SETTLE = Kernel(_settle, _twin, (Config({"BLOCK": 1024}, 16),), fuse=False)
