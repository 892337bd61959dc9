"""JSON schemas combined by logic, and small functions on them that `rewrite` needs. Pure functions of plain JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any] | bool

ANY_STRING = r"(.|\n)*"


class UnsupportedError(ValueError):
    """A schema that cannot be rewritten; the message names the keyword and its place."""


def either(ways: Sequence[Schema]) -> Schema:
    """Return the schema of values that meet at least one of `ways`."""
    return _combined("anyOf", ways, decisive=True)


def both(needs: Sequence[Schema]) -> Schema:
    """Return the schema of values that meet all of `needs`."""
    return _combined("allOf", needs, decisive=False)


def _combined(keyword: str, parts: Sequence[Schema], decisive: bool) -> Schema:
    """Return `parts` under `keyword`, each once. One part that is `decisive` decides for all of them."""
    if any(part is decisive for part in parts):
        return decisive
    schemas: list[Schema] = []
    for part in parts:
        inner = part[keyword] if isinstance(part, dict) and set(part) == {keyword} else [part]
        schemas += [each for each in inner if each is not (not decisive) and each not in schemas]
    if not schemas:
        return not decisive
    return schemas[0] if len(schemas) == 1 else {keyword: schemas}


def resolve(root: Schema, pointer: str, path: str) -> Any:
    """Return the target of a reference within the same document. Raises `UnsupportedError` for any other."""
    if not pointer.startswith("#") or (pointer != "#" and not pointer.startswith("#/")):
        raise UnsupportedError(f'"$ref" to {pointer} at {path}')
    here: Any = root
    for part in pointer[2:].split("/") if pointer != "#" else ():
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        try:
            here = here[int(part)] if isinstance(here, list) else here[part]
        except (KeyError, IndexError, TypeError, ValueError):
            raise UnsupportedError(f'"$ref" to {pointer} at {path}, which does not exist') from None
    return here


def other_than(texts: Sequence[str]) -> str:
    """Return a regex that matches every text but these."""
    heads: dict[str, list[str]] = {}
    for text in set(texts):
        if text:
            heads.setdefault(text[0], []).append(text[1:])
    chars = "".join(re.escape(char) if char not in "^-]\\" else "\\" + char for char in sorted(heads))
    ways = [] if "" in texts else [""]
    # `.` leaves the line break out, a negated class does not.
    ways.append(f"[^{chars}]{ANY_STRING}" if chars else f"(.|\\n){ANY_STRING}")
    ways += [re.escape(char) + f"({other_than(rest)})" for char, rest in sorted(heads.items())]
    return "|".join(ways)


def found_in(pattern: str, name: str) -> bool:
    """Whether `pattern` matches a part of `name`, or may, since it is no regex of Python's."""
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True


def with_property(name: str, value: Schema) -> Schema:
    """Return the schema of objects that have the property `name`, with a value that meets `value`."""
    if value is False:
        return False
    return {"type": "object", "required": [name], "properties": {name: value}}


def at_place(item: Schema, place: int) -> Schema:
    """Return the schema of arrays with an item at `place` that meets `item`."""
    if item is False:
        return False
    return {"type": "array", "prefixItems": [*[True] * place, item], "minItems": place + 1}


def dependencies(schema: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return (property, its requirement) of all keywords for dependencies: a list of names, or a schema."""
    pairs: list[tuple[str, Any]] = []
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        value = schema.get(key)
        if isinstance(value, dict):
            pairs += [(name, [needed] if isinstance(needed, str) else needed) for name, needed in value.items()]
    return pairs
