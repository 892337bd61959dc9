"""Checkpoints of every quantised layout against transformers with the dequantised weights, on both backends."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.formats.quantised import formats
from tests.formats.quantised.formats import TOKEN_IDS, Written
from tests.formats.quantised.right import Held
from tests.models.test_quantised import MOST, distance, matrices
from tests.support.harness import follow, load
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from headrace.backends.torch_ref import TorchRef
from headrace.backends.torch_ref.tensors import tensor, weight_of
from headrace.checkpoint import loader
from headrace.checkpoint.quantising import Loading
from headrace.checkpoint.tensors import Checkpoint
from headrace.engine.library.load import build_runner
from headrace.models.weights import Linear
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.base import QWeight
from headrace.quant.formats import mxfp4
from headrace.quant.schemes import E4M3, Scheme, parse

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

EXACT, ROUNDED = 2e-6, 4e-3
"""Distance of torch_ref from transformers: in float32, with numbers rounded to float16."""

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
    "gptq-8-asym": (lambda at: formats.gptq(at, 8, 64, False, 1), "int8-g64-asym", ROUNDED),
    "gptq-3-asym": (lambda at: formats.gptq(at, 3, 64, False, 1), "int3-g64-asym", EXACT),
    "gptq-2-asym": (lambda at: formats.gptq(at, 2, 32, False, 1), "int2-g32-asym", EXACT),
    "gptq-act-order": (formats.act_order, "int4-g64-asym", ROUNDED),
    "awq": (lambda at: formats.awq(at, 64), "int4-g64-asym", ROUNDED),
    "ct-int4-group": (lambda at: CT(at, "pack-quantized", **GROUP64), "int4-g64", ROUNDED),
    "ct-int4-asym": (lambda at: CT(at, "pack-quantized", symmetric=False, **GROUP64), "int4-g64-asym", ROUNDED),
    "ct-int4-channel": (lambda at: CT(at, "pack-quantized", num_bits=4, strategy="channel"), "int4-g128", ROUNDED),
    "ct-int3-group": (
        lambda at: CT(at, "pack-quantized", num_bits=3, strategy="group", group_size=32), "int3-g32", ROUNDED,
    ),
    "ct-int6-group": (
        lambda at: CT(at, "pack-quantized", num_bits=6, strategy="group", group_size=64), "int6-g64", ROUNDED,
    ),
    "ct-int8-group": (
        lambda at: CT(at, "pack-quantized", num_bits=8, strategy="group", group_size=32), "int8-g32", ROUNDED,
    ),
    "ct-w8a8": (lambda at: CT(at, "int-quantized", num_bits=8, strategy="channel"), "int8-channel", EXACT),
    "ct-w8a8-tensor": (lambda at: CT(at, "int-quantized", num_bits=8, strategy="tensor"), "int8-channel", EXACT),
    "ct-fp8-tensor": (
        lambda at: CT(at, "float-quantized", num_bits=8, type="float", strategy="tensor"), "fp8", EXACT,
    ),
    "ct-fp8-channel": (
        lambda at: CT(at, "float-quantized", num_bits=8, type="float", strategy="channel"), "fp8", EXACT,
    ),
    "ct-fp8-block": (
        lambda at: CT(at, "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[64, 128]),
        "fp8", EXACT,
    ),
    "ct-mxfp4": (
        lambda at: CT(at, "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        "e2m1-g32", EXACT,
    ),
    "ct-nvfp4": (
        lambda at: CT(at, "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        "e2m1-g16", ROUNDED,
    ),
    "bnb-nf4": (lambda at: BNB(at, load_in_4bit=True, bnb_4bit_quant_type="nf4"), "nf4-g64", ROUNDED),
    "bnb-nf4-double": (
        lambda at: BNB(
            at, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        ),
        "nf4-g64", ROUNDED,
    ),
    "bnb-fp4": (lambda at: BNB(at, load_in_4bit=True, bnb_4bit_quant_type="fp4"), "fp4-g64", ROUNDED),
    "bnb-int8": (lambda at: BNB(at, load_in_8bit=True), "int8-channel", EXACT),
    "fp8-block": (lambda at: formats.fp8(at, (64, 128)), "fp8", EXACT),
    "fp8-tensor": (lambda at: formats.fp8(at, None), "fp8", EXACT),
    "fp8-ue8m0": (lambda at: formats.fp8(at, (64, 128), "ue8m0"), "fp8", EXACT),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, text, most = CASES[case]
    written = make(tmp_path)
    for backend in ("torch_ref", "cpu"):
        caplog.clear()
        with caplog.at_level(logging.INFO, "headrace"):
            runner = load(written.directory, backend=backend, dtype="float32")
        lines = [record.getMessage() for record in caplog.records if " stored, " in record.getMessage()]
        is_f8 = text == "fp8"
        assert len(lines) == 1 or is_f8  # in groups, and where a row is one group
        assert all(text in line for line in lines)
        assert is_f8 or f"on the {text} kernels" in lines[0] or "dequantised" in text
        logits = follow(runner, TOKEN_IDS, [len(TOKEN_IDS)])
        native = backend == "cpu" and "dequantised" not in text and not is_f8
        result = distance(logits, written.logits)
        assert result < (most + 2 * MOST if native else most)


@pytest.mark.parametrize("case", ["gptq-4-asym", "awq", "ct-int6-group", "bnb-int8", "bnb-nf4", "fp8-block"])
def test_both_backends_have_the_same_weights(case: str, tmp_path: Path) -> None:
    written = CASES[case][0](tmp_path)
    native, reference = (
        matrices(load(written.directory, backend=backend, dtype="float32").program.model)
        for backend in ("cpu", "torch_ref")
    )
    assert len(native) == len(reference) >= 9
    assert all(torch.equal(a, b) for a, b in zip(native, reference, strict=True))


def test_control_the_two_versions_of_gptq_differ(tmp_path: Path) -> None:
    """Negative control: zero points one off would be seen above."""
    written = formats.gptq(tmp_path, 4, 64, True, 1)
    change(written, checkpoint_format="gptq_v2")
    runner = load(written.directory, backend="torch_ref", dtype="float32")
    assert distance(follow(runner, TOKEN_IDS, [len(TOKEN_IDS)]), written.logits) > 0.1


def change(written: Written, **values: Any) -> None:
    path = written.directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= values
    path.write_text(json.dumps(config))


def retensored(written: Written, edit: Callable[[dict[str, Tensor]], None]) -> None:
    path = written.directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    path.unlink()
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("backend", ["torch_ref", "cpu"])
def test_one_layer_of_a_stack_left_alone_is_as_it_was(backend: str, tmp_path: Path, caplog: Any) -> None:
    written = formats.fp8(tmp_path, None)
    name = "model.layers.1.self_attn.k_proj"

    def put_back(tensors: dict[str, Tensor]) -> None:
        scale = tensors.pop(f"{name}.weight_scale_inv")
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].float() * scale

    retensored(written, put_back)
    change(written, modules_to_not_convert=["lm_head", name])
    with caplog.at_level(logging.INFO, "headrace"):
        runner = load(written.directory, backend=backend, dtype="float32")
    assert distance(follow(runner, TOKEN_IDS, [len(TOKEN_IDS)]), written.logits) < EXACT


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_a_table_of_embeddings_and_a_head_of_codes_are_read(bits: int, tmp_path: Path) -> None:
    """The flag that ties the head to the table is left over: each has its own codes."""
    written = formats.mlx(tmp_path, bits, 32)
    path = written.directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    for backend in ("torch_ref", "cpu"):
        runner = load(written.directory, backend=backend, dtype="float32", activations="16bit")
        assert distance(follow(runner, TOKEN_IDS, [len(TOKEN_IDS)]), written.logits) < ROUNDED


def test_biases_of_zeros_are_passed_over_and_others_are_not(tmp_path: Path) -> None:
    written = formats.gptq(tmp_path, 4, 64, True, 1)
    name = "model.layers.0.self_attn.q_proj.bias"
    retensored(written, lambda tensors: tensors.update({name: torch.zeros(128)}))
    load(written.directory, backend="torch_ref")
    retensored(written, lambda tensors: tensors.update({name: torch.ones(128)}))
    with pytest.raises(CheckpointError, match=name):
        load(written.directory, backend="torch_ref")


def test_scales_of_activations_are_passed_over(tmp_path: Path) -> None:
    written = CASES["ct-w8a8"][0](tmp_path)
    name = "model.layers.0.self_attn.q_proj.input_scale"
    retensored(written, lambda tensors: tensors.update({name: torch.ones(1)}))
    load(written.directory, backend="torch_ref")


def test_a_layer_of_another_shape_than_the_model_is_refused(tmp_path: Path) -> None:
    written = formats.fp8(tmp_path, None)
    name = "model.layers.1.mlp.up_proj.weight"
    retensored(written, lambda tensors: tensors.update({name: tensors[name][:255].contiguous()}))
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[255, 128\], the config makes it \[256, 128\]"):
        load(written.directory, backend="torch_ref")


def test_codes_are_not_quantised_once_more(tmp_path: Path) -> None:
    written = formats.fp8(tmp_path, None)
    with pytest.raises(CheckpointError, match="quantised already"):
        load(written.directory, quantization="int4")


def test_the_dtype_is_the_one_that_the_config_states(tmp_path: Path) -> None:
    written = formats.gptq(tmp_path, 4, 64, True, 1)
    path = written.directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    _, info = build_runner(EngineConfig(model=str(written.directory), backend="torch_ref"))
    assert info.dtype == "bfloat16"


@pytest.mark.parametrize("case", ["gptq-4-asym", "bnb-int8", "fp8-block"])
def test_the_packed_form_gives_the_same_bits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = CASES[case][0](tmp_path)
    first = load(written.directory, backend="cpu", dtype="float32", save_packed=True)
    expected = follow(first, TOKEN_IDS, [len(TOKEN_IDS)])
    assert list(written.directory.glob("*.packed"))

    def refuse(*_: Any) -> None:
        raise AssertionError("the checkpoint's codes are read again")

    monkeypatch.setattr(loader.SafetensorsWeights, "matrix", refuse)
    again = load(written.directory, backend="cpu", dtype="float32")
    assert torch.equal(follow(again, TOKEN_IDS, [len(TOKEN_IDS)]), expected)


@pytest.mark.parametrize("case", ["ct-int4-asym", "ct-w8a8", "ct-fp8-block"])
def test_transformers_reads_the_same_directory_alike(case: str, tmp_path: Path) -> None:
    """That what stands in for a user's checkpoint is one: its own reader loads it."""
    written = CASES[case][0](tmp_path)
    config = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(written.directory, dtype=torch.float32, quantization_config=config)
    assert distance(formats.logits_of(model.eval()), written.logits) < EXACT


