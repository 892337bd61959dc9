"""Round to nearest: what the codes are worth, which scales they may have, and what can not be quantised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tensors import quantise
from torch import Tensor

from headrace.protocol.config import QUANTIZATIONS, EngineConfig
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant import rtn, threads
from headrace.quant.base import QWeight, concatenated, find_format, scheme_of, slabs, source_of
from headrace.quant.schemes import (
    BOOKS,
    F8_SCHEMES,
    LEVELS,
    NAMES,
    ROUNDED_BOOKS,
    SCHEMES,
    Scheme,
    native_flag,
    parse,
    scheme_of_flag,
)

INT4 = [Scheme("i4", group) for group in (32, 64, 128)]
INT4_MIN = [Scheme("i4", group, True) for group in (32, 64, 128)]
INT8 = [Scheme("i8"), Scheme("i8", 128)]
INT6 = [Scheme("i6", 64), Scheme("i6", 32, True)]
BOOKED = [
    Scheme("i4", 64, book="nf4"),
    Scheme("i4", 32, book="e2m1"),
    Scheme("i4", 32, book="iq4_nl"),
    Scheme("i4", 64, book="fp4"),
]
ALL = INT4 + INT4_MIN + INT6 + INT8


def normal(num_out: int, num_in: int, seed: int = 0) -> Tensor:
    return torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(seed)) * 0.02


def widened(weight: QWeight, part: Tensor | None) -> Tensor:
    """A part [out, groups] as [out, in]."""
    assert part is not None
    return part.repeat_interleave(weight.group, 1)[:, : weight.shape[1]]


def errors(weight: Tensor, result: QWeight) -> tuple[Tensor, Tensor]:
    """(|w - dequantised|, |scale|) of every weight that lies within the outermost codes, or half a step beyond."""
    scale = widened(result, result.scales)
    zero = widened(result, result.zeros) if result.zeros is not None else 0.0
    least = widened(result, result.mins) if result.mins is not None else 0.0
    low, high = (0, 2**result.bits - 1) if result.bits < 8 else (-127, 127)
    ends = torch.stack([(low - zero) * scale + least, (high - zero) * scale + least])
    half = scale.abs() / 2
    inside = (weight >= ends.amin(0) - half) & (weight <= ends.amax(0) + half)
    return (weight - result.dequantize()).abs()[inside], scale.abs()[inside]


def test_the_names_of_the_config_are_the_schemes() -> None:
    assert NAMES == QUANTIZATIONS
    for name in NAMES:
        assert EngineConfig(quantization=name).quantization == parse(name).name
    assert parse("int4").layer == Scheme("i4", 64, book="iq4_nl")
    assert parse("int4").head == parse("iq4_nl").head == parse("iq4_nl").layer == Scheme("i4", 32, book="iq4_nl")
    assert parse("int4-g128").head == parse("int4-g128").layer == Scheme("i4", 128)
    assert parse("int4-g32-asym").layer == Scheme("i4", 32, True)
    assert parse("int8")[1:] == (Scheme("i8"), Scheme("i8"))
    assert parse("int8-g128").head == Scheme("i8", 128)
    assert parse("int6").head == parse("int6").layer == Scheme("i6", 64)
    assert parse("nf4").layer == Scheme("i4", 64, book="nf4")
    assert parse("mxfp4").layer == Scheme("i4", 32, book="e2m1")
    assert parse("fp8-channel").head == Scheme("f8", dtype="float8_e4m3fn")
    assert parse("fp8-g128").layer == Scheme("f8", 128, dtype="float8_e4m3fn")


@pytest.mark.parametrize("name", ["int3", "INT4", "int4-g16", "int8-asym", "", "awq4"])
def test_an_unknown_quantization_is_refused_naming_the_others(name: str) -> None:
    for refuse in (parse, lambda name: EngineConfig(quantization=name)):
        with pytest.raises(RequestError, match=r"quantization: .* int4-g64-asym"):
            refuse(name)


@pytest.mark.parametrize("method", ["rtn", "schemes", "base"])
def test_a_module_that_is_no_format_can_not_be_named_by_a_checkpoint(method: str) -> None:
    with pytest.raises(CheckpointError, match="not supported"):
        find_format({"quant_method": method})


@pytest.mark.parametrize("scheme", ALL, ids=str)
@pytest.mark.parametrize("num_in", [1, 31, 32, 33, 128, 200, 384])
def test_a_weight_is_within_half_a_step(scheme: Scheme, num_in: int) -> None:
    weight = normal(7, num_in)
    result = quantise(weight, scheme)
    assert result.shape == (7, num_in)
    assert result.scales is not None
    assert result.scales.shape == (7, -(-num_in // (scheme.group or num_in)))
    error, scale = errors(weight, result)
    assert (error <= scale * 0.5001).all()
    # By far most weights are inside the codes, or the bound above would say nothing.
    assert error.numel() >= 0.8 * weight.numel()


def test_the_bound_is_broken_by_codes_that_are_off_by_one() -> None:
    weight = normal(7, 128)
    result = quantise(weight, Scheme("i4", 32))
    wrong = QWeight((result.codes + 1).clamp(0, 15), result.scales, result.zeros, group=32, bits=4)
    error, scale = errors(weight, wrong)
    assert not (error <= scale * 0.5001).all()


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_codes_stay_in_their_range_and_scales_in_float16(scheme: Scheme) -> None:
    result = quantise(normal(40, 200) * torch.logspace(-9, 5, 40).unsqueeze(1), scheme)
    low, high = (0, 2**scheme.bits - 1) if scheme.bits < 8 else (-127, 127)
    assert result.codes.dtype == torch.int8
    assert int(result.codes.min()) >= low
    assert int(result.codes.max()) <= high
    assert int(result.codes.max()) - int(result.codes.min()) >= 15
    for part in (result.scales, result.mins):
        assert part is None or part.dtype == torch.float32
        if part is not None and scheme.group:
            assert torch.equal(part, part.half().float())
    if not scheme.group:
        assert result.scales is not None
        assert not torch.equal(result.scales, result.scales.half().float())
    assert scheme_of(result) == scheme


@pytest.mark.parametrize("scheme", INT4, ids=str)
def test_the_largest_weight_has_the_code_without_a_mirror_image(scheme: Scheme) -> None:
    weight = normal(3, 128)
    weight[0, 5], weight[1, 70] = 0.3, -0.3
    codes = quantise(weight, scheme).codes
    assert (codes[0, 5], codes[1, 70]) == (0, 0)


@pytest.mark.parametrize("scheme", BOOKED, ids=str)
@pytest.mark.parametrize("num_in", [1, 33, 64, 200])
def test_codes_of_a_book_are_those_of_the_nearest_entries(scheme: Scheme, num_in: int) -> None:
    weight = normal(7, num_in)
    result = quantise(weight, scheme)
    assert scheme_of(result) == scheme
    scale = widened(result, result.scales)
    assert torch.equal(scale, scale.half().float())
    entries = torch.tensor(LEVELS[scheme.book]).float()
    distances = (entries * scale.unsqueeze(-1) - weight.unsqueeze(-1)).abs()
    error = (result.dequantize() - weight).abs()
    assert torch.allclose(error, distances.amin(-1), atol=1e-7)
    if scheme.book == "e2m1":
        assert bool((torch.log2(scale) == torch.log2(scale).round()).all())
    # Negative control: another code is not the nearest.
    wrong = QWeight((result.codes + 1) % 16, result.scales, group=scheme.group, bits=4, codebook=result.codebook)
    assert not torch.allclose((wrong.dequantize() - weight).abs(), distances.amin(-1), atol=1e-7)


def test_books_have_the_levels_of_their_makers(shared_data: Path) -> None:
    levels = json.loads((shared_data / "quant" / "nf4.json").read_text())
    known = next(value for key, value in levels.items() if isinstance(value, list) and len(value) == 16)
    assert known == list(LEVELS["nf4"])
    assert [round(127 * level) for level in known] == list(BOOKS["nf4"])
    assert all(tuple(map(float, BOOKS[name])) == LEVELS[name] for name in LEVELS.keys() - ROUNDED_BOOKS)


def test_more_bits_lose_less() -> None:
    weight = normal(64, 1024)
    names = [Scheme("i4", 32, book="e2m1"), Scheme("i4", 64), Scheme("i4", 32), Scheme("i6", 64), Scheme("i8")]
    errors = [float((quantise(weight, scheme).dequantize() - weight).pow(2).mean()) for scheme in names]
    assert errors == sorted(errors, reverse=True)


def test_the_second_scale_lowers_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(64, 1024)
    for scheme in INT4 + INT4_MIN:
        with_search = (quantise(weight, scheme).dequantize() - weight).pow(2).mean()
        with monkeypatch.context() as patch:
            patch.setattr(rtn, "SHRINK", (1.0,))
            without = (quantise(weight, scheme).dequantize() - weight).pow(2).mean()
        assert with_search < without * (1.0 if scheme.has_min else 0.97)


def test_int4_beats_a_symmetric_grid_of_fifteen_codes() -> None:
    weight = normal(64, 1024)
    groups = weight.view(64, -1, 64)
    step = groups.abs().amax(-1, keepdim=True) / 7
    plain = ((groups / step).round() * step - groups).pow(2).mean()
    assert (quantise(weight, Scheme("i4", 64)).dequantize() - weight).pow(2).mean() < 0.8 * plain


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_groups_of_nothing_stay_nothing(scheme: Scheme) -> None:
    weight = normal(5, 256)
    weight[1] = 0
    weight[3, 128:] = 0
    result = quantise(weight, scheme).dequantize()
    assert (result[weight == 0] == 0).all()
    assert (result[0] != 0).any()


@pytest.mark.parametrize("scheme", ALL, ids=str)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-20, 3e-8, 1e-7, 6e-6, 1e-4])
def test_tiny_weights_keep_the_bound_and_stay_finite(scheme: Scheme, size: float) -> None:
    weight = normal(4, 128) * (size / 0.02)
    result = quantise(weight, scheme)
    assert torch.isfinite(result.dequantize()).all()
    error, scale = errors(weight, result)
    # Within float32's own last bits, where it has hardly any.
    assert (error <= scale * 0.501 + 2e-45).all()
    # Float16 has few bits left there, and none of them may be spent on cutting weights off.
    assert scheme.kind == "i8" or size < 1e-40 or error.numel() > 0.8 * weight.numel()


@pytest.mark.parametrize("scheme", INT4_MIN, ids=str)
def test_a_narrow_range_far_from_zero(scheme: Scheme) -> None:
    weight = 100 + normal(4, 128)
    error, scale = errors(weight, quantise(weight, scheme))
    assert error.numel() > 0.8 * weight.numel()
    assert (error <= scale * 0.5001 + 1e-5).all()


@pytest.mark.parametrize("scheme", ALL, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(scheme: Scheme, bad: float) -> None:
    weight = normal(300, 1024)
    weight[299, 1000] = bad
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.mlp\.down_proj .* not finite"):
        quantise(weight, scheme, "model.layers.3.mlp.down_proj")


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_weights_whose_scale_float16_can_not_hold(scheme: Scheme) -> None:
    weight = normal(4, 128) * 1e9
    if scheme.group == 0:
        error, scale = errors(weight, quantise(weight, scheme))
        assert (error <= scale * 0.5001).all()
        return
    with pytest.raises(CheckpointError, match=r"q_proj has weights as large as .* int8-channel"):
        quantise(weight, scheme, "q_proj")


@pytest.mark.parametrize("group", [0, 128])
def test_floats_of_8_bits_are_the_nearest_ones(group: int) -> None:
    """As torch rounds, with ties to even: of every size, below E4M3's least normal number too."""
    weight = normal(64, 300) * torch.logspace(-9, 5, 64).unsqueeze(1) * torch.logspace(-4, 0, 300)
    weight[0] = 0
    weight[1, :128] = torch.arange(128) / 16  # whole numbers and ties, for the scale that 448 gives
    weight[1, 127] = 448
    result = quantise(weight, Scheme("f8", group, dtype="float8_e4m3fn"))
    assert result.scales is not None
    parts = weight.split(group or 300, 1)
    expected = torch.stack([part.abs().amax(1) / 448 for part in parts], 1)
    assert torch.equal(result.scales, expected)
    divided = weight / widened(result, torch.where(expected == 0, torch.inf, expected))
    nearest = divided.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(result.dequantize(), nearest.float() * widened(result, expected))
    assert not torch.equal(nearest.float(), divided)


