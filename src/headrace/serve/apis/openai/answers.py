"""OpenAI's replies to accepted calls: a whole reply, or a stream of events.

A stream that has begun fails only by the engine's fault. `completions` puts a reply around an answer of
`serve.call.answers`; `serve.routing` sends it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from headrace import __version__
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.step import Finish
from headrace.serve.call import replies
from headrace.serve.call.answers import Answer
from headrace.serve.call.call import TextCall
from headrace.serve.call.replies import event
from headrace.serve.call.service import ServedModel
from headrace.text.beams import blocks_of
from headrace.text.outputs import RequestState, TextDelta
from headrace.text.parts import Content, MessagePart, Reasoning

DONE = b"data: [DONE]\n\n"


class Reply(ABC):
    """A reply to an accepted call. Read it by `whole` or by `events`, once; `close` aborts what still runs."""

    name: str
    chunk_name: str

    def __init__(self, answer: Answer, model: ServedModel) -> None:
        self.answer = answer
        self.generation = answer.generation
        self.tokenizer = answer.tokenizer
        self.groups = answer.groups
        info = model.front.info
        self._head = {
            "id": answer.id,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": f"headrace-{__version__}-{info.backend}-{info.dtype}",
            "seed": self.generation.states[0].request.params.seed,
        }

    @property
    def id(self) -> str:
        return self.answer.id

    @property
    def stream(self) -> bool:
        return self.answer.call.stream

    async def whole(self) -> dict[str, Any]:
        """The reply. Raises what the engine failed with."""
        await self.answer.collect()
        states, places = self.generation.states, self.generation.best_places()
        choices = [self._choice(place, states[place]) | {"index": index} for index, place in enumerate(places)]
        counts = {"usage": replies.usage(self.groups), "timings": replies.timings(self.groups)} | blocks_of(self.groups)
        return (
            self._head
            | {"object": self.name, "choices": choices}
            | counts
            | self._prompt_fields()
            | self.answer.call.warnings.reply()
        )

    async def events(self) -> AsyncIterator[bytes]:
        """The reply as events, `[DONE]` last. Raises what the engine failed with: then there is no `[DONE]`."""
        options = self.answer.call.stream_options
        with_usage = bool(options and options.include_usage)
        continuous = bool(options and options.include_usage and options.continuous_usage_stats)
        head = self._head | {"object": self.chunk_name}
        num_open = len(self.generation.states)
        begun: set[int] = set()
        warnings = self.answer.call.warnings.reply()
        async with self.generation:
            async for pieces in self.generation:
                for place, piece in pieces:
                    state = self.generation.states[place]
                    if not piece.token_ids and state.finish is None:
                        continue
                    chunks = [] if place in begun else self._opening(place, state)
                    begun.add(place)
                    chunks += self._pieces(place, state, piece)
                    num_open -= state.finish is not None
                    for number, choice in enumerate(chunks, 1):
                        chunk = head | {"choices": [choice]} | warnings
                        warnings = {}
                        if with_usage:
                            chunk["usage"] = replies.usage(self.groups) if continuous else None
                        if not num_open and not with_usage and number == len(chunks):
                            chunk["timings"] = replies.timings(self.groups)
                        yield event(chunk)
        if with_usage:
            counts = {"usage": replies.usage(self.groups), "timings": replies.timings(self.groups)}
            yield event(head | {"choices": []} | counts)
        yield DONE

    def close(self) -> None:
        self.answer.close()

    def _shows_tokens(self, piece: TextDelta) -> bool:
        shown = self.generation.states[0].request.params.logprobs is not None or self.answer.call.return_token_ids
        return bool(shown and piece.token_ids)

    def _ending(self, state: RequestState, token_ids: Sequence[int]) -> dict[str, Any]:
        """What every choice carries, whole or chunk."""
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
        """The part of an answer's text that its form is about."""
        return state.text

    def _prompt_fields(self) -> dict[str, Any]:
        """What the reply as a whole tells of the prompt."""
        return {}

    @abstractmethod
    def _choice(self, place: int, state: RequestState) -> dict[str, Any]:
        """A whole answer."""

    @abstractmethod
    def _pieces(self, place: int, state: RequestState, piece: TextDelta) -> list[dict[str, Any]]:
        """What a piece adds to an answer: nothing, if there is nothing to tell."""

    @abstractmethod
    def _opening(self, place: int, state: RequestState) -> list[dict[str, Any]]:
        """What comes before an answer's first part."""


