"""The errors that headrace raises on purpose.

Every layer may raise them; `serve` turns them into HTTP statuses by `status` and `code`. An error that belongs
to one request names the field, the value and the bound, so that the client can correct it.
Imports nothing of headrace.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Root of all deliberate errors. `status` is the HTTP status, `code` the machine-readable name, `retry_after` the
    seconds after which the same call may succeed (None: unknown)."""

    status = 500
    code = "internal_error"
    retry_after: int | None = None


class RequestError(HeadraceError):
    """A request that cannot be served as it stands (HTTP 400).

    `field` is the parameter's public name, `value` the value in the request (shortened), `bound` the allowed values.
    """

    status = 400
    code = "invalid_request_error"

    def __init__(self, field: str, value: object, bound: str, code: str | None = None) -> None:
        self.field = field
        self.bound = bound
        self.value = value
        if code is not None:
            self.code = code
        try:
            quoted = repr(value)
        except ValueError:  # an int of more digits than Python will print
            quoted = "a number of thousands of digits"
        if len(quoted) > 80:
            quoted = quoted[:77] + "..."
        super().__init__(self.sentence(quoted))

    def sentence(self, quoted: str) -> str:
        """Return the message; `quoted` is the value, shortened."""
        return f"{self.field}: {quoted} is not allowed; it must be {self.bound}"

    def renamed(self, field: str) -> RequestError:
        """Return the same error with `field` as the name of the parameter."""
        return type(self)(field, self.value, self.bound, self.code)


class UnsupportedError(RequestError):
    """A field that other servers have and that is not supported here (HTTP 400). `bound` says why, or names the
    alternative."""

    def sentence(self, quoted: str) -> str:
        return f"{self.field}: not supported here; {self.bound}"


class ContextLengthError(RequestError):
    """The prompt, or prompt + max_tokens, does not fit the context or the KV cache (HTTP 400).

    By OpenAI's own words and the code in the message, clients find out that they have to shorten the prompt.
    `num_prompt`: its tokens, or at least so many. `num_answer`: those that the request gives the answer.
    """

    code = "context_length_exceeded"

    def __init__(
        self, field: str, value: object, bound: str, max_model_len: int, num_prompt: int, num_answer: int = 0
    ) -> None:
        self.max_model_len, self.num_prompt, self.num_answer = max_model_len, num_prompt, num_answer
        super().__init__(field, value, bound)

    def sentence(self, quoted: str) -> str:
        least = "" if isinstance(self.value, int) else "at least "
        return (
            f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
            f"{least}{self.num_prompt + self.num_answer} tokens ({self.num_prompt} in the prompt, {self.num_answer} in "
            f"the completion; {self.code}). {super().sentence(quoted)}"
        )

    def renamed(self, field: str) -> ContextLengthError:
        sizes = self.max_model_len, self.num_prompt, self.num_answer
        return type(self)(field, self.value, self.bound, *sizes)


class ModelNotFoundError(HeadraceError):
    """No such model: unknown name in a request, or no such directory or hub id at start (HTTP 404)."""

    status = 404
    code = "model_not_found"


class CheckpointError(HeadraceError):
    """A checkpoint that headrace refuses to read, with the reason and a remedy.

    Its message may quote what strangers wrote: it is text that can be sent, and the middle of a long one is left out.
    """

    code = "bad_checkpoint"
    most_letters = 1000

    def __init__(self, message: str) -> None:
        text = message.encode("utf-8", "backslashreplace").decode()
        super().__init__(text if len(text) <= self.most_letters else f"{text[:700]} ... {text[-290:]}")


class NativeCallError(HeadraceError):
    """A library in native code broke down over one input (HTTP 500). The caller's next input may work."""


class QueueFullError(HeadraceError):
    """Admission refused: too many requests or tokens wait already (HTTP 429, with `retry_after` seconds)."""

    status = 429
    code = "queue_full"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class DeadlineError(HeadraceError):
    """A request had no more time: HTTP 408 if the engine had not begun with it, else 504."""

    code = "deadline_exceeded"

    def __init__(self, message: str, started: bool) -> None:
        self.status = 504 if started else 408
        super().__init__(message)


class EngineDeadError(HeadraceError):
    """The engine is gone and could not be restarted (HTTP 503)."""

    status = 503
    code = "engine_dead"


class EngineLostError(EngineDeadError):
    """The process of an engine ended without an error of its own, as by a SIGKILL: another may load."""


class ChildFailedError(HeadraceError):
    """A process that works for the server failed through no fault of the request, more than once (HTTP 503)."""

    status = 503
    code = "process_failed"
    retry_after = 1


class InvariantError(HeadraceError):
    """A `check()` found the accounting broken. Names the invariant (I-1 ... I-20)."""

    code = "invariant_violated"

    def __init__(self, invariant: str, message: str) -> None:
        self.invariant = invariant
        super().__init__(f"{invariant}: {message}")
