"""Replaces blocks that the models here cannot read by texts, and removes tools that a provider runs, before a request's
body is checked. Each change has a warning. Called by the routes in `paths`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace.serve.call.parsing import Warnings
from headrace.text.messages import LEFT_OUT, first_new, placeholder

READ = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")
"""Blocks that `request` reads."""
_HOSTED = re.compile(r"mcp_toolset|[a-z_]+_20\d{6}")


def readable(body: dict[str, Any], warnings: Warnings) -> dict[str, Any]:
    """Return a body in which only the user's turns after the model's last turn may hold blocks that the model cannot
    read. Values of the wrong type stay as they are."""
    messages, tools = body.get("messages"), body.get("tools")
    if isinstance(messages, list):
        new = first_new([message.get("role") if isinstance(message, dict) else None for message in messages])
        messages = [_message(message, place, place >= new, warnings) for place, message in enumerate(messages)]
        body = {**body, "messages": messages}
    if isinstance(tools, list):
        client_tools = [tool for place, tool in enumerate(tools) if not _is_hosted(tool, f"tools[{place}]", warnings)]
        body = {**body, "tools": client_tools}
    return body


def _message(message: Any, place: int, is_new: bool, warnings: Warnings) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    is_new = is_new and message.get("role") == "user"
    field = f"messages[{place}].content"
    return {**message, "content": [_block(block, f"{field}[{i}]", is_new, warnings) for i, block in enumerate(content)]}


def _block(block: Any, field: str, is_new: bool, warnings: Warnings) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    inner = block.get("content") if kind == "tool_result" else None
    if isinstance(inner, list):
        # A tool's result is not the user's own text: the client could not send another one after an error.
        texts = [_block(each, f"{field}.content[{place}]", False, warnings) for place, each in enumerate(inner)]
        return {**block, "content": texts}
    if not isinstance(kind, str) or kind in READ:
        return block
    text = _text_of(kind, block)
    if text is not None:
        return {"type": "text", "text": text}
    if is_new:
        return block
    warnings.add(field, LEFT_OUT)
    name = next((block[key] for key in ("name", "tool_name", "title") if isinstance(block.get(key), str)), "")
    return {"type": "text", "text": placeholder(kind, name)}


def _text_of(kind: str, block: Mapping[str, Any]) -> str | None:
    """Return the text that a document or a search result holds, with its title; None if it holds none."""
    if kind == "document":
        source = block.get("source")
        source = source if isinstance(source, dict) else {}
        inner = {"text": source.get("data"), "content": source.get("content")}.get(str(source.get("type")))
    elif kind == "search_result":
        inner = block.get("content")
    else:
        return None
    if isinstance(inner, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in inner]
        inner = "\n".join(text for text in texts if isinstance(text, str)) if all(texts) else None
    if not isinstance(inner, str):
        return None
    about = [block.get("title"), block.get("context") if kind == "document" else block.get("source")]
    return "\n".join([*(text for text in about if isinstance(text, str) and text), inner])


def _is_hosted(tool: Any, field: str, warnings: Warnings) -> bool:
    """Return whether a tool is one of Anthropic's own, which the models here do not know and this server does not
    run."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or _HOSTED.fullmatch(kind) is None:
        return False
    warnings.add(field, f"{kind} is left out: headrace runs no tools of its own")
    return True
