"""What must be refused, and how: hostile numbers, hostile JSON, unknown fields, wrong routes (S-11, S-12, S-13, S-20).

The hostile numbers are generated from the bounds table for every numeric field of every body there is, so a new
field without a row, or a new route without a schema here, is red.
"""

from __future__ import annotations

import json
import re
import socket
import types
import typing
from typing import Any

import httpx
import msgspec
import pytest
from tests.support import fake
from tests.support.server import HTTP, Live

from headrace.protocol.bounds import BOUNDS
from headrace.protocol.parameters import LEAST
from headrace.serve.aliases import ALIASES
from headrace.serve.apis.anthropic import request as anthropic_request
from headrace.serve.apis.llama_server import reply as llama_reply
from headrace.serve.apis.llama_server import request as llama_request
from headrace.serve.apis.llama_server.reply import COUNTERS
from headrace.serve.apis.ollama import request as ollama_request
from headrace.serve.apis.openai import conversations, embeddings, responses_input, scores, vllm
from headrace.serve.apis.tei import paths as tei
from headrace.serve.call import parsing, schema
from headrace.serve.gates import limits

BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (schema.CompletionRequest, {"prompt": "hi", "max_tokens": 2}),
    "/v1/chat/completions": (
        schema.ChatCompletionRequest,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": True},
    ),
    "/tokenize": (schema.TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (schema.DetokenizeRequest, {"tokens": [1]}),
    "/v1/messages": (
        anthropic_request.MessagesRequest,
        {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    ),
    "/v1/messages/count_tokens": (
        anthropic_request.CountTokensRequest,
        {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
    ),
    "/api/generate": (
        ollama_request.GenerateRequest,
        {"model": "fake", "prompt": "hi", "logprobs": True, "stream": False},
    ),
    "/api/chat": (
        ollama_request.ChatRequest,
        {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "stream": False},
    ),
    "/api/show": (ollama_request.ShowRequest, {"model": "fake"}),
    "/api/pull": (ollama_request.ShowRequest, {"model": "fake", "stream": False}),
}
BODIES["/completion"] = BODIES["/completions"] = (
    llama_request.LlamaCompletionRequest,
    {"prompt": "hi", "n_predict": 2},
)
BODIES["/embedding"] = BODIES["/embeddings"] = (llama_request.EmbeddingRequest, {"content": "hi"})
BODIES["/api/embed"] = (ollama_request.EmbedRequest, {"model": "fake", "input": "hi"})
BODIES["/api/embeddings"] = (ollama_request.EmbedRequest, {"model": "fake", "prompt": "hi"})
BODIES["/apply-template"] = (llama_request.TemplateRequest, {"messages": [{"role": "user", "content": "hi"}]})
for path in COUNTERS:
    BODIES[path] = (llama_request.TemplateRequest, {"messages": [{"role": "user", "content": "hi"}]})
BODIES["/v1/responses/input_tokens"] = (responses_input.ResponsesRequest, {"input": "hi"})
BODIES["/v1/conversations"] = (conversations.ConversationRequest, {"items": [{"role": "user", "content": "hi"}]})
BODIES["/v1/responses"] = (responses_input.ResponsesRequest, {"input": "hi", "max_output_tokens": 2, "store": False})
BODIES["/v1/embeddings"] = (embeddings.EmbeddingRequest, {"input": "hi"})
BODIES["/pooling"] = (embeddings.PoolingRequest, {"input": "hi"})
BODIES["/v1/score"] = (scores.ScoreRequest, {"text_1": "hi", "text_2": "ho"})
BODIES["/v1/rerank"] = BODIES["/rerank"] = (scores.RerankRequest, {"query": "hi", "documents": ["ho"]})
BODIES["/embed"] = (tei.EmbedRequest, {"inputs": "hi"})
BODIES["/similarity"] = (tei.SimilarityRequest, {"inputs": {"source_sentence": "hi", "sentences": ["ho"]}})
BODIES["/invocations"] = (vllm.InvocationRequest, {"prompt": "hi", "max_tokens": 2})
# Without a body of JSON, or (files, batches) with tests of their own.
NO_BODY = {"/ping", "/api/push", "/api/create", "/api/copy", "/props", "/slots/{slot_id}", "/infill"}
NO_BODY |= {"/sleep", "/wake_up", "/inspect/recording", "/inspect/plan", "/inspect/hold", "/fleet/update"}
NO_BODY |= {"/lora-adapters", "/classify", "/predict", "/embed_sparse", "/reset_prefix_cache"}
NO_BODY |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
NO_BODY |= {"/v1/responses/compact", "/v1/conversations/{conversation_id}"}
NO_BODY |= {"/v1/conversations/{conversation_id}/items"}
NO_BODY |= {"/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel", "/v1/responses/{response_id}/cancel"}
# A negative one is allowed and means none, or the range is the model's; tested where the API is.
OWN_RANGES = {"keep_alive", "id_slot", "n_predict", "embd_normalize", "dimensions", "top_n", "max_tool_calls"}
OWN_RANGES |= {"/completion seed", "/completions seed", "/completion max_tokens", "/completions max_tokens"}
ROWS = {"repeat_penalty": "repetition_penalty", "n_probs": "logprobs", "max_output_tokens": "max_tokens"}
ROWS |= {"max_completion_tokens": "max_tokens"}
CONTEXT = 2048


def numeric_fields(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Names of the fields that are a number, and the name of its row in the bounds table."""
    hints = typing.get_type_hints(kind)
    result = {}
    for name, hint in hints.items():
        options = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
        if options & {int, float}:
            result[name] = schema.ROWS.get(name, name)
    return result


FIELDS = [
    (path, name, ROWS.get(name, row))
    for path, (kind, _) in BODIES.items()
    for name, row in numeric_fields(kind).items()
    if name not in OWN_RANGES and f"{path} {name}" not in OWN_RANGES
]


def raw(live: Live, path: str, text: str | bytes, **headers: str) -> httpx.Response:
    return HTTP.post(
        live.url + path, content=text, headers={"content-type": "application/json", **headers}, timeout=240
    )


def refused(reply: httpx.Response, field: str | None = None, status: int = 400) -> str:
    """The error's message. Its shape is that of the API that was called."""
    assert reply.status_code == status, reply.text
    body = strict(reply.text)
    error, tei_paths = body["error"], ("/embed", "/similarity")
    message = str(error) if isinstance(error, str) else str(error["message"])
    path = reply.request.url.path
    if path.startswith("/api/"):
        assert isinstance(error, str)
    elif path in tei_paths:
        assert set(body) == {"error", "error_type"}
    elif path.startswith(llama_reply.API.prefixes):
        assert (error["code"], set(error)) == (status, {"message", "type", "code"})
    elif path.startswith("/v1/messages"):
        assert (body["type"], set(error)) == ("error", {"type", "message"})
    else:
        assert set(error) - {"n_prompt_tokens", "n_ctx"} == {"message", "type", "param", "code"}
        assert field is None or error["param"] == field
    # S-22: nothing of the house in what strangers read.
    assert not re.search(r"0x[0-9a-f]{6,}|Traceback|\.py|/src/", message), error
    # OpenAI's words for a context that is too short come before ours.
    message = re.sub(r"^This model's maximum context length .*? completion; \w+\)\. ", "", message)
    assert field is None or message.startswith(field + ": ")
    return message


def strict(text: str) -> Any:
    def fail(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=fail)


def test_every_post_route_is_covered_here(live: Live) -> None:
    posts = {route.path for route in live.app.routes if "POST" in (getattr(route, "methods", None) or ())}
    assert posts - set(ALIASES) == set(BODIES) | NO_BODY


def test_every_numeric_field_has_a_row() -> None:
    assert len(FIELDS) > 20
    assert {row for _, _, row in FIELDS} <= set(BOUNDS)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("path", "name", "row"), FIELDS)
def test_S_11_S_12_hostile_numbers(live: Live, path: str, name: str, row: str) -> None:
    bound = BOUNDS[row]
    low, high = int(LEAST.get(row, bound.low) // 1), int(bound.high)
    hostile = [json.dumps(x) for x in (low - 1, high + 1, 2**63, 2**64, 10**30, -(2**70), "", "1", [], {}, [[1]], True)]
    hostile += ["NaN", "Infinity", "-Infinity", "1e309", "-1e309", "1" * 5000]
    if bound.kind == "int":
        hostile += ["1.5", "1e400"]
    for value in hostile:
        body = {key: x for key, x in BODIES[path][1].items() if key != name}
        text = json.dumps(body)[:-1] + f', "{name}": {value}}}'
        reply = raw(live, path, text)
        assert reply.status_code == 400, (value, reply.text)
        message = refused(reply)
        if not value.lstrip("-").startswith(("NaN", "Inf", "1e", "1111")):
            assert message.startswith(name + ": "), message
    # And the ends of the range are no error of range.
    for end in (bound.low, bound.high):
        body = BODIES[path][1] | {name: int(end) if float(end).is_integer() else end}
        reply = live.post(path, body)
        # A millisecond is a time like any other, and over at once.
        assert reply.status_code in ((200, 408, 504) if name == "timeout" else (200, 400)), reply.text
        assert "must be an integer from" not in reply.text
        assert "must be a finite number" not in reply.text
    assert live.client.is_alive


@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "logit_bias"])
def test_S_13_token_ids_are_checked_against_the_models_width(live: Live, field: str) -> None:
    def body(token_id: object) -> dict[str, Any]:
        if field == "logit_bias":
            return {"prompt": "hi", "max_tokens": 1, "logit_bias": {str(token_id): 1.0}}
        return {"prompt": "hi", "max_tokens": 1, field: [1, token_id]}

    for bad in (-1, fake.VOCAB_SIZE, fake.VOCAB_SIZE + 1, 2**31, 2**63, 2**70):
        assert field in refused(live.post("/v1/completions", body(bad)))
    for good in (0, fake.VOCAB_SIZE - 1):
        assert live.post("/v1/completions", body(good)).status_code == 200
    assert "tokens" in refused(live.post("/detokenize", {"tokens": [fake.VOCAB_SIZE]}))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, 2.5]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({}, "prompt"),
        ({"prompt": ["x"] * 257}, "prompt"),
        ({"prompt": "x" * (CONTEXT + 1)}, "prompt"),
        ({"prompt": "x", "max_tokens": CONTEXT}, "max_tokens"),
        ({"prompt": ["x"] * 100, "n": 100}, "n"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "stop": [1]}, "stop[0]"),
        ({"prompt": "x", "stop": "y" * 1025}, "stop"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": -1}, "logprobs"),
        ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt": "x", "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"1": None}}, "logit_bias"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "stream": "yes"}, "stream"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "x", "cache_salt": "y" * 257}, "cache_salt"),
        ({"prompt": "x", "request_id": "y" * 257}, "request_id"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "n": 3, "best_of": 2}, "best_of"),
        ({"prompt": "x", "presence_penalty": 2.5}, "presence_penalty"),
        ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "x", "beam_width": 3}, "beam_width"),
        ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format.type"),
        ({"prompt": "x", "guided_json": 5}, "guided_json"),
        ({"prompt": "x", "priority": 1}, "priority"),
        ({"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_completions_refuse_naming_the_field(live: Live, body: dict[str, Any], field: str) -> None:
    refused(live.post("/v1/completions", body), field)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x"}] * 4097}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"max_completion_tokens": CONTEXT}, "max_completion_tokens"),
        ({"echo": 3}, "echo"),
    ],
)
def test_chat_refuses_naming_the_field(live: Live, body: dict[str, Any], field: str) -> None:
    inputs = {"messages": [{"role": "user", "content": "hi"}]} | body
    refused(live.post("/v1/chat/completions", inputs), field)


