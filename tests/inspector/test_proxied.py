"""The chat in a browser that reaches the server through the proxies of `deploy/`, on ports of their own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.inspector import browser
from tests.inspector.test_chat import ended, ready, set_knobs
from tests.programs.rolling import Proxy
from tests.support.serving import Served


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
def test_a_chat_behind_a_proxy(chromium: Any, server: Served, name: str, tmp_path: Path) -> None:
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    port = urlsplit(server.url).port or 0
    proxy = Proxy(name, tmp_path, [port, port])
    try:
        with browser.watched_page(chromium, f"http://localhost:{proxy.port}") as page:
            page.goto("/")
            ready(page)
            set_knobs(page, max_tokens=8)
            page.get_by_label("Message").fill("Tell me a story.")
            page.keyboard.press("Enter")
            assert "seed" in ended(page, 1).inner_text()
            assert page.locator("[role=alert]").count() == 0
    finally:
        proxy.process.terminate()
        proxy.process.wait(timeout=60)
