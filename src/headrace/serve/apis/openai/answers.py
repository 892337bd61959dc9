"""OpenAI's replies to accepted calls: a whole reply, or a stream of events; a chat's message, whole or in pieces.

A stream that has begun fails only by the engine's fault. The text of a custom tool's call is extracted from the
arguments that the model writes, and a request with `functions` gets its one call as `function_call`. `completions`
wraps an answer of `serve.call` in a reply; `serve.routing` sends it.
"""

from __future__ import annotations

import functools
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar, cast

import msgspec
from msgspec import UNSET

from headrace import __version__
from headrace.engine.generation import off_loop, width
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.step import Finish
from headrace.serve.apis.openai import reply
from headrace.serve.call import progress
from headrace.serve.call.call import Answer, ChatCall, TextCall
from headrace.serve.call.parsing import WarningLines
from headrace.serve.call.replies import chat_logprobs, timings, usage
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import event
from headrace.serve.routing import Readable, large_event
from headrace.text.outputs import (
    CallPart,
    Content,
    MessageBuilder,
    MessagePart,
    Reasoning,
    RequestState,
    TextDelta,
)
from headrace.text.tools.choice import ToolUse
from headrace.text.tools.custom import InputText, input_of

DONE = b"data: [DONE]\n\n"
C = TypeVar("C", bound=reply.Choice)
Described = reply.CompletionChunkChoice | reply.ChatChunkChoice | reply.ChatCompletion
"""The structs with a prompt's token ids and log-probabilities."""


