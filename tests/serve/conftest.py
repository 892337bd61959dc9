"""The fixtures of `tests.support.server`."""

from tests.support.server import live, say, tokenizer  # noqa: F401
