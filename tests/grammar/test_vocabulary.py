"""What a mask allows is what the detokeniser says, for every kind of tokenizer that there is."""

from __future__ import annotations

import random
from pathlib import Path

import llguidance
import pytest
from tests.grammar.rig import campaign

from headrace.grammar.vocabulary import Vocabulary, make_tokenizer
from headrace.text.tokenizer import Tokenizer

FILES = {
    "gpt2": "tokenizers/gpt2",
    "llama2 (sentencepiece, byte fallback)": "tokenizers/llama2",
    "mistral v1": "tokenizers/mistral/tokenizer.model.v1",
    "phi-3 gguf": "tokenizers/llama.cpp/ggml-vocab-phi-3.gguf",
    "falcon gguf": "tokenizers/llama.cpp/ggml-vocab-falcon.gguf",
}
REGEX = '\\{"(naïve café|日本)": "[a-zé日 ]{3,9}"\\}'


def made(tokenizer: Tokenizer, width: int) -> tuple[Vocabulary, llguidance.LLTokenizer]:
    ends = [tokenizer.eos_token_id or 0]
    vocabulary = Vocabulary.of(tokenizer.token_bytes, tokenizer.is_special, tokenizer.vocab_size, width, ends)
    return vocabulary, make_tokenizer(vocabulary, lambda text: tokenizer.encode(text, add_special_tokens=False))


def check_text(tokenizer: Tokenizer) -> None:
    import re

    width = tokenizer.vocab_size + 37
    vocabulary, ll = made(tokenizer, width)
    assert len(vocabulary.tokens) == ll.vocab_size == width
    prompt = tokenizer.encode("Once upon a time")
    for seed in range(5):
        dice = random.Random(seed)
        matcher = llguidance.LLMatcher(ll, llguidance.LLMatcher.grammar_from_regex(REGEX))
        answer: list[int] = []
        while not matcher.is_stopped():
            forced = matcher.compute_ff_tokens()
            mask = matcher.compute_bitmask()
            choices = [i for i in range(width) if mask[i // 8] >> (i % 8) & 1]
            assert choices, matcher.get_error()
            assert max(choices) < tokenizer.vocab_size
            answer.append(forced[0] if forced else dice.choice(choices))
            assert answer[-1] in choices
            assert matcher.consume_token(answer[-1])
        text = tokenizer.decode(prompt + answer).removeprefix(tokenizer.decode(prompt))
        assert re.fullmatch(REGEX, text), text


def test_text_is_what_the_regex_allows_built_in() -> None:
    check_text(campaign().tokenizer)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FILES)
def test_text_is_what_the_regex_allows(name: str, shared_data: Path) -> None:
    path = shared_data / FILES[name]
    if not path.exists():
        pytest.skip(f"no {path.name}")
    check_text(Tokenizer.load(path))


def test_forced_text_is_spelt_as_the_model_would(shared_data: Path) -> None:
    """A tokenizer that puts a space before a beginning must not do so in the middle of an answer."""
    tokenizer = Tokenizer.load(shared_data / FILES["llama2 (sentencepiece, byte fallback)"])
    vocabulary, ll = made(tokenizer, tokenizer.vocab_size)
    spelt = ll.tokenize_str("function name")
    assert [vocabulary.tokens[i] for i in spelt] == [b"function", b" name"]


def test_a_tokenizer_that_can_not_spell_falls_back_to_the_longest_token() -> None:
    tokenizer = campaign().tokenizer
    vocabulary, _ = made(tokenizer, tokenizer.vocab_size)
    ll = make_tokenizer(vocabulary, lambda text: [5])
    assert b"".join(vocabulary.tokens[i] for i in ll.tokenize_str("the name")) == b"the name"


def test_control_tokens_that_say_something_else_are_noticed() -> None:
    class Shifted:
        """A tokenizer whose tokens' bytes are those of their neighbours."""

        def __getattr__(self, name: str) -> object:
            return getattr(campaign().tokenizer, name)

        def token_bytes(self, token_id: int) -> bytes:
            return campaign().tokenizer.token_bytes(token_id ^ 1)

    with pytest.raises(AssertionError):
        check_text(Shifted())  # type: ignore[arg-type]
