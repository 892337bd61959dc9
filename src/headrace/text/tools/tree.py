"""Reads values that are written as elements: `<key>value</key>`, whose members are elements again.

Knows no calls; called by `calls`.
"""

from __future__ import annotations

import re

from headrace.text.tools.reader import MAX_DEPTH, IllFormed, Reader, Reading

Tree = str | list["Tree"] | dict[str, "Tree"]
"""A text, the `item`s of a list, or members by their names."""
ITEM = "item"
_TAG = re.compile(r"[^<>\s]+")


def read_tree(text: Reader, tag: str, depth: int = 0) -> Reading[tuple[str, Tree]]:
    """Read one element, whose tags have the text `tag` before them; return its name and its value. Raises
    `IllFormed`."""
    if depth > MAX_DEPTH:
        raise IllFormed
    yield from text.expect(f"{tag}<")
    key = yield from text.word(_TAG)
    yield from text.expect(">")
    if (yield from text.comes(f"{tag}<")) and not (yield from text.comes(f"{tag}</")):
        value = yield from _members(text, tag, depth)
    else:
        value = yield from _text(text, tag)
    yield from text.expect(f"{tag}</{key}>")
    return key, value


def _text(text: Reader, tag: str) -> Reading[Tree]:
    start = text.position
    with text.kept():
        while not (yield from text.comes(f"{tag}<")):
            place = text.text.find(tag[:1] or "<", text.at + 1)
            if place < 0 and text.final:
                text.at = len(text.text)
                raise IllFormed
            text.at = place if place >= 0 else len(text.text)
        return text.since(start)


def _members(text: Reader, tag: str, depth: int) -> Reading[Tree]:
    members: list[tuple[str, Tree]] = []
    while not (yield from text.comes(f"{tag}</")):
        members.append((yield from read_tree(text, tag, depth + 1)))
        yield from text.space()
    names = [name for name, _ in members]
    if set(names) == {ITEM}:
        return [value for _, value in members]
    if len(set(names)) < len(names):
        raise IllFormed
    return dict(members)
