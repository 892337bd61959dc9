"""Whether the token ids of a draft model stand for the same tokens as the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Plain
from tokenizers import models

from headrace.protocol.errors import CheckpointError
from headrace.text import same_tokens

WORDS = [f"w{number}" for number in range(1000)]


def folder(path: Path, words: list[str]) -> Path:
    path.mkdir()
    vocab = {word: token_id for token_id, word in enumerate(words)}
    Plain(models.WordLevel(vocab, words[0])).save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize(
    "others",
    [
        WORDS,
        WORDS[:300],
        [*WORDS, *(f"more{number}" for number in range(500))],
        [*WORDS[:990], *(f"reserved{number}" for number in range(10))],
    ],
)
def test_tokenizers_that_differ_in_their_padding(others: list[str], tmp_path: Path) -> None:
    assert same_tokens.check(folder(tmp_path / "own", WORDS), folder(tmp_path / "other", others))


@pytest.mark.parametrize("others", [WORDS[::-1], [*WORDS[:989], *(f"reserved{number}" for number in range(11))]])
def test_another_tokenizer_is_refused(others: list[str], tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"other has another tokenizer than .*own: \d+ of 1000 token ids stand for"
    ):
        same_tokens.check(folder(tmp_path / "own", WORDS), folder(tmp_path / "other", others))


def test_models_without_a_tokenizer_are_not_compared(tmp_path: Path) -> None:
    directory = folder(tmp_path / "own", WORDS)
    assert not same_tokens.check(directory, tmp_path)
    assert not same_tokens.check(tmp_path, directory)
