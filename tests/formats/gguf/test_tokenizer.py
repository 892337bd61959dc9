"""Tokenizers out of GGUF files: all published vectors whose vocabulary is here, and small made files everywhere."""

from __future__ import annotations

import io
import random
import struct
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tests.formats.gguf.files import BOOL, F32, I32, STRING, U32, gguf_file, listed, scalar, vocabulary
from tests.support.tokenizers import data, loaded, vectors

from headrace.protocol.errors import CheckpointError
from headrace.text import tokenizer_bytes, tokenizer_gguf
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer import Tokenizer

import gguf  # isort: skip

NAMES = ["llama-spm", "phi-3", "gpt-2", "falcon", "mpt", "starcoder", "deepseek-llm", "bert-bge"]


def path_of(name: str) -> str:
    return f"tokenizers/llama.cpp/ggml-vocab-{name}.gguf"


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_vectors(name: str) -> None:
    tok = loaded(path_of(name))
    assert len(vectors(name)) == 47
    for text, expected in vectors(name):
        assert tok.encode(text, add_special_tokens=False) == expected, repr(text)
        # BERT forgets case, accents and spaces; all others give the text back whole.
        if name != "bert-bge":
            assert tok.decode(expected, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", ["falcon", "starcoder", "deepseek-llm"])
def test_control_vectors_tell_the_cuts_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = tokenizer_gguf.PRE_TOKENIZERS
    monkeypatch.setitem(cuts, name, cuts["gpt-2"])
    wrong = Tokenizer.load(data(path_of(name)))
    assert any(wrong.encode(text, add_special_tokens=False) != expected for text, expected in vectors(name))


@pytest.mark.parametrize(
    ("name", "bos", "eos", "ends"),
    [
        ("llama-spm", 1, 2, ([1], [])),
        ("phi-3", 1, 32000, ([1], [])),
        ("gpt-2", 50256, 50256, ([], [])),
        ("deepseek-llm", 100000, 100001, ([100000], [])),
        ("bert-bge", None, None, ([101], [102])),
    ],
)
def test_ends_of_a_text(name: str, bos: int | None, eos: int | None, ends: tuple[list[int], list[int]]) -> None:
    tok = loaded(path_of(name))
    assert (tok.bos_token_id, tok.eos_token_id) == (bos, eos)
    assert tok.encode("hello") == [*ends[0], *tok.encode("hello", add_special_tokens=False), *ends[1]]


def test_phi_3_special_tokens_and_template() -> None:
    tok = loaded(path_of("phi-3"))
    assert tok.encode("<|user|>", add_special_tokens=False) == [tok.token_to_id("<|user|>")]
    assert tok.chat_template is not None
    assert tok.chat_template.startswith("{{ bos_token }}{% for message in messages %}")
    assert (tok.pad_token_id, tok.unk_token_id, tok.vocab_size) == (32000, 0, 32064)


@pytest.mark.parametrize(
    ("name", "other"), [("gpt-2", "tokenizers/gpt2"), ("llama-spm", "tokenizers/llama2/tokenizer.model")]
)
def test_the_same_tokenizer_from_another_file(name: str, other: str) -> None:
    one, two = loaded(path_of(name)), loaded(other)
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(
            rng.choices(["the ", "quick", "'s", " ", "  ", "\n", "é", "漢字", "🚀", "12", "3456", "<s>", "."], k=12)
        )
        assert one.encode(text, add_special_tokens=False) == two.encode(text, add_special_tokens=False), repr(text)


@pytest.mark.parametrize("pre", tokenizer_gguf.PRE_TOKENIZERS)
@pytest.mark.parametrize(
    "text", ["Hello  World's 12345, naïve\tΣΊΣΥΦΟΣ\r\n\r\n x=1 漢字かな 🚀!!  ", "a" * 2000 + "\n" * 2000]
)
def test_cuts_lose_nothing(pre: str, text: str) -> None:
    tok = load_made(BYTE_LEVEL, pre)
    assert tok.decode(tok.encode(text, add_special_tokens=False)) == text


CUT = "Hey's DON'T 12345 x\n\n  y()\n"
PIECES = {
    "gpt-2": ["Hey", "'s", " DON", "'", "T", " 12345", " x", "\n\n ", " y", "()", "\n"],
    "llama3": ["Hey", "'s", " DON", "'T", " ", "123", "45", " x", "\n\n", " ", " y", "()\n"],
    "qwen2": ["Hey", "'s", " DON", "'T", " ", *"12345", " x", "\n\n", " ", " y", "()\n"],
    "starcoder": ["Hey", "'s", " DON", "'", "T", " ", *"12345", " x", "\n\n ", " y", "()", "\n"],
    "falcon": ["Hey", "'", "s", " DON", "'", "T", " ", "123", "45", " x", "\n\n ", " y", "()", "\n"],
    "tekken": ["Hey", "'s", " DON", "'T", " ", *"12345", " x", "\n\n", " ", " y", "()\n"],
    "gpt-4o": ["Hey's", " DON'T", " ", "123", "45", " x", "\n\n", " ", " y", "()\n"],
    "deepseek-v3": ["Hey", "'s", " DON", "'T", " ", "123", "45", " x", "\n\n", " ", " y", "()\n"],
    "deepseek-coder": ["Hey", "'", "s", " DON", "'", "T", " ", *"12345", " x", "\n", "\n", " ", " y", "()", "\n"],
}


@pytest.mark.parametrize("pre", PIECES)
def test_where_the_cuts_fall(pre: str) -> None:
    """Worked out by hand from the published expressions; the vectors above hold the rest."""
    plain = tokenizers.Tokenizer.from_str(load_made(BYTE_LEVEL, pre).to_json())
    spans = [span for _, span in plain.pre_tokenizer.pre_tokenize_str(CUT)]
    assert [CUT[start:end] for start, end in spans] == PIECES[pre]


# Small vocabularies, one of each kind.

LETTERS = tokenizer_bytes.byte_letters()
BYTE_LEVEL = [
    *vocabulary("gpt2", [*LETTERS, "<|end|>", "<tool>", "ab", "abc"], [*[1] * 256, 3, 4, 1, 1]),
    listed("tokenizer.ggml.merges", STRING, ["a b", "ab c"]),
    scalar("tokenizer.ggml.bos_token_id", U32, 256),
    scalar("tokenizer.ggml.eos_token_id", U32, 256),
]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁", "a", "b", "▁▁"]
SPM_KINDS = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 4]
SCORED = [
    *vocabulary("llama", SPM_TOKENS[:-1], SPM_KINDS[:-1]),
    listed("tokenizer.ggml.scores", F32, [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0]),
    scalar("tokenizer.ggml.bos_token_id", U32, 1),
    scalar("tokenizer.ggml.eos_token_id", U32, 2),
]
WORD_PIECE = [
    *vocabulary("bert", ["[UNK]", "[CLS]", "[SEP]", "▁cat", "s", "▁[", "]"], [3, 3, 3, 1, 1, 1, 1]),
    scalar("tokenizer.ggml.unknown_token_id", U32, 0),
    scalar("tokenizer.ggml.cls_token_id", U32, 1),
    scalar("tokenizer.ggml.seperator_token_id", U32, 2),
]
MADE = {"gpt2": BYTE_LEVEL, "llama": SCORED, "bert": WORD_PIECE}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load_made(fields: list[bytes], pre: str | None = None) -> Tokenizer:
    """The tokenizer in a file of `fields`, written to the test's own folder."""
    more = [] if pre is None else [scalar("tokenizer.ggml.pre", STRING, pre)]
    Path("made.gguf").write_bytes(gguf_file([*fields, *more]))
    return Tokenizer.load("made.gguf")


