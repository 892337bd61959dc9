"""Which format and which style of reasoning real chat templates show, and what is made of flags."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tests.support.reading import tool_parser
from tests.support.server import write_tokenizer
from tests.text.test_chat_templates import SPECIAL, sources

from headrace.protocol.errors import HeadraceError, RequestError
from headrace.serve.call.dialect import FALLBACK, Dialect
from headrace.text import reasoning
from headrace.text.bounded import BoundedProcess
from headrace.text.outputs import MessageBuilder
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools import formats
from headrace.text.tools.answers import new_parser
from headrace.text.tools.choice import ToolUse
from headrace.text.tools.parser import AnswerForm
from headrace.text.traits import TOOL

# All templates of the data that name a format, as (format, style of reasoning); the others have neither.
FOUND = {
    "llama.cpp/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja": ("hermes", None),
    "llama.cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja": ("hermes", None),
    "llama.cpp/meta-llama-Llama-3.1-8B-Instruct.jinja": ("llama3_json", None),
    "llama.cpp/meta-llama-Llama-3.3-70B-Instruct.jinja": ("llama3_json", None),
    "index 24, llama3-instruct": ("llama3_json", None),
    "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja": ("deepseek_v3", "qwen3"),
    "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja": ("deepseek_v3", "qwen3"),
    "llama.cpp/llama-cpp-deepseek-r1.jinja": ("deepseek_v3", "qwen3"),
    "mistral/v2.jinja": ("mistral", None),
    "mistral/v3.jinja": ("mistral", None),
    "mistral/v7.jinja": ("mistral", None),
    "mistral/v13.jinja": ("mistral", None),
    "mistral/v15.jinja": ("mistral", None),
    "ollama/qwen38_chat_template.jinja": ("qwen3_coder", "qwen3"),
    "ollama/nemotron3nano_chat_template.jinja2": ("qwen3_coder", "qwen3"),
    "ollama/laguna_v2_chat_template.jinja2": ("glm45", "qwen3"),
    "ollama/laguna_v8_chat_template.jinja2": ("glm45", "qwen3"),
    "llama.cpp/meetkai-functionary-medium-v3.2.jinja": ("functionary_v32", None),
    "ollama/gemma4_31b_chat_template.jinja2": ("gemma4", "gemma4"),
    "ollama/gemma4_e2b_chat_template.jinja2": ("gemma4", "gemma4"),
    "chat_templates/granite-3.0-instruct.jinja": ("granite", None),
}
OF_UNKNOWN_FORM = {
    "llama.cpp/CohereForAI-c4ai-command-r-plus-tool_use.jinja",
}


def test_K17_every_template_has_its_format_or_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    num_named = 0
    for name, source in sources().items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, "headrace.server"):
            dialect = Dialect.of(ChatTemplate({"default": source}, SPECIAL))
        assert (dialect.tools, dialect.reasoning) == FOUND.get(name, (None, None)), name
        reason = "a form that is not known here" if name in OF_UNKNOWN_FORM else "shows no form of calls"
        assert (dialect.tools is None) == (
            f"chat template {'writes calls in ' * (name in OF_UNKNOWN_FORM)}{reason}" in caplog.text
        ), name
        num_named += dialect.tools is not None
    assert num_named == 21


LOOP = "{% for m in messages %}{{ '<' + m.role + '>' }}{{ m.content or '' }}"
FOR_CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
ENDS = "{% endfor %}</end>{% endfor %}"
LAST = "{{ ', ' if not loop.last }}"
# How each of the formats is written in templates, in short.
WRITTEN = {
    "hermes": '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>',
    "llama3_json": '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
    "granite": '<|tool_call|>[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]',
    # Functionary v3.1 and FireFunction v2 add the arguments as text.
    "functionary_v31": "{{ '<function=' + f.name + '>' + f.arguments + '</function>' }}",
    "functionary_v32": "{{ '\\n>>>' + f.name + '\\n' + f.arguments }}",
    "firefunction": "{{ ' functools[{\"name\": \"' + f.name + '\", \"arguments\": ' + f.arguments + '}]' }}",
    "command_r7b": '<|START_THINKING|><|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": '
    '"{{ f.name }}", "parameters": {{ f.arguments | tojson }}}\n]<|END_ACTION|>',
    "muse_glimmer": '<atem:function_calls>\n<atem:invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}'
    '<atem:parameter name="{{ k }}">{{ v }}</atem:parameter>\n{% endfor %}</atem:invoke>\n</atem:function_calls>',
    "qwen3_coder": "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "gemma4": '<|tool_call>call:{{ f.name }}{count:{{ f.arguments.count }},place:<|"|>{{ f.arguments.place }}<|"|>}'
    "<tool_call|>",
    "pythonic": "[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}" + LAST + "{% endfor %})]",
}


@pytest.mark.parametrize("sign", ["", "{# <|python_tag|> [TOOL_CALLS] <|tool_call|> #}"], ids=["", "other signs"])
@pytest.mark.parametrize("name", WRITTEN)
def test_K17_the_format_is_that_of_a_written_call(name: str, sign: str) -> None:
    source = sign + LOOP + FOR_CALLS + WRITTEN[name] + ENDS
    assert Dialect.of(ChatTemplate({"default": source}, {})).tools == name


NESTED = {
    "s": 'he said "x" {a}, [b]: c',
    "n": -1.5,
    "b": True,
    "z": None,
    "l": [1, "a b", {"q": False, "e": {}}],
    "i-x": "",
}


@pytest.mark.parametrize(
    "name",
    [
        "ollama/gemma4_31b_chat_template.jinja2",
        "ollama/gemma4_e2b_chat_template.jinja2",
        "llama.cpp/meetkai-functionary-medium-v3.2.jinja",
    ],
)
def test_K17_what_a_template_writes_for_calls_is_read_back(name: str) -> None:
    template = ChatTemplate({"default": sources()[name]}, SPECIAL)
    user = {"role": "user", "content": "Where?"}
    arguments = [json.dumps(each) if template.traits().text_arguments else each for each in (NESTED, {})]
    functions = [{"name": name, "arguments": each} for name, each in zip("fg", arguments, strict=True)]
    turn = {"role": "assistant", "tool_calls": [{"type": "function", "function": each} for each in functions]}
    text = template.render([user, turn])
    tools = Dialect.of(template).tools
    assert tools is not None
    message = MessageBuilder()
    for part in tool_parser(tools).feed(text, True):
        message.add(part)
    assert [(call["name"], json.loads(call["arguments"])) for call in message.calls] == [("f", NESTED), ("g", {})]


def test_a_call_in_no_format_is_none_whatever_the_signs(caplog: pytest.LogCaptureFixture) -> None:
    """The control: the format is not found by a word of the source if the template writes calls."""
    source = LOOP + FOR_CALLS + "{{ f.name }}: {{ f.arguments | tojson }}" + ENDS
    for sign in ("{# <tool_call> #}", "{# [TOOL_CALLS] #}"):
        assert Dialect.of(ChatTemplate({"default": sign + source}, {})).tools is None
    plain = "{# [TOOL_CALLS] #}" + LOOP + "{% endfor %}"
    assert Dialect.of(ChatTemplate({"default": "{{ tools | tojson }}" + plain}, {})).tools == "mistral"
    # Without a place for tools, the model is shown the plain form.
    assert Dialect.of(ChatTemplate({"default": plain}, {})).tools is None
    assert Dialect.of(ChatTemplate({"default": "{{ functions + datetime }} functools["}, {})).tools == "firefunction"


OWN_WAYS = {
    # Llama 4's own.
    "llama3_json": '<|python_start|><|python_end|>{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
    # vLLM's of Llama 4, which writes every argument as a text.
    "pythonic": '[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="{{ v }}"' + LAST + "{% endfor %})]",
    # vLLM's of Phi-4-mini, which describes a mark and writes none.
    "phi4_mini_json": '{# functools[{"name": ...}] <|end|> #}{"name": "{{ f.name }}", "arguments": '
    "{{ f.arguments | tojson }}}",
}


@pytest.mark.parametrize("name", OWN_WAYS)
def test_templates_that_write_calls_in_a_way_of_their_own(name: str) -> None:
    source = "{{ tools | tojson }}" + LOOP + FOR_CALLS + OWN_WAYS[name] + ENDS
    assert Dialect.of(ChatTemplate({"default": source}, {})).tools == name


def test_where_a_template_can_not_be_tried_out_the_signs_decide(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert Dialect.of(ChatTemplate({"rag": "[TOOL_CALLS]"}, {})).tools == "mistral"
    assert "can not be tried out" in caplog.text

    def fail(self: BoundedProcess, *job: object) -> None:
        raise HeadraceError("no process starts")

    monkeypatch.setattr(BoundedProcess, "run", fail)
    assert Dialect.of(ChatTemplate({"default": LOOP + FOR_CALLS + WRITTEN["hermes"] + ENDS}, {})).tools == "hermes"
    assert "no process starts" in caplog.text


def test_flags_have_the_last_word() -> None:
    template = ChatTemplate({"default": "<tool_call> </think>"}, {})
    assert Dialect.of(template)[:3] == ("hermes", "qwen3", True)
    assert Dialect.of(template, None, "llama4_json", "olmo3")[:3] == ("llama3_json", "deepseek_r1", True)
    assert Dialect.of(template, None, "hf", "hf") == Dialect.of(template)
    assert Dialect.of(template, None, "none", "none")[:3] == (None, None, False)
    assert Dialect.of(template, None, None, None, False)[:3] == ("hermes", "qwen3", False)
    with pytest.raises(RequestError, match="tool_call_parser"):
        Dialect.of(template, None, "hermess")
    with pytest.raises(RequestError, match="reasoning_parser"):
        Dialect.of(template, None, None, "qwen")


def test_calls_are_read_in_the_form_that_the_prompt_shows(shared_data: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where a template has no place for tools, the prompt shows a form. GLM-4-9B's source names tools all the same."""
    families = json.loads((shared_data / "templates" / "families.json").read_text(encoding="utf-8"))
    num_shown = 0
    for name, family in families.items():
        template = ChatTemplate({"default": family["chat_template"]}, SPECIAL)
        if template.traits().shows_tools:
            continue
        prompt = template.render([{"role": "user", "content": "Where?"}], tools=[TOOL])
        example = prompt.partition("in exactly this form:\n")[2].partition("\n\nWrite one such block")[0]
        message = MessageBuilder()
        form = formats.FORMATS[Dialect.of(template).tools or FALLBACK]
        for part in new_parser(AnswerForm(form)).feed(example, True):
            message.add(part)
        assert [call["name"] for call in message.calls] in (["find_place"], ["name of the function"]), name
        num_shown += 1
    assert num_shown >= 50
    glm = ChatTemplate({"default": families["glm4-chat"]["chat_template"]}, SPECIAL)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "headrace.server"):
        assert Dialect.of(glm, tool_call_parser="hermes").reads_shown
        assert "another form" not in caplog.text
        assert not Dialect.of(glm, tool_call_parser="glm4").reads_shown
        assert "tools: the chat template has no place for them" in caplog.text
    chat_template = ChatTemplate({"default": families["qwen3"]["chat_template"]}, SPECIAL)
    assert Dialect.of(chat_template, tool_call_parser="glm4").reads_shown