class CompletionReply(Reply):
    name = chunk_name = "text_completion"

    def __init__(self, answer: Answer, call: TextCall, model: ServedModel) -> None:
        super().__init__(answer, model)
        self.call = call
        num_top = call.logprobs
        self._logprobs = (
            None
            if num_top is None
            else [
                replies.CompletionLogprobs(self.tokenizer, num_top, state.request, self._echoed(place, state))
                for place, state in enumerate(self.generation.states)
            ]
        )

    def _echoed(self, place: int, state: RequestState) -> str | None:
        """The prompt as text under `echo`: as it was given, or decoded if it was given as ids or was cut."""
        if not self.call.echo:
            return None
        text, params = self.answer.texts[place // self.generation.n], state.request.params
        if text is None and self.tokenizer is not None:
            text = self.tokenizer.decode(
                state.request.prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
            )
        return text or ""

    def _choice(self, place: int, state: RequestState) -> dict[str, Any]:
        fields = self._opening_fields(place, state)
        text = fields.pop("text", "") + state.text
        logprobs = fields.pop("logprobs", None)
        if self._logprobs is not None:
            added = self._logprobs[place].add(state.token_ids, state.logprobs)
            logprobs = {key: logprobs[key] + added[key] for key in added} if logprobs else added
        return {"index": place, "text": text, "logprobs": logprobs} | self._ending(state, state.token_ids) | fields

    def _pieces(self, place: int, state: RequestState, piece: TextDelta) -> list[dict[str, Any]]:
        if not (piece.text or state.finish or self._shows_tokens(piece)):
            return []
        logprobs = None if self._logprobs is None else self._logprobs[place].add(piece.token_ids, piece.logprobs)
        return [{"index": place, "text": piece.text, "logprobs": logprobs} | self._ending(state, piece.token_ids)]

    def _opening(self, place: int, state: RequestState) -> list[dict[str, Any]]:
        fields = self._opening_fields(place, state)
        empty = {"index": place, "text": "", "logprobs": None, "finish_reason": None}
        return [empty | fields] if fields else []

    def _opening_fields(self, place: int, state: RequestState) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        token_ids = state.request.prompt_token_ids
        if self.call.echo:
            fields["text"] = self._echoed(place, state) or ""
            if self._logprobs is not None:
                fields["logprobs"] = self._logprobs[place].add(token_ids, [None, *state.prompt_logprobs])
        if self.call.prompt_logprobs is not None:
            fields["prompt_logprobs"] = replies.prompt_logprobs(self.tokenizer, state)
        if self.call.return_token_ids:
            fields["prompt_token_ids"] = token_ids
        return fields


class ChatReply(Reply):
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _choice(self, place: int, state: RequestState) -> dict[str, Any]:
        logprobs = (
            replies.chat_logprobs(self.tokenizer, state.logprobs) if self.answer.call.logprobs is not None else None
        )
        message: dict[str, Any] = {"role": "assistant", "refusal": None}
        message |= {name: value for name, value in self.answer.message(place).items() if value or name == "content"}
        if "reasoning_content" in message:
            # vLLM's other name for it.
            message["reasoning"] = message["reasoning_content"]
        ending = self._ending(state, state.token_ids) | {"finish_reason": self.answer.finish_reason(place)}
        return {"index": place, "message": message, "logprobs": logprobs} | ending

    def _pieces(self, place: int, state: RequestState, piece: TextDelta) -> list[dict[str, Any]]:
        deltas = [_delta(part) for part in self.answer.take(place, piece.text)]
        if not deltas and (state.finish or self._shows_tokens(piece)):
            deltas = [{"content": ""}]
        choices: list[dict[str, Any]] = []
        for number, delta in enumerate(deltas, 1):
            first, last = number == 1, number == len(deltas)
            # Tokens are told once, with the first of what they add; that it is over, with the last.
            logprobs = (
                replies.chat_logprobs(self.tokenizer, piece.logprobs)
                if self.answer.call.logprobs is not None and first
                else None
            )
            ending = self._ending(state, piece.token_ids if first else [])
            ending |= (
                {"finish_reason": self.answer.finish_reason(place)}
                if last
                else {"finish_reason": None, "stop_reason": None}
            )
            choices.append({"index": place, "delta": delta, "logprobs": logprobs} | ending)
        return choices

    def _formed(self, state: RequestState) -> str:
        return self.answer.text(self.generation.states.index(state))

    def _opening(self, place: int, state: RequestState) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": place, "delta": delta, "logprobs": None, "finish_reason": None} | self._prompt_fields()]

    def _prompt_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        state = self.generation.states[0]
        if self.answer.call.prompt_logprobs is not None:
            fields["prompt_logprobs"] = replies.prompt_logprobs(self.tokenizer, state)
        if self.answer.call.return_token_ids:
            fields["prompt_token_ids"] = state.request.prompt_token_ids
        return fields


def _delta(part: MessagePart) -> dict[str, Any]:
    """A part as OpenAI's streams tell it."""
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return {"reasoning_content": part.text, "reasoning": part.text}
    call: dict[str, Any] = {"index": part.index}
    if part.name is None:
        return {"tool_calls": [call | {"function": {"arguments": part.arguments}}]}
    function = {"name": part.name, "arguments": part.arguments}
    return {"tool_calls": [call | {"id": part.id, "type": "function", "function": function}]}


def shortfall(constraint: StructuredOutputs | None, text: str, finish: Finish | None) -> str | None:
    """Why an answer that has ended may not have its form, or None: it was cut off, and not by the form's own end."""
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