def test_byte_level() -> None:
    tok = load_made(BYTE_LEVEL, "gpt-2")
    assert tok.encode("abcab<tool>ab<|end|>") == [259, 258, 257, 258, 256]
    assert tok.decode([259, 257, 256], skip_special_tokens=True) == "abc<tool>"
    assert load_made(BYTE_LEVEL).encode("abc") == [259], "files from before there were names"
    assert load_made(BYTE_LEVEL, "llama3").encode("abc") == [256, 259], "such models want a begin of text"
    off = scalar("tokenizer.ggml.add_bos_token", BOOL, 0)
    assert load_made([*BYTE_LEVEL, off], "llama3").encode("abc") == [259]
    on = scalar("tokenizer.ggml.add_eos_token", BOOL, 1)
    assert load_made([*BYTE_LEVEL, on], "gpt-2").encode("abc") == [259, 256]


def test_scored() -> None:
    tok = load_made(SCORED)
    assert tok.encode("a b") == [1, 259, 260, 262]
    assert tok.decode([1, 259, 260, 262]) == "a b"
    bare = load_made([*SCORED, scalar("tokenizer.ggml.add_space_prefix", BOOL, 0)])
    assert bare.encode("a b") == [1, 261, 260, 262]
    assert bare.decode([261, 260, 262]) == "a b"


def with_spaces(prefix: int) -> list[bytes]:
    scores = listed("tokenizer.ggml.scores", F32, [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, 0.0])
    return [
        *vocabulary("llama", SPM_TOKENS, SPM_KINDS),
        scores,
        scalar("tokenizer.ggml.add_space_prefix", BOOL, prefix),
        scalar("tokenizer.ggml.add_bos_token", BOOL, 0),
    ]


