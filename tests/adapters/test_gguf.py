"""llama.cpp's adapters, written by gguf-py: the same numbers as the PEFT files that they were made from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.adapters.test_adapters import answers, engine
from tests.formats.gguf.models import convert
from tests.support.adapters import write_adapter, write_gguf
from tests.support.checkpoints import llama_tensors, write_llama
from tests.support.packing import tiny

import gguf  # isort: skip
from headrace.backends.cpu.program import TapedProgram
from headrace.checkpoint import adapters
from headrace.checkpoint.gguf_adapters import Base
from headrace.protocol.adapters import LoadAdapter
from headrace.protocol.errors import CheckpointError
from headrace.runner.runner import Runner

WEIGHTS = llama_tensors()
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def peft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("peft"), WEIGHTS, targets=ALL, rank=32, alpha=8, spread=0.05)


@pytest.mark.parametrize("backend", ["cpu", "torch_ref"])
def test_a_gguf_adapter_is_the_peft_one_it_was_made_from(backend: str, base: Path, peft: Path, tmp_path: Path) -> None:
    """To the bit, on a base from safetensors and on one from GGUF: their digests are the same."""
    file = write_gguf(peft, tmp_path / "adapter.gguf", base)
    for model in (base, convert(base, tmp_path / "base.gguf")):
        llm = engine(model, backend, enable_lora=True, max_loras=1)
        [expected] = answers(llm, [peft])
        llm.reset_prefix_cache()
        assert answers(llm, [file]) == [expected]
        assert answers(llm, [None]) != [expected]


def test_numbers_may_be_of_fewer_bits(base: Path, peft: Path, tmp_path: Path) -> None:
    llm = engine(base, "cpu", enable_lora=True)
    [expected] = answers(llm, [peft])
    for kind, bound in (("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 2e-2)):
        [got] = answers(llm, [write_gguf(peft, tmp_path / f"{kind}.gguf", base, kind)])
        assert 0 < np.abs(np.array(got[1]) - expected[1]).max() < bound


@pytest.mark.parametrize("model_type", ["qwen2", "gemma2", "phi3", "glm4", "smollm3", "deepseek_v3"])
def test_layers_of_other_families_are_those_of_their_gguf_files(model_type: str, tmp_path: Path) -> None:
    tiny(tmp_path / "base", model_type)
    llm = engine(tmp_path / "base", "cpu", enable_lora=True)
    places = cast(TapedProgram, cast(Runner, llm.core.executor).program).model.ops.adapters.places
    shapes = {f"{name}.weight": torch.zeros(place.num_out, place.num_in) for name, place in places.items()}
    path = write_adapter(tmp_path / "adapter", shapes, spread=0.1, targets=("",))
    file = write_gguf(path, tmp_path / "adapter.gguf", tmp_path / "base")
    [expected] = answers(llm, [path])
    llm.reset_prefix_cache()
    assert answers(llm, [file]) == [expected]
    assert answers(llm, [None]) != [expected]
    loaded = [llm.core.change_adapters(LoadAdapter(str(each))).adapter for each in (path, file)]
    assert loaded[0] is not None
    assert loaded[1] is not None
    assert loaded[0].num_layers == loaded[1].num_layers == len(places)


def rewrite(change: Callable[[Any, dict[str, Any]], None], **fields: Any) -> Callable[[Path], None]:
    """Write the file anew, with other metadata and tensors."""

    def apply(path: Path) -> None:
        reader = gguf.GGUFReader(path)
        tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
        values = {"type": "adapter", "adapter": "lora", "architecture": "llama"} | fields
        shutil.move(path, path.with_suffix(".old"))
        writer = gguf.GGUFWriter(path, values["architecture"])
        writer.add_string("general.type", values["type"])
        writer.add_string("adapter.type", values["adapter"])
        change(writer, tensors)
        for name, numbers in tensors.items():
            writer.add_tensor(name, numbers)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return apply


def nothing(writer: Any, tensors: dict[str, Any]) -> None:
    return None


ONE, OTHER = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"
DAMAGES: dict[str, Callable[[Path], None]] = {
    "general.type is 'model'; it must be 'adapter'": rewrite(nothing, type="model"),
    "adapter.type is 'control_vector'; it must be 'lora'": rewrite(nothing, adapter="control_vector"),
    "general.architecture is 'bert'": rewrite(nothing, architecture="bert"),
    "general.architecture is 'qwen2'; it must be that of a model of the type 'llama'": rewrite(
        nothing, architecture="qwen2"
    ),
    "invocation_tokens is 'there'": rewrite(lambda w, t: w.add_array("adapter.alora.invocation_tokens", [3])),
    "has no lora_a": rewrite(lambda w, t: t.pop(ONE)),
    "of different ranks": rewrite(lambda w, t: t.update({ONE: t[ONE][:3].copy()})),
    "of 2 dimensions": rewrite(lambda w, t: t.update({ONE: t[ONE][0].copy()})),
    "in heads of 8": rewrite(lambda w, t: t.update({OTHER: t[OTHER][:30].copy()})),
    "output.weight.lora_a is not computed here": rewrite(lambda w, t: t.update({"output.weight.lora_a": t[ONE]})),
    "blk.0.attn_norm.weight is not computed here": rewrite(
        lambda w, t: t.update({"blk.0.attn_norm.weight": np.zeros(32, np.float32)})
    ),
    "has no adapters": rewrite(lambda w, t: t.clear()),
    "type of .* is 'I32'": rewrite(lambda w, t: t.update({ONE: np.zeros((32, 32), np.int32)})),
    "magic": lambda path: cast(None, path.write_bytes(b"GGML" * 9)),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_files_that_are_damaged_are_named(message: str, base: Path, peft: Path, tmp_path: Path) -> None:
    path = write_gguf(peft, tmp_path / "adapter.gguf", base)
    facts = Base("llama", 8, 8)
    adapters.read(path, facts)
    DAMAGES[message](path)
    with pytest.raises(CheckpointError, match=message):
        adapters.read(path, facts)


def test_without_an_alpha_the_product_is_added_as_it_is(base: Path, peft: Path, tmp_path: Path) -> None:
    path = write_gguf(peft, tmp_path / "adapter.gguf", base)
    assert {layer.scale for layer in adapters.read(path).layers.values()} == {8 / 32}
    rewrite(nothing)(path)
    assert {layer.scale for layer in adapters.read(path).layers.values()} == {1.0}


def test_the_order_of_the_rows_matters(base: Path, peft: Path, tmp_path: Path) -> None:
    """The control of the first test: rows of q and k as they lie in the file are other ones."""
    path = write_gguf(peft, tmp_path / "adapter.gguf", base)
    right, raw = (adapters.read(path, facts) for facts in (Base("llama", 8, 8), None))
    assert right.digest == adapters.read(peft).digest != raw.digest
