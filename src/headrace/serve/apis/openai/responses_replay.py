"""A stored response, or one that runs in the background, as the events of its stream, with the same numbers and bytes.

The items have all text; `StoredResponse.cuts` holds the places where the stream cut it into deltas. So a client that
lost a stream continues after the last event that it received. Knows no engine; called by `responses`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from headrace.engine.generation import LARGE_TEXT, width
from headrace.serve.apis.openai.responses_events import Cut, Event, OutputItem, OutputText, ResponseObject
from headrace.serve.routing import Readable, large_event

RUNNING = ("queued", "in_progress")
CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Items whose text is a field, by type; other items have their text in a part."""
ENDS = ("completed", "incomplete", "failed")
"""States that have an event; a cancelled response ends with the event of an incomplete one."""


EVENTS_A_SLICE = 64
"""The number of events after which other tasks run."""


class StoredResponse(msgspec.Struct, kw_only=True):
    """A response as it is stored: the object, its input, the items that came before, and the cuts of its stream."""

    response: ResponseObject
    input: list[Any]
    history: list[msgspec.Raw]
    cuts: list[Cut] = []


class EncodedText(OutputText, kw_only=True):
    logprobs: list[msgspec.Raw] | UnsetType = UNSET  # type: ignore[assignment]


class EncodedItem(OutputItem, kw_only=True):
    content: list[EncodedText] | UnsetType = UNSET  # type: ignore[assignment]


class EncodedResponseObject(ResponseObject, kw_only=True):
    output: list[EncodedItem]  # type: ignore[assignment]


class EncodedResponse(StoredResponse, kw_only=True):
    """A stored response as it is read: log-probabilities and items stay encoded, because decoding many of them holds
    the interpreter's lock. `responses_stored` reads the lists of log-probabilities."""

    response: EncodedResponseObject
    input: list[msgspec.Raw]


class RawResponse(msgspec.Struct):
    """The object of a stored response, still encoded."""

    response: msgspec.Raw


class ResponseItems(msgspec.Struct):
    """The items of a stored response: its output, its input, and the items before it."""

    class Response(msgspec.Struct):
        status: str
        background: bool
        output: list[msgspec.Raw]

    response: Response
    input: list[msgspec.Raw]
    history: list[msgspec.Raw]


def snapshot(response: ResponseObject) -> ResponseObject:
    """Return a response that still runs as it is now. Its lists are copies, their items are shared."""

    def copied(item: OutputItem) -> OutputItem:
        if not item.content:
            return replace(item)
        part = item.part
        logprobs = list(part.logprobs) if isinstance(part.logprobs, list) else UNSET
        return replace(item, content=[replace(part, logprobs=logprobs)])

    return replace(response, output=[copied(item) for item in response.output])


