"""Codes out of packed words, and the choice of a kernel: exact where it says so, and told where not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tensors import array, fit_of, fitted
from torch import Tensor

from headrace.backends.torch_ref.tensors import weight_of
from headrace.protocol.errors import CheckpointError
from headrace.quant.base import QWeight, Stacked
from headrace.quant.layer_names import left_alone, matches
from headrace.quant.packing import E2M1, by_index, nibbles, unpacked
from headrace.quant.placements import Placements, kernel_name
from headrace.quant.schemes import E4M3, F8_SCHEMES, SCHEMES, Scheme


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 32, 33, 75])
def test_codes_are_the_bits_of_one_little_endian_number(bits: int, count: int) -> None:
    numbers = random.Random(bits * count)
    codes = [[numbers.randrange(2**bits) for _ in range(count)] for _ in range(3)]
    size = 4 * -(-count * bits // 32)
    rows = [sum(code << (bits * j) for j, code in enumerate(row)).to_bytes(size, "little") for row in codes]
    words = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.int32).view(3, -1)
    assert unpacked(words.numpy(), bits, count).tolist() == codes


def test_nibbles_in_either_order() -> None:
    packed = torch.tensor([[0x21, 0x43]], dtype=torch.uint8)
    assert nibbles(packed.numpy(), False).tolist() == [[1, 2, 3, 4]]
    assert nibbles(packed.numpy(), True).tolist() == [[2, 1, 4, 3]]


def made_up(bits: int, zeros: str, num_in: int = 256, group: int = 64, **changes: Any) -> QWeight:
    """Random codes with scales that float16 holds."""
    generator = torch.Generator().manual_seed(bits)
    shape = (40, -(-num_in // group))
    codes = torch.randint(0, 2**bits, (40, num_in), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(shape, generator=generator) * 0.01 + 0.001).half().float()
    middle = torch.full(shape, 2.0 ** (bits - 1))
    zero = {"none": None, "middle": middle, "any": torch.randint(0, 2**bits, shape, generator=generator).float()}[zeros]
    return QWeight(codes, **({"scales": scales, "zeros": zero, "group": group, "bits": bits} | changes))


FITS = [
    (4, "middle", 64, Scheme("i4", 64)),
    (4, "any", 64, Scheme("i4", 64, True)),
    (4, "none", 32, Scheme("i4", 32, True)),
    (4, "middle", 256, Scheme("i4", 128)),
    (4, "middle", 96, Scheme("i4", 32)),
    (3, "middle", 128, Scheme("i3", 128)),
    (3, "any", 64, Scheme("i3", 64, has_zero=True)),
    (3, "any", 8, Scheme("i4", 8)),
    (3, "none", 64, Scheme("i4", 64)),
    (2, "middle", 256, Scheme("i2", 128)),
    (2, "any", 8, Scheme("i2", 8, has_zero=True)),
    (2, "none", 64, Scheme("i4", 64)),
    (5, "any", 64, Scheme("i6", 64)),
    (6, "middle", 128, Scheme("i6", 128)),
    (6, "any", 64, Scheme("i6", 64, True)),
    (6, "middle", 256, Scheme("i6", 128)),
    (4, "middle", 48, Scheme("i4", 16)),
    (7, "any", 64, Scheme("i8", 64)),
    (8, "middle", 64, Scheme("i8", 64)),
    (8, "middle", 256, Scheme("i8")),
    (8, "any", 64, Scheme("i8", 64, True)),
    (8, "none", 32, Scheme("i8", 32, True)),
    (8, "any", 256, Scheme("i8", 128, True)),
]


@pytest.mark.parametrize(("bits", "zeros", "group", "scheme"), FITS)
def test_codes_in_the_form_of_a_kernel_are_the_same_weights(bits: int, zeros: str, group: int, scheme: Scheme) -> None:
    weight = made_up(bits, zeros, group=group)
    fit = fit_of([weight])
    assert fit.scheme == scheme
    result = fitted(weight, scheme)
    assert result.bits == scheme.bits
    low, high = (-128, 127) if scheme.kind == "i8" else (0, 2**scheme.bits - 1)
    assert int(result.codes.min()) >= low
    assert int(result.codes.max()) <= high
    assert result.scales is not None
    assert torch.equal(result.scales.half().float(), result.scales)
    difference = (result.dequantize() - weight.dequantize()).abs().max()
    assert weight.scales is not None
    step = float(weight.scales.max())
    if scheme.has_min:
        assert fit.rounding < 0.05
        assert float(difference) <= fit.rounding * step + 1e-7
    else:
        # Only the order of a product and a subtraction differs.
        assert fit.rounding == 0.0
        assert float(difference) <= 1e-7
    assert torch.equal(fitted(weight.rows(3, 9), scheme).dequantize(), result.dequantize()[3:9])


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (made_up(4, "middle", group=36), "groups of 36"),
        (made_up(4, "none", codebook=torch.rand(16)), "table of codes"),
        (made_up(4, "middle", scales=torch.full((40, 4), 1e-6)), "float16"),
        (made_up(4, "middle", scales=torch.full((40, 4), 1e6)), "float16"),
        (made_up(4, "any", scales=torch.full((40, 4), 3e4)), "minimums"),
        (QWeight(torch.zeros(40, 256).to(torch.float8_e4m3fn), torch.ones(40, 1), group=256, bits=8), "8-bit floats"),
        (QWeight(torch.zeros(40, 256)), "not quantised"),
    ],
)
def test_what_has_no_kernel_is_told_with_its_reason(weight: QWeight, why: str) -> None:
    fit = fit_of([weight])
    assert fit.scheme is None
    assert why in fit.why


@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_in_another_order_keep_their_kernel(bits: int) -> None:
    order, other = torch.randperm(256), torch.randperm(256)
    weight = made_up(bits, "any", permutation=order)
    fit = fit_of([weight, weight])
    assert fit.scheme == fit_of([made_up(bits, "any")]).scheme
    assert np.array_equal(fit.permutation, order)
    result = fitted(weight, fit.scheme)
    assert float((result.dequantize() - weight.dequantize()).abs().max()) <= fit.rounding * 0.011
    # Not on every backend, and not in two orders.
    assert "act-order" in fit_of([weight], permutes=False).why
    for rest in (made_up(bits, "any", permutation=other), made_up(bits, "any")):
        assert "different orders" in fit_of([weight, rest]).why
        assert fit_of([weight]).form != fit_of([rest]).form


def test_scales_that_float16_rounds_are_told() -> None:
    scales = torch.full((40, 4), 1 / 3)
    fit = fit_of([made_up(4, "middle", scales=scales)])
    assert fit.scheme == Scheme("i4", 64)
    assert 1e-4 < fit.rounding < 2e-2
    weight = made_up(8, "middle", group=256, scales=scales[:, :1])
    assert fit_of([weight]).rounding == 0.0  # a scale of each output stays float32
    assert torch.equal(fitted(weight, Scheme("i8")).dequantize(), weight.dequantize())


def test_parts_of_a_stack_meet_in_one_form() -> None:
    symmetric, any_zeros, wide = made_up(4, "middle"), made_up(4, "any"), made_up(4, "middle", group=128)
    fit = fit_of([symmetric, any_zeros, wide])
    assert fit.scheme == Scheme("i4", 64, True)
    for weight in (symmetric, wide):
        assert (fitted(weight, fit.scheme).dequantize() - weight.dequantize()).abs().max() < 1e-7
    assert fit_of([symmetric, made_up(8, "middle")]).scheme is None
    assert fit_of([symmetric, QWeight(torch.zeros(40, 256))]).scheme is None
    assert fit_of([made_up(8, "middle"), made_up(8, "middle", group=256)]).scheme is None


def by_tensors(codes: Tensor, scales: Tensor, g_idx: Tensor) -> QWeight:
    zeros = np.full((4, 4), 8.0, np.float32)
    return weight_of(by_index(array(codes), array(scales), zeros, array(g_idx), 4, 4, "layer.g_idx"))


def indexed(g_idx: Tensor) -> QWeight:
    codes = torch.arange(64, dtype=torch.uint8).view(4, 16) % 16
    return by_tensors(codes, torch.rand(4, 4) + 0.5, g_idx)


def test_inputs_of_any_group_keep_their_weights() -> None:
    codes = torch.arange(64, dtype=torch.uint8).view(4, 16) % 16
    scales = torch.rand(4, 4) + 0.5
    for name, g_idx in {
        "plain": torch.arange(16) // 4,
        "mixed": torch.randperm(16) % 4,
        "uneven": torch.tensor([0] * 9 + [1] * 2 + [3] * 5),
    }.items():
        result = by_tensors(codes, scales, g_idx)
        assert (result.permutation is not None) == (name == "mixed")
        assert torch.allclose(result.dequantize(), (codes.float() - 8) * scales[:, g_idx])


@pytest.mark.parametrize("wrong", [-1, 4, 2**30])
def test_a_group_that_does_not_exist_is_refused(wrong: int) -> None:
    g_idx = torch.arange(16) // 4
    g_idx[7] = wrong
    with pytest.raises(CheckpointError, match=r"layer\.g_idx .*\[16\], expected 0 to 3"):
        indexed(g_idx)


@pytest.mark.parametrize(
    ("pattern", "name", "result"),
    [
        (".*lm_head", "lm_head", True),
        (r"model\.layers\.\d+\.mlp\.(gate|up)_proj$", "model.layers.11.mlp.up_proj", True),
        (r"model\.layers\.\d+\.mlp\.(gate|up)_proj$", "model.layers.11.mlp.down_proj", False),
        ("layers", "model.layers", False),
    ],
)
def test_patterns_fit_the_beginning_of_a_name(pattern: str, name: str, result: bool) -> None:
    assert matches(pattern, name) is result


@pytest.mark.parametrize("pattern", ["(", "[", "*"])
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(CheckpointError, match="no regular expression"):
        matches(pattern, "a" * 40)


def test_layers_left_alone_are_named_whole() -> None:
    assert left_alone("model.layers.1.mlp.gate", ["mlp.gate"])
    assert left_alone("model.layers.1.mlp.gate", ["model.layers.1"])
    assert left_alone("lm_head", ["lm_head"])
    assert not left_alone("model.layers.1.mlp.gate_proj", ["mlp.gate"])
    assert not left_alone("model.layers.11.mlp.gate", ["model.layers.1"])


class Named:
    name, num_out, num_in = "layer", 128, 256

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme


def test_what_runs_where_is_told_once_with_its_bytes() -> None:
    placements = Placements("gptq", "bfloat16")
    good, bad = fit_of([made_up(4, "any")]), fit_of([made_up(8, "any", group=36)])
    assert good.scheme is not None
    for _ in range(2):
        placements.add(Named(good.scheme), good, 2**20)  # type: ignore[arg-type]
    placements.add(Named(Scheme("f", dtype="bfloat16")), bad, 1000)  # type: ignore[arg-type]
    first, second = placements.lines()
    assert first.startswith("gptq: 2 matrices on the int4-g64-asym kernels (2.0 MiB stored, 0.0 MiB in memory)")
    assert "float16 moves a weight by at most" in first
    assert "1 matrix dequantised to bfloat16" in second
    assert "0.1 MiB in memory, 65.54 times as much)" in second  # the cost
    assert " times as much" not in first
    assert second.endswith(": layer")


def test_names_and_bytes_of_kernels() -> None:
    assert kernel_name(Scheme("i8")) == "int8-channel"
    assert kernel_name(Scheme("i4", 32, True)) == "int4-g32-asym"
    assert Scheme("i4", 64).bits_per_weight(128) == 8 * (64 + 4) / 128
    assert Scheme("i4", 64, True).bits_per_weight(128) == 8 * (64 + 8) / 128
    assert Scheme("i8").bits_per_weight(128) == 8 * 132 / 128
    assert Scheme("f", dtype="bfloat16").bits_per_weight(128) == 16
    assert kernel_name(Scheme("f8", 128, dtype=E4M3)) == "fp8-g128"
    assert Scheme("f8", 64, dtype=E4M3).bits_per_weight(128) == 8 * (128 + 8) / 128
    assert Scheme("f8", dtype=E4M3).bits_per_weight(128) == 8 * 132 / 128


def test_a_group_of_next_to_nothing_does_not_cost_the_kernel() -> None:
    scales = torch.full((40, 4), 0.25)
    scales[3, 1] = 1e-9
    fit = fit_of([made_up(4, "middle", scales=scales)])
    assert fit.scheme == Scheme("i4", 64)
    assert 0 < fit.rounding < 1e-3


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple((1 - 2 * sign) * n / 12 for sign in (0, 1) for n in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))


@pytest.mark.parametrize(("table", "book", "most"), [(E2M1, "e2m1", 0.0), (NF4, "nf4", 1e-5), (FP4, "fp4", 1e-5)])
@pytest.mark.parametrize("group", [16, 64, 256])
def test_codes_from_a_table_that_a_kernel_has(table: tuple[float, ...], book: str, most: float, group: int) -> None:
    scales = torch.exp2(torch.randint(-8, 4, (40, 256 // group)).float())
    weight = made_up(4, "none", group=group, scales=scales, codebook=torch.tensor(table))
    fit = fit_of([weight])
    assert fit.scheme == Scheme("i4", min(group, 128), book=book)
    assert fit.rounding <= most
    result = fitted(weight.rows(3, 30), fit.scheme)
    shares = (result.dequantize() - weight.dequantize()[3:30]).abs() / result.dequantize().abs().clamp(1e-9)
    assert torch.equal(result.codes, weight.codes[3:30])
    assert float(shares.max()) <= most
    assert fit_of([weight, made_up(4, "middle", group=group)]).scheme is None


def floats(group: int, dtype: torch.dtype = torch.float8_e4m3fn, **more: Any) -> QWeight:
    scales = torch.rand(40, -(-256 // group)) * 1e-6 + 1e-7  # too small for float16
    return QWeight(torch.randn(40, 256).to(dtype), scales, group=group, bits=8, **more)


@pytest.mark.parametrize(("group", "kernel"), [(256, 0), (128, 128), (64, 64), (96, 32)])
def test_8_bit_floats_reach_a_backend_that_declares_them_as_they_are(group: int, kernel: int) -> None:
    weight = floats(group)
    fit = fit_of([weight], SCHEMES | F8_SCHEMES)
    assert (fit.scheme, fit.rounding) == (Scheme("f8", kernel, dtype=E4M3), 0.0)
    result = fitted(weight, fit.scheme)
    assert result.codes.dtype == torch.float8_e4m3fn
    assert result.scales is not None
    assert result.scales.shape == (40, 256 // kernel if kernel else 1)
    assert torch.equal(result.dequantize(), weight.dequantize())
    both = Stacked("both", [result, result.rows(0, 7)], fit.scheme)
    slab = both.slab(32, 47)
    assert torch.equal(slab.dequantize(), torch.cat([weight.dequantize()[32:], weight.dequantize()[:7]]))
    assert fit_of([weight]).why == "8-bit floats have no kernel", "to a backend without them they go as floats"


@pytest.mark.parametrize(
    "weights",
    [
        [floats(256, torch.float8_e5m2)],
        [floats(36)],
        [floats(256), floats(128)],
        [floats(128), made_up(4, "middle")],
    ],
)
def test_8_bit_floats_in_other_forms_have_no_kernel(weights: list[QWeight]) -> None:
    assert fit_of(weights, SCHEMES | F8_SCHEMES).scheme is None


def test_a_backend_declares_its_groups_of_8_bit_floats() -> None:
    fit = fit_of([floats(64)], {Scheme("f8", 128, dtype=E4M3)})
    assert (fit.scheme, fit.why) == (None, "the backend has no fp8-g64 kernel")