def test_neutral_values_of_unsupported_fields_are_fine(live: Live) -> None:
    neutral = {name: values[0] if values else None for name, (values, _) in schema.UNSUPPORTED.items()}
    neutral |= {name: values[0] if values else None for name, (values, _) in schema.IGNORED.items()}
    body = {"prompt": "x", "max_tokens": 1, "user": "me", "metadata": {"a": "b"}, "best_of": 1} | neutral
    assert live.post("/v1/completions", body).status_code == 200
    assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 1} | dict.fromkeys(schema.UNSUPPORTED)).is_success
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "logprobs": False, "top_logprobs": 0}
    assert live.post("/v1/chat/completions", chat | {"echo": False}).status_code == 200


@pytest.mark.parametrize(
    ("body", "warnings"),
    [
        ({}, None),
        ({"temperatur": 0.5}, ["temperatur: unknown, and ignored; did you mean temperature?"]),
        ({"messages": [], "x": {"y": 1}}, ["messages: unknown, and ignored", "x: unknown, and ignored"]),
        ({"stream_options": {"other": 1}, "stream": True}, ["stream_options.other: unknown, and ignored"]),
        ({"service_tier": "auto", "store": False, "prediction": None}, None),
        ({"service_tier": "flex"}, ["service_tier: ignored: there is one tier"]),
        (
            {"store": True, "z": 1},
            ["store: ignored: completions are not stored; responses are", "z: unknown, and ignored"],
        ),
        # No client puts words into the server's mouth.
        ({"warnings": ["all is lost"]}, ["warnings: unknown, and ignored"]),
        ({"k" * 200: 1}, ["k" * 77 + "...: unknown, and ignored"]),
    ],
)
def test_what_is_not_honoured_comes_back_in_warnings(
    live: Live, body: dict[str, Any], warnings: list[str] | None
) -> None:
    for stream in (False, True):
        inputs = {"prompt": "x", "max_tokens": 3, "stream": stream} | body
        reply = live.post("/v1/completions", inputs)
        assert reply.status_code == 200, reply.text
        if inputs["stream"]:
            first, *others = [strict(line[6:]) for line in reply.text.split("\n\n") if line[6:7] == "{"]
            assert all("warnings" not in chunk for chunk in others)
        else:
            first = strict(reply.text)
        assert first.get("warnings") == warnings


