"""The output of a request: deltas from the engine, the state that collects them, vLLM's result objects, and the parts
of a chat answer.

`RequestState.feed` is the one place where tokens become text, a stop string ends an answer, and log-probabilities and
times are collected; `LLM` calls it on its own loop, the server on an event loop. A `MessageParser` gets that text in
pieces, cut anywhere, and returns the parts that each piece adds: content, reasoning and tool calls; `reasoning` and
`tools` have the parsers. Knows no sockets and no asyncio.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from headrace.protocol.params import SamplingParams
from headrace.protocol.step import BeamResult, Finish, Request, StepOutput, TokenLogprob
from headrace.text.tokenizer import DetokenizeStream, TextRules, Tokenizer

PART_TOKENS = 256
"""Tokens that become text at a time, where many wait for a slow reader."""


class Delta(msgspec.Struct):
    """The output for one request since the last delta was read. Times are monotonic seconds of the engine's clock.

    `start_time` is the beginning of the step that first ran the request; it comes once, with `num_cached_tokens`, the
    prompt tokens found in the prefix cache. `time` is the end of the delta's last step, `first_time` and `last_time`
    are the times of its first and its last token.
    """

    time: float
    first_time: float
    last_time: float
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    start_time: float | None = None
    num_cached_tokens: int | None = None
    finish: Finish | None = None
    beams: BeamResult | None = None
    pooled: list[float] = []

    def merge(self, later: Delta) -> None:
        """Append the next delta."""
        if later.token_ids:
            self.first_time = self.first_time if self.token_ids else later.first_time
            self.last_time = later.last_time
        self.time = later.time
        # In place, so that n tokens for a slow reader take time of order n, not n squared. No other delta has these
        # lists.
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        if self.num_cached_tokens is None:
            self.start_time, self.num_cached_tokens = later.start_time, later.num_cached_tokens
        self.finish = self.finish or later.finish
        self.beams = self.beams or later.beams
        self.pooled = self.pooled or later.pooled

    def parts(self, by_token: bool = False) -> Iterator[Delta]:
        """Yield this delta cut into deltas of one token each, `by_token` or if it has log-probabilities, else of
        `PART_TOKENS`; for a search, this delta alone."""
        size, num = 1 if self.logprobs or by_token else PART_TOKENS, len(self.token_ids)
        if num <= size or self.beams is not None:
            yield self
            return
        for start in range(0, num, size):
            end = start + size
            part = Delta(
                self.time, self.first_time, self.last_time, self.token_ids[start:end], self.logprobs[start:end]
            )
            if not start:
                part.prompt_logprobs, part.start_time = self.prompt_logprobs, self.start_time
                part.num_cached_tokens = self.num_cached_tokens
            if end >= num:
                part.finish, part.pooled = self.finish, self.pooled
            yield part


def deltas_of(output: StepOutput) -> Iterator[tuple[str, Delta]]:
    """Yield, from the columns of a step, one delta for each request in it."""
    now = output.end_time
    columns = dict(zip(output.request_ids, output.token_ids, strict=True))
    rare = (output.started, output.finished, output.prompt_logprobs)
    others = {request_id for column in rare for request_id in column if request_id not in columns}
    for request_id in (*columns, *sorted(others)):
        cached = output.started.get(request_id)
        yield (
            request_id,
            Delta(
                time=now,
                first_time=now,
                last_time=now,
                token_ids=columns.get(request_id, []),
                logprobs=output.logprobs.get(request_id, []),
                prompt_logprobs=output.prompt_logprobs.get(request_id, []),
                start_time=None if cached is None else output.start_time,
                num_cached_tokens=cached,
                finish=output.finished.get(request_id),
                beams=output.beams.get(request_id),
                pooled=output.pooled.get(request_id, []),
            ),
        )


class TextDelta(NamedTuple):
    """The text and tokens that one `feed` adds to an answer. Text may lag behind the tokens, within a character."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]


