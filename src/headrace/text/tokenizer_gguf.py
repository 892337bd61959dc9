"""Makes a tokenizer from a GGUF file's metadata: `tokenizer.ggml.*` and `tokenizer.chat_template*`.

Models "llama" (SentencePiece's scored BPE), "t5" (its unigrams), "gpt2" (byte-level BPE) and "bert" (WordPiece).
`tokenizer.ggml.pre` names the cuts of text before merging; they are applied one after another, each to the pieces of
the cut before. The tensors are not read. Knows no chats and no requests; called by `text.Tokenizer.load`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from headrace import gguf
from headrace.gguf import GGUF, MAX_TOKEN_BYTES, MAX_TOKENS
from headrace.text import tokenizer_files
from headrace.text.tokenizer_bytes import SPLITS, TokenizerFile, byte_level_bpe
from headrace.text.tokenizer_files import BYTE, NORMAL, USER_DEFINED

MAX_MERGES = 2**21
CHARSMAP, MAX_CHARSMAP = "tokenizer.ggml.precompiled_charsmap", 2**24

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
# DeepSeek's first tokenizer lists the letters that have a case, without some scripts and all newer letters.
_CASED_LETTER = (
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{560}-\x{588}\x{10C6}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2F}\x{A78F}-\x{AB6F}"
    r"\x{10570}-\x{10C7F}\x{10CF3}-\x{1189F}\x{118E0}-\x{1E8FF}]]"
)
_CJK = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"

# The cuts by the names that share them.
_CUTS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}"),
    "gpt-2 phi-2 mpt olmo jais roberta-bpe jina-es jina-de jina-v2-es jina-v2-de jina-v1-en": (_GPT2,),
    "starcoder refact command-r smollm codeshell exaone minerva-7b": (r"\p{N}", _GPT2),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}"),
    "llama3 llama-v3 llama-bpe falcon3 dbrx smaug-bpe": (str(SPLITS["llama"]),),
    "qwen2 stablelm2 deepseek-r1-qwen": (str(SPLITS["qwen2"]),),
    "tekken": (_CASED % ("", "") + r"|\p{N}" + _TAIL,),
    "gpt-4o": (_CASED % (_SUFFIX, _SUFFIX) + r"|\p{N}{1,3}" + _TAIL,),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?{_CASED_LETTER}+",
        r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
        r"\s+$",
        _CJK,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
}
PRE_TOKENIZERS = {name: cuts for names, cuts in _CUTS.items() for name in names.split()}
"""The regular expressions behind each name that `tokenizer.ggml.pre` may have."""
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3")


def habits(pre: str) -> tuple[bool, bool]:
    """Return whether text is composed (NFC) under a value of `tokenizer.ggml.pre`, and whether words need no merges."""
    return pre in ("qwen2", "deepseek-r1-qwen"), pre in (*_LLAMA3, "tekken")


WORD_PIECES = {"unk_token": ("[UNK]", 100), "cls_token": ("[CLS]", 101), "sep_token": ("[SEP]", 102)}
"""The tokens that a WordPiece vocabulary must have, with BERT's own ids."""
ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # the format's own spelling
    "cls_token": "cls",
    "mask_token": "mask",
}


def read(path: Path) -> tuple[TokenizerFile, dict[str, Any], dict[str, str]]:
    """Return the arguments of `Tokenizer`: the tokenizer, the contents of a tokenizer_config.json, the chat templates.

    Raises `CheckpointError` for a file that is broken, or whose tokenizer is missing or not supported; errors of
    `tokenizers` pass through.
    """
    return read_metadata(gguf.read(path))


