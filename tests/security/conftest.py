"""Servers over the fake engine: one that is open, and one with keys of every class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.security.rig import write_keys
from tests.support.server import Live, inproc, write_tokenizer

from headrace.protocol.config import ServerConfig
from headrace.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="session")
def locked(tokenizer: Tokenizer, key_file: str) -> Iterator[Live]:
    with Live(
        inproc(max_model_len=512), tokenizer, ServerConfig(api_key_file=key_file, log_stats_interval=0)
    ) as result:
        yield result


@pytest.fixture(scope="session")
def live(tokenizer: Tokenizer) -> Iterator[Live]:
    with Live(inproc(max_model_len=512), tokenizer, ServerConfig(log_stats_interval=0, any_model_name=False)) as result:
        yield result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
