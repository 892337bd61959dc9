"""JSON schemas put together by logic, and the small things that `rewrite` needs to know of them. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any] | bool

ANY_STRING = r"(.|\n)*"


class UnsupportedError(ValueError):
    """What can not be said otherwise: its message names the keyword and where it stands."""


def either(ways: Sequence[Schema]) -> Schema:
    """One of `ways` holds, at least."""
    if any(each is True for each in ways):
        return True
    left: list[Schema] = []
    for each in ways:
        inner = each["anyOf"] if isinstance(each, dict) and set(each) == {"anyOf"} else [each]
        left += [way for way in inner if way is not False and way not in left]
    if not left:
        return False
    return left[0] if len(left) == 1 else {"anyOf": left}


def both(needs: Sequence[Schema]) -> Schema:
    """All of `needs` hold."""
    if any(each is False for each in needs):
        return False
    left: list[Schema] = []
    for each in needs:
        inner = each["allOf"] if isinstance(each, dict) and set(each) == {"allOf"} else [each]
        left += [need for need in inner if need is not True and need not in left]
    if not left:
        return True
    return left[0] if len(left) == 1 else {"allOf": left}


def resolve(root: Schema, pointer: str, path: str) -> Any:
    """What a reference within the same document means. Raises `UnsupportedError` for any other."""
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
    """A regex that matches every text but these."""
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
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True


def at_place(wanted: Schema, place: int) -> Schema:
    if wanted is False:
        return False
    return {"type": "array", "prefixItems": [*[True] * place, wanted], "minItems": place + 1}


def dependencies(schema: dict[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        value = schema.get(key)
        if isinstance(value, dict):
            found += [(name, [needed] if isinstance(needed, str) else needed) for name, needed in value.items()]
    return found
