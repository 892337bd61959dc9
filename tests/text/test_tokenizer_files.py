"""Every kind of tokenizer file: published vectors where the data is here, small made files everywhere."""

from __future__ import annotations

import base64
import json
import os
import random
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.support.tokenizers import data, loaded, made_byte_level, made_scored, vectors
from tokenizers import processors

from headrace import builtin
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.text import tokenizer_bytes, tokenizer_files
from headrace.text.tokenizer import Tokenizer

PAIRS = [
    ("tokenizers/gpt2", "gpt-2"),
    ("tokenizers/llama3.2", "llama-bpe"),
    ("tokenizers/llama2/tokenizer.model", "llama-spm"),
    ("tokenizers/llama2/tokenizer.bin", "llama-spm"),
]


@pytest.mark.parametrize(("path", "name"), PAIRS)
def test_llama_cpp_vectors(path: str, name: str) -> None:
    tok = loaded(path)
    assert len(vectors(name)) == 47
    for text, expected in vectors(name):
        assert tok.encode(text, add_special_tokens=False) == expected, repr(text)


def test_control_vectors_tell_splitting_rules_apart() -> None:
    model = json.loads(loaded("tokenizers/llama3.2").to_json())["model"]
    vocab, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
    wrong = tokenizer_bytes.byte_level(vocab, merges, "gpt2").tokenizer
    assert any(wrong.encode(text).ids != expected for text, expected in vectors("llama-bpe"))


@pytest.mark.parametrize(
    ("path", "model"), [("models/stories260K/tok512.bin", "stories260K"), ("models/TinyStories-656K",) * 2]
)
def test_golden_prompts_and_texts(path: str, model: str) -> None:
    tok = loaded(path)
    golden = json.loads(data(f"models/{Path(model).name}/golden.json").read_text())
    for case in golden["cases"]:
        assert tok.encode(case["prompt"]) == case["prompt_ids"]
        skip = not case["text"].startswith("<|start_story|>")
        assert tok.decode(case["prompt_ids"] + case["greedy_ids"], skip_special_tokens=skip) == case["text"]


@pytest.mark.parametrize(
    "path",
    [
        "tokenizers/tinystories4096/tokenizer_4096.model",
        "tokenizers/llama2/tokenizer.model",
        "tokenizers/mistral/tokenizer.model.v1",
        "tokenizers/mistral/mistral_instruct_tokenizer_240216.model.v2",
        "tokenizers/mistral/mistral_instruct_tokenizer_240323.model.v3",
    ],
)
def test_sentencepiece_models_as_sentencepiece_reads_them(path: str) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(data(path)))
    tok = loaded(path)
    assert (tok.vocab_size, tok.bos_token_id, tok.eos_token_id) == (len(oracle), oracle.bos_id(), oracle.eos_id())
    rng = random.Random(0)
    texts = [text for text, _ in vectors("llama-spm")]
    texts += ["".join(rng.choices("the quick brown fox.é漢🚀 \n\t", k=30)) for _ in range(300)]
    for text in texts:
        assert tok.encode(text, add_special_tokens=False) == oracle.encode(text), repr(text)


def test_transformers_reads_tokenizer_json_alike() -> None:
    transformers = pytest.importorskip("transformers")
    path = data("models/TinyStories-656K")
    oracle = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path / "tokenizer.json"), bos_token="<|start_story|>", eos_token="<|end_story|>"
    )
    tok = loaded("models/TinyStories-656K")
    for text in ("Once upon a time", "", " two  spaces", "<|end_story|>", "a\nb"):
        assert tok.encode(text) == oracle.encode(text)
        ids = tok.encode(text)
        assert tok.decode(ids, skip_special_tokens=False) == oracle.decode(ids, clean_up_tokenization_spaces=False)
    assert (tok.bos_token_id, tok.eos_token_id) == (1, 2)
    assert tok.is_special(2)
    assert not tok.is_special(80)


def write_json(path: Path, **files: Any) -> Path:
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(made_byte_level().to_json())
    return tmp_path