class OpenAIAnswer(Readable):
    """A reply to an accepted call."""

    answer: Answer
    reply_type: type[Any]
    chunk_type: type[Any]

    def __init__(self, answer: Answer, model: ServedModel) -> None:
        super().__init__(answer, answer.call.stream)
        self.generation = answer.generation
        self.tokenizer = answer.tokenizer
        self.groups = answer.groups
        self._explanations = model.explain if answer.call.explain else None
        self._follow = model.follow_prompt if answer.call.return_progress else None
        is_verbose = answer.call.verbose or model.is_verbose
        self._verbose = reply.Verbose(prompt=answer.texts[0]) if is_verbose and answer.texts[0] is not None else UNSET
        info = model.front.info
        self._created = int(time.time())
        self._model = model.reply_name(answer.call.model)
        self._fingerprint = f"headrace-{__version__}-{info.backend}-{info.dtype}"
        self._seed = _seed(self.generation.states[0])

    async def whole(self) -> Any:
        await self.answer.collect()
        # On the event loop, as the explainer's records are, and not on the thread below.
        explanations = self._explain()
        return await off_loop(self.answer.size, lambda: self._whole(explanations))

    def _explain(self) -> reply.Explanations:
        if self._explanations is None:
            return UNSET
        return self._explanations([state.request.request_id for state in self.generation.states])

    def _whole(self, explanations: reply.Explanations) -> Any:
        choices = [self._choice(place, self.generation.states[place]) for place in self.generation.best_places()]
        for index, choice in enumerate(choices):
            choice.index = index
        return self.reply_type(
            id=self.id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            seed=self._seed,
            choices=choices,
            usage=usage(self.groups),
            timings=timings(self.groups),
            explain=explanations,
            verbose=self._verbose,
            beam_search=reply.beam_search_memory(self.groups),
            warnings=self.answer.call.warnings.reply(),
        )

    def _chunk(self, choices: list[Any], warnings: WarningLines = UNSET) -> Any:
        return self.chunk_type(
            id=self.id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            seed=self._seed,
            choices=choices,
            warnings=warnings,
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the reply as events, `[DONE]` last. Raises the engine's errors: then there is no `[DONE]`."""
        options = self.answer.call.stream_options
        with_usage = bool(options and options.include_usage)
        continuous = bool(options and options.include_usage and options.continuous_usage_stats)
        per_token = self.answer.call.timings_per_token
        states = self.generation.states
        num_open = len(states)
        started_places: set[int] = set()
        warnings: WarningLines = self.answer.call.warnings.reply()
        if states[0].request.params.prompt_logprobs is None:
            # At once: a long prompt takes minutes, and clients close a silent stream.
            started_places.update(range(len(states)))
            for choice in (choice for place, state in enumerate(states) for choice in self._opening(place, state)):
                chunk = self._chunk([choice], warnings)
                warnings = UNSET
                if with_usage:
                    chunk.usage = usage(self.groups) if continuous else None
                yield event(chunk)
        pieces = self.answer.parts() if self._follow is None else progress.parts(self.answer, self._follow)
        async for place, piece, parts in pieces:
            if isinstance(piece, progress.Progressed):
                chunk = self._chunk([])
                chunk.prompt_progress = piece.progress
                chunk.timings = piece.timings if per_token else UNSET
                yield event(chunk)
                continue
            state = states[place]
            if not piece.token_ids and state.finish is None:
                continue
            choices = []
            if place not in started_places:
                # With log-probabilities of the prompt this may be large.
                choices = await off_loop(self.answer.size, functools.partial(self._opening, place, state))
            started_places.add(place)
            wide = len(piece.logprobs) * width(piece.logprobs)
            choices += await off_loop(wide, functools.partial(self._pieces, place, state, piece, parts))
            num_open -= state.finish is not None
            for number, choice in enumerate(choices, 1):
                chunk = self._chunk([choice], warnings)
                warnings = UNSET
                is_last = not num_open and number == len(choices)
                if with_usage:
                    chunk.usage = usage(self.groups) if continuous else None
                elif is_last:
                    chunk.explain, chunk.verbose = self._explain(), self._verbose
                if per_token or (is_last and not with_usage):
                    chunk.timings = timings(self.groups)
                yield await large_event(chunk, self.answer.size if number < len(choices) else wide)
        if with_usage:
            chunk = self._chunk([])
            chunk.usage, chunk.timings = usage(self.groups), timings(self.groups)
            chunk.explain, chunk.verbose = self._explain(), self._verbose
            yield event(chunk)
        yield DONE

    def _shows_tokens(self, piece: TextDelta) -> bool:
        has_details = self.generation.states[0].request.params.logprobs is not None or self.answer.call.return_token_ids
        return bool(has_details and piece.token_ids)

    def _complete(self, choice: C, state: RequestState, token_ids: Sequence[int]) -> C:
        """Return a choice, whole or a chunk with these tokens, with the further fields that every kind has."""
        short = shortfall(state.request.params.structured_outputs, self._formed(state), state.finish)
        if short is not None:
            choice.warnings = [short]
        if self.answer.call.return_token_ids:
            choice.token_ids = list(token_ids)
        if state.beams is not None:
            (beam,) = state.beams.beams
            choice.cumulative_logprob, choice.beam_score = beam.cumulative_logprob, beam.score
        return choice

    def _formed(self, state: RequestState) -> str:
        """Return the part of an answer's text that has a form."""
        return state.text

    def _describe_prompt(self, described: Described, state: RequestState) -> None:
        """Set the fields that describe the prompt of an answer."""
        if self.answer.call.prompt_logprobs is not None:
            described.prompt_logprobs = reply.prompt_logprobs(state)
        if self.answer.call.return_token_ids:
            described.prompt_token_ids = state.request.prompt_token_ids

    @abstractmethod
    def _choice(self, place: int, state: RequestState) -> Any:
        """Return a whole answer."""

    @abstractmethod
    def _pieces(self, place: int, state: RequestState, piece: TextDelta, parts: list[MessagePart]) -> list[Any]:
        """Return the chunks that a piece adds to an answer: none, if there is nothing to show."""

    @abstractmethod
    def _opening(self, place: int, state: RequestState) -> list[Any]:
        """Return the chunks before an answer's first piece."""


class CompletionAnswer(OpenAIAnswer):
    reply_type = reply.Completion
    chunk_type = reply.CompletionChunk

    def __init__(self, answer: Answer, call: TextCall, model: ServedModel) -> None:
        super().__init__(answer, model)
        self.call = call
        num_top = call.logprobs
        self._logprobs = (
            None
            if num_top is None
            else [
                reply.CompletionLogprobsBuilder(self.tokenizer, num_top, state.request, self._echoed(place, state))
                for place, state in enumerate(self.generation.states)
            ]
        )

    def _echoed(self, place: int, state: RequestState) -> str | None:
        """Return the prompt as text under `echo`: the request's text, or decoded if the request has ids or the prompt
        was cut."""
        if not self.call.echo:
            return None
        text, params = self.answer.texts[place // self.generation.n], state.request.params
        if text is None and self.tokenizer is not None:
            text = self.tokenizer.decode(
                state.request.prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
            )
        return text or ""

    def _choice(self, place: int, state: RequestState) -> reply.CompletionChoice:
        logprobs = self._echoed_logprobs(place, state)
        if self._logprobs is not None:
            generated = self._logprobs[place].add(state.token_ids, state.logprobs)
            if logprobs is None:
                logprobs = generated
            else:
                logprobs.extend(generated)
        finish = state.finish
        choice = reply.CompletionChoice(
            index=place,
            body=(self._echoed(place, state) or "") + state.text,
            logprobs=logprobs,
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            seed=_seed(state),
        )
        self._describe_prompt(choice, state)
        return self._complete(choice, state, state.token_ids)

    def _pieces(
        self, place: int, state: RequestState, piece: TextDelta, parts: list[MessagePart]
    ) -> list[reply.CompletionChunkChoice]:
        if not (piece.text or state.finish or self._shows_tokens(piece)):
            return []
        logprobs = None if self._logprobs is None else self._logprobs[place].add(piece.token_ids, piece.logprobs)
        finish = state.finish
        choice = reply.CompletionChunkChoice(
            index=place,
            body=piece.text,
            logprobs=logprobs,
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            seed=_seed(state),
        )
        return [self._complete(choice, state, piece.token_ids)]

    def _opening(self, place: int, state: RequestState) -> list[reply.CompletionChunkChoice]:
        """Return the first chunk, which describes the prompt alone; none if the request wants nothing of it."""
        if not self.call.echo and self.call.prompt_logprobs is None and not self.call.return_token_ids:
            return []
        text, logprobs = self._echoed(place, state) or "", self._echoed_logprobs(place, state)
        choice = reply.CompletionChunkChoice(index=place, body=text, logprobs=logprobs, finish_reason=None)
        self._describe_prompt(choice, state)
        return [choice]

    def _echoed_logprobs(self, place: int, state: RequestState) -> reply.CompletionLogprobs | None:
        """Return the log-probabilities of the prompt where the reply repeats it."""
        if not self.call.echo or self._logprobs is None:
            return None
        return self._logprobs[place].add(state.request.prompt_token_ids, [None, *state.prompt_logprobs])


class ChatAnswer(OpenAIAnswer):
    reply_type = reply.ChatCompletion
    chunk_type = reply.ChatCompletionChunk

    def __init__(self, answer: Answer, call: ChatCall, model: ServedModel) -> None:
        super().__init__(answer, model)
        self.call = call
        self._deltas = [Deltas(call.tools) for _ in self.generation.states]

    def _whole(self, explanations: reply.Explanations) -> reply.ChatCompletion:
        whole: reply.ChatCompletion = super()._whole(explanations)
        self._describe_prompt(whole, self.generation.states[0])
        return whole

    def _choice(self, place: int, state: RequestState) -> reply.ChatChoice:
        message = chat_message(self.answer.message(place), self.call.tools)
        if self.call.echoed:
            message.content = self.call.echoed + (message.content or "")
        choice = reply.ChatChoice(
            index=place,
            body=message,
            logprobs=self._chat_logprobs(state),
            finish_reason=self._finish_reason(place),
            stop_reason=state.finish.stop_reason if state.finish else None,
            seed=_seed(state),
        )
        return self._complete(choice, state, state.token_ids)

    def _pieces(
        self, place: int, state: RequestState, piece: TextDelta, parts: list[MessagePart]
    ) -> list[reply.ChatChunkChoice]:
        deltas = self._deltas[place].take(parts, state.finish is not None)
        # The end comes in a separate chunk without text, as OpenAI and llama-server send it.
        if state.finish or (not deltas and self._shows_tokens(piece)):
            deltas.append(reply.ChatDelta())
        choices = []
        for number, delta in enumerate(deltas, 1):
            # The first delta of a piece has its tokens; the last one has the end of the answer.
            is_first, is_last = number == 1, number == len(deltas)
            choice = reply.ChatChunkChoice(
                index=place,
                body=delta,
                logprobs=self._chat_logprobs(piece) if is_first else None,
                finish_reason=self._finish_reason(place) if is_last else None,
                stop_reason=state.finish.stop_reason if is_last and state.finish else None,
                seed=_seed(state),
            )
            choices.append(self._complete(choice, state, piece.token_ids if is_first else []))
        return choices

    def _chat_logprobs(self, source: RequestState | TextDelta) -> reply.ChatLogprobs | None:
        if self.answer.call.logprobs is None:
            return None
        return reply.ChatLogprobs(content=chat_logprobs(self.tokenizer, source.logprobs))

    def _formed(self, state: RequestState) -> str:
        return self.answer.message(self.generation.states.index(state)).content

    def _finish_reason(self, place: int) -> str | None:
        reason = self.answer.finish_reason(place)
        return "function_call" if reason == "tool_calls" and self.call.tools.is_legacy else reason

    def _opening(self, place: int, state: RequestState) -> list[reply.ChatChunkChoice]:
        delta = reply.ChatDelta(role="assistant", content=self.call.echoed or None)
        choice = reply.ChatChunkChoice(index=place, body=delta, logprobs=None, finish_reason=None)
        self._describe_prompt(choice, self.generation.states[0])
        return [choice]


def _seed(state: RequestState) -> int:
    """Return the seed of an answer, which was drawn if the request had none."""
    return cast(int, state.request.params.seed)


def shortfall(constraint: StructuredOutputs | None, text: str, finish: Finish | None) -> str | None:
    """Return the reason why a finished answer may not have its form, or None: it was cut off, and not by the form's own
    end."""
    if constraint is None or finish is None or (finish.reason == "stop" and not isinstance(finish.stop_reason, str)):
        return None
    cut = "max_tokens" if finish.reason == "length" else "a stop string" if finish.reason == "stop" else finish.reason
    match constraint.kind:
        case "json" | "json_object":
            try:
                msgspec.json.decode(text)
            except (msgspec.DecodeError, RecursionError):
                return f"the document is incomplete: {cut} ended it"
            return None
        case "choice":
            return None if text in (constraint.choice or ()) else f"the answer is incomplete: {cut} ended it"
        case _:
            return f"the answer may be incomplete: {cut} ended it"


def chat_message(message: MessageBuilder, tools: ToolUse) -> reply.ChatMessage:
    """Return a whole message: its content is None where it has only calls or reasoning. `tools`: the tools that the
    answer may call."""
    calls = []
    for call in message.calls:
        name, arguments = call["name"], call["arguments"]
        if name in tools.customs:
            custom = reply.CustomCall(name=name, input=input_of(arguments))
            calls.append(reply.ToolCall(id=call["id"], type="custom", custom=custom))
        else:
            calls.append(reply.ToolCall(id=call["id"], function=reply.FunctionCall(name=name, arguments=arguments)))
    reasoning = message.reasoning or UNSET
    return reply.ChatMessage(
        content=message.content or (None if calls or message.reasoning else ""),
        reasoning_content=reasoning,
        tool_calls=UNSET if tools.is_legacy or not calls else calls,
        function_call=calls[0].function if tools.is_legacy and calls else UNSET,
        reasoning=reasoning,
    )


class Deltas:
    """The pieces of one answer in a stream. `tools`: the tools that it may call."""

    def __init__(self, tools: ToolUse) -> None:
        self._tools = tools
        # The text of the custom tool's call that is being read, and the call's index.
        self._input: InputText | None = None
        self._index = 0

    def take(self, parts: Sequence[MessagePart], final: bool) -> list[reply.ChatDelta]:
        """Return the pieces that new parts add. `final`: the answer ends here."""
        deltas: list[reply.ChatDelta] = []
        for part in parts:
            if not isinstance(part, CallPart) or part.name is not None:
                deltas += self._close()
            deltas += self._deltas(part)
        return deltas + (self._close() if final else [])

    def _deltas(self, part: MessagePart) -> list[reply.ChatDelta]:
        if isinstance(part, Content):
            return [reply.ChatDelta(content=part.gap + part.text)]
        if isinstance(part, Reasoning):
            return [reply.ChatDelta(reasoning_content=part.gap + part.text, reasoning=part.gap + part.text)]
        if part.name is not None and part.name in self._tools.customs:
            self._input, self._index = InputText(), part.index
            custom = reply.CustomCall(name=part.name, input=self._input.feed(part.arguments))
            return [_delta(reply.ToolCallPart(index=part.index, id=part.id, type="custom", custom=custom))]
        if self._input is not None:
            return self._more(self._input.feed(part.arguments))
        function = reply.FunctionCall(name=UNSET if part.name is None else part.name, arguments=part.arguments)
        if self._tools.is_legacy:
            return [reply.ChatDelta(function_call=function)]
        if part.name is None:
            return [_delta(reply.ToolCallPart(index=part.index, function=function))]
        return [_delta(reply.ToolCallPart(index=part.index, id=part.id, type="function", function=function))]

    def _more(self, text: str) -> list[reply.ChatDelta]:
        if not text:
            return []
        return [_delta(reply.ToolCallPart(index=self._index, custom=reply.CustomCall(input=text)))]

    def _close(self) -> list[reply.ChatDelta]:
        rest = "" if self._input is None else self._input.close()
        self._input = None
        return self._more(rest)


def _delta(call: reply.ToolCallPart) -> reply.ChatDelta:
    return reply.ChatDelta(tool_calls=[call])
