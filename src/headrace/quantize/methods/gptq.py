"""GPTQ (Frantar et al. 2023: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
algorithm 1): weights are rounded one input after the other, and the weights of the inputs that follow compensate the
rounding error, by the second derivatives of the layer's squared error.

`act_order` is the order of the inputs: by index ("none"), or those with the largest diagonal first, either in groups of
neighbours ("static", which runs on any kernel) or in groups of that order ("group", with a g_idx).
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.base import QWeight
from headrace.quantize import grid
from headrace.quantize.base import Layer, Options, Statistics

logger = logging.getLogger(__name__)

CALIBRATED = True
ORDERS = ("none", "static", "group")
BLOCK = 128
"""Inputs between two updates of all that follow (the paper's B)."""
MAX_DAMPING = 1.0


def verify(options: Options) -> Options:
    symmetric = grid.verify(options, symmetric=True)
    if options.act_order not in ORDERS:
        raise RequestError("act_order", options.act_order, "one of " + ", ".join(ORDERS))
    if not 0 < options.damping <= MAX_DAMPING:
        raise RequestError("damping", options.damping, f"above 0, at most {MAX_DAMPING:g}")
    if options.group_size < 1 and options.act_order == "group":
        raise RequestError("act_order", "group", "static or none where an output has one scale")
    return replace(options, symmetric=symmetric)


def prepare(layer: Layer, options: Options) -> None:
    """Change nothing."""


def quantise(weight: Tensor, statistics: Statistics | None, options: Options, name: str) -> QWeight:
    num_in = weight.shape[1]
    group = grid.group_of(options, num_in, name)
    hessian = torch.eye(num_in) if statistics is None or not statistics.num_rows else statistics.hessian
    diagonal = hessian.diagonal().clone()
    diagonal[diagonal == 0] = 1.0  # an input that was always 0 has no covariance
    order = torch.arange(num_in)
    if options.act_order != "none":
        order = torch.argsort(diagonal, descending=True, stable=True)
    # Where the grid does not follow the order, it is fitted to the weights before any compensation.
    static = options.act_order == "static" or group == num_in
    scales, zeros = grid.find(weight.view(len(weight), -1, group), options)
    grid.verify_scales(scales, weight, name)
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    w = weight[:, order]
    hessian = hessian[order][:, order]
    hessian.diagonal().copy_(diagonal[order])
    factor = _factor(hessian, options.damping, name)
    del hessian
    step = group * max(1, BLOCK // group) if group < num_in else BLOCK
    for first in range(0, num_in, step):
        last = min(first + step, num_in)
        block, block_factor = w[:, first:last].clone(), factor[first:last, first:last]
        errors = torch.empty_like(block)
        for i in range(last - first):
            place = first + i
            index = int(order[place]) // group if static else place // group
            if not static and place % group == 0:
                scales[:, index], zeros[:, index] = grid.find(block[:, i : i + group], options)
            column, scale, zero = block[:, i], scales[:, index], zeros[:, index]
            column_codes = grid.code(column, scale, zero, options.bits)
            codes[:, place] = column_codes.to(torch.uint8)
            error = (column - (column_codes - zero) * scale) / block_factor[i, i]
            block[:, i + 1 :].addr_(error, block_factor[i, i + 1 :], alpha=-1)
            errors[:, i] = error
        w[:, last:].addmm_(errors, factor[first:last, last:], alpha=-1)
    grid.verify_scales(scales, weight, name)
    if not static and options.act_order == "group":
        return QWeight(codes, scales, zeros, group=group, bits=options.bits, permutation=order)
    back = torch.empty_like(codes)
    back[:, order] = codes
    return QWeight(back, scales, zeros, group=group, bits=options.bits)


def _factor(hessian: Tensor, damping: float, name: str) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Hessian [in, in], whose diagonal is overwritten.

    These are the largest matrices of a run, so each is released as soon as possible.
    """
    diagonal, mean = hessian.diagonal().clone(), hessian.diagonal().mean()
    while damping <= MAX_DAMPING:
        hessian.diagonal().copy_(diagonal + damping * mean)
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not int(failed):
            inverse: Tensor = torch.cholesky_inverse(lower)
            del lower
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(failed) and bool(torch.isfinite(upper).all()):
                return upper
            del inverse, upper
        damping *= 10
        logger.warning("%s: its Hessian is not positive definite; damping goes up to %g", name, damping)
    raise CheckpointError(f"{name}: its Hessian can not be inverted; calibrate with more text, or with more damping")