def test_S_20_thousands_of_unknown_fields_are_counted_not_listed(live: Live) -> None:
    body = {"prompt": "x", "max_tokens": 1} | {f"unknown{index}": 1 for index in range(5000)}
    warnings = live.post("/v1/completions", body).json()["warnings"]
    assert len(warnings) == parsing.MAX_WARNINGS + 1
    assert warnings[-1] == f"{5000 - parsing.MAX_WARNINGS} more are not told"


def test_unknown_models_and_routes_are_404(live: Live) -> None:
    for path, (kind, body) in BODIES.items():
        if "model" in kind.__struct_fields__ or path == "/invocations":
            assert "'fake'" in refused(live.post(path, body | {"model": "gpt-9"}), status=404)
    refused(HTTP.get(live.url + "/v1/models/other"), status=404)
    refused(HTTP.get(live.url + "/v2/anything"), status=404)
    wrong = HTTP.get(live.url + "/v1/completions")
    refused(wrong, status=405)
    assert wrong.headers["allow"] == "POST"
    # No redirect: it would go wherever the Host header says.
    refused(live.post("/v1/completions/", {}), status=404)


def test_head_is_get_without_a_body(live: Live) -> None:
    for path in ("/health/live", "/health", "/ping", "/v1/models", "/metrics"):
        head = HTTP.head(live.url + path)
        assert (head.status_code, head.content) == (200, b"")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"nul",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b"\x00" * 1000,
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": ' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"a": 1' + b"".join(b',"k%d":1' % i for i in range(10_000)) + b"}",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_S_20_hostile_json(live: Live, path: str, text: bytes) -> None:
    refused(raw(live, path, text))


