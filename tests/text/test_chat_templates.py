"""Chat templates: rendered as transformers renders them, as published renderings say, and with clear errors."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
from tests.support.tokenizers import data, loaded, made_byte_level

from headrace.protocol.errors import RequestError
from headrace.text.templates import ChatTemplate

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
USER = {"role": "user", "content": "Hello, how are you?"}
ANSWER = {"role": "assistant", "content": "I'm doing great. How can I help you today?"}
AGAIN = {"role": "user", "content": "I'd like to show off how chat templating works!"}
CONVERSATIONS = {
    "user": [USER],
    "user-assistant-user": [USER, ANSWER, AGAIN],
    "system-user-assistant-user": [SYSTEM, USER, ANSWER, AGAIN],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather & <more>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "123456789", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
    ],
}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "123456789", "content": '{"t": 20}'}
CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    **{name: (messages, None) for name, messages in CONVERSATIONS.items()},
    "with tools": ([SYSTEM, USER, ANSWER, AGAIN], [TOOL]),
    "tool result": ([USER, {**CALL, "content": ""}, RESULT], [TOOL]),
    "after a tool": ([USER, {**CALL, "content": ""}, RESULT, ANSWER, AGAIN], [TOOL]),
    "reasoning": ([USER, {**ANSWER, "reasoning_content": "hm"}, AGAIN], None),
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def rendered(source: str, messages: list[dict[str, Any]], special: dict[str, str] | None = None, **kwargs: Any) -> str:
    return ChatTemplate({"default": source}, SPECIAL if special is None else special).render(messages, **kwargs)


def sources() -> dict[str, str]:
    """Every template of the shared data, by file name or by place in the index."""
    root = data("templates")
    result = {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*.jinja*"))}
    for i, entry in enumerate(index()):
        result[f"index {i}, {entry['name']}"] = entry["template"]
    return result


def index() -> list[dict[str, str]]:
    entries: list[dict[str, str]] = json.loads(data("templates/ollama/index.json").read_text())
    return entries


def outcome(source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str | None:
    try:
        return rendered(source, messages, **kwargs)
    except RequestError:
        return None


def with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [dict(call) for call in message.get("tool_calls", [])]
    for call in calls:
        call["function"] = {
            **call["function"],
            "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
        }
    return {**message, "tool_calls": calls} if calls else message


def is_whole(text: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> bool:
    """Whether a prompt has the tools, every call, and every text but reasoning. Else a template has left it out."""
    words = ["Weather"] * bool(tools) + ["Zürich"] * any(message.get("tool_calls") for message in messages)
    for message in messages:
        content = message.get("content") or ""
        for part in [content] if isinstance(content, str) else [each["text"] for each in content]:
            # Templates put JSON into JSON.
            words += re.findall(r"\w+", part)
    return all(word in text for word in words)


@pytest.mark.parametrize("case", [*CASES, "continued"])
def test_every_template_renders_as_in_transformers(case: str) -> None:
    oracle = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    messages, tools = CASES.get(case, ([USER, ANSWER], None))
    same = 0
    for name, source in sources().items():
        for prompt in (False, True) if case in CASES else (False,):
            kwargs = {"add_generation_prompt": prompt, "continue_final_message": case == "continued"}
            got = outcome(source, messages, tools=tools, **kwargs)
            try:
                try:
                    expected = oracle([messages], tools=tools, chat_template=source, **SPECIAL, **kwargs)[0][0]
                except Exception:
                    # Ours takes templates that want the arguments as text, or that hand a generator to tojson.
                    text = [with_text_arguments(message) for message in messages]
                    listed = source.replace("| tojson(indent=2)", "| list | tojson(indent=2)")
                    expected = oracle([text], tools=tools, chat_template=listed, **SPECIAL, **kwargs)[0][0]
            except Exception:  # A template may raise whatever it likes. Then ours gets another form of it.
                assert got is not None, name
                continue
            if name.startswith("mistral/") and "&#34;" in expected:
                # Mistral's templates say |safe, after which jinja2 escapes what is added to the text. Here it does not.
                expected = html.unescape(expected)
            if got != expected and not is_whole(expected, messages, tools):
                assert got is not None
                assert is_whole(got, messages, tools), name
                continue
            assert got == expected, name
            same += 1
    assert same > 30


def test_control_another_setting_of_jinja_is_caught() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    plain = ImmutableSandboxedEnvironment()
    variables = {**SPECIAL, "messages": [USER], "tools": None, "add_generation_prompt": True}
    different = 0
    for entry in index():
        different += plain.from_string(entry["template"]).render(variables) != outcome(entry["template"], [USER])
    assert different > 0


# Where the Jinja template of the index and the published rendering (made by a Go template that is only matched to it)
# do not agree, and why. Everywhere BOS is left empty: the Go templates leave it to the tokenizer.
ONE, TWO, THREE = "user", "user-assistant-user", "system-user-assistant-user"
DEFAULT_SYSTEM = "the template puts a system message of its own where there is none"
EXCEPTIONS: dict[int, tuple[str, set[str]]] = {
    0: ("the template writes the system message bare, without its markers", {THREE}),
    7: (DEFAULT_SYSTEM, {ONE, TWO}),
    8: (DEFAULT_SYSTEM, {ONE, TWO}),
    10: ("spaces before [/INST] and none after it; no system role", {ONE, TWO, THREE}),
    12: ("no empty <<SYS>> block, and a space before </s>", {ONE, TWO, THREE}),
    13: ("the template writes <s> itself", {ONE, TWO, THREE}),
    14: ("spaces before [/INST] and none after it; no system role", {ONE, TWO, THREE}),
    17: (DEFAULT_SYSTEM, {ONE, TWO}),
    18: (DEFAULT_SYSTEM, {ONE, TWO}),
    19: (DEFAULT_SYSTEM + ", and single newlines between turns", {ONE, TWO, THREE}),
    20: ("the template writes </s> after an answer, and the system message without 'System:'", {TWO, THREE}),
    21: ("no system role", {THREE}),
    22: ("one newline after 'model', where the Go template writes two", {ONE, TWO, THREE}),
    24: ("the template writes the dates of its knowledge into a system message", {ONE, TWO, THREE}),
    26: (DEFAULT_SYSTEM + ", and takes none; </s> after an answer", {ONE, TWO, THREE}),
    28: ("no empty <<SYS>> block, and a space before </s>", {ONE, TWO, THREE}),
    32: ("the template puts a system message of its own before everything", {ONE, TWO, THREE}),
    35: ("the template writes no </s> and no newlines after an answer", {TWO, THREE}),
    36: ("the Go template closes a turn twice and adds a newline", {ONE, TWO, THREE}),
}


def test_published_renderings() -> None:
    agreed = 0
    for i, entry in enumerate(index()):
        directory = data("templates/ollama/rendered") / entry["name"]
        for name, messages in CONVERSATIONS.items():
            if not (directory / name).is_file():
                continue
            expected = (directory / name).read_text()
            got = [
                outcome(entry["template"], messages, special={**SPECIAL, "bos_token": ""}, add_generation_prompt=prompt)
                # Some templates open the answer always, some only when told to.
                for prompt in (True, False)
            ]
            reason, names = EXCEPTIONS.get(i, ("", set()))
            assert (expected in got) == (name not in names), f"index {i}, {name}: {reason or 'no exception is listed'}"
            agreed += expected in got
    assert agreed == 34


MISTRAL = {
    "v1": "tokenizers/mistral/tokenizer.model.v1",
    "v2": "tokenizers/mistral/mistral_instruct_tokenizer_240216.model.v2",
    "v3": "tokenizers/mistral/mistral_instruct_tokenizer_240323.model.v3",
}
# What the published prompt has that the published template can not write, by sample and version: (ours, theirs).
JSON_RESULT = ('"content":▁"{\\', '"content":▁{'), "results that are JSON are put in as objects, not as text"
MISTRAL_EXCEPTIONS = {
    ("no_tools", "v1"): ("[/INST]The", "[/INST]▁The", "an answer is encoded by itself, with a dummy prefix of its own"),
    ("get_weather_full", "v2"): (*JSON_RESULT[0], JSON_RESULT[1]),
    ("get_weather_full", "v3"): (*JSON_RESULT[0], JSON_RESULT[1]),
    ("get_weather_no_system_prompt", "v2"): (*JSON_RESULT[0], JSON_RESULT[1]),
    ("get_weather_no_system_prompt", "v3"): (*JSON_RESULT[0], JSON_RESULT[1]),
    ("parallel_calls", "v2"): ("][/TOOL_RESULTS][TOOL_RESULTS]▁[", ",▁", "results of parallel calls share one list"),
}


@pytest.mark.parametrize("version", MISTRAL)
@pytest.mark.parametrize("sample", ["no_tools", "get_weather_full", "get_weather_no_system_prompt", "parallel_calls"])
def test_mistral_samples(sample: str, version: str) -> None:
    directory = data("tokenizers/mistral/samples") / sample
    if not (directory / f"text_{version}.txt").exists():
        pytest.skip(f"{sample} has no {version}")
    tok = loaded(MISTRAL[version])
    request = json.loads((directory / "sample.json").read_text())
    source = data(f"templates/mistral/{version}.jinja").read_text()
    text = rendered(source, request["messages"], tok.special_tokens, tools=request["tools"])
    ids = tok.encode(text, add_special_tokens=False)
    spelled = "".join(tok.id_to_token(token_id) or "" for token_id in ids)
    # Some of the samples are written with plain spaces.
    expected = (directory / f"text_{version}.txt").read_text().replace(" ", "▁")
    expected_ids = json.loads((directory / f"tokens_{version}.json").read_text())["tokens"]
    exception = MISTRAL_EXCEPTIONS.get((sample, version))
    if exception is None:
        assert ids == expected_ids
        assert spelled == expected
        return
    ours, theirs, reason = exception
    at = next(i for i, (a, b) in enumerate(zip(spelled, expected, strict=False)) if a != b)
    start = max(0, at - len(ours))
    assert ours in spelled[start : at + len(ours)], reason
    assert theirs in expected[start : at + len(theirs)], reason


LISTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
ONLY_LISTS = "{% for m in messages %}{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endfor %}"
ONLY_TEXT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
NAMED_LISTS = "{% for m in messages %}{% set c = m.content %}{% for p in c %}[{{ p.text }}]{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "from_text", "from_parts"),
    [
        (ONLY_TEXT, "ab", "a\nb"),
        (ONLY_LISTS, "[ab]", "[a][b]"),
        (NAMED_LISTS, "[ab]", "[a][b]"),
        (LISTS, "ab", "[a][b]"),
    ],
)
def test_content_takes_the_form_that_the_template_reads(source: str, from_text: str, from_parts: str) -> None:
    assert rendered(source, [{"role": "user", "content": "ab"}]) == from_text
    parts = [{"type": "text", "text": "a"}, "b"]
    assert rendered(source, [{"role": "user", "content": parts}]) == from_parts


def test_tool_arguments_that_come_as_text_are_read() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments.city }}"
    call = {"function": {"name": "f", "arguments": '{"city": "Bern"}'}}
    assert rendered(source, [{"role": "assistant", "tool_calls": [call]}]) == "Bern"


def test_what_templates_see() -> None:
    source = "{{ bos_token }}{{ pad_token is defined }}{{ tools is none }}{{ documents is none }}{{ enable_thinking }}"
    assert rendered(source, [USER], {"bos_token": "<b>"}, enable_thinking=False) == "<b>FalseTrueTrueFalse"
    assert rendered("{{ {'a': '<é>'} | tojson }}", [USER]) == '{"a": "<é>"}'
    assert rendered("{% generation %}x{% endgeneration %}", [USER]) == "x"
    scoped = "{% set x=1 %}{% generation %}{{x}}{% set x=2 %}{{x}}{% endgeneration %}{{x}}"
    assert rendered(scoped, [USER]) == "121", "as in transformers, the block has a scope of its own"
    assert rendered("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", [USER]) == "01"
    assert len(rendered("{{ strftime_now('%Y-%m-%d') }}", [USER])) == 10


def test_a_second_template_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].function.name }}"}, {})
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[TOOL]) == "get_weather"


def test_the_template_of_a_tokenizer_or_another(tmp_path: Any) -> None:
    tok = made_byte_level()
    with pytest.raises(RequestError, match="the model has no chat template"):
        ChatTemplate.of(tok)
    assert ChatTemplate.of(tok, "{{ bos_token }}").render([USER]) == "<|begin|>"
    (tmp_path / "t.jinja").write_text("from a file")
    assert ChatTemplate.of(tok, str(tmp_path / "t.jinja")).render([USER]) == "from a file"
    with pytest.raises(RequestError, match="chat_template: 'nowhere' is not allowed"):
        ChatTemplate.of(tok, "nowhere")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: 0 is not allowed"),
        ([3], r"messages\[0\]: 3 is not allowed"),
        ([{"content": "x"}], r"messages\[0\]\.role: None"),
        ([{"role": "", "content": "x"}], r"messages\[0\]\.role: ''"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content: 3"),
        ([{"role": "user", "content": [3]}], r"messages\[0\]\.content\[0\]: 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\]\.content\[0\]\.type: 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]\.text: None"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"messages\[0\]\.tool_calls\[0\]"),
        ([{"role": "user", "content": "a\ud800"}], "plain JSON in Unicode"),
    ],
)
def test_messages_of_the_wrong_shape_are_refused(messages: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        rendered(ONLY_TEXT, messages)


def test_too_many_messages_are_refused() -> None:
    with pytest.raises(RequestError, match="messages: 4097 is not allowed"):
        rendered(ONLY_TEXT, [USER] * 4097)


def test_S_08_reserved_variables_are_refused() -> None:
    for name in ("messages", "bos_token", "chat_template", "tokenize"):
        with pytest.raises(RequestError, match=f"chat_template_kwargs: '{name}'"):
            ChatTemplate({"default": "x"}, SPECIAL).render([USER], **{name: "y"})  # type: ignore[arg-type]


def test_a_templates_own_error_reaches_the_client() -> None:
    with pytest.raises(RequestError, match=r"messages: \['user'\] is not allowed; .* it says: roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}", [USER])
    with pytest.raises(RequestError, match="expected token"):
        rendered("{{ a b }}", [USER])


def test_S_17_no_addresses_in_errors() -> None:
    with pytest.raises(RequestError, match=r"0x\.\.\.") as caught:
        rendered("{{ raise_exception('at ' ~ '0x7f00deadbeef') }}", [USER])
    assert "deadbeef" not in str(caught.value)


def test_continuing_the_last_message() -> None:
    source = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
    kwargs = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered(source, [USER, {"role": "assistant", "content": "So  "}], **kwargs).endswith("><So")
    parts = {"role": "assistant", "content": [{"type": "text", "text": "So"}]}
    assert rendered(LISTS, [parts], **kwargs) == "[So"
    with pytest.raises(RequestError, match="leaves the last message out"):
        rendered("x", [USER], **kwargs)
    with pytest.raises(RequestError, match="no text to go on from"):
        rendered(ONLY_TEXT, [CALL], **kwargs)
    with pytest.raises(RequestError, match="continue_final_message"):
        rendered(ONLY_TEXT, [USER], continue_final_message=True)


def test_the_callers_messages_are_left_as_they_were() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    before = json.dumps(messages)
    rendered(ONLY_TEXT, messages, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(messages) == before


def test_tools_under_the_name_of_smollm3() -> None:
    source = (
        "{% if xml_tools is defined %}{% for tool in xml_tools[:] %}{{ tool | string }}{% endfor %}{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate({"default": source}, SPECIAL)
    function = {"name": "find", "description": "Finds", "parameters": {"type": "object", "properties": {}}}
    user = [{"role": "user", "content": "Where?"}]
    assert template.traits().shows_tools
    rendering = template.rendering(user, [{"type": "function", "function": function}])
    assert rendering.text == f"{function}[user]Where?"
    assert rendering.changes == []
    assert template.render(user) == "[user]Where?"
    # A client's own list goes before.
    assert template.render(user, [{"type": "function", "function": function}], xml_tools=["mine"]) == "mine[user]Where?"