class Replay:
    """The events of a response, as far as it has come. `cuts` may grow with it."""

    def __init__(self, response: ResponseObject, cuts: list[Cut]) -> None:
        self._response, self._cuts = response, cuts
        self._num_events = self._num_cuts = self._num_closed = 0
        # Of the open item: characters and log-probabilities that were passed on; None: no item is open.
        self._passed: tuple[int, int] | None = None

    def opening(self) -> Iterator[Event]:
        """Yield the two events before the first item, with the response as it was at that time."""
        fields: dict[str, Any] = {"status": "in_progress", "output": [], "timings": UNSET, "explain": UNSET}
        fields |= dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
        response = replace(self._response, **fields)
        for kind in ("created", "in_progress"):
            yield self._whole(kind, response)

    def advance(self) -> Iterator[Event]:
        """Yield the events since the last call, the final ones too if the response has ended. Text that comes meanwhile
        is in these events or in the next call's."""
        response, has_ended = self._response, self._response.status not in RUNNING
        while self._num_closed < len(response.output):
            item = response.output[self._num_closed]
            if self._passed is None:
                yield from self._open(item)
            while self._num_cuts < len(self._cuts) and self._cuts[self._num_cuts][0] == self._num_closed:
                _, length, num_logprobs = self._cuts[self._num_cuts]
                self._num_cuts += 1
                yield self._delta(item, length, num_logprobs)
            if self._num_closed == len(response.output) - 1 and not has_ended:
                break
            closing = self._close(item)
            # The stream of a failed response breaks off without them.
            if response.status in ENDS[:2] or self._num_closed < len(response.output) - 1:
                yield from closing
            self._num_closed += 1
        if has_ended:
            status = response.status if response.status in ENDS else "incomplete"
            yield self._whole(status, response)

    def _event(self, kind: Any, **fields: Any) -> Event:
        event = Event(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return event

    def _whole(self, status: str, response: ResponseObject) -> Event:
        return self._event(f"response.{status}", response=response)

    def _item_event(self, item: OutputItem, kind: str, **fields: Any) -> Event:
        place = {} if item.type in CALLS else {"content_index": 0}
        return self._event(f"response.{kind}", item_id=item.id, output_index=self._num_closed, **place, **fields)

    def _open(self, item: OutputItem) -> list[Event]:
        self._passed = (0, 0)
        name = CALLS.get(item.type)
        empty: dict[str, Any] = {"content": []} if name is None else {name: ""}
        empty_item = replace(item, status="in_progress", **empty)
        events = [self._event("response.output_item.added", output_index=self._num_closed, item=empty_item)]
        if name is None:
            logprobs: Any = UNSET if item.part.logprobs is UNSET else []
            events.append(
                self._item_event(item, "content_part.added", part=replace(item.part, text="", logprobs=logprobs))
            )
        return events

    def _delta(self, item: OutputItem, length: int, num_logprobs: int) -> Event:
        at, num = self._passed or (0, 0)
        self._passed = at + length, num + num_logprobs
        delta = _text(item)[at : at + length]
        if item.type in CALLS:
            return self._item_event(item, f"{_kind(item)}.delta", delta=delta)
        logprobs = item.part.logprobs
        part = logprobs[num : num + num_logprobs] if isinstance(logprobs, list) else UNSET
        return self._item_event(item, f"{_kind(item)}.delta", delta=delta, logprobs=part)

    def _close(self, item: OutputItem) -> list[Event]:
        events: list[Event] = []
        rest = len(_text(item)) - (self._passed or (0, 0))[0]
        if rest:
            # It was stored by a version that noted no cuts.
            events.append(self._delta(item, rest, 2**31))
        if item.type == "function_call":
            events.append(self._item_event(item, f"{_kind(item)}.done", name=item.name, arguments=item.arguments))
        elif item.type in CALLS:
            events.append(self._item_event(item, f"{_kind(item)}.done", **{CALLS[item.type]: _text(item)}))
        else:
            part = item.part
            events.append(self._item_event(item, f"{_kind(item)}.done", text=part.text, logprobs=part.logprobs))
            events.append(self._item_event(item, "content_part.done", part=part))
        events.append(self._event("response.output_item.done", output_index=self._num_closed, item=item))
        self._passed = None
        return events


def _text(item: OutputItem) -> str:
    text = getattr(item, CALLS[item.type]) if item.type in CALLS else item.part.text
    return text if isinstance(text, str) else ""


def _kind(item: OutputItem) -> str:
    """Return the first part of the names of an item's events."""
    if item.type in CALLS:
        return f"{item.type}_{CALLS[item.type]}"
    return "output_text" if item.type == "message" else "reasoning_text"


class StoredStream(Readable):
    """The stream of a stored response.

    Args:
        after: the number of the last event that the client has; -1: none.
        change: returns an `asyncio.Event` that is set when a running response has new text.
        leave: is called once, after the last read.
    """

    def __init__(
        self,
        response: ResponseObject,
        cuts: list[Cut],
        after: int,
        change: Callable[[], asyncio.Event] = asyncio.Event,
        leave: Callable[[], None] | None = None,
    ) -> None:
        self.id, self.stream = response.id, True
        self._response, self._replay = response, Replay(response, cuts)
        self._after, self._change, self._leave = after, change, leave

    async def whole(self) -> ResponseObject:
        return self._response

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events behind `after`, then all further events as they come."""
        opening: Iterator[Event] = self._replay.opening()
        while True:
            change, has_ended = self._change(), self._response.status not in RUNNING
            for event in itertools.chain(opening, self._replay.advance()):
                if event.sequence_number % EVENTS_A_SLICE == 0:
                    await asyncio.sleep(0)
                if event.sequence_number > self._after:
                    rows = event.logprobs or []
                    size = LARGE_TEXT if event.delta is UNSET else len(rows) * (1 + width(rows))
                    yield await large_event(event, size, b"event: %b\ndata: " % event.type.encode(), keeps_body=True)
            if has_ended:
                return
            opening = iter(())
            await change.wait()

    def close(self) -> None:
        """Stop reading. The response goes on without its readers."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()
