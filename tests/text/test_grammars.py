"""S-09: constraints that would take any time, memory or stack are refused where they can do no harm."""

# ruff: noqa: E501

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import hub
from headrace.engine.fair_worker import FairWorker
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.text import grammars
from headrace.text.grammars import GrammarChecker
from headrace.text.tokenizer import Tokenizer

# Regexes that blow up somewhere: in the parser, in the lexer's states, in time, or in backtracking engines.
REGEXES = [
    "(a+)+b", "(a|aa)+$", "(a|a?)+b", "(.*)*x", "([a-z]+)*\\d", "(x+x+)+y", "^(a?){60}a{60}$", "a{1000000}", "a{0,65535}",
    "((a{0,1000}){0,1000}){0,1000}", "(a{1,30000}){1,30000}", "[a-z]{1,50000}x", "(a|b)*a(a|b){24}", "(a|b)*a(a|b){60}",
    "(" * 2000 + ")" * 2000, "[" * 1000, "(?:" * 500 + "a" + ")*" * 500, "(" * 250 + "a" + ")+" * 250, "a" * 60000,
    "|".join(f"a{i}" for i in range(9000)), "(?=a)b", "(?<=a)b", "(a)\\1", "(?P<n>a)(?P=n)", "\\p{Greek}{1000}", "\\x{110000}",
    ".{60000}", "(.|\\n){0,60000}z", "\\w{1,9999}\\W{1,9999}", "[^a]{3000}[^b]{3000}", "(?i)(" + "straße|" * 3000 + ")",
    "\\d{1,5000}\\.\\d{1,5000}", "(ab?c?d?e?f?g?){500}", "((((a*)*)*)*)*b", "(.?){2000}a{2000}", "*", "+", "a**", "{", "a{2,1}",
]  # fmt: skip


def nested(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = {"type": "object", "properties": {"a": leaf}, "required": ["a"]}
    return leaf


SCHEMAS: list[Any] = [
    nested(20, {"type": "string"}), nested(28, {"enum": list(range(300))}),
    {"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 4} for i in range(60)} | {"d60": {}}, "$ref": "#/$defs/d0"},
    {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 4} for i in range(60)} | {"d60": {}}, "$ref": "#/$defs/d0"},
    {"$defs": {f"d{i}": {"not": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(900)} | {"d900": {}}, "$ref": "#/$defs/d0"},
    {"not": {"$ref": "#"}}, {"if": {"$ref": "#"}, "then": {"$ref": "#"}}, {"allOf": [{"$ref": "#"}]},
    {"enum": [str(i) for i in range(9000)]}, {"not": {"enum": [str(i) for i in range(6000)]}},
    {"not": {"enum": ["x" * i for i in range(300)]}}, {"not": {"enum": ["x" * 9000]}}, {"const": "y" * 60000},
    {"type": "array", "maxItems": 10**9, "items": {}}, {"type": "array", "minItems": 10**9}, {"minItems": 10**6, "type": "array"},
    {"type": "string", "maxLength": 10**9}, {"type": "string", "minLength": 10**6}, {"type": "string", "minLength": 2**63},
    {"type": "object", "maxProperties": 10**9}, {"type": "object", "minProperties": 10**6},
    {"type": "integer", "minimum": -(10**300), "maximum": 10**300}, {"type": "number", "multipleOf": 1e-300},
    {"type": "number", "multipleOf": 0}, {"not": {"multipleOf": 0}}, {"not": {"multipleOf": 1e-9}},
    {"anyOf": [{"type": "object", "properties": {f"p{i}": {}}, "required": [f"p{i}"]} for i in range(400)]},
    {"oneOf": [{"required": [f"p{i}"]} for i in range(40)]}, {"oneOf": [{"minimum": i} for i in range(200)]},
    {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(60)]},
    {"allOf": [{"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}] * 30},
    {"not": {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(9)]} for i in range(60)]}},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}},
    {"type": "object", "properties": {f"p{i}": {} for i in range(900)}, "required": [f"p{i}" for i in range(900)]},
    {"patternProperties": {f"^a{i}.*{i}$": {} for i in range(200)}}, {"patternProperties": {"(a+)+b": {}, "(a|aa)*c": {}}},
    {"propertyNames": {"pattern": "(a+)+b"}}, {"not": {"propertyNames": {"pattern": "(a{0,90}){0,90}"}}},
    {"dependencies": {f"p{i}": [f"p{i + 1}"] for i in range(40)}}, {"contains": {"contains": {"contains": {"contains": {}}}}},
    {"prefixItems": [{"type": "string"}] * 3000}, {"items": {"items": {"items": {"items": {"maxItems": 10**8}}}}},
    {"type": "string", "format": "x" * 50000}, {"type": ["string"] * 5000}, {"type": 3}, {"properties": 3}, {"enum": {}},
    {"required": {}}, {"allOf": {}}, {"anyOf": []}, {"oneOf": [3]}, {"not": 3}, {"$ref": 3}, {"pattern": 3}, {"minLength": "x"},
    {"minimum": "x"}, {"not": {"minimum": "x"}}, {"not": {"required": 3}}, {"not": {"enum": 3}}, {"not": {"type": 3}},
    {"not": {"minLength": None}}, {"if": 3, "then": 4}, {"dependencies": 3}, {"dependencies": {"a": 3}}, {"contains": 3},
    {"propertyNames": 3}, {"not": {"patternProperties": 3}}, {"not": {"properties": 3}}, {"not": {"items": 3}},
    {"not": {"contains": 3}}, {"oneOf": 3, "not": {}}, {"allOf": [{"not": {"multipleOf": "x"}}]}, {"enum": [1], "not": {"pattern": 3}},
]  # fmt: skip

