"""A chat's message, whole or in pieces, as OpenAI's chat completions have it.

The text of a custom tool's call is extracted from the arguments that the model writes, and a request with `functions`
gets its one call as `function_call`. Knows no engine and no HTTP; called by `answers`.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from headrace.serve.apis.openai import reply
from headrace.text.outputs import CallPart, Content, MessageBuilder, MessagePart, Reasoning
from headrace.text.tools.choice import ToolUse
from headrace.text.tools.custom import InputText, input_of


def whole(message: MessageBuilder, tools: ToolUse) -> reply.ChatMessage:
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
