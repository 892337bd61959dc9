"""Finds the request to which an exception in a step belongs. A fault of one request ends that request, a fault of all
ends the engine.

The runner computes the halves of a step that failed, down to single requests. The fault belongs to the requests that
fail alone, unless all do: then it is a fault of the device or the engine. Knows no tensors; called by the runner.
"""

from __future__ import annotations

import logging

from headrace.protocol.errors import EngineDeadError
from headrace.protocol.step import StepResult

logger = logging.getLogger("headrace.engine")

INTERNAL = "internal_error: "
NO_MEMORY = "out_of_memory: "
NOT_FINITE = "numerical_error: the model's logits are not finite"
NO_THREAD = "can't start new thread"
"""Python's message where the system has no memory or no number for another thread."""
LOST_DEVICE = ("CUDA error", "Triton Error [CUDA]")
"""The beginnings of torch's and Triton's messages for errors of a GPU."""
MOST_ALONE = 3
"""Steps in a row, each with one request that fails, after which the fault is the engine's."""


class StepFaults:
    """Reasons for the chunks that failed in a step, and whether the step as a whole fails. A step without errors must
    be settled only if `is_open`: one before it failed, or a part of it."""

    def __init__(self) -> None:
        self.is_open = False
        self._num_in_row = 0
        self._error: BaseException | None = None

    def reason(self, error: BaseException, num_rows: int = 0) -> str:
        """Return why the chunk fails that raised `error`; "" for an error that belongs to no request.

        `num_rows`: of the only chunk that was computed. A chunk of a single row needs as little memory as any: if there
        is none for it, there is none for any request, and a new process may have some.
        """
        self.is_open = True
        if is_out_of_memory(error):
            if num_rows == 1:
                return ""
            # Not the error itself, whose traceback holds the objects that filled the memory.
            self._error = MemoryError(str(error))
            return f"{NO_MEMORY}{error}"
        if (
            isinstance(error, ImportError | OSError | EngineDeadError)
            or str(error) == NO_THREAD
            or is_device_lost(error)
        ):
            # Faults around the process: no memory to load a library into, no more files to open, a device that failed,
            # other processes that compute the model with this one.
            return ""
        # The grammars' library is Rust, whose panics are no Exceptions.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            return ""
        self._error = error
        logger.error("a part of a step failed", exc_info=error)
        return f"{INTERNAL}{type(error).__name__}"

    def settle(self, result: StepResult, num_chunks: int) -> None:
        """End the step of so many chunks. Raises the error that all of them ran into."""
        error, self._error = self._error, None
        num_failed = sum(reason.startswith((INTERNAL, NO_MEMORY)) for reason in result.column("error").values())
        if not num_failed or num_failed < num_chunks or error is None:
            self._num_in_row, self.is_open = 0, False
            return
        # One request may be too large for the memory, and another after it: no fault of the engine.
        self._num_in_row += not isinstance(error, MemoryError)
        if num_chunks > 1 or self._num_in_row >= MOST_ALONE:
            raise error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is Python's or numpy's error, a GPU's, or has torch's message for a CPU."""
    kind = type(error).__name__
    return isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in str(error)


def is_device_lost(error: BaseException) -> bool:
    """Whether a GPU reported an error that stays with the process: every later call fails too, only a new process
    helps."""
    return type(error).__name__ == "AcceleratorError" or (
        isinstance(error, RuntimeError) and str(error).startswith(LOST_DEVICE)
    )