def test_experts_of_mxfp4_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import dequantize_convertops

    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (4, 48, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 135, (4, 48, 2), generator=generator, dtype=torch.uint8)
    names = {"m.experts.gate_up_proj_blocks": blocks, "m.experts.gate_up_proj_scales": scales}
    expected = dequantize_convertops(blocks, scales, torch.float32)  # [experts, in, out]
    for expert in range(4):
        weight = mxfp4.read(Held(names), f"m.experts.{expert}.gate_up_proj", {})
        assert torch.equal(tensor(weight.dequantize()), expected[expert].t().float())
    with pytest.raises(CheckpointError, match="expected more than 4 experts"):
        mxfp4.read(Held(names), "m.experts.4.gate_up_proj", {})


class NoKernels(TorchRef):
    schemes = frozenset()


def int8_layer(directory: Path, **options: Any) -> tuple[QWeight, loader.SafetensorsWeights]:
    """A layer `gate` of int8 codes, and a reader of it."""
    weight = QWeight(torch.randint(-127, 127, (8, 64), dtype=torch.int8), torch.full((8, 1), 0.01), group=64, bits=8)
    save_file({"gate.weight": weight.codes, "gate.SCB": torch.full((8,), 1.27)}, directory / "model.safetensors")
    backend = options.pop("backend", None) or TorchRef("cpu", "bfloat16")
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return weight, loader.SafetensorsWeights(Checkpoint(directory), backend, config, **options)


