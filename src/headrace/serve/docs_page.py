"""`/docs`: the OpenAPI document as one HTML page that needs no script and no other host.

All text is escaped, and the page's content security policy allows nothing but its own style sheet. Knows the OpenAPI
document and no route; called by `serve.openapi`. Swagger UI and ReDoc do more, but are scripts, which the
policy of this page forbids.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2330;
  background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin: 2rem 0 .4rem; }
code, summary b, h3 { font-family: ui-monospace, monospace; }
details { border: 1px solid #d5dae3; border-radius: 6px; margin: .4rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; } summary b { display: inline-block; min-width: 4.5rem; color: #0b6b3a; }
summary span { color: #5a6475; } details p { margin: .6rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
td { border-top: 1px solid #e4e8ef; padding: .25rem .6rem .25rem 0; vertical-align: top; }
section td:first-child { width: 18rem; } details td:first-child { width: 5rem; }
em { color: #a04000; font-style: normal; font-size: .8rem; } a { color: #1a56b0; }
@media (prefers-color-scheme: dark) {
  body { color: #dfe4ee; background: #14181f; } details, td { border-color: #333c4a; } a { color: #82b1ff; }
  summary b { color: #6fd39b; } summary span { color: #9aa5b8; } em { color: #f0a868; }
}
"""
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    + "'"
)
HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
REF = "#/components/schemas/"


def render(document: dict[str, Any]) -> str:
    """Return the page for an OpenAPI document whose references are all to its own schemas."""
    info = document["info"]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(info['title'])} API</title>\n<style>{STYLE}</style>\n</head>\n<body>",
            f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
            '<p>The routes of this server. For programs: <a href="openapi.json">openapi.json</a>.</p>',
            "<h2>Routes</h2>",
            *(
                _operation(method, path, operation)
                for path, item in document["paths"].items()
                for method, operation in item.items()
            ),
            "<h2>Schemas</h2>",
            *(_schema(name, schema) for name, schema in document["components"]["schemas"].items()),
            "</body>\n</html>\n",
        ]
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    head = f"<b>{escape(method.upper())}</b> <code>{escape(path)}</code>"
    lines = [f"<details><summary>{head} <span>{escape(operation['summary'])}</span></summary>"]
    parameters = [
        (parameter["name"], parameter["schema"], parameter.get("required", False), f"in the {parameter['in']}")
        for parameter in operation.get("parameters", ())
    ]
    if parameters:
        lines += ["<p>Parameters</p>", _table(parameters)]
    if "requestBody" in operation:
        lines.append(f"<p>Body: {_contents(operation['requestBody']['content'])}</p>")
    rows = [
        f"<tr><td>{escape(status)}</td><td>{escape(response['description'])}</td>"
        f"<td>{_contents(response['content'])}</td></tr>"
        for status, response in operation["responses"].items()
    ]
    return "\n".join([*lines, f"<p>Replies</p>\n<table>{''.join(rows)}</table>", "</details>"])


def _contents(content: dict[str, Any]) -> str:
    """Return the media types as HTML, each with its schema, or with the schema of a stream's items."""
    entries = []
    for media_type, each in content.items():
        schema = each.get("schema", each.get("x-itemSchema", {}))
        items = "" if "schema" in each else " of"
        entries.append(f"<code>{escape(media_type)}</code>{items} {_type(schema)}")
    return "; ".join(entries)


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [(field, each, field in required, "") for field, each in schema.get("properties", {}).items()]
    about = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    return f'<section id="{escape(name)}"><h3>{escape(name)}</h3>{about}\n{_table(rows)}</section>'


def _table(rows: list[tuple[str, dict[str, Any], bool, str]]) -> str:
    """Return a table as HTML, from rows of (name, schema, whether it is required, a remark)."""
    cells = (
        f"<tr><td><code>{escape(name)}</code>{' <em>required</em>' if required else ''}</td>"
        f"<td>{_type(schema)} {escape(remark)}</td></tr>"
        for name, schema, required, remark in rows
    )
    return f"<table>{''.join(cells)}</table>"


def _type(schema: dict[str, Any]) -> str:
    """Return a schema in a few words, as HTML; structs are links."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(REF))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"])
    return " ".join(_words(schema))


def _words(schema: dict[str, Any]) -> Iterator[str]:
    kind = schema.get("type", "any value" if "enum" not in schema else "")
    if "enum" in schema:
        yield " or ".join(f"<code>{escape(_text(value))}</code>" for value in schema["enum"])
    elif kind == "array":
        yield f"list of {_type(schema.get('items', {}))}"
    elif isinstance(schema.get("additionalProperties"), dict):
        yield f"object of {_type(schema['additionalProperties'])}"
    else:
        yield escape(" or ".join(kind) if isinstance(kind, list) else kind)
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None or high is not None:
        yield escape(f"from {_text(low)} to {_text(high)}")


def _text(value: Any) -> str:
    """Return a value of the document as JSON writes it; strings plain."""
    return value if isinstance(value, str) else json.dumps(value)
