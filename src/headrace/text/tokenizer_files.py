"""Reads the files of tokenizers, each into a `tokenizers.Tokenizer`.

Supported: tokenizer.json; SentencePiece models (BPE and unigram); GPT-2's vocab.json + merges.txt under either pair of
names; files of ranks (see `tokenizer_ranks`); llama2.c's tokenizer.bin. Where a format lacks the rule by which text is
split before merging, config.json's model_type or the vocabulary's size decides. Knows no chats, streams or requests;
called by `Tokenizer.load`. Raises `CheckpointError` for a file that is not supported.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from headrace.protocol.errors import CheckpointError
from headrace.text import mistral_templates
from headrace.text.tokenizer_bytes import (
    TokenizerFile,
    byte_letters,
    byte_level,
    model_type,
    rule_of_size,
    side_file,
)
from headrace.text.tokenizer_ranks import read_tekken, read_tiktoken

MAX_BYTES = 64 * 2**20
"""Largest tokenizer file that is read."""

CLASSES = {"GPT2Tokenizer": "gpt2", "Qwen2Tokenizer": "qwen2"}
"""Classes of transformers that read vocab.json and merges.txt, with their rule of splitting."""

Read = TypeVar("Read")


def present(path: Path) -> bool:
    """Return whether `path` is a file, or a directory with a tokenizer in it."""
    return path.is_file() or _in_folder(path) is not None


def _in_folder(directory: Path) -> Path | None:
    """Return the tokenizer's file in a directory. Of several versions of a SentencePiece model the last one counts."""
    for name in _READERS:
        files = sorted((path for path in directory.glob(name) if path.is_file()), key=lambda path: _version(path) or 0)
        if files:
            return files[-1]
    return None


def read(path: Path) -> TokenizerFile:
    """Read the tokenizer in `path`, a model's directory or a file."""
    if path.is_dir():
        inner = _in_folder(path)
        if inner is None:
            raise CheckpointError(f"{path} has no tokenizer (looked for {', '.join(_READERS)})")
        path = inner
    if not path.is_file():
        raise CheckpointError(f"no tokenizer at {path}")
    reader = _READERS.get(path.name) or (_read_dot_model if ".model" in path.name else _BY_SUFFIX.get(path.suffix))
    if reader is None:
        raise CheckpointError(f"{path.name} is not a kind of tokenizer file that is known")
    if path.stat().st_size > MAX_BYTES:
        raise CheckpointError(f"{path.name} has {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
    return guarded(reader, path)


def guarded(reader: Callable[[Path], Read], path: Path) -> Read:
    """Return `reader(path)`; any error becomes a `CheckpointError`."""
    try:
        return reader(path)
    except (CheckpointError, KeyboardInterrupt):
        raise
    except BaseException as error:
        # `tokenizers` raises bare Exceptions, and where its Rust code panics a BaseException of a private type.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{path.name} can not be read as a tokenizer: {error}") from error


def _read_json(path: Path) -> TokenizerFile:
    tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TokenizerFile(tokenizer, is_whole=True)


# Byte-level BPE


def _read_vocab_and_merges(path: Path) -> TokenizerFile:
    name = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}[path.name]
    if not path.with_name(name).is_file():
        raise CheckpointError(f"{path.name} needs {name} beside it")
    vocab = json.loads(path.read_text(encoding="utf-8"))
    lines = path.with_name(name).read_text(encoding="utf-8").split("\n")
    merges = [
        (left, right)
        for number, (left, _, right) in enumerate(line.partition(" ") for line in lines)
        if right and not (number == 0 and left == "#version:")
    ]
    config = side_file(path.parent / "tokenizer_config.json")
    return byte_level(vocab, merges, _rule(path.parent, config, len(vocab)), config.get("add_prefix_space") is True)


