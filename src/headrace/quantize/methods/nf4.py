"""NF4 (Dettmers et al. 2023, "QLoRA", section 3): each block's weights, divided by the largest, become the nearest of
sixteen levels that split a normal distribution evenly; the scales themselves are quantised to 8 bits.

Double quantisation as bitsandbytes has it: scales less their mean, in blocks of 256, become the nearest of 256 numbers
of a table ("dynamic" quantisation, Dettmers 2016, "8-Bit Approximations for Parallelism in Deep Learning"). Here the
weights' codes are chosen by the scales after that rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.protocol.errors import RequestError
from headrace.quant import schemes
from headrace.quant.base import QWeight, widened
from headrace.quantize import grid
from headrace.quantize.base import Layer, Options, Statistics

CALIBRATED = False
LEVELS = schemes.LEVELS["nf4"]
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED_BLOCK = 256


@dataclass(frozen=True, slots=True)
class NF4Weight(QWeight):
    """Adds the parts of its doubly quantised scales: absmax uint8 [blocks], nested float32 [blocks / 256], offset."""

    absmax: Tensor | None = None
    nested: Tensor | None = None
    offset: float = 0.0


def verify(options: Options) -> Options:
    if options.bits != 4 or options.symmetric is False:
        raise RequestError("bits", options.bits, f"4, without zero points, for method {options.method}")
    if options.group_size not in BLOCK_SIZES:
        raise RequestError("group_size", options.group_size, f"one of {', '.join(map(str, BLOCK_SIZES))} for nf4")
    return replace(options, symmetric=True)


def prepare(layer: Layer, options: Options) -> None:
    """Change nothing."""


def quantise(weight: Tensor, statistics: Statistics | None, options: Options, name: str) -> NF4Weight:
    num_out, num_in = weight.shape
    group = grid.group_of(options, num_in, name)
    grid.verify_finite(weight, name)
    largest = weight.view(num_out, -1, group).abs().amax(-1)
    offset = float(largest.mean())
    codes, nested = eight_bits(largest.flatten() - offset)
    scales = (table()[codes.int()] * widened(nested.view(1, -1), NESTED_BLOCK, len(codes))[0] + offset).view_as(largest)
    levels = torch.tensor(LEVELS)
    # A scale that was rounded to 0 or below would change the signs of its weights.
    divisor = widened(torch.where(scales > 0, scales, torch.inf), group, num_in)
    places = torch.bucketize(weight / divisor, (levels[1:] + levels[:-1]) / 2)
    return NF4Weight(
        places.to(torch.uint8), scales, group=group, bits=4, codebook=levels, absmax=codes, nested=nested, offset=offset
    )


def table() -> Tensor:
    """float32 [256], rising: evenly spaced numbers in each of seven powers of ten, twice as many as in the power below,
    with both signs; and 0 and 1."""
    sizes = []
    for i in range(7):
        ends = torch.linspace(0.1, 1, 2**i + 1)
        sizes.append((ends[:-1] + ends[1:]) / 2 * 10.0 ** (i - 6))
    positive = torch.cat(sizes)
    return torch.cat((-positive, positive, torch.tensor([0.0, 1.0]))).sort().values


def eight_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """[n] as places in `table`, uint8 [n], and the largest magnitude of each 256 [ceil(n / 256)]."""
    padded = torch.nn.functional.pad(values, (0, -len(values) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    largest = padded.abs().amax(-1)
    entries = table()
    divided = padded / torch.where(largest == 0, 1.0, largest).unsqueeze(-1)
    places = torch.bucketize(divided, (entries[1:] + entries[:-1]) / 2)
    # The reader refuses scales that are all 0.
    return places.to(torch.uint8).flatten()[: len(values)], torch.where(largest == 0, 1.0, largest)
