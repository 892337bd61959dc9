"""/infill: the prompt of each family's marks, and the answer's end, over the fake engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.server import Live, inproc, write_tokenizer

from headrace.protocol.config import ServerConfig
from headrace.serve.apis.llama_server import infill
from headrace.text.tokenizer import Tokenizer

GAP = {"input_prefix": "def f(", "input_suffix": "): pass", "n_predict": 2}
MARKS = dict(zip(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), (1, 2, 3), strict=True))
FILES = {"<|repo_name|>": 4, "<|file_sep|>": 5}


def with_marks(folder: Path, marks: dict[str, int]) -> Tokenizer:
    """The tests' tokenizer with special tokens in the place of some bytes."""
    folder.mkdir()
    path = write_tokenizer(folder) / "tokenizer.json"
    file = json.loads(path.read_text())
    places = {token_id: token for token, token_id in file["model"]["vocab"].items()}
    for text, token_id in marks.items():
        del file["model"]["vocab"][places[token_id]]
        file["model"]["vocab"][text] = token_id
        file["added_tokens"].append(file["added_tokens"][0] | {"id": token_id, "content": text})
    path.write_text(json.dumps(file))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def filling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    tokenizer = with_marks(tmp_path_factory.mktemp("marks") / "t", MARKS | FILES)
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        yield live


def prompt_of(live: Live, **more: Any) -> str:
    reply = live.post("/infill", GAP | more)
    assert reply.status_code == 200, reply.text
    prompt: str = reply.json()["prompt"]
    return prompt


def test_the_prompt_has_the_files_and_then_the_gap(filling: Live) -> None:
    gap = "<|fim_prefix|>def f(a<|fim_suffix|>): pass<|fim_middle|>"
    head, tail = "<|repo_name|>myproject\n", "<|file_sep|>filename\n" + gap
    assert prompt_of(filling, prompt="a") == head + tail
    extra = [{"filename": "b.py", "text": "b = 1\n"}, {"text": "c"}]
    files = "<|file_sep|>b.py\nb = 1\n<|file_sep|>tmp\nc"
    assert prompt_of(filling, prompt="a", input_extra=extra) == head + files + tail


def test_files_that_do_not_fit_are_left_out(filling: Live) -> None:
    extra = [{"filename": "b.py", "text": "b" * 5000}, {"filename": "c.py", "text": "c"}]
    reply = filling.post("/infill", GAP | {"input_extra": extra}).json()
    assert reply["prompt"].startswith("<|file_sep|>c.py\nc<|file_sep|>")
    assert reply["warnings"] == ["input_extra: the first 2 parts do not fit the context, and are left out"]
    reply = filling.post("/infill", GAP | {"input_prefix": "x" * 5000}).json()
    assert reply["error"]["type"] == "exceed_context_size_error"


def test_a_mark_ends_the_answer(filling: Live, say: Any) -> None:
    say("a, b\x05and no more")
    assert filling.post("/infill", GAP | {"n_predict": 40}).json()["content"] == "a, b"
    assert filling.post("/completion", {"prompt": "x", "n_predict": 40}).json()["content"] != "a, b"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"input_prefix": 5}, "input_prefix"),
        ({"input_extra": [{"filename": "x"}]}, "input_extra[0].text"),
        ({"input_extra": [{"text": "x", "filename": 3}]}, "input_extra[0].filename"),
        ({"input_extra": [{"text": "x"}] * 65}, "input_extra"),
        ({"prompt": [1]}, "prompt"),
    ],
)
def test_refusals_name_the_field(filling: Live, more: dict[str, Any], field: str) -> None:
    reply = filling.post("/infill", GAP | more)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(field + ":")


def test_a_model_without_marks_is_refused(live: Live) -> None:
    reply = live.post("/infill", GAP)
    assert reply.status_code == 400
    assert "the model's vocabulary has no marks for a gap" in reply.json()["error"]["message"]


@pytest.mark.parametrize("names", infill.NAMES)
def test_each_familys_marks_are_found(tmp_path: Path, names: tuple[str, ...]) -> None:
    marks = {name: place for place, name in enumerate(names, 1) if name}
    result = infill.marks_of(with_marks(tmp_path / "t", marks))
    assert result is not None
    assert result[:3] == (1, 2, 3 if names[2] else None)
    # Control: without the suffix's mark there is none.
    assert infill.marks_of(with_marks(tmp_path / "u", {name: i for name, i in marks.items() if i != 2})) is None


def test_without_a_middle_the_suffix_comes_first(tmp_path: Path) -> None:
    tokenizer = with_marks(tmp_path / "t", {"[PREFIX]": 1, "[SUFFIX]": 2})
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        assert prompt_of(live) == "[SUFFIX]): pass[PREFIX]def f("
        extra = [{"filename": "b.py", "text": "b = 1"}]
        assert prompt_of(live, input_extra=extra).startswith("\n\n--- snippet ---\n\nb = 1[SUFFIX]")
