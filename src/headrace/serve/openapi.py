"""The OpenAPI document, from the routes that were added and the structs of their bodies; served at `/openapi.json`.

Ranges of numbers come from `headrace.protocol.bounds`, so that the document and the checks can not part. Unknown fields
are allowed, for they are answered and told in `warnings`. Knows routes by `routing.operations`; `serve.app` calls it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from headrace import __version__
from headrace.protocol.bounds import BOUNDS
from headrace.protocol.parameters import APIS, names_in
from headrace.serve import routing
from headrace.serve.apis.anthropic import errors as anthropic_errors
from headrace.serve.apis.llama_server import errors as llama_errors
from headrace.serve.apis.ollama import errors as ollama_errors
from headrace.serve.call import reply_forms, schema
from headrace.serve.call.llama_options import WIDER
from headrace.serve.errors import error_response, json_response

STATUSES = {
    400: "A field is missing, of the wrong type or out of its range, or the prompt does not fit.",
    401: "The API key is missing or wrong.",
    403: "The API key opens other routes, or the web page may not call the server.",
    404: "There is no such model or object.",
    405: "The route does not take this method.",
    413: "The body is too large.",
    414: "The address is too long.",
    415: "The body is compressed, or a web page's is not JSON.",
    421: "The server does not go by the name that it was called by.",
    429: "Too many requests wait, or the key's minute is used up; see Retry-After.",
    431: "The headers are too large.",
    500: "The engine failed this request.",
    501: "Not done by this server.",
    503: "The engine is loading, or is gone.",
}
ERRORS: Mapping[routing.Refusal, type[msgspec.Struct]] = {
    error_response: reply_forms.Error,
    anthropic_errors.refuse: reply_forms.AnthropicError,
    ollama_errors.refuse: reply_forms.OllamaError,
    llama_errors.refuse: reply_forms.LlamaError,
}
# Which row of the bounds table holds for a number, where the names differ.
ROWS = (
    {name: field for api in APIS for field, name in names_in(api).items()}
    | schema.ROWS
    | {"max_output_tokens": "max_tokens"}
)
UNBOUNDED = frozenset((struct, name) for struct in ("LlamaCompletionRequest", "Options") for name in WIDER)
# What a chat message is at least; templates may want more, and may take more.
MESSAGE = {
    "type": "object",
    "properties": {"role": {"type": "string", "minLength": 1, "maxLength": 64}},
    "required": ["role"],
}
REF = "#/components/schemas/{name}"


def document(app: FastAPI, model: str, locked: bool) -> dict[str, Any]:
    """The document. `model` is the one that is served; `locked`: a key is needed."""
    operations = routing.operations(app)
    forms = _Forms([kind for each in operations for kind in (each.takes, each.gives) if kind is not None])
    for name, form in forms.components.items():
        if name.endswith("Request"):
            # Ollama's clients load a model by a chat without messages.
            _fill_in(form["properties"], model, least=0 if name == "ChatRequest" else 1)
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        path = each.path.replace(":path}", "}")
        paths.setdefault(path, {})[each.method.lower()] = _operation(each, path, forms)
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "headrace", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": forms.components},
    }
    if locked:
        made["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        made["security"] = [{"bearer": []}, {"key": []}]
        paths["/health/live"]["get"]["security"] = []
    return made


class _Forms:
    """The schemas of all structs there are, by reference."""

    def __init__(self, kinds: list[Any]) -> None:
        unique: list[Any] = []
        for kind in [*kinds, *ERRORS.values()]:
            if kind not in unique:
                unique.append(kind)
        self._kinds = unique
        self._references, components = msgspec.json.schema_components(unique, ref_template=REF)
        self.components = {_short(name): _tidy(_short(name), form) for name, form in sorted(components.items())}

    def of(self, kind: Any) -> dict[str, Any]:
        """A reference to what describes `kind`."""
        found: dict[str, Any] = _tidy("", self._references[self._kinds.index(kind)])
        return found


def _short(name: str) -> str:
    """Structs of one name are told apart by the module that they are in."""
    return re.sub(r"headrace\.serve\.apis\.(\w+)\.(\w+\.)*", r"\1.", name)


def _tidy(struct: str, form: Any) -> Any:
    """msgspec's schema with our names, with ranges, and open to fields that it does not know."""
    if isinstance(form, list):
        return [_tidy(struct, each) for each in form]
    if not isinstance(form, dict):
        return form
    made = {name: _tidy(struct, value) for name, value in form.items()}
    if isinstance(made.get("$ref"), str):
        prefix, _, name = made["$ref"].rpartition("/")
        made["$ref"] = f"{prefix}/{_short(name)}"
    if made.get("additionalProperties") is False:
        del made["additionalProperties"]
    if "properties" in made and struct.endswith(("Request", "Options")):
        made["properties"] = {
            name: _ranged(value, ROWS.get(name, name)) if (struct, name) not in UNBOUNDED else value
            for name, value in made["properties"].items()
        }
    return made


def _fill_in(properties: dict[str, Any], model: str, least: int) -> None:
    """Say what the types of a body's fields do not: which model there is, what a message looks like, and of how many
    there must be `least`."""
    if "model" in properties:
        optional = "anyOf" in properties["model"]
        properties["model"] = {"type": ["string", "null"] if optional else "string"}
        properties["model"]["enum"] = [model, None] if optional else [model]
    messages = properties.get("messages", {})
    for option in messages.get("anyOf", [messages]):
        if option.get("type") == "array":
            option["minItems"] = least
            if option["items"] == {"type": "object"}:
                option["items"] = MESSAGE


def _ranged(form: Any, row: str) -> Any:
    """A property with its row's range put into the option that is a number."""
    bound = BOUNDS.get(row)
    if bound is None or bound.kind == "size":
        return form
    if "anyOf" in form:
        return form | {"anyOf": [_ranged(option, row) for option in form["anyOf"]]}
    if form.get("type") not in ("integer", "number"):
        return form
    low, high = (int(x) if bound.kind == "int" else x for x in (bound.low, bound.high))
    return form | {"minimum": low, "maximum": high}


def _operation(each: routing.Operation, path: str, forms: _Forms) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": f"{each.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_') or 'root'}",
        "summary": each.summary.rstrip("."),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in each.query]
    if parameters:
        made["parameters"] = parameters
    if each.takes is not None:
        content = {"application/json": {"schema": forms.of(each.takes)}}
        made["requestBody"] = {"required": True, "content": content}
    form: dict[str, Any] = {} if each.gives is None else forms.of(each.gives)
    content = {each.media_type: {"schema": form if each.media_type == "application/json" else {"type": "string"}}}
    if each.streams is not None:
        # Events and lines are objects of many forms; OpenAPI 3.1 has no words for a stream of them.
        content[each.streams] = {}
    responses: dict[str, Any] = {}
    if not each.unserved:
        responses["200"] = {"description": "Done.", "content": content}
    error = {"application/json": {"schema": forms.of(ERRORS[each.refuse])}}
    for status, why in STATUSES.items():
        if (status == 501) == each.unserved or status in (401, 503):
            responses[str(status)] = {"description": why, "content": error}
    if each.path in ("/health", "/health/ready", "/ping"):
        responses["503"] = {"description": "Not ready.", "content": content}
    made["responses"] = responses
    return made


def add_routes(app: FastAPI, model: str, locked: bool) -> None:
    """Add `/openapi.json`; after all others."""

    async def described(request: Request) -> Response:
        """This document."""
        return json_response(document(app, model, locked))

    routing.get(app, "/openapi.json", described)
