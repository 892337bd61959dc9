"""Weights of which two in four are stored (2:4 sparsity): compressed-tensors' bitmasks and Marlin's words, made dense.

Called by `quant.formats.compressed_tensors`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError
from headrace.quant.arrays import bits_of
from headrace.quant.base import QWeight, Tensors
from headrace.quant.packing import checked, good_scales, unpacked

TILE = 16
SCALE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The outputs of eight neighbouring scales in groups, as Marlin stores them."""


def expanded(tensors: Tensors, name: str, *dtypes: str) -> NDArray[Any]:
    """`<name>.compressed`, whose places are the bits of `<name>.bitmask`, as [out, in] with zeros elsewhere."""
    shape = checked(tensors, f"{name}.shape", (2, 1), "int64", "int32").reshape(2).tolist()
    num_out, num_in = int(shape[0]), int(shape[1])
    if not (0 < num_out < 2**31 and 0 < num_in < 2**31) or num_in % 4:
        raise CheckpointError(f"{name}.shape is {shape}, expected [out, in] with fours of inputs")
    values = checked(tensors, f"{name}.compressed", (num_out, num_in // 2), *dtypes)
    mask = checked(tensors, f"{name}.bitmask", (num_out, -(-num_in // 8)), "uint8")
    places = np.unpackbits(np.ascontiguousarray(mask), axis=1, count=num_in, bitorder="little").astype(bool)
    if int(places.sum()) != values.size or (places.sum(1) != num_in // 2).any():
        raise CheckpointError(
            f"{name}.bitmask, shape {list(mask.shape)}, does not mark half of each row of {num_in} inputs"
        )
    bits = bits_of(np.ascontiguousarray(values))
    dense = np.zeros((num_out, num_in), bits.dtype)
    dense[places] = bits.reshape(-1)
    return dense.view(values.dtype)


def of_marlin(tensors: Tensors, name: str, bits: int, group: int | None) -> QWeight:
    """Codes of 4 or 8 bits of Marlin's 2:4 kernel (Frantar et al. 2024).

    `weight_packed` int32 [in / 32, out * bits / 2]: two of four codes, in tiles of 16 x 16; `meta` int16
    [in / 32, 2 * out], the places of these; `scale_packed` [groups, out]. group: None for one scale an output.
    """
    if bits not in (4, 8):
        raise CheckpointError(f"config.json: quantization_config: num_bits is {bits}, expected 4 or 8 in marlin-24")
    words = checked(tensors, f"{name}.weight_packed", (None, None), "int32")
    half_in, num_out = words.shape[0] * TILE, words.shape[1] * 32 // bits // TILE
    count = half_in * num_out
    if num_out % 64 or count % 1024 or half_in % 16:
        raise CheckpointError(
            f"{name}.weight_packed has shape {list(words.shape)}, expected tiles of 16 inputs and 64 outputs"
        )
    order = _order(bits)
    stored = unpacked(words, bits, num_out * TILE).reshape(-1, order.size)
    turned = np.empty_like(stored)
    turned[:, order] = stored
    tiles = turned.reshape(half_in // TILE, num_out // TILE, TILE, TILE).transpose(1, 3, 0, 2)
    halves = tiles.reshape(num_out, half_in)
    meta = checked(tensors, f"{name}.meta", (half_in // 16, 2 * num_out), "int16")
    codes = _placed(halves, np.ascontiguousarray(meta).view(np.uint16).reshape(-1), bits, f"{name}.meta")
    num_in = 2 * half_in
    size = group or num_in
    packed = checked(tensors, f"{name}.scale_packed", (-(-num_in // size), num_out))
    scales = good_scales(packed, f"{name}.scale_packed")
    if size < half_in:  # as the writer decides
        each = np.empty_like(scales).reshape(-1, 8)
        each[:, SCALE_ORDER] = scales.reshape(-1, 8)
        scales = each.reshape(scales.shape)
    scales = np.ascontiguousarray(scales.T)
    return QWeight(codes, scales, np.full_like(scales, 2 ** (bits - 1)), group=size, bits=bits)


def _order(bits: int) -> NDArray[np.int64]:
    """For each of 1024 codes as stored, its place in 4 tiles of 16 x 16, one after the other (Marlin's 2:4 kernel)."""
    lane, row, block = np.arange(32)[:, None, None, None], np.arange(4), np.arange(2)[:, None]
    column = lane // 4
    rows = 2 * (lane % 4 + 4 * (row // 2)) + row % 2
    first = 16 * rows + column // 2 * 256 + 8 * (column % 2) + 4 * block
    places = (first[:, None] + np.arange(4).reshape(1, 4, 1, 1, 1)).reshape(-1)
    interleave = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
    return np.ascontiguousarray(places.reshape(-1, len(interleave))[:, interleave].reshape(-1))


def _placed(halves: NDArray[np.uint8], meta: NDArray[np.uint16], bits: int, name: str) -> NDArray[np.uint8]:
    """Codes [out, in / 2] at the places that `meta` says, with the code of 0 elsewhere: [out, in].

    meta: a word for 16 inputs of an output, four bits for each four, in CUTLASS's order (`reorder_meta`).
    """
    num_out, num_words = halves.shape[0], halves.shape[1] // 8
    row, column = np.arange(num_out)[:, None], np.arange(num_words)
    line = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 32 % 4 // 2 * 32 + row % 64 // 8 * 4
    shift = ((line % 2 == 0) & (column % 2 == 1)).astype(np.int64) - ((line % 2 == 1) & (column % 2 == 0))
    line, place = line + shift, column - shift
    words = meta[place // 2 * num_out * 2 + line * 2 + place % 2]
    fours = (words[:, :, None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15).reshape(num_out, -1)
    first, second = fours & 3, fours >> 2
    if (first == second).any():
        raise CheckpointError(f"{name}, {meta.size} words, has one place twice in four")
    codes = np.full((num_out, fours.shape[1], 4), 2 ** (bits - 1), np.uint8)
    pairs = halves.reshape(num_out, -1, 2)
    for places, values in ((first, pairs[:, :, 0]), (second, pairs[:, :, 1])):
        np.put_along_axis(codes, places.astype(np.int64)[:, :, None], values[:, :, None], 2)
    return codes.reshape(num_out, -1)
