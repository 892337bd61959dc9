"""A text that can not fit is refused by its bytes, before it is tokenised (S-10)."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tests.support import fake
from tokenizers import models, normalizers, pre_tokenizers

from headrace import hub
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import ContextLengthError
from headrace.text.inputs import prompt_ids
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_bytes import byte_letters
from headrace.text.tokenizer_files import max_token_bytes

TOKENIZER = Tokenizer.load(hub.resolve("builtin"))
INFO = fake.build(EngineConfig(model="fake", max_model_len=64)).info
MOST = 63 * (TOKENIZER.max_token_bytes or 0)


def test_S_10_a_text_that_can_not_fit_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(Tokenizer, "encode", fail)
    with pytest.raises(ContextLengthError, match=f"at most 63 tokens long, which is at most {MOST} bytes"):
        prompt_ids("x" * (MOST + 1), TOKENIZER, INFO)
    # The control: one that may fit is tokenised, and one that is cut.
    for text, cut in (("x" * MOST, None), ("x" * (MOST + 1), 5)):
        with pytest.raises(AssertionError, match="tokenised"):
            prompt_ids(text, TOKENIZER, INFO, truncate_prompt_tokens=cut)


@given(st.text(max_size=200))
def test_S_10_no_token_stands_for_more_bytes(text: str) -> None:
    assert len(TOKENIZER.encode(text, False)) * (TOKENIZER.max_token_bytes or 0) >= len(text.encode())


def made(model: Any, normalizer: Any = None, splitter: Any = None) -> int | None:
    tokenizer = tokenizers.Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter or pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return max_token_bytes(tokenizer, tokenizer.get_vocab())


def test_S_10_tokenizers_that_drop_text_have_no_bound() -> None:
    letters = {letter: index for index, letter in enumerate(byte_letters())}
    assert made(models.BPE(letters | {"abcde": 256}, [])) == 5
    assert made(models.BPE(letters, []), normalizers.NFC()) == 4
    assert made(models.BPE(letters, []), normalizers.Strip()) is None
    assert made(models.BPE(letters, []), normalizers.Replace("  ", " ")) is None
    assert made(models.BPE({"a": 0}, [])) is None
    assert made(models.WordLevel(letters | {"<unk>": 256}, "<unk>")) is None
    removing = pre_tokenizers.Split(" ", "removed")
    splitter = pre_tokenizers.Sequence([removing, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    assert made(models.BPE(letters, []), splitter=splitter) is None
