"""Reads a checkpoint directory with torch: mapped and not read whole, one layer's tensors at a time.

Nothing in the directory is executed: pickled weights (.bin, .pt, .pth, .ckpt) are refused (S-03), `auto_map` is never
followed (S-04), and an index may name files of the directory only (S-28); see `checkpoint.mapped`. `Weights` is what a
model file sees; it quantises on the way if that is asked for. Knows no requests. Called by `checkpoint.source`.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from headrace.backends.base import Array, Backend, Matrix
from headrace.checkpoint.mapped import MappedCheckpoint, MappedFile, Names, stacked_name
from headrace.protocol.errors import CheckpointError
from headrace.quant import rtn
from headrace.quant.base import PLAIN, QWeight, Stacked, concatenated, find_format
from headrace.quant.fit import Fit, fit_of, fitted
from headrace.quant.placements import Placements
from headrace.quant.schemes import Quantization, Scheme

if TYPE_CHECKING:
    from headrace.checkpoint.packed import PackedWriter
    from headrace.checkpoint.packing import Packable

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.uint8,
}  # fmt: skip
RELEASE_BYTES = 32 * 2**20
"""Bytes of the checkpoint that may lie in memory beside the slab that is being read."""
# Buffers that old checkpoints stored and nobody needs, and the second name of tied weights.
IGNORED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")


class Checkpoint(MappedCheckpoint):
    """The tensors of a directory by name, as torch sees them."""

    _read = 0

    def about_to_read(self, num_bytes: int) -> None:
        """Give pages back now and then, so that the files are never in memory as a whole."""
        self._read += num_bytes
        if self._read > RELEASE_BYTES:
            self.release()
            self._read = 0

    def tensor(self, name: str) -> Tensor:
        """A view of the mapping. Nobody may write to it."""
        return view_of(self.file(name), name)


def view_of(file: MappedFile, name: str) -> Tensor:
    """A tensor of a mapped file, without a copy. Nobody may write to it."""
    entry, buffer = file.entries[name], file.buffer
    dtype = STORED[entry.dtype]
    count = (entry.end - entry.begin) // dtype.itemsize
    if not count:
        return torch.zeros(entry.shape, dtype=dtype)
    if entry.begin % dtype.itemsize:  # legal in the format, never seen
        return torch.frombuffer(bytearray(buffer[entry.begin : entry.end]), dtype=dtype).reshape(entry.shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=entry.begin)
    return flat.reshape(entry.shape)


class CheckpointMatrix(Stacked):
    """A `MatrixSource` over mapped tensors: rows are quantised, fitted to a kernel, or cast to the model's dtype, as
    they are asked for.

    scheme: what plain floats are to become. dtype: of what is dequantised, if no kernel takes the checkpoint's codes
    or `plain` forbids them.
    """

    def __init__(
        self, name: str, parts: Sequence[QWeight], checkpoint: Checkpoint, scheme: Scheme, dtype: str, plain: bool
    ) -> None:
        self.fit: Fit | None = None
        if any(part.scales is not None for part in parts):
            self.fit = Fit(None, "this layer is kept plain") if plain else fit_of(parts)
            scheme = self.fit.scheme or Scheme("f", dtype=dtype)
        super().__init__(name, parts, scheme)
        self.columns = None if self.fit is None else self.fit.columns
        self._checkpoint = checkpoint

    def slab(self, first: int, last: int) -> QWeight:
        self._checkpoint.about_to_read((last - first) * self.num_in * self.parts[0].codes.itemsize)
        pieces = self.pieces(first, last)
        if self.scheme.kind == "f":
            dtype = DTYPES[self.scheme.dtype]
            # Nothing that is stored in the model's own dtype goes through a wider one.
            rows = [(piece.codes if piece.scales is None else piece.dequantize()).to(dtype) for piece in pieces]
            return QWeight((rows[0] if len(rows) == 1 else torch.cat(rows)).contiguous())
        if self.fit is not None:
            made = [fitted(piece, self.scheme) for piece in pieces]
            return made[0] if len(made) == 1 else concatenated(made)
        codes = [piece.codes for piece in pieces]
        return rtn.quantise(codes[0] if len(codes) == 1 else torch.cat(codes), self.scheme, self.name)


class Weights:
    """A checkpoint as a model file sees it: ask for tensors by name and shape, then `finish`.

    Args:
        on_tensor: called with (tensors taken so far, tensors in all) as loading goes on.
        quantization: what to do with the linear layers and the head; None leaves them in the backend's dtype.
        writer: is given everything in the form in which it can be mapped next time; the backend's matrices must be
            `checkpoint.packed.Packable`.
        spare: names of tensors that somebody else reads.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        quantization_config: dict[str, Any] | None = None,
        on_tensor: Callable[[int, int], None] | None = None,
        quantization: Quantization | None = None,
        writer: PackedWriter | None = None,
        spare: re.Pattern[str] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._backend = backend
        self._format = find_format(quantization_config)
        self._quantization_config = quantization_config or {}
        self._tensors = _Tensors(self)
        self._placements = Placements(str(self._quantization_config.get("quant_method")), backend.dtype)
        self._new_bytes = 0
        self._quantization = quantization
        self._writer = writer
        self._spare = spare
        self._names = set(checkpoint.names)
        names = Names(self._names)
        self.has, self.has_prefix = names.has, names.has_prefix
        self.constant = backend.constant  # of numbers that the model worked out itself (a rope table)
        self._taken: set[str] = set()
        self._on_tensor = on_tensor
        if quantization is not None and quantization_config is not None:
            raise CheckpointError(
                f"config.json has a quantization_config ({quantization_config.get('quant_method')}): these weights are "
                f"quantised already, load them without quantization {quantization.name!r}"
            )

    def tensor(self, name: str, shape: tuple[int, ...]) -> Array:
        """A small tensor (norm, bias) as the backend's operators take it."""
        found = self._plain(name, shape)
        if self._writer is not None:
            self._writer.tensor(name, found.float().numpy())
        return self._backend.constant(found)

    def table(self, name: str, shape: tuple[int, int]) -> Array:
        """An embedding table [V, H]; the backend may leave it mapped."""
        return self._backend.table(self._plain(name, shape))

    def linear(
        self,
        names: Sequence[str],
        num_in: int,
        num_outs: Sequence[int],
        *,
        bias: bool = False,
        transposed: bool = False,
        plain: bool = False,
        within: tuple[int, int] | None = None,
    ) -> Matrix:
        """One matrix out of the linear layers `names`, stacked along their outputs.

        `transposed`: the checkpoint has [in, out] (GPT-2's Conv1D). `plain`: not to be quantised (a router). `within`
        (first, all): the layers have that many inputs in all, of which `num_in` from the first on are wanted.
        """
        scheme = None if self._quantization is None or plain else self._quantization.layer
        return self._linear(
            names, num_in, num_outs, scheme, bias=bias, transposed=transposed, plain=plain, within=within
        )

    def ends(self, embedding: str, head: str, shape: tuple[int, int], *, tied: bool) -> tuple[Array, Matrix]:
        """The embedding table [V, H] and the head's matrix. Tied ones are stored once, under either name, or twice."""
        first, last = f"{embedding}.weight", f"{head}.weight"
        if tied and self.has(first) and self.has(last) and not torch.equal(self._mapped(first), self._mapped(last)):
            # A fine-tune that moved them apart and left the flag; transformers reads it alike.
            logger.warning("tie_word_embeddings is true, but %s and %s differ: both are used", first, last)
            tied = False
        scheme = None if self._quantization is None else self._quantization.head
        if tied and not self.has(first) and self.has(last):
            first = last
        table = self.table(first, shape)
        if not tied:
            return table, self._linear([head], shape[1], [shape[0]], scheme)
        self._taken.add(last)
        return table, self._matrix(head, [QWeight(self._plain(first, shape))], scheme, None)

    def finish(self) -> None:
        """Raise `CheckpointError` if the checkpoint has tensors that the model did not ask for."""
        left = sorted(name for name in self._names - self._taken if not self._is_spare(name))
        if left:
            shown = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
            raise CheckpointError(f"{len(left)} tensors of the checkpoint have no place in the model: {shown}")
        self._placements.log()
        self._checkpoint.release()

    def _is_spare(self, name: str) -> bool:
        if self._spare is not None and self._spare.fullmatch(name):
            return True
        if IGNORED.fullmatch(name) or self._format.SPARE.fullmatch(name):
            return True
        # Writers of quantised layers left biases of zeros where the model has none.
        return bool(self._quantization_config) and name.endswith(".bias") and not self._checkpoint.tensor(name).any()

    def _linear(
        self,
        names: Sequence[str],
        num_in: int,
        num_outs: Sequence[int],
        scheme: Scheme | None,
        *,
        bias: bool = False,
        transposed: bool = False,
        plain: bool = False,
        within: tuple[int, int] | None = None,
    ) -> Matrix:
        parts = []
        self._new_bytes = 0
        for name, num_out in zip(names, num_outs, strict=True):
            weight = self._format.read(self._tensors, name, self._quantization_config)
            if transposed and weight.scales is None:  # codes lie [out, in] in every layout
                self._verify(f"{name}.weight", weight.shape, (num_in, num_out))
                weight = QWeight(weight.codes.t())
            first, width = within or (0, num_in)
            self._verify(f"{name}.weight", weight.shape, (num_out, width))
            if within is not None:
                numbers = weight.codes if weight.scales is None else weight.dequantize()
                weight = QWeight(numbers[:, first : first + num_in])
            parts.append(weight)
        biases = [self._plain(f"{n}.bias", (size,)) for n, size in zip(names, num_outs, strict=True)] if bias else None
        return self._matrix(stacked_name(names), parts, scheme, None if biases is None else torch.cat(biases), plain)

    def _matrix(
        self, name: str, parts: list[QWeight], scheme: Scheme | None, bias: Tensor | None, plain: bool = False
    ) -> Matrix:
        dtype = self._backend.dtype
        source = CheckpointMatrix(name, parts, self._checkpoint, scheme or Scheme("f", dtype=dtype), dtype, plain)
        if source.fit is not None:
            self._placements.add(source, source.fit, self._new_bytes)
        own = None if bias is None else self._backend.constant(bias)
        matrix: Matrix = self._backend.ops.matrix(source, own)
        if self._writer is not None and source.columns is not None:
            self._writer.give_up(f"{name} has outliers, which a packed file has no place for")
        elif self._writer is not None:
            self._writer.matrix(name, cast("Packable", matrix), None if bias is None else bias.float().numpy())
        return matrix

    def _plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self._mapped(name)
        self._verify(name, tuple(found.shape), shape)
        if found.dtype not in PLAIN:
            raise CheckpointError(f"{name} is stored as {found.dtype}, expected plain floats")
        return found

    def _mapped(self, name: str) -> Tensor:
        if name not in self._names:
            raise CheckpointError(f"{name} is missing from the checkpoint")
        if name not in self._taken:
            entry = self._checkpoint.entry(name)
            self._new_bytes += entry.end - entry.begin
        self._taken.add(name)
        if self._on_tensor is not None:
            self._on_tensor(len(self._taken & self._names), len(self._names))
        return self._checkpoint.tensor(name)

    def _verify(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise CheckpointError(f"{name} has shape {list(shape)}, the config makes it {list(expected)}")


class _Tensors:
    """`quant.base.Tensors` of a `Weights`."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __call__(self, name: str) -> Tensor:
        return self._weights._mapped(name)

    def has(self, name: str) -> bool:
        return self._weights.has(name)
