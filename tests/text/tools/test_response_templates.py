"""A tokenizer's own `response_template`: read as transformers reads it, whole or in pieces, in bounded time."""

from __future__ import annotations

import json
import logging
import random
from typing import Any

import pytest
from tests.support.server import write_tokenizer
from tests.text.test_chat_templates import SPECIAL

from headrace.grammar.backtracking import num_letters_in
from headrace.serve.call.dialect import Dialect
from headrace.text.outputs import MessageBuilder
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools.choice import ToolUse
from headrace.text.tools.response_templates import ResponseTemplate
from headrace.text.tools.response_values import MAX_LETTERS, check_cost
from headrace.text.tools.response_values import read as read_value
from headrace.text.tools.whole_parser import WholeForm, WholeParser

chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")

START = "<|im_start|>assistant\n"
FUNCTION = {"name": "{name}", "arguments": "{content}"}
JSON_CALLS: dict[str, Any] = {
    "start_anchor": START,
    "defaults": {"role": "assistant"},
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
    },
}
XML_CALLS: dict[str, Any] = {
    "start_anchor_pattern": r"<\|im_start\|>assist(?:ant|ent)\n",
    "fields": {
        "thinking": {"open": ["<think>", "<thinking>"], "close": ["</think>", "</thinking>"]},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
                "merge_duplicates": True,
            },
            "transform": {"type": "function", "function": FUNCTION},
        },
        "content": {"close": "<|im_end|>", "repeats": True, "join": "\n"},
    },
}
BARE_CALLS: dict[str, Any] = {
    "start_anchor": ["<|turn>model\n", START],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"function": FUNCTION},
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}
LISTS: dict[str, Any] = {
    "start_anchor": START,
    "fields": {
        "tool_calls": {
            "open": "[CALLS]",
            "close": "[/CALLS]",
            "content": "json",
            "transform": {"function": {"name": "{tool}", "arguments": "{with}"}},
            "transform_each": True,
        },
        "score": {"open": "<score>", "close_pattern": "(?=<)|$", "content": "kv-lines"},
        "content": {"open_pattern": "<answer>", "close": "</answer>", "content_args": {"strip": False}},
    },
}
TEMPLATES = {"json": JSON_CALLS, "xml": XML_CALLS, "bare": BARE_CALLS, "lists": LISTS}
CALL = {
    "json": '\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "xml": "\n<tool_call>\n<function=f>\n<parameter=a>\nx: y\n</parameter>\n</function>\n</tool_call>",
    "bare": '<|tool_call>call:f{a:<|"|>x: y<|"|>,b:2}<tool_call|>',
    "lists": '[CALLS][{"tool": "f", "with": {"a": [1]}}, {"tool": "g", "with": {}}][/CALLS]',
}
# Whole calls, and what calls, reasoning and content are made of.
WORDS: dict[str, list[str]] = {
    "json": [CALL["json"], "<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "\n", "{}", "so", "é "],
    "xml": [CALL["xml"], "<think>", "</thinking>", "<tool_call>\n<function=f>", "<parameter=a>", "</parameter>", "1\n"],
    "bare": [
        CALL["bare"],
        "<|channel>thought\n",
        "<channel|>",
        "<|tool_call>call:f",
        "<tool_call|>",
        "<eos>",
        "so",
        " ",
    ],
    "lists": [CALL["lists"], "[CALLS]", "[/CALLS]", "<score>", "a: 1\n", "<answer>", "</answer>", "so", "\n", "<"],
}
WORDS["xml"] += ["</function>\n</tool_call>", "so ", "<|im_end|>"]
PROMPTS = {
    "json": ["", f"<|im_start|>user\nHi\n{START}", f"{START}<think>\n", f"{START}<think>\n\n</think>\n\n"],
    "xml": ["", START, f"{START}<think>\n"],
    "bare": ["", "<|turn>model\n", "<|turn>model\n<|channel>thought\n"],
    "lists": ["", START, f"{START}[CALLS]["],
}


def read(parser: WholeParser, text: str, size: int | None = None, cut: bool = False) -> MessageBuilder:
    message = MessageBuilder()
    pieces = [text] if not size else [text[at : at + size] for at in range(0, len(text), size)]
    for piece in pieces:
        for part in parser.feed(piece, False):
            message.add(part)
    for part in parser.feed("", True, cut):
        message.add(part)
    return message


def plain(message: MessageBuilder) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = [(call["name"], json.loads(call["arguments"])) for call in message.calls]
    return message.content, message.reasoning, calls


def theirs(spec: dict[str, Any], prompt: str, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    message = chat_parsing.parse_response(text, spec, prefix=prompt)
    calls = [call["function"] for call in message.get("tool_calls", ())]
    reasoning = message.get("reasoning_content") or message.get("thinking") or ""
    return message.get("content", ""), reasoning, [(call["name"], call["arguments"]) for call in calls]


def answers(name: str, num: int) -> list[str]:
    draw = random.Random(name)
    return ["".join(draw.choices(WORDS[name], k=draw.randint(0, 9))) for _ in range(num)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_is_read_as_transformers_reads_it(name: str) -> None:
    spec = TEMPLATES[name]
    form = WholeForm(ResponseTemplate(spec), schemas={})
    num_calls = num_compared = 0
    for text in answers(name, 120):
        for prompt in PROMPTS[name]:
            whole = read(WholeParser(form, prompt), text)
            for size in (1, 3):
                assert plain(read(WholeParser(form, prompt), text, size)) == plain(whole)
            try:
                content, reasoning, calls = theirs(spec, prompt, text)
            except (ValueError, KeyError):
                # They refuse an answer with a call that is not well-formed; for us it is content.
                assert whole.content or not text.strip()
                continue
            if not content and not calls and whole.content == reasoning:
                # Reasoning that never ends is the answer.
                content = reasoning
            assert plain(whole) == (content, reasoning, calls), (prompt, text)
            num_calls += len(calls)
            num_compared += 1
    assert num_calls > 50
    assert num_compared > 100


def test_another_reading_is_noticed() -> None:
    other = JSON_CALLS | {"fields": JSON_CALLS["fields"] | {"content": {"close": "so"}}}
    form = WholeForm(ResponseTemplate(other), schemas={})
    texts = answers("json", 100)
    assert any(read(WholeParser(form), text).content != theirs(JSON_CALLS, "", "so")[0] for text in texts)
    assert plain(read(WholeParser(form), "and so on")) != theirs(JSON_CALLS, "", "and so on")


def test_arguments_have_the_types_of_the_tool() -> None:
    text = "<tool_call>\n<function=f>\n" + "".join(
        f"<parameter={key}>{value}</parameter>" for key, value in {"n": "7", "t": "7", "o": "null", "b": "true"}.items()
    )
    text += "</function></tool_call>"
    types = {
        "n": {"type": "integer"},
        "t": {"type": "string"},
        "o": {"type": ["integer", "null"]},
        "b": {"type": "boolean"},
    }
    schema = {"type": "object", "properties": types}
    fields = XML_CALLS["fields"]
    args = {"tag_pattern": fields["tool_calls"]["content_args"]["tag_pattern"]}
    spec = XML_CALLS | {"fields": fields | {"tool_calls": fields["tool_calls"] | {"content_args": args}}}
    message = read(WholeParser(WholeForm(ResponseTemplate(spec), schemas={"f": schema})), text)
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    [call] = chat_parsing.parse_response(text, spec, prefix="", tools=tools)["tool_calls"]
    assert plain(message)[2] == [("f", call["function"]["arguments"])]
    assert call["function"]["arguments"] == {"n": 7, "t": "7", "o": None, "b": True}


def test_what_differs_from_transformers() -> None:
    form = WholeForm(ResponseTemplate(XML_CALLS), frozenset({"<tool_call>", "</tool_call>"}), {})
    whole = CALL["xml"]
    # A call that a limit cut is never made of the arguments that it has; one that the model leaves open is.
    part = whole.removesuffix("</function>\n</tool_call>")
    assert plain(read(WholeParser(form), part, cut=True))[2] == []
    assert plain(read(WholeParser(form), part))[2] == theirs(XML_CALLS, "", part)[2] == [("f", {"a": "x: y"})]
    # Special tokens are no content, also where no call is made.
    none = read(WholeParser(form._replace(schemas=None)), f"So.{whole}")
    assert not none.calls
    assert "tool_call" not in none.content
    assert none.content.startswith("So.\n\n<function=f>")
    # What stands in the prompt is not said again, and a prompt without the anchor is no answer.
    assert read(WholeParser(form, f"{START}It is"), " so.").content == "so."
    assert read(WholeParser(form, "It is"), " so.").content == "so."
    # Of several calls the first is made, where the request says so.
    assert len(read(WholeParser(form._replace(single=True)), whole * 2).calls) == 1
    # Reasoning that the model never ends is the answer too; that which a limit cut is not.
    assert plain(read(WholeParser(form), "<think>So"))[:2] == ("So", "So")
    assert plain(read(WholeParser(form), "<think>So", cut=True))[:2] == ("", "So")


def test_half_a_character_is_sent_as_json_spells_it() -> None:
    form = WholeForm(ResponseTemplate(JSON_CALLS), schemas={})
    text = '<tool_call>{"name": "f", "arguments": {"a": "\\ud800", "b": NaN}}</tool_call>'
    assert not read(WholeParser(form), text).calls
    [call] = read(WholeParser(form), text.replace("NaN", "1")).calls
    assert call["arguments"].encode()
    assert json.loads(call["arguments"]) == {"a": "\ud800", "b": 1}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], "version 1"),
        ({"version": 2, "start_anchor": "a", "fields": {"content": {}}}, "version 1"),
        ({"start_anchor": "a", "fields": {}}, "1 to 64 fields"),
        ({"start_anchor": "a", "fields": {"content": {"opens": "b"}}}, "'content' is not an object with"),
        ({"start_anchor": "a", "fields": {"content": {}, "thinking": {}}}, "more than one field"),
        ({"fields": {"content": {}}}, "neither start_anchor nor"),
        ({"start_anchor": "", "fields": {"content": {}}}, "no text and no list"),
        ({"start_anchor": "a", "fields": {"content": {"content": "yaml"}}}, "'yaml' is not one of"),
        ({"start_anchor": "a", "fields": {"content": {"close_pattern": "("}}}, "not supported"),
        ({"start_anchor": "a", "fields": {"content": {"close_pattern": r"\p{L}"}}}, "not supported"),
        ({"start_anchor": "a", "fields": {"content": {"close_pattern": "(?P<name>x)"}}}, "has no transform"),
        ({"start_anchor": "a", "fields": {"content": {"transform": "so {content}"}}}, "among other text"),
        ({"start_anchor": "a", "fields": {"content": {"close_pattern": "(a*)*b"}}}, "takes too long"),
        (
            {"start_anchor": "a", "fields": {"a": {"content": "xml-inline", "content_args": {"tag_pattern": "a"}}}},
            "'key'",
        ),
    ],
)
def test_a_template_that_can_not_be_read_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResponseTemplate(spec)