def _rule(directory: Path, config: Mapping[str, Any], num_tokens: int) -> str:
    """Return the rule of splitting of a vocab.json, by the tokenizer's class, or else by the model's type."""
    kind = config.get("tokenizer_class")
    if isinstance(kind, str):
        rule = CLASSES.get(kind.removesuffix("Fast"))
        if rule is None:
            known = ", ".join(CLASSES)
            raise CheckpointError(
                f"{directory / 'tokenizer_config.json'}: tokenizer_class is {kind!r:.80}; of vocab.json and merges.txt "
                f"the splitting is known for {known}; other classes need a tokenizer.json"
            )
        return rule
    kind = model_type(directory)
    if kind is None:
        return rule_of_size(num_tokens)
    if kind in ("gpt2", "starcoder2"):
        return "gpt2"
    if re.match(r"qwen[23]", kind):
        return "qwen2"
    raise CheckpointError(
        f"{directory} has vocab.json and merges.txt, whose splitting is not known for the type {kind!r:.80}: a "
        "tokenizer.json, or a tokenizer_class in tokenizer_config.json, is missing"
    )


def max_token_bytes(tokenizer: tokenizers.Tokenizer, vocab: Mapping[str, int]) -> int | None:
    """Return the bytes of a text that one of its tokens can stand for; None for tokenizers that drop parts of a text,
    or that may have one token for an unknown stretch of any length."""
    steps = [
        None if part is None else json.loads(part.__getstate__())
        for part in (tokenizer.normalizer, tokenizer.pre_tokenizer)
    ]
    changes, splits = (flat(step) for step in steps)
    is_byte_level = any(step["type"] == "ByteLevel" for step in splits) and type(tokenizer.model) is models.BPE
    falls_back = getattr(tokenizer.model, "byte_fallback", False)
    all_bytes = byte_letters() if is_byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    if not (is_byte_level or falls_back) or any(token not in vocab for token in all_bytes):
        return None
    shrinks = 1
    for step in changes:
        if step["type"] == "NFC":
            # Three letters of Hangul become one, four of Greek.
            shrinks = 4
        elif step["type"] != "Prepend" and not _keeps_length(step):
            return None
    if any(step["type"] not in _LOSSLESS or step.get("behavior") == "Removed" for step in splits):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    # A letter of the vocabulary stands for one byte (byte-level), or for its bytes in UTF-8.
    longest = max(map(len, vocab) if is_byte_level else (len(token.encode()) for token in vocab), default=1)
    return shrinks * max([longest, *(len(token.content.encode()) for token in added)])


_LOSSLESS = frozenset(("ByteLevel", "Split", "Metaspace", "Digits", "Punctuation"))
"""Kinds of pre-tokenizers that keep every byte, if their behaviour is not to remove some."""


