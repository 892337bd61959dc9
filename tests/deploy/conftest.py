"""The tokenizer of the servers behind proxies."""

from tests.support.server import tokenizer  # noqa: F401
