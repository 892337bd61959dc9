"""A Lark grammar of a text, written as rules for the text as it stands in a JSON string.

A tool that takes a text is called with JSON, so its grammar describes the escaped text. The subset of Lark is the one
of OpenAI's custom tools: rules, terminals, texts, ranges, regular expressions, repetitions, `%ignore` and imports of
`common`; anything else is refused by the name of its rule. A terminal that may have a character that JSON escapes
becomes a rule (see `json_regex`). Pure functions of text; called by `tags`.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from headrace.grammar.json_regex import Expression, RegexError, has_special, literal_in_json, read_regex

COMMON = {
    "DIGIT": "/[0-9]/",
    "HEXDIGIT": "/[0-9a-fA-F]/",
    "INT": "/[0-9]+/",
    "SIGNED_INT": "/[+-]?[0-9]+/",
    "DECIMAL": r"/[0-9]+\.[0-9]*|\.[0-9]+/",
    "FLOAT": r"/[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?/",
    "SIGNED_FLOAT": r"/[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)/",
    "NUMBER": r"/[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?/",
    "SIGNED_NUMBER": r"/[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?)/",
    "ESCAPED_STRING": r'/"(?:[^"\\\n]|\\.)*"/',
    "LCASE_LETTER": "/[a-z]/",
    "UCASE_LETTER": "/[A-Z]/",
    "LETTER": "/[A-Za-z]/",
    "WORD": "/[A-Za-z]+/",
    "CNAME": "/[_A-Za-z][_A-Za-z0-9]*/",
    "WS_INLINE": r"/[ \t]+/",
    "WS": r"/[ \t\f\r\n]+/",
    "CR": r"/\r/",
    "LF": r"/\n/",
    "NEWLINE": r"/(?:\r?\n)+/",
    "SH_COMMENT": r"/#[^\n]*/",
    "CPP_COMMENT": r"/\/\/[^\n]*/",
    "SQL_COMMENT": r"/--[^\n]*/",
}
"""The terminals of Lark's `common`, by their definitions."""

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|(?:\#|//)[^\n]*)
    |(?P<line>(?:\r?\n)+[ \t]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<arrow>->[ \t]*\w+)
    |(?P<statement>%\w+)
    |(?P<name>[?!]*_?[A-Za-z][\w-]*)
    |(?P<times>[*+?]|\{[ \t]*\d+[ \t]*(?:,[ \t]*\d*[ \t]*)?\}|~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?)
    |(?P<range>\.\.)
    |(?P<mark>[:|()\[\],.])
    """,
    re.VERBOSE,
)
_IMPORT = re.compile(
    r"[ \t]*common[ \t]*(?:\.[ \t]*(\w+)(?:[ \t]*->[ \t]*(\w+))?|\(([\w \t,]+)\))[ \t]*(?=\n|\r|$|#|//)"
)


class GrammarError(Exception):
    """A grammar that cannot be written so; the text says where and why."""


class Token(NamedTuple):
    kind: str
    text: str


class Definition(NamedTuple):
    """A rule, or a terminal, whose name is in capitals."""

    name: str
    body: list[Token]

    @property
    def is_terminal(self) -> bool:
        return self.name.isupper()


def rules_in_json(grammar: str, prefix: str) -> tuple[str, list[str]]:
    """Return the rule that the text follows, and the lines that define it and the rules it uses, all names after
    `prefix`.

    Raises `GrammarError`.
    """
    writer = _Writer(grammar, prefix)
    return writer.start, writer.lines


class _Writer:
    def __init__(self, grammar: str, prefix: str) -> None:
        self._prefix = prefix
        self._definitions: dict[str, Definition] = {}
        self._ignored: list[list[Token]] = []
        self._read(grammar)
        if "start" not in self._definitions:
            raise GrammarError("there is no rule start")
        self._split = self._find_split()
        self.lines: list[str] = []
        self._between = ""
        if self._ignored:
            ways = " | ".join(self._body(Definition("%ignore", body)) for body in self._ignored)
            self.lines.append(f"{prefix}_ignored: ({ways})*")
            self._between = f"{prefix}_ignored"
        for definition in self._definitions.values():
            self.lines.append(f"{self._name(definition.name)}: {self._body(definition)}")
        self.start = f"{self._between} {self._name('start')}".strip()

    def _read(self, grammar: str) -> None:
        """Take the grammar apart into definitions."""
        body: list[Token] | None = None
        at, is_start, name = 0, True, "the grammar"
        while at < len(grammar):
            token = _token(grammar, at, name)
            at += len(token.text)
            follows = grammar[at:].lstrip(" \t")[:1]
            if token.kind == "line":
                is_start = True
                continue
            if token.kind == "space":
                continue
            if token.kind == "statement":
                if not is_start:
                    raise GrammarError(f"{name}: {token.text} has no meaning inside JSON")
                body = None
                if token.text == "%ignore":
                    self._ignored.append(body := [])
                elif token.text == "%import":
                    at = self._import(grammar, at)
                elif token.text != "%llguidance" or grammar[at:].lstrip()[:2] != "{}":
                    raise GrammarError(f"{token.text} has no meaning inside JSON")
                else:
                    at = grammar.index("}", at) + 1
            elif is_start and token.kind == "name" and follows in (":", ".", "{", "["):
                name = token.text.lstrip("?!")
                if follows != ":":
                    raise GrammarError(f"{name}: priorities, templates and attributes are not known here")
                if name in self._definitions:
                    raise GrammarError(f"{name} is defined twice")
                self._definitions[name] = Definition(name, body := [])
                at = grammar.index(":", at) + 1
            elif body is None:
                raise GrammarError(f"{grammar[at - len(token.text) :][:40]!r} is in no rule")
            elif token.kind == "string" and [each.kind for each in body[-2:]] == ["string", "range"]:
                ends = [_text(each, name) for each in (body[-2], token)]
                if any(len(end) != 1 for end in ends):
                    raise GrammarError(f"{name}: a range is between two letters")
                body[-2:] = [Token("regex", f"/[{'-'.join(map(_in_class, ends))}]/")]
            elif token.kind != "arrow":
                body.append(token)
            is_start = False

    def _import(self, grammar: str, at: int) -> int:
        match = _IMPORT.match(grammar, at)
        if match is None:
            raise GrammarError(f"%import{grammar[at : at + 40].splitlines()[0]} is not from common")
        names = [match[1]] if match[1] else [name.strip() for name in match[3].split(",")]
        for name in names:
            if name not in COMMON:
                raise GrammarError(f"%import common.{name} is not one of {', '.join(COMMON)}")
            self._definitions[match[2] or name] = Definition(match[2] or name, [Token("regex", COMMON[name])])
        return match.end()

    def _find_split(self) -> set[str]:
        """Return the terminals that may have a character that JSON escapes: they become rules."""
        split: set[str] = set()
        while True:
            more = {
                name
                for name, definition in self._definitions.items()
                if definition.is_terminal and name not in split and self._is_split(definition, split)
            }
            if not more:
                return split
            split |= more

    def _is_split(self, definition: Definition, split: set[str]) -> bool:
        for token in definition.body:
            if token.kind == "string" and has_special(_text(token, definition.name)):
                return True
            if token.kind == "regex" and self._expression(token, definition.name).source is None:
                return True
            if token.kind == "name" and token.text in split:
                return True
        return False

    def _name(self, name: str) -> str:
        if name.isupper() and name not in self._split:
            return f"{self._prefix.upper()}_{name.lstrip('_')}{'_' * name.startswith('_')}"
        kind = "t" if name.isupper() else "r"
        return f"{self._prefix}_{kind}_{name.strip('_').lower()}{'_' * name.startswith('_')}"

    def _body(self, definition: Definition) -> str:
        name = definition.name
        texts: list[str] = []
        # Ignored text comes after each terminal, in rules alone.
        after = f" {self._between}" if self._between and not definition.is_terminal else ""
        for token in definition.body:
            if token.kind == "string":
                text = literal_in_json(_text(token, name), token.text.endswith("i"))
                texts.append(f"({text}{after})")
            elif token.kind == "regex":
                texts.append(f"({self._expression(token, name).in_lark()}{after})")
            elif token.kind == "name":
                if token.text not in self._definitions:
                    raise GrammarError(f"{name}: {token.text} is not defined")
                is_terminal = token.text.isupper()
                texts.append(f"({self._name(token.text)}{after})" if is_terminal else self._name(token.text))
            elif token.text == "[" or token.text == "]":
                texts.append("(" if token.text == "[" else ")?")
            elif token.kind == "times":
                texts.append(_times(token.text))
            elif token.text in "|()":
                texts.append(token.text)
            else:
                raise GrammarError(f"{name}: {token.text!r} has no meaning inside JSON")
        return " ".join(texts) or '""'

    def _expression(self, token: Token, name: str) -> Expression:
        source, _, flags = token.text[1:].rpartition("/")
        try:
            return read_regex(source, flags)
        except RegexError as error:
            raise GrammarError(f"{name}: {error} is not known here") from None


def _token(grammar: str, at: int, name: str) -> Token:
    match = _TOKEN.match(grammar, at)
    if match is None or match.lastgroup is None:
        raise GrammarError(f"{name}: {grammar[at : at + 20]!r} has no meaning inside JSON")
    return Token(match.lastgroup, match[0])


def _in_class(letter: str) -> str:
    return "\\/" if letter == "/" else re.escape(letter)


def _times(text: str) -> str:
    """Return a repetition in the form that is known by both."""
    bare = text.replace(" ", "").replace("\t", "")
    if not bare.startswith("~"):
        return bare
    low, _, high = bare[1:].partition("..")
    return f"{{{low},{high or low}}}"


def _text(token: Token, name: str) -> str:
    """Return the text of a literal."""
    literal = token.text.removesuffix("i")
    literal = re.sub(r"(\\\\)|\\x([0-9a-fA-F]{2})", lambda m: m[1] or f"\\u00{m[2]}", literal)
    try:
        text: str = json.loads(literal, strict=False)
    except ValueError:
        raise GrammarError(f"{name}: {token.text} has an escape that is not known here") from None
    return text
