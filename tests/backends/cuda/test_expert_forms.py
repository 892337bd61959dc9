"""Mixtures of every form: biases, no gate, weighted inputs, and codes as they are stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
import torch
from tests.backends.cuda.test_linear_codes import quantised
from tests.support.kernels import assert_close, assert_twin_agrees, poisoned, written
from torch import Tensor

from headrace.backends.base import Activation, ExpertLayer, Routing
from headrace.backends.cuda.kernels import experts_codes
from headrace.backends.cuda.kernels.experts import Mixture, Scratch, Stack, experts, make_scratch
from headrace.backends.cuda.kernels.linear_8bit import EightBits
from headrace.backends.cuda.kernels.linear_codes import PackedCodes, pack, suits
from headrace.backends.cuda.launch import Config, Launch
from headrace.backends.torch_ref.ops import RefMatrix, RefOps
from headrace.backends.torch_ref.rowwise import padded
from headrace.quant.schemes import Scheme

HIDDEN, INNER, EXPERTS, ROWS = 144, 40, 4, 5
PLAIN = Config({"BR": 16, "BN": 128, "BK": 64, "SWAP": 1}, 4, 2)
CODES = (Config({"BR": 16, "BN": 128, "ASM": 1}, 4, 2), Config({"BR": 32, "BN": 256, "ASM": 1}, 4, 2))
EIGHT = (
    Config({"BR": 16, "BN": 128, "BK": 128, "SWAP": 1}, 4, 2),
    Config({"BR": 32, "BN": 256, "BK": 128, "SWAP": 0}, 4, 2),
)
SCHEMES = (
    Scheme("i4", 64, True),
    Scheme("i4", 32),
    Scheme("i4", 16, book="nf4"),
    Scheme("i4", 32, book="e2m1"),
    Scheme("i8"),
    Scheme("i8", 64),
)


LAYERS = {"gpt-oss-20b": (2880, 2880, 32, 4), "Qwen3-30B-A3B": (2048, 768, 128, 8)}
"""Hidden and inner width, experts, and experts of a row."""


def stacks_of(scheme: Scheme, layer: str) -> tuple[Stack, Stack]:
    """Experts of a layer without memory, in a scheme."""
    hidden, inner, num, _ = LAYERS[layer]

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def stack(num_out: int, num_in: int) -> Stack:
        outs = num * num_out
        if scheme.kind == "f8":
            pieces = -(-num_in // 128) if scheme.group else 1
            eight = empty(outs, num_in, dtype=torch.float8_e4m3fn), empty(outs, pieces, dtype=torch.float32)
            return Stack(EightBits(*eight), num)
        one = pack(quantised(scheme, 16, num_in), scheme, torch.bfloat16)
        parts = {name: getattr(one, name) for name in ("scales", "mins")}
        wide = {
            name: part if part is None else empty(len(part), outs, dtype=part.dtype) for name, part in parts.items()
        }
        codes = empty(outs, one.codes.shape[1], dtype=one.codes.dtype)
        return Stack(dataclasses.replace(one, codes=codes, **wide), num, empty(outs, dtype=torch.float32))

    return stack(2 * inner, hidden), stack(hidden, inner)


def launches_of(scheme: Scheme, layer: str, num_rows: int, config: Config | None = None) -> list[Launch]:
    """The products of a layer for a bucket of rows."""
    hidden, _, num, top_k = LAYERS[layer]
    kind: Activation = "clamped_swiglu" if layer.startswith("gpt") else "silu"
    mixture = Mixture(Routing(top_k), *stacks_of(scheme, layer), kind)
    x, logits = (torch.empty(num_rows, width, dtype=torch.bfloat16, device="meta") for width in (hidden, num))
    scratch, counts = make_scratch(num_rows, mixture, torch.bfloat16), torch.empty(4, dtype=torch.int32, device="meta")
    listed = experts(x, logits, mixture, x, scratch, counts, 0, num_rows, num_programs=132, config=config)
    return [each for each in listed if each.kernel in (experts_codes.GROUPED_CODES, experts_codes.GROUPED_8BIT)]


def usual() -> list[Launch]:
    """The launches that are taken for few and for many rows of the two layers."""
    return [
        launch
        for scheme, layer in ((Scheme("i4", 32, book="e2m1"), "gpt-oss-20b"), (Scheme("i4", 64), "Qwen3-30B-A3B"))
        for num_rows in (1, 2048)
        for launch in launches_of(scheme, layer, num_rows)
    ]


def launches() -> list[Launch]:
    """Every scheme in every configuration that suits it."""
    fp8 = [Scheme("f8", group, dtype="float8_e4m3fn") for group in (0, 128)]
    listed = []
    for scheme in (*SCHEMES, *fp8):
        kernel = experts_codes.GROUPED_8BIT if scheme.kind == "f8" else experts_codes.GROUPED_CODES
        for config in kernel.configs:
            for launch in launches_of(scheme, "Qwen3-30B-A3B", 64, config):
                gated = bool(launch.arguments["GATED"])
                small = None if scheme.kind == "f8" else pack(quantised(scheme, 16, 64), scheme, torch.bfloat16)
                if experts_codes.suits_8bit(config, gated) if small is None else suits(config, small, gated):
                    listed.append(launch)
    return listed


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Problem:
    """Rows of a mixture; behind the numbers of a row lie NaN."""

    def __init__(self, mixture: Mixture, dtype: torch.dtype) -> None:
        self.mixture, self.dtype = mixture, dtype
        self.x = torch.full((ROWS, HIDDEN + 16), torch.nan, dtype=dtype)[:, :HIDDEN]
        self.x.copy_(numbers(ROWS, HIDDEN, seed=1))
        self.logits = numbers(ROWS, EXPERTS, seed=2, dtype=dtype)

    def outputs(self, bucket: int = ROWS + 1) -> dict[str, Tensor]:
        scratch = make_scratch(bucket, self.mixture, self.dtype)
        used = {name: poisoned(*t.shape, dtype=t.dtype) for name, t in scratch._asdict().items() if t.numel()}
        return {**used, "out": poisoned(bucket, HIDDEN, dtype=self.dtype)}

    def make(
        self, out: Mapping[str, Tensor], config: Config, rows: Sequence[int] = range(ROWS), num_programs: int = 3
    ) -> list[Launch]:
        scratch = Scratch(*(out.get(name, torch.empty(0)) for name in Scratch._fields))
        bucket = len(out["out"])
        x = torch.full((bucket, HIDDEN), torch.nan, dtype=self.dtype)
        logits = torch.full((bucket, EXPERTS), torch.nan, dtype=self.dtype)
        x[: len(rows)], logits[: len(rows)] = self.x[list(rows)], self.logits[list(rows)]
        counts = torch.tensor([0, len(rows)], dtype=torch.int32)
        return experts(
            x, logits, self.mixture, out["out"], scratch, counts, 1, bucket, num_programs=num_programs, config=config
        )

    def written(self, mode: str, config: Config, rows: Sequence[int] = range(ROWS), bucket: int = ROWS + 1) -> Tensor:
        return written(lambda out: self.make(out, config, rows), self.outputs(bucket), mode)["out"]

    def reference(self, gate_up: Tensor, down: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The reference's operator over plain weights [E, out, in]."""
        mixture, ops = self.mixture, RefOps(torch.device("cpu"), dtype)

        def matrices(stack: Tensor, bias: Tensor | None) -> list[RefMatrix]:
            biases = [None] * EXPERTS if bias is None else list(bias.view(EXPERTS, -1))
            wide = torch.zeros(EXPERTS, padded(stack.shape[2]), padded(stack.shape[1]))
            wide[:, : stack.shape[2], : stack.shape[1]] = stack.float().transpose(1, 2)
            each = zip(wide, biases, strict=True)
            return [RefMatrix(data, bias, stack.shape[2], stack.shape[1]) for data, bias in each]

        weights, ids = ops.route(self.logits, mixture.routing)
        ops.route = lambda *_: (weights, ids)  # type: ignore[method-assign]
        router = matrices(gate_up, None)[0]
        first, second = matrices(gate_up, mixture.gate_up.bias), matrices(down, mixture.down.bias)
        return ops.experts(self.x.to(dtype), ExpertLayer(router, mixture.routing, first, second, mixture.kind))


