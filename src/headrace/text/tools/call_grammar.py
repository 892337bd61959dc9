"""Writes the grammar of an answer that must be calls, by the table of `formats`, as a structural tag's parts.

`headrace.grammar.tags` defines the parts. `calls` reads all that the grammar allows. Called by `serve.call.dialect`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from headrace.protocol.errors import RequestError
from headrace.text.reasoning import spelled
from headrace.text.tools.arguments import Argument
from headrace.text.tools.custom import INPUT
from headrace.text.tools.formats import FORMATS, Layout
from headrace.text.tools.parser import Schemas
from headrace.text.tools.tree import ITEM

FormatPart = dict[str, Any]
"""A part of a structural tag's `format`."""
UNQUOTED = ("tagged", "xml", "bare")
"""Bodies that write texts without JSON's quotes."""
MAX_NESTED = 8
"""Levels of objects and lists that are written as elements."""
_ALL = frozenset("type description title default examples $defs definitions".split())
_OF_OBJECTS = _ALL | {"properties", "required", "additionalProperties"}
_OF_LISTS = _ALL | {"items", "minItems", "maxItems"}
"""Keywords of objects and lists that a grammar of elements can enforce; values with other keywords are written as
JSON."""
_NUMBER: FormatPart = {"type": "regex", "pattern": "[0-9]{1,4}"}


class RequiredCalls(NamedTuple):
    """The calls that an answer must contain: of tools with these `schemas`, and only one call if `single`. `template`
    is the model's chat template. `token_ids` has the ids of the format's texts that are special tokens. `is_begun`: the
    prompt ends with the format's `in_prompt`. `customs` has the grammars of the tools that take a text, in Lark's
    syntax."""

    schemas: Schemas
    single: bool
    template: str
    token_ids: Mapping[str, int]
    is_begun: bool = False
    customs: Mapping[str, str | None] = MappingProxyType({})

    def sequence(self, *parts: FormatPart | str) -> FormatPart:
        """Return the parts one after another; texts are split at the special tokens in them."""
        elements: list[FormatPart] = []
        for is_text, group in itertools.groupby(parts, key=lambda part: isinstance(part, str)):
            if is_text:
                elements += spelled("".join(group), self.token_ids)  # type: ignore[arg-type]
            else:
                elements += group  # type: ignore[arg-type]
        return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def grammar(name: str, required: RequiredCalls, before_calls: str = "") -> FormatPart:
    """Return the grammar of one call or more in the format `name`; `before_calls` is the part of the first mark that
    stands there already. Raises `RequestError` for schemas that it cannot honour."""
    tool_format, layout = FORMATS[name], _layout(name, required)
    opens, closes = tool_format.marks
    marks = opens.lstrip().removeprefix(before_calls), closes
    around = {place: marks if layout.marks == place else ("", "") for place in ("around each", "around all")}
    before, after = ("", "") if tool_format.in_prompt else around["around each"]
    calls = [
        required.sequence(before, *_call(layout, required, name, schema), after)
        for name, schema in required.schemas.items()
    ]
    if layout.header[0]:
        opens, closes = around["around all"]
        around["around all"] = "", ""
        headers = [layout.header[0] + name + layout.header[1] + opens for name in required.schemas]
        calls = [required.sequence(header, call, closes) for header, call in zip(headers, calls, strict=True)]
    # A message to a tool is the last one of an answer.
    single = required.single or is_message(name)
    part: FormatPart = {"type": "tags_with_separator", "tags": calls, "at_least_one": True}
    separator = layout.separator or tool_format.in_prompt
    if single or separator:
        part |= {"separator": separator, "stop_after_first": single}
    before, after = around["around all"]
    if not required.is_begun:
        before += tool_format.in_prompt
    opening, closing = "[]" if layout.brackets else ("", "")
    return required.sequence(before, opening, part, closing, after)