@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from(ALL),
    num_out=st.integers(1, 9),
    num_in=st.integers(1, 140),
    seed=st.integers(0, 2**20),
    exponent=st.integers(-30, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
def test_any_matrix(scheme: Scheme, num_out: int, num_in: int, seed: int, exponent: int, dtype: torch.dtype) -> None:
    weight = (normal(num_out, num_in, seed) * 50 * 2.0**exponent).to(dtype)
    result = quantise(weight, scheme)
    error, scale = errors(weight.float(), result)
    # A weight of float32 has a rounding of its own.
    assert (error <= scale * 0.501 + weight.float().abs().max() * 2.0**-24).all()
    # Rows are quantised by themselves: whatever stands beside them.
    one = quantise(weight[-1:], scheme)
    assert torch.equal(one.codes, result.codes[-1:])
    assert torch.equal(one.dequantize(), result.dequantize()[-1:])


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_threads_and_slabs_leave_no_trace(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(700, 520).bfloat16()
    whole = []
    for num_threads in (1, 2, 3):
        monkeypatch.setattr(threads, "num_cores", lambda num=num_threads: num)
        whole.append(quantise(weight, scheme))
    parts = [quantise(weight[first : first + 96], scheme) for first in range(0, 700, 96)]
    for other in (*whole[1:], concatenated(parts)):
        assert torch.equal(other.codes, whole[0].codes)
        assert torch.equal(other.dequantize(), whole[0].dequantize())


def test_an_error_on_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "num_cores", lambda: 3)
    weight = normal(2000, 520)
    weight[1234, 5] = float("nan")
    with pytest.raises(CheckpointError, match="not finite"):
        quantise(weight, Scheme("i4", 64))


# ---------------------------------------------------------------------------------------- sources


def test_a_source_gives_the_rows_that_are_asked_for() -> None:
    parts = [normal(5, 64, seed) for seed in range(3)]
    source = source_of([QWeight(part) for part in parts], "layer")
    whole = torch.cat(parts)
    assert (source.name, source.num_out, source.num_in, source.scheme) == (
        "layer",
        15,
        64,
        Scheme("f", dtype="float32"),
    )
    for first, last in ((0, 15), (0, 5), (4, 6), (3, 14), (14, 15)):
        assert torch.equal(source.slab(first, last).dequantize(), whole[first:last])


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_a_source_of_codes(scheme: Scheme) -> None:
    parts = [quantise(normal(size, 200, size), scheme) for size in (33, 5, 40)]
    source = source_of(parts)
    whole = torch.cat([part.dequantize() for part in parts])
    assert source.scheme == scheme
    for first, last in ((0, 78), (32, 64), (30, 40)):
        assert torch.equal(source.slab(first, last).dequantize(), whole[first:last])


def test_parts_of_different_forms_are_refused() -> None:
    parts = [quantise(normal(4, 64), scheme) for scheme in INT4[:2]]
    with pytest.raises(CheckpointError, match="differently"):
        source_of(parts, "qkv")


def test_codes_that_no_kernel_knows_come_as_floats() -> None:
    codes, scales = torch.randint(0, 16, (6, 64), dtype=torch.int8), torch.rand(6, 2) + 0.5
    odd = [
        QWeight(codes, scales, torch.full((6, 2), 7.0), group=32, bits=4),
        QWeight(codes, scales, group=32, bits=4),
        QWeight(codes, scales, group=32, bits=3),
        QWeight(codes, scales, torch.full((6, 2), 8.0), group=32, bits=4, permutation=torch.randperm(64)),
    ]
    for weight in odd:
        source = source_of([weight, weight])
        assert source.scheme == Scheme("f", dtype="float32")
        assert source.slab(2, 9).scales is None
        expected = torch.cat([weight.dequantize()] * 2)[2:9]
        assert torch.equal(source.slab(2, 9).dequantize(), expected)


def test_slabs_cover_all_rows_and_begin_at_panels() -> None:
    for num_out, num_in in ((1, 1), (31, 64), (4096, 4096), (128256, 2048), (5000, 2**23)):
        source = source_of([QWeight(torch.empty(1, 1).expand(num_out, num_in))])
        result = list(slabs(source))
        assert [first for first, _ in result] == [0, *(last for _, last in result[:-1])]
        assert result[-1][1] == num_out
        assert all(first % 32 == 0 for first, _ in result)
        assert all((last - first) * num_in <= max(4 * 2**20, 32 * num_in) for first, last in result)


def test_minimums_are_added_after_the_product() -> None:
    codes = torch.tensor([[0, 15, 3]], dtype=torch.int8)
    weight = QWeight(codes, torch.tensor([[0.5]]), mins=torch.tensor([[-2.0]]), group=3, bits=4)
    assert weight.dequantize().tolist() == [[-2.0, 5.5, -0.5]]
    with pytest.raises(CheckpointError, match="mins have shape"):
        QWeight(codes, torch.tensor([[0.5]]), mins=torch.zeros(1, 2), group=3)
    with pytest.raises(CheckpointError, match="plain floats"):
        QWeight(torch.zeros(1, 3), mins=torch.zeros(1, 1))


def test_every_scheme_has_a_number_of_its_own_in_the_native_library() -> None:
    schemes = [*SCHEMES, *F8_SCHEMES, *[Scheme("f", dtype=dtype) for dtype in ("float32", "float16", "bfloat16")]]
    for scheme in schemes:
        assert scheme_of_flag(scheme.kind, scheme.group, native_flag(scheme)) == scheme
    assert {parse(name).layer for name in NAMES} | {parse(name).head for name in NAMES} <= SCHEMES | F8_SCHEMES
    for kind, group, flag in (("i4", 64, 6), ("i6", 64, 2), ("i8", 64, 0), ("i4", 48, 0), ("f", 0, 3), ("x", 0, 0)):
        assert scheme_of_flag(kind, group, flag) is None


@pytest.mark.parametrize(
    ("scheme", "flag"),
    [
        (Scheme("i4", 64), 0), (Scheme("i4", 64, True), 1), (Scheme("i4", 64, book="nf4"), 2),
        (Scheme("i4", 32, book="e2m1"), 3), (Scheme("i4", 32, book="iq4_nl"), 4),
        (Scheme("i4", 64, book="fp4"), 5), (Scheme("i6", 16, True), 1),
        (Scheme("i8"), 0), (Scheme("i8", 128), 128), (Scheme("f", dtype="bfloat16"), 2),
        (Scheme("k", 32, dtype="Q6_K"), 16),
    ],
)  # fmt: skip
def test_the_numbers_of_schemes_are_those_of_packed_files_already_written(scheme: Scheme, flag: int) -> None:
    assert native_flag(scheme) == flag
