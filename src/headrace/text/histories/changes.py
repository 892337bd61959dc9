"""The table of the changes of a conversation, and the function that applies them.

Each change concerns only the places that need it, and leaves the rest unchanged. They are applied in the order of the
table, for later ones build on earlier ones. Knows no template; called by `templates`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from headrace.text.histories import calls, tools, turns
from headrace.text.histories.conversation import Conversation
from headrace.text.traits import Traits


class Change(NamedTuple):
    """A report of a change for the caller: the request's field, and a text."""

    field: str
    why: str


def changed(conversation: Conversation, names: Sequence[str]) -> tuple[Conversation, list[Change]]:
    """Return a conversation with the changes of these names, and reports of the changes that had an effect."""
    changes: list[Change] = []
    for name, (apply, field, why) in CHANGES.items():
        if name not in names:
            continue
        after = apply(conversation)
        if (after.messages, after.tools) != (conversation.messages, conversation.tools) and why:
            changes.append(Change(field, why))
        conversation = after
    return conversation, changes


def takes_late_system(traits: Traits) -> bool:
    """Return whether the template writes system messages wherever they stand."""
    needs = traits.loses + traits.refuses
    return not {"one system", "one system of several", "no system"}.intersection(needs)


_Apply = Callable[[Conversation], Conversation]

CHANGES: Mapping[str, tuple[_Apply, str, str]] = {
    "plain tools": (
        tools.plain_tools,
        "tools",
        "the chat template has no place for tools: the system message has them as text",
    ),
    "whole tools": (
        tools.whole_tools,
        "tools",
        "the chat template requires a description and parameters: empty ones are given",
    ),
    "plain schemas": (
        tools.plain_schemas,
        "tools",
        "the chat template takes simple schemas only, and gets each part with one type",
    ),
    "described parameters": (
        tools.described_parameters,
        "tools",
        "the chat template requires a description of each parameter: empty ones are given",
    ),
    "empty tools": (tools.empty_tools, "", ""),
    "one text": (turns.one_text, "messages", "the chat template takes no lists of texts here: they are one text"),
    "one system text": (turns.one_system_text, "", ""),
    "plain calls": (
        calls.plain_calls,
        "messages",
        "the chat template has no place for calls: they and their results are texts",
    ),
    "plain results": (
        calls.plain_results,
        "messages",
        "the chat template has no place for results of calls: they are the user's",
    ),
    "plain results without calls": (
        calls.plain_stray_results,
        "messages",
        "the chat template takes no results without calls: they are the user's",
    ),
    "named results": (
        calls.named_results,
        "messages",
        "the chat template requires the tool's name beside a result: it is the call's",
    ),
    "ids with names": (
        calls.ids_with_names,
        "messages",
        "the chat template writes a call's id alone: ids get the names of the functions",
    ),
    "short ids": (
        calls.short_ids,
        "messages",
        "the chat template takes ids of nine letters or digits: others are replaced",
    ),
    "null beside calls": (calls.null_beside_calls, "", ""),
    "text before calls": (
        calls.text_before_calls,
        "messages",
        "the chat template takes no text beside calls: it is a turn before",
    ),
    "text in the reasoning": (
        calls.text_in_reasoning,
        "messages",
        "the chat template takes no text beside reasoning and calls: it is added to the reasoning",
    ),
    "no text beside calls": (
        calls.no_text_beside_calls,
        "messages",
        "the chat template takes no text beside calls: it is left out",
    ),
    "one call a turn": (
        calls.one_call_a_turn,
        "messages",
        "the chat template takes one call a turn: each is a turn, with its result",
    ),
    "one system": (
        turns.one_system,
        "messages",
        "the chat template takes one system message, and first: later ones are the user's",
    ),
    "one system of several": (
        turns.one_of_several,
        "messages",
        "the chat template takes one system message, and first: later ones are the user's",
    ),
    "no first system": (
        turns.no_first_system,
        "messages",
        "the chat template leaves a first system message out: it is the user's",
    ),
    "no system": (turns.no_system, "messages", "the chat template takes no system message: it is the user's"),
    "no empty answers": (
        turns.no_empty_answers,
        "messages",
        "the chat template takes no empty answers: they are left out",
    ),
    "user first": (
        turns.user_first,
        "messages",
        "the chat template requires the user first: an empty message is put there",
    ),
    "user before calls": (
        turns.user_before_calls,
        "messages",
        "the chat template requires the user before calls: an empty message is put there",
    ),
    "joined turns": (
        turns.joined_turns,
        "messages",
        "the chat template requires turns to alternate: neighbours of one role are joined",
    ),
    "answered results": (
        turns.answered_results,
        "messages",
        "the chat template requires an answer between results and the user: an empty one is put there",
    ),
}
"""By name: the function that makes the change, the field that it concerns, and a text for the caller, which is empty
where the content stays the same."""
OF_TOOLS = frozenset(("plain tools", "whole tools", "plain schemas", "described parameters"))
"""Changes without effect on a conversation without tools."""
SMALL = tuple(name for name in CHANGES if name not in ("plain tools", "plain calls", "plain results", "no system"))
"""Changes to try together on a conversation that a template refuses in spite of the changes that it was found to
need."""
PLAIN = (
    "plain tools",
    "empty tools",
    "one text",
    "plain calls",
    "no system",
    "no empty answers",
    "user first",
    "joined turns",
)
"""The last resort: turns of the user's and the assistant's, with nothing but text."""
