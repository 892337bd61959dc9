"""Reads a checkpoint directory: config.json and *.safetensors, mapped and not read, one layer's tensors at a time.

Nothing in the directory is executed: pickled weights (.bin, .pt, .pth, .ckpt) are refused (S-03), `auto_map` is never
followed (S-04), and an index may name files of the directory only (S-28). `Weights` is what a model file sees. Knows no
requests. Called by `runner.build`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.backends.base import Backend, Matrix
from headrace.errors import CheckpointError
from headrace.hub import read_json
from headrace.quant.base import PLAIN, QWeight, find_format

logger = logging.getLogger(__name__)

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Buffers that old checkpoints stored and nobody needs, and the second name of tied weights.
IGNORED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")


def read_config(directory: Path, known: Sequence[str]) -> dict[str, Any]:
    """config.json, refused if its model_type is not among `known`. Raises `CheckpointError`."""
    config = read_json(directory / "config.json")
    model_type = config.get("model_type")
    if model_type in known:
        if "auto_map" in config:
            logger.info("config.json has auto_map; headrace runs its own %s and no code of the checkpoint", model_type)
        return config
    reason = f"config.json: model_type {model_type!r} is not supported; supported are {', '.join(known)}"
    if "auto_map" in config:
        reason += ". The checkpoint brings code of its own (auto_map), and headrace never runs a checkpoint's code"
    raise CheckpointError(reason)


class Checkpoint:
    """The tensors of a directory by name. Opening maps the files; `tensor` is a view of the mapping."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Any] = {}
        self._file_of = self._index()

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def tensor(self, name: str) -> Tensor:
        found: Tensor = self._open(self._file_of[name]).get_tensor(name)
        return found

    def dtype(self, name: str) -> str:
        """Name of a tensor's dtype as safetensors writes it: F32, BF16, ..."""
        return str(self._open(self._file_of[name]).get_slice(name).get_dtype())

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.directory / file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.directory / file} is not a readable safetensors file: {error}") from error
        return self._files[file]

    def _index(self) -> dict[str, str]:
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            return self._sharded(index)
        present = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if "model.safetensors" in present:
            present = ["model.safetensors"]
        if not present:
            raise CheckpointError(self._why_nothing())
        file_of: dict[str, str] = {}
        for file in present:
            for name in self._open(file).keys():  # noqa: SIM118 (not a dict)
                if name in file_of:
                    raise CheckpointError(
                        f"{name} is in {file_of[name]} and in {file}, and there is no index to choose by"
                    )
                file_of[name] = file
        return file_of

    def _sharded(self, index: Path) -> dict[str, str]:
        file_of = read_json(index).get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise CheckpointError(f"{index}: weight_map is missing or empty")
        for name, file in file_of.items():
            if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
                raise CheckpointError(
                    f"{index}: {name} is said to be in {file!r}; only *.safetensors beside the index are read"
                )
        for file in sorted(set(file_of.values())):
            if not (self.directory / file).is_file():
                raise CheckpointError(f"{self.directory / file} is missing; {index.name} names it")
            missing = {name for name, f in file_of.items() if f == file} - set(self._open(file).keys())
            if missing:
                raise CheckpointError(f"{file} lacks {min(missing)}, which {index.name} says is in it")
        return dict(file_of)

    def _why_nothing(self) -> str:
        pickled = sorted(p.name for p in self.directory.iterdir() if p.suffix in PICKLED)
        if pickled:
            return (
                f"{self.directory} has its weights in {pickled[0]}, a pickle. Reading a pickle can run any code, so "
                "headrace does not; convert it: model.save_pretrained(directory, safe_serialization=True)"
            )
        return f"{self.directory} has no *.safetensors"


