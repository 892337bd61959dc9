"""How each row chooses its experts: `backends.base.Routing` on the device.

One program a row. Scores become whole numbers in the order of the floats, of which the greatest are taken one after the
other, the lower id first; the same is done to the groups before it. The sums of a row follow from the router alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.backends.base import Routing
from headrace.backends.cuda.kernels.rows import sigmoid
from headrace.backends.cuda.launch import Argument, Arguments, Config, Kernel, Launch
from headrace.backends.torch_ref.ops import RefOps

LEAST_INT = tl.constexpr(-(2**31))
ORDER_OF_NEGATIVE_INFINITY = tl.constexpr(-2139095041)
ORDER_OF_NAN = tl.constexpr(2**31 - 1)


@triton.jit
def _order(v):
    """Whole numbers in the order of the floats; NaN comes first, so that it shows in the row's result."""
    v = tl.where(v == 0, 0.0, v)
    bits = v.to(tl.int32, bitcast=True)
    return tl.where(v != v, ORDER_OF_NAN, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _number(order):
    """The inverse of `_order`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _without_best(order, place, NUM: tl.constexpr):
    """`order` with its NUM greatest numbers, the lowest place first of equal ones, replaced by LEAST_INT."""
    for _ in range(NUM):
        order = tl.where(place == tl.argmax(order, 0, tie_break_left=True), LEAST_INT, order)
    return order


@triton.jit
def _in_best_groups(order, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, TOP: tl.constexpr, BLOCK_G: tl.constexpr,
                    BLOCK_S: tl.constexpr):  # fmt: skip
    """`order` [BLOCK_G * BLOCK_S] with that of -inf for all but the CHOSEN groups whose TOP best have the greatest
    sum."""
    by_group = tl.reshape(order, [BLOCK_G, BLOCK_S])
    score = _number(tl.max(by_group, 1))
    if TOP == 2:
        best = tl.argmax(by_group, 1, tie_break_left=True)
        rest = tl.where(tl.arange(0, BLOCK_S)[None, :] == best[:, None], LEAST_INT, by_group)
        score += _number(tl.max(rest, 1))
    group = tl.arange(0, BLOCK_G)
    groups = tl.where(group < GROUPS, _order(score), LEAST_INT)
    stays = _without_best(groups, group, CHOSEN) != groups
    return tl.reshape(tl.where(stays[:, None], by_group, ORDER_OF_NEGATIVE_INFINITY), [BLOCK_G * BLOCK_S])


@triton.jit
def _route(
    logits, ld_logits, bias, factors, weights, ids, sizes, scale, SIZE: tl.constexpr, TOP_K: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN: tl.constexpr, TOP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + DIM):
        return
    # Experts lie group by group, so that ids ascend; a group is padded to a power of two.
    place = tl.arange(0, BLOCK_G * BLOCK_S)
    inside = (place % BLOCK_S < SIZE) & (place // BLOCK_S < GROUPS)
    expert = place // BLOCK_S * SIZE + place % BLOCK_S
    v = tl.load(logits + row * ld_logits + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        e = sigmoid(v)
    else:
        e = tl.exp(v - tl.max(v, 0))
    choice = v
    if bias is not None:
        choice = e if SIGMOID else e / tl.sum(e, 0)
        choice += tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    order = tl.where(inside, _order(choice), LEAST_INT)
    if CHOSEN < GROUPS:
        order = _in_best_groups(order, GROUPS, CHOSEN, TOP, BLOCK_G, BLOCK_S)
        order = tl.where(inside, order, LEAST_INT)
    chosen = _without_best(order, place, TOP_K) != order
    weight = e
    if RENORMALISE:
        weight = e / tl.sum(tl.where(chosen, e, 0.0), 0)
    elif not SIGMOID:
        weight = e / tl.sum(e, 0)
    weight *= scale
    if factors is not None:
        weight *= tl.load(factors + expert, mask=inside, other=0.0).to(tl.float32)
    at = row * TOP_K + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(ids + at, expert, mask=chosen)
    tl.store(weights + at, weight, mask=chosen)


def _route_twin(a: Arguments) -> None:
    rows = int(a.sizes[a.DIM])
    routing = Routing(
        a.TOP_K, "sigmoid" if a.SIGMOID else "softmax", a.bias,
        (a.GROUPS, a.CHOSEN, a.TOP) if a.CHOSEN < a.GROUPS else None, a.RENORMALISE, a.scale, factors=a.factors,
    )  # fmt: skip
    ops = RefOps(a.logits.device, torch.float32)
    weights, ids = ops.route(a.logits[:rows, : a.GROUPS * a.SIZE], routing)
    ascending = ids.sort(-1)
    a.ids[:rows] = ascending.values.int()
    a.weights[:rows] = weights.gather(1, ascending.indices)


# Nothing is fused, so that all configurations round alike. The sums of a row follow from its one configuration.
ROUTE = Kernel(_route, _route_twin, (Config({}, 1),), fuse=False)


def route(
    logits: Tensor, routing: Routing, weights: Tensor, ids: Tensor, sizes: Tensor, dim: int, num_rows: int
) -> Launch:
    """logits [R, E] -> weights float32 and ids int32 [R, top_k], the ids of a row in ascending order.

    sizes: int32, numbers of rows in device memory, of which `sizes[dim]` counts, at most `num_rows`.
    """
    num_experts = logits.shape[1]
    groups, chosen, top = routing.groups or (1, 1, 1)
    size = num_experts // groups
    arguments: dict[str, Argument] = {
        "logits": logits, "ld_logits": logits.stride(0), "bias": routing.bias, "factors": routing.factors,
        "weights": weights, "ids": ids, "sizes": sizes, "scale": float(routing.scale), "SIZE": size,
        "TOP_K": routing.top_k, "GROUPS": groups, "CHOSEN": chosen, "TOP": min(top, size),
        "BLOCK_G": triton.next_power_of_2(groups), "BLOCK_S": triton.next_power_of_2(size),
        "SIGMOID": routing.score == "sigmoid", "RENORMALISE": routing.renormalise, "DIM": dim,
    }  # fmt: skip
    return Launch(ROUTE, (num_rows,), arguments, ROUTE.configs[0])
