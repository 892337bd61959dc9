"""A browser, a server with the built-in model, and pages whose errors fail the test that opened them.

The tests are skipped where playwright, axe or Debian's chromium is absent. `.ci/run` installs them and sets
`HEADRACE_BROWSER_TESTS`, with which their absence is an error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.inspector import browser
from tests.support.server import tokenizer  # noqa: F401
from tests.support.serving import Served, serve


@pytest.fixture(scope="session")
def installed() -> None:
    """Skips the tests where there is no browser."""
    browser.require(browser.CHROMIUM, browser.PACKAGES, bool(os.environ.get("HEADRACE_BROWSER_TESTS")))


@pytest.fixture(scope="module")
def chromium(installed: None) -> Iterator[Any]:
    """The browser (playwright's `Browser`). It ends with its file of tests: playwright runs an event loop in this
    thread, and tests of other files begin their own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser.CHROMIUM, args=browser.SWITCHES)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def server(installed: None) -> Iterator[Served]:
    """`headrace serve builtin` with few blocks. Where there is no browser, nothing is started."""
    with serve("builtin", "--num-gpu-blocks-override", "2048", "--max-model-len", "2048") as served:
        yield served


@pytest.fixture
def open_page(chromium: Any, server: Served) -> Iterator[Callable[..., Any]]:
    """Opens an address of the server in a page of its own: `open_page("/inspect#blocks", viewport=PHONE)`. Further
    arguments are those of playwright's `new_context`."""
    with contextlib.ExitStack() as stack:

        def opened(path: str = "/", **settings: Any) -> Any:
            page = stack.enter_context(browser.watched_page(chromium, server.url, **settings))
            page.goto(path)
            return page

        yield opened
