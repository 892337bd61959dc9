"""How much a model reasons: each level in the variables of the chat template; for one that it refuses, the nearest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.protocol.errors import RequestError
from headrace.serve.call.call import ChatCall
from headrace.serve.call.dialect import Dialect
from headrace.text.effort import LEVELS, UNKNOWN, Effort
from headrace.text.messages import ChatMessage
from headrace.text.templates import ChatTemplate

SAYS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
HY3 = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'no_think' %}{% endif %}"
    "{% if reasoning_effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('no such effort') }}{% endif %}"
    "{{ reasoning_effort }}" + SAYS
)
"""In the manner of Hy 3's."""
MUSE = "{{ reasoning_strength or 'high' }}" + SAYS
KIMI = (
    "{% if thinking is not defined %}{% set thinking = true %}{% endif %}"
    "{% if thinking and thinking_effort is defined and thinking_effort not in ['low', 'high', 'max'] %}"
    "{{ raise_exception('no such effort') }}{% endif %}" + SAYS
)
SWITCH = "{{ '<think>' if enable_thinking }}" + SAYS


def effort_of(source: str) -> Effort:
    return Dialect.of(ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})).effort


def given(effort: Effort, level: str) -> Any:
    """The value of the one variable that a level sets."""
    result, _ = effort.at(level)
    assert len(result) == 1
    return next(iter(result.values()))


def test_a_level_that_the_template_refuses_is_the_nearest() -> None:
    hy3 = effort_of(HY3)
    words = ["no_think", "low", "low", "high", "high", "high", "high"]
    assert [given(hy3, level) for level in LEVELS] == words
    warned = [level for level in LEVELS if hy3.at(level)[1]]
    assert warned == ["minimal", "medium", "xhigh", "max"]
    assert (hy3.switched(True), hy3.switched(False)) == ({"reasoning_effort": "high"}, {"reasoning_effort": "no_think"})
    kimi = effort_of(KIMI)
    assert kimi.at("none") == ({"thinking": False}, "")
    assert kimi.at("medium")[0] == {"thinking": True, "thinking_effort": "high"}
    assert kimi.at("max") == ({"thinking": True, "thinking_effort": "max"}, "")


def test_a_dial_without_an_off_and_a_switch_without_levels() -> None:
    muse = effort_of(MUSE)
    assert [given(muse, level) for level in LEVELS] == ["low", *LEVELS[1:]]
    assert [level for level in LEVELS if muse.at(level)[1]] == ["none"]
    assert muse.switched(False) == {}
    switch = effort_of(SWITCH)
    assert [given(switch, level) for level in LEVELS] == [False, *[True] * 6]
    assert not any(switch.at(level)[1] for level in LEVELS)
    none = effort_of(SAYS)
    assert none.at("high") == ({}, UNKNOWN)


@pytest.mark.parametrize(
    ("family", "off", "medium"),
    [
        (
            "MiniMax-M3",
            {"thinking_mode": "disabled", "thinking": False},
            {"thinking_mode": "enabled", "thinking": True},
        ),
        ("qwen3", {"enable_thinking": False}, {"enable_thinking": True}),
        ("Deepseek-V3.1", {"thinking": False}, {"thinking": True}),
        ("glm-5.2", {"enable_thinking": False}, {"enable_thinking": True, "reasoning_effort": "medium"}),
    ],
)
def test_published_templates(family: str, off: Any, medium: Any, shared_data: Path) -> None:
    families = json.loads((shared_data / "templates" / "families.json").read_text(encoding="utf-8"))
    template = ChatTemplate({"default": families[family]["chat_template"]}, {"bos_token": "<s>", "eos_token": "</s>"})
    effort = Dialect.of(template).effort
    assert (effort.at("none"), effort.at("medium")) == ((off, ""), (medium, ""))
    user = [ChatMessage(role="user", content="Hi")]
    prompts = {template.render(user, **effort.at(level)[0]) for level in ("none", "medium")}
    assert len(prompts) == 2


def test_every_level_renders_with_every_template(shared_data: Path) -> None:
    families = json.loads((shared_data / "templates" / "families.json").read_text(encoding="utf-8"))
    sources = {name: each["chat_template"] for name, each in families.items() if "effort" in each["chat_template"]}
    assert len(sources) > 3
    refused = []
    for name, source in sources.items():
        template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
        effort = Dialect.of(template).effort
        user = [ChatMessage(role="user", content="Hi")]
        for level in LEVELS:
            assert template.render(user, **effort.at(level)[0])
            try:
                template.render(user, reasoning_effort=level)
            except RequestError:
                refused.append((name, level))
    # Control: as they are, some levels are refused.
    assert refused


def test_what_a_call_says_is_set_once() -> None:
    dialect = Dialect.of(ChatTemplate({"default": HY3}, {}))
    call = ChatCall(messages=[], reasoning_effort="medium", thinks=True)
    variables: dict[str, Any] = {}
    dialect.set_effort(call, variables)
    assert variables == {"reasoning_effort": "high"}
    assert call.warnings == ["reasoning_effort: the chat template does not know 'medium', and gets 'high'"]
    chosen: dict[str, Any] = {"reasoning_effort": "low"}
    dialect.set_effort(call, chosen)
    assert chosen == {"reasoning_effort": "low"}
