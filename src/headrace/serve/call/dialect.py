"""`Dialect`: the way in which the served model writes tool calls and reasoning, chosen once, from flags or from its
chat template.

Makes, for each chat, the parsers of its answers. Knows formats by name, and no HTTP. Used by `serve.call.service`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.serve.call.call import ChatCall
from headrace.text import reasoning
from headrace.text.effort import LEVELS, Effort, reads
from headrace.text.outputs import ContentParser, MessageParser
from headrace.text.parser_names import FOUND, NONE
from headrace.text.reasoning import NO_STYLE, Headers, Style
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools import call_grammar, detection, formats
from headrace.text.tools.answers import begins_in_prompt, new_parser
from headrace.text.tools.call_grammar import FormatPart
from headrace.text.tools.choice import ToolUse
from headrace.text.tools.parser import AnswerForm, Bounds
from headrace.text.tools.response_templates import ResponseTemplate
from headrace.text.tools.whole_parser import WholeForm, WholeParser
from headrace.text.traits import Traits

logger = logging.getLogger("headrace.server")

Warn = Callable[..., None]
"""Takes a warning: a format and its values, as a logger does."""
FALLBACK = "hermes"
"""The format for models whose chat template shows none."""
OTHER_FORM = (
    "the chat template has no place for them, and the text in its place shows the model calls in another form than "
    "--tool-call-parser reads; leave the flag out for a model that writes calls as it is shown"
)
"""The warning of a dialect that does not read the form that the prompt shows."""


class Dialect(NamedTuple):
    """`tools` is a name of `text.tools.formats`, `reasoning` one of `text.reasoning`; None: the model writes no calls,
    or no reasoning. `token_ids`: the ids of the marks that are special tokens, which are usually left out of text.
    `template`: the sources of the chat template. `effort`: the chat template's variables for the amount of reasoning.
    `reads_shown`: whether calls are read in the form that the prompt shows the model. `response`: the tokenizer's own
    template of answers, by which answers are read, unless a grammar holds them to the form of `tools`; None: the
    tokenizer has none, or `tools` and `reasoning` read the same."""

    tools: str | None = None
    reasoning: str | None = None
    auto: bool = True
    token_ids: Mapping[str, int] = MappingProxyType({})
    template: str = ""
    effort: Effort = Effort()
    reads_shown: bool = True
    response: ResponseTemplate | None = None

    @classmethod
    def of(
        cls,
        template: ChatTemplate | None,
        tokenizer: Tokenizer | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        enable_auto_tool_choice: bool = True,
        warn: Warn = logger.warning,
    ) -> Dialect:
        """Return the dialect of a model; a parser that is not named is detected from the template. `warn`
        takes the warnings. Raises `RequestError`."""
        tool_call_parser = None if tool_call_parser in FOUND else tool_call_parser
        reasoning_parser = None if reasoning_parser in FOUND else reasoning_parser
        sources = [] if template is None else template.sources
        traits = Traits() if template is None else _traits(template, warn)
        tools, style = _format(template, traits, tool_call_parser, warn), _style(sources, reasoning_parser)
        for what, name, flag in (("tool calls", tools, tool_call_parser), ("reasoning", style, reasoning_parser)):
            if name is not None:
                logger.info("%s: %s, %s", what, name, "found in the chat template" if flag is None else "as configured")
        reads_shown = tools is None or detection.reads_shown(tools, traits)
        if not reads_shown:
            warn("tools: %s", OTHER_FORM)
        token_ids = _special(tokenizer, _marks(tools or FALLBACK, style))
        response = _response_template(tokenizer, (tool_call_parser, reasoning_parser), warn)
        if response is not None and tokenizer is not None:
            rows = AnswerForm(formats.FORMATS[tools or FALLBACK], reasoning.STYLES[style] if style else NO_STYLE)
            if detection.same_as_rows(response, rows, traits):
                logger.info("the tokenizer's response_template: read as the calls and the reasoning above")
                response = None
            else:
                logger.info("the tokenizer's response_template: answers are read with it, at their end, and sent then")
                token_ids |= {text: i for text, i in tokenizer.special_ids().items() if text in response.texts}
        return cls(
            tools,
            style,
            enable_auto_tool_choice and tool_call_parser != NONE,
            reads_shown=reads_shown,
            token_ids=token_ids,
            response=response,
            template="\n".join(sources),
            effort=Effort.of(sources, traits.refused_levels),
        )

    def reads(self, name: str) -> bool:
        """Return whether the chat template uses a variable."""
        return reads(self.template, name)

    def marks(self, use: ToolUse) -> dict[str, int]:
        """Return the special tokens that must stay in the text of a chat's answers, and their ids."""
        if self.response is not None:
            return dict(self.token_ids)
        marks = _marks(self.format_for(use), self.reasoning)
        return {mark: self.token_ids[mark] for mark in marks if mark in self.token_ids}

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end the model's turn, where it is divided by headers."""
        headers = self._headers
        return [] if headers is None else [self.token_ids[end] for end in headers.last if end in self.token_ids]

    def constraint(
        self, use: ToolUse, prompt: str, form: StructuredOutputs | None
    ) -> tuple[StructuredOutputs | None, bool]:
        """Return the constraint on the answers, and whether it ensures the form of all calls. `form` is the form of the
        content, if the request names one.

        An answer that must be calls contains nothing else. One that may be calls is calls or JSON of that form. Without
        a form, its calls are held to the grammars of custom tools, if there are any.
        """
        part = self._call_grammar(use, prompt, form)
        constraint, enforced = form, part is not None
        if part is not None:
            tag = msgspec.json.encode({"type": "structural_tag", "format": part}).decode()
            # A tool takes only the arguments that it names, unless its schema allows others.
            base = form or StructuredOutputs(json_object=True, disable_additional_properties=True)
            constraint = msgspec.structs.replace(
                base, json=None, regex=None, choice=None, grammar=None, json_object=None, structural_tag=tag
            )
        if constraint is None or self.reasoning is None:
            return constraint, enforced
        before = reasoning.prefix(self.reasoning, prompt, self.token_ids)
        if part is None and (opening := self._before_content(prompt)):
            elements = [*([] if before is None else [before]), *reasoning.spelled(opening, self.token_ids)]
            before = {"type": "sequence", "elements": elements}
        if before is None:
            return constraint, enforced
        return msgspec.structs.replace(constraint, prefix=msgspec.json.encode(before).decode()), enforced

    def _call_grammar(self, use: ToolUse, prompt: str, form: StructuredOutputs | None) -> FormatPart | None:
        """Return the grammar of an answer whose calls must have their form; None where no grammar is needed."""
        calls = self.format_for(use)
        if calls is None:
            return None
        is_begun = begins_in_prompt(formats.FORMATS[calls], prompt)
        required = call_grammar.RequiredCalls(
            use.schemas, not use.parallel, self.template, self.token_ids, is_begun, use.customs
        )
        if use.mode == "required":
            return call_grammar.grammar(calls, required)
        if form is None:
            return call_grammar.in_text(calls, required) if any(use.customs.values()) else None
        if form.kind not in ("json", "json_object"):
            return None
        schema = json.loads(form.json) if isinstance(form.json, str) else {"type": "object"}
        content = required.sequence(self._before_content(prompt), {"type": "json_schema", "json_schema": schema})
        return {"type": "or", "elements": [call_grammar.grammar(calls, required), content]}

    def _before_content(self, prompt: str) -> str:
        """Return the text that the model writes before an answer that is no call."""
        style = self._style
        return style.before_content if style.headers and not prompt.endswith(style.headers.body) else ""

    def set_effort(self, call: ChatCall, variables: dict[str, Any]) -> None:
        """Set the chat template's variables by the call's fields for reasoning. Raises `RequestError`."""
        efforts: dict[str, Any] = {}
        if call.thinks is not None:
            efforts |= self.effort.switched(call.thinks)
        if call.reasoning_effort is not None:
            if call.reasoning_effort not in LEVELS:
                raise RequestError("reasoning_effort", call.reasoning_effort, "one of " + ", ".join(LEVELS))
            at_level, why = self.effort.at(call.reasoning_effort)
            efforts |= at_level
            if why:
                call.warn("reasoning_effort", why)
        for name, value in efforts.items():
            variables.setdefault(name, value)

    def format_for(self, use: ToolUse) -> str | None:
        """Return the format of a chat's calls; None if it has none. Raises `RequestError`."""
        if use.mode == "none":
            return None
        if use.mode == "auto" and not self.auto:
            allowed = "none, required or a tool: the server runs with --no-enable-auto-tool-choice"
            raise RequestError("tool_choice", "auto", allowed)
        return self.tools or FALLBACK

    @property
    def _headers(self) -> Headers | None:
        tools = None if self.tools is None else formats.FORMATS[self.tools].headers
        return self._style.headers or tools

    @property
    def _style(self) -> Style:
        return NO_STYLE if self.reasoning is None else reasoning.STYLES[self.reasoning]

    def begins_inside(self, prompt: str) -> bool:
        """Return whether an answer to `prompt` begins as reasoning."""
        return reasoning.begins_inside(self._style, prompt)

    def parsers(self, use: ToolUse, prompt: str, enforced: bool) -> Callable[[], MessageParser]:
        """Return the maker of each answer's parser. `enforced`: a grammar ensures the form of all calls."""
        name = self.format_for(use)
        if self.response is not None and not enforced:
            whole = WholeForm(
                self.response, frozenset(self.marks(use)), None if name is None else use.schemas, not use.parallel
            )
            return lambda: WholeParser(whole, prompt)
        if name is None and self.reasoning is None and self._headers is None:
            return ContentParser
        calls = formats.NO_FORMAT if name is None else formats.FORMATS[name]
        form = AnswerForm(calls, self._style, frozenset(self.marks(use)), use.schemas if name else {})
        bounds = Bounds(enforced, not use.parallel, distinct=use.mode == "required")
        return lambda: new_parser(form, bounds, prompt=prompt)


