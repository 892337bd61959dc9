"""Reads files of ranks into byte-level BPE: tiktoken's lines, Kimi's tiktoken.model, Mistral's tekken.json.

A rank is a token's id and also its priority: of two neighbours whose bytes together are a token, those with the lowest
rank are merged first. Knows no chats and no requests; called by `tokenizer_files`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from headrace.protocol.errors import CheckpointError
from headrace.text import mistral_templates
from headrace.text.mistral_templates import Efforts
from headrace.text.tokenizer_bytes import (
    SPLITS,
    TokenizerFile,
    byte_letters,
    byte_level,
    byte_level_bpe,
    model_type,
    rule_of_size,
    side_file,
)

KIMI_CLASS = "TikTokenTokenizer"
NUM_RESERVED = 256
"""The special tokens behind the ranks of Kimi's tiktoken.model."""
_NO_HAN = r"&&[^\p{Han}]]"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}" + _NO_HAN, r"[\p{Ll}\p{Lm}\p{Lo}\p{M}" + _NO_HAN
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
TEKKEN_SPECIALS = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
"""The special tokens of a tekken.json up to version 7 that lists none."""
MAX_SPECIALS = 2**16


def read_tiktoken(path: Path) -> TokenizerFile:
    """Read lines of a base64 token and its rank."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, path.read_bytes().splitlines())}
    if path.name == "tiktoken.model":
        return _kimi(path, ranks)
    kind = model_type(path.parent)
    rule = kind if kind in SPLITS else rule_of_size(len(ranks))
    letters = byte_letters()
    vocab = {_spell(token, letters): rank for token, rank in ranks.items()}
    return byte_level(vocab, _merges(sorted(vocab, key=vocab.__getitem__)), rule)


def _kimi(path: Path, ranks: dict[bytes, int]) -> TokenizerFile:
    """Add the special tokens behind the ranks, which tokenizer_config.json names."""
    side = path.parent / "tokenizer_config.json"
    config = side_file(side)
    kind = config.get("tokenizer_class", KIMI_CLASS)
    if kind != KIMI_CLASS:
        raise CheckpointError(
            f"{side}: tokenizer_class is {kind!r:.80}; of a tiktoken.model the splitting is known for {KIMI_CLASS}"
        )
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{path.name}: the ranks are not the numbers from 0 to {len(ranks) - 1}")
    listed = config.get("added_tokens_decoder") or {}
    entries = {int(key): value for key, value in listed.items()}
    specials = [
        entries.get(token_id, {"content": f"<|reserved_token_{token_id}|>", "special": True})
        for token_id in range(len(ranks), len(ranks) + NUM_RESERVED)
    ]
    tokens = sorted(ranks, key=ranks.__getitem__)
    tokenizer = _bpe(tokens, [], [entry["content"] for entry in specials], KIMI_SPLIT)
    for entry in specials:
        is_special = entry.get("special", False)
        flags = {key: entry.get(key, False) for key in ("single_word", "lstrip", "rstrip", "normalized")}
        token = AddedToken(entry["content"], special=is_special, **flags)
        tokenizer.add_special_tokens([token]) if is_special else tokenizer.add_tokens([token])
    return TokenizerFile(tokenizer)


def read_tekken(path: Path) -> TokenizerFile:
    """Read a tekken.json: special tokens have the first ids, the ranks follow them."""
    data = json.loads(path.read_text(encoding="utf-8"))
    config = data["config"]
    num_specials, size = config["default_num_special_tokens"], config["default_vocab_size"]
    tokens = data["vocab"]
    if not 0 < num_specials <= min(size, MAX_SPECIALS) or size - num_specials > len(tokens):
        raise CheckpointError(
            f"{path.name}: default_num_special_tokens is {num_specials!r:.80} and default_vocab_size {size!r:.80}, for "
            f"{len(tokens)} tokens"
        )
    tokens = tokens[: size - num_specials]
    for rank, entry in enumerate(tokens):
        if entry["rank"] != rank:
            raise CheckpointError(f"{path.name}: vocab[{rank}] has the rank {entry['rank']!r:.80}")
    version = mistral_templates.checked_version(config.get("version"), path)
    listed = data.get("special_tokens")
    if listed is None and version > 7:
        raise CheckpointError(f"{path.name}: special_tokens is missing, in a file of version {version}")
    known = TEKKEN_SPECIALS if listed is None else _texts(path, listed)
    specials = known + [f"<SPECIAL_{token_id}>" for token_id in range(len(known), num_specials)]
    if len(specials) > num_specials:
        raise CheckpointError(f"{path.name}: {len(specials)} special tokens, for {num_specials} ids")
    tokenizer = _bpe([base64.b64decode(entry["token_bytes"]) for entry in tokens], specials, [], config["pattern"])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    effort = (data.get("model_settings_builder") or {}).get("reasoning_effort")
    efforts = None if effort is None else Efforts(effort["values"], effort["default"])
    template = mistral_templates.source(version, "[THINK]" in known, efforts)
    return TokenizerFile(tokenizer, "<s>", "</s>", adds_bos=True, chat_template=template)


def _texts(path: Path, listed: Sequence[Any]) -> list[str]:
    for rank, entry in enumerate(listed):
        if entry["rank"] != rank:
            raise CheckpointError(f"{path.name}: special_tokens[{rank}] has the rank {entry['rank']!r:.80}")
    return [entry["token_str"] for entry in listed]


def _bpe(tokens: Sequence[bytes], before: Sequence[str], behind: Sequence[str], split: str) -> tokenizers.Tokenizer:
    """Return byte-level BPE of `tokens` by their rank, with special tokens before and behind them."""
    letters = byte_letters()
    spelled = [_spell(token, letters) for token in tokens]
    texts = [*before, *spelled, *behind]
    vocab = {text: token_id for token_id, text in enumerate(texts)}
    if len(vocab) != len(texts):
        twice = next(text for token_id, text in enumerate(texts) if vocab[text] != token_id)
        raise CheckpointError(f"two tokens are spelled {twice!r:.80}")
    return byte_level_bpe(vocab, _merges(spelled), (split,), composed=False, whole_words=True)


def _spell(token: bytes, letters: Sequence[str]) -> str:
    return "".join([letters[byte] for byte in token])


def _merges(spelled: Iterable[str]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, by its rank: tiktoken merges any of them."""
    listed = list(spelled)
    known = set(listed)
    return [
        (token[:cut], token[cut:])
        for token in listed
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
