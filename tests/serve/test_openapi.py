"""The OpenAPI document is whole and true to what the routes answer; `make test-openapi` tries it out at length."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from tests.programs import fuzz_openapi
from tests.serve.test_models_folder import Folded
from tests.serve.test_refusals import BODIES
from tests.support.server import HTTP, Live, inproc

from headrace.protocol.bounds import BOUNDS
from headrace.protocol.config import ServerConfig
from headrace.serve import docs_page, openapi
from headrace.serve.aliases import ALIASES
from headrace.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def document(live: Live) -> dict[str, Any]:
    reply = HTTP.get(live.url + "/openapi.json")
    assert reply.status_code == 200
    return dict(reply.json())


def test_a_server_with_a_models_folder_is_described_too(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with Folded(tmp_path, tokenizer) as live:
        described = HTTP.get(live.url + "/openapi.json")
        assert (described.status_code, "/api/create" in described.json()["paths"]) == (200, True)
        assert HTTP.get(live.url + "/docs").status_code == 200


def resolve(document: dict[str, Any], form: dict[str, Any]) -> dict[str, Any]:
    """`form` with the document's components beside it, for a validator."""
    return form | {"components": document["components"]}


def misfits(document: dict[str, Any], path: str, method: str, status: int, body: Any) -> list[str]:
    """Where a reply is not what the document says of it."""
    responses = document["paths"][path][method]["responses"]
    if str(status) not in responses:
        return [f"{path}: {status} is not told"]
    form = responses[str(status)]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator(resolve(document, form))
    return [f"{path}: {error.message}" for error in validator.iter_errors(body)]


def references(form: Any) -> Iterator[str]:
    if isinstance(form, dict):
        if isinstance(form.get("$ref"), str):
            yield form["$ref"]
        for value in form.values():
            yield from references(value)
    elif isinstance(form, list):
        for value in form:
            yield from references(value)


def test_openapi_has_every_route(live: Live, document: dict[str, Any]) -> None:
    output = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    there = {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in live.app.routes
        for method in getattr(route, "methods", None) or ()
    }
    assert output == {(method, path) for method, path in there if method != "HEAD"}
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids))
    assert all(operation["summary"] for item in document["paths"].values() for operation in item.values())


def test_openapi_is_well_formed(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    for reference in references(document):
        kind = reference.removeprefix("#/components/schemas/")
        assert kind in document["components"]["schemas"]
        assert "headrace" not in kind
    for form in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(form)


def test_openapi_control_two_structs_of_one_name_are_noticed() -> None:
    request, reply = (
        msgspec.defstruct("Same", [("x", int)], module=f"headrace.serve.apis.anthropic.{place}")
        for place in ("request", "reply")
    )
    with pytest.raises(ValueError, match="Same"):
        openapi.Schemas([request, reply])
    openapi.Schemas([request])


def test_openapi_tells_the_ranges_of_the_bounds_table(document: dict[str, Any]) -> None:
    temperature = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]["temperature"]
    bound = BOUNDS["temperature"]
    assert temperature["anyOf"][0] == {"type": "number", "minimum": bound.low, "maximum": bound.high}


@pytest.mark.parametrize("path", BODIES)
def test_openapi_replies_and_errors_are_as_told(live: Live, document: dict[str, Any], path: str) -> None:
    body = BODIES[path][1]
    form = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.validate(body, resolve(document, form), jsonschema.Draft202012Validator)
    for inputs in (body | {"stream": False}, body | {"stream": 5}, body | {"model": "other"}, {}):
        reply = live.post(path, inputs)
        assert misfits(document, path, "post", reply.status_code, reply.json()) == [], inputs


@pytest.mark.parametrize(
    "path", ["/v1/models", "/api/tags", "/api/ps", "/api/version", "/props", "/slots", "/version", "/load", "/health"]
)
def test_openapi_replies_to_get_are_as_told(live: Live, document: dict[str, Any], path: str) -> None:
    reply = HTTP.get(live.url + path)
    assert misfits(document, path, "get", reply.status_code, reply.json()) == []


