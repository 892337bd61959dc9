"""llama.cpp's grammars: what each takes, character by character, and the tokens that one may name."""

from __future__ import annotations

import pytest

from headrace.grammar.compile import build_matcher, compile_grammar
from headrace.grammar.vocabulary import Vocabulary, make_tokenizer
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import RequestError

TOKENS = [bytes([i]) for i in range(256)] + [b"<|think|>", b"</think>", b"<eos>", b"<turn>"]
TOKENIZER = make_tokenizer(Vocabulary(TOKENS, [256, 257, 258, 259], [258, 259]))


def takes(grammar: str, answer: str | list[int]) -> bool:
    constraint = StructuredOutputs(grammar=grammar)
    matcher = build_matcher(TOKENIZER, compile_grammar(constraint), constraint)
    token_ids = list(answer.encode()) if isinstance(answer, str) else answer
    return all(matcher.consume_token(token_id) for token_id in token_ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (r'root ::= "\u00e9"', ["é"], ["e9", "\u0e9f"]),
        (r'root ::= "\u0041\u00410"', ["AA0"], ["A"]),
        (r'root ::= "\U0001F600"', ["😀"], ["1F600"]),
        (r'root ::= "\x41\xe9"', ["Aé"], ["A"]),
        (r'root ::= "\t\r\n\\\"\[\]"', ['\t\r\n\\"[]'], []),
        ("root ::= \"a\nb\"", ["a\nb"], ["ab"]),
        (r"root ::= [\u00e0-\u00ff]+", ["é", "àÿ"], ["e", "Ā"]),
        (r"root ::= [\U0001F600-\U0001F64F]", ["😀"], ["😐😐", "a"]),
        (r"root ::= [\]\-a]+", ["]-a"], ["b", "\\"]),
        (r"root ::= [a\-z]+", ["a-z"], ["b"]),
        ("root ::= [-a]+", ["-a"], ["b"]),
        ("root ::= [a-]+", ["-a"], ["b"]),
        (r"root ::= [a-c&&b~~^|/$.*]+", ["a&b~^|/$.*c"], ["d"]),
        (r"root ::= [^\n\]]*", ["a^é"], ["\n", "]"]),
        (r"root ::= [[x]", ["[", "x"], ["]"]),
        ("root ::= .", ["\n", "a", "😀"], ["", "aa"]),
        ('root ::= "." [.]', [".."], [".a"]),
        ('root ::= "a"{,3}', ["", "aaa"], ["aaaa"]),
        ('root ::= ("a" | "b"){ , 2 }', ["", "ab"], ["aba"]),
        ('root ::= "{,3}" "a"{2,}', ["{,3}aa"], ["{0,3}a"]),
        ('root ::= "a" # a comment "x" <[5]>\n', ["a"], ["ax"]),
        ('root ::= "#" x\nx ::= "<[5]>"', ["#<[5]>"], ["#"]),
        ('root ::= "token" [0-9]', ["token1"], ["token"]),
        ('root ::= a-b | fooBar\na-b ::= "x"\nfooBar ::= "y" root', ["x", "yx"], ["y"]),
    ],
)  # fmt: skip
def test_characters(grammar: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not takes(grammar, text)] == []
    assert [text for text in bad if takes(grammar, text)] == []


def test_tokens() -> None:
    think = "root ::= <[256]> !<[257]>* </think> answer\nanswer ::= [a-z]+"
    assert takes(think, [256, 97, 98, 257, 120])
    assert not takes(think, [256, 257, 257, 120])
    assert not takes(think, [97, 120])
    assert takes('root ::= <|think|>+ "a"', [256, 256, 97])
    assert not takes('root ::= <|think|>+ "a"', "<|think|>a")
    # A text that looks like a token is text.
    assert not takes('root ::= "<|think|>"', [256])


def test_any_other_token_is_none_that_ends_an_answer() -> None:
    assert takes("root ::= !<[256]>", [257])
    assert not any(takes('root ::= !<[256]> "a"', [token_id, 97]) for token_id in (256, 258, 259))


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (r'root ::= "\q"', r"escape \q"),
        (r'root ::= "\u12"', r"escape \u"),
        (r"root ::= [\u12]", r"escape \u"),
        (r'root ::= "\ud83d"', "half of a character"),
        ("root ::= !<|think|>", "with its id"),
        ("root ::= <nobody>", "unknown special token"),
        ("root ::= <[999]>", "999"),
        ('root ::= "a', "grammar in Lark's syntax or in GBNF"),
        ("root ::= x", "'x' not found"),
    ],
)
def test_mistakes_are_named(grammar: str, why: str) -> None:
    with pytest.raises(RequestError) as refusal:
        takes(grammar, "")
    assert why in refusal.value.bound
