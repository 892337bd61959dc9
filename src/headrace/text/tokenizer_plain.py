"""Names the part of a tokenizer that keeps its text out of the server's own process.

`oddity` is a pure function of a tokenizer.json without its vocabulary. A plain tokenizer is byte-level BPE, or
SentencePiece's BPE with byte fallback, all parts of which are on the lists below: they make a text longer by a small
factor only, and take time in proportion to it. Knows no files and no processes; called by `tokenizer_sandbox` and
`bounded_tokenizer`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers

from headrace.text.tokenizer_bytes import SPLITS
from headrace.text.tokenizer_files import flat
from headrace.text.tokenizer_gguf import PRE_TOKENIZERS
from headrace.text.tokenizer_ranks import KIMI_SPLIT

MAX_GROWTH = 12
"""The most bytes that the steps together make of one byte: Llama 2's put "▁" before a text and for each space."""
MAX_STEPS = 8
MAX_LITERAL = 16
"""Bytes of a literal in a step."""
MAX_ADDED = 2**16
_LINE_ENDS = str.maketrans({"\r": r"\r", "\n": r"\n"})

_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _SUFFIX = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT4 = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+"
_OF_FILES = (
    # GPT-2, and the digits of StarCoder and Falcon.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"\d",
    r"\d{1,3}",
    "[0-9][0-9][0-9]",
    # GPT-4 (Phi-4, OLMo 2).
    _GPT4 + r"\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    _GPT4 + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    # GPT-4o (gpt-oss, Llama 4, Phi-4-mini).
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SUFFIX}?|{_BEFORE}{_UPPER}+{_LOWER}*{_SUFFIX}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL,
    # Qwen 3.5.
    rf"{_SUFFIX}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*" + _TAIL,
    # DeepSeek V3.
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    + _TAIL,
)
_QUADRATIC = frozenset((r"\s+$",))
"""Regexes of known tokenizers that try each place of a long run of spaces to its end."""
REGEXES = (
    frozenset(_OF_FILES)
    | {cut for cuts in PRE_TOKENIZERS.values() for cut in cuts}
    | {cut for cut in SPLITS.values() if cut is not None}
    | {KIMI_SPLIT}
) - _QUADRATIC
"""The regexes that split the text of well-known models in time in proportion to it, as measured on runs and repeats of
each class of letters. A line end in a file's regex may be written out or escaped."""


def spec_of(library: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return the tokenizer.json of a tokenizer without its vocabulary."""
    model = library.model
    names = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    parts = ("normalizer", "pre_tokenizer", "post_processor")
    flags = ("content", "single_word", "lstrip", "rstrip")
    return {
        **{name: _state(getattr(library, name)) for name in parts},
        "model": {"type": type(model).__name__, **{name: getattr(model, name, None) for name in names}},
        "added_tokens": [
            {flag: getattr(token, flag) for flag in flags} for token in library.get_added_tokens_decoder().values()
        ],
    }


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def oddity(spec: Mapping[str, Any], max_token_bytes: int | None) -> str | None:
    """Return the name of a part that is not on the lists, or None: the tokenizer is plain. `max_token_bytes`: see
    `Lexicon`; where it is known, the context bounds a text, too."""
    growth = 1
    for name, kinds in (("normalizer", NORMALIZERS), ("pre_tokenizer", SPLITTERS)):
        steps = flat(spec[name])
        if len(steps) > MAX_STEPS:
            return f"a {name} of {len(steps)} steps"
        for step in steps:
            measure = kinds.get(step["type"])
            factor = None if measure is None else measure(step)
            if factor is None:
                return f"a {name} of the type {step['type']}{_detail(step)}"
            growth *= factor
    if growth > MAX_GROWTH:
        return f"steps that may make a text {growth} times as long"
    model = spec["model"]
    if model["type"] != "BPE":
        return f"a model of the type {model['type']}"
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model[name]:
            return f"a model with {name}"
    if len(spec["added_tokens"]) > MAX_ADDED:
        return f"{len(spec['added_tokens'])} added tokens"
    for token in spec["added_tokens"]:
        for flag in ("single_word", "lstrip", "rstrip"):
            if token[flag]:
                return f"the added token {token['content']!r:.80} with {flag}"
    return _odd_ends(spec["post_processor"]) or (None if max_token_bytes else "tokens for texts of unknown length")


def _odd_ends(processor: Mapping[str, Any] | None) -> str | None:
    """Name a post-processor that is not one of the known, or adds more than some tokens."""
    steps = [] if processor is None else processor.get("processors", [processor])
    if len(steps) > MAX_STEPS:
        return f"a post_processor of {len(steps)} steps"
    for step in steps:
        kind = step["type"]
        if kind == "TemplateProcessing":
            texts = [piece for piece in step["single"] if "Sequence" in piece]
            num_ids = sum(len(token["ids"]) for token in step["special_tokens"].values())
            if len(texts) == 1 and len(step["single"]) <= MAX_STEPS and num_ids <= MAX_STEPS:
                continue
        elif kind in ("ByteLevel", "BertProcessing", "RobertaProcessing"):
            continue
        return f"a post_processor of the type {kind}"
    return None


def _detail(step: Mapping[str, Any]) -> str:
    pattern = step.get("pattern")
    return f" with the pattern {next(iter(pattern.values()))!r:.80}" if isinstance(pattern, dict) and pattern else ""


def replacing(step: Mapping[str, Any]) -> int | None:
    """Return the factor by which a step of the type Replace makes a text longer; None for one that is not plain."""
    pattern, content = step["pattern"].get("String", "").encode(), step["content"].encode()
    if not pattern or len(pattern) > MAX_LITERAL or len(content) > MAX_LITERAL:
        return None
    return max(1, math.ceil(len(content) / len(pattern)))


def _splitting(step: Mapping[str, Any]) -> int | None:
    [(kind, pattern)] = step["pattern"].items()
    if step["behavior"] == "Removed":
        return None
    is_known = 0 < len(pattern.encode()) <= MAX_LITERAL if kind == "String" else _spelled(pattern) in REGEXES
    return 1 if is_known else None


def _spelled(regex: str) -> str:
    return regex.translate(_LINE_ENDS)


# By type: the factor by which a step makes a text longer, or None.
NORMALIZERS: dict[str, Callable[[Mapping[str, Any]], int | None]] = {
    # Three bytes for one, at most.
    "NFC": lambda step: 3,
    # Before each text between added tokens.
    "Prepend": lambda step: 1 + size if (size := len(step["prepend"].encode())) <= MAX_LITERAL else None,
    "Replace": replacing,
}
SPLITTERS: dict[str, Callable[[Mapping[str, Any]], int | None]] = {
    # A letter of two bytes for a byte; a space before each piece.
    "ByteLevel": lambda step: 4 if step["add_prefix_space"] else 2,
    "Metaspace": lambda step: 1 + len(step["replacement"].encode()),
    "Digits": lambda step: 1,
    "Punctuation": lambda step: None if step["behavior"] == "Removed" else 1,
    "Split": _splitting,
}
