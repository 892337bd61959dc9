"""`TextClient` opens generations, with a tokenizer and an engine client; `Generation` is all answers of one call.

Takes prompts and returns text as it comes; knows no HTTP. Long texts are tokenised on a worker thread, so that the
event loop stays quick (R-03). Called by `async_llm.AsyncLLM` and `serve.apis.openai.completions`.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

import msgspec

from headrace.engine import context
from headrace.engine.client import EngineClient
from headrace.engine.context import deadline, fresh_id
from headrace.engine.fair_worker import FairWorker
from headrace.engine.open_requests import RequestStream
from headrace.engine.tenants import Limits, Rates, salted
from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.errors import DeadlineError, HeadraceError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import EngineInfo, Finish, Request
from headrace.text.beams import make_search, parts_of
from headrace.text.grammars import GrammarChecker
from headrace.text.inputs import (
    Prompt,
    RequestOptions,
    is_text,
    make_requests,
    prompt_ids,
    prompt_size,
    with_token_ids,
)
from headrace.text.outputs import PART_TOKENS, Delta, RequestState, TextDelta, best
from headrace.text.pairs import pair_ids
from headrace.text.reasoning import THINK
from headrace.text.tokenizer import TextRules, Tokenizer

# Below this many characters the work takes less time than passing it to a thread.
LARGE_TEXT = 4096
# Tokens whose check takes as long as making a request does.
REQUEST_SIZE = 32
# Entries of a list that are freed at a time, fewer of those with more alternatives than most.
FREED = 256
WIDE = 32
# Of JSON, for each alternative.
ROW_BYTES = 64

T = TypeVar("T")


FAULTS = frozenset(
    "numerical_error out_of_memory structured_output_error sampling_error invalid_chunk internal_error".split()
)
"""The reasons for which the engine fails one request; its message begins with one of them and a colon."""


class RequestFailedError(HeadraceError):
    """The engine failed one request only, for the reason `code`. HTTP 500, but 400 for a request whose biases and bans
    leave no token, which would fail again."""

    def __init__(self, message: str) -> None:
        code = message.partition(":")[0]
        self.code = code if code in FAULTS else "numerical_error"
        self.status = 400 if code == "sampling_error" else 500
        super().__init__(message or "the model gave no usable numbers for this request")


class FinishObserver(Protocol):
    def on_finish(self, state: RequestState, reason: str) -> None: ...


async def in_time(work: Awaitable[T], what: str) -> T:
    """Await `work` until the deadline of the call that is being answered; `what` names the work, for the error.

    Raises `DeadlineError`."""
    end = deadline()
    try:
        async with asyncio.timeout(None if end is None else max(0.0, end - time.monotonic())) as timer:
            return await work
    except TimeoutError:
        if not timer.expired():
            raise
        context.count_late()
        raise DeadlineError(f"the request's time was over while {what}", started=False) from None


async def off_loop(size: int, work: Callable[[], T], thread: Executor | None = None) -> T:
    """Run `work` here if `size` (characters or tokens) is small, else on a worker thread, of `thread` if given."""
    if size < LARGE_TEXT:
        return work()
    run = functools.partial(contextvars.copy_context().run, work)
    return await asyncio.get_running_loop().run_in_executor(thread, run)


def free(lists: Sequence[list[Any]]) -> None:
    """Empty lists of many objects, from their ends. Freed in one go, a million objects would hold the interpreter's
    lock throughout; so call this on a worker thread, with lists that nothing else reads."""
    for each in lists:
        while each:
            top = getattr(each[-1], "top", None)
            if isinstance(top, list):  # a row that came in parts, which may have a million alternatives
                while top:
                    del top[-FREED:]
                each.pop()
                continue
            del each[-max(1, FREED // (1 + width(each) // WIDE)) :]


def width(rows: Sequence[Any]) -> int:
    """Return the alternatives in the last of `rows`, which have about as many each: 0 where rows have none. The
    bytes of a row that is JSON already say how many, about."""
    last = rows[-1] if rows else ()
    if isinstance(last, msgspec.Raw):
        return len(last) // ROW_BYTES
    each = getattr(last, "top", None) or getattr(last, "top_logprobs", None) or last
    return len(each) if isinstance(each, tuple | list | dict) else 0


def with_salt(params: SamplingParams, cache_salt: str) -> SamplingParams:
    """Return the parameters with their constraint under the caller's salt (S-24)."""
    if not isinstance(params, SamplingParams) or params.structured_outputs is None:
        return params
    constraint = msgspec.structs.replace(params.structured_outputs, cache_salt=salted(cache_salt))
    return msgspec.structs.replace(params, structured_outputs=constraint)


