"""The JSON-schema cases of MaskBench against the grammars, without a model: which schemas are taken, whether their
instances are judged right, and whether documents drawn at random are valid.

An instance is judged by walking a matcher over its tokens; a document is drawn by random choices among what the masks
allow, and judged by `jsonschema`. Used by the fast tests on a sample, and by `make test-schemas` on all.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import llguidance

from headrace import hub
from headrace.grammar.compile import build_matcher, compile_grammar
from headrace.grammar.vocabulary import Vocabulary, make_tokenizer
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import RequestError
from headrace.text.tokenizer import Tokenizer

MAX_TOKENS = 400
CUT = "cut"


class Case(NamedTuple):
    """One schema with its instances: (valid, document)."""

    name: str
    schema: dict[str, Any]
    tests: list[tuple[bool, Any]]


class Found(NamedTuple):
    """`refused` is why a schema was not taken, "" if it was. `wrong`: instances that were judged wrongly, as (valid,
    text). `documents` drawn to their end, `invalid` ones among them with what jsonschema says, `cut` for length, and
    `failed`: a matcher gave up, as its request would have been told. `unenforced`: invalid instances that were taken
    because of a format that the warnings name."""

    name: str
    refused: str
    warnings: list[str]
    num_instances: int
    wrong: list[tuple[bool, str]]
    documents: int
    invalid: list[tuple[str, str]]
    cut: int
    failed: list[str]
    unenforced: int = 0


def cases(folder: Path) -> Iterator[Case]:
    """Every case of the folder, in the order of the files."""
    for path in sorted(folder.glob("maskbench_*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            yield Case(row["name"], row["schema"], [(test["valid"], test["data"]) for test in row["tests"]])


class Campaign:
    """The built-in model's vocabulary, and a judge of cases over it."""

    def __init__(self) -> None:
        tokenizer = Tokenizer.load(hub.resolve("builtin"))
        self.tokenizer = tokenizer
        self.eos = 1
        self.vocabulary = Vocabulary.of(
            tokenizer.token_bytes, tokenizer.is_special, tokenizer.vocab_size, tokenizer.vocab_size, [self.eos]
        )
        self.ll = make_tokenizer(self.vocabulary, self.encode)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def judge(self, case: Case, num_documents: int = 3) -> Found:
        """Everything about one case."""
        try:
            constraint = StructuredOutputs(json=case.schema)
            grammar = compile_grammar(constraint)
            matcher = build_matcher(self.ll, grammar, constraint)
        except RequestError as error:
            return Found(case.name, error.bound, [], 0, [], 0, [], 0, [])
        wrong = [
            (valid, json.dumps(data, ensure_ascii=False))
            for valid, data in case.tests
            if (self.accepts(matcher, data) or (valid and self.accepts(matcher, in_order(data, case.schema)))) != valid
        ]
        # What a warning has told is no surprise.
        output = any("format" in warning for warning in grammar.warnings)
        unenforced = sum(not valid for valid, _ in wrong) if output else 0
        wrong = [each for each in wrong if each[0] or not output]
        samples = [self.draw(matcher, case.name, place) for place in range(num_documents)]
        ended = [text for text, why in samples if not why]
        invalid = [(text, reply) for text in ended if (reply := complaint(case.schema, text))]
        return Found(
            case.name,
            "",
            grammar.warnings,
            len(case.tests),
            wrong,
            len(ended),
            invalid,
            sum(why == CUT for _, why in samples),
            [why for _, why in samples if why not in ("", CUT)],
            unenforced,
        )

    def accepts(self, matcher: llguidance.LLMatcher, data: Any) -> bool:
        """Whether the grammar takes a document as it is written with spaces after colons and commas."""
        copy = matcher.deep_copy()
        token_ids = self.encode(json.dumps(data, ensure_ascii=False))
        return copy.try_consume_tokens(token_ids) == len(token_ids) and copy.is_accepting()

    def draw(self, matcher: llguidance.LLMatcher, name: str, seed: int) -> tuple[str, str]:
        """A document of random choices among the tokens that are allowed, ends preferred, and why it is none."""
        copy = matcher.deep_copy()
        dice = random.Random(f"{name} {seed}")
        token = bytearray()
        for num in range(MAX_TOKENS):
            if copy.is_stopped() and not copy.is_error():
                break
            mask = copy.compute_bitmask()
            if copy.is_error():
                return "", copy.get_error()
            allowed = [i for i in range(len(self.vocabulary.tokens)) if mask[i // 8] >> (i % 8) & 1]
            if not allowed:
                return "", "nothing is allowed"
            if self.eos in allowed and (dice.random() < 0.5 or allowed == [self.eos]):
                break
            allowed = [i for i in allowed if i != self.eos]
            # The longer the document, the more it wants to close what is open.
            closing = [i for i in allowed if self.vocabulary.tokens[i][:1] in (b'"', b"]", b"}", b",")]
            token_id = dice.choice(closing if closing and dice.random() < num / 200 else allowed)
            token += self.vocabulary.tokens[token_id]
            if not copy.consume_token(token_id):
                return "", copy.get_error()
        else:
            return "", CUT
        return token.decode(), ""


def in_order(data: Any, schema: dict[str, Any]) -> Any:
    """A document with the keys of its objects in the order in which a schema like them names its properties.

    An object means the same in any order; an answer has the schema's.
    """
    known: list[list[str]] = []
    stack: list[Any] = [schema]
    for here in stack:
        if isinstance(here, dict):
            if isinstance(here.get("properties"), dict):
                known.append(list(here["properties"]))
            stack += here.values()
        elif isinstance(here, list):
            stack += here

    def arrange(value: Any) -> Any:
        if isinstance(value, list):
            return [arrange(each) for each in value]
        if not isinstance(value, dict):
            return value
        names = max(known, key=lambda each: (len(value.keys() & set(each)), -len(each)), default=[])
        rank = {name: place for place, name in enumerate(names)}
        return {key: arrange(value[key]) for key in sorted(value, key=lambda key: rank.get(key, len(rank)))}

    return arrange(data)


def complaint(schema: dict[str, Any], text: str) -> str:
    """What jsonschema has against a document, or "".

    Numbers are read exactly, and as doubles: jsonschema rounds some, and takes offence at what it has rounded.
    """
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    reply = ""
    for read in (int, float):
        try:
            document = json.loads(text, parse_int=lambda digits: (int if len(digits) < 17 else read)(digits))  # noqa: B023
            error = next(iter(kind(schema).iter_errors(document)), None)
        except ValueError as problem:
            return f"no JSON: {problem}"
        except Exception as problem:
            # A schema that the judge itself stumbles over (a reference to the network, say) says nothing of a document.
            return f"not judged: {type(problem).__name__}"
        if error is None:
            return ""
        reply = reply or error.message[:200]
    return reply


def reason(refused: str) -> str:
    """A refusal without its places, to be counted."""
    text = refused.removeprefix("one that headrace can hold an answer to; here")
    text = re.sub(r"at #\S*", "", text).strip(": ,")
    return re.sub(r"\s+", " ", text)[:80]


def summary(result: list[Found]) -> dict[str, Any]:
    """The counts of a campaign, as they are printed and kept."""
    eaches = [each for each in result if not each.refused]
    instances = sum(each.num_instances for each in eaches)
    wrong = [(each.name, valid, text) for each in eaches for valid, text in each.wrong]
    unenforced = sum(each.unenforced for each in eaches)
    invalid = [(each.name, *what) for each in eaches for what in each.invalid]
    unjudged = [what for what in invalid if what[2].startswith("not judged")]
    return {
        "schemas": len(result),
        "taken": len(eaches),
        "coverage": round(len(eaches) / max(1, len(result)), 4),
        "taken_with_warnings": sum(bool(each.warnings) for each in eaches),
        "instances": instances,
        "instances_judged_right": instances - len(wrong) - unenforced,
        "valid_but_rejected": sum(valid for _, valid, _ in wrong),
        "invalid_but_accepted": sum(not valid for _, valid, _ in wrong),
        "invalid_for_a_format_that_is_not_enforced": unenforced,
        "documents": sum(each.documents for each in eaches),
        "documents_invalid": len(invalid) - len(unjudged),
        "documents_not_judged": len(unjudged),
        "documents_cut_for_length": sum(each.cut for each in eaches),
        "documents_failed": dict(Counter(reason(why) for each in eaches for why in each.failed).most_common()),
        "refused_by_reason": dict(Counter(reason(each.refused) for each in result if each.refused).most_common()),
        "wrong_instances": [[name, valid, text[:200]] for name, valid, text in wrong],
        "invalid_documents": [
            [name, text[:200], reply] for name, text, reply in invalid if not reply.startswith("not j")
        ],
    }
