"""A stored response, or one that runs in the background, as the events of its stream, with the same numbers and bytes.

The items have all text; `Entry.cuts` says how the stream cut it into deltas. So a client that lost a stream goes on
behind the last event that it has. Knows no engine; called by `responses`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from headrace.serve import errors
from headrace.serve.apis.openai.responses_events import Cut, Event, OutputItem, ResponseObject
from headrace.serve.routing import Readable

RUNNING = ("queued", "in_progress")
CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Items whose text is a field of their own, by type; that of the others is in their part."""
ENDS = ("completed", "incomplete", "failed")
"""States with an event of their own; a response that was cancelled ends as incomplete."""


class Entry(msgspec.Struct, kw_only=True):
    """A stored response: the object, its input, the items that came before, and how its stream was cut."""

    response: ResponseObject
    input: list[dict[str, Any]]
    history: list[dict[str, Any]]
    cuts: list[Cut] = []


class Written(msgspec.Struct):
    """Of a stored response, the object alone and as it was written."""

    response: msgspec.Raw


class StoredOutput(msgspec.Struct):
    output: list[dict[str, Any]]


class StoredItems(msgspec.Struct):
    """Of a stored response, the items that it took and gave."""

    input: list[dict[str, Any]]
    response: StoredOutput


class Replay:
    """The events of a response, as far as it has come. `cuts` may grow with it."""

    def __init__(self, response: ResponseObject, cuts: list[Cut]) -> None:
        self._response, self._cuts = response, cuts
        self._num_events = self._num_cuts = self._num_closed = 0
        # Of the open item: characters and log-probabilities that were passed on; None: no item is open.
        self._passed: tuple[int, int] | None = None

    def opening(self) -> list[Event]:
        """Return the two events before the first item, with the response as it was then."""
        fields: dict[str, Any] = {"status": "in_progress", "output": [], "timings": UNSET, "explain": UNSET}
        fields |= dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
        response = replace(self._response, **fields)
        return [self._whole(kind, response) for kind in ("created", "in_progress")]

    def advance(self) -> list[Event]:
        """Return the events of what has come since the last call; the last ones once the response has ended."""
        events: list[Event] = []
        response, has_ended = self._response, self._response.status not in RUNNING
        while self._num_closed < len(response.output):
            item = response.output[self._num_closed]
            if self._passed is None:
                events += self._open(item)
            while self._num_cuts < len(self._cuts) and self._cuts[self._num_cuts][0] == self._num_closed:
                _, length, num_logprobs = self._cuts[self._num_cuts]
                self._num_cuts += 1
                events.append(self._delta(item, length, num_logprobs))
            if self._num_closed == len(response.output) - 1 and not has_ended:
                break
            closing = self._close(item)
            # The stream of a failed response breaks off without them.
            events += closing if response.status in ENDS[:2] or self._num_closed < len(response.output) - 1 else []
            self._num_closed += 1
        if has_ended:
            status = response.status if response.status in ENDS else "incomplete"
            events.append(self._whole(status, response))
        return events

    def _event(self, kind: Any, **fields: Any) -> Event:
        event = Event(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return event

    def _whole(self, status: str, response: ResponseObject) -> Event:
        return self._event(f"response.{status}", response=msgspec.Raw(msgspec.json.encode(response)))

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
    """The first part of the names of an item's events."""
    if item.type in CALLS:
        return f"{item.type}_{CALLS[item.type]}"
    return "output_text" if item.type == "message" else "reasoning_text"


class StoredStream(Readable):
    """The stream of a stored response.

    Args:
        after: the number of the last event that the client has; -1: none.
        change: returns an event that is set when a running response has gone on.
    """

    def __init__(
        self, response: ResponseObject, cuts: list[Cut], after: int, change: Callable[[], asyncio.Event]
    ) -> None:
        self.id, self.stream = response.id, True
        self._response, self._replay = response, Replay(response, cuts)
        self._after, self._change = after, change

    async def whole(self) -> ResponseObject:
        return self._response

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events behind `after`, and those that are still to come."""
        events = self._replay.opening()
        while True:
            change, has_ended = self._change(), self._response.status not in RUNNING
            for event in [*events, *self._replay.advance()]:
                if event.sequence_number > self._after:
                    yield errors.event(event, event.type)
            if has_ended:
                return
            events = []
            await change.wait()

    def close(self) -> None:
        """Leave the response as it is: it runs on without its readers."""
