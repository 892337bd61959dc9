"""The second names of routes: each is its target, byte for byte but for ids and times."""

from __future__ import annotations

import re
from typing import Any

import pytest
from starlette.applications import Starlette
from tests.serve.test_refusals import BODIES
from tests.support.server import HTTP, Live

from headrace.serve import aliases
from headrace.serve.aliases import ALIASES


def fixed(reply: Any) -> tuple[int, str]:
    """Status and text of a reply without its ids and times."""
    text = re.sub(
        r'"(id|item_id)":"[^"]*"|"(created|created_at|completed_at)":[^,}]*|"timings":{[^}]*}', "", reply.text
    )
    return reply.status_code, re.sub(r"[0-9a-f]{32}", "", text)


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_its_target(live: Live, alias: str) -> None:
    method = "POST" if ALIASES[alias] in BODIES else "GET"
    body = BODIES[ALIASES[alias]][1] | {"seed": 1, "stream": False} if method == "POST" else None
    for inputs in (body, {}) if body else (None,):
        replies = [HTTP.request(method, live.url + path, json=inputs) for path in (alias, ALIASES[alias])]
        assert fixed(replies[0]) == fixed(replies[1])
        assert replies[0].status_code == (200 if inputs == body else 400)


def test_an_alias_streams_as_its_target_does(live: Live) -> None:
    body = BODIES["/v1/chat/completions"][1] | {"seed": 1, "stream": True}
    assert live.post("/chat/completions", body).text.endswith("data: [DONE]\n\n")


def test_control_an_alias_of_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliases, "ALIASES", {"/x": "/y"})
    with pytest.raises(KeyError):
        aliases.add_routes(Starlette())
