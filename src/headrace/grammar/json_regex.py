"""Regular expressions of a text, written as Lark over the text as it stands in a JSON string.

There a quote, a backslash and the control characters are escapes of two or more letters. A lexeme ends where its next
byte cannot go on, without turning back, so an expression that may match such a character becomes several lexemes: runs
of plain characters, and escapes. One that may not stays one lexeme. Each character has one escape, the shortest of RFC
8259, section 7. Called by `json_text`.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

SPECIAL = ('"', "\\", *map(chr, range(32)))
"""Characters that a JSON string escapes."""
_PLAIN = r'[^"\\\x00-\x1f]'
_REPEAT = re.compile(r"[*+?]|\{(\d+)(?:(,)(\d*))?\}")
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)
_GROUP = re.compile(r"\((?:\?(?:([is]*):|P?<\w+>))?")


class RegexError(Exception):
    """An expression that cannot be written so; the text says why."""


class Expression(NamedTuple):
    """An expression, or a part of one. `source` is a regular expression, of one lexeme, if no escape is in it; else
    `lark` is an expression of Lark. `atom` is (plain characters, escapes) of a single character, both regular
    expressions. `prefix` opens a group with the flags."""

    source: str | None
    lark: str = ""
    atom: tuple[str, str] | None = None
    prefix: str = "(?:"

    def in_lark(self) -> str:
        """Return the whole as an expression of Lark."""
        if self.source is None:
            return self.lark
        return f"/{self.prefix}{self.source})/" if self.source else '""'


def escaped(text: str) -> str:
    """Return a text as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f")


def read_regex(source: str, flags: str = "") -> Expression:
    """Return a regular expression, which matches whole texts, with its flags (of Lark). Raises `RegexError`."""
    for flag in set(flags) - set("isu"):
        raise RegexError(f"the flag {flag} of /{source[:40]}/")
    source = source.removeprefix("^")
    if source.endswith("$") and (len(source) - len(source[:-1].rstrip("\\"))) % 2:
        source = source[:-1]
    reader = _Regex(source, "i" in flags)
    whole = reader.either("s" in flags)
    if reader.at < len(source):
        raise RegexError(f"the bracket {source[reader.at]!r} of /{source[:40]}/ closes nothing")
    return whole._replace(prefix=reader.prefix)


def literal_in_json(text: str, ignore_case: bool) -> str:
    """Return a text as an expression of Lark."""
    if not ignore_case:
        return json.dumps(escaped(text), ensure_ascii=False)
    return read_regex(re.escape(text), "i").in_lark()


def has_special(text: str) -> bool:
    """Whether a text has characters that a JSON string escapes."""
    return any(letter in text for letter in SPECIAL)