GRAMMARS = [
    "start: start", "start: a\na: b\nb: a", "start: start start | \"x\"", 'start: a a a a a a a a\na: b b b b b b b b\nb: "x"*',
    "start: " + "(" * 3000 + '"a"' + ")" * 3000, "start: " + " | ".join(f'"{i}"' for i in range(8000)), 'start: "a"{100000}',
    "root ::= root root", "root ::= " + "(" * 2000 + '"a"' + ")" * 2000, 'root ::= "a"{1,100000}', "root ::= [^", "start:", "::=",
    "start: /" + "(a|" * 900 + "b" + ")" * 900 + "/", 'start: a\n' + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(900)),
    'start: %json {"type": "array", "minItems": 1000000}', "%import common.WORD\nstart: WORD", "start: @other", "start: <[99999999]>",
    'start: T\nT: /[ab]*a[ab]{30}/ & ~/(a|b)*b(a|b){30}/', "start[capture]: /.*/", "%ignore /.*/\nstart: \"a\"", "\x00", "é" * 9000,
]  # fmt: skip

TAGS = [
    '{"structures": [], "triggers": []}', '{"structures": 3, "triggers": ["a"]}', '{"structures": [{}], "triggers": ["a"]}',
    '{"structures": [{"begin": "a", "schema": {"$ref": "#"}, "end": ""}], "triggers": ["a"]}', "[]", "{}",
    '{"structures": [{"begin": "a", "schema": {"minItems": 1000000, "type": "array"}, "end": ""}], "triggers": ["a"]}',
]  # fmt: skip

HOSTILE = (
    [{"regex": each} for each in REGEXES]
    + [{"json": each} for each in SCHEMAS]
    + [{"grammar": each} for each in GRAMMARS]
    + [{"structural_tag": each} for each in TAGS]
    + [{"json": {"type": "string", "pattern": each}} for each in REGEXES]
    + [{"json": {}, "whitespace_pattern": each[:1000]} for each in REGEXES[:15]]
    + [{"choice": ["x" * 15] * 4096}, {"choice": [str(i) for i in range(4096)]}]
)


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    # A third of what a server gives keeps the test short.
    grammar_checker = GrammarChecker(Tokenizer.load(hub.resolve("builtin")), 2048, [1, 2], max_cpu_seconds=0.3)
    yield grammar_checker
    grammar_checker.close()


