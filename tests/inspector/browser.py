"""Pages in Debian's chromium, and what the tests ask of every page. `conftest` makes the browser and the server."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
PACKAGES = ("playwright.sync_api", "axe_playwright_python")
SWITCHES = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
MAX_WAIT_MS = 60_000
"""Patience on a loaded machine: no test depends on the speed."""


def require(program: Path, packages: tuple[str, ...], must_be_there: bool) -> None:
    """Skip the test where something is not installed, or fail it if that `must_be_there`."""
    names = [] if program.exists() else [str(program)]
    for package in packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            names.append(package)
    if names and must_be_there:
        pytest.fail(f"not installed: {', '.join(names)}")
    if names:
        pytest.skip(f"not installed: {', '.join(names)}")


@contextlib.contextmanager
def watched_page(chromium: Any, url: str, **settings: Any) -> Iterator[Any]:
    """A page (playwright's `Page`) in a profile of its own. Raises `AssertionError` at the end if the page has thrown,
    or written errors to its console. A test that expects errors clears `page.errors`."""
    context = chromium.new_context(base_url=url, **({"viewport": DESKTOP} | settings))
    context.set_default_timeout(MAX_WAIT_MS)
    page = context.new_page()
    page.errors = []
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    try:
        yield page
        assert not page.errors, f"the page has errors: {page.errors}"
    finally:
        context.close()


def violations(page: Any) -> list[str]:
    """What axe-core finds on the page that is serious or critical, one line for each."""
    from axe_playwright_python.sync_playwright import Axe

    findings = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {node['html']}"
        for each in findings
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def is_wider_than_the_screen(page: Any) -> bool:
    """Whether the page scrolls sideways."""
    width: bool = page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    return width
