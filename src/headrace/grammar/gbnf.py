"""llama.cpp's grammars (GBNF) in Lark's syntax: llguidance converts them, but for some of their texts.

Escapes, classes of characters, repetitions without a least number and tokens are brought into the form that its
converter takes. Knows no tokenizer. Called by `compile`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from llguidance.gbnf_to_lark import gbnf_to_lark

END = "@end"
"""Stands for the ids of the tokens that end an answer, which only a tokenizer has."""
_NOT_TOKEN = re.compile(rf"<\[\^(\d+),{END}\]>")
_PIECE = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*")|(?P<letters>\[(?:[^\]\\]|\\.)*\])|(?P<comment>\#[^\r\n]*)
    |(?P<token>!?<(?:\[[0-9]{1,9}\]|[^<>\[\]\s][^<>\s]*)>)|(?P<least>\{\s*(?=,))|(?P<any>\.)|(?P<other>[^"\[#<!{.]+|.)""",
    re.VERBOSE | re.DOTALL,
)
_LETTER = re.compile(
    r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\([tnr\"\\\[\]-])|([^\\])", re.DOTALL
)
_NAMED = {"t": "\t", "n": "\n", "r": "\r"}


def to_lark(text: str) -> str:
    """Return a grammar in Lark's syntax that takes the same answers as `text`, a grammar in GBNF. Raises exceptions of
    any kind for other text."""
    pieces: list[str] = []
    tokens: list[str] = []
    prefix = "token"
    while prefix in text:
        prefix += "x"
    for match in _PIECE.finditer(text):
        piece = match[0]
        match match.lastgroup:
            case "text":
                piece = f'"{"".join(map(_in_text, _letters(piece[1:-1])))}"'
            case "letters":
                piece = _class(piece[1:-1])
            case "comment":
                piece = ""
            case "token":
                tokens.append(_token(piece))
                piece = f" {prefix}{len(tokens)} "
            case "least":
                piece = "{0"
            case "any":
                piece = "[\\x00-\U0010ffff]"
        pieces.append(piece)
    # No token is part of a terminal, and no rule that refers to itself is one for the converter.
    rules = [f'{prefix}{number} ::= {prefix}{number} "x"' for number in range(1, len(tokens) + 1)]
    lark = gbnf_to_lark("\n".join(["".join(pieces), *rules]))
    return re.sub(
        rf"^{prefix}(\d+): .*$", lambda rule: f"{prefix}{rule[1]}: {tokens[int(rule[1]) - 1]}", lark, flags=re.M
    )


def with_ends(lark: str, token_ids: Sequence[int]) -> str:
    """Return a grammar from `to_lark` in which no token that ends an answer is one of "any but a token"."""
    return _NOT_TOKEN.sub(lambda match: f"<[^{','.join(map(str, [match[1], *token_ids]))}]>", lark)


def _letters(text: str) -> list[str]:
    """Return the characters of a text or of a class, without escapes. Raises `ValueError`."""
    letters = []
    place = 0
    while place < len(text):
        match = _LETTER.match(text, place)
        if match is None:
            raise ValueError(f"the escape {text[place : place + 2]} is none of \\xXX \\uXXXX \\UXXXXXXXX \\t \\n \\r")
        code = match[1] or match[2] or match[3]
        letter = chr(int(code, 16)) if code else _NAMED.get(match[4], match[4]) if match[4] else match[5]
        if 0xD800 <= ord(letter) < 0xE000:
            raise ValueError(f"{match[0]} is one half of a character; write \\UXXXXXXXX")
        letters.append(letter)
        place = match.end()
    return letters


def _in_text(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    return f"\\x{ord(letter):02x}" if ord(letter) < 0x20 or letter == "\x7f" else letter


def _class(inside: str) -> str:
    is_negated = inside.startswith("^")
    inside = inside.removeprefix("^")
    # A minus that is escaped begins no range.
    ranges = re.findall(r"(\\U.{8}|\\u.{4}|\\x..|\\.|[^\\])(?:-(\\U.{8}|\\u.{4}|\\x..|\\.|[^\\]))?", inside, re.DOTALL)
    parts = ["-".join(_in_class(_letters(end)[0]) for end in ends if end) for ends in ranges]
    return f"[{'^' if is_negated else ''}{''.join(parts)}]"


def _in_class(letter: str) -> str:
    """Return a character of a class; all that may mean something else in a regex is written by its number."""
    return letter if letter.isalnum() or ord(letter) > 0x7F else f"\\x{ord(letter):02x}"


def _token(text: str) -> str:
    """Return the Lark of a token: its name, its id, or any token but the one of an id. Raises `ValueError`."""
    if not text.startswith("!"):
        return text
    if not text.startswith("!<["):
        raise ValueError(f"{text} is the name of a token; any but one is written with its id, as in !<[5]>")
    return f"<[^{text[3:-2]},{END}]>"
