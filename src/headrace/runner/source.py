"""Opens what a model's weights are read from: a packed file that fits, else the checkpoint itself.

Torch is imported only if the checkpoint must be read, which is why this is not in `loader`. Called by `runner.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.backends.base import Backend
from headrace.quant.schemes import parse
from headrace.runner.mapped import MappedCheckpoint

if TYPE_CHECKING:
    from headrace.runner.loader import Weights


@contextmanager
def open_weights(
    checkpoint: MappedCheckpoint,
    backend: Backend,
    quantization_config: Any,
    quantization: str | None,
    save_packed: bool,
    on_tensor: Callable[[int, int], None],
) -> Iterator[Weights]:
    """The weights of `checkpoint` as a model file asks for them, quantised on the way if `quantization` says so.

    Raises `CheckpointError`, or `RequestError` for a quantization that does not exist.
    """
    from headrace.runner.loader import Checkpoint, Weights

    wanted = None if quantization is None else parse(quantization)
    yield Weights(Checkpoint(checkpoint.directory), backend, quantization_config, on_tensor, quantization=wanted)