def in_text(name: str, required: RequiredCalls) -> FormatPart | None:
    """Return the grammar of free text in which calls may stand, each of a tool of `required`; None where the format has
    no mark before calls that sets them apart from free text, or writes bare text.

    Of functions, it only enforces that their arguments are an object.
    """
    layout, mark = _layout(name, required), FORMATS[name].marks[0].strip()
    if (
        is_message(name)
        or not mark
        or layout.marks == "read only"
        or layout.body in UNQUOTED
        or FORMATS[name].in_prompt
    ):
        return None
    loose: dict[str, Mapping[str, Any]] = {
        tool: schema if tool in required.customs else {"type": "object", "additionalProperties": True}
        for tool, schema in required.schemas.items()
    }
    single = required.single or layout.marks == "around each"
    calls = grammar(name, required._replace(schemas=loose, single=single), mark)
    return {"type": "in_text", "trigger": required.sequence(mark), "content": calls}


def is_message(name: str) -> bool:
    """Return whether each call is a separate message, with a header."""
    return FORMATS[name].headers is not None


def _layout(name: str, required: RequiredCalls) -> Layout:
    fitting = [layout for layout in FORMATS[name].layouts if layout.in_template in required.template]
    return max(fitting, key=lambda layout: len(layout.in_template))


def _call(layout: Layout, required: RequiredCalls, name: str, schema: Mapping[str, Any]) -> list[FormatPart | str]:
    before, after = layout.name
    text = required.customs.get(name)
    if text is not None and layout.body in UNQUOTED:
        bound = "left out, or tool_choice be auto: the model's format of calls writes bare text, not held to it"
        raise RequestError(f"tools[{name}].format", text, bound)
    quoted: list[FormatPart | str] = ['"', {"type": "json_text", "grammar": text}, '"']
    arguments = required.sequence(f'{{"{INPUT}": ', *quoted, "}") if text is not None else _json(schema)
    match layout.body:
        case "json":
            number: list[FormatPart | str] = [f'"{layout.id_key}": "', _NUMBER, '", '] if layout.id_key else []
            keys: list[FormatPart | str] = [f'"{layout.name_key}": "{name}", "{layout.arguments_key}": ', arguments]
            return [before, "{", *number, *keys, "}", layout.end]
        case "keyed":
            return [f'{{"{name}": ', arguments, "}"]
        case "named" if layout.is_numbered:
            return [before, f"{name}:", _NUMBER, after, arguments, layout.end]
        case "named":
            return [before, name, after, arguments, layout.end]
        case "xml":
            return [before, name, after, *_elements(layout, required, name, schema), layout.end]
        case "fenced":
            return [before, "function", after, name, "\n```json\n", arguments, "\n```", layout.end]
        case "tagged":
            return [before, name, after, *_tagged_arguments(layout, required, name, schema), layout.end]
        case "bare":
            return [before, name, after, "{", *_keyword_arguments(layout, required, name, schema), "}"]
        case _:
            if text is not None:
                return [f"{name}({INPUT}=", *quoted, ")"]
            return [f"{name}(", *_keyword_arguments(layout, required, name, schema), ")"]


def _tagged_arguments(
    layout: Layout, required: RequiredCalls, name: str, schema: Mapping[str, Any]
) -> list[FormatPart | str]:
    parts: list[FormatPart | str] = []
    for key, inner, is_required in _properties(schema):
        closing = layout.value[1]
        bare = Argument(schema, key).bare(closing.strip())
        if bare is None:
            value = required.sequence(_json(inner), closing)
        else:
            # The tag is a separate part: free text ends at the first one, even if other text follows it.
            value = required.sequence(_bare_text(bare), closing.strip())
        is_string = str(bare is not None).lower()
        type_text = layout.says_type[0] + is_string + layout.says_type[1] if layout.says_type[0] else ""
        part = required.sequence(layout.key[0], key, layout.key[1] + type_text, layout.value[0], value, "\n")
        parts.append(part if is_required else _optional(part))
    return parts


def _elements(
    layout: Layout, required: RequiredCalls, name: str, schema: Mapping[str, Any], depth: int = 0
) -> list[FormatPart | str]:
    """Return the elements of an object's members; members of nested objects and lists are elements too."""
    parts: list[FormatPart | str] = []
    for key, inner, is_required in _properties(schema):
        part = _element(layout, required, (name, key), inner, depth)
        parts.append(part if is_required else _optional(part))
    return parts


