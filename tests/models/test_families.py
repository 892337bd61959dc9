"""The types of each family: quantised weights are packed and mapped with the same bits, names may be nested or stacked,
and what is refused says what runs instead."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.harness import follow, load, random_ids, save_random

from headrace import models
from headrace.protocol.errors import CheckpointError

TYPES = (
    "qwen3_moe qwen2_moe qwen3_vl qwen3_vl_moe qwen2_5_vl gpt_oss phi3 smollm3 seed_oss granite ministral3 olmo2 olmo3 "
    "starcoder2 glm glm4 cohere2 exaone4 ernie4_5 ernie4_5_moe hunyuan_v1_dense hunyuan_v1_moe hy_v3 afmoe apertus "
    "nemotron glm4_moe minimax_m2 llama4_text gemma gemma3 gemma4 gemma4_text"
).split()
TYPES += "deepseek_v2 deepseek_v3 kimi_k2 glm4_moe_lite mistral4 muse_glimmer bitnet".split()
TYPES += "qwen3_next qwen3_5 qwen3_5_moe lfm2 lfm2_moe granitemoehybrid falcon_h1 nemotron_h".split()
LENGTH = 40


@pytest.fixture(scope="module", params=TYPES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_random(models.find(request.param).TINY, directory)
    return directory


def logits_of(directory: Path, **options: Any) -> torch.Tensor:
    return follow(load(directory, backend="cpu", **options), random_ids(LENGTH, 199, 1), [LENGTH])


@pytest.mark.sampled(9)
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_quantised_weights_are_packed_and_mapped(
    quantization: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = logits_of(directory)
    first = logits_of(directory, quantization=quantization, save_packed=True)
    assert list(directory.glob(f"headrace-{quantization}-*.packed"))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits_of(directory, quantization=quantization), first)
    assert "is not used" not in caplog.text
    assert 0 < (first - plain).std() < (0.5 if quantization == "int8" else 1.5) * plain.std()


@pytest.mark.sampled(5, 3)
def test_what_a_config_leaves_out_is_what_transformers_takes(directory: Path, tmp_path: Path) -> None:
    """The test model's own config.json has the numbers of `TINY` alone; transformers wrote all that it took instead."""
    config = json.loads((directory / "config.json").read_text())
    tiny = models.find(config["model_type"]).TINY
    assert len(tiny) < len(config)
    rewritten(directory, tmp_path, lambda tensors, _: (tensors, tiny))
    assert torch.equal(logits_of(tmp_path), logits_of(directory))


def rewritten(source: Path, target: Path, change: Any) -> Path:
    """A checkpoint with the tensors and the config that `change` returns."""
    tensors, config = change(load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text()))
    target.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture")
    save_random(models.find("qwen3_moe").TINY, directory)
    return directory


