"""Grids, GPTQ, AWQ and SmoothQuant on matrices: against slow ones, against each other, and where they must agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.base import QWeight
from headrace.quant.packing import unpacked
from headrace.quantize import fold as folding
from headrace.quantize import grid
from headrace.quantize.base import Fold, Layer, Options, Statistics, find_method, find_writer
from headrace.quantize.methods import awq, gptq, smoothquant
from headrace.quantize.packing import packed


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def text(num_in: int, rows: int = 400, seed: int = 1, outliers: tuple[int, ...] = ()) -> Tensor:
    """Inputs that hang together, as activations do; those named in `outliers` are large."""
    x = normal(rows, num_in // 4, seed=seed) @ normal(num_in // 4, num_in, seed=seed + 1) + normal(rows, num_in, seed=9)
    x[:, list(outliers)] *= 40
    return x


def statistics_of(x: Tensor) -> Statistics:
    statistics = Statistics(x.shape[1])
    for part in x.split(130):
        statistics.add(part)
    return statistics


def options_of(method: str, **changes: Any) -> Options:
    return find_method(method).verify(Options(method=method, **({"group_size": 32} | changes)))


def output_error(weight: Tensor, result: QWeight, x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x @ (result.dequantize() - weight).t()))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 8, 33, 75])
def test_packed_codes_come_out_again(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (5, count), dtype=torch.uint8)
    assert np.array_equal(unpacked(packed(codes, bits).numpy(), bits, count), codes.numpy())


def test_statistics_are_those_of_all_rows_at_once() -> None:
    x = text(64)
    statistics = statistics_of(x)
    torch.testing.assert_close(statistics.hessian, x.t() @ x / len(x), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(statistics.mean_abs, x.abs().mean(0))
    assert torch.equal(statistics.max_abs, x.abs().amax(0))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, -1, 0])
def test_rounding_is_to_the_nearest(bits: int, symmetric: bool, group: int) -> None:
    weight = normal(24, 64) * 0.1
    options = options_of("rtn", bits=bits, symmetric=symmetric, group_size=group)
    result = find_method("rtn").quantise(weight, None, options, "w")
    assert result.scales is not None
    assert result.zeros is not None
    assert torch.equal(result.scales.half().float(), result.scales)
    assert int(result.codes.max()) < 2**bits
    assert float(result.zeros.min()) >= 1
    step = result.scales.repeat_interleave(result.group, 1)
    # Symmetric codes of few bits have no mirror image of the least; there the largest may be half a step beyond.
    # A scale that float16 rounds down cuts the outermost off by so many steps more.
    slack = (1.01 if symmetric and bits < 8 else 0.51) + 2**bits / 2**11
    if bits > 2:
        assert bool(((result.dequantize() - weight).abs() <= slack * step).all())
    if group == 0:
        assert len(result.scales.unique()) == 1


def test_groups_of_one_sign_and_of_nothing() -> None:
    weight = torch.cat((normal(4, 32).abs(), -normal(4, 32).abs(), torch.zeros(4, 32)))
    result = find_method("rtn").quantise(weight, None, options_of("rtn", symmetric=False), "w")
    assert result.scales is not None
    assert float((result.dequantize() - weight).abs().max()) < float(result.scales.max())
    assert not bool(result.dequantize()[8:].any())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_weights_that_can_not_be_stored_are_refused_by_name(method: str, bad: float) -> None:
    weight = normal(8, 64)
    weight[3, 40] = bad
    with pytest.raises(CheckpointError, match="mlp.up"):
        find_method(method).quantise(weight, statistics_of(text(64)), options_of(method), "mlp.up")


def slow_gptq(weight: Tensor, hessian: Tensor, options: Options) -> Tensor:
    """Optimal brain quantisation in the order of the inputs, with the inverse worked out anew for each: codes."""
    w = weight.double().clone()
    damped = hessian.double() + options.damping * hessian.diagonal().double().mean() * torch.eye(len(hessian))
    codes = torch.zeros(weight.shape, dtype=torch.uint8)
    for i in range(w.shape[1]):
        if i % options.group_size == 0:
            scale, zero = grid.find(w[:, i : i + options.group_size].float(), options)
        inverse = torch.linalg.inv(damped[i:, i:])
        codes[:, i] = grid.code(w[:, i].float(), scale, zero, options.bits).to(torch.uint8)
        error = (w[:, i] - (codes[:, i] - zero) * scale) / inverse[0, 0]
        w[:, i:] -= error[:, None] * inverse[0, None]
    return codes


@pytest.mark.parametrize("block", [16, 64])
def test_gptq_is_what_the_slow_way_gives(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "BLOCK", block)
    weight, known = normal(16, 64), statistics_of(text(64))
    options = options_of("gptq", group_size=16, act_order="none", symmetric=False)
    result = gptq.quantise(weight, known, options, "w")
    same = (result.codes == slow_gptq(weight, known.hessian, options)).float().mean()
    assert float(same) > 0.99  # float32 and float64 may part at a half


def test_gptq_without_anything_known_is_rounding_to_nearest() -> None:
    weight = normal(16, 64)
    options = options_of("gptq")
    plain = find_method("rtn").quantise(weight, None, options, "w")
    for known in (None, Statistics(64)):
        assert torch.equal(gptq.quantise(weight, known, options, "w").codes, plain.codes)


@pytest.mark.parametrize("act_order", ["none", "static", "group"])
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("group", [32, 128])
def test_gptq_loses_less_than_rounding(act_order: Any, bits: int, group: int) -> None:
    weight, x = normal(48, 128), text(128)
    options = options_of("gptq", bits=bits, act_order=act_order, group_size=group, symmetric=False)
    result = gptq.quantise(weight, statistics_of(x), options, "w")
    plain = find_method("rtn").quantise(weight, None, options, "w")
    assert output_error(weight, result, x) < 0.8 * output_error(weight, plain, x)
    assert (result.permutation is not None) == (act_order == "group" and group < 128)


def test_gptq_of_inputs_that_were_never_seen() -> None:
    x = text(64)
    x[:, 5:20] = 0
    weight = normal(16, 64)
    options = options_of("gptq", act_order="none")
    result = gptq.quantise(weight, statistics_of(x), options, "w")
    plain = find_method("rtn").quantise(weight, None, options, "w")
    # Nothing is lost to them and nothing made up for.
    assert torch.equal(result.codes[:, 6:19] > 0, plain.codes[:, 6:19] > 0)
    assert bool(torch.isfinite(result.dequantize()).all())


def test_gptq_of_fewer_rows_than_inputs() -> None:
    result = gptq.quantise(normal(16, 128), statistics_of(text(128, rows=3)), options_of("gptq"), "w")
    assert bool(torch.isfinite(result.dequantize()).all())


def block_of(x: Tensor, stored: torch.dtype = torch.float32, seed: int = 3) -> tuple[Layer, Tensor]:
    """A norm (of gain 1) before two linear layers that are given x; and their weights as they are."""
    num_in = x.shape[1]
    weights = {name: normal(40, num_in, seed=seed + i) for i, name in enumerate(("mlp.gate_proj", "mlp.up_proj"))}
    known = statistics_of(x)
    layer = Layer(
        weights={name: weight.clone() for name, weight in weights.items()},
        norms={"norm": torch.linspace(0.5, 1.5, num_in)},
        offsets={"norm": 0.0},
        stored=stored,
        statistics=dict.fromkeys(weights, known),
        folds=[Fold("norm", list(weights), torch.arange(num_in))],
    )
    return layer, torch.cat(list(weights.values()))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_folding_leaves_what_is_computed(stored: torch.dtype, offset: float) -> None:
    x = text(64, outliers=(3,))
    layer, weight = block_of(x, stored)
    layer.offsets["norm"] = offset
    layer.norms["norm"][7] = -offset  # a norm that lets nothing through stays one
    before = layer.norms["norm"] + offset
    folding.apply(layer, layer.folds[0], torch.linspace(0.1, 30, 64))
    gain = layer.norms["norm"] + offset
    assert torch.equal(layer.norms["norm"], layer.norms["norm"].to(stored).float())
    folded = torch.cat([layer.weights[name] for name in ("mlp.gate_proj", "mlp.up_proj")])
    torch.testing.assert_close((x * gain) @ folded.t(), (x * before) @ weight.t(), rtol=1e-4, atol=1e-2)
    known = layer.statistics["mlp.up_proj"]
    assert known is layer.statistics["mlp.gate_proj"]
    y = x * torch.where(before == 0, 1.0, gain / before)
    torch.testing.assert_close(known.max_abs, y.abs().amax(0), rtol=1e-3, atol=1e-5)


def test_folding_between_linear_layers_with_heads_that_share() -> None:
    index = torch.tensor([0, 1, 0, 1, 2, 3, 2, 3])
    before, after, x = normal(4, 6), normal(5, 8, seed=2), normal(10, 6, seed=4)
    bias = normal(4, seed=8)
    expected = (x @ before.t() + bias)[:, index] @ after.t()
    layer = Layer({"v": before.clone(), "o": after.clone()}, biases={"v": bias.clone()})
    folding.apply(layer, Fold("v", ["o"], index), torch.tensor([0.5, 2.0, 3.0, 0.1]))
    actual = (x @ layer.weights["v"].t() + layer.biases["v"])[:, index] @ layer.weights["o"].t()
    torch.testing.assert_close(actual, expected)


def layer_error(method: str, x: Tensor, **changes: Any) -> float:
    """The error of the outputs of a block whose activations are x."""
    options = options_of(method, **changes)
    layer, weight = block_of(x)
    gain = layer.norms["norm"].clone()
    find_method(method).prepare(layer, options)
    result = [
        find_method(method).quantise(weight, layer.statistics[name], options, name).dequantize()
        for name, weight in layer.weights.items()
    ]
    out = (x * (layer.norms["norm"] / gain)) @ torch.cat(result).t()
    return float(torch.linalg.vector_norm(out - x @ weight.t()))


def test_awq_loses_less_where_some_inputs_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    x = text(128, outliers=(3, 77))
    plain = layer_error("rtn", x, symmetric=False)
    only_clipped = layer_error("awq", x)
    assert only_clipped < 0.7 * plain
    monkeypatch.setattr(awq, "NUM_RATIOS", 1)  # no scales
    assert only_clipped < layer_error("awq", x)


def test_awq_clipping_loses_less_than_none() -> None:
    x = text(128)
    assert layer_error("awq", x) < layer_error("awq", x, clip=False) < layer_error("rtn", x, symmetric=False)


def in_eight_bits(x: Tensor) -> Tensor:
    """Activations as W8A8 has them: one scale for each token."""
    scale = x.abs().amax(1, keepdim=True) / 127
    return torch.round(x / scale) * scale


def test_smoothquant_loses_less_where_activations_have_outliers() -> None:
    x = text(128, outliers=(3, 77))
    errors = {}
    for method in ("rtn", "smoothquant"):
        options = options_of(method, bits=8, group_size=-1)
        layer, weight = block_of(x)
        gain = layer.norms["norm"].clone()
        find_method(method).prepare(layer, options)
        result = [find_method(method).quantise(w, None, options, n).dequantize() for n, w in layer.weights.items()]
        out = in_eight_bits(x * (layer.norms["norm"] / gain)) @ torch.cat(result).t()
        errors[method] = float(torch.linalg.vector_norm(out - x @ weight.t()))
    assert errors["smoothquant"] < 0.5 * errors["rtn"]


@pytest.mark.parametrize(
    ("method", "changes", "field"),
    [
        ("rtn", {"bits": 5}, "bits"),
        ("rtn", {"group_size": -2}, "group_size"),
        ("gptq", {"damping": 0.0}, "damping"),
        ("gptq", {"damping": float("nan")}, "damping"),
        ("gptq", {"act_order": "up"}, "act_order"),
        ("gptq", {"act_order": "group", "group_size": -1}, "act_order"),
        ("smoothquant", {"bits": 4}, "bits"),
        ("smoothquant", {"bits": 8, "alpha": 1.5}, "alpha"),
        ("smoothquant", {"bits": 8, "symmetric": False}, "symmetric"),
        ("none", {}, "method"),
        ("../rtn", {}, "method"),
    ],
)
def test_options_that_can_not_be(method: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as error:
        options_of(method, **changes)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("gptq", {"method": "smoothquant", "bits": 8}),
        ("gptq", {"group_size": 0}),
        ("awq", {"bits": 3}),
        ("awq", {"method": "gptq", "act_order": "group"}),
        ("compressed-tensors", {"method": "gptq", "act_order": "group"}),
        ("safetensors", {}),
    ],
)
def test_layouts_that_can_not_hold_it(layout: str, changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        find_writer(layout).verify(replace(Options(), **changes))


def test_a_group_that_does_not_come_out_even_is_told_by_name() -> None:
    for method in ("rtn", "gptq", "awq"):
        with pytest.raises(CheckpointError, match=r"mlp\.up_proj has 48 inputs"):
            find_method(method).quantise(normal(8, 48), None, options_of(method), "mlp.up_proj")


def test_smoothquant_moves_norms_only() -> None:
    x = text(64, outliers=(1,))
    layer, _ = block_of(x)
    layer.folds = [Fold("mlp.up_proj", ["mlp.gate_proj"], torch.arange(40))]
    before = {name: weight.clone() for name, weight in layer.weights.items()}
    smoothquant.prepare(layer, options_of("smoothquant", bits=8, group_size=-1))
    assert all(torch.equal(layer.weights[name], weight) for name, weight in before.items())