def test_S_19_bodies_are_bounded_before_they_are_read(live: Live) -> None:
    body = b'{"prompt": "' + b"x" * limits.MAX_BODY_BYTES + b'"}'
    refused(raw(live, "/tokenize", body), status=413)
    # Declared too large: refused at once, though the body never comes.
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as declared:
        declared.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n{")
        assert declared.recv(4096).startswith(b"HTTP/1.1 413 ")

    def endless() -> Any:
        for _ in range(limits.MAX_BODY_BYTES // 65536 + 2):
            yield b"x" * 65536

    refused(HTTP.post(live.url + "/tokenize", content=endless()), status=413)
    refused(raw(live, "/tokenize", b"x", **{"content-encoding": "gzip"}), status=415)
    start, end = b'{"prompt": "x"', b"}"
    fits = start + b" " * (limits.MAX_BODY_BYTES - len(start) - len(end)) + end
    assert raw(live, "/tokenize", fits).json()["count"] == 1
    refused(raw(live, "/tokenize", fits + b" "), status=413)


def test_depth_64_is_allowed(live: Live) -> None:
    assert limits.parse_json(b'{"a":' * 64 + b"1" + b"}" * 64)
    assert limits.parse_json(b'{"a":' * 63 + b"{}" + b"}" * 63)
    with pytest.raises(Exception, match="64 levels"):
        limits.parse_json(b'{"a":' * 65 + b"1" + b"}" * 65)


def test_R_16_every_chunk_is_strict_json(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.insight.simulated import Oracle
    from headrace.protocol.step import TokenLogprob

    def hostile(self: Oracle, token_id: int, position: int, num_top: int) -> TokenLogprob:
        return TokenLogprob(token_id, float("-inf"), 1, ((token_id, float("-inf")), (1, float("nan"))))

    monkeypatch.setattr(Oracle, "logprob", hostile)
    body = {"prompt": "x", "max_tokens": 50, "logprobs": 2, "stream": True, "ignore_eos": True, "prompt_logprobs": 1}
    lines = [line for line in live.post("/v1/completions", body).text.split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    pieces = [strict(line[6:])["choices"][0]["logprobs"] for line in lines[:-1]]
    result = [x for piece in pieces if piece for x in piece["token_logprobs"]]
    assert len(result) == 50
    assert set(result) == {-9999.0}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    top = strict(live.post("/v1/chat/completions", chat).text)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert {entry["logprob"] for entry in top} == {-9999.0}
