"""Writes answers as models do, by the tables of formats and of styles: what the tests of dialects read back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.text.reasoning import NO_STYLE, Style, begins_inside
from headrace.text.tools.formats import NO_FORMAT, Layout, ToolFormat

Call = tuple[str, dict[str, Any]]


class Answer(NamedTuple):
    """What a model says: text may stand before the calls."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]


def layout_of(tools: ToolFormat, template: str) -> Layout:
    """The layout that a model with this chat template writes."""
    fitting = [layout for layout in tools.layouts if layout.in_template in template]
    return max(fitting, key=lambda layout: len(layout.in_template))


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def elements(tag: str, value: Any) -> str:
    if isinstance(value, dict):
        return "".join(f"{tag}<{key}>{elements(tag, inner)}{tag}</{key}>" for key, inner in value.items())
    if isinstance(value, list):
        return "".join(f"{tag}<item>{elements(tag, inner)}{tag}</item>" for inner in value)
    return plain(value)


def bare(quotes: tuple[str, str], value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{bare(quotes, inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(bare(quotes, inner) for inner in value) + "]"
    return f"{quotes[0]}{value}{quotes[1]}" if isinstance(value, str) else json.dumps(value)


def one(layout: Layout, number: int, call: Call) -> str:
    """One call without the marks around it."""
    name, values = call
    arguments = json.dumps(values, ensure_ascii=False)
    before, after = layout.name
    match layout.body:
        case "json":
            key = f'"{layout.id_key}": "{number}", ' if layout.id_key else ""
            named = f'"{layout.name_key}": "{name}", "{layout.arguments_key}": {arguments}'
            return f"{before}{{{key}{named}}}{layout.end}"
        case "keyed":
            return f'{{"{name}": {arguments}}}'
        case "named":
            numbered = f":{number}" if layout.is_numbered else ""
            return f"{before}{name}{numbered}{after}{arguments}{layout.end}"
        case "fenced":
            return f"{before}function{after}{name}\n```json\n{arguments}\n```{layout.end}"
        case "tagged":
            text = f"{before}{name}{after}"
            for key, value in values.items():
                reply = f"{isinstance(value, str)}".lower().join(layout.says_type) if layout.says_type[0] else ""
                text += f"{key.join(layout.key)}{reply}{plain(value).join(layout.value)}\n"
            return text + layout.end
        case "xml":
            return f"{before}{name}{after}{elements(layout.tag, values)}{layout.end}"
        case "bare":
            return f"{before}{name}{after}{bare(layout.value, values)}"
        case _:
            return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def calls_text(tools: ToolFormat, calls: Sequence[Call], template: str = "") -> str:
    layout = layout_of(tools, template)
    each = [one(layout, number, call) for number, call in enumerate(calls)]
    opens, closes = tools.marks
    if layout.marks == "around each":
        return (layout.separator or "").join(f"{opens}{call}{closes}" for call in each)
    joined = (layout.separator or "").join(each)
    if layout.brackets:
        joined = f"[{joined}]"
    return joined if layout.marks == "read only" else f"{opens}{joined}{closes}"


def says_first(tools: ToolFormat) -> bool:
    """Whether calls are read only where they begin the answer."""
    return bool(tools.starts or tools.starts_with_name)


def speak(
    answer: Answer, tools: ToolFormat = NO_FORMAT, style: Style = NO_STYLE, prompt: str = "", template: str = ""
) -> str:
    """Return the answer to a prompt as the model writes it."""
    headers = tools.headers or style.headers
    if headers is not None:
        return _messages(answer, tools, style, template)
    text = ""
    if style.openings:
        opening = "" if begins_inside(style, prompt) else style.openings[0]
        text = "" if prompt.rstrip().endswith(style.closings) else f"{opening}{answer.reasoning}{style.closings[0]}"
        text += "".join(style.answer[:1])
    text += answer.content
    text += "\n\n" * bool(text and answer.calls)
    return text + (calls_text(tools, answer.calls, template) if answer.calls else "".join(style.answer[1:2]))


def _messages(answer: Answer, tools: ToolFormat, style: Style, template: str) -> str:
    is_harmony = style.between == "" or bool((tools.headers or style.headers).calls)  # type: ignore[union-attr]
    start, end = style.between or "<|start|>assistant", style.closings[0] if style.closings else "<|end|>"
    messages = [f"{style.openings[0]}{answer.reasoning}"] if style.openings and answer.reasoning else []
    if answer.content:
        before = "<|channel|>commentary<|message|>" if is_harmony and answer.calls else style.before_content
        messages.append(f"{before}{answer.content}")
    for call in answer.calls:
        layout = layout_of(tools, template)
        header = call[0].join(layout.header) if layout.header[0] else ""
        messages.append(header + calls_text(tools, [call], template))
    return f"{end}{start}".join(messages)