class _Regex:
    """Reads an expression. `prefix` opens a group with its flags."""

    def __init__(self, source: str, ignore_case: bool) -> None:
        self.source = source
        self.at = 0
        self.prefix = "(?i:" if ignore_case else "(?:"

    def either(self, dot_all: bool) -> Expression:
        ways = [self._sequence(dot_all)]
        while self.source.startswith("|", self.at):
            self.at += 1
            ways.append(self._sequence(dot_all))
        if len(ways) == 1:
            return ways[0]
        if all(way.source is not None for way in ways):
            return Expression("(?:" + "|".join(str(way.source) for way in ways) + ")")
        return Expression(None, "(" + " | ".join(way._replace(prefix=self.prefix).in_lark() for way in ways) + ")")

    def _sequence(self, dot_all: bool) -> Expression:
        pieces: list[Expression] = []
        while self.at < len(self.source) and self.source[self.at] not in "|)":
            pieces.append(self._repeated(self._atom(dot_all)))
        if len(pieces) == 1:
            return pieces[0]
        if all(piece.source is not None for piece in pieces):
            return Expression("".join(str(piece.source) for piece in pieces))
        texts: list[str] = []
        plain = ""
        for piece in [*pieces, Expression(None)]:
            if piece.source is not None:
                plain += piece.source
                continue
            texts += [Expression(plain, prefix=self.prefix).in_lark()] * bool(plain) + [piece.lark] * bool(piece.lark)
            plain = ""
        return Expression(None, "(" + " ".join(texts) + ")")

    def _repeated(self, piece: Expression) -> Expression:
        while match := _REPEAT.match(self.source, self.at):
            self.at = match.end()
            times = match[0]
            if self.source.startswith("?", self.at):  # lazy: the same texts
                self.at += 1
            if piece.source is not None:
                piece = Expression(f"(?:{piece.source}){times}")
            elif piece.atom is not None and times in "*+":
                plain, escapes = piece.atom
                ways = [f"/{self.prefix}{plain})+/"] * bool(plain) + [f"/{escapes}/"]
                piece = Expression(None, f"({' | '.join(ways)}){times}")
            else:
                piece = Expression(None, f"({piece.lark}){times}")
        return piece

    def _atom(self, dot_all: bool) -> Expression:
        source, start = self.source, self.at
        letter = source[start]
        if letter == "(":
            match = _GROUP.match(source, start)
            if match is None or source.startswith("?", match.end()):
                raise RegexError(f"the group {source[start : start + 8]!r} of /{source[:40]}/")
            self.at = match.end()
            before, self.prefix = self.prefix, "(?i:" if "i" in (match[1] or "") else self.prefix
            piece = self.either(dot_all or "s" in (match[1] or ""))
            if piece.source is not None:
                piece = Expression(f"{self.prefix}{piece.source})")
            self.prefix = before
            if not source.startswith(")", self.at):
                raise RegexError(f"a bracket of /{source[:40]}/ is not closed")
            self.at += 1
            return piece
        if letter in "^$*+?{":
            raise RegexError(f"{letter!r} in /{source[:40]}/")
        if letter == "[":
            return self._one(self._class())
        if letter == ".":
            self.at += 1
            return self._one(r"[\s\S]" if dot_all else r"[^\n]")
        if letter == "\\":
            match = _ESCAPE.match(source, start)
            if match is None or match[0][1] in "pPbBAzZ" or (match[0][1].isdigit() and match[0][1] != "0"):
                raise RegexError(f"{source[start : start + 2]!r} in /{source[:40]}/")
            self.at = match.end()
            return self._one(match[0])
        self.at += 1
        return self._one(r"\/" if letter == "/" else letter)

    def _class(self) -> str:
        source, start = self.source, self.at
        at = start + 1 + source.startswith("^", start + 1)
        at += source.startswith("]", at)
        while at < len(source) and source[at] != "]":
            if source[at] == "[" or source[at : at + 2] in ("&&", "--", "~~") or source[at : at + 2] in ("\\p", "\\P"):
                raise RegexError(f"{source[at : at + 2]!r} in a class of /{source[:40]}/")
            at += 2 if source[at] == "\\" else 1
        self.at = at + 1
        if at >= len(source):
            raise RegexError(f"a class of /{source[:40]}/ is not closed")
        return source[start : self.at]

    def _one(self, source: str) -> Expression:
        """Return the piece of an expression that matches one character."""
        try:
            matches = re.compile(source, re.ASCII).fullmatch
        except re.error as error:
            raise RegexError(f"{source!r} ({error})") from None
        special = [letter for letter in SPECIAL if matches(letter)]
        if not special:
            return Expression(source)
        escapes = "(?:" + "|".join(re.escape(escaped(letter)) for letter in special) + ")"
        single = not source.startswith("[") and source not in (r"\s", r"\S", r"\W", r"\D")
        plain = "" if single else f"[{source}&&{_PLAIN}]"
        ways = [f"/{self.prefix}{plain})/"] * bool(plain) + [f"/{escapes}/"]
        return Expression(None, f"({' | '.join(ways)})", (plain, escapes))
