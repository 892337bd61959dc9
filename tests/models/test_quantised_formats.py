"""Checkpoints of every quantised layout against transformers with the dequantised weights, on both backends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.models import formats
from tests.models.formats import TOKEN_IDS, Written
from tests.models.harness import follow, load
from tests.models.test_quantised import MOST, distance, matrices

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

EXACT, ROUNDED = 2e-6, 4e-3
"""Distance of torch_ref from transformers: in float32, and with minimums rounded to float16."""

GROUP64 = {"num_bits": 4, "strategy": "group", "group_size": 64}
CT, BNB = formats.compressed, formats.bitsandbytes
CASES: dict[str, tuple[Callable[[Path], Written], str, float]] = {
    # what writes it, what the load says, distance on torch_ref
    "gptq-4-sym": (lambda at: formats.gptq(at, 4, 64, True, 1), "int4-g64", EXACT),
    "gptq-4-sym-v2": (lambda at: formats.gptq(at, 4, 128, True, 2), "int4-g128", EXACT),
    "gptq-4-asym": (lambda at: formats.gptq(at, 4, 32, False, 1), "int4-g32-asym", ROUNDED),
    "gptq-4-asym-v2": (lambda at: formats.gptq(at, 4, 32, False, 2), "int4-g32-asym", ROUNDED),
    "gptq-4-channel": (lambda at: formats.gptq(at, 4, -1, True, 1), "int4-g128", EXACT),
    "gptq-8-sym": (lambda at: formats.gptq(at, 8, 64, True, 1), "int8-g64", EXACT),
    "gptq-8-asym": (lambda at: formats.gptq(at, 8, 64, False, 1), "dequantised to float32", EXACT),
    "gptq-3-asym": (lambda at: formats.gptq(at, 3, 64, False, 1), "int4-g64", EXACT),
    "gptq-2-asym": (lambda at: formats.gptq(at, 2, 32, False, 1), "int4-g32", EXACT),
    "gptq-act-order": (formats.act_order, "dequantised to float32", EXACT),
    "awq": (lambda at: formats.awq(at, 64), "int4-g64-asym", ROUNDED),
    "ct-int4-group": (lambda at: CT(at, "pack-quantized", **GROUP64), "int4-g64", ROUNDED),
    "ct-int4-asym": (lambda at: CT(at, "pack-quantized", symmetric=False, **GROUP64), "int4-g64-asym", ROUNDED),
    "ct-int4-channel": (lambda at: CT(at, "pack-quantized", num_bits=4, strategy="channel"), "int4-g128", ROUNDED),
    "ct-int3-group": (
        lambda at: CT(at, "pack-quantized", num_bits=3, strategy="group", group_size=32), "int4-g32", ROUNDED,
    ),
    "ct-int6-group": (
        lambda at: CT(at, "pack-quantized", num_bits=6, strategy="group", group_size=64), "int8-g64", ROUNDED,
    ),
    "ct-int8-group": (
        lambda at: CT(at, "pack-quantized", num_bits=8, strategy="group", group_size=32), "int8-g32", ROUNDED,
    ),
    "ct-w8a8": (lambda at: CT(at, "int-quantized", num_bits=8, strategy="channel"), "int8-channel", EXACT),
    "ct-w8a8-tensor": (lambda at: CT(at, "int-quantized", num_bits=8, strategy="tensor"), "int8-channel", EXACT),
    "ct-fp8-tensor": (
        lambda at: CT(at, "float-quantized", num_bits=8, type="float", strategy="tensor"), "dequantised", EXACT,
    ),
    "ct-fp8-channel": (
        lambda at: CT(at, "float-quantized", num_bits=8, type="float", strategy="channel"), "dequantised", EXACT,
    ),
    "ct-fp8-block": (
        lambda at: CT(at, "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[64, 128]),
        "dequantised", EXACT,
    ),
    "ct-mxfp4": (
        lambda at: CT(at, "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        "dequantised", EXACT,
    ),
    "ct-nvfp4": (
        lambda at: CT(at, "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        "dequantised", EXACT,
    ),
    "bnb-nf4": (lambda at: BNB(at, load_in_4bit=True, bnb_4bit_quant_type="nf4"), "dequantised", EXACT),
    "bnb-nf4-double": (
        lambda at: BNB(
            at, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        ),
        "dequantised", EXACT,
    ),
    "bnb-fp4": (lambda at: BNB(at, load_in_4bit=True, bnb_4bit_quant_type="fp4"), "dequantised", EXACT),
    "bnb-int8": (lambda at: BNB(at, load_in_8bit=True), "int8-channel", EXACT),
    "fp8-block": (lambda at: formats.fp8(at, (64, 128)), "dequantised", EXACT),
    "fp8-tensor": (lambda at: formats.fp8(at, None), "dequantised", EXACT),
    "fp8-ue8m0": (lambda at: formats.fp8(at, (64, 128), "ue8m0"), "dequantised", EXACT),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, said, most = CASES[case]
    written = make(tmp_path)
    for backend in ("torch_ref", "cpu"):
        caplog.clear()
        with caplog.at_level(logging.INFO, "headrace"):
            runner = load(written.directory, backend=backend, dtype="float32")
        (line,) = [record.getMessage() for record in caplog.records if " stored, " in record.getMessage()]
        assert said in line
        assert f"on the {said} kernels" in line or "dequantised" in said
        logits = follow(runner, TOKEN_IDS, [len(TOKEN_IDS)])
        native = backend == "cpu" and "dequantised" not in said
        found = distance(logits, written.logits)
        assert found < (2 * MOST if native else most)


@pytest.mark.parametrize("case", ["gptq-4-asym", "awq", "ct-int6-group", "bnb-int8", "bnb-nf4", "fp8-block"])
def test_both_backends_have_the_same_weights(case: str, tmp_path: Path) -> None:
    written = CASES[case][0](tmp_path)
    own, reference = (
        matrices(load(written.directory, backend=backend, dtype="float32").program.model)
        for backend in ("cpu", "torch_ref")
    )
    assert len(own) == len(reference) >= 9
    assert all(torch.equal(a, b) for a, b in zip(own, reference, strict=True))
