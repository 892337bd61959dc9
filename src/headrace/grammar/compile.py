"""From a `StructuredOutputs` to a grammar that llguidance builds, or to a refusal that names what is not supported.

Pure functions of text; nothing here knows a tokenizer. What comes out is the same wherever it is called: in the
server's bounded process, which tries it first, and in the engine.
"""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
import msgspec
from llguidance.gbnf_to_lark import gbnf_to_lark

from headrace.grammar import schemas, tags
from headrace.grammar.logic import Schema, UnsupportedError
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import RequestError

WHITESPACE = r"\r?\n[ \t]{0,40}|[ \t]{1,8}"
"""Between two tokens of JSON, unless the request says otherwise: one line break with an indentation, or a few spaces.

A model that can not stop writing whitespace would go on to the end of max_tokens."""

# A grammar in Lark's syntax has this rule; one in GBNF begins at "root".
_START = re.compile(r"^\s*start\s*(\[.*\]\s*)?:(?!:)", re.MULTILINE)

NO_ANSWER = "no answer can meet it"

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""What one grammar may cost. The numbers count work, not time, so that they are the same everywhere."""


class Grammar(msgspec.Struct, frozen=True):
    """`text` is what `llguidance.LLMatcher` takes. `warnings`: what the answer is not held to, in words."""

    text: str
    warnings: list[str] = []


def compile_grammar(constraint: StructuredOutputs) -> Grammar:
    """The grammar of a constraint. Raises `RequestError` for what can not be held to."""
    try:
        made = _answer(constraint)
    except UnsupportedError as error:
        field = f"structured_outputs.{constraint.kind}"
        raise RequestError(field, "a schema", f"one that headrace can hold an answer to; here: {error}") from None
    if constraint.prefix is None:
        return made
    before = tags.lark(json.loads(constraint.prefix), _no_schema, "structured_outputs.prefix", "@answer")
    # The answer's own grammar stays what it is: the prefix refers to it by name. It is Lark or JSON, which begins so.
    is_json = made.text.lstrip().startswith("{")
    first, *others = json.loads(made.text)["grammars"] if is_json else [{"lark_grammar": made.text}]
    grammars = [{"lark_grammar": before}, {**first, "name": "answer"}, *others]
    return Grammar(json.dumps({"grammars": grammars}), made.warnings)


def _no_schema(schema: Any) -> str:
    raise RequestError("structured_outputs.prefix", schema, "text: a prefix has no schemas")


def _answer(constraint: StructuredOutputs) -> Grammar:
    field = f"structured_outputs.{constraint.kind}"
    match constraint.kind:
        case "json":
            return _json(json.loads(str(constraint.json)), constraint)
        case "json_object":
            return _json({"type": "object"}, constraint)
        case "regex":
            return Grammar(llguidance.LLMatcher.grammar_from_regex(str(constraint.regex)))
        case "choice":
            texts = " | ".join(map(tags.lark_text, dict.fromkeys(constraint.choice or ())))
            return Grammar(llguidance.LLMatcher.grammar_from_lark(f"start: {texts}"))
        case "grammar":
            text = str(constraint.grammar)
            try:
                lark = text if _START.search(text) else gbnf_to_lark(text)
                return Grammar(llguidance.LLMatcher.grammar_from_lark(lark))
            except Exception as error:
                # The converter tells of mistakes by whatever it stumbles over.
                raise RequestError(field, text, f"a grammar in Lark's syntax or in GBNF ({error})") from None
        case _:
            return _structural_tag(json.loads(str(constraint.structural_tag)), constraint, field)


def build_matcher(tokenizer: llguidance.LLTokenizer, grammar: Grammar, constraint: StructuredOutputs) -> Any:
    """A matcher at the beginning of an answer. Raises `RequestError` saying what is not supported, and where."""
    matcher = llguidance.LLMatcher(tokenizer, grammar.text, log_level=0, limits=LIMITS)
    # Some of its lexer is built only now, and that no answer can begin is found only now.
    begins = not matcher.is_error() and any(matcher.compute_bitmask())
    if matcher.is_error() or not begins:
        raise refusal(matcher.get_error() or NO_ANSWER, constraint)
    return matcher


def refusal(said: str, constraint: StructuredOutputs) -> RequestError:
    """llguidance's complaint as an error of the request."""
    field = f"structured_outputs.{constraint.kind}"
    said = said.replace("<non-verbose/>", "").strip()
    if said.startswith("NoExtension"):
        said = NO_ANSWER
    if constraint.kind == "json":
        schema = json.loads(str(constraint.json))
        where = schemas.locate(schema, said)
        at = f" at {where}" if where else ""
        return RequestError(field, "a schema", f"one that headrace can hold an answer to; here{at}: {said[:500]}")
    return RequestError(field, getattr(constraint, constraint.kind), f"one that can be compiled: {said[:500]}")


