"""Quantises a checkpoint one decoder layer after the other; a run that was interrupted can be resumed.

For each decoder layer: run the calibration text through it to measure the inputs of its linear layers; let the method
move scales and choose codes; write the layer as one file; then read that file back and run the text through the
quantised layer, so that the next layer gets the inputs that it will have in use (Frantar et al. 2023, section 4). In
memory are one decoder layer in float32, the second moments of its inputs, and the activations between two layers.

A resumed run reads the finished layers back in the same way, and so comes to the same bytes. Knows directories; must
not know the command line or tokenizers. Called by `cli.quantize`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace import hub, models
from headrace.backends.step import Chunks
from headrace.backends.torch_ref.batch import ForwardBatch, make_forward_batch
from headrace.backends.torch_ref.cache import LayerCache, make_caches
from headrace.backends.torch_ref.tensors import DTYPES, tensor
from headrace.checkpoint.mapped import MappedFile, choose_dtype, read_config
from headrace.checkpoint.tensors import Checkpoint
from headrace.models.config import ModelConfig
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.arrays import PLAIN, type_name
from headrace.quant.base import QWeight
from headrace.quantize import grid, shards, training
from headrace.quantize.base import TRAINED, Layer, LayerShape, Method, Options, Statistics, find_method, find_writer
from headrace.quantize.state import STATE, State
from headrace.quantize.tracing import LazyMatrix, LazyWeights, TracingBackend

REPORT = "quantize-report.json"
WHOLE = "model.safetensors"
MOST_MERGED = 2**31
"""Bytes of a checkpoint whose files, one for each layer while it is written, become one in the end."""
VERSION = 1
LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
MAX_ROWS = 2048
"""Tokens of the calibration text that go through a layer at once, or one sequence if it is longer."""
BLOCK = 128

Progress = Callable[[int, int, str], None]
"""Called with (decoder layers done, in all, the linear layer that comes next or "")."""


@dataclass(slots=True)
class Report:
    """errors: for each linear layer the size of its outputs' error on the calibration text as a share of the outputs'
    (of its weights without calibration). groups: inputs of each that share a scale. num_bytes: of the weights' files.
    kl: of a model that was trained, nats a token from the plain one, when rounded to nearest and now."""

    errors: dict[str, float] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0
    num_calibration_tokens: int = 0
    kl: tuple[float, float] | None = None


class Batch(NamedTuple):
    """Some sequences of the calibration text: their rows, where in all rows they are, and blocks of cache needed."""

    rows: ForwardBatch
    place: slice
    num_blocks: int


def quantise_checkpoint(
    source: Path,
    out: Path,
    options: Options,
    layout: str,
    calibration: Sequence[Sequence[int]] = (),
    progress: Progress | None = None,
) -> Report:
    """Write the checkpoint directory `source` to `out`, its linear layers quantised (the head is left as it is).

    calibration: token ids of each piece of text; some methods need it, for all others it measures the errors. Raises
    `RequestError` for invalid options, and for an `out` that holds something else; `CheckpointError` for a checkpoint
    that cannot be read or has shapes that the layout cannot hold.
    """
    return QuantizeRun(source, out, options, layout, calibration, progress).run()


def train_checkpoint(
    source: Path, out: Path, options: Options, layout: str, calibration: Sequence[Sequence[int]], progress: Progress
) -> None:
    """Do the training of a method that has one, which `quantise_checkpoint` then goes on from. Raises as it does."""
    run = QuantizeRun(source, out, options, layout, calibration, None, progress)
    run.state.open()
    run.train()


def verify_checkpoint(source: Path, options: Options, layout: str) -> int:
    """Raise the errors of `quantise_checkpoint`, except for the calibration text, before any work. Return the bytes
    that it will write, scales and zero points left out."""
    return QuantizeRun(source, Path(), options, layout, None, None).num_bytes()


class QuantizeRun:
    """The quantisation of one checkpoint `source` to `out`."""

    def __init__(
        self,
        source: Path,
        out: Path,
        options: Options,
        layout: str,
        calibration: Sequence[Sequence[int]] | None,
        progress: Progress | None,
        on_step: Progress | None = None,
    ) -> None:
        """calibration: None for a run that is verified only."""
        self.method: Method = find_method(options.method)
        self.writer = find_writer(layout)
        self.layout, self.options = layout, self.method.verify(options)
        self.writer.verify(self.options)
        self.source, self.out, self.progress = source, out, progress or (lambda num_done, total, name: None)
        self.on_step = on_step
        self.values = _read_values(source)
        self.checkpoint = Checkpoint(source)
        self.dtype = DTYPES[choose_dtype("auto", self.checkpoint, self.values)]
        self.options = dataclasses.replace(self.options, scale_dtype=self.writer.scale_dtype(self.dtype))
        backend = TracingBackend()
        self.ops = backend.tracing
        self.weights = LazyWeights(self.checkpoint, backend)
        module, config = models.find(self.values["model_type"]), ModelConfig(self.values)
        longest = max((len(piece) for piece in calibration or ()), default=0)
        if longest > config.max_positions():
            raise RequestError("calibration", longest, f"pieces of at most {config.max_positions()} tokens")
        self.model: Any = module.Model(config, self.weights, self.ops, max(longest, 2))
        self.weights.finish()
        self.num_layers = len(self.model.layers)
        self.shapes = {
            name: LayerShape(num_out, matrix.num_in, matrix.transposed)
            for matrix in self.weights.matrices
            if not matrix.plain
            for name, num_out in zip(matrix.names, matrix.num_outs, strict=True)
        }
        common = math.gcd(*(shape.num_in for shape in self.shapes.values()))
        if self.options.follows_widths:
            self._follow(common)
        for name, shape in self.shapes.items():
            grid.group_of(self.options, shape.num_in, name, common)
        self.writer.verify_model(source, self.shapes, self.options)
        if self.method.CALIBRATED and calibration is not None and not calibration:
            raise RequestError("calibration", None, f"a text for method {options.method}")
        self.calibration = _in_vocabulary(calibration or (), self.model.vocab_size)
        plain_layers = [name for matrix in self.weights.matrices if matrix.plain for name in matrix.names]
        # `read` needs it before all layers are written; no layout has anything in it that is known only then.
        self.quantization_config = self.writer.quantization_config(self.options, [*plain_layers, "lm_head"])
        self.state = State(out, self._fingerprint(layout), self.num_layers)

    def _follow(self, common: int) -> None:
        """Lower the group to one that divides `common`. Where only tiny ones do, leave it to the error that says so."""
        group = grid.largest_group(common, self.options.group_size) if self.options.group_size > 0 else 0
        if group >= grid.LEAST_GROUP and common % self.options.group_size:
            self.options = self.method.verify(dataclasses.replace(self.options, group_size=group))
            self.writer.verify(self.options)

    def num_bytes(self) -> int:
        """Bytes of the weights' files, scales and zero points left out."""
        codes = sum(self.options.bits * shape.num_out * shape.num_in for shape in self.shapes.values()) // 8
        quantised = {f"{name}.weight" for name in self.shapes}
        entries = [self.checkpoint.entry(name) for name in self.checkpoint.names if name not in quantised]
        return codes + sum(entry.end - entry.begin for entry in entries)

    def run(self) -> Report:
        self.state.open()
        num_done = self.state.num_done
        if self.options.method in TRAINED:
            self.train()
        with torch.inference_mode():
            hidden, batches, kv = self._embedded()
            for i in range(self.num_layers):
                self.progress(i, self.num_layers, "")
                if i >= num_done:
                    self._quantise(i, hidden, batches, kv)
                if batches and i + 1 < self.num_layers and num_done < self.num_layers:
                    self._read_back(i)
                    hidden = self._run_layer(i, hidden, batches, kv)
                self.ops.weights, self.ops.biases = {}, {}
                self.checkpoint.release()
            if num_done <= self.num_layers:
                names = [name for name in self.checkpoint.names if _layer_of(name) is None]
                file = self.state.file_of(self.num_layers)
                shards.write(self.out / file, {name: self._stored(name) for name in names})
                self.state.add(file, names, {})
        return self._finish()

    def _finish(self) -> Report:
        copy_others(self.source, self.out)
        groups = {name: grid.group_of(self.options, shape.num_in, name) for name, shape in self.shapes.items()}
        report = Report(self.state.errors, groups, num_calibration_tokens=sum(map(len, self.calibration)))
        report.kl = self.method.kl if isinstance(self.method, training.Trained) else None
        values: dict[str, Any] = {"method": self.options.method, "options": _as_json(self.options)}
        values |= {"num_calibration_tokens": report.num_calibration_tokens, "errors": report.errors, "groups": groups}
        values |= {"kl": report.kl} if report.kl else {}
        shards.write_json(self.out / REPORT, values)
        files, parts = self.state.files, list[Path]()
        if self.num_bytes() <= MOST_MERGED and self.layout != "gguf":
            # The index names the one file; parts of a killed run that are left beside it are not read.
            shards.merge(self.out, list(files), WHOLE)
            parts = [self.out / file for file in files]
            files = {WHOLE: [name for names in files.values() for name in names]}
        self.writer.finish(self.out, files, self.values | {"quantization_config": self.quantization_config})
        (self.out / STATE).unlink()
        (self.out / training.FILE).unlink(missing_ok=True)
        for part in parts:
            part.unlink()
        paths = [path for kind in ("*.safetensors", "*.gguf") for path in self.out.glob(kind)]
        report.num_bytes = sum(path.stat().st_size for path in paths)
        self.progress(self.num_layers, self.num_layers, "")
        return report

    def _fingerprint(self, layout: str) -> str:
        """Return a digest of the inputs of the result: the checkpoint's files, options, layout, and the calibration
        text."""
        files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.checkpoint.files]
        values = [VERSION, files, self.values, layout, _as_json(self.options), self.calibration]
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()

    def _embedded(self) -> tuple[Tensor, list[Batch], list[LayerCache]]:
        """Return the calibration text's rows as inputs of the first decoder layer [rows, hidden]."""
        return self._enter([] if self.options.method in TRAINED else self.calibration)

    def _enter(self, pieces: list[list[int]]) -> tuple[Tensor, list[Batch], list[LayerCache]]:
        batches, shapes = list(_batches(pieces)), list(self.model.cache_shapes)
        if not batches:
            return torch.empty(0, 0), [], []
        if any(shape.source is not None for shape in shapes):
            raise CheckpointError(
                "layers of the model read the cache of others: methods with a calibration text can not"
            )
        parts, num_blocks = [self.model.enter(batch.rows) for batch in batches], max(b.num_blocks for b in batches)
        # One cache for all layers of a shape, because one layer runs at a time.
        shapes = [shape._replace(kind=0) for shape in shapes]
        caches = {
            shape: make_caches([shape], [num_blocks], BLOCK, "float32", torch.device("cpu"))[0] for shape in set(shapes)
        }
        return torch.cat(parts), batches, [caches[shape] for shape in shapes]

    def train(self) -> None:
        """Let the whole model learn; its codes replace the method. Resumes what an interrupted run has learned."""
        first = self.calibration[0][: training.LENGTH]
        with torch.inference_mode():
            hidden, batches, kv = self._enter([first])
            for i in range(self.num_layers):
                self._load(i)
                hidden = self._run_layer(i, hidden, batches, kv)
            states = self.model.final(hidden, torch.arange(len(first)))
        state_file = training.StateFile(self.out / training.FILE, self.state.fingerprint)
        source = training.Source(self._stored, self.checkpoint.names, self.values)
        self.method = training.trained(source, self.options, self.calibration, states, state_file, self.on_step)

    def _run_layer(self, i: int, hidden: Tensor, batches: list[Batch], kv: list[LayerCache]) -> Tensor:
        out = torch.empty_like(hidden)
        for batch in batches:
            out[batch.place] = self.model.layers[i](hidden[batch.place], batch.rows, kv)
            self.ops.forget()
        return out

    def _stored(self, name: str) -> Tensor:
        """Return a view of a tensor of the source. Nobody may write to it."""
        return tensor(self.checkpoint.array(name))

    def _matrices(self, i: int) -> list[LazyMatrix]:
        return [matrix for matrix in self.weights.matrices if _layer_of(matrix.names[0]) == i]

    def _quantise(self, i: int, hidden: Tensor, batches: list[Batch], kv: list[LayerCache]) -> None:
        layer = self._load(i)
        if batches:
            self._measure(i, layer, hidden, batches, kv)
        self.method.prepare(layer, self.options)
        changed = {f"{name}.weight": norm.to(self.dtype) for name, norm in layer.norms.items()}
        changed |= {f"{name}.bias": bias.to(self.dtype) for name, bias in layer.biases.items()}
        tensors: dict[str, Tensor] = {}
        for name in self.checkpoint.names:
            if _layer_of(name) == i and name.removesuffix(".weight") not in layer.weights:
                stored = self._stored(name)
                new = changed.get(name)
                # A tensor that did not change is written as it is, whatever its dtype.
                tensors[name] = stored if new is None or torch.equal(new.float(), stored.float()) else new
        errors: dict[str, float] = {}
        weights: dict[str, QWeight] = {}
        for name, weight in layer.weights.items():
            self.progress(i, self.num_layers, name)
            statistics = layer.statistics.get(name)
            codes = self.method.quantise(weight, statistics, self.options, name)
            errors[name] = _error(weight, codes, statistics)
            tensors |= self.writer.tensors(name, codes, self.options)
            weights[name] = codes
        file = self.state.file_of(i)
        shards.write(self.out / file, tensors)
        self._verify(file, weights)
        self.state.add(file, list(tensors), errors)

    def _load(self, i: int) -> Layer:
        """Decoder layer `i` of the source: into the operators, and as the working set of the method."""
        layer = Layer({}, stored=self.dtype)
        plain: dict[str, Tensor] = {}
        for matrix in self._matrices(i):
            for name, num_out in zip(matrix.names, matrix.num_outs, strict=True):
                weight = _turned(self._stored(f"{name}.weight"), matrix)
                if tuple(weight.shape) != (num_out, matrix.num_in) or type_name(weight) not in PLAIN:
                    raise CheckpointError(
                        f"{name}.weight has shape {list(weight.shape)} and dtype {type_name(weight)}, expected floats "
                        f"[{num_out}, {matrix.num_in}]"
                    )
                floats = weight.float().clone(memory_format=torch.contiguous_format)
                (layer.weights if name in self.shapes else plain)[name] = floats
                if matrix.bias:
                    layer.biases[name] = self._stored(f"{name}.bias").float().clone()
        for full, norm in self.weights.norms.items():
            name = full.removesuffix(".weight")
            if _layer_of(full) == i and full != name:
                norm.copy_(self._stored(full))
                layer.norms[name] = norm.clone()
        self.ops.weights, self.ops.biases = layer.weights | plain, dict(layer.biases)
        return layer

    def _measure(self, i: int, layer: Layer, hidden: Tensor, batches: list[Batch], kv: list[LayerCache]) -> None:
        """Fill in the layer's statistics and folds."""
        ops = self.ops
        ops.statistics, ops.fed, ops.recording = {}, {}, True
        try:
            self._run_layer(i, hidden, batches, kv)
        finally:
            ops.recording = False
        for matrix in self._matrices(i):
            for name in matrix.names:
                if name in layer.weights:
                    layer.statistics[name] = ops.statistics.get(matrix.names[0], Statistics(matrix.num_in))
        layer.offsets = {name: ops.offsets.get(name, 0.0) for name in layer.norms}
        inside = layer.weights.keys() | layer.norms.keys()
        layer.folds = [
            fold for fold in ops.folds() if fold.before in inside and all(name in layer.weights for name in fold.after)
        ]
        ops.statistics, ops.fed = {}, {}

    def _verify(self, file: str, weights: dict[str, QWeight]) -> None:
        """Raises `CheckpointError` unless the file reads back as `weights`, to the bit."""
        tensors = _File(self.out / file)
        for name, weight in weights.items():
            codes = self.writer.read(tensors, name, self.quantization_config)
            if not torch.equal(tensor(codes.dequantize()), weight.dequantize()):
                raise CheckpointError(f"{self.out / file}: {name} is not read back as it was written")

    def _read_back(self, i: int) -> None:
        """Read decoder layer `i` of `out` into the operators."""
        file = _File(self.out / self.state.file_of(i))
        weights: dict[str, Tensor] = {}
        biases: dict[str, Tensor] = {}
        for matrix in self._matrices(i):
            for name in matrix.names:
                if name in self.shapes:
                    weights[name] = tensor(self.writer.read(file, name, self.quantization_config).dequantize())
                else:
                    weights[name] = _turned(tensor(file(f"{name}.weight")), matrix).float()
                if matrix.bias:
                    biases[name] = tensor(file(f"{name}.bias")).float()
        for name, norm in self.weights.norms.items():
            if _layer_of(name) == i:
                norm.copy_(tensor(file(name)))
        self.ops.weights, self.ops.biases = weights, biases


