"""Texts in each format, and what they are: calls or none."""

from __future__ import annotations

from typing import Any

from headrace.text.tools.parser import HOLD

SCHEMAS: dict[str, Any] = {
    "f": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": ["object", "null"]}}},
}
LONG = "y" * (HOLD + 50)
DS = "<｜tool▁calls▁begin｜>"
M3 = "]<]minimax[>["
CALL, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

# (format, text, content, calls)
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    (
        "hermes",
        'Sure.\n\n<tool_call>{"arguments": {"x": [1.50, "\\u00e9\\n"]}, "name": "a.b"}</tool_call>\n'
        '<tool_call>{"name":"g","arguments":{}}</tool_call>\n',
        "Sure.",
        [("a.b", '{"x": [1.50, "\\u00e9\\n"]}'), ("g", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call> Done.', "Done.", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", "{}")]),
    ("qwen3_coder", "plain text  \n", "plain text  \n", []),
    (
        "qwen3_coder",
        'ok\n<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=s>\n12\n </parameter> "é\n'
        "</parameter>\n<parameter=o>\nNone\n</parameter>\n</function>\n</tool_call>",
        'ok\n<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=s>\n12\n </parameter> "é\n'
        "</parameter>\n<parameter=o>\nNone\n</parameter>\n</function>\n</tool_call>",
        [],
    ),
    (
        "qwen3_coder",
        'ok\n<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=s>\n12\n "é"\n\n</parameter>\n'
        "<parameter=o>\nNone\n</parameter>\n</function>\n</tool_call>\n<tool_call><function=g></function></tool_call>",
        "ok",
        [("f", '{"a": 12, "s": "12\\n \\"é\\"\\n", "o": null}'), ("g", "{}")],
    ),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("llama3_json", 'Hm. <|python_tag|>{"name": "f", "parameters": {"a": 1}}', "Hm.", [("f", '{"a": 1}')]),
    ("llama3_json", '<|python_tag|>search.call(query="x, (y)")', "", [("search", '{"query": "x, (y)"}')]),
    ("llama3_json", "<|python_tag|>import os", "<|python_tag|>import os", []),
    ("llama3_json", '{"hello": [1, 2]}', '{"hello": [1, 2]}', []),
    # Llama 4, by its own template: the text before a call stands between marks.
    ("llama3_json", '<|python_start|><|python_end|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3_json", 'Hm.<|python_end|>{"name": "f", "parameters": {"a": 1}}', "Hm.", [("f", '{"a": 1}')]),
    ("llama3_json", 'Use {"name": "f"}', 'Use {"name": "f"}', []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}, "id": "123456789"}]',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("mistral", 'A[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', "A", [("f", '{"a": 1}'), ("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    # vLLM's and SGLang's templates of Phi-4-mini, which need no closing mark; llama.cpp's, which has no list.
    ("phi4_mini_json", 'functools[{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    ("phi4_mini_json", 'functools[{"name": "f", "arguments": {}}] Done.', "Done.", [("f", "{}")]),
    (
        "phi4_mini_json",
        '<|tool_call|>{"name": "f", "arguments": {}}<|/tool_call|><|tool_call|>{"name": "g"}<|/tool_call|>',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    (
        "deepseek_v3",
        f'x{DS}{CALL}function{SEP}f\n```json\n{{"a": 1}}\n```{END}\n{CALL}function{SEP}g\n```json\n{{}}\n```{END}'
        "<｜tool▁calls▁end｜>",
        "x",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("deepseek_v3", f'{DS}{CALL}f{SEP}{{"a": 1}}{END}<｜tool▁calls▁end｜>', "", [("f", '{"a": 1}')]),
    (
        "pythonic",
        '[f.g(a=1, b=\'x "\\n\', c=[1, {"k": None}], d=(-1.5, True)), h()]',
        "",
        [("f.g", '{"a": 1, "b": "x \\"\\n", "c": [1, {"k": null}], "d": [-1.5, true]}'), ("h", "{}")],
    ),
    ("pythonic", '<|python_start|>[f(a="]")]<|python_end|>', "", [("f", '{"a": "]"}')]),
    ("pythonic", "[f(a={\"b\": true}, c='''a'b''')]", "", [("f", '{"a": {"b": true}, "c": "a\'b"}')]),
    ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    (
        "glm45",
        "Ok<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n<arg_value>hi\n"
        "</arg_value>\n</tool_call>",
        "Ok",
        [("f", '{"a": 1, "s": "hi\\n"}')],
    ),
    (
        "firefunction",
        'Sure functools[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "Sure",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "functionary_v31",
        '<function=f>{"a": 1}</function><function=g>{}</function>',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "command_r7b",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
        '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "muse_glimmer",
        'Ok\n<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="a">1</atem:parameter>\n'
        '<atem:parameter name="s"> x\n</atem:parameter>\n</atem:invoke>\n<atem:invoke name="g">\n</atem:invoke>\n'
        "</atem:function_calls>",
        "Ok",
        [("f", '{"a": 1, "s": " x\\n"}'), ("g", "{}")],
    ),
    (
        "gemma4",
        'Ok<|tool_call>call:f.g{a:-1.5,b:<|"|>say "x", {y}<|"|>,c:[true,<|"|>z w<|"|>,{k:null}],d:{e:{},f-g:word}}'
        "<tool_call|><|tool_call>call:h{}<tool_call|>",
        "Ok",
        [
            (
                "f.g",
                '{"a": -1.5, "b": "say \\"x\\", {y}", "c": [true, "z w", {"k": null}], "d": {"e": {}, "f-g": "word"}}',
            ),
            ("h", "{}"),
        ],
    ),
    ("gemma4", '<|tool_call>call:f { "a" : {"b": "\\n"} , } <tool_call|>', "", [("f", '{"a": {"b": "\\n"}}')]),
    ("gemma4", "<|tool_call>call:f{a:1,a:2}<tool_call|>", "<|tool_call>call:f{a:1,a:2}<tool_call|>", []),
    ("gemma4", "<|tool_call>call:f{a:[1}<tool_call|>", "<|tool_call>call:f{a:[1}<tool_call|>", []),
    ("gemma4", "<|tool_call>call:f{}<tool_", "", [("f", "{}")]),
    (
        "functionary_v32",
        '>>>all\nFirst\n>>>f\n{"a": 1}>>>g.h\n{}>>>all\nThen >>> x = 1',
        "First\n\nThen >>> x = 1",
        [("f", '{"a": 1}'), ("g.h", "{}")],
    ),
    ("functionary_v32", '>>>f {"a": 1', '>>>f {"a": 1', []),
    (
        "lfm2",
        '<|tool_call_start|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]<|tool_call_end|>Ok',
        "Ok",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[f(a=1, s='x'), g()]<|tool_call_end|>",
        "",
        [("f", '{"a": 1, "s": "x"}'), ("g", "{}")],
    ),
    # A line break as it is, as the templates of LFM2.5 write it.
    ("lfm2", "<|tool_call_start|>[f(s='x\n\"y\"')]<|tool_call_end|>", "", [("f", '{"s": "x\\n\\"y\\""}')]),
    (
        "kimi_k2",
        'Ok<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'
        "<|tool_call_end|><|tool_call_begin|>functions.a.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "Ok",
        [("f", '{"a": 1}'), ("a.g", "{}")],
    ),
    (
        "minimax_m2",
        'Ok\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n<parameter name="s">x y'
        '</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        "Ok",
        [("f", '{"a": 1, "s": "x y"}'), ("g", "{}")],
    ),
    (
        "minimax_m3",
        f'{M3}<tool_call>\n{M3}<invoke name="f">{M3}<a>1{M3}</a>{M3}<s>1 < 2{M3}</s>{M3}<o>{M3}<k>'
        f"{M3}<item>1{M3}</item>{M3}<item>x{M3}</item>{M3}</k>{M3}</o>{M3}</invoke>\n"
        f'{M3}<invoke name="g">{M3}</invoke>\n{M3}</tool_call>Ok',
        "Ok",
        [("f", '{"a": 1, "s": "1 < 2", "o": {"k": [1, "x"]}}'), ("g", "{}")],
    ),
    (
        "nemotron_json",
        '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</TOOLCALL>',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("olmo3", "Ok<function_calls>f(a=1)\ng()\n</function_calls>", "Ok", [("f", '{"a": 1}'), ("g", "{}")]),
    (
        "hunyuan_a13b",
        '<tool_calls>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</tool_calls>',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "hy_v3",
        "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>a"
        "</arg_key:opensource>\n<arg_value:opensource>1</arg_value:opensource>\n</tool_call:opensource>\n"
        "<tool_call:opensource>g<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "hy_v3_plain",
        "<tool_calls><tool_call>f<tool_sep><arg_key>s</arg_key><arg_value>x</arg_value></tool_call></tool_calls>",
        "",
        [("f", '{"s": "x"}')],
    ),
    (
        "apertus",
        'Ok<|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>',
        "Ok",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("glm4", 'f\n{"a": 1}', "", [("f", '{"a": 1}')]),
    ("glm4", "f\nor not", "f\nor not", []),
    (
        "seed_oss",
        "Ok\n<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>\n<parameter=s> x</parameter>\n</function>\n"
        "</seed:tool_call>\n<seed:tool_call><function=g></function></seed:tool_call>",
        "Ok",
        [("f", '{"a": 1, "s": " x"}'), ("g", "{}")],
    ),
    (
        "deepseek_v32",
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">1'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="x" string="true">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "",
        [("f", '{"a": 1, "x": "1"}'), ("g", "{}")],
    ),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a">1</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "",
        [("f", '{"a": 1}')],
    ),
    (
        "phi4_mini_json",
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>Ok',
        "Ok",
        [("f", '{"a": 1}')],
    ),
    (
        "deepseek_v3",
        f'{DS} {CALL} {{"name": "f", "parameters": {{"a": 1}}}} {END} {CALL} {{"name": "g", "parameters": {{}}}} {END} '
        "<｜tool▁calls▁end｜>",
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "openai",
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|><|start|>assistant'
        "<|channel|>commentary to=functions.g<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>Ok",
        "Ok",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    # Cut in the closing mark: the call is whole.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}\n</', "", [("f", '{"a": 1}')]),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter></fun", "", [("f", '{"a": 1}')]),
    ("qwen3_coder", "<tool_call><function=f></function>\n</tool_c", "", [("f", "{}")]),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></", "", [("f", '{"a": 1}')]),
    ("pythonic", "<|python_start|>[f()]<|pyth", "", [("f", "{}")]),
    ("functionary_v31", '<function=f>{"a": 1}</func', "", [("f", '{"a": 1}')]),
    ("command_r7b", '<|START_ACTION|>[{"tool_name": "f"}]<|END', "", [("f", "{}")]),
    ("muse_glimmer", '<atem:function_calls><atem:invoke name="f"></atem:inv', "", [("f", "{}")]),
    # Nothing says of which type the arguments are.
    (
        "qwen3_coder",
        '<function=g><parameter=n>12</parameter><parameter=b>true</parameter><parameter=o>{"k": [1.5]}</parameter>'
        "<parameter=t>12 apples</parameter><parameter=w>True</parameter><parameter=e></parameter></function>",
        "",
        [("g", '{"n": 12, "b": true, "o": {"k": [1.5]}, "t": "12 apples", "w": "True", "e": ""}')],
    ),
]
# Texts that look like calls and are none, whole: every one of these is content, letter for letter.
ILL_FORMED = [
    ("hermes", 'a <tool_call>{"name": "f", "arguments": {"a": }}</tool_call> b'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "a"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f\\u0000"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "name": "g"}</tool_call>'),
    ("hermes", '  <tool_call>{"name": "f", "arguments": {"a": "line\nbreak"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {\'a\': 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argu'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 65 + "]" * 65 + "}}</tool_call>"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}'),
    ("mistral", "[TOOL_CALLS]f[ARGS][1]"),
    ("llama3_json", '{"name": "f", "parameters": [1]}'),
    ("granite", "<|tool_call|>[]"),
    ("deepseek_v3", f"{DS}{CALL}tool{SEP}f\n```json\n{{}}\n```{END}"),
    ("pythonic", "[f(a=b)]"),
    ("pythonic", "[f(a=1, a=2)]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a={1: 2})]"),
    ("pythonic", "[f(a=b'x')]"),
    ("pythonic", "[f(a=__import__('os'))]"),
    ("pythonic", "[f(a='\\ud800')]"),
    ("pythonic", "[f(a=1 + 2)]"),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=a>1</parameter></function></tool_call>",
    ),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1"),
    ("glm45", "<tool_call>f<arg_key>a</arg_key>1</tool_call>"),
    ("firefunction", "import functools"),
    ("firefunction", 'functools[{"name": "f", "arguments": [1]}]'),
    ("functionary_v31", "<function=f><parameter=a>1</parameter></function>"),
    ("functionary_v31", '<function=f>{"a": 1}</tool_call>'),
    ("command_r7b", '<|START_ACTION|>[{"name": "f", "parameters": {}}]<|END_ACTION|>'),
    ("muse_glimmer", '<atem:function_calls>\n<atem:invoke name="f">\nx</atem:invoke></atem:function_calls>'),
    # Cut where what comes next might have been another argument.
    ("qwen3_coder", "<function=f><parameter=a>1</parameter><"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_calls'),
]
