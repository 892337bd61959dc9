"""Legal tokenizer folders that are hard to read alike: token ids, texts and streams, against transformers.

Three deviations are on purpose, and have tests of their own below.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace.protocol.params import SamplingParams
from headrace.text.tokenizer import DetokenizeStream, Tokenizer
from headrace.text.tokenizer_bytes import byte_letters

TEXTS = """the cat<|im_end|> sat|<|im_end|>|  <tool>  x|a<tool>b|the <tool> the|Ab ab aB| pre post |é<0x41>|▁▁ x
dog [MASK] world|x <x> y<x>|tool<|im_end|><|im_end|>||a  b   c|the<tool>|<TOOL> <|IM_END|>|théthe thing|don't .
cats dog , cat !|x<new>y""".split("|")
TEXTS.append("\n\nthing the\n")


def bpe(vocab: dict[str, int], pairs: str, **more: Any) -> dict[str, Any]:
    merges = [pair.split("+") for pair in pairs.split()]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "dropout": None, "continuing_subword_prefix": None}
    return model | {"end_of_word_suffix": None, "fuse_unk": True, "ignore_merges": False} | more


def byte_level() -> dict[str, Any]:
    vocab = {letter: token_id for token_id, letter in enumerate(byte_letters())}
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = bpe(vocab, "t+h th+e Ġ+a Ġ+the Ã+© i+n in+g c+a ca+t", unk_token=None, byte_fallback=False)
    return {"model": model, "normalizer": None, "pre_tokenizer": step, "decoder": step}


def sentencepiece() -> dict[str, Any]:
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz.,!é"]
    vocab = {text: token_id for token_id, text in enumerate(texts)}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]  # fmt: skip
    return {
        "model": bpe(vocab, "t+h th+e ▁+a ▁+the i+n in+g c+a ca+t", unk_token="<unk>", byte_fallback=True),
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
    }


def words() -> dict[str, Any]:
    vocab = {word: token_id for token_id, word in enumerate("<unk> the a cat dog thing . , ! world <x>".split())}
    return {
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "decoder": None,
    }


def word_pieces() -> dict[str, Any]:
    listed = "[PAD] <unk> [CLS] [SEP] [MASK] the a cat dog thing ##ing ##s . , ! ' t world n't don <x>".split()
    vocab = {piece: token_id for token_id, piece in enumerate(listed)}
    names = ("clean_text", "handle_chinese_chars", "lowercase")
    return {
        "model": {
            "type": "WordPiece", "vocab": vocab, "unk_token": "<unk>", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
        "normalizer": {"type": "BertNormalizer", "strip_accents": None, **dict.fromkeys(names, True)},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    }  # fmt: skip


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "byte-level": byte_level, "sentencepiece": sentencepiece, "words": words, "word pieces": word_pieces,
}  # fmt: skip


class Case(NamedTuple):
    """`added`: the added tokens of tokenizer.json, "text flags", each at its place in the vocabulary or behind it; a
    flag is n(ormalized), s(pecial), l(strip), r(strip) or w (a single word). `listed`: those of tokenizer_config.json;
    True: the same ones. `gap`: ids that are left out behind the vocabulary. `config`: the rest of
    tokenizer_config.json."""

    added: tuple[str, ...] = ()
    listed: tuple[str, ...] | bool = ()
    gap: int = 0
    config: dict[str, Any] = {}  # noqa: RUF012 (a tuple's default, which nothing changes)


CASES = {
    "none": Case(),
    "the first token": Case(("<unk> s", "a n")),
    "within the vocabulary": Case(("cat s", "the", "<x> n")),
    "within, as listed": Case(("cat s", "the", "<x> n"), True),
    "behind the vocabulary": Case(("<|im_end|> s", "<tool>", "[MASK] s")),
    "behind a gap": Case(("<|im_end|> s", "<tool>"), gap=7),
    "listed alone": Case((), ("<|im_end|> s", "<tool> n")),
    "both": Case(("<|im_end|> s",), ("<|im_end|> s", "<tool>", "Ab n")),
    "spaces at the left": Case(("<|im_end|> sl", "<tool> l", "Ab nl")),
    "spaces at the right": Case(("<|im_end|> sr", "<tool> r", "cat nr")),
    "spaces at both sides": Case(("<|im_end|> slr", "<tool> lr", "the nlr"), True),
    "whole words": Case(("<|im_end|> sw", "the w", "Ab nw", "cat wl")),
    "special by the list": Case(("<|im_end|>", "the"), ("<|im_end|> s", "the s")),
    "special by the file": Case(("<|im_end|> s", "the s"), ("<|im_end|>", "the")),
    "other spaces in the list": Case(("<|im_end|> sl", "<tool> r"), ("<|im_end|> sr", "<tool> l")),
    "a role in the vocabulary": Case(config={"eos_token": "cat", "pad_token": "the"}),
    "a role of an added token": Case(("<tool> n", "the"), config={"eos_token": "the"}),
    "a role with flags": Case(config={"eos_token": {"__type": "AddedToken", "content": "cat", "lstrip": True,
                                                    "rstrip": False, "normalized": False, "single_word": True}}),
    "roles of one token": Case(("<|im_end|> s",), True, config=dict.fromkeys(("bos_token", "eos_token"), "<|im_end|>")),
    "more special tokens": Case(("the",), config={"additional_special_tokens": ["cat", "the"]}),
    "named tokens": Case(("<tool>",), config={"extra_special_tokens": {"image_token": "<tool>", "boi": "cat"}}),
    "white space": Case(("\n", "  ")),
    "pieces of the model": Case(("<0x41>", "Ġa", "é w", "▁▁")),
    "one within another": Case(("<tool>", "<tool><tool> s", "tool w", "<")),
    "a long run": Case(tuple(f"<extra_{number}> s" for number in range(60))),
}  # fmt: skip


def token(entry: str) -> dict[str, Any]:
    text, _, flags = entry.rpartition(" ") if entry.strip() and " " in entry else (entry, "", "")
    names = {"n": "normalized", "s": "special", "l": "lstrip", "r": "rstrip", "w": "single_word"}
    return {"content": text, **{name: flag in flags for flag, name in names.items()}}


def folder(path: Path, kind: str, case: Case) -> Path:
    parts = KINDS[kind]()
    vocab = parts["model"]["vocab"]
    ids = dict(vocab)
    next_id = len(vocab) + case.gap
    listed = case.added if isinstance(case.listed, bool) else case.listed
    for entry in (*case.added, *listed):
        text = token(entry)["content"]
        if text not in ids:
            ids[text], next_id = next_id, next_id + 1
    added = sorted(
        ({"id": ids[each["content"]], **each} for each in map(token, case.added)), key=lambda each: each["id"]
    )
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": None}
    (path / "tokenizer.json").write_text(json.dumps(whole | parts))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **case.config}
    if case.listed:
        config["added_tokens_decoder"] = {str(ids[each["content"]]): each for each in map(token, listed)}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def streamed(tok: Tokenizer, token_ids: list[int], skip: bool) -> str:
    stream = DetokenizeStream(tok, SamplingParams(skip_special_tokens=skip))
    last = len(token_ids) - 1
    return "".join(stream.push([token_id], final=place == last) for place, token_id in enumerate(token_ids))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_as_transformers_reads_them(kind: str, name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = folder(tmp_path, kind, CASES[name])
    oracle: Any = AutoTokenizer.from_pretrained(directory)
    tok = Tokenizer.load(directory)
    assert (tok.vocab_size, tok.eos_token_id) == (len(oracle), oracle.eos_token_id)
    # A broken character, or an added token that `tokenizers` breaks, is below.
    whole = [i for i in range(len(oracle)) if not (oracle.convert_ids_to_tokens(i) or "").startswith("<0x")]
    if kind == "byte-level":
        whole = [*range(33, 120), *range(256, len(oracle))]
        whole = [i for i in whole if oracle.convert_ids_to_tokens(i) != "é"]
    rng = random.Random(0)
    sequences = [rng.choices(whole, k=7) for _ in range(6)]
    for text in TEXTS:
        token_ids = oracle(text)["input_ids"]
        assert tok.encode(text) == tok.encode(text, add_special_tokens=False) == token_ids, repr(text)
        if kind != "byte-level" or "é" not in oracle.convert_ids_to_tokens(token_ids):
            sequences.append(token_ids)
    for token_ids in sequences:
        for skip in (True, False):
            expected = oracle.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tok.decode(token_ids, skip_special_tokens=skip) == expected, token_ids
            assert not token_ids or streamed(tok, token_ids, skip) == expected, token_ids


def test_a_special_token_is_left_out_even_if_it_is_normalised(tmp_path: Path) -> None:
    """`tokenizers` 0.23 looks such a token up in the form that its normalizer gives it, and then shows it."""
    tok = Tokenizer.load(folder(tmp_path, "sentencepiece", Case(("<|im_end|> sn",))))
    [token_id] = tok.encode("<|im_end|>")
    assert tok.decode([*tok.encode("the"), token_id]) == "the"


def test_an_added_token_in_plain_letters_is_shown_as_it_stands(tmp_path: Path) -> None:
    """`tokenizers` reads it as the byte that its letter stands for, and shows a broken character."""
    tok = Tokenizer.load(folder(tmp_path, "byte-level", Case(("é", "Ġa"))))
    assert tok.decode(tok.encode("Ab é")) == "Ab é"
    assert tok.decode(tok.encode("AĠa")) == "A a", "in the vocabulary's letters"


def test_a_role_without_a_token_gets_none(tmp_path: Path) -> None:
    """transformers adds the token behind the vocabulary, where the model may have no embedding."""
    tok = Tokenizer.load(folder(tmp_path, "words", Case(config={"pad_token": "<pad>"})))
    assert (tok.pad_token_id, tok.vocab_size) == (None, 11)
