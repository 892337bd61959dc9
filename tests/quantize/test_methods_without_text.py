"""HQQ, NF4, fp8, MXFP4 and LLM.int8(): codes of one matrix, their layouts read back, and what others read of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from tests.support.tensors import array, fit_of
from torch import Tensor

from headrace.backends.torch_ref.tensors import weight_of
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.base import QWeight, SplitWeight
from headrace.quant.schemes import Scheme
from headrace.quantize import grid
from headrace.quantize.base import Options, Statistics, find_method, find_writer
from headrace.quantize.methods import hqq, llm_int8, mxfp4, nf4

FORMS = {
    "hqq": (Options("hqq", 4, 64), "compressed-tensors"),
    "hqq g128 3 bits": (Options("hqq", 3, 128), "compressed-tensors"),
    "nf4": (Options("nf4", 4, 64), "bitsandbytes"),
    "llm_int8": (Options("llm_int8", 8, -1), "bitsandbytes"),
    "fp8": (Options("fp8", 8, -1), "compressed-tensors"),
    "fp8 tensor": (Options("fp8", 8, 0), "compressed-tensors"),
    "fp8 group": (Options("fp8", 8, 128), "compressed-tensors"),
    "fp8 of transformers": (Options("fp8", 8, 0), "fp8"),
    "fp8_e5m2": (Options("fp8_e5m2", 8, -1), "fp8"),
    "mxfp4": (Options("mxfp4", 4, 32), "compressed-tensors"),
    "mxfp4 in blocks": (Options("mxfp4", 4, 32), "mxfp4"),
}
# Root mean square error of Gaussian weights, as a share of their size.
MOST = {
    "hqq": 0.1,
    "hqq g128 3 bits": 0.22,
    "nf4": 0.1,
    "llm_int8": 0.01,
    "mxfp4": 0.13,
    "mxfp4 in blocks": 0.13,
    "fp8_e5m2": 0.056,
}


class Store(dict[str, Tensor]):
    """`quant.base.Tensors` of what a writer gave."""

    def __call__(self, name: str) -> NDArray[Any]:
        return array(self[name])

    def has(self, name: str) -> bool:
        return name in self

    def notes(self, name: str) -> dict[str, str]:
        return {}


def gaussian(rows: int = 96, columns: int = 512, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def made(form: str, weight: Tensor, statistics: Statistics | None = None) -> tuple[QWeight, QWeight, Store]:
    """What the method gives, what the reader makes of what the writer wrote, and that."""
    options, layout = FORMS[form]
    method, writer = find_method(options.method), find_writer(layout)
    options = replace(method.verify(options), scale_dtype=writer.scale_dtype(torch.float32))
    writer.verify(options)
    inputs = method.quantise(weight, statistics, options, "a.b")
    stored = Store(writer.tensors("a.b", inputs, options))
    config = writer.quantization_config(options, ["lm_head"])
    json.dumps(config)
    return inputs, weight_of(writer.read(stored, "a.b", config)), stored


def error(weight: Tensor, result: QWeight) -> float:
    return float((result.dequantize() - weight).norm() / weight.norm())


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_is_read_to_the_bit(form: str) -> None:
    weight = gaussian()
    inputs, back, _ = made(form, weight)
    assert torch.equal(back.dequantize(), inputs.dequantize())
    assert error(weight, back) <= MOST.get(form, 0.03)


@pytest.mark.parametrize("form", FORMS)
def test_wrong_weights_and_options_are_refused(form: str) -> None:
    weight = gaussian()
    weight[3, 5] = torch.nan
    with pytest.raises(CheckpointError, match=r"a\.b"):
        made(form, weight)
    options = FORMS[form][0]
    with pytest.raises(RequestError):
        find_method(options.method).verify(replace(options, bits=5))
    with pytest.raises(RequestError):
        find_writer("gptq" if options.method != "hqq" else "fp8").verify(replace(options, group_size=0))


@pytest.mark.parametrize("form", FORMS)
def test_zeros_beside_numbers(form: str) -> None:
    weight = gaussian()
    weight[7] = 0.0
    _, back, _ = made(form, weight)
    assert not back.dequantize()[7].abs().gt(1e-6).any()


def test_hqq_is_below_round_to_nearest() -> None:
    """In the norm that it makes small, at each number of bits, for Gaussian weights and for some with outliers."""
    for seed, tails in ((0, 1.0), (1, 3.0)):
        weight = gaussian(seed=seed).double()
        weight = (weight.sign() * weight.abs() ** tails).float()
        for bits in (2, 3, 4):
            options = Options("hqq", bits, 64, symmetric=False)
            x = weight.view(len(weight), -1, 64)
            near = hqq.loss(x, *grid.find(x, options), bits).sum()
            hqq_weight = hqq.quantise(weight, None, options, "w")
            assert hqq_weight.scales is not None
            assert hqq_weight.zeros is not None
            total = hqq.loss(x, hqq_weight.scales, hqq_weight.zeros, bits).sum()
            assert total < near * 0.99
            assert torch.equal(hqq_weight.zeros, hqq_weight.zeros.round())
            assert hqq_weight.zeros.min() >= 1
            assert hqq_weight.zeros.max() <= 2**bits - 1


def test_control_hqq_without_rounds_is_not_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hqq, "NUM_ROUNDS", 0)
    monkeypatch.setattr(hqq, "SHARES", (1.0,))
    weight = gaussian()
    options = Options("hqq", 4, 64, symmetric=False)
    hqq_weight, near = hqq.quantise(weight, None, options, "w"), grid.quantise(weight, options, "w")
    assert torch.equal(hqq_weight.dequantize(), near.dequantize())


def test_nf4s_levels_and_table(shared_data: Path) -> None:
    known = json.loads((shared_data / "quant" / "nf4.json").read_text())
    assert list(nf4.LEVELS) == known["nf4_code"]
    functional = pytest.importorskip("bitsandbytes").functional
    assert torch.allclose(nf4.table(), functional.create_dynamic_map().sort().values, atol=1e-7, rtol=0)


def test_bitsandbytes_reads_nf4() -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    weight = gaussian()
    inputs, _, stored = made("nf4", weight)
    parts = {name.removeprefix("a.b.weight."): part for name, part in stored.items() if name != "a.b.weight"}
    state = functional.QuantState.from_dict(parts, torch.device("cpu"))
    state.dtype = torch.float32
    theirs = functional.dequantize_4bit(stored["a.b.weight"], state)
    assert torch.allclose(theirs, inputs.dequantize(), atol=1e-6)
    library_codes = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert (
        error(weight, inputs)
        <= float((functional.dequantize_4bit(*library_codes) - weight).norm() / weight.norm()) * 1.001
    )


def test_compressed_tensors_reads_fp8_and_mxfp4() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    weight = gaussian()
    for form in ("fp8", "mxfp4"):
        options, layout = FORMS[form]
        inputs, _, stored = made(form, weight)
        method, writer = find_method(options.method), find_writer(layout)
        config = QuantizationConfig.model_validate(writer.quantization_config(method.verify(options), ["lm_head"]))
        scheme = config.config_groups["group_0"]
        reader: Any = BaseCompressor.get_value_from_registry(scheme.format)
        theirs = reader.decompress({name.removeprefix("a.b."): part for name, part in stored.items()}, scheme)
        assert torch.allclose(theirs["weight"].float(), inputs.dequantize(), rtol=8e-3, atol=1e-6), form


def test_transformers_reads_mxfp4_in_blocks() -> None:
    reader = pytest.importorskip("transformers.integrations.mxfp4")
    weight = gaussian()
    inputs, _, stored = made("mxfp4 in blocks", weight)
    parts = [stored[f"a.b.weight_{part}"].unsqueeze(0) for part in ("blocks", "scales")]
    theirs = reader.convert_moe_packed_tensors(*parts, dtype=torch.float32)
    assert torch.equal(theirs[0].t(), inputs.dequantize())


def test_mxfp4_is_no_worse_than_the_specifications_scale() -> None:
    weight = gaussian()
    ours = mxfp4.quantise(weight, None, Options("mxfp4", 4, 32), "w")
    x = weight.view(len(weight), -1, 32)
    power = torch.exp2(torch.floor(torch.log2(x.abs().amax(-1))) - 2)
    codes = mxfp4._nearest(x, power)
    plain = QWeight(codes.flatten(1), power, group=32, bits=4, codebook=ours.codebook)
    assert error(weight, ours) < error(weight, plain)


def outlying(num_in: int = 512, columns: tuple[int, ...] = (5, 77, 400), times: float = 60.0) -> tuple[Tensor, Tensor]:
    """Inputs [rows, in], some of whose columns are planted to reach far beyond the rest; and these columns."""
    x = torch.randn(256, num_in, generator=torch.Generator().manual_seed(9)).clamp_(-5, 5)
    x[:, list(columns)] *= times
    return x, torch.tensor(columns)


def by_rows(x: Tensor) -> Tensor:
    """What int8 makes of activations with one scale for each row."""
    scale = x.abs().amax(1, keepdim=True) / 127
    return torch.round(x / scale) * scale


def test_llm_int8_is_below_naive_int8_where_outliers_are_planted() -> None:
    weight = gaussian()
    x, columns = outlying()
    statistics = Statistics(weight.shape[1])
    statistics.add(x)
    inputs, back, _ = made("llm_int8", weight, statistics)
    assert isinstance(back, SplitWeight)
    assert back.columns is not None
    assert inputs.scales is not None
    assert torch.equal(back.columns, columns)
    exact = x @ weight.t()
    naive = by_rows(x) @ QWeight(inputs.codes, inputs.scales, group=512, bits=8).dequantize().t()
    rest = x.clone()
    rest[:, columns] = 0
    split = by_rows(rest) @ back.dequantize().t() + x[:, columns] @ back.dequantize()[:, columns].t()
    assert (split - exact).norm() < 0.2 * (naive - exact).norm()
    fit = fit_of([back])
    assert fit.scheme == Scheme("i8")
    assert fit.columns is not None
    assert torch.equal(fit.columns, columns)
    assert "outliers of their own" in fit_of([back, QWeight(back.codes, back.scales, group=512, bits=8)]).why
    rows = back.rows(10, 20)
    assert torch.equal(rows.dequantize(), back.dequantize()[10:20])


def test_llm_int8_without_outliers_is_plain_int8() -> None:
    x, _ = outlying(times=1.0)
    statistics = Statistics(x.shape[1])
    statistics.add(x)
    _, back, stored = made("llm_int8", gaussian(), statistics)
    assert type(back) is QWeight
    assert not any("outlier" in name for name in stored)
    assert fit_of([back]).scheme is not None


def test_llm_int8_keeps_no_more_than_a_share() -> None:
    statistics = Statistics(64)
    statistics.add(torch.arange(64.0).repeat(2, 1) + 10)
    outliers = llm_int8.outliers(statistics, 64)
    assert outliers is not None
    assert outliers.tolist() == list(range(48, 64))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("outlier_columns", torch.tensor([1, 1, 2], dtype=torch.int32)),
        ("outlier_columns", torch.tensor([1, 2, 512], dtype=torch.int32)),
        ("outlier_columns", torch.tensor([-1, 2, 5], dtype=torch.int32)),
        ("outlier_weight", torch.zeros(96, 2, dtype=torch.bfloat16)),
    ],
)
def test_hostile_outliers_are_refused(part: str, value: Tensor) -> None:
    x, _ = outlying()
    statistics = Statistics(512)
    statistics.add(x)
    _, _, stored = made("llm_int8", gaussian(), statistics)
    stored[f"a.b.{part}"] = value
    with pytest.raises(CheckpointError, match=r"a\.b\.outlier"):
        find_writer("bitsandbytes").read(stored, "a.b", {"quant_method": "bitsandbytes"})