def flat(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return a normalizer's or pre-tokenizer's steps without their sequences."""
    if step is None:
        return []
    inner = step.get("normalizers", step.get("pretokenizers"))
    return [step] if inner is None else [each for part in inner for each in flat(part)]


def _keeps_length(step: dict[str, Any]) -> bool:
    """Return whether a normalizer replaces a text by one that has at least as many bytes."""
    if step["type"] != "Replace" or "String" not in step["pattern"]:
        return False
    return len(step["content"].encode()) >= len(step["pattern"]["String"].encode())


# SentencePiece

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPECIAL = (UNKNOWN, CONTROL)


def scored(pieces: list[tuple[str, float, int]], unk_id: int, dummy_prefix: bool = True) -> tokenizers.Tokenizer:
    """Return BPE whose merges are ordered by their results' scores (Kudo and Richardson 2018), with byte fallback.

    `pieces` are (text, score, kind). The dummy prefix, a space, goes before every text between special tokens: as in
    training with SentencePiece, which encodes those texts one by one.
    """
    vocab = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise CheckpointError("the vocabulary has a piece twice")
    usable = {piece: score for piece, score, kind in pieces if kind == NORMAL}
    merges = [
        (-score, vocab[piece[:cut]], vocab[piece[cut:]], piece[:cut], piece[cut:])
        for piece, score in usable.items()
        for cut in range(1, len(piece))
        if piece[:cut] in usable and piece[cut:] in usable
    ]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for _, _, _, left, right in sorted(merges)],
            unk_token=pieces[unk_id][0],
            fuse_unk=True,
            byte_fallback=any(kind == BYTE for _, _, kind in pieces),
        )
    )
    _add_metaspace(tokenizer, dummy_prefix)
    return tokenizer


def unigram(
    pieces: list[tuple[str, float, int]], unk_id: int, charsmap: bytes, dummy_prefix: bool, trims: bool
) -> tokenizers.Tokenizer:
    """Return SentencePiece's unigrams (Kudo 2018): of all cuts of a text the one with the greatest sum of scores.
    charsmap: the replacements of characters, compiled. trims: spaces at the ends of a text, and beside others, are left
    out. Else as `scored`."""
    tokenizer = _unigram(pieces, unk_id)
    _add_metaspace(tokenizer, dummy_prefix, _replacements(charsmap, trims))
    return tokenizer


def _unigram(pieces: list[tuple[str, float, int]], unk_id: int) -> tokenizers.Tokenizer:
    byte_fallback = any(kind == BYTE for _, _, kind in pieces)
    return tokenizers.Tokenizer(models.Unigram([(p, s) for p, s, _ in pieces], unk_id, byte_fallback))


def _replacements(charsmap: bytes, trims: bool) -> list[Any]:
    """Return the steps before spaces are written as pieces have them."""
    before: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if trims:
        before += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    return before


def _add_metaspace(
    tokenizer: tokenizers.Tokenizer, dummy_prefix: bool, before: Iterable[Any] = (), first_alone: bool = False
) -> None:
    """Write spaces as "▁". `first_alone`: the dummy prefix goes before the whole text alone, and not before each text
    between special tokens."""
    if dummy_prefix and first_alone:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    prefix = [normalizers.Prepend(" ")] if dummy_prefix and not first_alone else []
    tokenizer.normalizer = normalizers.Sequence([*before, *prefix, normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if dummy_prefix else steps)


def add_pieces(tokenizer: tokenizers.Tokenizer, pieces: list[tuple[str, float, int]], marks_spaces: bool) -> None:
    """Make control pieces special tokens, and user-defined ones tokens that are found in text before anything else.

    `marks_spaces`: pieces with a "▁" (runs of spaces, as in Gemma) are found after spaces have become "▁".
    """
    special = [AddedToken(text, special=True, normalized=False) for text, _, kind in pieces if kind in SPECIAL]
    tokenizer.add_special_tokens(special)
    plain = [text for text, _, kind in pieces if kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(text, normalized=marks_spaces and "▁" in text) for text in plain])


def _read_dot_model(path: Path) -> TokenizerFile:
    """Read a .model file: SentencePiece's protobuf, or, in Llama 3's own release, tiktoken's lines."""
    data = path.read_bytes()
    if data[:1] != b"\n":
        return read_tiktoken(path)
    trainer: dict[int, list[Any]] = {}
    normalizer: dict[int, list[Any]] = {}
    pieces: list[tuple[str, float, int]] = []
    for number, value in _fields(data):
        if number == 1:
            piece = _message(value)
            score = struct.unpack("<f", piece[2][0])[0] if 2 in piece else 0.0
            pieces.append((piece[1][0].decode("utf-8"), score, piece.get(3, [NORMAL])[0]))
        elif number == 2:
            trainer = _message(value)
        elif number == 3:
            normalizer = _message(value)
    unk_id, bos_id, eos_id = (_id(trainer.get(number, [i])[0]) for i, number in enumerate((40, 41, 42)))
    config = side_file(path.parent / "tokenizer_config.json")
    dummy_prefix = bool(normalizer.get(3, [1])[0]) and config.get("add_prefix_space") is not False
    # The slow classes of transformers encoded the texts between special tokens one by one; `legacy` keeps that.
    first_alone = "tokenizer_class" in config and not config.get("legacy")
    kind = trainer.get(3, [1])[0]
    if kind == 2:
        tokenizer = scored(pieces, unk_id, dummy_prefix)
    elif kind == 1:
        tokenizer = _unigram(pieces, unk_id)
    else:
        raise CheckpointError(f"SentencePiece models of type {kind} are not supported; BPE and unigram are")
    before = _replacements(normalizer.get(2, [b""])[0], bool(normalizer.get(4, [1])[0]))
    spaced = [piece for piece, _, kind in pieces if kind == USER_DEFINED and "▁" in piece]
    if spaced and dummy_prefix:
        raise CheckpointError(f"the user-defined piece {spaced[0]!r} beside a dummy prefix is not supported")
    _add_metaspace(tokenizer, dummy_prefix, before, first_alone)
    add_pieces(tokenizer, pieces, marks_spaces=True)

    def name(token_id: int) -> str | None:
        return pieces[token_id][0] if 0 <= token_id < len(pieces) else None

    version = _version(path)
    template = None if version is None or first_alone else mistral_templates.source(version)
    return TokenizerFile(tokenizer, name(bos_id), name(eos_id), adds_bos=bos_id >= 0, chat_template=template)


def _version(path: Path) -> int | None:
    """Return the version that the name of a SentencePiece model of Mistral's ends with."""
    match = re.search(r"\.model\.(v\d+)(m\d+)?$", path.name)
    return None if match is None else mistral_templates.checked_version(match[1], path)


def _id(value: int) -> int:
    # Protobuf writes a negative int32 as a 64-bit two's complement.
    return value - 2**64 if value >= 2**63 else value


def _message(data: bytes) -> dict[int, list[Any]]:
    fields: dict[int, list[Any]] = {}
    for number, value in _fields(data):
        fields.setdefault(number, []).append(value)
    return fields


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) of one protobuf message: ints for varints, bytes for all else."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 70, 7):
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise CheckpointError("a varint of the protobuf is too long")

    while at < len(data):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
            continue
        if wire not in (1, 2, 5):
            raise CheckpointError(f"wire type {wire} in the protobuf")
        size = {1: 8, 5: 4}.get(wire) or varint()
        if at + size > len(data):
            raise CheckpointError("the protobuf ends inside a field")
        yield key >> 3, data[at : at + size]
        at += size


