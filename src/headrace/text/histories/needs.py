"""Detects the changes that a template needs in conversations which the APIs allow, by rendering small ones.

Each change is tried on a conversation that needs no other one, rendered with and without the change: the template needs
it if, without it, a text is missing or everything is refused. Runs in the templates' process (`sandbox`), once for each
template; `histories` has the changes, by name. Knows no jinja.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.text import effort, traits
from headrace.text.traits import CALL_IDS, NAME, TOOL, Render, Traits

Message = dict[str, Any]
CALLED, OTHER = "Xanadu", "Atlantis"
"""The values of the argument `place` in the calls."""
_IDS = "12345678"


def find(render: Render) -> Traits:
    """Return the traits of the template that `render` renders, with the changes that it needs."""
    basic = traits.find(render)
    tries = _Tries(render, basic)
    tries.system_messages()
    tries.turns()
    tries.calls()
    tries.tools()
    return msgspec.structs.replace(
        basic, loses=tuple(tries.loses), refuses=tuple(tries.refuses), refused_levels=tries.refused_levels()
    )


class _Tries:
    """Tries changes on conversations. `loses` and `refuses` name the needed ones, as in `Traits`."""

    def __init__(self, render: Render, basic: Traits) -> None:
        self.loses: list[str] = []
        self.refuses: list[str] = []
        self._render, self._traits = render, basic

    def system_messages(self) -> None:
        """Try system messages, first and later ones."""
        user, brief, so = self._say("user", "Where?"), self._say("system", "Be brief."), self._say("assistant", "Such.")
        kind, more = self._say("system", "Be kind."), self._say("user", "Why?")
        shows = self._write([brief, user], [TOOL])
        no_system = "no first system" if shows else "no system"
        if self._needs(no_system, [brief, user], [self._say("user", "Be brief. Where?")], "Be brief.", "Where?"):
            if not shows:
                return
        elif self._traits.content_form != "string":
            texts = [{"type": "text", "text": text} for text in ("Be brief.", "Be kind.")]
            together = [self._say("system", "Be brief. Be kind."), user]
            self._needs("one system text", [brief | {"content": texts}, user], together, "Be brief.", "Be kind.")
        late, last = self._say("user", "Be kind."), self._say("user", "Where? Be kind.")
        called, sunny = self._calls(), self._result()
        for original, changed in (
            ([user, so, kind, more], [user, so, self._say("user", "Be kind. Why?")]),
            ([user, kind, more], [self._say("user", "Where? Be kind. Why?")]),
            ([user, so, kind], [user, so, late]),
            ([user, kind], [last]),
            ([user, called, sunny, kind], [user, called, sunny, late]),
        ):
            if self._needs("one system", original, changed, "Be kind.", "Where?"):
                return
        both = "Be brief.", "Be kind.", "Where?"
        for original, changed in (
            ([brief, user, so, kind, more], [brief, user, so, self._say("user", "Be kind. Why?")]),
            ([brief, user, kind, more], [brief, self._say("user", "Where? Be kind. Why?")]),
            ([brief, user, kind], [brief, last]),
            ([brief, kind, user], [self._say("system", "Be brief. Be kind."), user]),
        ):
            if no_system not in self.loses and self._needs("one system of several", original, changed, *both):
                return

    def turns(self) -> None:
        """Try the order of turns, and empty ones."""
        user, more, so = self._say("user", "Where?"), self._say("user", "Why?"), self._say("assistant", "Such.")
        none, silent = self._say("user", ""), self._say("assistant", "")
        both, go = self._say("user", "Where? Why?"), self._say("assistant", "Go on.")
        if not self._needs("joined turns", [user, more], [both], "Where?", "Why?"):
            self._needs(
                "joined turns",
                [user, so, go, more],
                [user, self._say("assistant", "Such. Go on."), more],
                "Such.",
                "Go on.",
            )
        if not self._needs("user first", [so, more], [none, so, more], "Such.", "Why?"):
            brief = self._say("system", "Be brief.")
            self._needs("user first", [brief], [brief, none])
        self._needs("no empty answers", [user, silent, more], [both], "Where?", "Why?")

    def calls(self) -> None:
        """Try turns with calls, and their results."""
        if not self._traits.call:
            self.loses.append("plain calls")
            return
        user, more, called, sunny = (
            self._say("user", "Where?"),
            self._say("user", "Why?"),
            self._calls(),
            self._result(),
        )
        if self._needs("plain results", [user, called, sunny], [user, called, self._say("user", "sunny")], "sunny"):
            return
        self._needs("user before calls", [called, sunny, more], [self._say("user", ""), called, sunny, more], CALLED)
        self._needs("plain results without calls", [sunny, more], [self._say("user", "sunny Why?")], "sunny", "Why?")
        nameless = {key: value for key, value in sunny.items() if key != "name"}
        self._needs("named results", [user, called, nameless], [user, called, sunny], "sunny")
        named = [user, self._calls(ids="call_"), self._result(ids="call_")]
        self._needs("short ids", named, [user, called, sunny], CALLED, "sunny")
        if self._traits.takes_null:
            empty = called | {"content": self._say("assistant", "")["content"]}
            self._needs("null beside calls", [user, empty, sunny], [user, called, sunny], CALLED, "sunny")
        if NAME not in self._traits.call.replace(CALL_IDS[0], ""):
            self.loses.append("ids with names")
        mixed = [user, self._calls(text="I look."), sunny]
        apart = [user, self._say("assistant", "I look."), called, sunny]
        if not (
            self._needs("text before calls", mixed, apart, CALLED, "sunny")
            or self._needs("no text beside calls", mixed, [user, called, sunny], CALLED, "sunny")
        ):
            thought, longer = ({"thinking": text, "reasoning_content": text} for text in ("Hm.", "Hm. I look."))
            reasoned = [user, self._calls(text="I look.") | thought, sunny]
            self._needs("text in the reasoning", reasoned, [user, called | longer, sunny], CALLED, "sunny")
        second, rainy = self._calls(OTHER, first=1), self._result("rainy", 1)
        together = [user, self._calls(CALLED, OTHER), sunny, rainy]
        self._needs("one call a turn", together, [user, called, sunny, second, rainy], CALLED, OTHER, "sunny", "rainy")
        answered = [user, called, sunny, self._say("assistant", ""), more]
        self._needs("answered results", [user, called, sunny, more], answered, "sunny", "Why?")

    def tools(self) -> None:
        """Try tools without their optional fields, and conversations without tools."""
        user = [self._say("user", "Where?")]
        if not self._write(user, None) and self._write(user, []):
            self.refuses.append("empty tools")
        if not self._traits.shows_tools:
            self.loses.append("plain tools")
            return
        bare: dict[str, Any] = {"name": NAME, "parameters": {"type": "object", "properties": {}}}
        for function in (bare, bare | {"description": "", "parameters": {}}, bare | {"description": None}):
            if self._needs("whole tools", user, user, NAME, tools=[{"type": "function", "function": function}]):
                break
        tool = copy.deepcopy(TOOL)
        properties = tool["function"]["parameters"]["properties"]
        properties["place"] = {"type": "string"}
        self._needs("described parameters", user, user, NAME, tools=[tool])
        for schema in ({"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}, {}):
            properties["place"] = schema | {"description": "Its name"}
            if self._needs("plain schemas", user, user, NAME, tools=[tool]):
                break

    def refused_levels(self) -> tuple[str, ...]:
        """Return the levels of reasoning that the template refuses."""
        user = {"messages": [self._say("user", "Where?")], "tools": None, "add_generation_prompt": True}
        if not self._render(user):
            return ()
        return tuple(word for word in effort.WORDS if not self._render(user | dict.fromkeys(effort.DIALS, word)))

    def _needs(
        self,
        change: str,
        original: Sequence[Message],
        changed: Sequence[Message],
        *texts: str,
        tools: Sequence[Message] = (TOOL,),
    ) -> bool:
        """Return whether the conversation `original` with `tools` needs `change`, which turns it into `changed`, so
        that the template writes `texts`."""
        written = self._write(original, tools)
        if written and all(text in written for text in texts):
            return False
        mended = self._write(changed, [TOOL])
        if not mended or any(text not in mended for text in texts):
            return False
        (self.loses if written else self.refuses).append(change)
        return True

    def _write(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> str:
        tools = None if tools is None else list(tools)
        return self._render({"messages": list(messages), "tools": tools, "add_generation_prompt": False}) or ""

    def _say(self, role: str, text: str) -> Message:
        parts = self._traits.content_form == "parts"
        content: Any = [{"type": "text", "text": text}] * bool(text) if parts else text
        return {"role": role, "content": content}

    def _calls(self, *places: str, text: str = "", ids: str = _IDS, first: int = 0) -> Message:
        calls = [
            traits.call(self._traits.text_arguments, f"{ids}{number}", place)
            for number, place in enumerate(places or (CALLED,), first)
        ]
        null = {"content": None} if self._traits.takes_null and not text else {}
        return {**self._say("assistant", text), **null, "tool_calls": calls}

    def _result(self, text: str = "sunny", number: int = 0, ids: str = _IDS) -> Message:
        return self._say("tool", text) | {"name": NAME, "tool_call_id": f"{ids}{number}"}
