"""The typed events of OpenAI's Responses API, and the output items that they build up.

`Output` takes an answer's parts in and gives events out; a reply that is read whole runs through the same code, so
the two can not differ. Knows no engine and no HTTP; called by `serve.apis.openai.responses`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.text.parts import Content, MessagePart, Reasoning, ToolCall

Event = dict[str, Any]

_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def encode(event: Event) -> bytes:
    """One server-sent event, with its type as the event's name."""
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


class Output:
    """The output items of one response, and the events that tell how they came to be.

    `response` is the response object: its `output` is kept up to date, and the events that carry the whole object
    carry it as it is then. Sequence numbers count from 0.
    """

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self.items: list[dict[str, Any]] = response["output"]
        self._open: dict[str, Any] | None = None
        self._num_events = 0

    def event(self, kind: str, **fields: Any) -> Event:
        made = {"type": kind, "sequence_number": self._num_events} | fields
        self._num_events += 1
        return made

    def whole(self, status: str) -> Event:
        """The event that tells the whole object, such as `response.created` of "created"."""
        # A snapshot: the object goes on changing.
        return self.event(f"response.{status}", response=msgspec.json.decode(msgspec.json.encode(self.response)))

    def take(self, parts: list[MessagePart], logprobs: list[dict[str, Any]]) -> list[Event]:
        """The next parts; `logprobs` are those of the tokens that came with them, for text."""
        events: list[Event] = []
        for part in parts:
            if isinstance(part, Content):
                events += self._begin("message", {"role": "assistant", "content": []})
                events.append(self._text("response.output_text.delta", part.text, logprobs=logprobs))
                logprobs = []
            elif isinstance(part, Reasoning):
                events += self._begin("reasoning", {"summary": [], "content": []})
                events.append(self._text("response.reasoning_text.delta", part.text))
            else:
                events += self._call(part)
        return events

    def end(self, status: str = "completed") -> list[Event]:
        """Nothing more comes: close the last item, which is "incomplete" if it was cut off."""
        return self._close(status)

    def _begin(self, kind: str, fields: dict[str, Any]) -> list[Event]:
        """Open an item of this kind with one part of text, unless it is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._close() + self._add(kind, fields)
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items[-1]["content"].append(part)
        return [*events, self._part_event("response.content_part.added", part=dict(part))]

    def _add(self, kind: str, fields: dict[str, Any]) -> list[Event]:
        item_id = f"{_IDS[kind]}_{self.response['id'].partition('_')[2]}_{len(self.items)}"
        self._open = {"id": item_id, "type": kind, "status": "in_progress"} | fields
        self.items.append(self._open)
        item = {name: list(value) if isinstance(value, list) else value for name, value in self._open.items()}
        return [self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)]

    def _call(self, part: ToolCall) -> list[Event]:
        events: list[Event] = []
        if part.name is not None:
            fields = {"call_id": part.id, "name": part.name, "arguments": ""}
            events = self._close() + self._add("function_call", fields)
        if part.arguments:
            self.items[-1]["arguments"] += part.arguments
            events.append(self._item_event("response.function_call_arguments.delta", delta=part.arguments))
        return events

    def _text(self, kind: str, text: str, **more: Any) -> Event:
        part = self.items[-1]["content"][0]
        part["text"] += text
        if more.get("logprobs"):
            part["logprobs"] += more["logprobs"]
        return self._part_event(kind, delta=text, **more)

    def _close(self, status: str = "completed") -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        events = []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._item_event("response.function_call_arguments.done", **done))
        else:
            part = item["content"][0]
            kind, more = "response.reasoning_text.done", {}
            if item["type"] == "message":
                kind, more = "response.output_text.done", {"logprobs": list(part["logprobs"])}
            events.append(self._part_event(kind, text=part["text"], **more))
            events.append(self._part_event("response.content_part.done", part=dict(part)))
        events.append(self.event("response.output_item.done", output_index=len(self.items) - 1, item=dict(item)))
        return events

    def _item_event(self, kind: str, **fields: Any) -> Event:
        return self.event(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields)

    def _part_event(self, kind: str, **fields: Any) -> Event:
        return self._item_event(kind, content_index=0, **fields)