def _read_llama2c(path: Path) -> TokenizerFile:
    """Read llama2.c's tokenizer.bin: int32 longest, then (float32 score, int32 length, bytes) for every id.

    Ids 0, 1, 2 are unknown, begin and end; 3 to 258 the bytes; spaces in pieces are literal.
    """
    data = path.read_bytes()
    at = 4
    pieces: list[tuple[str, float, int]] = []
    while at < len(data):
        score, size = struct.unpack_from("<fi", data, at)
        at += 8
        if size < 0 or at + size > len(data):
            raise CheckpointError(f"piece {len(pieces)} reaches beyond the end of {path.name}")
        text = data[at : at + size].decode("utf-8")
        at += size
        i = len(pieces)
        kind = UNKNOWN if i == 0 else CONTROL if i < 3 else BYTE if i < 259 else NORMAL
        pieces.append((("<unk>", "<s>", "</s>")[i] if i < 3 else text.replace(" ", "▁"), score, kind))
    if len(pieces) < 259:
        raise CheckpointError(f"{path.name} holds {len(pieces)} pieces; llama2.c's tokenizers have 259 at least")
    tokenizer = scored(pieces, 0)
    add_pieces(tokenizer, pieces, marks_spaces=True)
    return TokenizerFile(tokenizer, "<s>", "</s>", adds_bos=True)


_READERS: dict[str, Callable[[Path], TokenizerFile]] = {
    "tokenizer.json": _read_json,
    "tekken.json": read_tekken,
    "*.model.v[0-9]*": _read_dot_model,
    "tokenizer.model": _read_dot_model,
    "tiktoken.model": _read_dot_model,
    "vocab.json": _read_vocab_and_merges,
    "encoder.json": _read_vocab_and_merges,
    "tokenizer.bin": _read_llama2c,
}
_BY_SUFFIX = {".json": _read_json, ".bin": _read_llama2c, ".tiktoken": read_tiktoken}
