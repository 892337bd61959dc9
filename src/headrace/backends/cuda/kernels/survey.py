"""The first three launches of the draw, with a program for each part of a row.

`HIGHEST` finds the greatest logit among the allowed tokens of rows with a mask. `SURVEY` draws the rows without top-k
and top-p; of the others it counts tokens by bins, and the mass, and finds out which bins the cuts can reach. `PICK`
copies the tokens of these bins, in order of ids; `settle` then cuts exactly.

The winner of a row is the greatest sum of scaled logit s = (x - greatest) / temperature and noise g. Noise lies between
-3.6 and 36.8, so the likeliest token, whose s is 0 and which no filter drops, has a sum above -3.7: a token with s
below -40.5 never wins, and its sum is further from the best than any `MARGIN`. So those below -42 are dropped. For the
others the float32 s is off by at most three roundings of 42, 8e-6, whatever the temperature is (an extreme one takes
float64); noise by 1.3e-5 (`noise.near_gumbel`); the sum, at most 79, by one rounding, 5e-6. In all E = 2.6e-5. Let the
token with the greatest float32 sum a of a part have the true sum b >= a - E. All tokens whose true sums are at least b
less 1e-9 have float32 sums of at least a - 2 E - 1e-9, above a - EPS: these are computed in float64, like the host's.
Tokens below the floor by less than 1e-4 in float32 pass too; they are dropped when their float64 s is known, and do not
count as a. The next best sum is therefore right where it lies within MARGIN; else it may be missing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.backends.cuda.kernels.noise import gumbel, near_gumbel, philox
from headrace.backends.cuda.kernels.ranking import (
    INT32_MAX,
    LAST_BIN,
    NUM_BINS,
    bin_of,
    greatest_of,
    has_cut,
    logits_of,
    merged,
    parameters_of,
    scale_of,
    scaled_of,
    weights,
)
from headrace.backends.cuda.launch import Arguments, Config, Kernel

EPS = tl.constexpr(2.0**-10)


@triton.jit
def _highest(
    logits, ld, masks, ld_masks, wholes, highest, sizes, width, PARTS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    flags = tl.load(wholes + 4 * row + 3)
    if (flags < 0) | ((flags & 2) == 0):
        return
    part = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    x = logits_of(logits + row * ld, masks + row * ld_masks, token, width, True)
    tl.store(highest + row * PARTS + part, tl.max(x, 0))


@triton.jit
def draw_part(x, token, logits, greatest, temperature, floor, seed, position, part, BLOCK: tl.constexpr):
    """-> the greatest sum of scaled logit and noise in a part of a row, its token, and the next sum if it is near."""
    c0, c1, c2, c3 = philox(part * (BLOCK // 2) + tl.arange(0, BLOCK // 2), seed, position)
    noise = tl.interleave(near_gumbel(c0, c1), near_gumbel(c2, c3))
    scale = scale_of(temperature)
    near = (x - greatest) * scale
    if scale == 0.0:
        near = tl.maximum(scaled_of(x, greatest, temperature), -1e30).to(tl.float32)
    least = tl.maximum(floor - 1e-4, -42.0).to(tl.float32)
    near = tl.where((near >= least) & (x > float("-inf")), near + noise, float("-inf"))
    best = tl.full([], float("-inf"), tl.float64)
    second = tl.full([], float("-inf"), tl.float64)
    winner = tl.full([], 2147483647, tl.int32)
    bound = tl.full([], float("-inf"), tl.float32)
    top = tl.max(near, 0)
    while (top > float("-inf")) & (top >= bound):
        one = tl.min(tl.where(near == top, token, INT32_MAX), 0)
        y = tl.load(logits + one) + 0.0
        scaled = scaled_of(y, greatest, temperature)
        sum = scaled + tl.max(gumbel(one + tl.zeros([2], tl.int32), seed, position), 0)
        is_kept = (scaled > float("-inf")) & (scaled >= floor)
        sum = tl.where(is_kept, sum, float("-inf"))
        bound = tl.maximum(bound, tl.where(is_kept, top - EPS, float("-inf")))
        better = (sum > best) | ((sum == best) & (one < winner))
        second = tl.where(better, best, tl.maximum(second, sum))
        winner = tl.where(better, one, winner)
        best = tl.where(better, sum, best)
        near = tl.where(token == one, float("-inf"), near)
        top = tl.max(near, 0)
    return best, winner, second


@triton.jit
def _last_bin(counts, total, top_k, top_p, by_count, room):
    """The last bin that the cuts can reach, of which `counts` tokens each.

    Under top-k it is the one that has the k-th. The nucleus ends where the mass of what is left out is at most 1 -
    top_p of the total: that mass is at most each bin's count times the weight at its near edge. The first thousandth
    covers what float32 does to edges and exponentials. Where the bins up to there exceed the room, fewer are tried.
    """
    bin = tl.arange(0, NUM_BINS)
    upto = tl.cumsum(counts, 0)
    if by_count:
        last = tl.sum((upto < top_k).to(tl.int32), 0)
    else:
        edge = tl.where(bin < 32, bin * 0.25, 8.0 + (bin - 32).to(tl.float32) / 0.9)
        heaviest = tl.exp(-edge).to(tl.float64) * (17592186044416.0 * 1.001)
        mass = tl.where(bin <= LAST_BIN, heaviest * counts.to(tl.float64), 0.0)
        left_out = tl.sum(mass, 0) - tl.cumsum(mass, 0)
        missing = total.to(tl.float64) - left_out < top_p * total.to(tl.float64)
        last = tl.minimum(tl.sum(missing.to(tl.int32), 0), tl.maximum(tl.sum((upto <= room).to(tl.int32), 0) - 1, 0))
    return tl.minimum(last, LAST_BIN)


@triton.jit
def _survey(
    logits, ld, masks, ld_masks, reals, wholes, values, highest, sums, seconds, winners, part_mass, counts, arrived,
    offsets, reaches, ids, margins, sizes, width, PARTS: tl.constexpr, LANES: tl.constexpr, ROOM: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    temperature, floor, top_p, top_k, seed, position, flags = parameters_of(reals, wholes, row)
    if flags < 0:
        return
    part = tl.program_id(1)
    at = row * PARTS + part
    masked = (flags & 2) == 2
    logits += row * ld
    token = part * BLOCK + tl.arange(0, BLOCK)
    x = logits_of(logits, masks + row * ld_masks, token, width, masked)
    greatest = greatest_of(values, highest, row, masked, PARTS, LANES)
    by_count = (top_k > 0) & (top_k < width)
    is_cut = has_cut(flags, top_k, top_p, width)
    bins = tl.arange(0, NUM_BINS)
    if is_cut:
        allowed = (token < width) & (x > float("-inf"))
        of_bins = tl.histogram(bin_of(x, greatest, scale_of(temperature)), NUM_BINS, mask=allowed)
        tl.store(counts + at * NUM_BINS + bins, of_bins)
        if by_count == 0:
            scaled = scaled_of(x, greatest, temperature)
            heavy = allowed & (scaled > float("-inf")) & (scaled >= floor)
            tl.store(part_mass + at, tl.sum(tl.where(heavy, weights(scaled), 0), 0))
    else:
        best = tl.max(x, 0).to(tl.float64)
        second = tl.full([], float("-inf"), tl.float64)
        winner = tl.min(tl.where(x.to(tl.float64) == best, token, INT32_MAX), 0)
        if (flags & 1) == 1:
            best, winner, second = draw_part(
                x, token, logits, greatest, temperature, floor, seed, position, part, BLOCK
            )
        tl.store(sums + at, best)
        tl.store(seconds + at, second)
        tl.store(winners + at, winner)
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == PARTS - 1:
        tl.store(arrived + row, 0)
        lane = tl.arange(0, LANES)
        inside = lane < PARTS
        of_row = row * PARTS + lane
        if is_cut:
            places = of_row[:, None] * NUM_BINS + bins[None, :]
            every = tl.load(counts + places, mask=inside[:, None], other=0, cache_modifier=".cg")
            total = tl.zeros([], tl.int64)
            if by_count == 0:
                total = tl.sum(tl.load(part_mass + of_row, mask=inside, other=0, cache_modifier=".cg"), 0)
            last = _last_bin(tl.sum(every, 0), total, top_k, top_p, by_count, ROOM)
            of_parts = tl.sum(tl.where((bins <= last)[None, :], every, 0), 1)
            upto = tl.cumsum(of_parts, 0)
            offsets += row * (PARTS + 1)
            tl.store(offsets + lane, upto - of_parts, mask=inside)
            tl.store(offsets + PARTS, tl.sum(of_parts, 0))
            tl.store(reaches + 2 * row, last.to(tl.int64))
            tl.store(reaches + 2 * row + 1, total)
        else:
            best = tl.load(sums + of_row, mask=inside, other=float("-inf"), cache_modifier=".cg")
            second = tl.load(seconds + of_row, mask=inside, other=float("-inf"), cache_modifier=".cg")
            winner = tl.load(winners + of_row, mask=inside, other=INT32_MAX, cache_modifier=".cg")
            most, one, rest = merged(best, winner, second, INT32_MAX)
            if (flags & 1) == 0:
                rest = tl.full([], float("-inf"), tl.float64)
            tl.store(ids + row, tl.where(most > float("-inf"), one, -1))
            tl.store(margins + row, most - tl.maximum(rest, -1e300))


@triton.jit
def _pick(
    logits, ld, masks, ld_masks, reals, wholes, values, highest, offsets, reaches, picked, picked_ids, sizes, width,
    PARTS: tl.constexpr, LANES: tl.constexpr, ROOM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    temperature, _, top_p, top_k, _, _, flags = parameters_of(reals, wholes, row)
    if (flags < 0) | (has_cut(flags, top_k, top_p, width) == 0):
        return
    part = tl.program_id(1)
    offsets += row * (PARTS + 1)
    first, end = tl.load(offsets + part), tl.load(offsets + part + 1)
    if (tl.load(offsets + PARTS) > ROOM) | (first == end):
        return
    masked = (flags & 2) == 2
    token = part * BLOCK + tl.arange(0, BLOCK)
    x = logits_of(logits + row * ld, masks + row * ld_masks, token, width, masked)
    bin = bin_of(x, greatest_of(values, highest, row, masked, PARTS, LANES), scale_of(temperature))
    is_kept = ((token < width) & (x > float("-inf")) & (bin <= tl.load(reaches + 2 * row))).to(tl.int32)
    place = row * ROOM + first + tl.cumsum(is_kept, 0) - is_kept
    tl.store(picked + place, x, mask=is_kept == 1)
    tl.store(picked_ids + place, token, mask=is_kept == 1)


def _twin(a: Arguments) -> None:
    """Write nothing: the twin of the last launch draws by itself."""


HIGHEST = Kernel(_highest, _twin, (Config({"BLOCK": 2048}, 4),))
SURVEY = Kernel(_survey, _twin, (Config({"BLOCK": 2048}, 4),), fuse=False)
PICK = Kernel(_pick, _twin, (Config({"BLOCK": 2048}, 4),), fuse=False)
