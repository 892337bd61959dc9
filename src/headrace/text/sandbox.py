"""The program that renders chat templates, in a process that may be killed: `python -m headrace.text.sandbox 1.0`.

A template is code from a checkpoint's author, or from a client where that is allowed. It runs in jinja2's immutable
sandbox, set up as transformers sets it up, in a process of its own with a bound on processor time, memory and output;
what the sandbox does not stop (a product of two long strings, a comparison of deeply shared lists), the kernel does.
Its jobs and answers are msgpack. Called by `chat.TemplateRunner` only.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from headrace.text.bounded import serve

MAX_CPU_SECONDS = 1.0
MAX_OUTPUT = 8 * 2**20
"""Characters of one rendered prompt: as many as a prompt may have."""
MAX_SOURCE = 2**20
MAX_ADDRESS_SPACE = 768 * 2**20

if tuple(int(part) for part in jinja2.__version__.split(".")[:3]) < (3, 1, 6):
    raise ImportError(f"jinja2 {jinja2.__version__} has known ways out of its sandbox; 3.1.6 is the first without")


ContentForm = Literal["string", "parts", "both"]
"""What a template takes a message's content for: a text, a list of parts, or whichever it is."""


class Job(msgspec.Struct):
    """The template's source, and the variables it sees, which are plain JSON values; None only looks at it."""

    source: str
    variables: dict[str, Any] | None


class Result(msgspec.Struct):
    """The text and what the template takes content for, or in `error` why there is none."""

    text: str = ""
    content_form: ContentForm = "string"
    error: str | None = None


class _Generation(Extension):
    """`{% generation %}` marks an answer's text for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """A namespace whose attributes can not begin with an underscore: those of Python's own objects do."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, attributes = args[0], dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace can not hold {name!r}")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # A filter like `map` gives no list, which is all that json knows.
    listed = list(value) if isinstance(value, Iterator) else value
    return json.dumps(listed, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


@functools.cache
def environment() -> ImmutableSandboxedEnvironment:
    """The one environment of every rendering."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], loader=None
    )
    made.filters["tojson"] = _tojson
    # jinja2's own marks the text, and a text added to a marked one comes out with its quotes as &#34;.
    made.filters["safe"] = str
    made.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_dict, namespace=_PlainNamespace
    )
    made.globals.pop("lipsum")
    return made


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[jinja2.Template, ContentForm]:
    made = environment()
    return made.from_string(source), content_form(made.parse(source))


def content_form(tree: nodes.Template) -> ContentForm:
    """Parts, if the template loops over something called `content` (an item, an attribute, or a variable set from
    one); both, if it also asks whether something is a string.
    """
    names: set[str] = set()

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Filter) and node.node is not None:
            return is_content(node.node)
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        return isinstance(node, nodes.Name) and node.name in names

    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    if not any(is_content(loop.iter) for loop in tree.find_all(nodes.For)):
        return "string"
    return "both" if any(test.name == "string" for test in tree.find_all(nodes.Test)) else "parts"


def render(job: Job) -> Result:
    """Render in this process, with a bound on the output only."""
    if len(job.source) > MAX_SOURCE:
        return Result(error=f"the chat template has {len(job.source)} characters; at most {MAX_SOURCE} are read")
    try:
        template, form = _compiled(job.source)
        pieces, size = [], 0
        if job.variables is None:
            return Result(content_form=form)
        for piece in template.generate(job.variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_OUTPUT:
                return Result(error=f"the chat template writes more than {MAX_OUTPUT} characters")
        return Result(text="".join(pieces), content_form=form)
    except RecursionError:
        return Result(error="the chat template is nested too deeply")
    except MemoryError:
        return Result(error="the chat template needs too much memory")
    except Exception as error:
        # A template is a program: what it can raise has no end. Its words go back to who sent it.
        return Result(error=f"{type(error).__name__}: {error}" if not isinstance(error, TemplateError) else str(error))


def main(max_cpu_seconds: float) -> None:
    """Answer jobs until stdin ends."""
    environment()
    datetime.now().strftime("%c")
    serve(_answer, max_cpu_seconds, MAX_ADDRESS_SPACE)


def _answer(body: bytes) -> bytes:
    try:
        return msgspec.msgpack.encode(render(msgspec.msgpack.decode(body, type=Job)))
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(Result(error="the chat template writes lone surrogates"))


if __name__ == "__main__":
    main(float(sys.argv[1]))
