"""The small tokenizer of `tests.support.server`."""

from tests.support.server import tokenizer  # noqa: F401
