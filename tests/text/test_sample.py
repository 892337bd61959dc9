"""The sample on which a model is judged at load: in its own template, and plain where it has none."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from headrace import hub
from headrace.text import sample
from headrace.text.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The built-in model's folder, without its weights."""
    for path in hub.resolve("builtin").glob("*.json"):
        shutil.copy(path, tmp_path)
    return tmp_path


def text_of(folder: Path) -> str:
    tokenizer = Tokenizer.load(folder)
    return tokenizer.decode(sample.token_ids(folder), skip_special_tokens=False)


def set_template(folder: Path, template: str | None) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


def test_it_is_a_chat_in_the_model_s_own_template(folder: Path) -> None:
    text = text_of(folder)
    for role, words in sample.CHAT:
        assert f"<|{role}|>{words}" in text
    assert not text.endswith("<|assistant|>")
    set_template(folder, "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}")
    assert f"[user: {sample.CHAT[0][1]}]" in text_of(folder)


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no chat') }}"])
def test_without_a_template_that_takes_it_the_texts_are_plain(folder: Path, template: str | None) -> None:
    set_template(folder, template)
    assert "\n\n".join(words for _, words in sample.CHAT) in text_of(folder)
    assert "<|user|>" not in text_of(folder)


def test_without_a_tokenizer_there_is_none(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert sample.token_ids(folder) == []
    assert "judged on fixed tokens" in caplog.text
    (folder / "tokenizer.json").unlink()
    caplog.clear()
    assert sample.token_ids(folder) == []
    assert not caplog.text


def test_the_mark_tells_other_tokens_apart(folder: Path) -> None:
    marks = [sample.mark(folder)]
    assert sample.mark(folder) == marks[0]
    set_template(folder, "{{ messages }}")
    marks.append(sample.mark(folder))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    marks.append(sample.mark(folder))
    assert len(set(marks)) == len(marks)
    (folder / "model.safetensors").write_bytes(b"weights have a mark of their own")
    assert sample.mark(folder) == marks[-1]
