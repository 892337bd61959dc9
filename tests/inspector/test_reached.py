"""The page in a browser that reaches the server by TLS under a path: the chat answers, the engine's views are there,
and the links between them stay under the path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.inspector import browser
from tests.inspector.test_chat import ended, ready, set_knobs
from tests.support.certificates import certificates
from tests.support.server import Live, inproc

from headrace.protocol.config import ServerConfig
from headrace.serve.reach import Reach
from headrace.text.tokenizer import Tokenizer


@pytest.fixture
def live(installed: None, tokenizer: Tokenizer) -> Iterator[Live]:
    place = certificates()
    reach = Reach(
        ssl_certfile=str(place / "server.pem"), ssl_keyfile=str(place / "server.key"), root_path="/models/llm"
    )
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0), reach=reach) as live:
        yield live


def test_the_page_behind_tls_and_a_path(chromium: Any, live: Live) -> None:
    with browser.watched_page(chromium, live.url, ignore_https_errors=True) as page:
        page.goto(live.url)
        assert page.url == f"{live.url}/"
        ready(page)
        set_knobs(page, max_tokens=8)
        page.get_by_label("Message").fill("Tell me a story.")
        page.keyboard.press("Enter")
        assert "seed" in ended(page, 1).inner_text()
        page.get_by_role("link", name="Blocks").first.click()
        page.wait_for_url(f"{live.url}/inspect#blocks")
        page.get_by_role("link", name="Chat").first.click()
        page.wait_for_url(f"{live.url}/")
        ready(page)
        assert page.locator("[role=alert]").count() == 0