def test_the_work_of_a_pattern_is_bounded() -> None:
    tag, call = (XML_CALLS["fields"]["tool_calls"][key] for key in ("content_args", "open_pattern"))
    long = f"<parameter=place>{'so it is. ' * 1_000}</parameter>\n" * 5 + "\n" * 40
    for pattern in (tag["tag_pattern"], call, r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "</function>\\s*</tool_call>"):
        assert num_letters_in(pattern, long, MAX_LETTERS) <= MAX_LETTERS
    # Ways that multiply: the text decides, not its length.
    for pattern, text in (
        (r"(?:a+)+b", "a" * 40),
        (r"a*a*a*a*a*a*b", "a" * 1000),
        (r"(a|aa)+b", "a" * 60),
        (r"<x>.*?.*?</x>", "<x>" * 5000),
        (r"(?i)a*b", "a"),
        (r"(?P<a>a*)(?P=a)", "a"),
    ):
        assert num_letters_in(pattern, text, MAX_LETTERS) > MAX_LETTERS
    assert num_letters_in(r"a*a*a*a*a*a*b", "b" * 1000, MAX_LETTERS) < 10_000

    # Each of several patterns may be searched, but not all, and the work for a part depends on its length.
    check_cost([r"<x>.*?</x>"], "<x>" * 2_000)
    with pytest.raises(ValueError, match="too long"):
        check_cost([r"<x>.*?</x>"] * 4, "<x>" * 2_000)
    with pytest.raises(ValueError, match="too long"):
        read_value("a" * 370, "xml-inline", {"tag_pattern": "(?P<key>a*)a*b"})
    assert read_value("aab", "xml-inline", {"tag_pattern": "(?P<key>a*)a*b"}) == {"aa": ""}

    spec = XML_CALLS | {"fields": {"content": {"close_pattern": "a*a*a*a*a*a*b"}}}
    form = WholeForm(ResponseTemplate(spec))
    assert read(WholeParser(form), "x a").content == "x a"
    assert read(WholeParser(form), "a" * 1000).content == "a" * 1000


