"""`StructuredOutputs`: the form that an answer must have. Names are vLLM's.

Frozen, checked against `headrace.protocol.bounds` at construction, and sent as it is from the server to the engine. The
checks here need no compiler: one form is named, and its text is of bounded size and depth. `headrace.grammar` checks
whether it can be compiled. Knows no tokens and no tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.protocol import bounds
from headrace.protocol.errors import RequestError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_DEPTH = 64
"""Levels of arrays and objects in a JSON schema."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one of the first six is given.

    `json`: a JSON schema, as an object or as text (it is kept as text). `regex`: the whole answer matches it.
    `choice`: the answer is one of these. `grammar`: a grammar in Lark's syntax or in GBNF. `json_object`: any JSON
    object. `structural_tag`: JSON text with "structures" and "triggers"; the answer is free text in which one of the
    structures must follow each trigger.

    The others concern JSON only. `whitespace_pattern`: a regex of the text that may stand between two tokens of JSON;
    `disable_any_whitespace`: none may; `disable_additional_properties`: objects have no other properties than their
    schema names, where it does not say.

    `prefix`: text before the form, as JSON text of a `format` (see `headrace.grammar.tags`); with it the server lets a
    model reason first.

    `cache_salt`: separates cached grammars, as the salt of a request separates its prefixes; the server sets it. It
    changes no answer.

    Raises `RequestError` naming the field, the value and the bound.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    prefix: str | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        kinds = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(kinds) != 1:
            raise RequestError("structured_outputs", kinds, f"exactly one of {', '.join(KINDS)}")
        self._check_types()
        if self.json is not None:
            text = self.json if isinstance(self.json, str) else schema_text(self.json)
            check_json(text, "json")
            msgspec.structs.force_setattr(self, "json", text)
        if self.structural_tag is not None:
            check_json(self.structural_tag, "structural_tag")
        if self.prefix is not None:
            check_json(self.prefix, "prefix")
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                bounds.check("structured_text", getattr(self, name), f"structured_outputs.{name}")
        if self.choice is not None:
            self._check_choices(self.choice)
        if self.whitespace_pattern is not None:
            if self.disable_any_whitespace:
                raise RequestError("whitespace_pattern", self.whitespace_pattern, "left out: no whitespace is allowed")
            bounds.check("whitespace_pattern", self.whitespace_pattern)

    @property
    def kind(self) -> str:
        """The name of the one form that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    def _check_types(self) -> None:
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern", "prefix"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise RequestError(f"structured_outputs.{name}", value, "a string")
        if self.json is not None and not isinstance(self.json, str | dict):
            raise RequestError("structured_outputs.json", self.json, "a JSON schema, as an object or as text")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"structured_outputs.{name}", getattr(self, name), "true or false")
        if not isinstance(self.cache_salt, str):
            raise RequestError("structured_outputs.cache_salt", self.cache_salt, "a string")
        if self.json_object not in (None, True, False):
            raise RequestError("structured_outputs.json_object", self.json_object, "true or false")

    def _check_choices(self, choice: list[str]) -> None:
        field = "structured_outputs.choice"
        if not isinstance(choice, list | tuple):
            raise RequestError(field, choice, "a list of strings")
        bounds.check("choices", choice, field)
        for text in choice:
            if not isinstance(text, str) or not text:
                raise RequestError(field, text, "a string that is not empty")
        bounds.check("structured_text", "".join(choice), field)


def constraint_of(value: StructuredOutputs | Mapping[str, Any]) -> StructuredOutputs:
    """Return the `StructuredOutputs` of a plain dict of its fields. Raises `RequestError` for anything else."""
    if isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping):
        raise RequestError("structured_outputs", value, "a StructuredOutputs, or an object of its fields")
    if "cache_salt" in value:
        bound = "left out: the request's own cache_salt counts"
        raise RequestError("structured_outputs.cache_salt", value["cache_salt"], bound)
    return bounds.struct_of(StructuredOutputs, value, "structured_outputs")


def schema_text(schema: dict[str, Any], field: str = "json") -> str:
    """Return a JSON schema as text, its keys in their order, which is the order of the properties in an answer.

    Raises `RequestError` for anything but plain JSON.
    """
    _check_plain(schema, field)
    try:
        return msgspec.json.encode(schema).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"structured_outputs.{field}", schema, f"plain JSON ({error})") from None


def check_json(text: str, field: str) -> None:
    """Check that `text` is JSON of bounded size and depth. Raises `RequestError`."""
    bounds.check("structured_text", text, f"structured_outputs.{field}")
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.{field}", text, f"JSON ({error})") from None
    if not isinstance(value, dict | bool):
        raise RequestError(f"structured_outputs.{field}", text, "a JSON object")
    _check_plain(value, field)


def _check_plain(value: Any, field: str) -> None:
    """Check level by level, so that no depth is too great for the check itself."""
    level = [value]
    most = int(bounds.BOUNDS["structured_text"].high)
    for _ in range(MAX_DEPTH + 1):
        inners = (inner for outer in level for inner in _inner(outer, field))
        level = list(itertools.islice(inners, most + 1))
        if not level:
            return
        # Every value takes a character of the text at least.
        bounds.check("structured_text", level, f"structured_outputs.{field}")
    raise RequestError(f"structured_outputs.{field}", "an object", f"at most {MAX_DEPTH} levels deep")


def _inner(value: Any, field: str) -> list[Any]:
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise RequestError(f"structured_outputs.{field}", key, "an object whose keys are strings")
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"structured_outputs.{field}", value, "plain JSON, whose numbers are finite")
    return []