def test_marks_that_are_special_tokens_are_asked_for(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    plain = Dialect.of(None, tokenizer, "mistral", "mistral")
    use, no_use = (
        ToolUse.of([{"type": "function", "function": {"name": "f"}}], None, True),
        ToolUse.of(None, None, True),
    )
    assert not plain.marks(use)
    special = plain._replace(token_ids={"[TOOL_CALLS]": 7})
    assert special.marks(use)
    assert not special.marks(no_use)
    assert plain._replace(token_ids={"[/THINK]": 7}).marks(no_use)


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
    assert reasoning.begins_inside(reasoning.STYLES[style], prompt) == inside
    before = reasoning.prefix(style, prompt, {})
    assert (before is None) == prompt.rstrip().endswith("</think>")


def test_ids_of_calls() -> None:
    """Fresh ones; Mistral's templates take nine letters or digits and nothing else."""
    for name, text in (("hermes", '<tool_call>{"name": "f"}</tool_call>'), ("mistral", "[TOOL_CALLS]f[ARGS]{}")):
        ids = {new_parser(AnswerForm(formats.FORMATS[name])).feed(text, True)[0].id for _ in range(50)}  # type: ignore[union-attr]
        assert len(ids) == 50
        assert all((len(one) == 9 and one.isalnum()) == (name == "mistral") for one in ids)