def test_user_defined_spaces() -> None:
    tok = load_made(with_spaces(0))
    assert tok.encode("b  b") == [262, 263, 262]
    assert tok.vocab_size == len(SPM_TOKENS)
    with pytest.raises(CheckpointError, match=r"tokens\[263\] is '▁▁'; it must be without a space"):
        load_made(with_spaces(1))


def test_word_piece() -> None:
    tok = load_made(WORD_PIECE)
    assert tok.encode("Cats [dog]") == [1, 3, 4, 5, 0, 0, 2]
    assert tok.decode([3, 4]) == "cats"
    assert tok.is_special(1)


def test_chat_templates() -> None:
    tool = scalar("tokenizer.chat_template.tool_use", STRING, "tools")
    assert load_made([*SCORED, tool]).chat_templates == {"tool_use": "tools"}
    both = load_made([*SCORED, tool, scalar("tokenizer.chat_template", STRING, "plain")])
    assert both.chat_templates == {"default": "plain", "tool_use": "tools"}
    assert load_made(SCORED).chat_template is None


def test_files_beside_it_are_not_its_own() -> None:
    Path("tokenizer_config.json").write_text('{"eos_token": "a", "chat_template": "theirs"}')
    tok = load_made(SCORED)
    assert (tok.eos_token_id, tok.chat_template) == (2, None)


