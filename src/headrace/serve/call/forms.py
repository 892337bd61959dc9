"""The form that a request asks its answer to have, in any of OpenAI's and vLLM's ways to ask for one.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*` become one `StructuredOutputs`, or
None. Knows no grammar; `text.grammars` finds out whether the form can be honoured. Called by
`serve.apis.openai.completions`, and by `serve.call.answers` for what is missing at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from headrace.protocol.constraints import StructuredOutputs, constraint_of
from headrace.protocol.errors import RequestError
from headrace.protocol.step import Finish
from headrace.serve.call.call import spelled

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_structural_tag": "structural_tag",
}


class Formed(Protocol):
    """The fields of a request that name a form."""

    response_format: dict[str, Any] | None
    structured_outputs: dict[str, Any] | None
    guided_whitespace_pattern: str | None


def form_of(request: Formed) -> tuple[StructuredOutputs | None, dict[str, str]]:
    """Return the form that a request asks for, and the spelling under which errors about it name its field.

    Raises `RequestError` for a form that is none, and for two of them.
    """
    forms: dict[str, dict[str, Any]] = {}
    for name, kind in GUIDED.items():
        value = getattr(request, name)
        if value not in (None, False):
            forms[name] = {kind: value, "whitespace_pattern": request.guided_whitespace_pattern}
    if request.structured_outputs is not None:
        forms["structured_outputs"] = request.structured_outputs
    fields = _of_response_format(request.response_format)
    if fields is not None:
        forms["response_format"] = fields
    if not forms:
        if request.guided_whitespace_pattern is not None:
            raise RequestError("guided_whitespace_pattern", request.guided_whitespace_pattern, "beside guided_json")
        return None, {}
    name, *others = forms
    if others:
        raise RequestError(others[0], getattr(request, others[0]), f"left out: {name} says what form the answer has")
    spelling = {"structured_outputs": name}
    with spelled(spelling):
        return constraint_of(forms[name]), spelling


def _of_response_format(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """The fields of a `StructuredOutputs`; None for plain text."""
    if response_format is None:
        return None
    field = "response_format"
    match response_format.get("type"):
        case "text":
            return None
        case "json_object":
            # llama-server's way to give a schema.
            return {"json": response_format["schema"]} if response_format.get("schema") else {"json_object": True}
        case "json_schema":
            inner = response_format.get("json_schema", response_format)
            if not isinstance(inner, Mapping):
                raise RequestError(f"{field}.json_schema", inner, "an object with a schema")
            schema = inner.get("schema")
            if schema is None:
                raise RequestError(f"{field}.json_schema.schema", None, "given")
            return {"json": schema}
        case "structural_tag":
            return {"structural_tag": msgspec.json.encode(response_format).decode()}
        case other:
            raise RequestError(f"{field}.type", other, "text, json_object, json_schema or structural_tag")


def shortfall(constraint: StructuredOutputs | None, text: str, finish: Finish | None) -> str | None:
    """Why an answer that has ended may not have its form, or None: it was cut off, and not by the form's own end."""
    if constraint is None or finish is None or (finish.reason == "stop" and not isinstance(finish.stop_reason, str)):
        return None
    cut = "max_tokens" if finish.reason == "length" else "a stop string" if finish.reason == "stop" else finish.reason
    match constraint.kind:
        case "json" | "json_object":
            try:
                msgspec.json.decode(text)
            except (msgspec.DecodeError, RecursionError):
                return f"the document is incomplete: {cut} ended it"
            return None
        case "choice":
            return None if text in (constraint.choice or ()) else f"the answer is incomplete: {cut} ended it"
        case _:
            return f"the answer may be incomplete: {cut} ended it"