def test_openapi_replies_of_what_is_stored_are_as_told(live: Live, document: dict[str, Any]) -> None:
    """A file, a batch and a response, made, listed, told, ended and deleted."""

    def told(method: str, path: str, entry_id: str = "", **inputs: Any) -> dict[str, Any]:
        reply = HTTP.request(method, live.url + re.sub(r"{\w+}", entry_id, path), timeout=20, **inputs)
        assert reply.status_code == 200, reply.text
        assert misfits(document, path, method.lower(), 200, reply.json()) == []
        return dict(reply.json())

    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}'
    file = told(
        "POST", "/v1/files", files={"file": ("in.jsonl", line)}, data={"purpose": "batch", "expires_after": "3"}
    )
    assert file["warnings"]
    expected = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = told("POST", "/v1/batches", json=expected)
    one = "/v1/batches/{batch_id}"
    live.wait(lambda: told("GET", one, batch["id"])["status"] == "completed", 20)
    other = told("POST", "/v1/batches", json=expected | {"metadata": {"a": "b"}})
    ended = HTTP.post(live.url + f"/v1/batches/{other['id']}/cancel")
    assert ended.status_code in (200, 400), "it may have been done by then"
    assert misfits(document, f"{one}/cancel", "post", ended.status_code, ended.json()) == []
    spoken = told("POST", "/v1/responses", json={"input": "hi", "max_output_tokens": 200, "background": True})
    one = "/v1/responses/{response_id}"
    told("POST", f"{one}/cancel", spoken["id"])
    told("GET", one, spoken["id"], params={"stream": "false"})
    told("GET", f"{one}/input_items", spoken["id"], params={"limit": "1"})
    for path in ("/v1/files", "/v1/batches"):
        told("GET", path, params={"limit": "1", "order": "asc"})
    told("GET", "/v1/files", params={"purpose": "none"})
    told("GET", "/v1/files/{file_id}", file["id"])
    told("DELETE", "/v1/files/{file_id}", file["id"])
    told("DELETE", one, spoken["id"])


def outside(page: str) -> list[str]:
    """What makes a page call another host, or run a script."""
    return re.findall(r"(?i)//[a-z0-9.\[]|<script|<link|<img|<iframe|@import|url\(|javascript:|\son[a-z]+=", page)


def test_docs_show_every_route_and_name_no_other_host(live: Live, document: dict[str, Any]) -> None:
    reply = HTTP.get(live.url + "/docs")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert outside(reply.text) == []
    for path, item in document["paths"].items():
        for method, operation in item.items():
            row = f"<b>{method.upper()}</b> <code>{html.escape(path)}</code> <span>"
            assert row + html.escape(operation["summary"]) in reply.text
    anchors, links = re.findall(r'id="(.*?)"', reply.text), re.findall(r'href="#(.*?)"', reply.text)
    assert sorted(anchors) == sorted(document["components"]["schemas"])
    assert set(links) <= set(anchors)
    assert "<code>temperature</code>" in reply.text
    policy = reply.headers["content-security-policy"]
    (style,) = re.findall(r"(?s)<style>(.*?)</style>", reply.text)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; ")
    assert f"style-src 'sha256-{digest}'" in policy


def test_docs_control_what_calls_out_is_noticed_and_text_is_escaped(document: dict[str, Any]) -> None:
    for planted in ('<script src="x.js">', '<a href="https://cdn.example">', "<style>@import 'x'", "<p onclick=x>"):
        assert outside(planted)
    hostile = '<script>alert("1")</script>'
    path = {"get": {"summary": hostile, "responses": {}, "parameters": []}}
    schemas = {hostile: {"description": hostile, "properties": {hostile: {"enum": [hostile]}}}}
    page = docs_page.render(document | {"paths": {hostile: path}, "components": {"schemas": schemas}})
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 6


def items(reply: str) -> list[dict[str, Any]]:
    """The events or lines of a stream that are JSON objects."""
    return [json.loads(line.removeprefix("data: ")) for line in reply.split("\n") if re.match(r"(data: )?{", line)]


def item_misfits(document: dict[str, Any], path: str, events: list[dict[str, Any]]) -> list[str]:
    """Where events of a stream are not what the document says of them."""
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    (form,) = (each["x-itemSchema"] for each in content.values() if "x-itemSchema" in each)
    validator = jsonschema.Draft202012Validator(resolve(document, form))
    return [error.message for event in events for error in validator.iter_errors(event)]


