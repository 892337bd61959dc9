"""The page in a browser, with the built-in model behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.inspector import browser
from tests.support.server import Live, inproc

from headrace.protocol.config import ServerConfig
from headrace.text.tokenizer import Tokenizer


def test_every_view_opens_without_errors(open_page: Callable[..., Any]) -> None:
    page = open_page("/")
    # As the browser reckons them from the page.
    addresses = page.locator("nav a").evaluate_all("links => links.map((link) => link.href)")
    assert addresses[0] == page.url
    for address in addresses:
        page.goto(address)
        page.locator("nav a[aria-current=page]").wait_for()
        assert page.locator("nav a[aria-current=page]").evaluate("link => link.href") == address
        page.locator(".status", has_text="builtin · ready").wait_for()
        assert browser.violations(page) == []


def visit(chromium: Any, url: str, code: str) -> None:
    """Open the page and run a script in it."""
    with browser.watched_page(chromium, url) as page:
        page.goto("/")
        page.evaluate(code)
        page.wait_for_timeout(200)


def test_errors_of_a_page_fail_its_test(chromium: Any, server: Any) -> None:
    script = "document.body.append(Object.assign(document.createElement('script'), {textContent: 'var x = 1'}))"
    for code in ("console.error('no')", "setTimeout(() => { throw new Error('no') })", script):
        with pytest.raises(AssertionError, match="the page has errors"):
            visit(chromium, server.url, code)
    with browser.watched_page(chromium, server.url) as page:
        page.goto("/")
        page.evaluate("document.body.append(Object.assign(document.createElement('button'), {textContent: ''}))")
        assert [line.partition(":")[0] for line in browser.violations(page)] == ["button-name"]


def test_overload_is_shown_while_it_lasts(chromium: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.serve.gates.overload.CALM_S", 0.1)
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        shedding, pressures = live.app.state.lifespan.shedding, {"memory": 0.0}
        shedding.pressures = lambda: dict(pressures)
        for size in (browser.DESKTOP, browser.PHONE):
            with browser.watched_page(chromium, live.url, viewport=size) as page:
                page.goto("/inspect")
                page.locator(".status", has_text="ready").wait_for()
                assert page.locator(".overload").count() == 0
                pressures["memory"] = 0.93
                badge = page.locator(".overload")
                badge.wait_for()
                text = "overloaded: its memory is at 93% of the bound; new answers are refused"
                assert badge.text_content() == text
                assert browser.violations(page) == []
                assert not browser.is_wider_than_the_screen(page)
                pressures["memory"] = 0.0
                badge.wait_for(state="detached")
