"""Linear layers over codes: against twin and float64, the bits of `linear`, the assembly's formula and its length."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Mapping, Sequence

import pytest
import torch
import triton
from packaging.version import Version
from tests.backends.cuda.test_linear import ROWS, meta, sizes
from tests.support.cubin import Cubin, compiled, faults
from tests.support.kernels import assert_close, assert_scratch_holds, assert_twin_agrees, poisoned, written
from torch import Tensor

from headrace.backends.cuda.kernels import linear as dense
from headrace.backends.cuda.kernels import linear_codes as module
from headrace.backends.cuda.kernels.linear import Scratch
from headrace.backends.cuda.kernels.linear_codes import KERNEL, PackedCodes, linear_codes, pack, packs, suits
from headrace.backends.cuda.launch import Config, Launch
from headrace.quant.base import QWeight
from headrace.quant.schemes import BOOKS, SCHEMES, Scheme

SCHEMES_HERE = (
    Scheme("i4", 128),
    Scheme("i4", 64, True),
    Scheme("i4", 32),
    Scheme("i4", 128, True),
    Scheme("i4", 64, book="nf4"),
    Scheme("i4", 16, book="e2m1"),
    Scheme("i8"),
    Scheme("i8", 64),
)


def quantised(scheme: Scheme, num_out: int, num_in: int) -> QWeight:
    """A random weight of that scheme."""
    generator = torch.Generator().manual_seed(num_in)
    groups = -(-num_in // (scheme.group or num_in))
    scales = (torch.rand(num_out, groups, generator=generator) * 0.02 + 0.001).half().float()
    codes = torch.randint(0, 16, (num_out, num_in), generator=generator, dtype=torch.uint8)
    zeros = mins = book = None
    if scheme.kind == "i8":
        codes = torch.randint(-127, 128, (num_out, num_in), generator=generator, dtype=torch.int8)
        scales = scales / 16
    elif scheme.book:
        book = torch.tensor(BOOKS[scheme.book]).float()
    elif scheme.has_min:
        mins = -scales * 16 * torch.rand(num_out, groups, generator=generator)
    else:
        zeros = torch.full((num_out, groups), 8.0)
    return QWeight(codes, scales, zeros, mins, scheme.group or num_in, scheme.bits, codebook=book)


def scratch_for(weight: PackedCodes, num_rows: int, gated: bool) -> Scratch:
    """Enough for every configuration, and for `linear`."""
    plain = meta(weight.num_out, weight.num_in)
    needed = [module.scratch_numbers(weight, num_rows, config) for config in KERNEL.configs]
    needed += [dense.scratch_numbers(plain, num_rows, config) for config in dense.KERNEL.configs]
    numbers, tiles = (max(column) for column in zip(*needed, strict=True))
    return Scratch(torch.full((numbers,), torch.nan), torch.zeros(tiles, dtype=torch.int32))


def inputs(num_in: int, num_rows: int = ROWS) -> Tensor:
    """Random rows with NaN behind them."""
    x = torch.full((num_rows, num_in + 16), torch.nan)
    x[:, :num_in] = torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(1))
    return x


def test_a_step_longer_than_the_bucket_stays_within_the_scratch() -> None:
    scheme = Scheme("i4", 64)
    packed = pack(quantised(scheme, 40, 1100), scheme, torch.bfloat16)
    x, out = inputs(1100, 40).bfloat16()[:, :1100], poisoned(40, 40, dtype=torch.float32)

    def make(scratch: Scratch) -> Launch:
        (launch,) = linear_codes(x, packed, out, sizes(40), 2, 16, num_programs=3, scratch=scratch)
        return launch

    assert_scratch_holds(make, module.scratch_numbers(packed, 16, module.default(packed, 16, False)))
    assert out[:16].isfinite().all()
    assert out[16:].isnan().all()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("scheme", SCHEMES_HERE, ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_the_kernel_writes_what_its_twin_writes(scheme: Scheme, wide: bool) -> None:
    dtype = torch.bfloat16 if scheme.group in (0, 64) else torch.float16
    gated = scheme.has_min
    weight = quantised(scheme, 80, 600)
    packed = pack(weight, scheme, dtype)
    x = inputs(600).to(dtype)[:, :600]
    shared = scratch_for(packed, ROWS, gated)
    space = torch.full((80 * 600,), torch.nan, dtype=dtype) if wide else None

    def make(out: Mapping[str, Tensor]) -> Sequence[Launch]:
        return linear_codes(
            x, packed, out["out"], sizes(ROWS - 2), 2, ROWS, num_programs=2, scratch=shared, wide=space, gated=gated,
            activation="silu" if gated else None,
        )  # fmt: skip

    outputs = {"out": poisoned(ROWS, 40 if gated else 80, dtype=dtype)}
    assert_twin_agrees(make, outputs)
    result = written(make, outputs, "interpreted")["out"]
    assert result[ROWS - 2 :].isnan().all(), "a row beyond the step's rows was written"
    exact = x[: ROWS - 2].double() @ weight.dequantize().double().t()
    if gated:
        exact = torch.nn.functional.silu(exact[:, :40]) * exact[:, 40:]
    assert_close(result[: ROWS - 2], exact)


def bits(
    packed: PackedCodes, x: Tensor, mode: str, num_rows: int, gated: bool, config: Config | None, wide: bool
) -> Tensor:
    """The result in float32, so that no rounding hides a difference."""
    space = torch.empty(packed.num_out * packed.num_in, dtype=packed.dtype) if wide else None

    def make(out: Mapping[str, Tensor]) -> Sequence[Launch]:
        return linear_codes(
            x, packed, out["out"], sizes(len(x)), 2, num_rows, num_programs=2, gated=gated, wide=space, config=config,
            scratch=scratch_for(packed, num_rows, gated),
        )  # fmt: skip

    return written(make, {"out": poisoned(len(x), packed.num_out // (1 + gated), dtype=torch.float32)}, mode)["out"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["twin", "interpreted"])
@pytest.mark.parametrize(("scheme", "gated"), [(Scheme("i4", 128), True), (Scheme("i8", 64), False)])
def test_all_ways_give_the_same_bits(scheme: Scheme, gated: bool, mode: str) -> None:
    packed = pack(quantised(scheme, 72, 1100), scheme, torch.bfloat16)
    assert dense.span_of(72, 1100) < 1100, "K is not split"
    x = inputs(1100, 18).bfloat16()[:, :1100]
    expected = bits(packed, x, mode, 18, gated, None, wide=True)
    tiles = {str(config.tiles): config for config in KERNEL.configs}
    for config in [config for config in tiles.values() if suits(config, packed, gated)][:: 1 if mode == "twin" else 2]:
        assert torch.equal(bits(packed, x, mode, 18, gated, config, wide=False), expected), config.name
        assert torch.equal(bits(packed, x[5:6], mode, 1, gated, config, wide=False), expected[5:6]), config.name
    assert torch.equal(bits(packed, x[5:9], mode, 4, gated, None, wide=True), expected[5:9])


@pytest.mark.parametrize("scheme", SCHEMES_HERE, ids=str)
def test_packed_weights_are_the_weights_rounded(scheme: Scheme) -> None:
    weight = quantised(scheme, 70, 600)
    packed = pack(weight, scheme, torch.float16)
    parts = [pack(weight.rows(first, first + 35), scheme, torch.float16) for first in (0, 35)]
    assert torch.equal(torch.cat([part.codes for part in parts]), packed.codes)
    assert torch.equal(torch.cat([part.scales for part in parts], 1), packed.scales)
    # Scales are numbers of float16 here; minima are not.
    scaled = dataclasses.replace(weight, mins=None if weight.mins is None else weight.mins.half().float())
    assert torch.equal(packed.dense(), scaled.dequantize().half())
    assert_close(pack(weight, scheme, torch.bfloat16).dense(), weight.dequantize())


def test_schemes_without_a_layout_are_known() -> None:
    others = [scheme for scheme in SCHEMES if scheme.kind not in ("i2", "i3", "i5", "i6") and scheme.book != "fp4"]
    assert not any(packs(scheme) for scheme in SCHEMES if scheme not in others)
    names = {(scheme.kind, scheme.group, scheme.has_min) for scheme in others if not packs(scheme)}
    minima = {("i8", group, True) for group in (8, 16, 32, 64, 128)}
    assert names == minima | {("i4", 8, False), ("i4", 8, True), ("i8", 8, False), ("k", 32, False)}


def test_swapped_codes_are_found() -> None:
    scheme = Scheme("i4", 128)
    weight = quantised(scheme, 40, 512)
    packed = pack(weight, scheme, torch.bfloat16)
    words = packed.codes.int() & 0xFFFF
    swapped = (words & 0xF00F) | (words >> 4 & 0x00F0) | (words << 4 & 0x0F00)
    broken = dataclasses.replace(packed, codes=swapped.to(torch.int16))
    x = inputs(512).bfloat16()[:, :512]
    exact = x.double() @ weight.dequantize().double().t()
    for mode in ("twin", "interpreted"):
        assert_close(bits(packed, x, mode, ROWS, False, None, False), exact, 1e-2)
        with pytest.raises(AssertionError, match="differ by"):
            assert_close(bits(broken, x, mode, ROWS, False, None, False), exact, 1e-2)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 to the nearest number of `dtype`, ties to even, in one step. For normal numbers."""
    mantissa, exponent = torch.frexp(x)
    digits = 8 if dtype == torch.bfloat16 else 11
    return torch.ldexp(torch.round(torch.ldexp(mantissa, torch.tensor(digits))), exponent - digits)