def plain_problem(
    kind: Activation, gated: bool, routing: Routing, dtype: torch.dtype
) -> tuple[Problem, Tensor, Tensor]:
    width = INNER * (1 + gated)
    gate_up = numbers(EXPERTS, width, HIDDEN, seed=3, dtype=dtype) / 2
    down = numbers(EXPERTS, HIDDEN, INNER, seed=4, dtype=dtype) / 4
    biases = numbers(EXPERTS * width, seed=5) * 4, numbers(EXPERTS * HIDDEN, seed=6)
    stacks = Stack(gate_up, EXPERTS, biases[0]), Stack(down, EXPERTS, biases[1])
    return Problem(Mixture(routing, *stacks, kind), dtype), gate_up, down


@pytest.mark.parametrize(
    ("kind", "gated", "routing"),
    [
        ("clamped_swiglu", True, Routing(2)),  # gpt-oss
        ("relu2", False, Routing(2, "sigmoid", scale=2.5)),  # Nemotron 3
        ("silu", True, Routing(2, "sigmoid", renormalise=False, scale_input=True)),  # Llama 4
    ],
    ids=["gpt_oss", "nemotron", "llama4"],
)
def test_every_form_of_experts_is_that_of_the_reference(kind: Activation, gated: bool, routing: Routing) -> None:
    problem, gate_up, down = plain_problem(kind, gated, routing, torch.bfloat16)
    assert_twin_agrees(lambda out: problem.make(out, PLAIN), problem.outputs())
    out = problem.written("interpreted", PLAIN)
    assert_close(out[:ROWS], problem.reference(gate_up, down, torch.bfloat16 if routing.scale_input else torch.float32))
    assert out[ROWS].isnan().all(), "a row beyond the step's rows was written"
    assert torch.equal(problem.written("interpreted", PLAIN, [4], 1)[0], out[4])