def test_a_tokenizer_json_decides_the_ends(saved: Path) -> None:
    """Its post-processor does; `add_bos_token` and `add_eos_token` beside it have no effect in transformers either."""
    text = "a the"
    plain = Tokenizer.load(saved)
    assert plain.encode(text) == plain.encode(text, add_special_tokens=False)
    assert plain.bos_token_id is None
    config = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}
    ends = {"add_bos_token": True, "add_eos_token": True}
    named = Tokenizer.load(write_json(saved, tokenizer_config=config | ends))
    assert named.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    assert named.encode(text) == plain.encode(text)
    begin = [("<|begin|>", named.bos_token_id)]
    with_begin = tokenizers.Tokenizer.from_str(named.to_json())
    with_begin.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=begin)
    with_begin.save(str(saved / "tokenizer.json"))
    for flag in (True, False):
        folder = write_json(saved, tokenizer_config=config | dict.fromkeys(ends, flag))
        assert Tokenizer.load(folder).encode(text) == [named.bos_token_id, *plain.encode(text)]


def test_dropout_of_the_training_is_left_out(saved: Path) -> None:
    text = "Once upon a time there was a little village. " * 3
    whole = Tokenizer.load(saved).encode(text)
    spec = json.loads((saved / "tokenizer.json").read_text("utf-8"))
    spec["model"]["dropout"] = 0.5
    (saved / "tokenizer.json").write_text(json.dumps(spec), "utf-8")
    assert {tuple(Tokenizer.load(saved).encode(text)) for _ in range(8)} == {tuple(whole)}
    library = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    assert len({tuple(library.encode(text).ids) for _ in range(8)}) > 1, "the file's dropout does nothing"


def test_special_tokens_map_fills_what_the_config_leaves_out(saved: Path) -> None:
    write_json(
        saved,
        tokenizer_config={"eos_token": "<|end|>"},
        special_tokens_map={"eos_token": "x", "bos_token": "<|begin|>"},
    )
    assert Tokenizer.load(saved).special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


def test_added_tokens_of_the_config(saved: Path) -> None:
    size = Tokenizer.load(saved).vocab_size
    entry = {"content": "<|new|>", "special": True}
    tok = Tokenizer.load(write_json(saved, tokenizer_config={"added_tokens_decoder": {str(size): entry}}))
    assert tok.encode("<|new|>") == [size]
    assert tok.is_special(size)
    write_json(saved, tokenizer_config={"added_tokens_decoder": {str(size + 7): entry}})
    with pytest.raises(CheckpointError, match=rf"'<\|new\|>' at {size + 7}, but the tokenizer has it at {size}"):
        Tokenizer.load(saved)


def test_chat_templates_wherever_they_are(saved: Path) -> None:
    assert Tokenizer.load(saved).chat_template is None
    write_json(saved, tokenizer_config={"chat_template": "one"})
    assert Tokenizer.load(saved).chat_template == "one"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "tools"}]
    write_json(saved, tokenizer_config={"chat_template": named})
    assert Tokenizer.load(saved).chat_templates == {"default": "two", "tool_use": "tools"}
    write_json(saved, chat_template={"chat_template": "three"})
    assert Tokenizer.load(saved).chat_template == "three"
    (saved / "chat_template.jinja").write_text("four")
    (saved / "additional_chat_templates").mkdir()
    (saved / "additional_chat_templates" / "rag.jinja").write_text("five")
    assert Tokenizer.load(saved).chat_templates == {"default": "four", "tool_use": "tools", "rag": "five"}


def llama2c(pieces: list[tuple[bytes, float]]) -> bytes:
    return struct.pack("<i", 9) + b"".join(struct.pack("<fi", score, len(text)) + text for text, score in pieces)


BYTES = [(f"<0x{byte:02X}>".encode(), 0.0) for byte in range(256)]
HEAD = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0), *BYTES]