def emulated(code: str, inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Run the assembly on words (int64 tensors); return its registers."""
    registers = dict(inputs)

    def value(name: str) -> Tensor:
        return registers[name] if name in registers else torch.tensor([[int(name, 0)]])

    def lanes(word: Tensor) -> Tensor:
        pair = torch.stack([word & 0xFFFF, word >> 16 & 0xFFFF])
        return torch.where(pair > 32767, pair - 65536, pair).to(torch.int16).view(dtype).double()

    for line in code.strip("{} ").split(";"):
        name, *operands = re.findall(r"[\w.$]+", line) or [""]
        if name in ("", ".reg"):
            continue
        target, *rest = operands
        source = [value(operand) for operand in rest]
        if name == "mov.b32":
            registers[target] = source[0]
        elif name in ("shr.u32", "and.b32", "or.b32"):
            operation = {"shr.u32": operator.rshift, "and.b32": operator.and_, "or.b32": operator.or_}[name]
            registers[target] = operation(*source)
        elif name == "lop3.b32":
            a, b, c, _ = source
            assert rest[3] in ("0xEA", "0xCA")
            registers[target] = a & b | c if rest[3] == "0xEA" else a & b | ~a & c
        elif name == "prmt.b32":
            both = source[0] | source[1] << 32
            total = torch.zeros_like(both + source[2])
            for place in range(4):
                selector = source[2] >> 4 * place & 15
                byte = both >> 8 * (selector & 7) & 255
                total = total | torch.where(selector > 7, (byte >> 7) * 255, byte) << 8 * place
            registers[target] = total
        else:
            assert name in ("fma.rn.bf16x2", "fma.rn.f16x2")
            a, b, c = (lanes(word) for word in source)
            result = rounded(a * b + c, dtype)
            assert torch.equal(result, result.to(dtype).double())
            low, high = result.to(dtype).view(torch.int16).long() & 0xFFFF
            registers[target] = low | high << 16
    return registers


def weights_of(code: str, packed: PackedCodes) -> Tensor:
    """The weights that the assembly makes of a packed matrix of one block [N, 4 H]."""
    words = packed.codes.long() & 0xFFFF
    word = words[:, 0::2] | words[:, 1::2] << 16  # pairs of neighbours lie in one register
    source = {"$4": word}
    parts = [(5, packed.scales), (9, packed.scales if packed.mins is None else packed.mins)]
    for first, numbers in parts:
        both = numbers.long()[:, :, None] & 0xFFFFFFFF
        source |= {f"${first}": both[0], f"${first + 2}": both[-1]}
    registers = emulated(code, source, packed.dtype)
    pairs = [torch.stack([registers[f"${i}"] & 0xFFFF, registers[f"${i}"] >> 16], 2).flatten(1) for i in range(4)]
    lanes = torch.cat(pairs, 1)
    return torch.where(lanes > 32767, lanes - 65536, lanes).to(torch.int16).view(packed.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES_HERE if scheme.kind == "i4"], ids=str)
def test_the_assembly_makes_the_weights_of_the_twin(scheme: Scheme, dtype: torch.dtype) -> None:
    packed = pack(quantised(scheme, 512, 4 * min(scheme.group, 64)), scheme, dtype)
    code = packed.arguments()["UNPACK"]
    assert isinstance(code, str)
    assert torch.equal(weights_of(code, packed), packed.dense())
    broken = code.replace("0x7362", "0x5140") if scheme.book else code.replace("$4, 4;", "$4, 8;")
    assert not torch.equal(weights_of(broken, packed), packed.dense())


def packed_of(scheme: Scheme, num_out: int, num_in: int, dtype: torch.dtype = torch.bfloat16) -> PackedCodes:
    groups = -(-num_in // (scheme.group or num_in))
    if scheme.kind == "i8":
        codes, scales = meta(num_out, num_in, dtype=torch.int8), meta(groups, num_out, dtype=torch.float32)
    else:
        block = 4 * min(scheme.group, 64)
        num_words = -(-num_in // block) * block
        codes, scales = meta(num_out, num_words // 4, dtype=torch.int16), meta(groups // 2, num_out, dtype=torch.int32)
    return PackedCodes(codes, scales, scales if scheme.has_min else None, num_in, scheme.group, scheme.book, dtype)


def launch_of(
    scheme: Scheme, num_out: int, num_in: int, config: Config | None = None, gated: bool = False,
    dtype: torch.dtype = torch.bfloat16, wide: bool = False, num_rows: int = 0,
) -> list[Launch]:  # fmt: skip
    rows = num_out * (1 + gated)
    packed = packed_of(scheme, rows, num_in, dtype)
    num_rows = num_rows or (config or KERNEL.configs[0]).tiles["BR"]
    scratch = Scratch(meta(2**30, dtype=torch.float32), meta(2**20, dtype=torch.int32))
    return linear_codes(
        meta(num_rows, num_in, dtype=dtype), packed, meta(num_rows, num_out, dtype=dtype), meta(4, dtype=torch.int32),
        0, num_rows, num_programs=132, scratch=scratch, gated=gated, activation="silu" if gated else None,
        residual=None if gated else meta(num_rows, num_out, dtype=dtype), config=config,
        wide=meta(rows * num_in, dtype=dtype) if wide else None,
    )  # fmt: skip


LLAMA = ((4096, False), (14336, True))
"""Outputs of Llama-3.1-8B's output and gate projections, and whether they are gated."""


FOUR_WARPS = next(config for config in KERNEL.configs if config.name == "BR=64 BN=128 ASM=1 w4 s2")
"""For gated layers alone: the tile of another one spills everywhere."""


def candidates(scheme: Scheme, is_suited: bool = True) -> list[Launch]:
    """A launch in each configuration that suits the scheme, or that does not for its spills on sm_100 alone."""
    return [
        launch
        for config in KERNEL.configs
        for num_out, gated in LLAMA
        if suits(config, packed_of(scheme, 64, 4096), gated) == is_suited and config.tiles["BN"] >= 64 * (1 + gated)
        if is_suited or scheme.kind != "i8" or config.tiles["BR"] > 16  # which spills on sm_120 alone
        if is_suited or config is not FOUR_WARPS
        for launch in launch_of(scheme, num_out, 4096, config, gated)
    ]


def launches() -> list[Launch]:
    """Llama-3.1-8B's matrices under each kind of scheme in every configuration, and others in the default ones."""
    some = [each for scheme in (SCHEMES_HERE[0], *SCHEMES_HERE[1:3], *SCHEMES_HERE[4:7]) for each in candidates(scheme)]
    for scheme in SCHEMES_HERE:
        some += launch_of(scheme, 4096, 14336, dtype=torch.float16)
        some += launch_of(scheme, 1536, 576, gated=True)
        some.append(launch_of(scheme, 4096, 4096, wide=True, num_rows=2048)[0])
    return some


def spills(scheme: Scheme) -> bool:
    """Whether the configurations that do not suit the scheme spill with this Triton. 3.6 spills in all of them, and 3.7
    only where a code stands for a number of a book."""
    return bool(scheme.book) or Version(triton.__version__) < Version("3.7")


def test_a_configuration_that_spills_is_not_suited() -> None:
    """One register, with minima on sm_100."""
    scheme = Scheme("i4", 64, True)
    [launch] = candidates(scheme, is_suited=False)
    assert (compiled(launch, 100).stack > 0) == spills(scheme)


def test_halves_of_a_gated_tile_fit_the_registers_of_four_warps() -> None:
    scheme = Scheme("i4", 64)
    packed = packed_of(scheme, 64, 4096)
    assert [suits(FOUR_WARPS, packed, gated) for gated in (False, True)] == [False, True]
    [plain], [gated] = (launch_of(scheme, num_out, 4096, FOUR_WARPS, gated) for num_out, gated in LLAMA)
    assert compiled(plain, 90).stack > 0
    assert compiled(gated, 90).stack == 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [Scheme("i4", 64, True), Scheme("i4", 64, book="nf4"), Scheme("i8")], ids=str)