@pytest.mark.parametrize("kind", ["clamped_swiglu", "relu2"])
def test_nan_passes_the_clamps(kind: Activation) -> None:
    problem, *_ = plain_problem(kind, kind == "clamped_swiglu", Routing(2), torch.float32)
    problem.x[3, 7] = torch.nan
    for mode in ("twin", "interpreted"):
        out = problem.written(mode, PLAIN)
        assert out[3].isnan().all()
        assert out[:3].isfinite().all()


def packed(scheme: Scheme, num_out: int, num_in: int, dtype: torch.dtype) -> PackedCodes:
    return pack(quantised(scheme, EXPERTS * num_out, num_in), scheme, dtype)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_have_the_bits_of_their_widened_weights(scheme: Scheme) -> None:
    dtype = torch.float16 if scheme.book == "nf4" else torch.bfloat16
    gate_up, down = packed(scheme, 2 * INNER, HIDDEN, dtype), packed(scheme, HIDDEN, INNER, dtype)
    bias = numbers(EXPERTS * HIDDEN, seed=6)
    stacks = Stack(gate_up, EXPERTS), Stack(down, EXPERTS, bias)
    problem = Problem(Mixture(Routing(2), *stacks, "silu"), dtype)
    out = problem.written("interpreted", CODES[0])
    assert_close(out, problem.written("twin", CODES[0]))
    assert torch.equal(problem.written("interpreted", CODES[1], [3, 4], 3)[1], out[4])
    wide = Stack(gate_up.dense(), EXPERTS), Stack(down.dense(), EXPERTS, bias)
    plain = Problem(problem.mixture._replace(gate_up=wide[0], down=wide[1]), dtype)
    assert torch.equal(plain.written("interpreted", PLAIN)[:ROWS], out[:ROWS])
    assert_close(
        out[:ROWS], problem.reference(gate_up.dense().view(EXPERTS, -1, HIDDEN), down.dense().view(EXPERTS, -1, INNER))
    )


@pytest.mark.parametrize(("grouped", "scales_input"), [(False, True), (True, False)])
def test_fp8_rounds_rows_and_is_near_the_reference(grouped: bool, scales_input: bool) -> None:
    def eight(num_out: int, num_in: int, seed: int) -> EightBits:
        codes = numbers(EXPERTS * num_out, num_in, seed=seed).to(torch.float8_e4m3fn)
        pieces = -(-num_in // 128) if grouped else 1
        return EightBits(codes, torch.rand(EXPERTS * num_out, pieces) / 4 + 0.1)

    gate_up, down = eight(2 * INNER, HIDDEN, 3), eight(HIDDEN, INNER, 4)
    routing = Routing(2, "sigmoid", scale_input=scales_input)
    problem = Problem(Mixture(routing, Stack(gate_up, EXPERTS), Stack(down, EXPERTS), "silu"), torch.bfloat16)
    out = problem.written("interpreted", EIGHT[0])
    assert_close(out[:ROWS], problem.written("twin", EIGHT[0])[:ROWS], 1e-2)
    assert torch.equal(problem.written("interpreted", EIGHT[1], [3, 4], 3)[1], out[4])
    exact = problem.reference(gate_up.dense().view(EXPERTS, -1, HIDDEN), down.dense().view(EXPERTS, -1, INNER))
    assert_close(out[:ROWS], exact, 0.1)


def test_a_row_alone_launches_no_more_programs_than_its_experts_have_tiles() -> None:
    for scheme, layer in ((Scheme("i4", 32, book="e2m1"), "gpt-oss-20b"), (Scheme("i4", 64), "Qwen3-30B-A3B")):
        for launch in launches_of(scheme, layer, 1):
            config, num_out = launch.config, int(str(launch.arguments["N"])) * (1 + bool(launch.arguments["GATED"]))
            tiles = LAYERS[layer][3] * -(-num_out // config.tiles["BN"])
            assert launch.grid == (min(tiles, 132 * (16 // config.num_warps)),)
