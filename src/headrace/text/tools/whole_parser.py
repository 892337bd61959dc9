"""`WholeParser` reads an answer at its end, by a tokenizer's own `response_template`.

The message is transformers' (`parse_response`), with the exceptions that the APIs require: the part of the answer in
the prompt is not repeated; a call that is not well-formed is content, and one that a limit cut is left out; special
tokens are never content; reasoning that the model never ends is the answer where there is no other. No field is
required: also one that is not `optional` may be absent. Knows no HTTP. Made by `serve.call.dialect`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.text.outputs import CallPart, Content, MessagePart, Reasoning
from headrace.text.tools.arguments import Argument
from headrace.text.tools.formats import call_id
from headrace.text.tools.parser import GAP, Schemas
from headrace.text.tools.reader import MAX_NAME
from headrace.text.tools.response_templates import Region, ResponseTemplate

logger = logging.getLogger("headrace.server")

CALLS = "tool_calls"
CONTENT = "content"
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the fields of reasoning, of which the first one present is taken."""


class WholeForm(NamedTuple):
    """The form of answers. `special`: the special tokens that stand in their text. `schemas`: the tools' schemas; None:
    there are no calls. `single`: only the first call counts."""

    template: ResponseTemplate
    special: frozenset[str] = frozenset()
    schemas: Schemas | None = None
    single: bool = False


class WholeParser:
    """A `MessageParser` of one answer to `prompt` (see `outputs`)."""

    ended = False

    def __init__(self, form: WholeForm, prompt: str = "") -> None:
        self._form = form
        self._prompt = prompt
        self._pieces: list[str] = []
        self._special = re.compile("|".join(map(re.escape, sorted(form.special, key=len, reverse=True))) or r"(?!)")

    def feed(self, text: str, final: bool, cut: bool = False) -> list[MessagePart]:
        self._pieces.append(text)
        if not final:
            return []
        answer = "".join(self._pieces)
        self._pieces.clear()
        template = self._form.template
        try:
            start = template.begun(self._prompt)
            regions = template.regions(start + answer)
        except ValueError as error:
            logger.warning("response_template: an answer is content, all of it: %s", error)
            return _spoken(Content, self._special.sub("", answer))
        return self._parts(start + answer, len(start), [each for each in regions if each.end > len(start)], cut)

    def _parts(self, text: str, num_begun: int, regions: list[Region], cut: bool) -> list[MessagePart]:
        message: dict[str, Any] = {}
        calls: list[tuple[str, str]] = []
        unread: list[str] = []
        for region in regions:
            field, (start, end) = region.field, region.body
            makes_calls = field.name == CALLS and self._form.schemas is not None
            if makes_calls and cut and not region.is_closed:
                continue
            if field.content == "text":
                start = max(start, num_begun)
            try:
                value = field.value(text[start:end], region.captures)
                if field.name != CALLS:
                    _put(message, region, value)
                elif not makes_calls:
                    raise ValueError("no call is made")
                else:
                    calls = [*calls, *self._calls(value)] if field.repeats else self._calls(value)
            except (ValueError, RecursionError):
                # All of it is content, as for a call in one of our own formats that is not well-formed.
                unread.append(text[max(region.start, num_begun) : region.end])
        content = self._said(message, CONTENT)
        reasoning = next(filter(None, (self._said(message, name) for name in REASONING)), "")
        content = GAP.join(filter(None, (content, *(self._special.sub("", rest).strip() for rest in unread))))
        if not content and not calls and not cut and regions and _never_ends(regions[-1]):
            content = reasoning
        parts = _spoken(Reasoning, reasoning) + _spoken(Content, content)
        for index, (name, arguments) in enumerate(calls[:1] if self._form.single else calls):
            own_id = call_id()
            parts += [CallPart(index, own_id, name, ""), CallPart(index, own_id, None, arguments)]
        return parts

    def _said(self, message: Mapping[str, Any], name: str) -> str:
        value = message.get(name)
        if value is None:
            return ""
        text = value if isinstance(value, str) else json.dumps(value)
        return self._special.sub("", text.encode("utf-8", "replace").decode())

    def _calls(self, value: Any) -> list[tuple[str, str]]:
        """Return the names and arguments of the calls in a region's value. Raises `ValueError`."""
        if isinstance(value, list):
            return [call for item in value for call in self._calls(item)]
        function = value.get("function", value) if isinstance(value, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if function is None or not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise ValueError("there is no call with a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict | None):
            raise ValueError("the arguments are no object")
        schema = (self._form.schemas or {}).get(name, {})
        typed = {key: _typed(schema, key, item) for key, item in (arguments or {}).items()}
        return [(name, _written(typed))]


def _written(value: Any) -> str:
    """Return the JSON of a value. Raises `ValueError` where there is none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # JSON can spell half of a surrogate pair, which cannot be sent in an answer.
    return json.dumps(value) if re.search("[\ud800-\udfff]", text) else text


def _put(message: dict[str, Any], region: Region, value: Any) -> None:
    """Add the value of a region to the message. Raises `ValueError`."""
    name, join = region.field.name, region.field.join
    if join is not None:
        if not isinstance(value, str):
            raise ValueError("there is no text to join")
        message[name] = value if message.get(name) is None else message[name] + join + value
    elif region.field.repeats:
        message.setdefault(name, []).append(value)
    else:
        message[name] = value


def _typed(schema: Mapping[str, Any], key: str, value: Any) -> Any:
    """Return an argument in the type of its schema: a model may write a text in place of another value."""
    if isinstance(value, str):
        argument = Argument(schema, key)
        return value if argument.types is None else json.loads(argument.value(value))
    if isinstance(value, list) and (types := Argument(schema, key).types) is not None and "array" not in types:
        return [_typed(schema, key, item) if isinstance(item, str) else item for item in value]
    return value


def _never_ends(region: Region) -> bool:
    return region.field.name in REASONING and not region.is_closed


def _spoken(part: type[Content] | type[Reasoning], text: str) -> list[MessagePart]:
    return [part(text)] if text else []
