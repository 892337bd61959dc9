"""Makes a struct of a JSON object: wrong types are refused by name, and unknown fields end in warnings.

`Body` is the base of every request's struct and carries the `Warnings` that the reply repeats; `takes_parameters` adds
the sampling parameters of an API to a struct. Knows no other field of any API; `serve.call.schema` and the request
modules of the APIs define fields, and call `convert`.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from headrace.protocol.errors import RequestError
from headrace.protocol.parameters import names_in
from headrace.protocol.params import field_types

# A longer list would swell the reply.
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

WarningLines = list[str] | UnsetType
"""The field `warnings` of a reply: the parts of the request that are not honoured, a line each; UNSET if there are
none."""


class Warnings(list[str]):
    """The parts of a request that are not honoured, a line each, for the reply. The list stays short: beyond
    `MAX_WARNINGS` its last line counts the rest."""

    num_more = 0

    def add(self, field: str, why: str) -> None:
        """Append "field: why"."""
        if len(self) < MAX_WARNINGS:
            label = field if len(field) <= _SHOWN else field[: _SHOWN - 3] + "..."
            self.append(f"{label}: {why}")
            return
        self.num_more += 1
        self[MAX_WARNINGS:] = [f"{self.num_more} more are not told"]

    def reply(self) -> WarningLines:
        """Return the field `warnings` of a reply."""
        return self[:] or UNSET


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """A request's body. `warnings` is not a field, so no client can send it."""

    @property
    def warnings(self) -> Warnings:
        """The parts of the request that are not honoured, for the reply."""
        warnings: Warnings = self.__dict__.setdefault("warnings", Warnings())
        return warnings

    def warn(self, field: str, why: str) -> None:
        """Add a warning: `field` is in the request and has no effect."""
        self.warnings.add(field, why)


T = TypeVar("T", bound=Body)
S = TypeVar("S", bound=msgspec.Struct)


def takes_parameters(api: str, but: Collection[str] = ()) -> Callable[[type[S]], type[S]]:
    """Class decorator: add a field for each parameter that `api` takes, under the API's name and of the type that it
    has in `SamplingParams`. None (null in JSON) means that the field is absent.

    A field that the struct declares itself stays as it is. `but` are parameters that get no field.
    """

    def extend(struct: type[S]) -> type[S]:
        added = {
            name: field_types()[field]
            for field, name in names_in(api).items()
            if field not in but and name not in struct.__struct_fields__
        }
        extended = msgspec.defstruct(
            struct.__name__,
            [(name, type_ | None, None) for name, type_ in added.items()],
            bases=(struct,),
            module=struct.__module__,
            namespace={"__doc__": struct.__doc__},
            forbid_unknown_fields=True,
            kw_only=True,
        )
        return typing.cast(type[S], extended)

    return extend


def convert(
    kind: type[T],
    body: dict[str, Any],
    ignored: Mapping[str, str] | None = None,
    warnings: Warnings | None = None,
) -> T:
    """Return `body` as a `kind`; fields that no struct has, at any depth, are left out and end in `warnings`.

    `ignored` are fields of the API that have no effect here, each with the reason; `warnings` are the request's
    warnings so far. Raises `RequestError`, which names the field, its value and the allowed values.
    """
    warnings = Warnings() if warnings is None else warnings
    for name, why in (ignored or {}).items():
        if body.get(name) is not None:
            warnings.add(name, f"ignored: {why}")
    known = _known(kind, {name: value for name, value in body.items() if name not in (ignored or {})}, "", warnings)
    try:
        # Keys of JSON objects are strings, also in logit_bias.
        request = msgspec.convert(known, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _mistake(str(error), body) from error
    except OverflowError as error:
        raise RequestError("body", "an integer too large for a double", "finite numbers") from error
    request.__dict__["warnings"] = warnings
    return request


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, tuple[type[msgspec.Struct], ...]]:
    """Return the names on the wire, each with the structs that its value, or each item of its value, may be."""
    hints = typing.get_type_hints(kind)
    return {field.encode_name: tuple(_structs_in(hints[field.name])) for field in msgspec.structs.fields(kind)}


def _structs_in(hint: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    elif isinstance(hint, types.UnionType) or typing.get_origin(hint) in (list, typing.Union):
        for inner in typing.get_args(hint):
            yield from _structs_in(inner)


def seconds_of(value: float | str | None) -> float | None:
    """Return Ollama's `keep_alive` in seconds: a number, or Go's notation such as 5m, 1h30m or 300ms; infinity for a
    negative one, None for none. Raises `RequestError`."""
    if value is None:
        return None
    if isinstance(value, str):
        parts = re.fullmatch(r"(-?)((?:\d+(?:\.\d+)?(?:ms|h|m|s))+|\d+(?:\.\d+)?)", value.strip())
        if parts is None:
            raise RequestError("keep_alive", value, "seconds, or a duration such as 5m; 0 unloads, -1 is for ever")
        pieces = re.findall(r"(\d+(?:\.\d+)?)(ms|h|m|s|$)", parts[2])
        total = sum(float(number) * {"ms": 0.001, "h": 3600.0, "m": 60.0}.get(unit, 1.0) for number, unit in pieces)
        value = -1.0 if parts[1] else total
    return math.inf if value < 0 else float(value)


def _pick(structs: tuple[type[msgspec.Struct], ...], value: dict[str, Any]) -> type[msgspec.Struct] | None:
    """Return the struct that an object is; None if its tag names none of them: then the object is refused."""
    for struct in structs:
        config = struct.__struct_config__
        if config.tag_field is None or value.get(config.tag_field) == config.tag:
            return struct
    return None


def _known(kind: type[msgspec.Struct], body: dict[str, Any], path: str, warnings: Warnings) -> dict[str, Any]:
    fields = _fields(kind)
    tag = kind.__struct_config__.tag_field
    known = {}
    for name, value in body.items():
        if name not in fields and name != tag:
            near = difflib.get_close_matches(name, fields, 1, 0.8) if len(warnings) < MAX_WARNINGS else []
            hint = f"; did you mean {path}{near[0]}?" if near else ""
            warnings.add(path + name, "unknown, and ignored" + hint)
            continue
        structs = fields.get(name, ())
        if structs and isinstance(value, list):
            value = [_inner(structs, item, f"{path}{name}[{index}].", warnings) for index, item in enumerate(value)]
        elif structs:
            value = _inner(structs, value, f"{path}{name}.", warnings)
        known[name] = value
    return known


def _inner(structs: tuple[type[msgspec.Struct], ...], value: Any, path: str, warnings: Warnings) -> Any:
    kind = _pick(structs, value) if isinstance(value, dict) else None
    return value if kind is None else _known(kind, value, path, warnings)


def _mistake(message: str, body: dict[str, Any]) -> RequestError:
    """Return msgspec's error as one that names the field, its value and the allowed values."""
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
    """Return the value at a path of msgspec's; `[...]` stands for any key or index and ends the walk."""
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