def _format(template: ChatTemplate | None, traits: Traits, named: str | None, warn: Warn) -> str | None:
    """Return the format of calls that is `named`, or that the template shows. Raises `RequestError`."""
    if named is not None:
        return None if named == NONE else formats.format_name(named)
    if template is None:
        return None
    tools = detection.detect(traits, template.sources)
    if tools is None:
        reason = "writes calls in a form that is not known here" if traits.call else "shows no form of calls"
        text = "tool calls: none, the chat template %s; %s is used unless --tool-call-parser is given"
        warn(text, reason, FALLBACK)
    return tools


def _style(sources: list[str], named: str | None) -> str | None:
    """Return the style of reasoning that is `named`, or that the sources show. Raises `RequestError`."""
    if named is None:
        return reasoning.detect(sources)
    return None if named in (NONE, "") else reasoning.style_name(named)


def _traits(template: ChatTemplate, warn: Warn) -> Traits:
    try:
        return template.traits()
    except HeadraceError as error:
        warn("the chat template can not be tried out: %s", error)
        return Traits()


def _response_template(
    tokenizer: Tokenizer | None, named: tuple[str | None, ...], warn: Warn
) -> ResponseTemplate | None:
    """Return the tokenizer's own template of answers, unless a parser is `named`."""
    if tokenizer is None or tokenizer.response_template is None:
        return None
    if named != (None, None):
        logger.info("the tokenizer's response_template is not used: a parser is configured")
        return None
    try:
        return ResponseTemplate(tokenizer.response_template)
    except ValueError as error:
        warn("the tokenizer's response_template is ignored: %s", error)
        return None


def _marks(form: str | None, style: str | None) -> tuple[str, ...]:
    """Return the texts that must stay in an answer so that its calls and reasoning are found."""
    return (formats.FORMATS[form].special_texts() if form else ()) + (reasoning.marks(style) if style else ())


def _special(tokenizer: Tokenizer | None, marks: tuple[str, ...]) -> dict[str, int]:
    """Return the ids of the `marks` that are special tokens."""
    if tokenizer is None:
        return {}
    token_ids = {mark: tokenizer.token_to_id(mark) for mark in marks}
    return {mark: i for mark, i in token_ids.items() if i is not None and tokenizer.is_special(i)}