def only_whitespace(tokenizer: llguidance.LLTokenizer, pattern: str) -> bool:
    """Whether whatever matches the regex is whitespace to JSON. Raises `RequestError` for what is no regex."""
    text = f"start: T\nT: /{llguidance.regex_to_lark(pattern, '')}/ & ~/[ \\t\\r\\n]*/"
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    # What is left of it, without whitespace, is nothing: then no text can be begun.
    matcher.compute_bitmask()
    return matcher.is_error() and "NoExtension" in matcher.get_error()


def json_options(constraint: StructuredOutputs) -> dict[str, Any]:
    """llguidance's options for JSON. All are given, so that no "x-guidance" in a schema can loosen them."""
    if constraint.disable_any_whitespace:
        return {"whitespace_flexible": False, "coerce_one_of": False, "lenient": False}
    pattern = WHITESPACE if constraint.whitespace_pattern is None else constraint.whitespace_pattern
    return {"whitespace_flexible": True, "whitespace_pattern": pattern, "coerce_one_of": False, "lenient": False}


def inline_schema(schema: Schema, constraint: StructuredOutputs) -> str:
    """A schema for `%json` in a Lark grammar, with the options of `constraint`."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return json.dumps(schema | {"x-guidance": json_options(constraint)}, ensure_ascii=False)


def _json(schema: dict[str, Any] | bool, constraint: StructuredOutputs) -> Grammar:
    brought = schemas.bring(schema, constraint.disable_additional_properties)
    if brought.schema is False:
        raise refusal(NO_ANSWER, constraint)
    text = json.dumps({} if brought.schema is True else brought.schema, ensure_ascii=False)
    made = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=json_options(constraint))  # type: ignore[arg-type]
    return Grammar(made, brought.warnings)


def _structural_tag(tag: Any, constraint: StructuredOutputs, field: str) -> Grammar:
    """{"structures": [{"begin", "schema", "end"}], "triggers": [...]}, in free text."""
    if isinstance(tag, dict) and "format" in tag:
        return _format(tag["format"], constraint, field)
    if not isinstance(tag, dict) or "structures" not in tag or "triggers" not in tag:
        raise RequestError(field, tag, 'an object with "structures" and "triggers"')
    for name in tag:
        if name not in ("type", "structures", "triggers", "at_least_one"):
            raise RequestError(f"{field}.{name}", tag[name], "a field that headrace knows", "unknown_field")
    structures, triggers = tag["structures"], tag["triggers"]
    if not isinstance(structures, list) or not structures:
        raise RequestError(f"{field}.structures", structures, "a list of at least one structure")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(x, str) and x for x in triggers):
        raise RequestError(f"{field}.triggers", triggers, "a list of at least one text")
    lines = ["%llguidance {}", "TEXT: /(.|\\n)*/"]
    warnings: list[str] = []
    bodies_of: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for place, structure in enumerate(structures):
        at = f"{field}.structures[{place}]"
        if not isinstance(structure, dict) or not {"begin", "schema", "end"} >= set(structure) >= {"begin", "schema"}:
            raise RequestError(at, structure, "an object with begin, schema and end")
        begin, end = structure["begin"], structure.get("end", "")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise RequestError(at, structure, "an object whose begin and end are texts")
        found = [trigger for trigger in triggers if begin.startswith(trigger)]
        if not found:
            raise RequestError(f"{at}.begin", begin, "a text that begins with one of the triggers")
        trigger = max(found, key=len)
        brought = schemas.bring(structure["schema"], constraint.disable_additional_properties)
        warnings += brought.warnings
        parts = [tags.lark_text(begin[len(trigger) :])] if begin != trigger else []
        parts += [f"%json {inline_schema(brought.schema, constraint)}"] + ([tags.lark_text(end)] if end else [])
        lines.append(f"body_{place}: {' '.join(parts)}")
        bodies_of[trigger].append(f"body_{place}")
    choices = []
    for place, (trigger, bodies) in enumerate(bodies_of.items()):
        if not bodies:
            raise RequestError(f"{field}.triggers", trigger, "the beginning of some structure")
        lines.append(f"trigger_{place}[lazy]: TEXT {tags.lark_text(trigger)}")
        lines.append(f"tag_{place}: trigger_{place} ({' | '.join(bodies)})")
        choices.append(f"tag_{place}")
    repeat = "+" if tag.get("at_least_one") else "*"
    lines.append(f"start: ({' | '.join(choices)}){repeat} rest")
    lines.append("rest: TEXT")
    return Grammar(llguidance.LLMatcher.grammar_from_lark("\n".join(lines)), warnings)


def _format(form: Any, constraint: StructuredOutputs, field: str) -> Grammar:
    """{"format": {...}}: see `tags`."""
    warnings: list[str] = []

    def body(given: Any) -> str:
        brought = schemas.bring(given, constraint.disable_additional_properties)
        warnings.extend(brought.warnings)
        return inline_schema(brought.schema, constraint)

    return Grammar(llguidance.LLMatcher.grammar_from_lark(tags.lark(form, body, field)), warnings)
