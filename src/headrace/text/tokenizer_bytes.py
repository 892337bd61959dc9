"""The record of a tokenizer's file, its side files, and byte-level BPE, which several kinds of files share.

Knows no kind of file; called by `tokenizer_files`, `tokenizer_ranks` and `tokenizer_gguf`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from headrace import hub

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"gpt2": None, "llama": _LLAMA3, "qwen2": _LLAMA3.replace("{1,3}", "")}
"""The rules by which byte-level BPE splits text before merging, by model_type. None is GPT-2's rule, which `tokenizers`
has."""


@dataclass
class TokenizerFile:
    """A tokenizer, and the begin and end of text that its file names (None: it names none).

    `is_whole`: the file, a tokenizer.json, has all tokens, and decides whether begin and end are added; the other files
    of its folder decide neither. `begins_chats`: a begin that is added to prompts is added to rendered chats too.
    """

    tokenizer: tokenizers.Tokenizer
    bos_token: str | None = None
    eos_token: str | None = None
    adds_bos: bool = False
    is_whole: bool = False
    begins_chats: bool = False
    chat_template: str | None = None


def model_type(directory: Path) -> str | None:
    value = side_file(directory / "config.json").get("model_type")
    return value if isinstance(value, str) else None


def side_file(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; empty where there is no file."""
    return hub.read_json(path) if path.is_file() else {}


def byte_level_bpe(
    vocab: dict[str, int], merges: list[tuple[str, str]], cuts: Sequence[str], composed: bool, whole_words: bool
) -> tokenizers.Tokenizer:
    """Return byte-level BPE (Radford et al. 2019). `cuts` split the text one after another; none: GPT-2's rule.

    `composed`: the text is brought into the form NFC. `whole_words`: a word in the vocabulary needs no merges.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words))
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters]) if splits else letters
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level(vocab: dict[str, int], merges: list[tuple[str, str]], rule: str, spaced: bool = False) -> TokenizerFile:
    """Return byte-level BPE with one of the rules `SPLITS`. `spaced`: a text begins as after a space."""
    pattern = SPLITS[rule]
    cuts = () if pattern is None else (pattern,)
    tokenizer = byte_level_bpe(vocab, merges, cuts, composed=rule == "qwen2", whole_words=bool(cuts))
    if spaced:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=not cuts)
    end = "<|endoftext|>" if "<|endoftext|>" in vocab else None
    if end:
        tokenizer.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    return TokenizerFile(tokenizer, bos_token=end, eos_token=end)


def rule_of_size(num_tokens: int) -> str:
    """Return the rule for files that stand alone. Vocabularies of more than 100,000 tokens are newer than GPT-2's
    rule."""
    return "llama" if num_tokens > 100_000 else "gpt2"


def byte_letters() -> list[str]:
    """Return the printable character for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