QWEN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if tools %}{{ tools }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THINKING = QWEN + "{# <think> </think> #}"


def dialect(tmp_path: Any, spec: Any, source: str = THINKING, **named: Any) -> Dialect:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(config | {"response_template": spec}))
    return Dialect.of(ChatTemplate({"default": source}, SPECIAL), Tokenizer.load(tmp_path), **named)


def test_the_server_reads_with_it(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    use = ToolUse([], {"f": {}}, "auto", True)
    with caplog.at_level(logging.INFO, "headrace.server"):
        plain_dialect = dialect(tmp_path, XML_CALLS, QWEN)
    assert plain_dialect.response is not None
    assert "at their end" in caplog.text
    message = read(plain_dialect.parsers(use, START, False)(), f"<thinking>Hm.</thinking>So:{CALL['xml']}")
    assert plain(message) == ("So:", "Hm.", [("f", {"a": "x: y"})])
    # A grammar holds an answer to the form of our own tables, which read it then.
    enforced = read(plain_dialect.parsers(use, START, True)(), CALL["json"])
    assert plain(enforced)[2] == [("f", {"a": 1})]


def test_our_tables_read_where_they_read_the_same(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headrace.server"):
        alike = dialect(tmp_path, JSON_CALLS)
    assert (alike.tools, alike.reasoning, alike.response) == ("hermes", "qwen3", None)
    assert "read as the calls and the reasoning above" in caplog.text
    for change in (
        {"reasoning_content": {"open": "<think>", "close": "so"}},
        {"tool_calls": JSON_CALLS["fields"]["tool_calls"] | {"repeats": False}},
        {"content": {"close": "There"}},
    ):
        assert dialect(tmp_path, JSON_CALLS | {"fields": JSON_CALLS["fields"] | change}).response is not None


def test_a_named_parser_comes_first_and_a_bad_template_last(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headrace.server"):
        assert dialect(tmp_path, XML_CALLS, tool_call_parser="hermes").response is None
        assert "a parser is configured" in caplog.text
        assert dialect(tmp_path, {"fields": []}).response is None
    assert "response_template is ignored: it is not" in caplog.text or "ignored: fields" in caplog.text
