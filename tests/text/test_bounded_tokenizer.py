"""S-10, S-28: the text of a user's tokenizer is encoded in a process of bounded time and memory, unless each part of
the tokenizer is on a list of parts that can do no harm."""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tests.support import tokenizer_child
from tests.support.tokenizers import DATA, MADE, REAL, made_byte_level, made_scored
from tests.text.test_hostile_tokenizers import TEXTS

from headrace import hub
from headrace.protocol.errors import CheckpointError, HeadraceError, RequestError
from headrace.text import bounded_tokenizer, tokenizer_plain
from headrace.text.inputs import spellings
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_plain import MAX_GROWTH, oddity, spec_of

ROOT = Path(__file__).resolve().parents[2]
Spec = dict[str, Any]
Change = Callable[[Spec], object]
BYTE_LEVEL: Spec = json.loads(made_byte_level().to_json())
SCORED: Spec = json.loads(made_scored().to_json())
Q16 = {"type": "Replace", "pattern": {"String": "q"}, "content": "q" * 16}
GROWING = {"type": "Sequence", "normalizers": [Q16] * 5}


def splitting(regex: str, behavior: str = "Isolated") -> Change:
    step = {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": False}
    return lambda spec: spec.update(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [step, copy.deepcopy(BYTE_LEVEL["pre_tokenizer"])]}
    )


def growing(spec: Spec) -> None:
    spec["normalizer"] = GROWING


def write(folder: Path, spec: Spec, *changes: Change) -> Path:
    changed = copy.deepcopy(spec)
    for change in changes:
        change(changed)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(changed))
    return folder


def library(spec: Spec, *changes: Change) -> tokenizers.Tokenizer:
    changed = copy.deepcopy(spec)
    for change in changes:
        change(changed)
    return tokenizers.Tokenizer.from_str(json.dumps(changed))


@pytest.fixture(autouse=True)
def child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setattr(bounded_tokenizer, "SANDBOX", tokenizer_child.NAME)


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[Tokenizer]:
    with closing(bounded_tokenizer.load(write(tmp_path / "bomb", BYTE_LEVEL, growing))) as tokenizer:
        yield tokenizer


# The list.


@pytest.mark.parametrize("spec", [BYTE_LEVEL, SCORED], ids=["byte-level", "scored"])
def test_S_10_plain_tokenizers_are_known(spec: Spec) -> None:
    changes = {
        "normalizer": [{"type": "NFC"}],
        "post_processor": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}],
    }
    assert oddity(spec_of(library(spec)), 10) is None
    for name, values in changes.items():
        for value in values:
            assert oddity(spec_of(library(spec, lambda each, n=name, v=value: each.update({n: v}))), 10) is None


def template(pieces: int) -> Spec:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {"type": "TemplateProcessing", "single": [text] * pieces, "pair": [text], "special_tokens": {}}


def flagged(name: str) -> Change:
    return lambda spec: spec["added_tokens"][0].update({name: True})


ODD: dict[str, Change] = {
    "33554432 times": lambda spec: spec.update(normalizer={**GROWING, "normalizers": [Q16] * 6}),
    "a normalizer of 9 steps": lambda spec: spec.update(
        normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 9}
    ),
    "Replace with the pattern 'x'": lambda spec: spec.update(normalizer={**Q16, "pattern": {"Regex": "x"}}),
    "Replace with the pattern ''": lambda spec: spec.update(normalizer={**Q16, "pattern": {"String": ""}}),
    "the type Replace": lambda spec: spec.update(normalizer={**Q16, "content": "q" * 17}),
    "the type NFKC": lambda spec: spec.update(normalizer={"type": "NFKC"}),
    "the type Prepend": lambda spec: spec.update(normalizer={"type": "Prepend", "prepend": "q" * 100}),
    "the pattern '(a|aa)+$'": splitting("(a|aa)+$"),
    "the pattern '\\\\s+$'": splitting(r"\s+$"),
    "the type Split": splitting(r"\p{N}", "Removed"),
    "a model with dropout": lambda spec: spec["model"].update(dropout=0.1),
    "a model with end_of_word_suffix": lambda spec: spec["model"].update(end_of_word_suffix="x" * 1000),
    "with lstrip": flagged("lstrip"),
    "with rstrip": flagged("rstrip"),
    "with single_word": flagged("single_word"),
    "a post_processor of the type TemplateProcessing": lambda spec: spec.update(post_processor=template(2)),
    "a post_processor of 9 steps": lambda spec: spec.update(
        post_processor={"type": "Sequence", "processors": [BYTE_LEVEL["pre_tokenizer"]] * 9}
    ),
    "a model of the type WordLevel": lambda spec: spec.update(
        model={"type": "WordLevel", "vocab": spec["model"]["vocab"], "unk_token": "!"}
    ),
}