ROLE = scalar("tokenizer.ggml.eos_token_id", U32, 3)
REFUSED: dict[str, tuple[list[bytes], str]] = {
    "no tokenizer": ([], "tokenizer.ggml.tokens is None; it must be there"),
    "no tokens": (vocabulary("llama", []), r"tokenizer.ggml.tokens is \[\]; it must be there"),
    "no model": (vocabulary("llama", ["a"])[1:], "tokenizer.ggml.model is None; it must be llama, t5, gpt2 or bert"),
    "another model": (vocabulary("rwkv", ["a"]), "tokenizer.ggml.model is 'rwkv'; it must be llama, t5, gpt2 or bert"),
    "tokens of numbers": (
        [listed("tokenizer.ggml.tokens", I32, [1])],
        "tokenizer.ggml.tokens is 'an array of int32'; it must be an array of strings",
    ),
    "scores of bytes": (
        [*vocabulary("llama", ["a"]), listed("tokenizer.ggml.scores", 0, [1])],
        "tokenizer.ggml.scores is 'an array of uint8'; it must be an array of floats",
    ),
    "too few scores": (
        [*vocabulary("llama", ["a", "b"]), listed("tokenizer.ggml.scores", F32, [1])],
        "tokenizer.ggml.scores is '1 elements'; it must be of 2 elements",
    ),
    "too many kinds": (vocabulary("gpt2", ["a"], [1, 1]), "token_type is '2 elements'; it must be of 1 elements"),
    "no scores": (vocabulary("llama", ["a"]), "tokenizer.ggml.scores is None"),
    "no scores of unigrams": (vocabulary("t5", ["a"]), "tokenizer.ggml.scores is None"),
    "broken replacements": (
        [
            *vocabulary("t5", ["a"]),
            listed("tokenizer.ggml.scores", F32, [1.0]),
            scalar("tokenizer.ggml.unknown_token_id", U32, 0),
            listed("tokenizer.ggml.precompiled_charsmap", 0, [255] * 9),
        ],
        "can not be read as a tokenizer",
    ),
    "a kind of token": (vocabulary("gpt2", ["a", "b"], [1, 7]), r"token_type\[1\] is 7; it must be from 1 to 6"),
    "a token twice": (vocabulary("gpt2", ["a", "b", "a"]), r"tokens\[2\] is 'a'; it must be a token that was not"),
    "a word twice": ([*vocabulary("bert", ["▁x", "▁##y", "y"]), *WORD_PIECE[-3:]], "3 tokens for 2 words"),
    "id of a role": ([*vocabulary("gpt2", ["a", "b", "c"]), ROLE], "eos_token_id is 3; it must be from 0 to 2"),
    "no id of a role": (WORD_PIECE[:-1], "seperator_token_id is None"),
    "merge of one": (
        [*vocabulary("gpt2", ["a"]), listed("tokenizer.ggml.merges", STRING, ["a "])],
        r"merges\[0\] is 'a '; it must be two tokens",
    ),
    "merge of unknown tokens": (
        [*vocabulary("gpt2", ["a"]), listed("tokenizer.ggml.merges", STRING, ["a b"])],
        "made.gguf can not be read as a tokenizer",
    ),
    "long token": (vocabulary("gpt2", ["a" * 4097]), r"tokens\[0\] is '4097 bytes'; it must be of at most 4096 bytes"),
    "unknown cuts": (
        [*vocabulary("gpt2", ["a"]), scalar("tokenizer.ggml.pre", STRING, "new")],
        "tokenizer.ggml.pre is 'new'; it must be one of default, gpt-2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_S_27_faults_are_named(case: str) -> None:
    fields, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        load_made(fields)


@pytest.mark.parametrize("kind", MADE)
def test_S_27_random_damage_gives_a_checkpoint_error_or_a_tokenizer(kind: str) -> None:
    whole = gguf_file(MADE[kind])
    path = Path("damaged.gguf")
    rng = random.Random(kind)
    outcomes = set()
    for _ in range(200):
        broken = bytearray(whole)
        for _ in range(rng.choice([1, 1, 1, 8])):
            at = rng.randrange(len(broken) - 4)
            broken[at : at + 4] = rng.choice([struct.pack("<I", rng.choice([0, 1, 2**32 - 1])), rng.randbytes(4)])
        path.write_bytes(broken)
        try:
            tok = Tokenizer.load(path)
        except CheckpointError:
            outcomes.add("refused")
        else:
            tok.decode(tok.encode("abc cats <|end|> é", add_special_tokens=False))
            outcomes.add("read")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize(
    ("template", "add_bos", "begins"),
    [
        ("{{ messages[0]['content'] }}", None, 1),
        ("{{ bos_token }}{{ messages[0]['content'] }}", None, 1),
        ("{{ messages[0]['content'] }}", 0, 0),
        ("{{ bos_token }}{{ messages[0]['content'] }}", 0, 1),
    ],
)
def test_the_begin_of_a_chat_is_there_once(template: str, add_bos: int | None, begins: int) -> None:
    """As llama.cpp has it: the file's `add_bos_token` decides, unless the template writes the begin itself."""
    flags = [] if add_bos is None else [scalar("tokenizer.ggml.add_bos_token", BOOL, add_bos)]
    tok = load_made([*SCORED, scalar("tokenizer.chat_template", STRING, template), *flags])
    ids = tok.apply_chat_template([{"role": "user", "content": "a b"}])
    assert ids == [1] * begins + tok.encode("a b", add_special_tokens=False)
    rendered = ChatTemplate.of(tok, "{{ messages[0]['content'] }}").render([{"role": "user", "content": "a b"}])
    assert rendered == ("<s>a b" if add_bos is None else "a b"), "another template, the same file"


@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity"])
def test_unigrams_are_those_of_sentencepiece(rule: str, tmp_path: Path) -> None:
    """As in bge-m3's file: replacements of characters, a space before the text, and an end behind it."""
    rng = random.Random(3)
    words = "the cat sat on a mat and dogs ran through woods while rain fell über straße naïve café 東京 にほん مرحبا"
    lines = [" ".join(rng.choice(words.split()) for _ in range(8)) for _ in range(400)]
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=buffer, vocab_size=120, model_type="unigram", minloglevel=2,
        character_coverage=1.0, hard_vocab_limit=False, normalization_rule_name=rule,
        remove_extra_whitespaces=rule == "nmt_nfkc",
    )  # fmt: skip
    model = sentencepiece_model_pb2.ModelProto.FromString(buffer.getvalue())
    writer, spec = gguf.GGUFWriter(tmp_path / "model.gguf", "bert"), model.normalizer_spec
    writer.add_tokenizer_model("t5")
    writer.add_token_list([piece.piece for piece in model.pieces])
    writer.add_token_scores([piece.score for piece in model.pieces])
    writer.add_token_types([piece.type for piece in model.pieces])
    writer.add_add_space_prefix(spec.add_dummy_prefix)
    writer.add_remove_extra_whitespaces(spec.remove_extra_whitespaces)
    if spec.precompiled_charsmap:
        writer.add_precompiled_charsmap(spec.precompiled_charsmap)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tok, theirs = (
        Tokenizer.load(tmp_path / "model.gguf"),
        sentencepiece.SentencePieceProcessor(model_proto=buffer.getvalue()),
    )
    texts = [
        "the cat",
        "  the   cat ",
        "ｔｈｅ ＣＡＴ①",
        "über straße",
        "東京 xyz",
        "",
        "مرحبا the\tcat\nsat",
        *lines[:20],
    ]
    for text in texts:
        assert tok.encode(text, add_special_tokens=False) == theirs.encode(text), repr(text)
        assert tok.encode(text) == [1, *theirs.encode(text), 2]
    assert tok.decode(theirs.encode("the cat sat")) == "the cat sat"
