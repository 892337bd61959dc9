"""Common formats of chats by name: held against the templates of the models that they are of."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.protocol.params import SamplingParams
from headrace.text.named_templates import FORMS, source, template_of, with_ends
from headrace.text.templates import ChatTemplate

PLAIN = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "Who are you"},
]
WITH_SYSTEM = [{"role": "system", "content": "Be kind"}, *PLAIN]

# Templates of models that write the same for both conversations.
WHOLE = {
    "chatml": "Qwen3-Instruct", "gemma": "gemma-3-it", "hunyuan-dense": "Hy-MT2-7B",
    "llama3": "llama-3.2-vision-instruct", "minicpm": "minicpm-2b-sft-bf16", "phi3": "phi-3-mini-4k-instruct",
    "seed_oss": "seed-oss",
}  # fmt: skip
# And of those that know no system message, or add one of their own.
WITHOUT_SYSTEM = {
    "deepseek2": "deepseek-chat", "deepseek3": "deepseek-v3-0324", "mistral-v1": "mistral-instruct-v0.1",
    "mistral-v3": "mistral-instruct-v0.3", "orion": "orion-chat",
}  # fmt: skip
# In files of their own.
FILES = {
    "granite": "chat_templates/granite-3.0-instruct.jinja",
    "mistral-v7-tekken": "mistral/v7.jinja",
    "mistral-v3-tekken": "mistral/v3.jinja",
}


def written(name: str, messages: list[dict[str, str]]) -> str:
    return ChatTemplate({"default": source(FORMS[name], has_bos=False)}, {}).render(messages)


def of_model(template: str, messages: list[dict[str, str]]) -> str:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    text = ChatTemplate({"default": template}, special).render(messages)
    return text.removeprefix("<s>").removeprefix("<｜begin▁of▁sentence｜>")


@pytest.mark.parametrize("name", [*WHOLE, *WITHOUT_SYSTEM])
def test_a_format_is_that_of_its_models(shared_data: Path, name: str) -> None:
    rows = json.loads((shared_data / "templates" / "families.json").read_text())
    row = rows[(WHOLE | WITHOUT_SYSTEM)[name]]
    for messages in (PLAIN, WITH_SYSTEM) if name in WHOLE else (PLAIN,):
        assert written(name, messages) == of_model(row["chat_template"], messages)


@pytest.mark.parametrize("name", [*WHOLE, *WITHOUT_SYSTEM])
def test_a_format_ends_where_its_models_stop(shared_data: Path, name: str) -> None:
    rows = json.loads((shared_data / "templates" / "families.json").read_text())
    stops = rows[(WHOLE | WITHOUT_SYSTEM)[name]]["stop"]
    assert stops is None or set(FORMS[name].marks) <= set(stops)


@pytest.mark.parametrize("name", FILES)
def test_a_format_is_that_of_a_file(shared_data: Path, name: str) -> None:
    template = (shared_data / "templates" / FILES[name]).read_text()
    assert written(name, PLAIN) == of_model(template, PLAIN)


def test_another_format_is_seen(shared_data: Path) -> None:
    rows = json.loads((shared_data / "templates" / "families.json").read_text())
    assert written("phi4", PLAIN) != of_model(rows["phi-3-mini-4k-instruct"]["chat_template"], PLAIN)


@pytest.mark.parametrize("name", FORMS)
def test_each_format_has_every_text_and_opens_an_answer(name: str) -> None:
    text = written(name, WITH_SYSTEM)
    places = [text.find(message["content"]) for message in WITH_SYSTEM]
    assert places == sorted(places)
    assert places[0] >= 0
    assert text.endswith(FORMS[name].assistant[0] if FORMS[name].opening is None else FORMS[name].opening or "")
    late = written(name, [*PLAIN, {"role": "system", "content": "Be brief"}])
    assert "Be brief" in late, "a system message at the end is not lost"
    assert written(name, [*PLAIN, {"role": "tool", "content": "18 degrees"}]).count("18 degrees") == 1


def tokenizer(special: dict[str, int], templates: dict[str, str] | None = None, first: int = 5) -> Any:
    return SimpleNamespace(
        begin_of_chats="",
        chat_templates=templates or {},
        chat_template=(templates or {}).get("default"),
        special_tokens={"bos_token": "<s>"},
        encode=lambda text, add_special_tokens: [first, 9],
        token_to_id=lambda text: special.get(text),
        is_special=lambda token_id: token_id < 100,
    )


def test_the_first_token_is_written_where_the_tokenizer_adds_it() -> None:
    assert template_of(tokenizer({"<s>": 5}), "chatml").render(PLAIN).startswith("<s><|im_start|>user")
    assert template_of(tokenizer({"<s>": 6}), "chatml").render(PLAIN).startswith("<|im_start|>user")


def test_an_answer_ends_at_the_mark_as_a_token_or_as_text() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    as_token, as_word, as_text = (tokenizer(each) for each in ({"<|im_end|>": 7}, {"<|im_end|>": 700}, {}))
    ended = with_ends(params, template_of(as_token, "chatml"), as_token)
    assert (ended.stop, ended.stop_token_ids) == (["a"], [1, 7])
    for other in (as_word, as_text):
        ended = with_ends(params, template_of(other, "chatml"), other)
        assert (ended.stop, ended.stop_token_ids) == (["a", "<|im_end|>"], [1])
    default_tokenizer = tokenizer({}, {"default": "{{ messages }}"})
    assert with_ends(params, template_of(default_tokenizer), default_tokenizer) == params


def test_a_template_for_tools_alone_stays() -> None:
    template = template_of(tokenizer({}, {"tool_use": "tools: {{ tools[0].function.name }}"}))
    assert template.render(PLAIN).startswith("<|im_start|>user")
    tool = {"type": "function", "function": {"name": "f", "description": "F", "parameters": {"type": "object"}}}
    assert template.render(PLAIN, [tool]) == "tools: f"


def test_a_file_and_a_source_are_taken(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("x{{ messages[0].content }}")
    assert template_of(tokenizer({}), str(tmp_path / "t.jinja")).render(PLAIN) == "xHello"
    assert template_of(tokenizer({}), "y{{ messages[0].content }}").render(PLAIN) == "yHello"