@pytest.mark.parametrize("plain", [False, True])
def test_a_router_is_kept_plain(plain: bool, tmp_path: Path) -> None:
    weight, weights = int8_layer(tmp_path)
    matrix: Any = weights.matrix(Linear(["gate"], 64, [8], plain=plain))
    assert matrix.scheme == (Scheme("f", dtype="bfloat16") if plain else Scheme("i8"))
    assert torch.equal(matrix.dense(), weight.dequantize().bfloat16().float())


def test_codes_reach_a_backend_without_a_kernel_for_them_as_floats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    weight, weights = int8_layer(tmp_path, backend=NoKernels("cpu", "bfloat16"))
    matrix: Any = weights.matrix(Linear(["gate"], 64, [8]))
    weights.finish()
    assert matrix.scheme == Scheme("f", dtype="bfloat16")
    assert torch.equal(matrix.dense(), weight.dequantize().bfloat16().float())
    assert "the backend has no int8-channel kernel" in caplog.text


@pytest.mark.parametrize("declares", [True, False])
def test_8_bit_floats_reach_a_backend_that_declares_them_with_their_scales(declares: bool, tmp_path: Path) -> None:
    """Scales for blocks of 32 rows and 128 inputs."""
    codes, scales = torch.randn(64, 256).to(torch.float8_e4m3fn), torch.rand(2, 2) * 1e-6
    save_file({"gate.weight": codes, "gate.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    backend = (TorchRef if declares else NoKernels)("cpu", "bfloat16")
    slabs: list[QWeight] = []
    make = backend.ops.matrix

    def matrix(source: Any, bias: Any = None) -> Any:
        slabs.append(weight_of(source.slab(16, 48)))
        return make(source, bias)

    backend.ops.matrix = matrix  # type: ignore[method-assign]
    config = {"quant_method": "fp8", "weight_block_size": [32, 128]}
    weights = loader.SafetensorsWeights(Checkpoint(tmp_path), backend, config)
    result: Any = weights.matrix(Linear(["gate"], 256, [64]))
    weights.finish()
    wide = codes.float() * scales.repeat_interleave(32, 0).repeat_interleave(128, 1)
    assert torch.equal(result.dense(), wide if declares else wide.bfloat16().float())
    assert result.scheme == (Scheme("f8", 128, dtype=E4M3) if declares else Scheme("f", dtype="bfloat16"))
    if declares:
        assert slabs[0].scales is not None
        assert (slabs[0].codes.dtype, slabs[0].scales.dtype) == (torch.float8_e4m3fn, torch.float32)
        assert torch.equal(slabs[0].scales, scales.repeat_interleave(32, 0)[16:48])
        assert torch.equal(slabs[0].codes.float(), codes[16:48].float())


def test_a_quantization_without_a_kernel_is_refused(tmp_path: Path) -> None:
    save_file({"gate.weight": torch.ones(8, 64)}, tmp_path / "model.safetensors")
    backend, checkpoint = NoKernels("cpu", "float32"), Checkpoint(tmp_path)
    backend.schemes = frozenset({Scheme("i8")})  # type: ignore[assignment]
    with pytest.raises(RequestError, match="quantization: 'nf4'.*one of int8, int8-channel on backend torch_ref"):
        loader.SafetensorsWeights(checkpoint, backend, loading=Loading(quantization=parse("nf4")))
    loader.SafetensorsWeights(checkpoint, backend, loading=Loading(quantization=parse("int8")))
