"""`EngineCore`: one scheduler, one executor, one step. A plain object without threads, sockets or text.

`step` goes one way: schedule -> run -> commit; nothing calls back. It is held by `LLM` directly, by a thread in
`engine.client.InprocClient`, and by the child process in `engine.child`; they are its only callers. The clock
is handed in, so that a simulation can hold it still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.core.scheduler import Scheduler
from headrace.core.searches import verify_search
from headrace.protocol.errors import RequestError
from headrace.protocol.step import EngineInfo, Request, ScheduledBatch, Stats, StepOutput, StepResult


class Executor(Protocol):
    """Owns the model and the KV cache's memory. `runner` has the real one, `insight.simulated` the oracle."""

    def run(self, batch: ScheduledBatch) -> StepResult:
        """Compute one step. Raises only for faults that no single request owns."""
        ...

    def close(self) -> None:
        """Give back memory and threads. May be called twice."""
        ...


class EngineCore:
    """Continuous batching over one model.

    Args:
        scheduler: decides, knows ints.
        executor: computes, knows tensors.
        info: the numbers that requests are checked against.
        clock: seconds, monotonic.
        check_every: run `Scheduler.check()` after each n-th step (0: only when idle).
        on_idle: called, by whoever drives the engine, when there is nothing to do after some work.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        info: EngineInfo,
        clock: Callable[[], float],
        check_every: int = 0,
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.info = info
        self.num_steps = 0
        self.on_idle = on_idle
        self._clock = clock
        self._check_every = check_every

    def add(self, request: Request) -> None:
        """Accept a request. Raises `RequestError` if it can not be served; nothing is kept of it then."""
        verify(request, self.info)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request early. False if it is unknown or has ended; that is no error, ends race with aborts."""
        return self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> StepOutput:
        """One turn: some tokens for some requests. Cheap and empty when there is nothing to do.

        If the executor raises, or somebody interrupts it, that goes to the caller and the step has not happened:
        its requests are waiting again, to be aborted or tried once more.
        """
        start = self._clock()
        batch = self.scheduler.schedule()
        try:
            result = self.executor.run(batch)
        except BaseException:
            self.scheduler.retract()
            raise
        output = self.scheduler.commit(batch, result)
        self.num_steps += 1
        if (self._check_every and self.num_steps % self._check_every == 0) or not self.scheduler.has_work():
            self.scheduler.check()
        output.start_time = start
        output.end_time = self._clock()
        return output

    def stats(self) -> Stats:
        return self.scheduler.stats()

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no running sequence holds."""
        self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        self.executor.close()


def verify(request: Request, info: EngineInfo) -> None:
    """The engine's own check of a request against the model, whoever sent it. Raises `RequestError`.

    The ranges of the parameters were checked when `SamplingParams` was made (also when it came off the wire); here
    are the checks that need the model: ids against the width of the logits, not of the tokenizer.
    """
    params = request.params
    if not request.prompt_token_ids:
        raise RequestError("prompt", [], "at least one token long")
    if request.pooling not in ("", "last", "mean"):
        raise RequestError("pooling", request.pooling, "last or mean")
    if request.pooling and params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs", params.prompt_logprobs, "left out of a request for hidden states")
    known = [("prompt", request.prompt_token_ids), ("resume_token_ids", request.resume_token_ids)]
    known.append(("stop_token_ids", params.stop_token_ids or []))
    known.append(("logit_bias", list(params.logit_bias or ())))
    known.append(("allowed_token_ids", params.allowed_token_ids or []))
    known.append(("dry_sequence_breakers", params.dry_sequence_breaker_ids or []))
    known.append(("trace_decode_token_ids", params.trace_decode_token_ids or []))
    known += [("bad_words", token_ids) for token_ids in params.bad_words_token_ids or ()]
    known += [("thinking_token_ids", token_ids) for token_ids in params.thinking_token_ids or ()]
    for field, token_ids in known:
        for token_id in token_ids:
            if not 0 <= token_id < info.vocab_size:
                raise RequestError(field, token_id, f"a token id from 0 to {info.vocab_size - 1}")
    for field in ("logprobs", "prompt_logprobs"):
        count = getattr(params, field)
        # -1 asks for the whole vocabulary.
        wanted = info.vocab_size if count == -1 else count
        if wanted is not None and info.max_logprobs != -1 and wanted > info.max_logprobs:
            raise RequestError(field, count, f"at most {info.max_logprobs} (--max-logprobs)")
    if request.beam is not None:
        verify_search(request, request.beam, info)
    if params.seed is None or params.max_tokens is None:
        raise RequestError("params", "seed or max_tokens unset", "complete when it reaches the engine")