@pytest.mark.parametrize("words", ODD)
def test_S_10_a_part_that_is_not_on_the_list_is_named(words: str) -> None:
    assert words in str(oddity(spec_of(library(BYTE_LEVEL, ODD[words])), 10))


def test_S_10_texts_of_unknown_length_are_not_plain() -> None:
    assert oddity(spec_of(library(BYTE_LEVEL)), None) == "tokens for texts of unknown length"


def test_S_10_the_regexes_of_a_file_may_spell_line_ends() -> None:
    [regex] = [each for each in tokenizer_plain.REGEXES if each.startswith('[!"#')]
    assert "\\r\\n" in regex
    for spelled in (regex, regex.replace("\\r", "\r").replace("\\n", "\n")):
        assert oddity(spec_of(library(BYTE_LEVEL, splitting(spelled))), 10) is None


PLAIN_STEPS: list[Spec] = [
    {"type": "NFC"},
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {**Q16, "content": "qqq"}]},
    Q16,
    GROWING,
]


def longest_growth(text: str) -> float:
    """The most bytes for a byte of `text`, of the normalizers that are plain."""
    most = 0.0
    for step in PLAIN_STEPS:
        whole = library(BYTE_LEVEL, lambda spec, s=step: spec.update(normalizer=s, pre_tokenizer=None))  # type: ignore[misc]
        if oddity(spec_of(whole), 10) is None:
            most = max(most, len(whole.normalizer.normalize_str(text).encode()) / len(text.encode()))
    return most


@given(st.text(st.sampled_from("q \u0344\u0390\ufb1da"), min_size=1, max_size=8))
def test_S_10_plain_steps_make_a_text_longer_by_a_small_factor(text: str) -> None:
    assert longest_growth(text) <= MAX_GROWTH


def test_S_10_control_a_list_with_the_growing_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tokenizer_plain.NORMALIZERS, "Replace", lambda step: 1)
    assert longest_growth("q") > MAX_GROWTH


LINEAR = """
import sys
from tokenizers import Regex, pre_tokenizers
for regex in sys.argv[1:]:
    split = pre_tokenizers.Split(Regex(regex), "isolated")
    for unit in (" ", "\\n", "a", "A", "1", "!", "aA", " \\n", "中"):
        split.pre_tokenize_str(unit * (60_000 if unit == " " else 10_000) + "x")
"""


