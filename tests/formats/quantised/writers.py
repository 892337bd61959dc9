"""`python -m tests.formats.quantised.writers NAME DIRECTORY`: a checkpoint of another project's own writer, compared.

The packages are not among those of the tests: `pip install --no-deps` them beside torch and transformers. It writes a
small Llama, lets the writer quantise it, and prints how far headrace's logits (torch_ref, float32) are from those of
the weights that the writer says its codes stand for. `layouts.py` has the same layouts packed by hand.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.formats.quantised.formats import CONFIG, TOKEN_IDS, is_quantised, logits_of
from tests.models.test_quantised import distance
from tests.support.harness import follow, load, save_random
from torch import Tensor


def torchao(directory: Path) -> Tensor:
    """torchao's Int8WeightOnlyConfig through transformers."""
    transformers = importlib.import_module("transformers")
    quantization = importlib.import_module("torchao.quantization")
    model = save_random(CONFIG, directory / "plain")
    config = transformers.TorchAoConfig(quant_type=quantization.Int8WeightOnlyConfig())
    options: dict[str, Any] = {"dtype": torch.float32, "device_map": "cpu", "quantization_config": config}
    quantised = transformers.AutoModelForCausalLM.from_pretrained(directory / "plain", **options)
    quantised.save_pretrained(directory / "quantised")
    stored = dict(quantised.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(stored[name].dequantize() if is_quantised(name) else stored[name])
    return logits_of(model)


def hqq(directory: Path) -> Tensor:
    """hqq's own layers of 4 bits in groups of 64, as its state_dict encodes them for safetensors."""
    core = importlib.import_module("hqq.core.quantize")
    out = directory / "quantised"
    model = save_random(CONFIG, out)
    tensors = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    for name, weight in model.named_parameters():
        if not is_quantised(name):
            continue
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = tensors.pop(name)
        base_quantize_config = core.BaseQuantizeConfig(nbits=4, group_size=64, axis=1)
        layer = core.HQQLinear(linear, base_quantize_config, compute_dtype=torch.float32, device="cpu")
        layer.encoded_state_dict = True
        stem = name.removesuffix("weight")
        tensors |= {stem + key: part.contiguous() for key, part in layer.state_dict().items() if part is not None}
        weight.data = layer.dequantize()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq", "skip_modules": ["lm_head"]}
    (out / "config.json").write_text(json.dumps(config))
    return logits_of(model)


def quark(directory: Path) -> Tensor:
    """AMD Quark's uint4 in groups of 32. The logits are of its own model."""
    torch_part = importlib.import_module("quark.torch")
    config = importlib.import_module("quark.torch.quantization.config.config")
    model = save_random(CONFIG, directory / "plain")
    spec = config.Uint4PerGroupSpec(
        symmetric=False, scale_type="float", round_method="half_even", is_dynamic=False, ch_axis=1, group_size=32
    )
    weight = spec.to_quantization_spec()
    plan = config.QConfig(global_quant_config=config.QLayerConfig(weight=weight), exclude=["lm_head"])
    quantiser = torch_part.ModelQuantizer(plan)
    frozen = quantiser.freeze(quantiser.quantize_model(model, [torch.tensor([TOKEN_IDS])]))
    logits = logits_of(frozen)
    with torch.no_grad():
        torch_part.export_safetensors(frozen, str(directory / "quantised"))
    return logits


WRITERS: dict[str, Callable[[Path], Tensor]] = {"torchao": torchao, "hqq": hqq, "quark": quark}


def main(name: str, directory: Path) -> None:
    logits = WRITERS[name](directory)
    runner = load(directory / "quantised", backend="torch_ref", dtype="float32")
    print(f"{name}: distance {distance(follow(runner, TOKEN_IDS, [len(TOKEN_IDS)]), logits):.2g}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
