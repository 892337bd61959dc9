"""Opens the source of a model's weights: a packed file that fits, else the checkpoint itself.

It must not import torch. Called by `engine.library.load`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple, TypeVar

from headrace.backends.base import Backend
from headrace.checkpoint.packed import Form, PackedWriter, find, losses_path
from headrace.checkpoint.packed_weights import PackedWeights
from headrace.checkpoint.packing import Origin, has_layouts
from headrace.checkpoint.reader import Progress, Reader
from headrace.protocol.errors import CheckpointError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the directory or file of a model before the text of each `CheckpointError` that does not name it."""
    try:
        yield
    except CheckpointError as error:
        text = str(error)
        if str(path) in text or (path.is_file() and path.name in text):
            raise
        raise CheckpointError(f"{path}: {text}") from error


class Packing(NamedTuple):
    """A load of a checkpoint, by a packed file where one fits.

    quantization: its name, as requested. save_packed: a packed file is written if none fits. max_model_len: of the
    model that is built. in_parts: the backend takes parts of the matrices, so a packed file is not read as a whole.
    verifies: a packed file's tensors are compared with their sums.
    """

    checkpoint: Origin
    backend: Backend
    quantization: str | None
    on_tensor: Progress
    max_model_len: int
    save_packed: bool = False
    in_parts: bool = False
    verifies: bool = True


def with_weights(build: Callable[[Reader], T], read: Callable[[PackedWriter | None], Reader], packing: Packing) -> T:
    """Return the model that `build` makes of a checkpoint's weights; it has to take all of them.

    The weights come from a packed file beside the model if one fits, else from the reader that `read` opens. Raises
    `CheckpointError`.
    """
    checkpoint, backend, save_packed = packing.checkpoint, packing.backend, packing.save_packed
    layouts = backend.layouts()
    form = Form(packing.quantization or "", backend.dtype, layouts)
    if has_layouts(backend):
        packed = find(checkpoint, form, backend)
        if packed is not None:
            try:
                if not packing.in_parts:
                    packed.read(backend.allocate)
                if packing.verifies:
                    packed.verify()
                weights = PackedWeights(packed, checkpoint, backend, packing.on_tensor)
                model = build(weights)
                weights.finish()
                backend.keep_losses(losses_path(packed.path), packing.max_model_len, save_packed)
                return model
            except CheckpointError as error:
                again = "and the file is written again" if save_packed else "--save-packed writes the file again"
                logger.warning(
                    "%s is not used, the weights are read from the checkpoint, %s: %s", packed.path, again, error
                )
    with PackedWriter(checkpoint, form) if save_packed and layouts else nullcontext() as writer:
        model = unpacked_weights(build, read, writer)
    if writer is not None and writer.path is not None and has_layouts(backend):
        backend.keep_losses(losses_path(writer.path), packing.max_model_len, may_write=True)
    return model


def unpacked_weights(
    build: Callable[[Reader], T], read: Callable[[PackedWriter | None], Reader], writer: PackedWriter | None = None
) -> T:
    """Return the model that `build` makes of the weights that `read` opens, without a look for packed files."""
    reader = read(writer)
    model = build(reader)
    reader.finish()
    return model
