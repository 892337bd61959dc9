"""A grammar of a text, written for the text in a JSON string: both take the same texts."""

from __future__ import annotations

import json

import llguidance
import pytest

from headrace.grammar import tags
from headrace.grammar.json_text import COMMON, GrammarError, rules_in_json
from headrace.protocol.errors import RequestError

TOKENIZER = llguidance.LLTokenizer("byte")
PATCH = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF  // one line
# names
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""
SUMS = 'start: expr\nexpr: term (SP ADD SP term)* -> add\n| term\nterm: INT\nSP: " "\nADD: "+"\n%import common.INT\n'
DATE = r"start: /(?P<month>May|June)\s+(?P<day>\d{1,2})(?:st|nd|rd|th)?/"
QUERY = r"""%import common (WS, CNAME)
%ignore WS
?start: "select"i _item ("," _item)* ["from" "a".."c"]
_item: CNAME | QUOTED
QUOTED: /"(\\.|[^"\\])*"/
"""
CASES = [
    (PATCH, ['*** Begin Patch\n*** Add File: a "é\\b\n+x "q"\n+\t\\n\n*** End Patch\n',
             "*** Begin Patch\n*** Delete File: a\n*** End Patch"],
     ["*** Begin Patch\n*** Delete File: \n*** End Patch", "*** Begin Patch\n*** End Patch",
      "*** Begin Patch\n*** Delete File: a\n*** End Patch\nmore"]),
    (SUMS, ["4 + 4", "17"], ["4 + x", "4+4", ""]),
    (DATE, ["May 3rd", "June\n\t 30"], ["May 333", "Mai 3", "May3"]),
    (QUERY, ["SELECT a", 'select a , "b\\"\n",c\n FROM b'.replace("FROM", "from"), "select a"],
     ["SEL ECT a", "select", "select a from d"]),
    ("start: LINE~1..2\nLINE: /[^\\n]+/ NL\nNL: \"\\n\"", ["a\"\nb\n", "\\\n"], ["\n", "a\nb\nc\n"]),
    ('start: /a"i/i "B\\n"i /[A-Z\\/]{2}x?|y/', ['A"Ib\n/Z', 'a"iB\ny'], ['a"ix', 'a"ib\nz']),
    ("start: (.|\\n)*".replace("(", "/(").replace("*", "*/"), ["", 'all\n"\\\x01é/ of it'], []),
]  # fmt: skip


def takes(lark: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = TOKENIZER.tokenize_bytes(text.encode())
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


def in_json(grammar: str) -> str:
    parts = [{"type": "const_string", "value": '{"input": "'}, {"type": "json_text", "grammar": grammar}]
    form = {"type": "sequence", "elements": [*parts, {"type": "const_string", "value": '"}'}]}
    return tags.lark(form, lambda schema: "", "field")


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES)
def test_the_text_in_json_follows_the_grammar(grammar: str, good: list[str], bad: list[str]) -> None:
    lark = in_json(grammar)
    for text in [*good, *bad]:
        # llguidance takes the text by the grammar itself: the other judge.
        assert takes(grammar, text) == (text in good), text
        assert takes(lark, json.dumps({"input": text}, ensure_ascii=False)) == (text in good), text


def test_control_without_escapes_the_text_is_no_json() -> None:
    lark = in_json(PATCH)
    assert not takes(lark, '{"input": "*** Begin Patch\n*** Delete File: a\n*** End Patch"}')


def test_common_terminals_are_those_of_the_grammar_engine() -> None:
    texts = ["1", "-1", "1.5", ".5", "1e9", "a", "B", "aB", "_a1", " ", "\t\n", "\r", "\n", "\r\n\n", '"a\\"b"', "f",
             "#x", "//x", "--x", "", "1a", '"', "9."]  # fmt: skip
    for name in COMMON:
        ours, theirs = (f"{line}\nstart: T" for line in (f"T: {COMMON[name]}", f"%import common.{name} -> T"))
        assert [takes(ours, text) for text in texts] == [takes(theirs, text) for text in texts], name


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ('x: "a"', "start"),
        ("start: x\nx: <a>", "x: '<a>'"),
        ('start: x\nx: "a" & "b"', "x: "),
        ("start: x\nx: /a(?=b)/", r"x: the group '\(\?=b\)'"),
        ("start: /[[:alpha:]]/", "start: "),
        (r"start: /\bx/", "start: "),
        ("start: /(a/", "start: a bracket"),
        ("start: /a)/", "start: the bracket"),
        ("start: y", "start: y is not defined"),
        ('start.2: "a"', "start: priorities"),
        ('start: "a"\nstart: "b"', "start is defined twice"),
        ("start: %json {}", "start: %json"),
        ('%import python.X\nstart: "a"', "%import python.X"),
        ('%import common.X\nstart: "a"', "common.X"),
        ('start: "a', "start: "),
    ],
)
def test_what_can_not_be_written_is_refused_by_its_rule(grammar: str, named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        rules_in_json(grammar, "t")
    with pytest.raises(RequestError, match="Lark grammar"):
        in_json(grammar)