STREAMS = {
    "/v1/completions": {"stream_options": {"include_usage": True}, "logprobs": 2, "echo": True, "n": 2},
    "/v1/chat/completions": {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True},
    "/v1/responses": {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "unknown": 1},
    "/v1/messages": {"unknown": 1},
    "/api/chat": {"logprobs": True, "top_logprobs": 2, "unknown": 1},
    "/api/generate": {"logprobs": True, "unknown": 1},
    "/api/pull": {},
    "/completion": {"n_probs": 2, "timings_per_token": True, "return_tokens": True},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", STREAMS)
def test_openapi_events_are_as_described(live: Live, document: dict[str, Any], path: str) -> None:
    reply = live.post(path, BODIES[path][1] | {"stream": True} | STREAMS[path])
    assert reply.status_code == 200, reply.text
    events = items(reply.text)
    assert len(events) > (path != "/api/pull")
    assert item_misfits(document, path, events) == []


def test_openapi_control_an_event_of_another_form_is_noticed(live: Live, document: dict[str, Any]) -> None:
    assert set(STREAMS) == {
        path
        for path, item in document["paths"].items()
        for operation in item.values()
        for response in operation["responses"].values()
        if any("x-itemSchema" in each for each in response["content"].values())
        and path not in {"/completions", "/infill", "/inspect/live", *ALIASES}
    }
    event = items(live.post("/v1/completions", BODIES["/v1/completions"][1] | {"stream": True}).text)[0]
    assert item_misfits(document, "/v1/completions", [event]) == []
    for field in ("id", "choices", "object"):
        assert item_misfits(document, "/v1/completions", [{k: v for k, v in event.items() if k != field}])
    assert item_misfits(document, "/v1/completions", [event | {"created": "now"}])


def test_openapi_tells_the_queries_of_lists(document: dict[str, Any]) -> None:
    for path in ("/v1/files", "/v1/batches", "/v1/responses/{response_id}/input_items"):
        names = {each["name"] for each in document["paths"][path]["get"]["parameters"] if each["in"] == "query"}
        assert names >= {"limit", "order", "after"}, path


def test_openapi_every_json_reply_has_a_form(document: dict[str, Any]) -> None:
    """Only the document itself is any object."""
    plain = []
    for path, item in document["paths"].items():
        for operation in item.values():
            content = operation["responses"].get("200", {}).get("content", {})
            if content.get("application/json", {}).get("schema") == {}:
                plain.append(path)
    assert plain == ["/openapi.json"]


def test_openapi_control_a_reply_of_another_form_is_noticed(document: dict[str, Any]) -> None:
    good = {"version": "1"}
    assert misfits(document, "/version", "get", 200, good) == []
    assert misfits(document, "/version", "get", 200, {"version": 1})
    assert misfits(document, "/version", "get", 200, {})
    assert misfits(document, "/version", "get", 418, good)


def test_openapi_is_locked_with_everything_else(tokenizer: Tokenizer) -> None:
    with Live(inproc(), tokenizer, ServerConfig(api_key="k", log_stats_interval=0)) as locked:
        assert HTTP.get(locked.url + "/openapi.json").status_code == 401
        document = HTTP.get(locked.url + "/openapi.json", headers={"x-api-key": "k"}).json()
    assert document["security"] == [{"bearer": []}, {"key": []}]
    assert document["paths"]["/health/live"]["get"]["security"] == []


def test_allow_tells_all_methods_of_a_path(live: Live) -> None:
    for path, methods in (("/props", "GET, HEAD, POST"), ("/api/delete", "DELETE"), ("/v1/completions", "POST")):
        reply = HTTP.request("PATCH", live.url + path)
        assert (reply.status_code, reply.headers["allow"]) == (405, methods)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_schemathesis_finds_nothing(tokenizer: Tokenizer) -> None:
    """A short run: a handful of made-up calls to each route; `make test-openapi` runs all phases."""
    pytest.importorskip("schemathesis")
    with Live(inproc(max_model_len=256), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        done = fuzz_openapi.run(live.url, 1, "--phases", "fuzzing")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    tested = re.search(r"Selected: (\d+)/(\d+)\s+Tested: (\d+)", done.stdout)
    assert tested is not None
    selected, there, num_tested = map(int, tested.groups())
    # All but /sleep.
    assert selected == there - 1 >= 40
    # One whose made-up bodies were all thrown away counts as none; on a slow machine that happens.
    assert num_tested >= selected - 2


def test_schemathesis_control_a_broken_reply_is_found(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("schemathesis")
    from headrace.serve.apis.ollama import library

    monkeypatch.setattr(library, "OLLAMA_VERSION", 5)
    done = fuzz_openapi.run(live.url, 2, "--phases", "fuzzing", "--include-path", "/api/version")
    assert done.returncode == 1
    assert "5 is not of type" in done.stdout
