"""The OpenAPI document, from the routes that were added and the structs of their bodies: `/openapi.json` and `/docs`.

Ranges of numbers come from `headrace.protocol.bounds`, so that the document and the checks agree. Unknown fields are
allowed: the reply names them in its `warnings`. Knows routes by `routing.operations`; `serve.app` calls it.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.responses import Response

from headrace import __version__
from headrace.protocol.bounds import BOUNDS
from headrace.protocol.parameters import APIS, LEAST, WIDER, names_in
from headrace.serve import docs_page, routing
from headrace.serve.call import schema
from headrace.serve.errors import STATUSES

# The row of the bounds table for a number, where the names differ.
ROWS = (
    {name: field for api in APIS for field, name in names_in(api).items()}
    | schema.ROWS
    | {"max_output_tokens": "max_tokens"}
)
UNBOUNDED = frozenset((struct, name) for struct in ("LlamaCompletionRequest", "Options") for name in WIDER)
# The least that a chat message holds; a template may need more fields, and may take more.
MESSAGE = {
    "type": "object",
    "properties": {"role": {"type": "string", "minLength": 1, "maxLength": 64}},
    "required": ["role"],
}
REF = "#/components/schemas/{name}"


def document(app: Starlette, model: str | None, locked: bool) -> dict[str, Any]:
    """Return the document. `model` is the one that is served, None if there are several; `locked`: a key is
    needed."""
    operations = routing.operations(app)
    kinds = [(each.takes, each.gives, *each.chunks, each.api.error_type) for each in operations]
    schemas = Schemas([kind for each in kinds for kind in each if kind is not None])
    for name, form in schemas.components.items():
        if name.endswith("Request"):
            # Ollama's clients load a model by a chat without messages.
            _fill_in(form["properties"], model, least=0 if name == "ChatRequest" else 1)
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        path = each.path.replace(":path}", "}")
        paths.setdefault(path, {})[each.method.lower()] = _operation(each, path, schemas)
    components: dict[str, Any] = {"schemas": schemas.components}
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "headrace", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": components,
    }
    if locked:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        described["security"] = [{"bearer": []}, {"key": []}]
        paths["/health/live"]["get"]["security"] = []
    return described


class Schemas:
    """The schemas of all structs of the routes, by reference. Raises ValueError for two that the document would name
    alike."""

    def __init__(self, kinds: list[Any]) -> None:
        unique: list[Any] = []
        for kind in kinds:
            if kind not in unique:
                unique.append(kind)
        self._kinds = unique
        self._references, components = msgspec.json.schema_components(unique, ref_template=REF)
        self.components = {_short(name): _tidy(_short(name), form) for name, form in sorted(components.items())}
        if len(self.components) < len(components):
            raise ValueError(f"two structs of one ecosystem have one name: {sorted(components)}")

    def of(self, kind: Any) -> dict[str, Any]:
        """Return a reference to the schema of `kind`."""
        reference: dict[str, Any] = _tidy("", self._references[self._kinds.index(kind)])
        return reference


def _short(name: str) -> str:
    """Return a component's name: its ecosystem distinguishes structs of one name, without the whole module."""
    parts = name.removeprefix("headrace.serve.apis.").split(".")
    return name if len(parts) == 1 else f"{parts[0]}.{parts[-1]}"


def _tidy(struct: str, value: Any) -> Any:
    """Return msgspec's schema with our names, with ranges, with its constants required, and open to more fields."""
    if isinstance(value, list):
        return [_tidy(struct, each) for each in value]
    if not isinstance(value, dict):
        return value
    tidy = {name: _tidy(struct, each) for name, each in value.items()}
    if isinstance(tidy.get("$ref"), str):
        prefix, _, name = tidy["$ref"].rpartition("/")
        tidy["$ref"] = f"{prefix}/{_short(name)}"
    if tidy.get("additionalProperties") is False:
        del tidy["additionalProperties"]
    properties = tidy.get("properties")
    if not isinstance(properties, dict):
        return tidy
    if struct.endswith(("Request", "Options")):
        tidy["properties"] = {
            name: _ranged(each, ROWS.get(name, str(name))) if (struct, name) not in UNBOUNDED else each
            for name, each in properties.items()
        }
        return tidy
    # A field with one possible value is in every reply.
    constants = {name for name, each in properties.items() if each.get("enum") == [each.get("default")]}
    for name in constants:
        del properties[name]["default"]
    tidy["required"] = [name for name in properties if name in constants or name in tidy.get("required", ())]
    return tidy


def _fill_in(properties: dict[str, Any], model: str | None, least: int) -> None:
    """Add facts that the types of a body's fields lack: the served model, the form of a message, and the `least` number
    of messages."""
    if "model" in properties and model is not None:
        optional = "anyOf" in properties["model"]
        properties["model"] = {"type": ["string", "null"] if optional else "string"}
        properties["model"]["enum"] = [model, None] if optional else [model]
    messages = properties.get("messages", {})
    for option in messages.get("anyOf", [messages]):
        if option.get("type") == "array":
            option["minItems"] = least
            if option.get("items") == {"type": "object"}:
                option["items"] = MESSAGE


def _ranged(form: Any, row: str) -> Any:
    """Return a property with its row's range put into the option that is a number."""
    bound = BOUNDS.get(row)
    if bound is None or bound.kind == "size":
        return form
    if "anyOf" in form:
        return form | {"anyOf": [_ranged(option, row) for option in form["anyOf"]]}
    if form.get("type") not in ("integer", "number"):
        return form
    low, high = (int(x) if bound.kind == "int" else x for x in (LEAST.get(row, bound.low), bound.high))
    return form | {"minimum": low, "maximum": high}


def _operation(each: routing.Operation, path: str, schemas: Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{each.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_') or 'root'}",
        "summary": each.summary.rstrip("."),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in each.query]
    if parameters:
        operation["parameters"] = parameters
    if each.takes is not None:
        content = {"application/json": {"schema": schemas.of(each.takes)}}
        operation["requestBody"] = {"required": True, "content": content}
    whole: dict[str, Any] = {} if each.gives is None else schemas.of(each.gives)
    content = {each.media_type: {"schema": whole if each.media_type == "application/json" else {"type": "string"}}}
    if each.streams is not None:
        # OpenAPI 3.1 has no words for the items of a stream; 3.2 calls their schema `itemSchema`.
        items = [schemas.of(kind) for kind in each.chunks]
        content[each.streams] = {"x-itemSchema": items[0] if len(items) == 1 else {"anyOf": items}}
    responses: dict[str, Any] = {}
    if not each.unserved:
        responses["200"] = {"description": "Done.", "content": content}
    error = {"application/json": {"schema": schemas.of(each.api.error_type)}}
    for status, row in STATUSES.items():
        if (status == 501) == each.unserved or status in (401, 503):
            responses[str(status)] = {"description": row.why, "content": error}
    if each.path in ("/health", "/health/ready", "/ping"):
        responses["503"] = {"description": "Not ready.", "content": content}
    operation["responses"] = responses
    return operation


def add_routes(app: Starlette, model: str | None, locked: bool) -> None:
    """Add `/openapi.json` and `/docs`; after all others."""

    def described() -> dict[str, Any]:
        """This document."""
        return document(app, model, locked)

    def docs() -> Response:
        """This document as a page for people."""
        page = docs_page.render(document(app, model, locked))
        return Response(page, media_type="text/html", headers=docs_page.HEADERS)

    routing.get(app, "/openapi.json", described)
    routing.get(app, "/docs", docs, media_type="text/html")
