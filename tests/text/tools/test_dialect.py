"""Which format and which style of reasoning real chat templates show, and what is made of flags."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.server import write_tokenizer

from headrace.protocol.errors import RequestError
from headrace.serve.call.dialect import Dialect
from headrace.text import reasoning
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools import calls, formats
from headrace.text.tools.choice import ToolUse

FOUND = {
    "llama.cpp/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja": ("hermes", None),
    "llama.cpp/meta-llama-Llama-3.1-8B-Instruct.jinja": ("llama3_json", None),
    "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja": ("deepseek_v3", "qwen3"),
    "llama.cpp/llama-cpp-deepseek-r1.jinja": ("deepseek_v3", "qwen3"),
    "llama.cpp/google-gemma-2-2b-it.jinja": (None, None),
    "llama.cpp/meetkai-functionary-medium-v3.2.jinja": (None, None),
    "mistral/v1.jinja": (None, None),
    "mistral/v3.jinja": ("mistral", None),
    "mistral/v13.jinja": ("mistral", None),
    "ollama/qwen38_chat_template.jinja": ("qwen3_coder", "qwen3"),
    "ollama/nemotron3nano_chat_template.jinja2": ("qwen3_coder", "qwen3"),
    "ollama/laguna_v8_chat_template.jinja2": ("glm45", "qwen3"),
    "ollama/gemma4_e2b_chat_template.jinja2": (None, "gemma4"),
    "chat_templates/granite-3.0-instruct.jinja": ("granite", None),
    "chat_templates/chatml.jinja": (None, None),
}


@pytest.mark.parametrize(("name", "expected"), FOUND.items())
def test_found_in_real_templates(name: str, expected: tuple[str | None, str | None], shared_data: Path) -> None:
    source = (shared_data / "templates" / name).read_text(encoding="utf-8")
    dialect = Dialect.of(ChatTemplate({"default": source}, {}))
    assert (dialect.tools, dialect.reasoning) == expected
    assert dialect.shows_tools == ("tools" in source)


def test_flags_have_the_last_word() -> None:
    template = ChatTemplate({"default": "<tool_call> </think>"}, {})
    assert Dialect.of(template)[:3] == ("hermes", "qwen3", True)
    assert Dialect.of(template, None, "llama4_json", "olmo3")[:3] == ("llama3_json", "deepseek_r1", True)
    assert Dialect.of(template, None, "none", "none")[:3] == (None, None, False)
    assert Dialect.of(template, None, None, None, False)[:3] == ("hermes", "qwen3", False)
    with pytest.raises(RequestError, match="tool_call_parser"):
        Dialect.of(template, None, "hermess")
    with pytest.raises(RequestError, match="reasoning_parser"):
        Dialect.of(template, None, None, "qwen")


def test_marks_that_are_special_tokens_are_asked_for(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    plain = Dialect.of(None, tokenizer, "mistral", "mistral")
    use, no_use = (
        ToolUse.of([{"type": "function", "function": {"name": "f"}}], None, True),
        ToolUse.of(None, None, True),
    )
    assert not plain.needs_marks(use)
    special = plain._replace(token_ids={"[TOOL_CALLS]": 7})
    assert special.needs_marks(use)
    assert not special.needs_marks(no_use)
    assert plain._replace(token_ids={"[/THINK]": 7}).needs_marks(no_use)


@pytest.mark.parametrize(
    ("style", "prompt", "inside"),
    [
        ("qwen3", "<a><think>\n", True),
        ("qwen3", "<a><think>\n\n</think>\n\n", False),
        ("qwen3", "<a>", False),
        ("deepseek_r1", "<a>", True),
        ("deepseek_r1", "<a></think>", False),
        ("mistral", "[THINK]", True),
    ],
)
def test_where_an_answer_begins(style: str, prompt: str, inside: bool) -> None:
    assert reasoning.begins_inside(style, prompt) == inside
    before = reasoning.prefix(style, prompt, {})
    assert (before is None) == prompt.rstrip().endswith("</think>")


def test_all_names_of_formats_are_known() -> None:
    for name in (*formats.FORMATS, *formats.ALIASES):
        assert formats.format_name(name) in formats.FORMATS
    for name in (*reasoning.STYLES, *reasoning.ALIASES):
        assert reasoning.style_name(name) in reasoning.STYLES


def test_ids_of_calls() -> None:
    """Fresh ones; Mistral's templates take nine letters or digits and nothing else."""
    for name, text in (("hermes", '<tool_call>{"name": "f"}</tool_call>'), ("mistral", "[TOOL_CALLS]f[ARGS]{}")):
        made = {calls.new_parser(name, {}).feed(text, True)[0].id for _ in range(50)}  # type: ignore[union-attr]
        assert len(made) == 50
        assert all((len(one) == 9 and one.isalnum()) == (name == "mistral") for one in made)
