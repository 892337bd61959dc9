"""OpenAI's replies to accepted calls: a whole reply, or a stream of events.

A stream that has begun fails only by the engine's fault. `completions` wraps an answer of `serve.call` in a reply;
`serve.routing` sends it.
"""

from __future__ import annotations

import functools
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from headrace import __version__
from headrace.engine.generation import off_loop, width
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.step import Finish
from headrace.serve.apis.openai import chat_parts, reply
from headrace.serve.call import progress
from headrace.serve.call.call import Answer, ChatCall, TextCall
from headrace.serve.call.parsing import WarningLines
from headrace.serve.call.replies import chat_logprobs, timings, usage
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import event
from headrace.serve.routing import Readable, large_event
from headrace.text.outputs import MessagePart, RequestState, TextDelta

DONE = b"data: [DONE]\n\n"


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
        self._head = {
            "id": answer.id,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": f"headrace-{__version__}-{info.backend}-{info.dtype}",
            "seed": self.generation.states[0].request.params.seed,
        }

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
            **self._head,
            choices=choices,
            usage=usage(self.groups),
            timings=timings(self.groups),
            explain=explanations,
            verbose=self._verbose,
            beam_search=reply.beam_search_memory(self.groups),
            warnings=self.answer.call.warnings.reply(),
            **self._reply_fields(),
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the reply as events, `[DONE]` last. Raises the engine's errors: then there is no `[DONE]`."""
        options = self.answer.call.stream_options
        with_usage = bool(options and options.include_usage)
        continuous = bool(options and options.include_usage and options.continuous_usage_stats)
        per_token = self.answer.call.timings_per_token
        head, states = self._head, self.generation.states
        num_open = len(states)
        started_places: set[int] = set()
        warnings: WarningLines = self.answer.call.warnings.reply()
        if states[0].request.params.prompt_logprobs is None:
            # At once: a long prompt takes minutes, and clients close a silent stream.
            started_places.update(range(len(states)))
            for choice in (choice for place, state in enumerate(states) for choice in self._opening(place, state)):
                chunk = self.chunk_type(**head, choices=[choice], warnings=warnings)
                warnings = UNSET
                if with_usage:
                    chunk.usage = usage(self.groups) if continuous else None
                yield event(chunk)
        async for place, piece, parts in progress.parts(self.answer, self._follow):
            if isinstance(piece, progress.Progressed):
                chunk = self.chunk_type(**head, choices=[], prompt_progress=piece.progress)
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
                chunk = self.chunk_type(**head, choices=[choice], warnings=warnings)
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
            counts = {"usage": usage(self.groups), "timings": timings(self.groups), "explain": self._explain()}
            yield event(self.chunk_type(**head, choices=[], verbose=self._verbose, **counts))
        yield DONE

    def _shows_tokens(self, piece: TextDelta) -> bool:
        has_details = self.generation.states[0].request.params.logprobs is not None or self.answer.call.return_token_ids
        return bool(has_details and piece.token_ids)

    def _ending(self, state: RequestState, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the fields that every choice has, whole or chunk."""
        finish = state.finish
        fields: dict[str, Any] = {
            "finish_reason": finish.reason if finish else None,
            "stop_reason": finish.stop_reason if finish else None,
            "seed": state.request.params.seed,
        }
        short = shortfall(state.request.params.structured_outputs, self._formed(state), finish)
        if short is not None:
            fields["warnings"] = [short]
        if self.answer.call.return_token_ids:
            fields["token_ids"] = list(token_ids)
        if state.beams is not None:
            (beam,) = state.beams.beams
            fields |= {"cumulative_logprob": beam.cumulative_logprob, "beam_score": beam.score}
        return fields

    def _formed(self, state: RequestState) -> str:
        """Return the part of an answer's text that has a form."""
        return state.text

    def _prompt_fields(self, state: RequestState) -> dict[str, Any]:
        """Return the fields that describe the prompt of an answer."""
        fields: dict[str, Any] = {}
        if self.answer.call.prompt_logprobs is not None:
            fields["prompt_logprobs"] = reply.prompt_logprobs(state)
        if self.answer.call.return_token_ids:
            fields["prompt_token_ids"] = state.request.prompt_token_ids
        return fields

    def _reply_fields(self) -> dict[str, Any]:
        """Return the further fields of a whole reply, which only this kind of reply has."""
        return {}

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
        fields = self._opening_fields(place, state)
        text = fields.pop("body", "") + state.text
        logprobs = fields.pop("logprobs", None)
        if self._logprobs is not None:
            generated = self._logprobs[place].add(state.token_ids, state.logprobs)
            if logprobs is None:
                logprobs = generated
            else:
                logprobs.extend(generated)
        ending = self._ending(state, state.token_ids)
        return reply.CompletionChoice(index=place, body=text, logprobs=logprobs, **ending, **fields)

    def _pieces(
        self, place: int, state: RequestState, piece: TextDelta, parts: list[MessagePart]
    ) -> list[reply.CompletionChunkChoice]:
        if not (piece.text or state.finish or self._shows_tokens(piece)):
            return []
        logprobs = None if self._logprobs is None else self._logprobs[place].add(piece.token_ids, piece.logprobs)
        ending = self._ending(state, piece.token_ids)
        return [reply.CompletionChunkChoice(index=place, body=piece.text, logprobs=logprobs, **ending)]

    def _opening(self, place: int, state: RequestState) -> list[reply.CompletionChunkChoice]:
        fields = self._opening_fields(place, state)
        empty: dict[str, Any] = {"index": place, "body": "", "logprobs": None, "finish_reason": None}
        return [reply.CompletionChunkChoice(**(empty | fields))] if fields else []

    def _opening_fields(self, place: int, state: RequestState) -> dict[str, Any]:
        """Return the fields of the first chunk, which describe the prompt alone."""
        fields = self._prompt_fields(state)
        if self.call.echo:
            fields["body"] = self._echoed(place, state) or ""
            if self._logprobs is not None:
                prompt = state.request.prompt_token_ids
                fields["logprobs"] = self._logprobs[place].add(prompt, [None, *state.prompt_logprobs])
        return fields


class ChatAnswer(OpenAIAnswer):
    reply_type = reply.ChatCompletion
    chunk_type = reply.ChatCompletionChunk

    def __init__(self, answer: Answer, call: ChatCall, model: ServedModel) -> None:
        super().__init__(answer, model)
        self.call = call
        self._deltas = [chat_parts.Deltas(call.tools) for _ in self.generation.states]

    def _choice(self, place: int, state: RequestState) -> reply.ChatChoice:
        ending = self._ending(state, state.token_ids) | {"finish_reason": self._finish_reason(place)}
        message = chat_parts.whole(self.answer.message(place), self.call.tools)
        logprobs = self._chat_logprobs(state)
        if self.call.echoed:
            message.content = self.call.echoed + (message.content or "")
        return reply.ChatChoice(index=place, body=message, logprobs=logprobs, **ending)

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
            ending = self._ending(state, piece.token_ids if is_first else [])
            if is_last:
                ending["finish_reason"] = self._finish_reason(place)
            else:
                ending["finish_reason"] = ending["stop_reason"] = None
            logprobs = self._chat_logprobs(piece) if is_first else None
            choices.append(reply.ChatChunkChoice(index=place, body=delta, logprobs=logprobs, **ending))
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
        fields = self._reply_fields()
        return [reply.ChatChunkChoice(index=place, body=delta, logprobs=None, finish_reason=None, **fields)]

    def _reply_fields(self) -> dict[str, Any]:
        return self._prompt_fields(self.generation.states[0])


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
