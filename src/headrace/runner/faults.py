"""Whose fault an exception in a step is. What one request causes ends that request; what all cause ends the engine.

The runner computes the halves of a step that failed, down to single requests. Those that fail alone own the
fault, unless every one does: then it is the device's or the engine's own. Knows no tensors; called by the runner alone.
"""

from __future__ import annotations

import logging

from headrace.protocol.step import StepResult

logger = logging.getLogger("headrace.engine")

INTERNAL = "internal_error: "
NO_MEMORY = "out_of_memory: "
NOT_FINITE = "numerical_error: the model's logits are not finite"
NO_THREAD = "can't start new thread"
"""What Python says when the system has no memory or no number left for one."""
MOST_ALONE = 3
"""So many steps in a row in which nobody but single, failing requests were computed are the engine's fault."""


class Blame:
    """Reasons for the chunks that failed in a step, and the verdict on the step as a whole."""

    def __init__(self) -> None:
        self._num_in_row = 0
        self._error: BaseException | None = None

    def reason(self, error: BaseException, num_rows: int = 0) -> str:
        """Why a chunk fails that `error` was raised for; "" for what nobody's request can be blamed for.

        `num_rows`: of the only chunk that was computed. One that computes a single row needs no more than any other: if
        there is no memory for that, there is none for anybody, and a new process may find some.
        """
        if is_out_of_memory(error):
            if num_rows == 1:
                return ""
            # Not itself, whose traceback holds what filled the memory.
            self._error = MemoryError(str(error))
            return f"{NO_MEMORY}{error}"
        if isinstance(error, ImportError | OSError) or str(error) == NO_THREAD:
            # The process's surroundings: a library that finds no memory to be loaded into, no file left to open.
            return ""
        # The grammars' library is Rust, whose panics are no Exceptions.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            return ""
        self._error = error
        logger.error("a part of a step failed", exc_info=error)
        return f"{INTERNAL}{type(error).__name__}"

    def settle(self, result: StepResult, num_chunks: int) -> None:
        """The step of so many chunks is over. Raises the error that all of them ran into."""
        error, self._error = self._error, None
        num_failed = sum(reason.startswith((INTERNAL, NO_MEMORY)) for reason in result.errors.values())
        if not num_failed or num_failed < num_chunks or error is None:
            self._num_in_row = 0
            return
        # One request may be too large for the memory, and another after it; that is no fault of the engine's.
        self._num_in_row += not isinstance(error, MemoryError)
        if num_chunks > 1 or self._num_in_row >= MOST_ALONE:
            raise error


def is_out_of_memory(error: BaseException) -> bool:
    """Python's and numpy's kind, a GPU's kind, and the words by which torch tells it of a CPU."""
    kind = type(error).__name__
    return isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in str(error)
