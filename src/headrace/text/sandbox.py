"""The program that renders chat templates, in a process that may be killed: `python -m headrace.text.sandbox 1.0`.

A template is code from a checkpoint's author, or from a client where that is allowed. It runs in jinja2's immutable
sandbox, set up as transformers sets it up, in a separate process with a bound on processor time, memory and output. The
kernel stops the work that the sandbox does not stop (a product of two long strings, a comparison of deeply shared
lists). Jobs and answers are msgpack. Started by `templates` only.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from headrace.text.bounded import serve
from headrace.text.histories import needs
from headrace.text.traits import Traits

MAX_CPU_SECONDS = 1.0
MAX_OUTPUT = 8 * 2**20
"""Characters of one rendered prompt: as many as a prompt may have."""
MAX_SOURCE = 2**20
MAX_ADDRESS_SPACE = 768 * 2**20
XML_TOOLS = "xml_tools"

if tuple(int(part) for part in jinja2.__version__.split(".")[:3]) < (3, 1, 6):
    raise ImportError(f"jinja2 {jinja2.__version__} has known ways out of its sandbox; 3.1.6 is the first without")


class RenderJob(msgspec.Struct):
    """A template's source and its variables, which are plain JSON values. `finds_traits`: find the template's traits
    instead of rendering it with these variables alone."""

    source: str
    variables: dict[str, Any]
    finds_traits: bool = False


class RenderResult(msgspec.Struct):
    """The text or the template's traits, or in `error` the reason why there are none. `is_refusal`: the template does
    not take the variables, and may take others."""

    text: str = ""
    traits: Traits = Traits()
    error: str | None = None
    is_refusal: bool = False


class _Generation(Extension):
    """`{% generation %}` marks an answer's text for training; here its body alone is rendered, in a scope of its own,
    as a call block in transformers is."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _PlainNamespace(Namespace):
    """A namespace whose attributes cannot begin with an underscore, as attributes of Python's own objects do."""

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
    # A filter like `map` returns an iterator, which json cannot write.
    plain = list(value) if isinstance(value, Iterator) else value
    return json.dumps(plain, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _fromjson(text: str) -> Any:
    """Return the value of a JSON text, and another text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


@functools.cache
def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of every rendering."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], loader=None
    )
    env.filters["tojson"] = _tojson
    # Of the templates that headrace has itself.
    env.filters["fromjson"] = _fromjson
    # jinja2's filter marks the text as safe, and quotes in a text that is joined to it would then be escaped.
    env.filters["safe"] = str
    env.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_dict, namespace=_PlainNamespace
    )
    env.globals.pop("lipsum")
    return env


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return environment().from_string(source)


def render(job: RenderJob) -> RenderResult:
    """Render in this process, bounding only the output."""
    if len(job.source) > MAX_SOURCE:
        return RenderResult(error=f"the chat template has {len(job.source)} characters; at most {MAX_SOURCE} are read")
    try:
        template = _compiled(job.source)
        if job.finds_traits:
            return RenderResult(traits=needs.find(functools.partial(_attempt, job)))
        pieces, size = [], 0
        for piece in template.generate(_with_tools(job)):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_OUTPUT:
                return RenderResult(error=f"the chat template writes more than {MAX_OUTPUT} characters")
        return RenderResult(text="".join(pieces))
    except RecursionError:
        return RenderResult(error="the chat template is nested too deeply", is_refusal=True)
    except MemoryError:
        return RenderResult(error="the chat template needs too much memory")
    except Exception as error:
        # A template is a program, and may raise anything. Its message goes back to the client.
        return RenderResult(
            error=f"{type(error).__name__}: {error}" if not isinstance(error, TemplateError) else str(error),
            is_refusal=True,
        )


def _with_tools(job: RenderJob) -> dict[str, Any]:
    """Return the variables, with the tools also under the name that SmolLM3's template has for them."""
    tools = job.variables.get("tools")
    if not tools or XML_TOOLS not in job.source:
        return job.variables
    return {XML_TOOLS: [tool.get("function", tool) for tool in tools], **job.variables}


def _attempt(job: RenderJob, variables: dict[str, Any]) -> str | None:
    result = render(RenderJob(job.source, job.variables | variables))
    return result.text if result.error is None else None


def main(max_cpu_seconds: float) -> None:
    """Answer jobs until stdin ends."""
    environment()
    datetime.now().strftime("%c")
    serve(_answer, max_cpu_seconds, MAX_ADDRESS_SPACE)


def _answer(body: bytes) -> bytes:
    try:
        return msgspec.msgpack.encode(render(msgspec.msgpack.decode(body, type=RenderJob)))
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(RenderResult(error="the chat template writes lone surrogates"))


if __name__ == "__main__":
    main(float(sys.argv[1]))