def choose_dtype(wanted: str, checkpoint: Checkpoint) -> torch.dtype:
    """`wanted`, or for "auto" that of most of the checkpoint's tensors (float32 for other kinds)."""
    if wanted != "auto":
        return DTYPES[wanted]
    counts: dict[str, int] = {}
    for name in checkpoint.names:
        dtype = checkpoint.dtype(name)
        counts[dtype] = counts.get(dtype, 0) + 1
    most = max(counts, key=lambda dtype: counts[dtype])
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(most, torch.float32)


class Weights:
    """A checkpoint as a model file sees it: ask for tensors by name and shape, then `finish`.

    Args:
        on_tensor: called with (tensors taken so far, tensors in all) as loading goes on.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        quantization_config: dict[str, Any] | None = None,
        on_tensor: Callable[[int, int], None] | None = None,
    ) -> None:
        self.device = backend.device
        self._checkpoint = checkpoint
        self._backend = backend
        self._format = find_format(quantization_config)
        self._quantization_config = quantization_config or {}
        self._names = set(checkpoint.names)
        self._taken: set[str] = set()
        self._on_tensor = on_tensor

    def has(self, name: str) -> bool:
        return name in self._names

    def has_prefix(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._names)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A small tensor (norm, bias, embedding) on the device in the model's dtype."""
        found = self._mapped(name)
        self._verify(name, tuple(found.shape), shape)
        if found.dtype not in PLAIN:
            raise CheckpointError(f"{name} is stored as {found.dtype}, expected plain floats")
        return found.to(self._backend.device, self._backend.dtype, copy=True)

    def linear(
        self,
        names: Sequence[str],
        num_in: int,
        num_outs: Sequence[int],
        *,
        bias: bool = False,
        transposed: bool = False,
    ) -> Matrix:
        """One matrix out of the linear layers `names`, stacked along their outputs.

        `transposed`: the checkpoint has [in, out] (GPT-2's Conv1D).
        """
        parts = []
        for name, num_out in zip(names, num_outs, strict=True):
            weight = self._format.read(self._mapped, name, self._quantization_config)
            if transposed:
                self._verify(f"{name}.weight", weight.shape, (num_in, num_out))
                weight = QWeight(weight.dequantize().t())
            self._verify(f"{name}.weight", weight.shape, (num_out, num_in))
            parts.append(weight)
        biases = [self.tensor(f"{n}.bias", (size,)) for n, size in zip(names, num_outs, strict=True)] if bias else None
        return self._backend.ops.matrix(parts, None if biases is None else torch.cat(biases))

    def ends(self, embedding: str, head: str, shape: tuple[int, int], *, tied: bool) -> tuple[Tensor, Matrix]:
        """The embedding table [V, H] and the head's matrix. Tied ones are stored once, under either name, or twice."""
        first, last = f"{embedding}.weight", f"{head}.weight"
        if tied and self.has(first) and self.has(last) and not torch.equal(self._mapped(first), self._mapped(last)):
            # A fine-tune that moved them apart and left the flag; transformers reads it alike.
            logger.warning("tie_word_embeddings is true, but %s and %s differ: both are used", first, last)
            tied = False
        if tied and not self.has(first) and self.has(last):
            first = last
        table = self.tensor(first, shape)
        if not tied:
            return table, self.linear([head], shape[1], [shape[0]])
        self._taken.add(last)
        return table, self._backend.ops.matrix([QWeight(table)])

    def finish(self) -> None:
        """Raise `CheckpointError` if the checkpoint has tensors that the model did not ask for."""
        left = sorted(name for name in self._names - self._taken if not IGNORED.fullmatch(name))
        if left:
            shown = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
            raise CheckpointError(f"{len(left)} tensors of the checkpoint have no place in the model: {shown}")

    def _mapped(self, name: str) -> Tensor:
        if name not in self._names:
            raise CheckpointError(f"{name} is missing from the checkpoint")
        self._taken.add(name)
        if self._on_tensor is not None:
            self._on_tensor(len(self._taken & self._names), len(self._names))
        return self._checkpoint.tensor(name)

    def _verify(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise CheckpointError(f"{name} has shape {list(shape)}, the config makes it {list(expected)}")