class RequestMetrics(msgspec.Struct):
    """The times of a request's events, in monotonic seconds; None for an event that has not happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def prefill_time(self) -> float | None:
        return _between(self.first_scheduled_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        return _between(self.first_token_time, self.last_token_time)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """One log-probability, as vLLM gives it: natural log under the raw logits, rank 1 for the likeliest, and the
    text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct):
    """One answer, as vLLM gives it. `logprobs[i]` maps token ids to `Logprob`, the sampled token first."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct):
    """All answers to one prompt, as vLLM gives them. `prompt_logprobs[0]` is None: no token comes before it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None


class RequestState:
    """One answer while it is generated: turns deltas into text deltas, and ends at a stop string.

    Args:
        request: the complete request, as the engine has it.
        tokenizer: None for an engine without one; there is no text then, nor with `SamplingParams.detokenize` off.
        index: place among the answers to one prompt.
        arrival_time: monotonic seconds; None: now.
        rules: the rules for the text that a parser reads.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        index: int = 0,
        arrival_time: float | None = None,
        rules: TextRules = TextRules(),
    ) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.tokenizer = tokenizer
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.num_cached_tokens = 0
        self.pooled: list[float] = []
        self.finish: Finish | None = None
        # The result of a search, or of one answer of it.
        self.beams: BeamResult | None = None
        self.closed = False
        # Whether only the prompt is to be computed: the answer stays empty.
        self.only_prompt = False
        self.metrics = RequestMetrics(time.monotonic() if arrival_time is None else arrival_time)
        self._stream = (
            DetokenizeStream(tokenizer, params, request.prompt_token_ids, rules)
            if tokenizer is not None and params.detokenize
            else None
        )

    def feed(self, delta: Delta) -> TextDelta:
        """Add one delta. If `finish` is set afterwards but was not in `delta`, a stop string has ended the answer, and
        the caller must abort the request in the engine. After the end, further deltas add nothing."""
        if self.finish is not None:
            return TextDelta("", [], [])
        self._note_times(delta)
        self.prompt_logprobs += delta.prompt_logprobs
        self.pooled = self.pooled or delta.pooled
        self.beams = self.beams or delta.beams
        token_ids, logprobs = delta.token_ids, delta.logprobs
        finish = delta.finish
        if self.only_prompt:
            token_ids, logprobs = [], []
            finish = Finish("length") if finish is not None and finish.reason == "stop" else finish
        text = ""
        if self._stream is not None:
            stopped = finish is not None and finish.reason == "stop"
            text = self._stream.push(token_ids, final=finish is not None, stopped=stopped)
            if self._stream.stop_reason is not None:
                # Drop the tokens after the one that completed the stop string.
                num_kept = self._stream.num_tokens - len(self.token_ids)
                token_ids, logprobs = token_ids[:num_kept], logprobs[:num_kept]
                finish = Finish("stop", stop_reason=self._stream.stop_reason)
        self.text += text
        self.token_ids += token_ids
        self.logprobs += logprobs
        if finish is not None:
            self.finish = finish
            self.metrics.finished_time = delta.time
        return TextDelta(text, token_ids, logprobs)

    def _note_times(self, delta: Delta) -> None:
        times = self.metrics
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens
            times.first_scheduled_time = delta.start_time
        if delta.token_ids:
            if times.first_token_time is None:
                times.first_token_time = delta.first_time
            times.last_token_time = delta.last_time

    def completion(self) -> CompletionOutput:
        """Return the answer so far. The lists are copies, which do not change later."""
        has_logprobs = self.request.params.logprobs is not None
        total = sum(entry.logprob for entry in self.logprobs) if has_logprobs else None
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.beams.beams[0].cumulative_logprob if self.beams else total,
            logprobs=[self._logprobs_of(entry) for entry in self.logprobs] if has_logprobs else None,
            finish_reason=self.finish.reason if self.finish else None,
            stop_reason=self.finish.stop_reason if self.finish else None,
            seed=self.request.params.seed,
        )

    def prompt_entries(self) -> list[dict[int, Logprob] | None] | None:
        """Return the log-probabilities of the prompt's tokens as vLLM gives them, or None if not requested."""
        if self.request.params.prompt_logprobs is None:
            return None
        return [None, *(self._logprobs_of(entry) for entry in self.prompt_logprobs)]

    def _logprobs_of(self, entry: TokenLogprob) -> dict[int, Logprob]:
        by_token = {entry.token_id: self._logprob(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top, 1):
            by_token.setdefault(token_id, self._logprob(token_id, logprob, rank))
        return by_token

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, None if self.tokenizer is None else self.tokenizer.token_text(token_id)[0])