def _element(
    layout: Layout, required: RequiredCalls, place: tuple[str, str], schema: Any, depth: int, tag: str = ""
) -> FormatPart:
    """Return the grammar of one element."""
    (name, key), tag = place, tag or place[1]
    opening, closing = f"{layout.tag}<{tag}>", f"{layout.tag}</{tag}>"
    if isinstance(schema, dict) and depth < MAX_NESTED:
        if schema.get("type") == "object" and schema.get("properties") and _OF_OBJECTS.issuperset(schema):
            return required.sequence(opening, *_elements(layout, required, name, schema, depth + 1), closing)
        if schema.get("type") == "array" and isinstance(schema.get("items"), dict) and _OF_LISTS.issuperset(schema):
            item = _element(layout, required, place, {**_shared(schema), **schema["items"]}, depth + 1, ITEM)
            return required.sequence(opening, *_items(item, schema), closing)
    bare = Argument({**_shared(schema), "properties": {key: schema}}, key).bare(closing)
    if bare is not None:
        return required.sequence(opening, _bare_text(bare), closing)
    # Written as JSON, which the reader takes too.
    return required.sequence(opening, _json(schema), closing)


def _items(item: FormatPart, schema: Mapping[str, Any]) -> list[FormatPart]:
    """Return the items of a list, at least one: an empty list cannot be written."""
    low = max(1, schema.get("minItems", 1))
    if "maxItems" not in schema:
        more: FormatPart = {"type": "tags_with_separator", "tags": [item], "at_least_one": True}
        return [*[item] * (low - 1), more]
    rest: list[FormatPart] = []
    for _ in range(schema["maxItems"] - low):
        rest = [_optional({"type": "sequence", "elements": [item, *rest]})]
    return [*[item] * low, *rest]


def _bare_text(schema: Mapping[str, Any]) -> FormatPart:
    """Return the grammar of a bare text that is held to a schema from `Argument.bare`."""
    if "enum" in schema:
        return _either([{"type": "const_string", "value": value} for value in schema["enum"]])
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if low or high != "":
        # Without a "<" it contains no mark, which would end it too soon.
        return {"type": "regex", "pattern": f"[^<]{{{low},{high}}}"}
    return {"type": "any_text"}


def _keyword_arguments(
    layout: Layout, required: RequiredCalls, name: str, schema: Mapping[str, Any]
) -> list[FormatPart]:
    """Return the required arguments, then the others, in the schema's order.

    Values are JSON, which the reader takes too, except strings in a layout with other quotes."""
    arguments = _properties(schema)
    before, after = layout.value
    equals, comma = (":", ",") if layout.body == "bare" else ("=", ", ")

    def argument(key: str, inner: Any) -> FormatPart:
        of_tool = Argument(schema, key)
        bare = of_tool.bare(after) if before and of_tool.types in (None, {"string"}) else None
        if bare is not None:
            # The quote is a separate part: free text ends at the first one.
            return required.sequence(f"{key}{equals}{before}", required.sequence(_bare_text(bare), after))
        return required.sequence(f"{key}{equals}", _json(inner))

    first = [argument(key, inner) for key, inner, is_required in arguments if is_required]
    others = [argument(key, inner) for key, inner, is_required in arguments if not is_required]

    def more(parts: list[FormatPart]) -> list[FormatPart]:
        return [_optional(required.sequence(comma, part)) for part in parts]

    if first:
        return [first[0], *(required.sequence(comma, part) for part in first[1:]), *more(others)]
    starts = [required.sequence(part, *more(others[place + 1 :])) for place, part in enumerate(others)]
    return [_optional(_either(starts))] if starts else []


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Return (name, schema, whether required) of each parameter. Each schema has the definitions it refers to."""
    properties = schema.get("properties")
    required = schema.get("required")
    shared = _shared(schema)
    return [
        (
            name,
            {**shared, **inner} if isinstance(inner, dict) else inner,
            isinstance(required, list) and name in required,
        )
        for name, inner in (properties.items() if isinstance(properties, dict) else ())
    ]


def _shared(schema: Any) -> dict[str, Any]:
    """Return the definitions of a schema, which its parts may refer to."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema} if isinstance(schema, dict) else {}


def _json(schema: Any) -> FormatPart:
    return {"type": "json_schema", "json_schema": schema}


def _optional(part: FormatPart) -> FormatPart:
    return {"type": "optional", "content": part}


def _either(parts: Sequence[FormatPart]) -> FormatPart:
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}
