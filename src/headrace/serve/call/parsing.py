"""From a JSON object to a struct: wrong types are refused by name, and what nobody knows is told, not dropped.

`Body` is the base of every request's struct and carries the warnings that the reply repeats. Knows no field of any
API; `serve.call.schema` and the modules of the single APIs bring those.
"""

from __future__ import annotations

import difflib
import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from headrace.protocol.errors import RequestError

# A reply is no place for a list of thousands.
MAX_WARNINGS = 32
_SHOWN = 80

_WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "array": "a list",
    "object": "an object",
}


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """A request's body. `warnings` is no field of it: no client can send them."""

    @property
    def warnings(self) -> list[str]:
        """What of the request was not honoured, one sentence each; for the reply."""
        told: list[str] = self.__dict__.setdefault("warnings", [])
        return told

    def warn(self, field: str, why: str) -> None:
        """Note that `field` was given and does nothing. Beyond `MAX_WARNINGS` the last line counts the rest."""
        add_warning(self.warnings, field, why)


T = TypeVar("T", bound=Body)


def add_warning(warnings: list[str], field: str, why: str) -> None:
    """Append "field: why" to a list that stays short."""
    shown = field if len(field) <= _SHOWN else field[: _SHOWN - 3] + "..."
    if len(warnings) < MAX_WARNINGS:
        warnings.append(f"{shown}: {why}")
        return
    told = re.match(r"(\d+) more", warnings[-1])
    if told:
        warnings[-1] = f"{int(told[1]) + 1} more are not told"
    else:
        warnings.append("1 more are not told")


def convert(kind: type[T], body: dict[str, Any], ignored: Mapping[str, str] | None = None) -> T:
    """`body` as a `kind`; fields that no struct knows, at any depth, are left out and end in `warnings`.

    `ignored` are fields of the API that do nothing here, each with the reason. Raises `RequestError` naming the
    field, its value and what is allowed.
    """
    warnings: list[str] = []
    for name, why in (ignored or {}).items():
        if body.get(name) is not None:
            add_warning(warnings, name, f"ignored: {why}")
    known = _known(kind, {name: value for name, value in body.items() if name not in (ignored or {})}, "", warnings)
    try:
        # Keys of JSON objects are strings, those of logit_bias too.
        made = msgspec.convert(known, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _mistake(str(error), body) from error
    except OverflowError as error:
        raise RequestError("body", "an integer too large for a double", "finite numbers") from error
    made.warnings.extend(warnings)
    return made


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, tuple[type[msgspec.Struct], ...]]:
    """Names on the wire, each with the structs that its value, or each item of its value, may be."""
    hints = typing.get_type_hints(kind)
    return {field.encode_name: tuple(_structs_in(hints[field.name])) for field in msgspec.structs.fields(kind)}


def _structs_in(hint: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    elif isinstance(hint, types.UnionType) or typing.get_origin(hint) in (list, typing.Union):
        for inner in typing.get_args(hint):
            yield from _structs_in(inner)


def _pick(structs: tuple[type[msgspec.Struct], ...], value: dict[str, Any]) -> type[msgspec.Struct] | None:
    """Which of the structs an object is; None if its tag says none of them, which is then refused."""
    for struct in structs:
        config = struct.__struct_config__
        if config.tag_field is None or value.get(config.tag_field) == config.tag:
            return struct
    return None


def _known(kind: type[msgspec.Struct], body: dict[str, Any], path: str, warnings: list[str]) -> dict[str, Any]:
    fields = _fields(kind)
    tag = kind.__struct_config__.tag_field
    made = {}
    for name, value in body.items():
        if name not in fields and name != tag:
            near = difflib.get_close_matches(name, fields, 1, 0.8) if len(warnings) < MAX_WARNINGS else []
            hint = f"; did you mean {path}{near[0]}?" if near else ""
            add_warning(warnings, path + name, "unknown, and ignored" + hint)
            continue
        structs = fields.get(name, ())
        if structs and isinstance(value, list):
            value = [_inner(structs, item, f"{path}{name}[{index}].", warnings) for index, item in enumerate(value)]
        elif structs:
            value = _inner(structs, value, f"{path}{name}.", warnings)
        made[name] = value
    return made


def _inner(structs: tuple[type[msgspec.Struct], ...], value: Any, path: str, warnings: list[str]) -> Any:
    kind = _pick(structs, value) if isinstance(value, dict) else None
    return value if kind is None else _known(kind, value, path, warnings)


def _mistake(message: str, body: dict[str, Any]) -> RequestError:
    """msgspec's complaint, told as field, value and what is allowed."""
    unknown = re.search(r"unknown field `(.*?)`(?: - at `\$\.?(.*?)`)?$", message, re.DOTALL)
    if unknown:
        path = ".".join(part for part in (unknown[2], unknown[1]) if part)
        return RequestError(path, _at(body, path), "a field that headrace knows; this one is unknown", "unknown_field")
    missing = re.search(r"missing required field `(.*?)`(?: - at `\$\.?(.*?)`)?$", message)
    if missing:
        return RequestError(".".join(part for part in (missing[2], missing[1]) if part), None, "given")
    unlisted = re.match(r"Invalid (enum )?value", message)
    expected = re.search(r"Expected `(.*?)`", message)
    place = re.search(r"at `(?:key` in `)?\$\.?(.*?)`$", message)
    path = place[1] if place else "body"
    words = [_WORDS.get(word, word) for word in expected[1].split(" | ") if word != "null"] if expected else [message]
    if unlisted:
        words = ["one of those that headrace knows"]
    return RequestError(path.replace("[...]", ""), _at(body, path), " or ".join(words))


def _at(body: Any, path: str) -> Any:
    """The value that a path of msgspec's leads to; `[...]` stands for any key or index and ends the walk."""
    for part in re.findall(r"[^.\[\]]+|\[\d+\]", path.split("[...]")[0]):
        if part.startswith("["):
            index = int(part[1:-1])
            if not isinstance(body, list) or index >= len(body):
                return None
            body = body[index]
        elif isinstance(body, dict) and part in body:
            body = body[part]
        else:
            return None
    return body


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """`error` with its field under the name that it has in the API that the client speaks."""
    name = names.get(error.field)
    return error if name is None else RequestError(name, error.value, error.bound, error.code)
