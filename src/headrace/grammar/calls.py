"""Tool calls as a grammar: what `tool_choice` "required", or a named tool, makes of the tools' schemas.

A model's format says what stands around a call and between two; between those texts stand the arguments, JSON by the
tool's own schema. Formats that do not write JSON give grammar rules for their arguments themselves. Pure functions;
called by the server's tool formats, whose answers then parse by construction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.grammar import schemas
from headrace.grammar.compile import json_options, lark_text
from headrace.sampling.constraints import StructuredOutputs


class Call(msgspec.Struct, frozen=True):
    """One tool that may be called: the text up to its arguments, their JSON schema, and the text after them.

    `rule`, instead of `schema`, is the right-hand side of a Lark rule; it may name rules of `tool_calls`' `rules`.
    """

    begin: str
    schema: dict[str, Any] | bool = True
    end: str = ""
    rule: str | None = None


def tool_calls(
    calls: Sequence[Call],
    *,
    opening: str = "",
    closing: str = "",
    separator: str = "",
    many: bool = True,
    special: Mapping[str, int] | None = None,
    before: str | None = None,
    rules: Sequence[str] = (),
) -> tuple[StructuredOutputs, list[str]]:
    """An answer that is `opening`, one of `calls` or (if `many`) several with `separator` between, and `closing`.

    `special` are texts that the tokenizer has a token for which is no text, with its id: where they occur, that token
    is meant. `before` is a Lark regex, without slashes, of free text that may come first (a model's reasoning, up to
    and with its end). Returns the constraint, and what it leaves open of the schemas, in words. A schema that can not
    be honoured is refused when the constraint is checked.
    """
    if not calls:
        raise ValueError("no tool may be called")
    marks = dict(special or {})
    warnings: list[str] = []
    lines = ["%llguidance {}"]
    names = []
    for place, call in enumerate(calls):
        inner = call.rule
        if inner is None:
            brought = schemas.bring(call.schema)
            warnings += brought.warnings
            inner = "%json " + inline_schema(brought.schema)
        lines.append(f"args_{place}: {inner}")
        lines.append(f"call_{place}: {_sequence(call.begin, marks)} args_{place} {_sequence(call.end, marks)}")
        names.append(f"call_{place}")
    lines.append(f"call: {' | '.join(names)}")
    more = f"({_sequence(separator, marks)} call)*" if many else ""
    lines.append(
        f"start: {'before ' if before else ''}{_sequence(opening, marks)} call {more} {_sequence(closing, marks)}"
    )
    if before:
        lines.append(f"before: /{before}/")
    return StructuredOutputs(grammar="\n".join([*lines, *rules])), warnings


def inline_schema(schema: schemas.Schema) -> str:
    """A schema for `%json`, with headrace's options for whitespace in it."""
    options = {"x-guidance": json_options(StructuredOutputs(json_object=True))}
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return json.dumps(options | schema, ensure_ascii=False)


def _sequence(text: str, special: Mapping[str, int]) -> str:
    """A text as Lark literals, with the tokens that are no text by their ids."""
    if not text:
        return ""
    parts = [text]
    if special:
        found = "|".join(re.escape(mark) for mark in sorted(special, key=len, reverse=True))
        parts = [part for part in re.split(f"({found})", text) if part]
    return " ".join(f"<[{special[part]}]>" if part in special else lark_text(part) for part in parts)
