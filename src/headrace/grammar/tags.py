"""`format` of a structural tag: a form of text put together from parts, each an object with a `type`.

const_string {value}; json_schema {json_schema}; regex {pattern}; json_text {grammar}, the inside of a JSON string whose
text follows a grammar in Lark; any_text, which ends where the next part begins; token
{token_id}, for special tokens, which no text allows; sequence {elements}; or {elements}; optional {content};
in_text {trigger, content}, free text in which `content` follows each `trigger`, a text or a token;
tag {begin, content, end}; tags_with_separator {tags, separator, at_least_one, stop_after_first}. The names are
xgrammar's where it has the thing, so that the names of vLLM's clients work; optional, token, json_text and in_text are
headrace's own.

From plain JSON to Lark; knows no tokenizer. Called by `compile`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from headrace.grammar.json_text import GrammarError, rules_in_json
from headrace.protocol.errors import RequestError

Body = Callable[[Any], str]
"""From a JSON schema to the text behind %json in Lark."""

FIELDS = {
    "const_string": {"value"},
    "json_schema": {"json_schema"},
    "regex": {"pattern"},
    "json_text": {"grammar"},
    "any_text": set(),
    "token": {"token_id"},
    "sequence": {"elements"},
    "or": {"elements"},
    "optional": {"content"},
    "in_text": {"trigger", "content"},
    "tag": {"begin", "content", "end"},
    "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
}


class Lark:
    """The rules of one format. `body` writes schemas as text; `field` is the name in errors."""

    def __init__(self, body: Body, field: str) -> None:
        self.lines = ["%llguidance {}", "TEXT: /(.|\\n)*/"]
        self._body = body
        self._field = field

    def rule(self, expression: str, attributes: str = "") -> str:
        """Add a rule for an expression. Return its name."""
        name = f"part_{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {expression}")
        return name

    def expression(self, part: Any, at: str = "format") -> str:
        """Return a part as a Lark expression. Raises `RequestError` for a value that is no part."""
        match self._checked(part, at):
            case {"type": "const_string", "value": str(value)}:
                return lark_text(value)
            case {"type": "json_schema", "json_schema": dict() | bool() as schema}:
                return self.rule(f"%json {self._body(schema)}")
            case {"type": "regex", "pattern": str(pattern)}:
                terminal = f"PART_{len(self.lines)}"
                self.lines.append(f"{terminal}: /{pattern.replace('/', chr(92) + '/')}/")
                return terminal
            case {"type": "json_text", "grammar": str(grammar)}:
                try:
                    start, lines = rules_in_json(grammar, f"text_{len(self.lines)}")
                except GrammarError as error:
                    bound = f"a Lark grammar that can be held to inside JSON; here: {error}"
                    raise RequestError(f"{self._field}.{at}.grammar", grammar, bound) from None
                self.lines += lines
                return self.rule(start)
            case {"type": "token", "token_id": int(token_id)}:
                return f"<[{token_id}]>"
            case {"type": "any_text"}:
                return "TEXT"
            case {"type": "sequence", "elements": [_, *_] as elements}:
                return self._sequence(elements, at)
            case {"type": "or", "elements": [_, *_] as elements}:
                parts = [self.expression(part, f"{at}.elements[{place}]") for place, part in enumerate(elements)]
                return self.rule(" | ".join(parts))
            case {"type": "optional", "content": content}:
                return f"{self.rule(self.expression(content, f'{at}.content'))}?"
            case {"type": "in_text", "trigger": trigger, "content": content}:
                before = self._until(self.expression(trigger, f"{at}.trigger"), trigger, f"{at}.trigger")
                return self.rule(f"({before} {self.expression(content, f'{at}.content')})* TEXT")
            case {"type": "tag", "begin": str(begin), "content": content, "end": str(end)}:
                const = [{"type": "const_string", "value": text} for text in (begin, end)]
                return self._sequence([const[0], content, const[1]], at)
            case {"type": "tags_with_separator", "tags": [_, *_] as tags}:
                return self._tags(part, tags, at)
        raise RequestError(f"{self._field}.{at}", part, "a part of a format, with its fields")

    def _checked(self, part: Any, at: str) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in FIELDS:
            kinds = ", ".join(FIELDS)
            raise RequestError(f"{self._field}.{at}.type", kind, f"one of {kinds}")
        for name in part:
            if name not in FIELDS[kind] | {"type"}:
                raise RequestError(f"{self._field}.{at}.{name}", part[name], "a field of this type", "unknown_field")
        return part

    def _sequence(self, elements: list[Any], at: str) -> str:
        parts: list[str] = []
        place = 0
        while place < len(elements):
            expression = self.expression(elements[place], f"{at}.elements[{place}]")
            place += 1
            if expression != "TEXT":
                parts.append(expression)
            elif place == len(elements):
                parts.append("TEXT")
            else:
                follower = self.expression(elements[place], f"{at}.elements[{place}]")
                parts.append(self._until(follower, elements[place], at))
                place += 1
        return self.rule(" ".join(part for part in parts if part != '""') or '""')

    def _until(self, follower: str, part: Any, at: str) -> str:
        """Return free text up to where `follower`, the expression of `part`, is first met, and that."""
        if follower.startswith("<["):
            return f"TEXT {follower}"
        if follower.startswith('"') and follower != '""':
            return self.rule(f"TEXT {follower}", "[lazy]")
        raise RequestError(f"{self._field}.{at}", part, "a text or token after any_text")

    def _tags(self, part: dict[str, Any], tags: list[Any], at: str) -> str:
        one = self.expression({"type": "or", "elements": tags}, at)
        separator = part.get("separator", "")
        if not isinstance(separator, str):
            raise RequestError(f"{self._field}.{at}.separator", separator, "a text")
        more = "" if part.get("stop_after_first") else f" ({lark_text(separator)} {one})*" if separator else f" {one}*"
        rule = self.rule(one + more)
        return rule if part.get("at_least_one") else f"{rule}?"


def lark_text(text: str) -> str:
    """Return a text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def lark(form: Any, body: Body, field: str, then: str = "") -> str:
    """Return the Lark grammar of a format, after which comes the rule `then`. Raises `RequestError`."""
    rules = Lark(body, field)
    start = rules.expression(form)
    return "\n".join([*rules.lines, f"start: {start} {then}"])