def test_llama2c_file(tmp_path: Path) -> None:
    words = [(b" a", -0.0), (b" ab", -1.0), (b" ", -2.0), (b"a", -3.0), (b"b", -4.0)]
    (tmp_path / "tokenizer.bin").write_bytes(llama2c(HEAD + words))
    tok = Tokenizer.load(tmp_path)
    assert tok.encode("ab ab") == [1, 260, 260]
    assert tok.decode(tok.encode("ab ab\n")) == "ab ab\n"
    assert (tok.bos_token_id, tok.eos_token_id, tok.vocab_size) == (1, 2, 264)


def test_tiktoken_file(tmp_path: Path) -> None:
    ranks = [bytes([byte]) for byte in range(256)] + [b"th", b" t", b"the", b" the", b"he"]
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(ranks)]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    tok = Tokenizer.load(tmp_path)
    assert tok.encode("the the he") == [258, 259, 32, 260]
    assert tok.decode(tok.encode("é 漢")) == "é 漢"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", "can not be read as a tokenizer"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', "can not be read as a tokenizer"),
        ("tokenizer.model", b"\n\xff\xff\xff\xff\xff", "can not be read|ends inside"),
        ("tokenizer.model", b"\n\x05\n\x03ab", "ends inside"),
        ("tokenizer.model", b"\n\x05\n\x03abc\x12\x02\x18\x03", "models of type 3"),
        ("tokenizer.model", b"\n" + b"\xff" * 20, "too long"),
        ("tokenizer.model", b"not base64 at all", "can not be read"),
        ("tokenizer.bin", llama2c(HEAD)[:-3], "reaches beyond the end"),
        ("tokenizer.bin", llama2c(HEAD[:20]), "holds 20 pieces"),
        ("tokenizer.bin", struct.pack("<ifi", 1, 0.0, -5), "reaches beyond the end"),
        ("vocab.json", b"{}", "needs merges.txt beside it"),
    ],
)
def test_S_28_broken_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(tmp_path)


def test_S_28_random_damage_gives_a_checkpoint_error_or_a_tokenizer(tmp_path: Path) -> None:
    whole = bytearray(llama2c([*HEAD, (b"a", -1.0), (b"b", -2.0), (b"ab", -1.5)]))
    rng = random.Random(5)
    outcomes = set()
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 1, 8])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (tmp_path / "tokenizer.bin").write_bytes(damaged[: rng.choice([len(damaged), rng.randrange(len(damaged))])])
        try:
            Tokenizer.load(tmp_path)
            outcomes.add("read")
        except CheckpointError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_S_28_oversized_files_are_refused_unread(saved: Path, name: str) -> None:
    with open(saved / name, "ab") as file:
        os.truncate(file.fileno(), tokenizer_files.MAX_BYTES + 1)
    with pytest.raises(CheckpointError, match=rf"{name} has {tokenizer_files.MAX_BYTES + 1} bytes"):
        Tokenizer.load(saved)


def test_no_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.load_if_present(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"has no tokenizer \(looked for tokenizer.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(CheckpointError, match="no tokenizer at"):
        Tokenizer.load(tmp_path / "absent.json")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match="not a kind of tokenizer file"):
        Tokenizer.load(tmp_path / "notes.txt")


def test_an_unknown_decoder_is_refused(saved: Path) -> None:
    spec = json.loads((saved / "tokenizer.json").read_text())
    spec["decoder"] = {"type": "CTC", "pad_token": "-", "word_delimiter_token": "|", "cleanup": False}
    (saved / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(CheckpointError, match="a decoder of CTC is not supported"):
        Tokenizer.load(saved)


def test_R_16_lone_surrogates_are_refused() -> None:
    for tok in (made_byte_level(), made_scored()):
        with pytest.raises(RequestError, match="lone surrogates"):
            tok.encode("a\ud800b")


def test_C_6_text_that_a_vocabulary_has_no_tokens_for_is_refused(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "decoder": decoder}))
    tok = Tokenizer.load(tmp_path)
    assert tok.encode("a") == [0]
    for text in ("b", "b" * 10**5):
        with pytest.raises(RequestError, match="Missing \\[UNK\\] token"):
            tok.encode(text)


