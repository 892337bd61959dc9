"""What this browser has stored: each entry is checked by itself, and a damaged one takes no other with it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.inspector import browser
from tests.inspector.test_chat import ready
from tests.support.serving import Served

Open = Callable[..., Any]
PREFIX = "headrace.conversation."
ANSWER = {
    "role": "assistant",
    "content": "An *answer*.",
    "reasoning": "A reason.",
    "calls": [{"id": "c", "name": "weather", "arguments": "{}"}],
    "isLeftOut": False,
    "ids": [1, 2, 3],
    "numKept": 0,
    "promptIds": [4, 5],
    "knobs": {"temperature": 0.5, "max_tokens": None},
    "seed": 7,
    "usage": {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}},
    "explain": {
        "id": "x",
        "latency": 0.5,
        "split": "rows",
        "sentences": ["It waited."],
        "parts": [{"name": "queue", "seconds": 0.1, "estimated": True}],
        "prefix_cache": [{"num_cached_tokens": 1, "sentence": "it was new"}],
    },
    "finish": "length",
    "error": None,
    "progress": None,
    "times": {"sent": 1.0, "first": 2.0, "thought": 3.0, "last": 9.0},
    "bins": [1, 2],
    "note": None,
}
GOOD = {
    "id": "good",
    "title": "",
    "changed": 9e12,
    "model": "builtin",
    "system": "Be short.",
    "knobs": {"seed": "7"},
    "tools": "[]",
    "messages": [
        {"role": "user", "content": "the good one", "isLeftOut": True, "attachments": [{"name": "a.txt", "text": "x"}]},
        ANSWER,
        {"role": "tool", "content": "warm", "callId": "c"},
    ],
}
WRONG: tuple[Any, ...] = (None, 5, "text", True, [], {}, [None], [[]], {"a": {}}, {"type": "b", "props": {}, "key": 1})
STORE = "(entries) => Object.entries(entries).forEach(([name, text]) => localStorage.setItem(name, text))"
# Opens each conversation of the list, and returns those that show nothing.
OPEN_ALL = """async () => {
  const empty = [];
  for (const each of [...document.querySelectorAll(".conversations li button")]) {
    each.click();
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    if (!document.querySelector(".thread .foot")) empty.push(each.textContent);
  }
  return empty;
}"""


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a conversation but its own."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*above, key)
        yield from places(each, (*above, key))


def damaged() -> dict[str, str]:
    """Entries of the browser, each with another value in one place of a conversation, or without that place."""
    entries = {}
    for place in places(GOOD):
        for value in (*WRONG, ...):
            name = f"{len(entries)}"
            entry: Any = copy.deepcopy(GOOD) | {"id": name, "changed": 1}
            inner = entry
            for key in place[:-1]:
                inner = inner[key]
            if value is ...:
                del inner[place[-1]]
            else:
                inner[place[-1]] = value
            entries[PREFIX + name] = json.dumps(entry)
    texts = ("", "null", "5", '"text"', "[]", "{}", "{", "[" * 10_000, '{"messages": null}', '{"__proto__": null}')
    other = {f"{PREFIX}text {index}": text for index, text in enumerate(texts)}
    # Its name is another's, which would be deleted in its place.
    return entries | other | {f"{PREFIX}other": json.dumps(GOOD)}


@pytest.fixture
def stored(open_page: Open) -> Any:
    page = open_page("/")
    ready(page)
    page.evaluate(STORE, damaged() | {f"{PREFIX}good": json.dumps(GOOD), "headrace.theme": '"><svg onload=alert(1)>'})
    return page


def test_a_damaged_entry_takes_no_other_with_it(stored: Any) -> None:
    page = stored
    page.reload()
    ready(page)
    page.locator(".question", has_text="the good one").wait_for()
    assert page.evaluate("document.documentElement.dataset.theme") == "auto"
    num_listed = page.locator(".conversations li").count()
    assert 1 < num_listed < len(damaged()) / 2
    assert page.evaluate(OPEN_ALL) == []
    assert page.locator("[role=note]").inner_text().endswith(f": {len(damaged()) + 1 - num_listed:,}.")


def test_control_without_the_check_a_damaged_entry_empties_the_page(stored: Any) -> None:
    page = stored

    def unchecked(route: Any) -> None:
        text = route.fetch().text()
        check = "fits(conversation, CONVERSATION) && "
        assert check in text
        route.fulfill(body=text.replace(check, ""), content_type="text/javascript")

    page.route("**/conversations.js", unchecked)
    with page.expect_event("pageerror"):
        page.reload()
    assert page.locator(".question", has_text="the good one").count() == 0
    page.errors.clear()


def test_a_server_without_a_loaded_model_leaves_the_knobs_to_the_requests(chromium: Any, server: Served) -> None:
    """/props is 400 there: of a folder of models, none is loaded yet."""
    with browser.watched_page(chromium, server.url) as page:
        error = {"error": {"message": "model: 'a' is not allowed; it must be a model that is loaded"}}
        page.route("**/props", lambda route: route.fulfill(status=400, json=error))
        page.goto("/")
        ready(page)
        with page.expect_request("**/v1/chat/completions") as request:
            page.get_by_label("Message").fill("Hello")
            page.keyboard.press("Enter")
        assert not {"temperature", "top_p", "top_k", "min_p"} & request.value.post_data_json.keys()
        page.get_by_role("button", name="Stop").or_(page.locator(".answer[aria-busy=false]")).first.wait_for()
        # The browser writes each 400 to its console.
        page.errors.clear()
