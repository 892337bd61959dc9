"""A chat that was accepted: its answers' text, taken apart into content, reasoning and tool calls.

`whole` and `events` tell it as OpenAI does; other APIs read `parts` or `message` and tell it their own way. What
takes the text apart is handed in: nothing here knows a model's format.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from headrace.engine.generation import Front, Generation
from headrace.serve.call import replies
from headrace.serve.call.answers import Answer
from headrace.serve.call.call import ChatCall
from headrace.text.outputs import Piece, RequestState
from headrace.text.parts import Content, ContentParser, Message, MessageParser, Part, Reasoning


class ChatAnswer(Answer):
    """Read it once, by `whole`, `events` or `parts`; `message` and `finish_reason` tell what has come by then."""

    name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prefix = "chatcmpl"
    request: ChatCall

    def __init__(
        self,
        generation: Generation,
        request: ChatCall,
        front: Front,
        model: str,
        texts: list[str | None],
        new_parser: Callable[[], MessageParser] = ContentParser,
    ) -> None:
        super().__init__(generation, request, front, model, texts)
        self._parsers = [new_parser() for _ in generation.states]
        self._messages = [Message() for _ in generation.states]

    async def parts(self) -> AsyncIterator[tuple[int, list[Part]]]:
        """(place of an answer, its new parts), until all have ended; the list may be empty, and is with the last
        pair of a place where that adds nothing. Raises what the engine failed with."""
        async with self.generation:
            async for pieces in self.generation:
                for place, piece in pieces:
                    yield place, self._take(place, piece.text)

    async def collect(self) -> None:
        """Read to the end, for `message`. Raises what the engine failed with."""
        async for _ in self.parts():
            pass

    def message(self, place: int) -> dict[str, Any]:
        """What has come of an answer: content, reasoning_content and tool_calls in OpenAI's shape."""
        return self._messages[place].fields()

    def finish_reason(self, place: int) -> str | None:
        """Why an answer ended, in OpenAI's words; None if it has not."""
        finish = self.generation.states[place].finish
        if finish is None:
            return None
        return "tool_calls" if finish.reason == "stop" and self._messages[place].calls else finish.reason

    def _take(self, place: int, text: str) -> list[Part]:
        parser = self._parsers[place]
        parts = parser.feed(text, self.generation.states[place].finish is not None)
        if not self.request.include_reasoning:
            parts = [part for part in parts if not isinstance(part, Reasoning)]
        for part in parts:
            self._messages[place].add(part)
        if parser.ended:
            self.generation.end(place)
        return parts

    async def whole(self) -> dict[str, Any]:
        await self.collect()
        return self._reply()

    def _choice(self, place: int, state: RequestState) -> dict[str, Any]:
        logprobs = replies.chat_logprobs(self.tokenizer, state.logprobs) if self.request.logprobs is not None else None
        message: dict[str, Any] = {"role": "assistant", "refusal": None}
        message |= {name: value for name, value in self.message(place).items() if value or name == "content"}
        if "reasoning_content" in message:
            # vLLM's other name for it.
            message["reasoning"] = message["reasoning_content"]
        ending = self._ending(state, state.token_ids) | {"finish_reason": self.finish_reason(place)}
        return {"index": place, "message": message, "logprobs": logprobs} | ending

    def _pieces(self, place: int, state: RequestState, piece: Piece) -> list[dict[str, Any]]:
        deltas = [_delta(part) for part in self._take(place, piece.text)]
        if not deltas and (state.finish or self._tells_tokens(piece)):
            deltas = [{"content": ""}]
        choices: list[dict[str, Any]] = []
        for number, delta in enumerate(deltas, 1):
            first, last = number == 1, number == len(deltas)
            # Tokens are told once, with the first of what they add; that it is over, with the last.
            logprobs = (
                replies.chat_logprobs(self.tokenizer, piece.logprobs)
                if self.request.logprobs is not None and first
                else None
            )
            ending = self._ending(state, piece.token_ids if first else [])
            ending |= (
                {"finish_reason": self.finish_reason(place)} if last else {"finish_reason": None, "stop_reason": None}
            )
            choices.append({"index": place, "delta": delta, "logprobs": logprobs} | ending)
        return choices

    def _formed(self, state: RequestState) -> str:
        return self._messages[self.generation.states.index(state)].content

    def _opening(self, place: int, state: RequestState) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": place, "delta": delta, "logprobs": None, "finish_reason": None} | self._prompt_fields()]

    def _prompt_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        state = self.generation.states[0]
        if self.request.prompt_logprobs is not None:
            fields["prompt_logprobs"] = replies.prompt_logprobs(self.tokenizer, state)
        if self.request.return_token_ids:
            fields["prompt_token_ids"] = state.request.prompt_token_ids
        return fields


def _delta(part: Part) -> dict[str, Any]:
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


def arguments_object(text: str) -> dict[str, Any]:
    """Return a tool call's arguments as an object. Those of a call that was cut off may be none; they stay text."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {"_incomplete": text}