class _File:
    """`quant.base.Tensors` of one file."""

    def __init__(self, path: Path) -> None:
        self._file = MappedFile(path)

    def __call__(self, name: str) -> NDArray[Any]:
        if name not in self._file.entries:
            raise CheckpointError(f"{self._file.path} lacks {name}")
        return self._file.array(name)

    def has(self, name: str) -> bool:
        return name in self._file.entries

    def notes(self, name: str) -> Mapping[str, str]:
        return self._file.metadata


def _read_values(source: Path) -> dict[str, Any]:
    if source.is_file():
        raise CheckpointError(f"{source} is a GGUF file; headrace quantises directories of safetensors")
    values = read_config(source, models.names())
    if values.get("quantization_config") is not None:
        raise CheckpointError(f"{source}: config.json has a quantization_config: these weights are quantised already")
    return values


def _in_vocabulary(calibration: Sequence[Sequence[int]], vocab_size: int) -> list[list[int]]:
    pieces = [list(piece) for piece in calibration if len(piece)]
    worst = max((token_id for piece in pieces for token_id in piece), default=0)
    if worst >= vocab_size:
        raise RequestError("calibration", worst, f"token ids below {vocab_size}, the model's vocabulary")
    return pieces


def _batches(calibration: list[list[int]]) -> Iterable[Batch]:
    row, pieces = 0, list[list[int]]()
    for piece, following in itertools.zip_longest(calibration, calibration[1:], fillvalue=()):
        pieces.append(list(piece))
        num_rows = sum(map(len, pieces))
        if following and num_rows + len(following) <= MAX_ROWS:
            continue
        ends = list(itertools.accumulate((-(-len(each) // BLOCK) for each in pieces), initial=0))
        tables = [list(range(*span)) for span in itertools.pairwise(ends)]
        rows = make_forward_batch(
            Chunks([0] * len(pieces), pieces, tables, states_in=[-1] * len(pieces)), BLOCK, torch.device("cpu")
        )
        yield Batch(rows, slice(row, row + num_rows), ends[-1])
        row, pieces = row + num_rows, []


def _turned(stored: Tensor, matrix: LazyMatrix) -> Tensor:
    """[out, in]."""
    return stored.t() if matrix.transposed and stored.dim() == 2 else stored


def _layer_of(name: str) -> int | None:
    match = LAYER.search(name)
    return None if match is None else int(match.group(1))


def _error(weight: Tensor, codes: QWeight, statistics: Statistics | None) -> float:
    difference = codes.dequantize() - weight
    if statistics is None or not statistics.num_rows:
        return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(weight).clamp_min(1e-30))
    error = torch.sum(torch.mm(difference, statistics.hessian) * difference).clamp_min(0)
    size = torch.sum(torch.mm(weight, statistics.hessian) * weight).clamp_min(1e-30)
    return float(torch.sqrt(error / size))


def _as_json(options: Options) -> dict[str, Any]:
    return dataclasses.asdict(options) | {"scale_dtype": str(options.scale_dtype).removeprefix("torch.")}


def copy_others(source: Path, out: Path) -> None:
    """Copy the tokenizer and the other files, apart from the weights, that headrace reads."""
    for pattern in hub.PATTERNS:
        for path in sorted(source.glob(pattern)):
            if path.suffix != ".safetensors" and path.name not in ("config.json", shards.INDEX, STATE, REPORT):
                shutil.copyfile(path, out / path.name)
