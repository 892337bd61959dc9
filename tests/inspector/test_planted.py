"""A reply with an object in the place of a text makes no element of the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Open = Callable[..., Any]
# Preact takes an object with a `__b` for an element of its own.
PLANTED = {"type": "b", "props": {"title": "planted", "children": "planted"}, "__b": 1, "__v": 7}
RENDER = """async ([module, way, text]) => {
    const { html } = await import(module), { render } = await import("/inspector/vendor/preact-htm.js");
    const planted = JSON.parse(text), Part = ({ fact, children }) => html`<i title=${fact.type}>${children}</i>`;
    const ways = {
        "a value": () => html`<ul title="a > b"><li class="x">${planted}</li></ul>`,
        "in lists": () => html`<ul>${[[planted]].map((each) => html`<li>${each}</li>`)}</ul>`,
        "beside quotes": () => html`<ul title="a ${"<"} b" class='${">"}'>${planted}<li>${"<"}</li></ul>`,
        "in a component": () => html`<${Part} fact=${planted}>${planted}<//>`,
    };
    const box = document.createElement("div");
    // What Preact has rendered once has a `__b`.
    for (let i = 0; i < 2; i++) render(ways[way](), box);
    return box.innerHTML;
}"""
EXPECTED = {
    "a value": '<ul title="a &gt; b"><li class="x">[object Object]</li></ul>',
    "in lists": "<ul><li>[object Object]</li></ul>",
    "beside quotes": '<ul title="a &lt; b" class="&gt;">[object Object]<li>&lt;</li></ul>',
    "in a component": '<i title="b">[object Object]</i>',
}


@pytest.mark.parametrize("way", EXPECTED)
@pytest.mark.parametrize("depth", [None, 0, 1])
def test_S_33_an_object_of_a_reply_is_shown_as_text(open_page: Open, way: str, depth: int | None) -> None:
    text = json.dumps(PLANTED | {"__b": depth, "constructor": None})
    assert open_page("/").evaluate(RENDER, ["/inspector/lib.js", way, text]) == EXPECTED[way]


@pytest.mark.parametrize("way", EXPECTED)
def test_S_33_control_the_library_makes_an_element_of_it(open_page: Open, way: str) -> None:
    markup = open_page("/").evaluate(RENDER, ["/inspector/vendor/preact-htm.js", way, json.dumps(PLANTED)])
    assert '<b title="planted">planted</b>' in markup
