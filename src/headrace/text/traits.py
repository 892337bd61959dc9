"""The traits of a chat template (the messages that it takes, the text that it writes), found by rendering small
conversations.

`find` runs in the templates' process (`sandbox`), once for each template; `needs` completes its result. `templates`
gives messages the form that the template takes; `tools.detection` finds the format of calls in the text that it writes.
Knows no jinja and no formats.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, Literal

import msgspec

ContentForm = Literal["string", "parts", "both"]
"""The form in which a template reads a message's content: a text, a list of parts, or both."""

Render = Callable[[dict[str, Any]], str | None]
"""Returns the text that the template writes for variables; None where it refuses them."""

NAME = "find_place"
ARGUMENTS: dict[str, Any] = {"place": "Xanadu", "count": 7}
"""The arguments of the call in the conversations."""
CALL_IDS = (f"functions.{NAME}:0", "123456789")
"""The call's id is the first of these that a template takes: Kimi K2's templates write the id in place of the name,
Mistral's take only ids of nine letters or digits."""
MAX_CALL = 2**14
"""The most characters that are kept of a turn."""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Finds a place",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Its name"},
                "count": {"type": "integer", "description": "How many"},
            },
            "required": ["place", "count"],
        },
    },
}


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """The traits of a template. The defaults hold for a template that could not be rendered.

    `takes_null`: whether a turn with calls may have the content null. `text_arguments`: whether the arguments of calls
    must be JSON text, not an object. `shows_developer`: whether it writes messages of the role `developer`.
    `shows_tools`: whether it writes the tools. `call`: the text for a turn that calls `NAME` with `ARGUMENTS`; empty:
    it does not write such calls. `opening`: the text that opens an answer. `loses` names the changes (see `histories`)
    without which a part of some conversation is missing in the text, `refuses` the changes without which there is no
    text. `refused_levels`: the levels of reasoning (see `effort`) that it refuses.
    """

    content_form: ContentForm = "string"
    takes_null: bool = False
    text_arguments: bool = False
    shows_developer: bool = True
    shows_tools: bool = True
    call: str = ""
    opening: str = ""
    loses: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    refused_levels: tuple[str, ...] = ()


def find(render: Render) -> Traits:
    """Return the traits of the template that `render` renders."""

    def write(*messages: dict[str, Any]) -> str:
        return render({"messages": list(messages), "tools": [TOOL], "add_generation_prompt": False}) or ""

    form = _content_form(write)

    def content(text: str) -> Any:
        return [{"type": "text", "text": text}] * bool(text) if form == "parts" else text

    user = {"role": "user", "content": content("Where?")}
    system, developer = ({"role": role, "content": content("Be brief.")} for role in ("system", "developer"))
    before = write(user)
    so = {"role": "assistant", "content": content("Xanadu")}
    answer = _after(before, write(user, so))
    # A template that refuses both has no further traits.
    prompts = before + write(system, user)
    traits = Traits(
        content_form=form,
        shows_developer="Be brief." in write(developer, user),
        shows_tools=not prompts or NAME in prompts,
        opening=answer.partition("Xanadu")[0],
    )
    for call_id, empty, text_arguments in itertools.product(CALL_IDS, (None, content("")), (False, True)):
        turn = _after(
            before, write(user, {"role": "assistant", "content": empty, "tool_calls": [call(text_arguments, call_id)]})
        )
        # A template that writes the object as Python does expects a text in its place.
        if "Xanadu" in turn and "'place': 'Xanadu'" not in turn and "None" not in turn:
            return msgspec.structs.replace(traits, takes_null=empty is None, text_arguments=text_arguments, call=turn)
    return traits


def call(text_arguments: bool, call_id: str, place: str = ARGUMENTS["place"]) -> dict[str, Any]:
    """Return the call in the conversations, in OpenAI's form."""
    arguments = ARGUMENTS | {"place": place}
    function = {"name": NAME, "arguments": json.dumps(arguments) if text_arguments else arguments}
    return {"id": call_id, "type": "function", "function": function}


def _content_form(write: Callable[..., str]) -> ContentForm:
    parts = [{"type": "text", "text": text} for text in ("Where", "to?")]
    text, listed = (write({"role": "user", "content": content}) for content in ("Where", parts))
    # A template that takes texts only may write a list as Python or JSON does, or leave it out.
    if "Where" not in listed or "to?" not in listed or "'Where'" in listed or '"Where"' in listed:
        return "string"
    return "both" if "Where" in text else "parts"


def _after(before: str, text: str) -> str:
    pairs = enumerate(zip(before, text, strict=False))
    start = next((place for place, (one, other) in pairs if one != other), min(len(before), len(text)))
    return text[start : start + MAX_CALL]
