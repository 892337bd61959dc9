"""What the readers of weights share: names, progress whose cost does not grow, and pages that are given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.torch import save_file
from tests.formats.gguf.models import convert
from tests.support.checkpoints import llama_tensors, write_llama
from tests.support.packing import ToyBackend, found, make_model, save

from headrace import gguf, hub
from headrace.backends.torch_ref import TorchRef
from headrace.checkpoint import gguf_config
from headrace.checkpoint.gguf_source import GGUFWeights
from headrace.checkpoint.loader import SafetensorsWeights
from headrace.checkpoint.mapped import MappedCheckpoint
from headrace.checkpoint.packed_weights import PackedWeights
from headrace.checkpoint.quantising import Loading
from headrace.checkpoint.reader import RELEASE_BYTES, Parts, Reader, ResidentBytes
from headrace.checkpoint.tensors import Checkpoint
from headrace.models.weights import Linear, Weights
from headrace.protocol.errors import CheckpointError
from headrace.quant.schemes import Scheme

NUM_TENSORS = 600


class Name(str):
    """A string that counts how often it is compared."""

    __slots__ = ()
    num_compared: ClassVar[int] = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Name.num_compared += 1
        return str.__eq__(self, other)


class CountedCheckpoint(Checkpoint):
    @property
    def names(self) -> list[str]:
        return [Name(name) for name in super().names]


def take_quadratically(parts: Parts, name: str, take: Callable[[Parts, str], bool] = Parts.take) -> bool:
    """Look through all names anew for each tensor."""
    assert [each for each in parts.names if each == name]
    return take(parts, name)


def num_comparisons(directory: Path, num_tensors: int) -> int:
    """Comparisons of names while `num_tensors` tensors are loaded, for each of them."""
    directory.mkdir()
    names = [f"layers.{i}.norm.weight" for i in range(num_tensors)]
    save_file({name: torch.ones(1) for name in names}, directory / "model.safetensors")
    progress: list[tuple[int, int]] = []
    loading = Loading(lambda *n: progress.append(n))
    weights = SafetensorsWeights(CountedCheckpoint(directory), TorchRef("cpu", "float32"), loading=loading)
    Name.num_compared = 0
    for name in names:
        weights.tensor(name, (1,))
    weights.finish()
    assert progress == [(i + 1, num_tensors) for i in range(num_tensors)]
    return Name.num_compared // num_tensors


def test_a_tensor_costs_the_same_however_many_there_are(tmp_path: Path) -> None:
    few = num_comparisons(tmp_path / "few", NUM_TENSORS // 10)
    assert num_comparisons(tmp_path / "many", NUM_TENSORS) == few < 10


def test_control_counting_anew_for_each_tensor_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parts, "take", take_quadratically)
    assert num_comparisons(tmp_path / "many", NUM_TENSORS) > NUM_TENSORS // 4


Progress = list[tuple[int, int]]


def of_safetensors(directory: Path, progress: Progress) -> tuple[Reader, Any]:
    backend = TorchRef("cpu", "float32")
    return SafetensorsWeights(Checkpoint(directory), backend, loading=Loading(lambda *n: progress.append(n))), backend


def of_packed(directory: Path, progress: Progress) -> tuple[Reader, Any]:
    save(directory, None)
    file, backend = found(directory, None), ToyBackend()
    assert file is not None
    return PackedWeights(file, MappedCheckpoint(directory), backend, lambda *n: progress.append(n)), backend


def of_gguf(directory: Path, progress: Progress) -> tuple[Reader, Any]:
    file, backend = gguf.read(convert(directory, directory / "model.gguf")), TorchRef("cpu", "float32")
    return GGUFWeights(file, gguf_config.read(file), backend, Loading(lambda *n: progress.append(n))), backend


READERS = pytest.mark.parametrize("reader_of", [of_safetensors, of_packed, of_gguf])


@READERS
def test_every_reader_is_the_models_weights(reader_of: Any, tmp_path: Path) -> None:
    progress: Progress = []
    reader, backend = reader_of(write_llama(tmp_path), progress)
    assert Weights in type(reader).__mro__
    assert (reader.has("model.norm.weight"), reader.has("model.norm")) == (True, False)
    assert (reader.has_prefix("model.layers.1."), reader.has_prefix("model.layers.2.")) == (True, False)
    assert not progress
    make_model(tmp_path, reader, backend)  # finishes
    assert progress == sorted(progress)
    assert progress[-1][0] == progress[-1][1]


@READERS
def test_a_part_that_the_model_does_not_take_is_named(reader_of: Any, tmp_path: Path) -> None:
    reader, _ = reader_of(write_llama(tmp_path), [])
    norms = [name for name in llama_tensors() if "norm" in name and name != "model.norm.weight"]
    for name in norms:
        reader.tensor(name, (32,))
    with pytest.raises(CheckpointError, match=r"tensors of .* have no place|which the model did not ask for"):
        reader.finish()


@READERS
def test_a_missing_tensor_is_named(reader_of: Any, tmp_path: Path) -> None:
    reader, _ = reader_of(write_llama(tmp_path), [])
    with pytest.raises(CheckpointError, match="norm_of_nothing"):
        reader.tensor("norm_of_nothing.weight", (32,))


class NoKernels(TorchRef):
    schemes = frozenset()


def blocks_of(name: str, weight: Any) -> tuple[Any, Any]:
    """The projections of q in Q4_0, all else as floats."""
    kind = GGMLQuantizationType.Q4_0
    return (quantize(weight, kind), kind) if name.endswith("attn_q.weight") else (weight, None)


@pytest.mark.parametrize(
    ("backend", "scheme"), [(TorchRef, Scheme("i4", 32)), (NoKernels, Scheme("f", dtype="float32"))]
)
def test_blocks_reach_a_backend_without_kernels_as_floats(
    backend: type[TorchRef], scheme: Scheme, tmp_path: Path
) -> None:
    file = gguf.read(convert(write_llama(tmp_path), tmp_path / "model.gguf", blocks_of))
    name, reading = "model.layers.0.self_attn.q_proj", gguf_config.read(file)
    num_out, num_in = reading.parts[f"{name}.weight"].shape
    matrix, expected = (
        GGUFWeights(file, reading, device, exact=exact).matrix(Linear([name], num_in, [num_out]))
        for device, exact in ((backend("cpu", "float32"), False), (TorchRef("cpu", "float32"), True))
    )
    assert matrix.scheme == scheme
    assert torch.equal(matrix.dense(), expected.dense())  # float16 holds the scales of Q4_0


def test_pages_are_released_before_more_than_the_limit_is_read() -> None:
    resident = ResidentBytes()
    assert not resident.exceeded_by(RELEASE_BYTES)
    assert resident.exceeded_by(1)
    assert not resident.exceeded_by(RELEASE_BYTES)


def test_an_index_of_many_files_is_read_with_the_same_work_for_each_tensor(tmp_path: Path) -> None:
    """Each shard's names are looked up once, not the whole index once for each shard."""
    num_files = 40
    file_of = {}
    for i in range(num_files):
        save_file({f"t{i}.{j}": torch.zeros(1) for j in range(3)}, tmp_path / f"s{i}.safetensors")
        file_of |= {f"t{i}.{j}": Name(f"s{i}.safetensors") for j in range(3)}
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with mock.patch.object(hub, "read_json", return_value={"weight_map": file_of}):
        Name.num_compared = 0
        MappedCheckpoint(tmp_path)
    assert Name.num_compared <= 4 * len(file_of)