def test_layers_named_by_letters_have_the_bits_of_those_named_by_words(tmp_path: Path) -> None:
    """As the releases of Nemotron-H name them."""
    save_random(models.find("nemotron_h").TINY, tmp_path / "words")
    letters = {"hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5, "layers_block_type": None}
    rewritten(tmp_path / "words", tmp_path / "letters", lambda tensors, config: (tensors, config | letters))
    assert torch.equal(logits_of(tmp_path / "letters"), logits_of(tmp_path / "words"))
    wrong = letters | {"hybrid_override_pattern": "ME*?M"}
    rewritten(tmp_path / "words", tmp_path / "wrong", lambda tensors, config: (tensors, config | wrong))
    with pytest.raises(CheckpointError, match=r"hybrid_override_pattern is 'ME\*\?M', expected letters of ME\*-"):
        load(tmp_path / "wrong", backend="cpu")


def test_experts_in_one_tensor_have_the_bits_of_those_apart(mixture: Path, tmp_path: Path) -> None:
    def stack(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Any:
        others = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        for layer in (0, 2, 3):
            stem = f"model.layers.{layer}.mlp.experts"
            experts = [[tensors[f"{stem}.{e}.{part}_proj.weight"] for part in ("gate", "up")] for e in range(11)]
            others[f"{stem}.gate_up_proj"] = torch.stack([torch.cat(parts) for parts in experts])
            others[f"{stem}.down_proj"] = torch.stack([tensors[f"{stem}.{e}.down_proj.weight"] for e in range(11)])
        return others, config

    stacked = rewritten(mixture, tmp_path / "stacked", stack)
    assert torch.equal(logits_of(stacked), logits_of(mixture))
    assert torch.equal(logits_of(stacked, quantization="int8"), logits_of(mixture, quantization="int8"))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_a_text_below_a_prefix_is_found_and_towers_are_left_out(
    prefix: str, mixture: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def nest(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Any:
        names = {name: name.replace("model.", prefix, 1) for name in tensors}
        tower = {"vision_tower.blocks.0.weight": torch.ones(3, 3), "multi_modal_projector.bias": torch.ones(3)}
        outer = {"model_type": "wrapped_in_images", "text_config": config, "dtype": "float32"}
        return {names[name]: tensor for name, tensor in tensors.items()} | tower, outer

    nested = rewritten(mixture, tmp_path / "nested", nest)
    with caplog.at_level(logging.INFO):
        assert torch.equal(logits_of(nested), logits_of(mixture))
    assert "2 tensors belong to towers" in caplog.text


TOWERS: dict[str, dict[str, Any]] = {
    "mistral3": {
        "vision_config": {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                          "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14},
    },
    "llama4": {
        "vision_config": {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                          "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
                          "image_size": 28, "patch_size": 14},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("outer", "inner"), [("mistral3", "ministral3"), ("mistral3", "mistral"), ("llama4", "llama4_text")]
)
def test_the_text_of_a_model_for_images_equals_transformers(outer: str, inner: str, tmp_path: Path) -> None:
    """The outer type has no file: the inner one runs."""
    config = {"model_type": outer, "text_config": models.find(inner).TINY, **TOWERS[outer]}
    theirs = save_random(config, tmp_path)
    token_ids = random_ids(60, 199, 1)
    with torch.inference_mode():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    actual = follow(load(tmp_path, backend="cpu"), token_ids, [7, 53])
    assert (actual - expected).abs().max() <= 1e-4
    assert expected.std() > 0.3


def test_control_a_tensor_of_neither_text_nor_tower_is_refused(mixture: Path, tmp_path: Path) -> None:
    more = rewritten(mixture, tmp_path / "more", lambda t, c: (t | {"model.visualiser.weight": torch.ones(3)}, c))
    with pytest.raises(CheckpointError, match=r"no place in the model: model\.visualiser\.weight"):
        logits_of(more)


def test_a_refusal_lists_the_types_that_run(mixture: Path, tmp_path: Path) -> None:
    other = rewritten(mixture, tmp_path / "other", lambda t, c: (t, c | {"model_type": "qwen3_moee"}))
    with pytest.raises(CheckpointError, match=r"'qwen3_moee' is not supported; supported are .*qwen3_moe, "):
        logits_of(other)


def test_experts_of_mxfp4_are_read_from_their_blocks(tmp_path: Path) -> None:
    """Blocks as releases of gpt-oss have them, beside a checkpoint of the floats that they stand for."""
    config = models.find("gpt_oss").TINY | {"hidden_size": 64, "intermediate_size": 32}
    save_random(config, tmp_path / "floats")
    generator = torch.Generator().manual_seed(5)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = torch.cat([levels, -levels])

    def as_blocks(tensors: dict[str, torch.Tensor], values: dict[str, Any], blocks: bool) -> Any:
        generator.manual_seed(5)
        stored_tensors = dict(tensors)
        for name, tensor in tensors.items():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                continue
            num, num_in, num_out = tensor.shape
            codes = torch.randint(0, 16, (num, num_out, num_in // 32, 32), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 125, (num, num_out, num_in // 32), generator=generator, dtype=torch.uint8)
            del stored_tensors[name]
            if blocks:
                stored_tensors[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
                stored_tensors[f"{name}_scales"] = scales
            else:
                weight = levels[codes.long()] * torch.exp2(scales.float() - 127)[..., None]
                stored_tensors[name] = weight.flatten(2).transpose(1, 2)
        method = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
        return stored_tensors, values | (method if blocks else {})

    floats = rewritten(tmp_path / "floats", tmp_path / "wide", lambda t, c: as_blocks(t, c, False))
    blocks = rewritten(tmp_path / "floats", tmp_path / "blocks", lambda t, c: as_blocks(t, c, True))
    actual, expected = (logits_of(path, activations=act) for path, act in ((blocks, "16bit"), (floats, "auto")))
    assert (actual - expected).abs().max() < 1e-4
    assert expected.std() > 0.3


def test_experts_of_qwen3_vl_may_be_stored_either_way(tmp_path: Path) -> None:
    """Releases have each as [in, out], transformers writes them as [out, in]; their shape says which it is."""
    written = tmp_path / "written"
    save_random(models.find("qwen3_vl_moe").TINY, written)

    def turned(tensors: Any, config: Any) -> Any:
        names = [name for name in tensors if re.search(r"experts\.\w+_proj$", name)]
        assert names
        return tensors | {name: tensors[name].transpose(1, 2) for name in names}, config

    released = rewritten(written, tmp_path / "released", turned)
    assert torch.equal(logits_of(released), logits_of(written))
    assert torch.equal(logits_of(released, quantization="int8"), logits_of(written, quantization="int8"))

    def cut(tensors: Any, config: Any) -> Any:
        return {k: v[:, :-1] if k.endswith("experts.down_proj") else v for k, v in tensors.items()}, config

    with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj\.weight has shape"):
        logits_of(rewritten(written, tmp_path / "wrong", cut))
