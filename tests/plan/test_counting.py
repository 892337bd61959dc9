"""Every model file can be counted, every operator is counted, and the counts are those of the real thing."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
from tests.plan import configs
from tests.support.harness import load, save_random

from headrace import models
from headrace.backends.base import Ops
from headrace.backends.states import ScanInputs
from headrace.checkpoint.names import text_config
from headrace.plan.counting import CountingOps, _State, count
from headrace.plan.forms import Forms
from headrace.protocol.errors import CheckpointError, RequestError


def parameters_of(config: dict[str, Any]) -> int:
    """Counted by transformers, which has model files of its own, without memory for the weights."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.support.harness import their_model

    with torch.device("meta"):
        model = their_model(config)
    # What a checkpoint has; tied tensors once.
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("model_type", models.names())
def test_every_model_is_counted(model_type: str) -> None:
    config = text_config(models.find(model_type).TINY, models.names())
    counts = count(config, Forms("float32"))
    assert 0 < counts.active_parameters <= counts.parameters
    assert (counts.active_parameters < counts.parameters) == bool(counts.mixtures)
    assert counts.weight_bytes == 4 * counts.parameters == pytest.approx(sum(counts.forms.values()))
    num_layers = config.get("num_hidden_layers", config.get("n_layer"))
    num_attending = sum(num for _, num in counts.layers)
    assert num_attending <= num_layers if counts.state_bytes else num_attending == num_layers
    if "text_config" not in models.find(model_type).TINY:  # there transformers counts a tower for images
        assert counts.parameters == parameters_of(config)


def test_every_operator_is_counted() -> None:
    operators = {name for name, _ in inspect.getmembers(Ops, inspect.isfunction) if not name.startswith("_")}
    assert operators - {"matrix"} <= set(dir(CountingOps))


def test_an_operator_that_is_not_counted_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="does not count the operator convolve"):
        CountingOps().convolve(1)


def test_a_model_whose_widths_do_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.plan import counting

    monkeypatch.setattr(counting.CountingOps, "gated", lambda self, x, kind: x)
    with pytest.raises(CheckpointError, match="takes rows of"):
        count(configs.LLAMA_3_8B, Forms("bfloat16"))


def test_cache_bytes_are_those_of_the_engine() -> None:
    from headrace.engine.build import build_engine
    from headrace.hub import read_json, resolve
    from headrace.protocol.config import EngineConfig

    values = read_json(resolve("builtin", weights=False) / "config.json")
    counts = count(values, Forms("bfloat16"))
    for kv_dtype in ("float32", "int8", "int8_dot", "int4", "fp8_e4m3", "fp8_e5m2"):
        config = EngineConfig(kv_cache_dtype=kv_dtype, num_gpu_blocks_override=8, max_model_len=64, num_threads=1)
        core = build_engine(config)
        assert core.info.kv_token_bytes == counts.kv_token_bytes(kv_dtype), kv_dtype
        core.close()


@pytest.mark.parametrize("model_type", ["gemma4_text", "qwen3_5_text", "falcon_h1", "lfm2"])
def test_bytes_of_kinds_are_those_of_the_program(model_type: str, tmp_path: Path) -> None:
    tiny = models.find(model_type).TINY
    save_random(tiny, tmp_path)
    program: Any = load(tmp_path, backend="cpu", block_size=8).program
    counts = count(tiny, Forms("float32"))
    sizes = [len(program.cache.read_block(0, kind)) for kind in range(len(program.kinds))]
    num_states = sizes.pop() if program.kinds[-1].is_state else 0
    assert counts.state_bytes == num_states
    assert 8 * counts.kv_token_bytes("float32") == sum(sizes)


@pytest.mark.parametrize(
    ("model_type", "of_states"),
    [
        # Layers by what is looked up in their states: each number by the key, changed, and by the query.
        ("qwen3_5_text", 2 * 3 * (6 * 20 * 12)),
        ("lfm2", 0),
    ],
)
def test_a_row_is_multiplied_with_matrices_convolutions_and_states(
    model_type: str, of_states: int, tmp_path: Path
) -> None:
    model = save_random(models.find(model_type).TINY, tmp_path)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    weights = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) > 1 and "embed" not in name)
    counts = count(models.find(model_type).TINY, Forms("float32"))
    head = math.prod(shapes["lm_head.weight"])
    assert (counts.macs, counts.head_macs) == (weights - head + of_states, head)


def test_a_scan_changes_its_state_and_reads_it() -> None:
    ops = CountingOps()
    ops.scan(ScanInputs(ops._new(12), None, None, None, None), None, None, _State((3, 20, 4)))
    assert ops.macs == 2 * 3 * 20 * 4


@pytest.mark.parametrize(
    ("stated", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.125),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
    ],
)  # fmt: skip
def test_bits_of_stored_forms(stated: dict[str, Any], bits: float) -> None:
    counts = count(configs.LLAMA_3_8B, Forms("bfloat16", None, stated))
    layers = counts.parameters - 2 * 128256 * 4096 - 65 * 4096
    assert sum(num for form, num in counts.forms.items() if form != "bfloat16") == pytest.approx(layers * bits / 8)
    left = count(configs.LLAMA_3_8B, Forms("bfloat16", None, stated | {"modules_to_not_convert": ["self_attn"]}))
    assert left.weight_bytes > counts.weight_bytes


@pytest.mark.parametrize(("name", "bits"), [("int3", 3 + 16 / 128), ("int2", 2 + 20 / 128)])
def test_bits_of_forms_that_are_made_beforehand(name: str, bits: float) -> None:
    """3 or 2 bits and the scales of groups of 128; embedding and head stay in floats, as `headrace quantize` leaves
    them."""
    counts = count(configs.LLAMA_3_8B, Forms("bfloat16", name))
    layers = counts.parameters - 2 * 128256 * 4096 - 65 * 4096
    assert counts.weight_bytes == layers * bits / 8 + 2 * (2 * 128256 * 4096 + 65 * 4096)
    assert counts.forms["bfloat16"] == 2 * (2 * 128256 * 4096 + 65 * 4096)
    with pytest.raises(CheckpointError, match=f"without --quantization {name}"):
        Forms("bfloat16", name, {"quant_method": "gptq", "bits": 4})


def test_mxfp4_is_of_experts_alone() -> None:
    config = models.find("gpt_oss").TINY
    forms = count(config, Forms("bfloat16", None, {"quant_method": "mxfp4"})).forms
    experts = 3 * 5 * 3 * 40 * 48
    assert forms["mxfp4, 4.5 bits"] == experts * 4.5 / 8


def test_forms_that_are_not_known_are_refused() -> None:
    with pytest.raises(CheckpointError, match="no size for quantization_config 'aqlm'"):
        Forms("bfloat16", None, {"quant_method": "aqlm"})
    with pytest.raises(CheckpointError, match="group_size is 'x'"):
        Forms("bfloat16", None, {"quant_method": "gptq", "bits": 4, "group_size": "x"})
    with pytest.raises(CheckpointError, match="quantised already"):
        Forms("bfloat16", "int4", {"quant_method": "gptq", "bits": 4})
    with pytest.raises(RequestError, match="quantization"):
        Forms("bfloat16", "int5")