def read_metadata(file: GGUF) -> tuple[TokenizerFile, dict[str, Any], dict[str, str]]:
    """Return the same as `read`, for an open file."""
    pieces = _pieces(file)
    roles = _roles(file, [text for text, _, _ in pieces])
    model = file.text("tokenizer.ggml.model")
    adds_bos: bool | None
    adds_eos: bool | None = None
    if model == "llama":
        tokenizer, adds_bos = _scored(file, pieces), True
    elif model == "t5":
        tokenizer, adds_bos = _scored(file, pieces, "t5"), False
        adds_eos = True
    elif model == "gpt2":
        tokenizer, adds_bos = _byte_level(file, pieces), file.text("tokenizer.ggml.pre") in _LLAMA3
    elif model == "bert":
        tokenizer, adds_bos = _word_piece(file, pieces, roles), None
    else:
        _refuse(file, "tokenizer.ggml.model", model, "llama, t5, gpt2 or bert")
    flags = {name: file.flag(f"tokenizer.ggml.{name}") for name in ("add_bos_token", "add_eos_token")}
    implied = {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
    config: dict[str, Any] = {name: flag for name, flag in implied.items() if flag is not None}
    config |= {name: flag for name, flag in flags.items() if flag is not None}
    # llama.cpp puts the begin before a chat whose template does not write it.
    return TokenizerFile(tokenizer, begins_chats=True), config | roles, _chat_templates(file)


def _refuse(file: GGUF, key: str, value: object, bound: str) -> NoReturn:
    raise file.fault(key, value, bound)


def _pieces(file: GGUF) -> list[tuple[str, float, int]]:
    """Return (text, score, kind) of every token."""
    key = "tokenizer.ggml.tokens"
    texts = file.texts(key, MAX_TOKENS, MAX_TOKEN_BYTES)
    if not texts:
        _refuse(file, key, texts, "there, with one token at least")
    scores = file.reals("tokenizer.ggml.scores", MAX_TOKENS)
    kinds = file.integers("tokenizer.ggml.token_type", MAX_TOKENS)
    for name, values in (("scores", scores), ("token_type", kinds)):
        if values is not None and len(values) != len(texts):
            _refuse(
                file, f"tokenizer.ggml.{name}", f"{len(values)} elements", f"of {len(texts)} elements, as the tokens"
            )
    seen: set[str] = set()
    for token_id, text in enumerate(texts):
        if text in seen:
            _refuse(file, f"{key}[{token_id}]", text, "a token that was not there before")
        seen.add(text)
    for token_id, kind in enumerate(kinds or ()):
        if not NORMAL <= kind <= BYTE:
            _refuse(file, f"tokenizer.ggml.token_type[{token_id}]", kind, f"from {NORMAL} to {BYTE}")
    no_scores, all_normal = [0.0] * len(texts), [NORMAL] * len(texts)
    return list(zip(texts, scores or no_scores, kinds or all_normal, strict=True))


def _roles(file: GGUF, texts: list[str]) -> dict[str, str]:
    ids = {role: file.integer(f"tokenizer.ggml.{name}_token_id", 0, len(texts) - 1) for role, name in ROLES.items()}
    return {role: texts[token_id] for role, token_id in ids.items() if token_id is not None}


def _scored(file: GGUF, pieces: list[tuple[str, float, int]], model: str = "llama") -> tokenizers.Tokenizer:
    if "tokenizer.ggml.scores" not in file.fields:
        _refuse(file, "tokenizer.ggml.scores", None, f"there for a model of kind {model}")
    unk_id = file.integer("tokenizer.ggml.unknown_token_id", 0, len(pieces) - 1)
    dummy_prefix = file.flag("tokenizer.ggml.add_space_prefix") is not False
    if model == "t5":
        trims = file.flag("tokenizer.ggml.remove_extra_whitespaces") is True
        charsmap = bytes(byte & 255 for byte in file.integers(CHARSMAP, MAX_CHARSMAP) or ())
        tokenizer = tokenizer_files.unigram(pieces, 2 if unk_id is None else unk_id, charsmap, dummy_prefix, trims)
    else:
        tokenizer = tokenizer_files.scored(pieces, unk_id or 0, dummy_prefix)
    if dummy_prefix:
        # Such a token is searched for in text whose spaces are "▁" already, so the prefix would precede it too.
        for token_id, (text, _, kind) in enumerate(pieces):
            if kind == USER_DEFINED and "▁" in text:
                key = f"tokenizer.ggml.tokens[{token_id}]"
                _refuse(file, key, text, "without a space, being user-defined in a vocabulary with a space prefix")
    tokenizer_files.add_pieces(tokenizer, pieces, marks_spaces=True)
    return tokenizer


def _byte_level(file: GGUF, pieces: list[tuple[str, float, int]]) -> tokenizers.Tokenizer:
    pre = file.text("tokenizer.ggml.pre") or "default"
    if pre not in PRE_TOKENIZERS:
        _refuse(file, "tokenizer.ggml.pre", pre, f"one of {', '.join(PRE_TOKENIZERS)}")
    merges = []
    for i, merge in enumerate(file.texts("tokenizer.ggml.merges", MAX_MERGES, 2 * MAX_TOKEN_BYTES) or ()):
        # The first character is never the space between the two: a part has one character at least.
        cut = merge.find(" ", 1)
        if cut < 0 or cut + 1 == len(merge):
            _refuse(file, f"tokenizer.ggml.merges[{i}]", merge, "two tokens with a space between")
        merges.append((merge[:cut], merge[cut + 1 :]))
    vocab = {text: token_id for token_id, (text, _, _) in enumerate(pieces)}
    composed, whole_words = habits(pre)
    tokenizer = byte_level_bpe(vocab, merges, PRE_TOKENIZERS[pre], composed, whole_words)
    tokenizer_files.add_pieces(tokenizer, pieces, marks_spaces=False)
    return tokenizer


def _word_piece(file: GGUF, pieces: list[tuple[str, float, int]], roles: dict[str, str]) -> tokenizers.Tokenizer:
    """Return BERT's WordPiece (Devlin et al. 2018), uncased.

    The file marks the pieces that begin a word, BERT the others.
    """
    # Files since 2025 have the first of them as the begin, or leave llama.cpp's usual ids out.
    roles = {"cls_token": roles["bos_token"]} | roles if "bos_token" in roles else dict(roles)
    for role, (text, token_id) in WORD_PIECES.items():
        if role not in roles and token_id < len(pieces) and pieces[token_id][0] == text:
            roles[role] = text
        if role not in roles:
            _refuse(file, f"tokenizer.ggml.{ROLES[role]}_token_id", None, "there for a model of kind bert")
    vocab: dict[str, int] = {}
    for token_id, (text, _, kind) in enumerate(pieces):
        if text.startswith("▁"):
            text = text[1:]
        elif kind == NORMAL and not (text.startswith("[") and text.endswith("]")):
            text = "##" + text
        vocab[text] = token_id
    if len(vocab) != len(pieces):
        _refuse(
            file, "tokenizer.ggml.tokens", f"{len(pieces)} tokens for {len(vocab)} words", "one token for each word"
        )
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token=roles["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer_files.add_pieces(tokenizer, pieces, marks_spaces=False)
    begin, end = roles["cls_token"], roles["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[begin, "$A", end], special_tokens=[(token, vocab[token]) for token in {begin, end}]
    )
    return tokenizer


def _chat_templates(file: GGUF) -> dict[str, str]:
    """Return the default template under "default", others by their names."""
    prefix = "tokenizer.chat_template"
    keys = {key: key.removeprefix(prefix + ".") for key in file.fields if key.startswith(prefix + ".")}
    keys |= {prefix: "default"} if prefix in file.fields else {}
    return {name: template for key, name in keys.items() if (template := file.text(key)) is not None}
