"""How the model that is served writes tool calls and reasoning: chosen once, from flags or from its chat template.

Makes, for each chat, the parsers of its answers. Knows formats by name, and no HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.errors import RequestError
from headrace.server import reasoning
from headrace.server.chat import ChatTemplate
from headrace.server.parts import ContentParser, MessageParser
from headrace.server.reasoning import ReasoningParser
from headrace.server.schema import ChatCompletionRequest, TokenizeRequest
from headrace.server.text import Tokenizer
from headrace.server.tools import registry
from headrace.server.tools.choice import ToolUse

logger = logging.getLogger("headrace.server")

NONE = "none"
"""As the name of a parser: there is none."""
LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh")
EFFORTS = ("reasoning_effort", "enable_thinking", "thinking")
"""Variables by which chat templates are told how much to reason."""
FALLBACK = "hermes"
"""For models whose chat template shows no format."""


class Dialect(NamedTuple):
    """`tools` and `reasoning` are names of `tools.registry` and `reasoning`; None where there is no such thing.
    `shows_tools`: whether the chat template has a place for tools. `tool_marks`, `reasoning_marks`: whether their marks
    are special tokens, which are left out of text unless it is asked for them. `efforts`: the variables of the chat
    template that say how much to reason."""

    tools: str | None = None
    reasoning: str | None = None
    auto: bool = True
    shows_tools: bool = False
    tool_marks: bool = False
    reasoning_marks: bool = False
    efforts: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        template: ChatTemplate | None,
        tokenizer: Tokenizer | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        enable_auto_tool_choice: bool = True,
    ) -> Dialect:
        """A parser that is not named is found by what the template shows. Raises `RequestError`."""
        sources = [] if template is None else template.sources
        tools, style = registry.detect(sources), reasoning.detect(sources)
        if tool_call_parser is not None:
            enable_auto_tool_choice = enable_auto_tool_choice and tool_call_parser != NONE
            tools = None if tool_call_parser == NONE else registry.format_name(tool_call_parser)
        if reasoning_parser is not None:
            style = None if reasoning_parser in (NONE, "") else reasoning.style_name(reasoning_parser)
        for what, name, given in (("tool calls", tools, tool_call_parser), ("reasoning", style, reasoning_parser)):
            if name is not None:
                logger.info("%s: %s, %s", what, name, "found in the chat template" if given is None else "as told")
        return cls(
            tools,
            style,
            enable_auto_tool_choice,
            shows_tools=any("tools" in source for source in sources),
            tool_marks=tools is not None and _any_special(tokenizer, registry.marks(tools)),
            reasoning_marks=style is not None and _any_special(tokenizer, reasoning.marks(style)),
            efforts=frozenset(name for name in EFFORTS if any(name in source for source in sources)),
        )

    def needs_marks(self, use: ToolUse) -> bool:
        """Whether a chat's answers must be read with their special tokens."""
        return self.reasoning_marks or (self.tool_marks and use.mode != "none")

    def set_effort(self, request: ChatCompletionRequest | TokenizeRequest, variables: dict[str, Any]) -> None:
        """Put `reasoning_effort` into the chat template's variables. Raises `RequestError`."""
        effort = request.reasoning_effort
        if effort not in LEVELS:
            raise RequestError("reasoning_effort", effort, "one of " + ", ".join(LEVELS))
        if not self.efforts:
            request.warn("reasoning_effort", "ignored: the chat template knows no such thing")
        if effort != "none" and "reasoning_effort" in self.efforts:
            variables.setdefault("reasoning_effort", effort)
        for name in self.efforts & {"enable_thinking", "thinking"}:
            variables.setdefault(name, effort != "none")

    def format_for(self, use: ToolUse) -> str | None:
        """The format of a chat's calls; None if it has none. Raises `RequestError`."""
        if use.mode == "none":
            return None
        if use.mode == "auto" and not self.auto:
            raise RequestError("tool_choice", "auto", "none, required or a tool: the server was told so")
        return self.tools or FALLBACK

    def begins_inside(self, prompt: str) -> bool:
        """Whether an answer to `prompt` begins as reasoning."""
        return self.reasoning is not None and reasoning.begins_inside(self.reasoning, prompt)

    def parsers(self, use: ToolUse, prompt: str, enforced: bool) -> Callable[[], MessageParser]:
        """Makes the parser of each answer. `enforced`: a grammar sees to the form of all calls."""
        form = self.format_for(use)
        style, inside = self.reasoning, self.begins_inside(prompt)

        def new_parser() -> MessageParser:
            inner: MessageParser = ContentParser()
            if form is not None:
                inner = registry.new_parser(form, use.schemas, enforced, single=not use.parallel)
            return inner if style is None else ReasoningParser(style, inside, inner)

        return new_parser


def _any_special(tokenizer: Tokenizer | None, marks: tuple[str, ...]) -> bool:
    if tokenizer is None:
        return False
    token_ids = [tokenizer.token_to_id(mark) for mark in marks]
    return any(token_id is not None and tokenizer.is_special(token_id) for token_id in token_ids)
