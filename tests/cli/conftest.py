"""Fixtures of the command line's tests."""

from __future__ import annotations

from tests.support.server import tokenizer  # noqa: F401
