"""Native linear layers of K-quants, scales in two levels: GGUF's numbers to the bit, and one stated chain of floats."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from tests.formats.gguf.models import random_blocks
from tests.native.kernels.calls import (
    FAST,
    ISAS,
    Array,
    Floats,
    Quantized,
    call,
    fma,
    normals,
    padded,
    quantized,
    same,
    untouched,
)
from tests.support.tensors import decode

from headrace import _native
from headrace.quant.formats.gguf_blocks import TYPES
from headrace.quant.schemes import K_TYPES

every_type = pytest.mark.parametrize("kind", K_TYPES)
every_isa = pytest.mark.parametrize("isa", ISAS)
ACT = 32


class Weights:
    """Rows of random blocks, as they lie in a file and as they are packed."""

    def __init__(self, kind: str, num_out: int, num_in: int, *, seed: int = 7, raw: Array | None = None) -> None:
        self.kind, self.code, self.num_out, self.num_in = kind, K_TYPES[kind].code, num_out, num_in
        result = random_blocks(kind, (num_out, num_in), seed)[0] if raw is None else raw
        self.raw = np.ascontiguousarray(result)
        self.weight = decode(kind, self.raw)
        self.sub = self.weight.group

    def packed_bytes(self) -> int:
        return _native.packed_bytes("k", self.num_out, self.num_in, ACT, self.code)

    def pack(self, into: Array, first: int, last: int) -> None:
        raw = np.ascontiguousarray(self.raw[first:last])
        sizes = (self.num_in, ACT, self.code, first, last, self.num_out)
        _native.pack("k", raw.ctypes.data, 0, 0, *sizes, into.ctypes.data)

    def packed(self) -> Array:
        into = np.full(self.packed_bytes(), 0xA5, np.uint8)
        self.pack(into, 0, self.num_out)
        return into

    def floats(self) -> Floats:
        result: Floats = self.weight.dequantize().numpy()
        return result

    def unpacked(self) -> Floats:
        packed, result = self.packed(), np.full((self.num_out, self.num_in), np.nan, np.float32)
        for row in range(self.num_out):
            at = result[row].ctypes.data
            _native.unpack_row("k", packed.ctypes.data, self.num_out, self.num_in, ACT, self.code, row, at)
        return result


def linear(
    isa: str, weights: Weights, q: Quantized, rows: int, packed: Array | None = None, num_threads: int = 1, **more: Any
) -> Floats:
    """The first `rows` rows of q through the layer -> [rows, num_out]"""
    out = padded(rows, weights.num_out)
    values: dict[str, Any] = {"weights": weights.packed() if packed is None else packed, "form": weights.code}
    values |= {"num_in": weights.num_in, "num_out": weights.num_out, "out": out, "ld_out": out.shape[1]} | more
    call("linear_k", isa, rows, num_threads=num_threads, **values, **q.fields())
    assert untouched(out, weights.num_out)
    return out[:, : weights.num_out].copy()


def defined(weights: Weights, q: Quantized, rows: int, *, backwards: bool = False) -> Floats:
    """The contract, operation by operation."""
    w, sub = weights.weight, weights.sub
    assert w.scales is not None
    codes, scales = w.codes.numpy().astype(np.int64), w.scales.numpy()
    acc = np.zeros((rows, weights.num_out), np.float32)
    groups = range(weights.num_in // sub)
    for g in reversed(groups) if backwards else groups:
        part = slice(g * sub, (g + 1) * sub)
        block_codes = q.q[:rows, part].astype(np.int64)
        scale = q.scales[:rows, g * sub // ACT, None]
        acc = fma((block_codes @ codes[:, part].T).astype(np.float32) * scale, scales[None, :, g], acc)
        if w.mins is not None:
            acc = fma(block_codes.sum(1, keepdims=True).astype(np.float32) * scale, w.mins.numpy()[None, :, g], acc)
    return acc


def rows_of(rows: int, num_in: int, seed: int = 3) -> Quantized:
    return quantized(normals(seed, rows, num_in), ACT)


@every_type
def test_unpacked_rows_are_the_files_numbers_to_the_bit(kind: str, shared_data: Path) -> None:
    with safe_open(shared_data / "quant" / "gguf_block_vectors.safetensors", "np") as file:
        raw, expected = file.get_tensor(f"{kind}.raw"), file.get_tensor(f"{kind}.ref")
    actual = Weights(kind, 4, expected.size // 4, raw=raw.reshape(4, -1)).unpacked()
    assert np.array_equal(actual.ravel(), expected.ravel())


@every_type
def test_unpacked_rows_are_those_of_gguf_py(kind: str) -> None:
    for shape in ((1, 256), (33, 512), (70, 768)):
        raw, expected = random_blocks(kind, shape, seed=5)
        weights = Weights(kind, *shape, raw=raw)
        assert np.array_equal(weights.unpacked(), expected)
        ends = (int(weights.weight.codes.min()), int(weights.weight.codes.max()))
        assert shape[0] == 1 or ends == (TYPES[kind].low, TYPES[kind].high)


@every_isa
@every_type
def test_each_output_is_the_stated_chain_to_the_bit(isa: str, kind: str) -> None:
    for rows, num_in, num_out in ((1, 256, 1), (3, 512, 33), (5, 1024, 31), (14, 256, 97)):
        weights, q = Weights(kind, num_out, num_in), rows_of(rows, num_in)
        want, bias, residual = defined(weights, q, rows), normals(1, num_out), normals(2, rows, num_out)
        assert same(linear(isa, weights, q, rows), want)
        got = linear(isa, weights, q, rows, bias=bias, residual=residual, ld_res=num_out)
        assert same(got, (want + bias) + residual)


@every_type
def test_the_order_of_groups_can_be_told(kind: str) -> None:
    """Negative control: with the groups in another order the bits differ, so the test above would see it."""
    weights, q = Weights(kind, 64, 1024), rows_of(4, 1024)
    assert not same(defined(weights, q, 4), defined(weights, q, 4, backwards=True))


@pytest.mark.parametrize("isa", FAST)
@every_type
def test_every_isa_agrees_with_scalar_for_any_number_of_rows(isa: str, kind: str) -> None:
    for num_in, num_out in ((256, 1), (768, 33), (1280, 96)):
        weights, q = Weights(kind, num_out, num_in), rows_of(70, num_in)
        packed = weights.packed()
        want = linear("scalar", weights, q, 70, packed)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 24, 25, 48, 49, 70):
            for num_threads in (1, 2):
                assert same(linear(isa, weights, q, rows, packed, num_threads), want[:rows]), (num_in, rows)


@every_isa
@every_type
def test_the_greatest_numbers_do_not_saturate(isa: str, kind: str) -> None:
    """All codes, scales and activations at their ends at once: 16-bit sums on the way would overflow or clamp."""
    for byte in (0x00, 0xFF):
        raw = np.full((3, 2 * K_TYPES[kind].size), byte, np.uint8)
        for block in (0, K_TYPES[kind].size):
            at = K_TYPES[kind].scales
            raw[:, block + at.start : block + at.stop] = np.full((at.stop - at.start) // 2, 1, "<f2").view(np.uint8)
        weights, q = Weights(kind, 3, 512, raw=raw), Quantized(14, 512, ACT)
        q.q[:], q.scales[:] = 0, 1 / 127
        q.q[::2, :512], q.q[1::2, :512], q.q[2, :512:2] = 127, -127, -127
        q.sums[:, : q.groups] = q.q[:, :512].reshape(14, -1, ACT).astype(np.int32).sum(2)
        for rows in (1, 14):
            assert same(linear(isa, weights, q, rows), defined(weights, q, rows))


@every_isa
@every_type
def test_a_row_that_is_not_finite_shows_and_harms_no_other(isa: str, kind: str) -> None:
    x, weights = normals(6, 14, 512), Weights(kind, 40, 512)
    want = linear(isa, weights, quantized(x, ACT), 14)
    x[3, 70], x[9, 511] = np.nan, np.inf
    got = linear(isa, weights, quantized(x, ACT), 14)
    assert not np.isfinite(got[[3, 9]]).any()
    assert same(np.delete(got, [3, 9], 0), np.delete(want, [3, 9], 0))


@every_type
def test_a_matrix_packed_in_parts_has_the_same_bytes(kind: str) -> None:
    weights, panel = Weights(kind, 150, 512), _native.panel("k")
    parts = np.full(weights.packed_bytes(), 0x5A, np.uint8)
    for first, last in ((2 * panel, 150), (0, panel), (panel, 2 * panel)):
        weights.pack(parts, first, last)
    assert same(parts, weights.packed())
    weights.raw[panel, 60] ^= 1  # Negative control.
    assert not same(parts, weights.packed())


@every_isa
@every_type
def test_rows_of_a_table_are_the_files_numbers(isa: str, kind: str) -> None:
    """Looked up in the blocks as they lie in the file, at any address."""
    weights, ids = Weights(kind, 50, 1024), np.array([0, 49, 7, 7, 20], np.int32)
    shifted = np.zeros(weights.raw.size + 1, np.uint8)
    shifted[1:] = weights.raw.ravel()
    descriptor = os.memfd_create("table")
    os.write(descriptor, shifted.tobytes())
    for factor in (1.0, 0.75):
        for num_threads in (1, 2):
            values: dict[str, Any] = {
                "ids": ids,
                "type": weights.code,
                "width": 1024,
                "scale": factor,
            }
            for place in ({"table": shifted[1:], "file": -1}, {"file": descriptor, "place": 1}):
                out = padded(5, 1024)
                call("embedding", isa, 5, num_threads=num_threads, **values, **place, out=out, ld_out=out.shape[1])
                assert untouched(out, 1024)
                assert same(out[:, :1024].copy(), weights.floats()[ids] * np.float32(factor))
    os.ftruncate(descriptor, shifted.size - 1)
    call("embedding", isa, 5, **values, **place, out=out, ld_out=out.shape[1])
    assert np.isnan(out[1, 768:1024]).all()  # the last block of the last row
    os.close(descriptor)


def test_bits_of_a_weight_and_the_name_of_the_layout_are_pinned() -> None:
    assert _native.layout("k") == "k/panel32/own-bits/f16"
    for kind in K_TYPES.values():
        assert _native.packed_bytes("k", 64, 2048, ACT, kind.code) * 8 == 64 * 2048 * kind.bits
        in_file = kind.size / 32
        assert kind.bits == in_file + (0.125 if kind is K_TYPES["Q3_K"] else 0)  # its scales of 6 bits are held in 8
    two = np.zeros((1, 84), np.uint8)
    two[0, :2], two[0, 16:18] = [0x21, 0x43], [0b11100100, 1]  # scale and minimum; codes 0, 32, 64 and 96, and 1, ...
    packed = Weights("Q2_K", 1, 256, raw=two).packed()
    assert packed[128 : 128 + 64 : 32].tolist() == [0x21, 0x43]
    octs = packed[640:].reshape(32, 16, 4)[:, 0]
    assert octs[[0, 4, 8, 12], 0].tolist() == [0, 1, 2, 3]
    assert octs[0, 1] == 1
    raw = np.zeros((33, 144), np.uint8)
    raw[1, :4] = np.array([1.0, 2.0], "<f2").view(np.uint8)
    raw[1, 4:16] = [0x81, 0xC2, 0x03, 0x44, 0x05, 0x06, 0x07, 0x48, 0x19, 0x2A, 0x3B, 0x4C]
    raw[1, 16:24] = [0x21, 0x43, 0x65, 0x87, 0x10, 0x32, 0x54, 0x76]
    packed = Weights("Q4_K", 33, 256, raw=raw).packed()
    assert packed[2:4].tobytes() == np.float16(1).tobytes()
    assert packed[66:68].tobytes() == np.float16(-2).tobytes()
    lines = packed[128:512].reshape(2, 3, 64)[:, :, [1, 33]]  # two times three lines: scale and minimum of output 1
    scales, mins = [1, 2, 3, 4, 41, 58, 11, 28], [5, 6, 7, 8, 1, 2, 3, 20]
    assert (lines & 63).reshape(2, 3, 2)[:, :, 0].tolist() == [scales[0:3], scales[4:7]]
    assert (lines & 63).reshape(2, 3, 2)[:, :, 1].tolist() == [mins[0:3], mins[4:7]]
    assert (lines >> 6)[0].tolist() == [[4 & 3, 8 & 3], [4 >> 2 & 3, 8 >> 2 & 3], [0, 0]]
    assert (lines >> 6)[1].tolist() == [[28 & 3, 20 & 3], [28 >> 2 & 3, 20 >> 2 & 3], [28 >> 4, 20 >> 4]]
    assert packed[512 + 4 : 512 + 8].tolist() == [0x01, 0x23, 0x45, 0x67]


def test_sizes_and_types_that_are_none_are_refused() -> None:
    raw, packed = np.zeros(4096, np.uint8), np.zeros(2**16, np.uint8)
    for num_in, code in ((255, 14), (300, 14), (256, 11), (256, 17), (256, 0)):
        with pytest.raises(ValueError, match="K-quants"):
            _native.pack("k", raw.ctypes.data, 0, 0, num_in, ACT, code, 0, 1, 1, packed.ctypes.data)