def test_C_6_an_id_far_from_all_others_is_refused(tmp_path: Path) -> None:
    """A table of all ids up to it would take sixteen gigabytes."""
    for last in (2**20 + 1, 2**20 + 2, 2**31):
        model = {"type": "WordLevel", "vocab": {"a": 0, "b": last}, "unk_token": "a"}
        (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
        if last == 2**20 + 1:
            assert Tokenizer.load(tmp_path).vocab_size == last + 1
        else:
            with pytest.raises(CheckpointError, match=f"the id {last}; 2 tokens leave at most {2**20} ids unused"):
                Tokenizer.load(tmp_path)


def test_R_03_a_long_text_is_encoded_without_stopping_other_threads() -> None:
    tokenizer = Tokenizer.load(builtin.PATH)
    text = "word " * 200_000
    ids: list[int] = []
    worker = threading.Thread(target=lambda: ids.extend(tokenizer.encode(text)))
    num_turns = 0
    worker.start()
    while worker.is_alive():
        time.sleep(0.0005)
        num_turns += 1
    # A call that held the interpreter would leave a turn before it and one after it.
    assert num_turns > 10
    assert ids == tokenizers.Tokenizer.from_str(tokenizer.to_json()).encode(text).ids


def test_ids_that_do_not_exist_are_nothing() -> None:
    tok = made_byte_level()
    assert tok.decode([-1, tok.vocab_size, 2**40]) == ""
    assert tok.id_to_token(-1) is None
    assert tok.id_to_token(2**40) is None
    assert tok.token_to_id("no such token") is None


@pytest.mark.parametrize("unit", ["a", "🚀", "<|end|>", " \n"])
def test_S_28_a_long_run_of_one_thing_round_trips(unit: str) -> None:
    for tok in (made_byte_level(), made_scored()):
        text = unit * (2**18 // len(unit.encode()))
        assert tok.decode(tok.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_user_defined_runs_of_spaces_keep_their_ids(tmp_path: Path) -> None:
    """As Gemma has them: SentencePiece finds them before anything else, and no id beyond the vocabulary is made."""
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("hello  world   this is    a test\ndef f(x):\n        return x\n" * 20)

    def train(dummy_prefix: bool) -> Path:
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "text"), model_prefix=str(tmp_path / "m"), vocab_size=300, model_type="bpe",
            byte_fallback=True, add_dummy_prefix=dummy_prefix, remove_extra_whitespaces=False, minloglevel=2,
            user_defined_symbols=["▁▁", "▁▁▁", "<x>"], normalization_rule_name="identity",
        )  # fmt: skip
        return tmp_path / "m.model"

    path = train(dummy_prefix=False)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = Tokenizer.load(path)
    for text in ("hello  world", "a   b    c  ", "  x", "test <x>  this", "é  日本"):
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text)
        assert tokenizer.decode(oracle.encode(text)) == text
    assert tokenizer.vocab_size == oracle.get_piece_size()
    with pytest.raises(CheckpointError, match="dummy prefix"):
        Tokenizer.load(train(dummy_prefix=True))


@pytest.mark.parametrize("templates", [["no object"], [{"name": "default"}], [{"name": "x", "template": 3}, 7]])
def test_R_27_a_malformed_list_of_chat_templates_is_told(tmp_path: Path, templates: list[Any]) -> None:
    (tmp_path / "tokenizer.json").write_text(made_byte_level().to_json())
    write_json(tmp_path, tokenizer_config={"chat_template": templates})
    with pytest.raises(CheckpointError):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "source", [3, {}, "\ud800", [{"name": "default", "template": 3}], [{"name": 3, "template": "x"}]]
)
@pytest.mark.parametrize("file", ["tokenizer_config", "chat_template"])
def test_S_28_chat_templates_that_fail_each_chat_are_refused_at_the_start(
    source: object, file: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(made_byte_level().to_json())
    write_json(tmp_path, **{file: {"chat_template": source}})
    with pytest.raises(CheckpointError, match=r"chat_template .*expected|\.json has half a surrogate pair"):
        Tokenizer.load(tmp_path)
    write_json(tmp_path, **{file: {"chat_template": [{"name": "default", "template": "sound"}]}})
    assert Tokenizer.load(tmp_path).chat_template == "sound"