def cpu_bounded(seconds: int, *regexes: str) -> int:
    """The exit status of the regexes' work within so many seconds of processor time; a quadratic one takes
    half a minute."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # noqa: E731
    return subprocess.run([sys.executable, "-c", LINEAR, *regexes], preexec_fn=limit, check=False).returncode


def test_S_10_the_regexes_on_the_list_take_time_in_proportion_to_the_text() -> None:
    assert cpu_bounded(20, *sorted(tokenizer_plain.REGEXES)) == 0


def test_S_10_control_a_quadratic_regex_is_seen() -> None:
    assert cpu_bounded(1, r"\s+$") == -signal.SIGKILL


# Texts.


@pytest.mark.parametrize("name", [*MADE, *REAL])
@pytest.mark.sampled(4)
def test_a_bounded_tokenizer_is_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTHING_IS_PLAIN", "1")
    path = tmp_path / "made"
    if name in MADE:
        write(path, json.loads(MADE[name]().to_json()))
        (path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>", "chat_template": "x"}')
    elif not (path := DATA / REAL[name]).exists():
        pytest.skip(f"{path} is not here")
    here = Tokenizer.load(path)
    with closing(bounded_tokenizer.load(path)) as there:
        assert there.process is not None
        for text in [*TEXTS, "", "日本語 🚀é\u0301", "a" * 5000, here.special_tokens.get("eos_token", "") + " x"]:
            for special in (True, False):
                assert there.encode(text, special) == here.encode(text, special)
        assert spellings(there, "word") == spellings(here, "word")
        for token_id in range(-1, here.vocab_size + 1, 1 + here.vocab_size // 4000):
            spelled = here.id_to_token(token_id)
            assert there.id_to_token(token_id) == spelled
            assert there.token_bytes(token_id) == here.token_bytes(token_id)
            assert there.token_bytes(token_id, True) == here.token_bytes(token_id, True)
            assert spelled is None or there.token_to_id(spelled) == here.token_to_id(spelled)
        for attribute in ("special_tokens", "chat_templates", "begin_of_chats", "vocab_size", "max_token_bytes"):
            assert getattr(there, attribute) == getattr(here, attribute)
        for attribute in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"):
            assert getattr(there, attribute) == getattr(here, attribute)
        assert there.special_ids() == here.special_ids()
        assert there.is_same(here)
        with pytest.raises(RequestError, match="surrogates"):
            there.encode("\ud800")


def test_S_10_a_text_that_grows_is_refused_in_words(bomb: Tokenizer) -> None:
    with pytest.raises(RequestError, match="the model's tokenizer needs at most 2 s of processor time and 1,024 MiB"):
        bomb.encode("q" * 200)
    assert bomb.decode(bomb.encode("the stop")) == "the stop", "another process encodes what fits"
    assert bomb.process is not None
    assert (bomb.process.num_faults, bomb.process.fault) == (0, ""), "it is the text's fault"


def test_S_10_a_regex_that_backtracks_is_refused_in_words(tmp_path: Path) -> None:
    path = write(tmp_path / "redos", BYTE_LEVEL, splitting("(a|aa)+$"))
    with closing(bounded_tokenizer.load(path)) as tokenizer:
        for text in ("a" * 300 + "!", "a" * 40 + "!"):
            with pytest.raises(RequestError, match="the model's tokenizer"):
                tokenizer.encode(text)
        assert tokenizer.encode("the") == made_byte_level().encode("the")


def test_R_31_a_process_that_is_killed_with_a_text_is_replaced(bomb: Tokenizer) -> None:
    process = bomb.process
    assert process is not None
    expected, pids = bomb.encode("the stop"), []

    def kill() -> None:
        if not pids and process.pid is not None:
            pids.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)

    process.watchdog.starts_anew = kill  # type: ignore[method-assign]
    assert bomb.encode("the stop") == expected
    assert (process.num_faults, process.fault, process.pid in pids) == (1, "", False)


def test_S_28_a_new_process_takes_no_other_tokenizer(bomb: Tokenizer, tmp_path: Path) -> None:
    """With other files the ids would stand for other texts."""
    write(tmp_path / "bomb", SCORED, growing)
    assert bomb.encode("the") == made_byte_level().encode("the"), "the process has what it has read"
    bomb.close()
    with pytest.raises(HeadraceError, match="restart the server"):
        bomb.encode("the")


# Loading.


def test_a_plain_tokenizer_is_loaded_here(tmp_path: Path) -> None:
    tokenizer = bounded_tokenizer.load(write(tmp_path / "plain", BYTE_LEVEL))
    assert tokenizer.process is None
    assert tokenizer.encode("the") == made_byte_level().encode("the")


def test_the_built_in_tokenizer_is_plain_and_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_tokenizer, "BoundedProcess", None)
    path = hub.resolve_tokenizer("builtin", None)
    assert bounded_tokenizer.load(path).process is None
    assert oddity(spec_of(tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))), 1) is None


def many_added(spec: Spec) -> None:
    first = spec["added_tokens"][0]
    spec["added_tokens"] += [{**first, "id": 10_000 + i, "content": f"<{i}>"} for i in range(50_000)]


def grows_while_loading(spec: Spec) -> None:
    growing(spec)
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": 9_999, "content": "q" * 999, "normalized": True})


BOMBS: dict[str, Change] = {
    "growth": grows_while_loading,
    "a regex": splitting("(?:" * 40_000 + "a" + ")?" * 40_000),
    "a long token": lambda spec: spec["model"]["vocab"].update({"x" * 10**6: 5_000}),
    "a far id": lambda spec: spec["model"]["vocab"].update({"far": 2**31}),
    "a growing decoder": lambda spec: spec.update(decoder={"type": "Sequence", "decoders": [Q16] * 5}),
    "a decoder of many steps": lambda spec: spec.update(
        decoder={"type": "Sequence", "decoders": [{"type": "Fuse"}] * 100_000}
    ),
    "a decoder that strips": lambda spec: spec.update(
        decoder={"type": "Strip", "content": "x", "start": 2**60, "stop": 0}
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_S_28_what_takes_too_much_to_load_is_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bomb", BYTE_LEVEL, BOMBS[name])
    with pytest.raises(CheckpointError) as caught:
        bounded_tokenizer.load(path)
    assert any(word in str(caught.value) for word in ("can not be", "a token", "a decoder")), caught.value


def test_S_28_loading_takes_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "slow", BYTE_LEVEL, many_added)
    monkeypatch.setenv("LOAD_SECONDS", "0.02")
    with pytest.raises(CheckpointError, match="can not be loaded with 20 s of processor time and 2,048 MiB of memory"):
        bounded_tokenizer.load(path)
    monkeypatch.delenv("LOAD_SECONDS")
    assert bounded_tokenizer.load(path).process is None, "the control"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_S_28_a_deep_file_is_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "deep", BYTE_LEVEL)
    (path / name).write_text('{"normalizer":' * 10**6)
    with pytest.raises(CheckpointError):
        bounded_tokenizer.load(path)
