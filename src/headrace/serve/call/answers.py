"""Calls that were accepted, as OpenAI tells of them: `Answer`, to be read whole or as a stream of events.

A stream that has begun fails only by the engine's fault. Knows calls and replies; `serve.call.service` makes them,
`serve.app` does the bytes. Chats have a module of their own, `serve.call.chat_answer`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from headrace import __version__
from headrace.engine import context
from headrace.engine.generation import Front, Generation
from headrace.serve.call import replies
from headrace.serve.call.call import Call, TextCall
from headrace.serve.call.forms import shortfall
from headrace.text.beams import blocks_of
from headrace.text.inputs import new_request_id
from headrace.text.outputs import Piece, RequestState

DONE = b"data: [DONE]\n\n"


def event(body: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class Answer(ABC):
    """A call that was accepted. Read it by `whole` or by `events`, once; `close` aborts what still runs."""

    name: str
    chunk_name: str
    prefix: str

    def __init__(
        self, generation: Generation, request: Call, front: Front, model: str, texts: list[str | None]
    ) -> None:
        self.generation = generation
        self.request = request
        self.tokenizer = front.tokenizer
        self.groups = [generation.of_prompt(place) for place in range(len(texts))]
        self.texts = texts
        self.id = f"{self.prefix}-{request.request_id or context.fresh_id() or new_request_id()}"
        info = front.info
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"headrace-{__version__}-{info.backend}-{info.dtype}",
            "seed": generation.states[0].request.params.seed,
        }

    @property
    def stream(self) -> bool:
        return bool(self.request.stream)

    async def whole(self) -> dict[str, Any]:
        """The reply. Raises what the engine failed with."""
        async with self.generation:
            async for _ in self.generation:
                pass
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        states, told = self.generation.states, self.generation.told()
        choices = [self._choice(place, states[place]) | {"index": index} for index, place in enumerate(told)]
        counts = {"usage": replies.usage(self.groups), "timings": replies.timings(self.groups)} | blocks_of(self.groups)
        return self._head | {"object": self.name, "choices": choices} | counts | self._prompt_fields() | self.told()

    def told(self) -> dict[str, Any]:
        """`warnings`: what of the request was not honoured, if anything."""
        return self.request.warnings.reply()

    async def events(self) -> AsyncIterator[bytes]:
        """The reply as events, `[DONE]` last. Raises what the engine failed with: then there is no `[DONE]`."""
        options = self.request.stream_options
        with_usage = bool(options and options.include_usage)
        continuous = bool(options and options.include_usage and options.continuous_usage_stats)
        head = self._head | {"object": self.chunk_name}
        num_open = len(self.generation.states)
        begun: set[int] = set()
        told = self.told()
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
                        chunk = head | {"choices": [choice]} | told
                        told = {}
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
        self.generation.close()

    def _tells_tokens(self, piece: Piece) -> bool:
        wanted = self.generation.states[0].request.params.logprobs is not None or self.request.return_token_ids
        return bool(wanted and piece.token_ids)

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
        if self.request.return_token_ids:
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
    def _pieces(self, place: int, state: RequestState, piece: Piece) -> list[dict[str, Any]]:
        """What a piece adds to an answer: nothing, if there is nothing to tell."""

    @abstractmethod
    def _opening(self, place: int, state: RequestState) -> list[dict[str, Any]]:
        """What comes before an answer's first part."""


class CompletionAnswer(Answer):
    name = chunk_name = "text_completion"
    prefix = "cmpl"
    request: TextCall

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        num_top = self.request.logprobs
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
        if not self.request.echo:
            return None
        text, params = self.texts[place // self.generation.n], state.request.params
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

    def _pieces(self, place: int, state: RequestState, piece: Piece) -> list[dict[str, Any]]:
        if not (piece.text or state.finish or self._tells_tokens(piece)):
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
        if self.request.echo:
            fields["text"] = self._echoed(place, state) or ""
            if self._logprobs is not None:
                fields["logprobs"] = self._logprobs[place].add(token_ids, [None, *state.prompt_logprobs])
        if self.request.prompt_logprobs is not None:
            fields["prompt_logprobs"] = replies.prompt_logprobs(self.tokenizer, state)
        if self.request.return_token_ids:
            fields["prompt_token_ids"] = token_ids
        return fields
