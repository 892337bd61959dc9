"""From a `StructuredOutputs` to a grammar that llguidance builds, or to a refusal that names the unsupported part.

Pure functions of text, with the same result wherever they are called: in the server's bounded process, which compiles
first, and in the engine. Must not know a tokenizer, but for `build_matcher` and `only_whitespace`, which get one.
"""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
import msgspec

from headrace.grammar import gbnf, schemas, tags
from headrace.grammar.logic import Schema, UnsupportedError
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import RequestError

SPACE = "[ ]?"
"""Between two tokens of JSON that has a schema, unless the request says otherwise: budgets are not spent on blanks."""
WHITESPACE = r"\r?\n[ \t]{0,40}|[ \t]{1,8}"
"""The same for JSON without a schema: one line break with an indentation, or a few spaces.

A model that writes whitespace without end would go on to max_tokens."""

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
"""Most work for one grammar. It is counted in steps and not in time, so that it is the same everywhere."""


class Grammar(msgspec.Struct, frozen=True):
    """`text` is the argument of `llguidance.LLMatcher`. `warnings` name the parts that are not enforced."""

    text: str
    warnings: list[str] = []


def compile_grammar(constraint: StructuredOutputs) -> Grammar:
    """Return the grammar of a constraint. Raises `RequestError` for one that cannot be enforced."""
    try:
        grammar = _answer(constraint)
    except UnsupportedError as error:
        field = f"structured_outputs.{constraint.kind}"
        raise RequestError(field, "a schema", f"one that headrace can hold an answer to; here: {error}") from None
    if constraint.prefix is None:
        return grammar
    prefix = tags.lark(json.loads(constraint.prefix), _no_schema, "structured_outputs.prefix", "@answer")
    # The answer's own grammar stays as it is: the prefix refers to it by name. Lark and JSON differ in the first
    # letter.
    is_json = grammar.text.lstrip().startswith("{")
    first, *others = json.loads(grammar.text)["grammars"] if is_json else [{"lark_grammar": grammar.text}]
    grammars = [{"lark_grammar": prefix}, {**first, "name": "answer"}, *others]
    return Grammar(json.dumps({"grammars": grammars}), grammar.warnings)


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
            # As one terminal: as alternatives of a rule, thousands of texts have more items than a parser's row may.
            return Grammar(llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"))
        case "grammar":
            text = str(constraint.grammar)
            try:
                lark = text if _START.search(text) else gbnf.to_lark(text)
                return Grammar(llguidance.LLMatcher.grammar_from_lark(lark))
            except Exception as error:
                # The converter reports mistakes by exceptions of any kind.
                raise RequestError(field, text, f"a grammar in Lark's syntax or in GBNF ({error})") from None
        case _:
            return _structural_tag(json.loads(str(constraint.structural_tag)), constraint, field)


def build_matcher(tokenizer: llguidance.LLTokenizer, grammar: Grammar, constraint: StructuredOutputs) -> Any:
    """Return a matcher at the beginning of an answer. Raises `RequestError` naming the unsupported part and its
    place."""
    text = gbnf.with_ends(grammar.text, tokenizer.eos_tokens)
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    # The mask builds the rest of the lexer, and shows whether any answer can begin.
    begins = not matcher.is_error() and any(matcher.compute_bitmask())
    if matcher.is_error() or not begins:
        raise refusal(matcher.get_error() or NO_ANSWER, constraint)
    return matcher


def refusal(message: str, constraint: StructuredOutputs) -> RequestError:
    """Return llguidance's error as an error of the request."""
    field = f"structured_outputs.{constraint.kind}"
    message = message.replace("<non-verbose/>", "").strip()
    if message.startswith("NoExtension"):
        message = NO_ANSWER
    if constraint.kind == "json":
        schema = json.loads(str(constraint.json))
        where = schemas.locate(schema, message)
        at = f" at {where}" if where else ""
        return RequestError(field, "a schema", f"one that headrace can hold an answer to; here{at}: {message[:500]}")
    return RequestError(field, getattr(constraint, constraint.kind), f"one that can be compiled: {message[:500]}")


def only_whitespace(tokenizer: llguidance.LLTokenizer, pattern: str) -> bool:
    """Whether all texts that match the regex are whitespace in JSON. Raises `RequestError` if it is no regex."""
    text = f"start: T\nT: /{llguidance.regex_to_lark(pattern, '')}/ & ~/[ \\t\\r\\n]*/"
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    # Without whitespace nothing matches: then no text can begin.
    matcher.compute_bitmask()
    return matcher.is_error() and "NoExtension" in matcher.get_error()


def json_options(constraint: StructuredOutputs) -> dict[str, Any]:
    """Return llguidance's options for JSON. All are set, so that no "x-guidance" in a schema can loosen them."""
    if constraint.disable_any_whitespace:
        return {"whitespace_flexible": False, "coerce_one_of": False, "lenient": False}
    pattern = constraint.whitespace_pattern
    if pattern is None:
        pattern = WHITESPACE if constraint.kind == "json_object" else SPACE
    return {"whitespace_flexible": True, "whitespace_pattern": pattern, "coerce_one_of": False, "lenient": False}


def inline_schema(schema: Schema, constraint: StructuredOutputs) -> str:
    """Return a schema for `%json` in a Lark grammar, with the options of `constraint`."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return json.dumps(schema | {"x-guidance": json_options(constraint)}, ensure_ascii=False)


def _json(schema: dict[str, Any] | bool, constraint: StructuredOutputs) -> Grammar:
    plain = schemas.plain_schema(schema, constraint.disable_additional_properties)
    if plain.schema is False:
        raise refusal(NO_ANSWER, constraint)
    text = json.dumps({} if plain.schema is True else plain.schema, ensure_ascii=False)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=json_options(constraint))  # type: ignore[arg-type]
    return Grammar(grammar, plain.warnings)


def _structural_tag(tag: Any, constraint: StructuredOutputs, field: str) -> Grammar:
    """Return the grammar of {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, in free text; or the
    grammar of {"format": {...}}: see `tags`."""
    warnings: list[str] = []

    def body(schema: Any) -> str:
        plain = schemas.plain_schema(schema, constraint.disable_additional_properties)
        warnings.extend(plain.warnings)
        return inline_schema(plain.schema, constraint)

    if isinstance(tag, dict) and "format" in tag:
        return Grammar(llguidance.LLMatcher.grammar_from_lark(tags.lark(tag["format"], body, field)), warnings)
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
    bodies_of: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for place, structure in enumerate(structures):
        at = f"{field}.structures[{place}]"
        if not isinstance(structure, dict) or not {"begin", "schema", "end"} >= set(structure) >= {"begin", "schema"}:
            raise RequestError(at, structure, "an object with begin, schema and end")
        begin, end = structure["begin"], structure.get("end", "")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise RequestError(at, structure, "an object whose begin and end are texts")
        matching = [trigger for trigger in triggers if begin.startswith(trigger)]
        if not matching:
            raise RequestError(f"{at}.begin", begin, "a text that begins with one of the triggers")
        trigger = max(matching, key=len)
        parts = [tags.lark_text(begin[len(trigger) :])] if begin != trigger else []
        parts += [f"%json {body(structure['schema'])}"] + ([tags.lark_text(end)] if end else [])
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