class TextClient:
    """Opens generations of text for prompts."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        observer: FinishObserver | None = None,
        rates: Rates | None = None,
    ) -> None:
        self.client = client
        self.rates = Rates(Limits()) if rates is None else rates
        self.tokenizer = tokenizer
        self.observer = observer
        # The texts that begin and end the model's reasoning.
        self.marks = THINK
        self._grammars: GrammarChecker | None = None
        self.worker: FairWorker | None = None
        # Encodes text in the tokenizer's process, if it has one.
        process = None if tokenizer is None else tokenizer.process
        self.encoder = None if process is None else FairWorker(process)

    @property
    def grammars(self) -> GrammarChecker:
        """The checker of constraints, made with the worker of its process when it is first needed."""
        if self._grammars is None:
            self._grammars = GrammarChecker(self.tokenizer, self.info.vocab_size, self.info.eos_token_ids)
            self.worker = FairWorker(self._grammars.process)
        return self._grammars

    async def check(self, params: SamplingParams, cache_salt: str = "") -> list[str]:
        """Check the constraint of `params` and return warnings about parts that are not enforced. Call this before
        `open`, with the same salt.

        Raises `RequestError` for a constraint that cannot be honoured, `DeadlineError`, or `ChildFailedError`.
        """
        params = with_salt(params, cache_salt)
        grammars, worker = self.grammars, self.worker
        if worker is None or grammars.is_known(params):
            return grammars.check(params)
        return await in_time(worker.run(lambda: grammars.check(params)), "its grammar was built")

    def close(self) -> None:
        """End the work on grammars and texts."""
        for worker in (self.worker, self.encoder):
            if worker is not None:
                worker.close()

    async def encoding(self, size: int, work: Callable[[], T]) -> T:
        """Return `work()`, which encodes text of `size` characters: by the tokenizer's process in the caller's turn, or
        else as `off_loop` does."""
        return await (off_loop(size, work) if self.encoder is None else self.encoder.run(work))

    def check_room(self, num_prompts: int, params: SamplingParams, beam: BeamSearchParams | None = None) -> None:
        """Raise the errors that `open` would raise now for so many prompts, however short (`RequestError`,
        `QueueFullError`, `EngineDeadError`). Call this once, before texts are rendered and tokenised."""
        if beam is None:
            self.client.check_room(num_prompts * (params.best_of or params.n))
            return
        most = self.client.admission.max_reqs
        if num_prompts * beam.beam_width > most:
            bound = f"such that prompts times beams are at most {most} in one call; there are {num_prompts} prompts"
            raise RequestError("beam_width", beam.beam_width, bound)
        self.client.check_room(num_prompts)

    @property
    def info(self) -> EngineInfo:
        return self.client.info

    async def prompt_ids(
        self, prompt: Prompt, *, add_special_tokens: bool = True, truncate_prompt_tokens: int | None = None
    ) -> tuple[str | None, list[int]]:
        """Return `inputs.prompt_ids`, computed on a thread if the prompt is long. Raises `DeadlineError` too."""
        work = functools.partial(
            prompt_ids,
            prompt,
            self.tokenizer,
            self.info,
            add_special_tokens=add_special_tokens,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return await self._tokenised(is_text(prompt), prompt_size(prompt), work)

    async def pair_ids(
        self, first: str, second: str, truncate_prompt_tokens: int | None = None, instruction: str = ""
    ) -> list[int]:
        """Return `pairs.pair_ids`, as `prompt_ids` does."""
        work = functools.partial(
            pair_ids, first, second, self.tokenizer, self.info, truncate_prompt_tokens, instruction
        )
        return await self._tokenised(True, len(first) + len(second), work)

    async def _tokenised(self, is_text: bool, size: int, work: Callable[[], T]) -> T:
        # A call may have hundreds of prompts that are short enough to be done here: others run between two of them.
        await asyncio.sleep(0)
        run = self.encoding(size, work) if is_text else off_loop(size, work)
        return await in_time(run, "its prompt was tokenised")

    async def open(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        options: RequestOptions = RequestOptions(),
        *,
        arrival_time: float | None = None,
        beam: BeamSearchParams | None = None,
        rules: TextRules = TextRules(),
    ) -> Generation:
        """Request `params.n` answers to each prompt: all of them are accepted, or none. With `options.pooling` the
        result is each prompt's hidden state instead (`RequestState.pooled`); with `beam` its best answers are searched.
        Tokenizer, marks and call_id are set here. `rules`: the checks that the answers' reader makes itself; where it
        looks for stop strings, it gets one token at a time.

        Raises `RequestError`, `QueueFullError` (a `RateLimitError` too), `DeadlineError` or `EngineDeadError`. The
        caller must close the generation.
        """
        if params.structured_outputs is not None:
            params = with_salt(params, options.cache_salt)
            self.grammars.require(params)
        arrival = time.monotonic() if arrival_time is None else arrival_time
        options = options._replace(
            cache_salt=salted(options.cache_salt), tokenizer=self.tokenizer, marks=self.marks, call_id=fresh_id()
        )
        num_tokens = sum(map(len, prompts))
        self.rates.check_tokens(num_tokens)
        meter = self.rates.meter()
        if beam is not None:
            # A search is one request with all answers to its prompt.
            self.check_room(len(prompts), params, beam)
            num_answers = num_returned = per_request = beam.num_answers
        else:
            num_answers, num_returned, per_request = params.best_of or params.n, params.n, 1

        complete = params
        if params.bad_words or params.dry_multiplier > 0.0 or params.thinking_token_budget is not None:
            # Once: its texts are the same for all prompts.
            salt = options.cache_salt
            work = functools.partial(with_token_ids, params, self.tokenizer, self.info.vocab_size, self.marks, salt)
            complete = await in_time(self.encoding(LARGE_TEXT, work), "its texts were tokenised")

        def prepare() -> tuple[list[Request], list[RequestState]]:
            groups = []
            for token_ids in prompts:
                if beam is not None:
                    groups.append([make_search(token_ids, beam, complete, self.info, options)])
                else:
                    groups.append(make_requests(token_ids, complete, self.info, options))
                self.client.verify(groups[-1])
            states = [
                RequestState(group[index // per_request], self.tokenizer, index, arrival, rules)
                for group in groups
                for index in range(num_answers)
            ]
            return [request for group in groups for request in group], states

        # The ids of texts may be many.
        size = num_tokens + REQUEST_SIZE * len(prompts) * num_answers if complete is params else LARGE_TEXT
        requests, states = await in_time(off_loop(size, prepare), "its prompts were checked")
        stream = self.client.submit(requests, arrival, deadline())
        generation = Generation(stream, states, num_answers, self.observer, num_returned, per_request)
        generation.by_token = bool(params.stop) and not rules.finds_stops
        if meter is not None:
            meter(num_tokens)
            generation.meter = meter
        return generation


def _parts(place: int, delta: Delta, by_token: bool) -> Iterator[tuple[int, Delta]]:
    return ((place, part) for part in delta.parts(by_token))


class Generation:
    """The answers of one call, flat: answer i of prompt p is `states[p * n + i]`. `num_returned` of n are returned.

    An async iterator of lists of (index in `states`, delta). Use it in an `async with`: leaving that aborts the
    requests that still run. With log-probabilities each delta has one token at most: then a reader that ends an answer,
    or says which text a token belongs to, does so alike however many tokens came at once.
    """

    def __init__(
        self,
        stream: RequestStream,
        states: list[RequestState],
        n: int,
        observer: FinishObserver | None,
        num_returned: int,
        per_request: int,
    ) -> None:
        self.states = states
        self.n = n
        self.num_returned = num_returned
        self._stream = stream
        self._per_request = per_request
        self._observer = observer
        # The last delta, and its parts that were not read yet, in the order in which they are read.
        self._deltas: list[tuple[int, Delta]] = []
        self._unread: Iterator[tuple[tuple[int, Delta] | None, ...]] = iter(())
        self._num_read = 0
        # Whether each delta has one token at most, so that a reader ends an answer alike however many came at once.
        self.by_token = False
        # Called with the number of tokens that came, where the caller has a limit.
        self.meter: Callable[[int], None] | None = None

    def of_prompt(self, place: int) -> list[RequestState]:
        """Return the answers to one prompt."""
        return self.states[place * self.n : (place + 1) * self.n]

    def best_places(self) -> list[int]:
        """Return the indices of the answers to return when all have ended: `outputs.best` of each prompt's, in
        order."""
        places = {id(state): place for place, state in enumerate(self.states)}
        groups = [self.of_prompt(prompt) for prompt in range(len(self.states) // self.n)]
        return [places[id(state)] for group in groups for state in best(group, self.num_returned)]

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[tuple[int, TextDelta]]:
        text_deltas = []
        pairs = next(self._unread, None)
        if pairs is None:
            deltas = await self._stream.__anext__()
            if self.meter is not None:
                self.meter(sum(len(delta.token_ids) for _, delta in deltas))
            self._deltas = self._places(deltas)
            pieces = (_parts(place, delta, self.by_token) for place, delta in self._deltas)
            self._unread = itertools.zip_longest(*pieces)
            pairs = next(self._unread, ())
        for place, delta in filter(None, pairs):
            self._num_read += len(delta.token_ids)
            if self._num_read >= PART_TOKENS:
                # Reading deltas that are here already does not yield to other tasks.
                self._num_read = 0
                await asyncio.sleep(0)
            if self.states[place].finish is not None:
                continue
            state = self.states[place]
            text_delta = state.feed(delta)
            if state.finish is None:
                text_deltas.append((place, text_delta))
                continue
            if delta.finish is None:
                self._stream.abort(place)
            if self._observer is not None:
                self._observer.on_finish(state, state.finish.reason)
            if state.finish.reason == "error":
                raise RequestFailedError(state.finish.message)
            text_deltas.append((place, text_delta))
        return text_deltas

    def _places(self, deltas: list[tuple[int, Delta]]) -> list[tuple[int, Delta]]:
        """Turn deltas of requests into deltas of answers: a search is one request with several answers."""
        num = self._per_request
        if num == 1 and all(delta.beams is None for _, delta in deltas):
            return deltas
        return [(i * num + place, part) for i, delta in deltas for place, part in enumerate(parts_of(delta, num))]

    def end(self, place: int, stop_reason: str | None = None) -> None:
        """End one answer now, because its reader needs no more of it, or has found a stop string."""
        state = self.states[place]
        if state.finish is not None:
            if stop_reason is not None:
                state.finish = Finish("stop", stop_reason=stop_reason)
            return
        state.finish = Finish("stop", stop_reason=stop_reason)
        state.metrics.finished_time = state.metrics.last_token_time
        self._stream.abort(place // self._per_request)
        if self._observer is not None:
            self._observer.on_finish(state, "stop")

    def close(self) -> None:
        """Abort the requests that still run. May be called twice."""
        self._stream.close()
        for state in self.states:
            if state.finish is None and not state.closed:
                state.closed = True
                if self._observer is not None:
                    self._observer.on_finish(state, "abort")

    def release(self) -> None:
        """Close, and free the log-probabilities. Call this when nothing is read from the answers any more."""
        self.close()
        holders: list[Delta | RequestState] = [*self.states]
        holders += [delta for _, delta in (*self._deltas, *self._stream.take())]
        self._deltas, self._unread = [], iter(())
        lists = []
        for holder in holders:
            lists += [holder.logprobs, holder.prompt_logprobs]
            holder.logprobs, holder.prompt_logprobs = [], []
        if sum(len(each) * (1 + width(each) // WIDE) for each in lists) > FREED:
            asyncio.get_running_loop().run_in_executor(None, free, lists)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()
