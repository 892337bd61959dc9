"""`Answer`: an accepted call, and what has come of its answers: their text as content, reasoning and tool calls.

`serve.call.service` makes it; the reply module of each API reads it and tells it in its own shape. What takes the text
apart is handed in: nothing here knows a model's format, an API or HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from headrace.engine import context
from headrace.engine.generation import Generation
from headrace.serve.call.call import Call
from headrace.text.inputs import new_request_id
from headrace.text.outputs import ContentParser, MessageBuilder, MessageParser, MessagePart, Reasoning
from headrace.text.tokenizer import Tokenizer


class Answer:
    """Read it once, by `parts` or `collect`; `message` and `finish_reason` tell what has come by then. `close` aborts
    what still runs.

    Args:
        prefix: begins the id, the rest of which is the caller's own or fresh.
        texts: of the prompts; None for one that was given as token ids.
        new_parser: makes what takes an answer's text apart.
    """

    def __init__(
        self,
        generation: Generation,
        call: Call,
        tokenizer: Tokenizer | None,
        prefix: str,
        texts: list[str | None],
        new_parser: Callable[[], MessageParser] = ContentParser,
        include_reasoning: bool = True,
    ) -> None:
        self.generation = generation
        self.call = call
        self.tokenizer = tokenizer
        self.groups = [generation.of_prompt(place) for place in range(len(texts))]
        self.texts = texts
        self.id = f"{prefix}-{call.request_id or context.fresh_id() or new_request_id()}"
        self._include_reasoning = include_reasoning
        self._parsers = [new_parser() for _ in generation.states]
        self._messages = [MessageBuilder() for _ in generation.states]

    async def parts(self) -> AsyncIterator[tuple[int, list[MessagePart]]]:
        """(place of an answer, its new parts), until all have ended; the list may be empty, and is with the last
        pair of a place where that adds nothing. Raises what the engine failed with."""
        async with self.generation:
            async for pieces in self.generation:
                for place, piece in pieces:
                    yield place, self.take(place, piece.text)

    async def collect(self) -> None:
        """Read to the end. Raises what the engine failed with."""
        async for _ in self.parts():
            pass

    def take(self, place: int, text: str) -> list[MessagePart]:
        """Take in an answer's next text, for a reader of the generation. -> its new parts."""
        parser = self._parsers[place]
        parts = parser.feed(text, self.generation.states[place].finish is not None)
        if not self._include_reasoning:
            parts = [part for part in parts if not isinstance(part, Reasoning)]
        for part in parts:
            self._messages[place].add(part)
        if parser.ended:
            self.generation.end(place)
        return parts

    def message(self, place: int) -> MessageBuilder:
        """Return what has come of an answer."""
        return self._messages[place]

    def finish_reason(self, place: int) -> str | None:
        """Why an answer ended: the engine's reason, or "tool_calls"; None if it has not."""
        finish = self.generation.states[place].finish
        if finish is None:
            return None
        return "tool_calls" if finish.reason == "stop" and self._messages[place].calls else finish.reason

    def close(self) -> None:
        """Abort what still runs."""
        self.generation.close()


def arguments_object(text: str) -> dict[str, Any]:
    """Return a tool call's arguments as an object. Those of a call that was cut off may be none; they stay text."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {"_incomplete": text}
