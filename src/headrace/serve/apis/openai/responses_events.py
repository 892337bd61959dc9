"""The response object of OpenAI's Responses API, its output items, and the typed events that build them up.

`Output` takes an answer's parts and returns events; a reply that is read whole runs through the same code, so the two
cannot differ. Knows no engine and no HTTP; called by `serve.apis.openai.responses`.
"""

from __future__ import annotations

import time
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from headrace.serve.apis.openai.reply import Explanations
from headrace.serve.apis.openai.responses_input import ResponsesRequest, conversation_of
from headrace.serve.apis.openai.responses_tools import NO_TOOLS, ClientTools
from headrace.serve.call.call import Answer
from headrace.serve.call.parsing import WarningLines
from headrace.serve.call.replies import ChatTokenLogprob, Timings
from headrace.text.outputs import CallPart, Content, MessagePart, Reasoning
from headrace.text.tools.custom import InputText

ItemType = Literal["message", "reasoning", "function_call", "custom_tool_call"]
_IDS: dict[ItemType, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class OutputText(msgspec.Struct, kw_only=True):
    """A part of an item's content. Reasoning has no annotations and no log-probabilities."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET


class OutputItem(msgspec.Struct, kw_only=True):
    """A message has role and content, reasoning has summary and content. A function call has call_id, name and
    arguments, the call of a custom tool input instead of these; `namespace` is the tool's, if it has one."""

    id: str
    type: ItemType
    status: str
    role: str | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    content: list[OutputText] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    namespace: str | UnsetType = UNSET

    @property
    def part(self) -> OutputText:
        """The one part of an item of text."""
        if not self.content:
            raise ValueError(f"an item of the type {self.type} has no text")
        return self.content[0]


class CachedTokens(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokens(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: str


class ReasoningSettings(msgspec.Struct, kw_only=True):
    effort: str | None
    summary: str | None


class TextSettings(msgspec.Struct, kw_only=True):
    format: dict[str, Any]
    verbosity: str


class InputTokens(msgspec.Struct, kw_only=True):
    """POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
    warnings: WarningLines = UNSET


class ConversationRef(msgspec.Struct, kw_only=True):
    """The conversation that a response is a part of."""

    id: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """POST /v1/responses. `usage` and `timings` come when it has ended."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: str
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, Any]
    seed: int
    warnings: WarningLines = UNSET
    timings: Timings | UnsetType = UNSET
    explain: Explanations = UNSET
    conversation: ConversationRef | UnsetType = UNSET


class Event(msgspec.Struct, kw_only=True):
    """An event of a stream. Its type determines which of the other fields it has."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "response.output_item.added",
        "response.output_item.done",
        "response.content_part.added",
        "response.content_part.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
    ]
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET


Cut = tuple[int, int, int]
"""A delta of a stream: the index of its item, its characters, and its log-probabilities."""


class Output:
    """The output items of one response, and the events that build them up.

    `response` is the response object: its `output` is kept up to date, and an event with the whole object has it as it
    is at that time. `tools` are the client's. Sequence numbers count from 0. `cuts` are the deltas so far, for
    `responses_replay`.
    """

    def __init__(self, response: ResponseObject, tools: ClientTools = NO_TOOLS) -> None:
        self.response = response
        self._tools = tools
        self._input = InputText()
        self.items = response.output
        self.cuts: list[Cut] = []
        self._open: OutputItem | None = None
        self._num_events = 0

    @property
    def is_in_message(self) -> bool:
        """Whether a message is open, which may grow."""
        return self._open is not None and self._open.type == "message"

    def event(self, kind: Any, **fields: Any) -> Event:
        event = Event(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        if "delta" in fields:
            logprobs = fields.get("logprobs", UNSET)
            num_logprobs = len(logprobs) if isinstance(logprobs, list) else 0
            self.cuts.append((len(self.items) - 1, len(fields["delta"]), num_logprobs))
        return event

    def whole(self, status: str, encoded: bytes | None = None) -> Event:
        """Return the event with the whole object, such as `response.created` for "created"."""
        # Encoded now, for the object changes later.
        encoded = msgspec.json.encode(self.response) if encoded is None else encoded
        return self.event(f"response.{status}", response=msgspec.Raw(encoded))

    def take(self, parts: list[MessagePart], logprobs: list[ChatTokenLogprob]) -> list[Event]:
        """Add the next parts; `logprobs` belong to the tokens that came with the parts of text."""
        events: list[Event] = []
        for part in parts:
            if isinstance(part, Content):
                gap = part.gap if self._is_open("message") else ""
                events += self._begin("message", role="assistant")
                events.append(self._text("response.output_text.delta", gap + part.text, logprobs))
                logprobs = []
            elif isinstance(part, Reasoning):
                gap = part.gap if self._is_open("reasoning") else ""
                events += self._begin("reasoning", summary=[])
                events.append(self._text("response.reasoning_text.delta", gap + part.text, UNSET))
            else:
                events += self._call(part)
        return events

    def end(self, status: str = "completed") -> list[Event]:
        """Close the last item, which is "incomplete" if it was cut off; nothing more comes."""
        return self._close(status)

    def _is_open(self, kind: ItemType) -> bool:
        return self._open is not None and self._open.type == kind

    def _begin(self, kind: ItemType, **fields: Any) -> list[Event]:
        """Open an item of this kind with one part of text, unless it is open."""
        if self._is_open(kind):
            return []
        events = self._close() + self._add(kind, content=[], **fields)
        # Two parts, one for the item and one for the event: the item's grows before the event is encoded.
        part, empty = (
            OutputText(type="output_text", text="", annotations=[], logprobs=[])
            if kind == "message"
            else OutputText(type="reasoning_text", text="")
            for _ in range(2)
        )
        self.items[-1].content = [part]
        return [*events, self._part_event("response.content_part.added", part=empty)]

    def _add(self, kind: ItemType, **fields: Any) -> list[Event]:
        item_id = f"{_IDS[kind]}_{self.response.id.partition('_')[2]}_{len(self.items)}"
        self._open = OutputItem(id=item_id, type=kind, status="in_progress", **fields)
        self.items.append(self._open)
        return [self.event("response.output_item.added", output_index=len(self.items) - 1, item=replace(self._open))]

    def _call(self, part: CallPart) -> list[Event]:
        events: list[Event] = []
        if part.name is not None:
            tool = self._tools.called(part.name)
            kind: ItemType = "custom_tool_call" if tool.is_custom else "function_call"
            empty = {"input": ""} if tool.is_custom else {"arguments": ""}
            namespace = UNSET if tool.namespace is None else tool.namespace
            self._input = InputText()
            events = self._close()
            events += self._add(kind, call_id=part.id, name=tool.name, namespace=namespace, **empty)
        item = self.items[-1]
        if item.type == "custom_tool_call":
            events += self._add_input(self._input.feed(part.arguments))
        elif part.arguments and isinstance(item.arguments, str):
            item.arguments += part.arguments
            events.append(self._item_event("response.function_call_arguments.delta", delta=part.arguments))
        return events

    def _add_input(self, text: str) -> list[Event]:
        item = self.items[-1]
        if not text or not isinstance(item.input, str):
            return []
        item.input += text
        return [self._item_event("response.custom_tool_call_input.delta", delta=text)]

    def _text(self, kind: str, text: str, logprobs: list[ChatTokenLogprob] | UnsetType) -> Event:
        part = self.items[-1].part
        part.text += text
        if logprobs and part.logprobs is not UNSET:
            part.logprobs += logprobs
        return self._part_event(kind, delta=text, logprobs=logprobs)

    def _close(self, status: str = "completed") -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        item.status = status
        events: list[Event] = []
        if item.type == "custom_tool_call":
            events += self._add_input(self._input.close())
            events.append(self._item_event("response.custom_tool_call_input.done", input=item.input))
        elif item.type == "function_call":
            kind = "response.function_call_arguments.done"
            events.append(self._item_event(kind, name=item.name, arguments=item.arguments))
        else:
            part = item.part
            kind = "response.output_text.done" if item.type == "message" else "response.reasoning_text.done"
            events.append(self._part_event(kind, text=part.text, logprobs=part.logprobs))
            events.append(self._part_event("response.content_part.done", part=replace(part)))
        events.append(self.event("response.output_item.done", output_index=len(self.items) - 1, item=replace(item)))
        return events

    def _item_event(self, kind: str, **fields: Any) -> Event:
        return self.event(kind, item_id=self.items[-1].id, output_index=len(self.items) - 1, **fields)

    def _part_event(self, kind: str, **fields: Any) -> Event:
        return self._item_event(kind, content_index=0, **fields)


def response_object(name: str, request: ResponsesRequest, chat: Answer, response_id: str) -> ResponseObject:
    """Return the response to a request whose answer has not begun."""
    params = chat.generation.states[0].request.params
    form = {"type": "text"} if request.text is None or request.text.format is None else request.text.format
    conversation_id = conversation_of(request)
    effort = None if request.reasoning is None else request.reasoning.effort
    return ResponseObject(
        id=response_id,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        safety_identifier=request.safety_identifier,
        user=request.user,
        created_at=int(time.time()),
        completed_at=None,
        status="in_progress",
        background=bool(request.background),
        error=None,
        incomplete_details=None,
        model=name,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=ReasoningSettings(effort=effort, summary=None),
        service_tier="default",
        store=request.store is not False,
        temperature=params.temperature,
        text=TextSettings(format=msgspec.to_builtins(form), verbosity="medium"),
        tool_choice=request.tool_choice or "auto",
        tools=[_shown_tool(tool) for tool in request.tools or []],
        top_logprobs=request.top_logprobs or 0,
        top_p=params.top_p,
        truncation=request.truncation or "disabled",
        usage=None,
        metadata=request.metadata or {},
        seed=cast(int, params.seed),
        warnings=chat.call.warnings.reply(),
        conversation=UNSET if conversation_id is None else ConversationRef(id=conversation_id),
    )


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"strict": False, "parameters": None} | tool if tool.get("type") == "function" else tool