def test_no_other_configuration_is_left_out(scheme: Scheme) -> None:
    assert {compiled(launch, 100).stack > 0 for launch in candidates(scheme, is_suited=False)} == {spills(scheme)}


def loop_over_weights(cubin: Cubin) -> list[str]:
    """The operations of the innermost loop with tensor core instructions."""
    return [body for body in cubin.loops() if any("MMA" in name for name in body)][-1]


@pytest.mark.slow
@pytest.mark.parametrize("group", [64, 128])
def test_few_instructions_unpack_a_weight(group: int) -> None:
    for config in KERNEL.configs[:2]:
        [launch] = launch_of(Scheme("i4", group), 4096, 4096, config)
        cubin = compiled(launch, 90)
        body = loop_over_weights(cubin)
        weights = config.tiles["BN"] * 256 / (32 * config.num_warps)
        assert faults(cubin) == []
        assert len(body) / weights <= 3.6, f"{len(body) / weights:.2f} instructions for each weight"
        assert any(name.startswith("HGMMA") for name in body)
        assert not any(".U16" in name for name in body if name.startswith(("LDG", "LDS")))


def test_the_plain_branch_needs_more_instructions() -> None:
    config = Config({"BR": 16, "BN": 64, "ASM": 0}, 4, 4)
    [launch] = launch_of(Scheme("i4", 128), 4096, 4096, config)
    assert len(loop_over_weights(compiled(launch, 90))) / 128 > 3.6