def request_output(
    states: Sequence[RequestState], request_id: str, prompt: str | None, params: SamplingParams
) -> RequestOutput:
    """Return the answers to one prompt so far, as vLLM gives them; of `best_of`, the best n at the end."""
    first = states[0]
    finished = all(state.finish is not None for state in states)
    outputs = [state.completion() for state in (best(states, params.n) if finished else states)]
    if len(states) > params.n:
        for index, output in enumerate(outputs):
            output.index = index
            # The log-probabilities were computed only to choose the best answers; their sum stays.
            output.logprobs = None if params.logprobs is None else output.logprobs
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=first.request.prompt_token_ids,
        outputs=outputs,
        finished=finished,
        prompt_logprobs=first.prompt_entries(),
        metrics=first.metrics,
        num_cached_tokens=first.num_cached_tokens,
    )


def best(states: Sequence[RequestState], n: int) -> list[RequestState]:
    """Return the `n` answers of the greatest mean log-probability per token, best first, equal ones in their order.

    The mean is OpenAI's definition of `best_of`; the sum would favour the short. An answer without a token is last.
    """
    if n == len(states):
        return list(states)

    def mean(state: RequestState) -> float:
        return sum(entry.logprob for entry in state.logprobs) / len(state.logprobs) if state.logprobs else -math.inf

    return sorted(states, key=mean, reverse=True)[:n]


# The parts of a chat answer.


class Content(msgspec.Struct, frozen=True):
    """A piece of the text for the user. `gap`: the text between it and the piece before, where an API has one text for
    all."""

    text: str
    gap: str = ""


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of the reasoning, with its `gap`."""

    text: str
    gap: str = ""


class CallPart(msgspec.Struct, frozen=True):
    """A part of a call. The first part of a call has its name; the `arguments` of all parts together are JSON text.

    `index` counts the calls of an answer from 0; `id` is the same in all parts of a call.
    """

    index: int
    id: str
    name: str | None
    arguments: str


MessagePart = Content | Reasoning | CallPart


class MessageParser(Protocol):
    """Splits the text of one answer into parts."""

    def feed(self, text: str, final: bool, cut: bool = False) -> list[MessagePart]:
        """Return the parts that have become certain. `final`: the text ends here, so nothing is held back. `cut`: a
        limit has ended the text, not the model.

        Never raises for a model's text: all that is neither reasoning nor a well-formed call is content.
        """
        ...

    @property
    def ended(self) -> bool:
        """Whether the answer is over, though the model might go on; further text is ignored."""
        ...


class ContentParser:
    """Returns all text as content."""

    ended = False

    def feed(self, text: str, final: bool, cut: bool = False) -> list[MessagePart]:
        return [Content(text)] if text else []


class MessageBuilder:
    """Puts the parts of an answer together."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[dict[str, str]] = []

    def add(self, part: MessagePart) -> None:
        """Add the next part; the parts of one call come one after the other."""
        if isinstance(part, Content):
            self.content += part.gap + part.text
        elif isinstance(part, Reasoning):
            self.reasoning += part.gap + part.text
        elif part.name is not None:
            self.calls.append({"id": part.id, "name": part.name, "arguments": part.arguments})
        else:
            self.calls[part.index]["arguments"] += part.arguments
