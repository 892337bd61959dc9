"""Tools of the type `custom`, which take a text: the functions that the model gets for them, and the text in its calls.

Models are trained on functions, so a custom tool is shown to them as a function with the one argument `input`. The text
is extracted from the call's arguments as they come (`InputText`), and wrapped in arguments for earlier calls
(`arguments`). Knows no formats and no HTTP; called by `choice`, by the reply modules of OpenAI's APIs, and by the
readers of messages.
"""

from __future__ import annotations

import json
import re
from typing import Any

from headrace.protocol import bounds
from headrace.protocol.errors import RequestError

INPUT = "input"
"""The name of the argument that holds the text."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
SYNTAXES = ("lark", "regex")

_START = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_OTHER = r"\\u[0-9a-fA-F]{4}"
# Whole characters of a JSON string. The first half of a surrogate pair waits for the next character.
_WHOLE = re.compile(rf'(?:[^"\\]|\\[^u]|{_HIGH}{_LOW}|(?!{_HIGH}){_OTHER}|{_HIGH}(?=[^\\]|\\[^u]|(?!{_LOW}){_OTHER}))*')


def arguments(text: str) -> dict[str, str]:
    """Return the arguments of a call with this text."""
    return {INPUT: text}


def function(tool: dict[str, Any], field: str, nested: bool = True) -> tuple[dict[str, Any], str | None]:
    """Return the function that stands for a custom tool, and the grammar of its text in Lark's syntax (None: any text).

    `nested`: name, description and format are in the object `custom`, as in chat completions, and not next to `type`.
    Raises `RequestError` for an invalid format.
    """
    inner = tool.get("custom") if nested else tool
    field = f"{field}.custom" if nested else field
    if not isinstance(inner, dict):
        raise RequestError(field, inner, "an object with name, description and format")
    grammar, note = _grammar(inner.get("format"), f"{field}.format", nested)
    description = inner.get("description") or ""
    if isinstance(description, str) and note:
        description = f"{description}\n\n{note}".strip()
    as_function = {"name": inner.get("name"), "description": description, "parameters": SCHEMA}
    return {"type": "function", "function": as_function}, grammar


def _grammar(form: Any, field: str, nested: bool) -> tuple[str | None, str]:
    """Return a format as Lark, and as a sentence for the model."""
    if form is None or form == {"type": "text"}:
        return None, ""
    if not isinstance(form, dict) or form.get("type") != "grammar":
        raise RequestError(field, form, 'an object whose type is "text" or "grammar"')
    if nested:
        form, field = form.get("grammar"), f"{field}.grammar"
        if not isinstance(form, dict):
            raise RequestError(field, form, "an object with syntax and definition")
    syntax, definition = form.get("syntax"), form.get("definition")
    if syntax not in SYNTAXES:
        raise RequestError(f"{field}.syntax", syntax, " or ".join(SYNTAXES))
    if not isinstance(definition, str):
        raise RequestError(f"{field}.definition", definition, "a string")
    bounds.check("structured_text", definition, f"{field}.definition")
    if syntax == "regex":
        bare = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", definition, flags=re.DOTALL)
        return f"start: /{bare}/", f"The {INPUT} must match this regular expression: {definition}"
    return definition, f"The {INPUT} must follow this Lark grammar:\n{definition}"


def input_of(arguments: str) -> str:
    """Return the text in the arguments of a whole call."""
    text = InputText()
    return text.feed(arguments) + text.close()


class InputText:
    """Takes the text out of a call's arguments, which come in pieces: `{"input": "..."}`, escapes and all.

    Arguments of another shape have no `input`. Then the text is their only value, if that is a string, and else their
    JSON unchanged, so that nothing that the model wrote is lost.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._inside = False
        self._ended = False

    def feed(self, piece: str) -> str:
        """Return the part of the text that has become certain."""
        if self._ended:
            return ""
        self._rest += piece
        if not self._inside:
            match = _START.match(self._rest)
            if match is None:
                return ""
            self._inside, self._rest = True, self._rest[match.end() :]
        match = _WHOLE.match(self._rest)
        end = match.end() if match else 0
        text, self._rest = self._rest[:end], self._rest[end:]
        self._ended = self._rest.startswith('"')
        return _decoded(text)

    def close(self) -> str:
        """Return the rest of the text: the arguments end here, perhaps cut off."""
        if self._inside:
            return ""
        try:
            value = json.loads(self._rest)
        except (ValueError, RecursionError):
            return self._rest
        values = list(value.values()) if isinstance(value, dict) else []
        return values[0] if len(values) == 1 and isinstance(values[0], str) else self._rest


def _decoded(text: str) -> str:
    try:
        value: str = json.loads(f'"{text}"', strict=False)
    except ValueError:  # an escape that JSON does not have: the text stays as the model wrote it
        return text
    # Half a surrogate pair cannot be written in UTF-8.
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
