"""What the tests of text share: data that may lie beside the repository, tokenizers from it, and made ones."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Plain

from headrace.text import tokenizer_bytes, tokenizer_files
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_bytes import TokenizerFile

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def data(path: str) -> Path:
    """A file or directory of the shared data; the test is skipped where it is absent."""
    if not (DATA / path).exists():
        pytest.skip(f"{path} is not here")
    return DATA / path


@functools.cache
def loaded(path: str) -> Tokenizer:
    return Tokenizer.load(data(path))


@functools.cache
def vectors(name: str) -> list[tuple[str, list[int]]]:
    """llama.cpp's test vectors for a vocabulary: texts and their token ids, without a begin of text."""
    path = data(f"tokenizers/llama.cpp/ggml-vocab-{name}.gguf.inp")
    texts = path.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".out").read_text().split("\n")
    return list(zip(texts, [[int(word) for word in line.split()] for line in lines[: len(texts)]], strict=True))


SPECIALS = ["<|begin|>", "<|end|>", "<|user|>"]


def _finish(plain: Plain) -> Tokenizer:
    plain.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    plain.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return Tokenizer.of(TokenizerFile(plain), {"bos_token": SPECIALS[0], "eos_token": SPECIALS[1]}, {})


@functools.cache
def made_byte_level() -> Tokenizer:
    """Byte-level BPE in the way of GPT-2: 256 bytes, some merges across bytes of one character, special tokens."""
    letters = tokenizer_bytes.byte_letters()
    merges: list[tuple[str, str]] = []
    for word in ("the", " the", " a", "é", "漢字", "🚀", "stop", "\n\n"):
        spelled = [letters[byte] for byte in word.encode()]
        for i in range(1, len(spelled)):
            merges.append(("".join(spelled[:i]), spelled[i]))
    vocab = {letter: i for i, letter in enumerate(letters)}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    return _finish(tokenizer_bytes.byte_level(vocab, list(dict.fromkeys(merges)), "gpt2").tokenizer)


@functools.cache
def made_scored() -> Tokenizer:
    """SentencePiece-like BPE with byte fallback and a dummy prefix."""
    words = ["▁the", "▁a", "th", "he", "▁t", "é", "漢", "stop", "st", "op", "the", "▁", *"abcdehinopstu.,!", "▁▁"]
    pieces = [("<unk>", 0.0, 2), *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256))]
    pieces += [(word, -float(i), 1) for i, word in enumerate(words)]
    return _finish(tokenizer_files.scored(pieces, 0))


@functools.cache
def made_word_piece() -> Tokenizer:
    """WordPiece in the way of BERT, with its cleanup."""
    words = ["[UNK]", "the", "cat", "##s", "##ing", "do", "not", "n", "'", "s", ".", ",", "!", "?", "##.", "ve"]
    plain = Plain(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    plain.normalizer = normalizers.BertNormalizer()
    plain.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    plain.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return _finish(plain)


@functools.cache
def made_metaspace() -> Tokenizer:
    """A unigram model with a Metaspace decoder, and no byte fallback."""
    pieces = [("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("▁a", -1.5), ("b", -3.0), ("é", -3.0), ("stop", -3.0)]
    plain = Plain(models.Unigram(pieces, 0, False))
    plain.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    plain.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    return _finish(plain)


MADE = {
    "byte_level": made_byte_level,
    "scored": made_scored,
    "word_piece": made_word_piece,
    "metaspace": made_metaspace,
}
REAL = {
    "gpt2": "tokenizers/gpt2",
    "llama2": "tokenizers/llama2/tokenizer.model",
    "llama3.2": "tokenizers/llama3.2",
    "mistral-v3": "tokenizers/mistral/mistral_instruct_tokenizer_240323.model.v3",
    "TinyStories-656K": "models/TinyStories-656K",
    "stories260K": "models/stories260K/tok512.bin",
}


def tokenizer(name: str) -> Tokenizer:
    """One of `MADE` or `REAL`; the test is skipped where a real one is absent."""
    return MADE[name]() if name in MADE else loaded(REAL[name])