def test_S_09_hostile_constraints_are_taken_or_refused_and_nothing_else(checker: GrammarChecker) -> None:
    assert len(HOSTILE) >= 200
    refused = 0
    for fields in HOSTILE:
        start, text = time.monotonic(), ""
        try:
            checker.check(SamplingParams(structured_outputs=fields))  # type: ignore[arg-type]
        except RequestError as error:
            refused, text = refused + 1, str(error)
        assert len(text) < 2000, fields
        assert "0x" not in text
        # Processor time is bounded; the wall gets room for a machine under load.
        assert time.monotonic() - start < 20, fields
    assert refused > 60
    checker.check(SamplingParams(structured_outputs=StructuredOutputs(regex="still alive")))


def test_S_09_control_the_bound_on_time_is_what_stops_it() -> None:
    bomb = SamplingParams(structured_outputs=StructuredOutputs(regex="a{10000000}"))
    tokenizer = Tokenizer.load(hub.resolve("builtin"))
    short = GrammarChecker(tokenizer, 2048, [1], max_cpu_seconds=0.2)
    with pytest.raises(RequestError, match=r"more than 0\.2 s of processor time"):
        short.check(bomb)
    short.close()


def test_S_09_verdicts_are_kept_and_bounded(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_VERDICTS", 20)
    process = checker.process
    checker = GrammarChecker(Tokenizer.load(hub.resolve("builtin")), 2048, [1, 2])
    checker.process = process
    requests = 0
    right = process.run

    def ask(job: object, reply_type: type[Any]) -> Any:
        nonlocal requests
        requests += 1
        return right(job, reply_type)

    monkeypatch.setattr(process, "run", ask)
    for _ in range(3):
        with pytest.raises(RequestError):
            checker.check(SamplingParams(structured_outputs=StructuredOutputs(regex="(?=again)")))
        checker.check(SamplingParams(structured_outputs=StructuredOutputs(regex="again")))
    assert requests == 2
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unique = [SamplingParams(structured_outputs=StructuredOutputs(json={"const": f"unique {i}"})) for i in range(400)]
    for params in unique:
        checker.check(params)
    assert requests == 402
    assert [checker.is_known(params) for params in unique] == [False] * 380 + [True] * 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 * 1024


def test_what_nobody_checked_is_not_followed(checker: GrammarChecker) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="never seen"))
    with pytest.raises(HeadraceError, match="not checked"):
        checker.require(params)
    checker.check(params)
    checker.require(params)


def test_engines_that_can_not_follow_a_constraint_say_so(checker: GrammarChecker) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    tokenizer = Tokenizer.load(hub.resolve("builtin"))
    with pytest.raises(RequestError, match="without a tokenizer"):
        GrammarChecker(None, 2048, [1]).check(params)
    with pytest.raises(RequestError, match="no end-of-text token"):
        GrammarChecker(tokenizer, 2048, []).check(params)
    with pytest.raises(RequestError, match="ignore_eos"):
        checker.check(SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputs(regex="a")))


def test_the_event_loop_goes_on_meanwhile(checker: GrammarChecker) -> None:
    async def run() -> int:
        bomb = SamplingParams(structured_outputs=StructuredOutputs(regex="b{10000000}"))
        worker = FairWorker(checker.process)
        task = asyncio.create_task(worker.run(lambda: checker.check(bomb)))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(RequestError):
            await task
        worker.close()
        return turns

    assert asyncio.run(run()) > 5
    assert checker.is_known(SamplingParams())


def test_S_24_verdicts_are_known_under_their_salt_only(checker: GrammarChecker) -> None:
    def params(salt: str) -> SamplingParams:
        return SamplingParams(structured_outputs=StructuredOutputs(regex="under a salt", cache_salt=salt))

    checker.check(params("a" * 32))
    assert checker.is_known(params("a" * 32))
    assert not any(checker.is_known(params(salt)) for salt in ("", "b" * 32, "a" * 32 + "mine"))
