"""The values of the parts of an answer, as a tokenizer's `response_template` describes them: the ways to read a part
(`content`), and the form into which it is put (`transform`).

transformers defines the names and their meaning (`utils/chat_parsing`). A text that does not have the form raises
`ValueError`. Patterns come from strangers, so their work is bounded. Called by `response_templates`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from headrace.grammar.backtracking import num_letters_in

MAX_LETTERS = 50_000_000
"""The estimated number of letters, at most, that the search for all marks in an answer may compare."""
LETTERS_A_CHARACTER = 2_000
"""The bound on these letters for each character of a part, so that many parts take no longer than one."""
MAX_DEPTH = 16
"""The deepest nesting of ways to read, and of a transform."""
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_HIDDEN = re.compile("\x01([0-9]+)\x02")
_KEY = re.compile(r"(?<=[{,])(\w+):")

Options = Mapping[str, Any]


def check_cost(patterns: Iterable[str], text: str, most: int = MAX_LETTERS) -> None:
    """Raise `ValueError` if the search of patterns in a text may take long."""
    num_left = most
    for pattern in patterns:
        num_left -= num_letters_in(pattern, text, most)
        if num_left < 0:
            raise ValueError(f"the search of {pattern!r} in {len(text)} characters takes too long")


def read(text: str, name: str, options: Options) -> Any:
    """Return the value of a part's text that is written in the way `name`."""
    return _READERS[name](text, options)


def check(name: Any, options: Any, depth: int = 0) -> None:
    """Raise `ValueError` if there is no such way to read, or its options are not of their types."""
    if name not in _READERS or depth > MAX_DEPTH:
        raise ValueError(f"content {name!r:.80} is not one of {', '.join(_READERS)}")
    if not isinstance(options, Mapping):
        raise ValueError("content_args is not an object")
    for key in {"line_sep", "kv_sep"} & options.keys():
        if not isinstance(options[key], str) or not options[key]:
            raise ValueError(f"{key} is {options[key]!r:.80}, expected a text")
    delims = options.get("string_delims") or []
    if not isinstance(delims, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(mark, str) and mark for mark in pair)
        for pair in delims
    ):
        raise ValueError("string_delims is not a list of pairs of texts")
    if name == "xml-inline":
        pattern = options.get("tag_pattern")
        if not isinstance(pattern, str):
            raise ValueError("xml-inline needs a tag_pattern")
        if "key" not in compiled(pattern).groupindex:
            raise ValueError("tag_pattern has no group 'key'")
    inner = options.get("value_parser")
    if inner is not None:
        if not isinstance(inner, Mapping):
            raise ValueError("value_parser is not an object")
        check(inner.get("name", "text"), inner.get("args", {}), depth + 1)


def compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern as transformers compiles it. Raises `ValueError`."""
    try:
        check_cost([pattern], "")
        return re.compile(pattern, re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {pattern!r:.80} is not supported: {error}") from error


def placed(form: Any, values: Mapping[str, Any]) -> Any:
    """Return a transform with the values of its placeholders."""
    if isinstance(form, dict):
        return {key: placed(value, values) for key, value in form.items()}
    if isinstance(form, list):
        return [placed(value, values) for value in form]
    path = _PLACEHOLDER.fullmatch(form) if isinstance(form, str) else None
    if path is None:
        return form
    value: Any = values
    for key in path[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"there is no {form}")
        value = value[key]
    return value


def check_transform(form: Any, depth: int = 0) -> None:
    """Raise `ValueError` for a text with a placeholder and anything else, and for a form nested too deeply."""
    if depth > MAX_DEPTH:
        raise ValueError("the transform is nested too deeply")
    if isinstance(form, str) and _PLACEHOLDER.search(form) and not _PLACEHOLDER.fullmatch(form):
        raise ValueError(f"the transform {form!r:.80} has a placeholder among other text")
    for value in form.values() if isinstance(form, dict) else form if isinstance(form, list) else ():
        check_transform(value, depth + 1)


def _text(text: str, options: Options) -> str:
    return text.strip() if options.get("strip", True) else text


def _json(text: str, options: Options) -> Any:
    working, hidden = text, list[str]()
    delims = options.get("string_delims") or []
    if delims and ("\x01" in text or "\x02" in text):
        raise ValueError("the text has control characters")
    for opening, closing in delims:
        working = "".join(_hide(working, opening, closing, hidden))
    if options.get("unquoted_keys"):
        working = _KEY.sub(r'"\1":', working)
    if delims:
        working = _HIDDEN.sub(lambda match: json.dumps(hidden[int(match[1])]), working)
    try:
        return json.loads(working)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    except json.JSONDecodeError:
        if options.get("allow_non_json"):
            return _text(text, options)
        raise


def _hide(text: str, opening: str, closing: str, hidden: list[str]) -> Iterator[str]:
    """Yield `text` with the number of each string in its place."""
    at = 0
    while (start := text.find(opening, at)) >= 0 and (end := text.find(closing, start + len(opening))) >= 0:
        yield f"{text[at:start]}\x01{len(hidden)}\x02"
        hidden.append(text[start + len(opening) : end])
        at = end + len(closing)
    yield text[at:]


def _xml_inline(text: str, options: Options) -> dict[str, Any]:
    pattern = options["tag_pattern"]
    check_cost([pattern], text, min(MAX_LETTERS, LETTERS_A_CHARACTER * (len(text) + 8)))
    out: dict[str, Any] = {}
    for match in re.finditer(pattern, text, re.DOTALL):
        groups = match.groupdict()
        key = groups["key"]
        if key is None:
            raise ValueError("a tag has no key")
        value = _inner(groups.get("value", ""), options)
        if key in out and options.get("merge_duplicates"):
            if not isinstance(out[key], list):
                out[key] = [out[key]]
            out[key].append(value)
        else:
            out[key] = value
    return out


def _kv_lines(text: str, options: Options) -> dict[str, Any]:
    out: dict[str, Any] = {}
    separator = options.get("kv_sep", ":")
    for line in text.split(options.get("line_sep", "\n")):
        key, mark, value = _text(line, options).partition(separator)
        if mark:
            out[_text(key, options)] = _inner(_text(value, options), options)
    return out


def _inner(text: str | None, options: Options) -> Any:
    parser = options.get("value_parser")
    if parser is None:
        return text
    if text is None:
        raise ValueError("a tag has no value")
    return read(text, parser.get("name", "text"), parser.get("args", {}))


_READERS: dict[str, Callable[[str, Options], Any]] = {
    "text": _text,
    "int": lambda text, options: int(_text(text, options)),
    "float": lambda text, options: float(_text(text, options)),
    "bool": lambda text, options: _text(text, options).lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
}
