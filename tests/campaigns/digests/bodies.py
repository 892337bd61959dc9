"""The single requests of a take over HTTP: every route of every API, whole and as a stream, and what they refuse.

Refused are every field of every route's body with values that it must not take, made from the server's own
/openapi.json, then broken bodies, wrong methods, wrong queries and keys. A value that the server takes after all is
recorded like a refusal. `__main__` calls `take`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.campaigns.digests.servers import CALLED, FUNCTIONS, ONE_TOOL, OPTIONS, TALK, TOOLS, Server, serve, take_kept

if TYPE_CHECKING:
    from tests.campaigns.digests.__main__ import Record

LONG = [*TALK, {"role": "assistant", "content": "Once there was a cat."}, {"role": "user", "content": "And then?"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
SAMPLING: list[dict[str, Any]] = [
    {}, {"temperature": 0}, {"n": 3}, {"n": 2, "best_of": 4}, {"stop": ["."]},
    {"stop": ["and", "."], "include_stop_str_in_output": True}, {"min_tokens": 10, "stop_token_ids": [19]},
    {"logit_bias": {"264": 5, "17": -100}}, {"bad_words": ["the", "a"]}, {"allowed_token_ids": [17, 19, 264, 267]},
    {"min_p": 0.1, "top_k": 20, "typical_p": 0.9}, {"mirostat": 2}, {"dry_multiplier": 2.0, "repetition_penalty": 1.2},
    {"xtc_probability": 0.5}, {"samplers": ["top_k", "temperature"], "top_k": 3}, {"watermark": True},
    {"guided_choice": ["cat", "dog"]}, {"guided_regex": "[A-Z][a-z]{3,5}\\."}, {"guided_json": SCHEMA},
    {"guided_grammar": 'root ::= "yes" | "no"'}, {"response_format": FORMAT},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, {"guided_json": SCHEMA, "max_tokens": 4},
    {"guided_json": {"type": "string", "format": "path"}}, {"use_beam_search": True, "beam_width": 3, "temperature": 0},
    {"return_token_ids": True}, {"trace_decode_token_ids": [17, 411, 19]},
    {"ignore_eos": True, "skip_special_tokens": False},
    {"prompt_logprobs": 1}, {"truncate_prompt_tokens": 2}, {"cache_salt": "mine", "priority": 3, "user": "u"},
    {"speculation": False, "timeout": 60}, {"seed": 2**40}, {"no_such_field": 1}, {"metadata": {"a": "b"}},
]  # fmt: skip
"""Taken by completions and chat completions alike."""

COMPLETIONS: list[dict[str, Any]] = [
    {"logprobs": 3}, {"logprobs": 0, "n": 2}, {"echo": True}, {"echo": True, "logprobs": 1, "max_tokens": 3},
    {"prompt": ["Once", "The dog"]}, {"prompt": [518, 485]}, {"prompt": [[518], [485, 264]], "n": 2},
    {"prompt": ["A", "B"], "echo": True, "logprobs": 1}, {"add_special_tokens": False}, {"max_tokens": None},
]  # fmt: skip
CHATS: list[dict[str, Any]] = [
    {"logprobs": True}, {"logprobs": True, "top_logprobs": 3, "n": 2}, {"messages": LONG}, {"messages": PARTS},
    {"max_completion_tokens": 4}, {"messages": LONG[:3],
    "continue_final_message": True, "add_generation_prompt": False},
    {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}, {"messages": CALLED},
    {"tools": TOOLS, "messages": CALLED}, {"reasoning_effort": "low"}, {"chat_template_kwargs": {"a": 1}},
    {"tools": TOOLS, "parallel_tool_calls": False, "tool_choice": "required"}, {"max_tokens": None, "stop": "."},
    {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "time"}}]}}}, {"include_reasoning": False},
]  # fmt: skip
RESPONSES: list[dict[str, Any]] = [
    {}, {"instructions": "Be kind."}, {"input": LONG[1:]}, {"max_output_tokens": 100, "stop": ["."]}, {"store": False},
    {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]},
    {"tools": FUNCTIONS}, {"tools": FUNCTIONS, "tool_choice": "required"}, {"tools": FUNCTIONS, "tool_choice": "none"},
    {"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "weather"}},
    {"tools": FUNCTIONS, "input": [{"role": "user", "content": "Weather?"},
     {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
     {"type": "function_call_output", "call_id": "c1", "output": "18"}]},
    {"text": {"format": {"type": "json_schema", "name": "pet", "schema": SCHEMA}}, "max_output_tokens": 60},
    {"text": {"format": {"type": "json_object"}, "verbosity": "low"}}, {"metadata": {"a": "b"}, "user": "u"},
    {"max_output_tokens": 8, "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    {"temperature": 0, "top_p": 0.5},
    {"reasoning": {"effort": "low", "summary": "auto"}, "service_tier": "flex", "truncation": "auto"},
    {"min_p": 0.1, "repetition_penalty": 1.2}, {"input": [{"type": "reasoning", "summary": [], "content": [
        {"type": "reasoning_text", "text": "Hm."}]}, {"role": "user", "content": "Hi"}]}, {"no_such_field": 1},
]  # fmt: skip
MESSAGES: list[dict[str, Any]] = [
    {}, {"system": "Be kind."}, {"system": [{"type": "text", "text": "Be kind."}]}, {"messages": LONG[1:]},
    {"messages": PARTS}, {"stop_sequences": ["."], "max_tokens": 60}, {"top_k": 5, "top_p": 0.9}, ONE_TOOL,
    {"metadata": {"user_id": "u"}},
    ONE_TOOL | {"tool_choice": {"type": "any"}, "max_tokens": 60},
    ONE_TOOL | {"tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 60},
    ONE_TOOL | {"tool_choice": {"type": "none"}},
    {"messages": [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": [
        {"type": "text", "text": "Let me see."}, {"type": "tool_use", "id": "t1", "name": "weather",
        "input": {"city": "Rome"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "18"}]}]},
    {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 60},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1000}, {"thinking": {"type": "disabled"}},
    {"messages": [*LONG[1:], {"role": "assistant", "content": "And so"}]}, {"no_such_field": 1},
]  # fmt: skip
GENERATES: list[dict[str, Any]] = [
    {}, {"options": {"num_predict": 12, "seed": 3, "top_k": 20, "top_p": 0.9, "repeat_penalty": 1.1}},
    {"system": "Be kind."}, {"raw": True}, {"format": "json"}, {"format": SCHEMA}, {"context": [518, 485]},
    {"options": OPTIONS | {"stop": ["."], "num_predict": 60}}, {"logprobs": True, "top_logprobs": 2}, {"think": False},
    {"keep_alive": "5m"}, {"options": OPTIONS | {"mirostat": 1, "num_ctx": 512, "tfs_z": 1.0}}, {"prompt": ""},
]  # fmt: skip
OLLAMA_CHATS: list[dict[str, Any]] = [
    {}, {"messages": LONG}, {"format": SCHEMA, "options": {"num_predict": 60, "seed": 2}}, {"tools": TOOLS},
    {"think": False}, {"logprobs": True, "top_logprobs": 2}, {"options": {"num_predict": 12, "seed": 3}},
    {"messages": []},
    {"messages": [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "weather", "arguments": {"city": "Rome"}}}]}, {"role": "tool", "content": "18",
        "tool_name": "weather"}]},
]  # fmt: skip
LLAMA: list[dict[str, Any]] = [
    {}, {"temperature": 0}, {"n_probs": 3}, {"stop": ["."], "n_predict": 60},
    {"n_predict": 4, "timings_per_token": True},
    {"prompt": [518, 485]}, {"prompt": [518, " upon"]}, {"grammar": 'root ::= "yes" | "no"'}, {"json_schema": SCHEMA},
    {"logit_bias": [[264, 5], [17, False]]}, {"logit_bias": {"264": 5}}, {"samplers": ["top_k", "temperature"],
    "top_k": 3},
    {"return_tokens": True}, {"cache_prompt": False}, {"response_fields": ["content", "generation_settings/seed"]},
    {"post_sampling_probs": True, "n_probs": 2}, {"ignore_eos": True, "mirostat": 2}, {"dynatemp_range": 0.5},
    {"dry_multiplier": 1.0, "xtc_probability": 0.5, "repeat_penalty": 1.2, "top_n_sigma": 1.0},
    {"n_predict": -1, "stop": ["."]},
]  # fmt: skip
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages/count_tokens", {"model": "builtin", "messages": TALK[1:]}),
    ("/v1/messages/count_tokens", {"model": "builtin", "messages": LONG[1:], "system": "Be kind."} | ONE_TOOL),
    ("/tokenize", {"prompt": "Once upon a time"}), ("/tokenize", {"content": "Once", "add_special": True}),
    ("/tokenize", {"content": "Once", "with_pieces": True}), ("/tokenize", {"messages": TALK}),
    ("/tokenize", {"prompt": "Once", "return_token_strs": True, "add_special_tokens": False}),
    ("/tokenize", {"content": "<|end|>", "parse_special": False}), ("/tokenize", {}), ("/tokenize",
    {"prompt": "é \u2603"}),
    ("/detokenize", {"tokens": [0, 518, 485, 264, 428]}), ("/detokenize", {"tokens": []}), ("/detokenize",
    {"tokens": [99999]}),
    ("/v1/embeddings", {"input": "Once"}), ("/v1/embeddings", {"input": ["A cat", "A dog"], "dimensions": 8}),
    ("/v1/embeddings", {"input": [518, 485], "encoding_format": "base64"}), ("/v1/embeddings",
    {"input": [[518], [485]]}),
    ("/v1/embeddings", {"input": "A cat", "pooling": "mean", "normalize": False, "truncate_prompt_tokens": 2}),
    ("/api/embed", {"model": "builtin", "input": ["A cat", "A dog"]}), ("/api/embed", {"model": "builtin",
    "input": "A"}),
    ("/api/embeddings", {"model": "builtin", "prompt": "A cat"}), ("/embedding", {"content": "A cat"}),
    ("/embedding", {"content": ["A", "B"], "embd_normalize": 0}), ("/embeddings", {"content": [518]}),
    ("/v1/score", {"text_1": "A cat", "text_2": ["A dog", "A car"]}), ("/score", {"text_1": ["a", "b"],
    "text_2": ["c", "d"]}),
    ("/v1/rerank", {"query": "A cat", "documents": ["A dog", "A car", "A tree"], "top_n": 2}),
    ("/v2/rerank", {"query": "A cat", "documents": ["A dog"], "return_documents": True}),
    ("/rerank", {"query": "A cat", "documents": ["A dog", "The"], "return_documents": False, "pooling": "mean"}),
    ("/apply-template", {"messages": TALK}), ("/apply-template", {"messages": LONG, "add_generation_prompt": False}),
    ("/apply-template", {"messages": CALLED, "tools": TOOLS}), ("/api/show", {"model": "builtin"}),
    ("/api/show", {"name": "builtin", "verbose": True}), ("/api/pull", {"model": "builtin"}), ("/infill", {}),
    ("/api/pull", {"model": "builtin", "stream": False}), ("/api/create", {}), ("/api/copy", {}), ("/api/push", {}),
    ("/props", {}), ("/slots/0", {}), ("/slots/0?action=save", {}), ("/ping", {}),
]  # fmt: skip
READS = ["/", "/slots", "/props", "/load", "/health", "/health/live", "/health/serving", "/health/ready", "/ping",
         "/version", "/v1/models", "/v1/models/builtin", "/v1/models/none", "/api/tags", "/api/ps", "/api/version",
         "/openapi.json", "/slots?fail_on_no_slot=1", "/v1/files", "/v1/batches"]  # fmt: skip

HI = [{"role": "user", "content": "Hi"}]
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 1, "temperature": 0, "seed": 1},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 1, "temperature": 0, "seed": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1, "temperature": 0, "seed": 1},
    "/v1/messages": {"model": "builtin", "messages": HI, "max_tokens": 1, "temperature": 0},
    "/v1/messages/count_tokens": {"model": "builtin", "messages": HI},
    "/tokenize": {"prompt": "Once"}, "/detokenize": {"tokens": [5, 6]},
    "/api/chat": {"model": "builtin", "messages": HI, "stream": False,
                  "options": {"num_predict": 1, "temperature": 0, "seed": 1}},
    "/api/generate": {"model": "builtin", "prompt": "Once", "stream": False,
                      "options": {"num_predict": 1, "temperature": 0, "seed": 1}},
    "/api/embed": {"model": "builtin", "input": "Once"}, "/api/embeddings": {"model": "builtin", "prompt": "Once"},
    "/api/show": {"model": "builtin"}, "/api/pull": {"model": "builtin", "stream": False},
    "/completion": {"prompt": "Once", "n_predict": 1, "temperature": 0, "seed": 1},
    "/completions": {"prompt": "Once", "n_predict": 1, "temperature": 0, "seed": 1},
    "/embedding": {"content": "Once"}, "/embeddings": {"content": "Once"},
    "/apply-template": {"messages": HI}, "/v1/embeddings": {"input": "Once"},
    "/v1/score": {"text_1": "a", "text_2": "b"}, "/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]}, "/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/v1/batches": {"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h"},
}  # fmt: skip
"""A body that each route takes, as short an answer as can be."""

OF_TYPE: dict[str, Any] = {
    "string": "x", "integer": 7, "number": 1.5, "boolean": True, "object": {"x": 1}, "array": [1],
}  # fmt: skip

CONFLICTS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"n": 2, "best_of": 1}, {"best_of": 2, "stream": True}, {"min_tokens": 5, "max_tokens": 2},
        {"guided_regex": "a", "guided_choice": ["a"]}, {"guided_regex": "a",
        "response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}}, {"structured_outputs": {}},
        {"ignore_eos": True, "guided_choice": ["a"]}, {"trace_decode_token_ids": [5], "n": 2},
        {"trace_decode_token_ids": [5], "guided_choice": ["a"]}, {"use_beam_search": True, "temperature": 0.5},
        {"use_beam_search": True, "stream": True}, {"beam_width": 4},
        {"use_beam_search": True, "beam_width": 4, "n": 5},
        {"use_beam_search": True, "beam_width": 4, "num_beam_groups": 3}, {"diversity_penalty": 1.0},
        {"stream_options": {"include_usage": True}}, {"logit_bias": {"x": 1}}, {"logit_bias": {"99999": 1}},
        {"logit_bias": {"5": 101}}, {"logit_bias": {"5": "a"}}, {"prompt": []}, {"prompt": ""}, {"prompt": [[]]},
        {"prompt": [99999]}, {"prompt": ["a"] * 257}, {"prompt": [5] * 1025}, {"prompt": "a b" * 4000},
        {"prompt": [["a"]]}, {"prompt": ["a", 5]}, {"model": "other"}, {"logprobs": 21}, {"stop": ["a"] * 17},
        {"stop": [""]}, {"stop": ["a" * 1025]}, {"bad_words": ["a" * 257]}, {"allowed_token_ids": [99999]},
        {"stop_token_ids": [99999]}, {"samplers": ["nothing"]}, {"samplers": ["top_k", "top_k"]},
        {"guided_regex": "("}, {"guided_grammar": "root ::= x"}, {"guided_json": {"type": "none"}},
        {"guided_json": {"type": "array", "uniqueItems": True}}, {"guided_regex": "(?=a)"}, {"guided_choice": [""]},
        {"response_format": {"type": "json_schema"}}, {"response_format": {"type": "xml"}}, {"suffix": "x"},
        {"watermark": {"gamma": 2}}, {"watermark": {"colour": 2}}, {"echo": True, "use_beam_search": True},
        {"prompt_logprobs": 1, "stream": True}, {"cache_salt": ""}, {"cache_salt": "a" * 257}, {"request_id": ""},
        {"timeout": 0}, {"timeout": 86401}, {"truncate_prompt_tokens": 0}, {"max_tokens": 2000},
    ],
    "/v1/chat/completions": [
        {"messages": []}, {"messages": [{}]}, {"messages": [{"role": "user"}]}, {"messages": [{"role": "x",
        "content": "a"}]},
        {"messages": [{"role": "user", "content": 5}]}, {"messages": [{"role": "user",
        "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, {"messages": ["a"]}, {"messages": "a"},
        {"messages": [{"role": "tool", "content": "a"}]}, {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        {"tools": [{}]}, {"tools": [{"type": "function"}]}, {"tools": [{"type": "function", "function": {}}]},
        {"tools": [{"type": "web_search"}]}, {"tool_choice": "required"}, {"tool_choice": "some"},
        {"tool_choice": {"type": "function", "function": {"name": "none"}}}, {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21}, {"max_tokens": 2, "max_completion_tokens": 3},
        {"add_generation_prompt": True, "continue_final_message": True}, {"functions": [{}]}, {"modalities": ["audio"]},
        {"reasoning_effort": "huge"}, {"chat_template_kwargs": {"messages": []}}, {"messages": HI * 600},
        {"n": 2, "use_beam_search": True, "beam_width": 1}, {"tools": [{"type": "function",
        "function": {"name": "a b"}}]},
        {"response_format": {"type": "json_schema", "json_schema": {}}}, {"response_format": {"type": "json_schema",
         "json_schema": {"name": "x", "schema": {"$ref": "http://a/b"}}}}, {"audio": {}}, {"chat_template": "x"},
    ],
    "/v1/responses": [
        {"previous_response_id": "resp_none"}, {"background": True, "stream": True},
        {"background": True, "store": False},
        {"tools": [{"type": "web_search"}]}, {"tools": [{"type": "function"}]}, {"tool_choice": {"type": "function"}},
        {"conversation": "x"}, {"prompt": {"id": "x"}}, {"input": []}, {"input": [{}]},
        {"input": [{"type": "message"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, {"input": [{"type": "item_reference"}]},
        {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, {"truncation": "some"},
        {"text": {"format": {"type": "json_schema"}}}, {"text": {"format": {"type": "xml"}}}, {"include": ["x"]},
        {"metadata": {"a": 1}}, {"metadata": {str(i): "x" for i in range(17)}}, {"input": "a " * 4000},
        {"input": "a " * 4000, "truncation": "auto"}, {"service_tier": "x"}, {"reasoning": {"effort": "huge"}},
        {"max_tool_calls": 0}, {"n": 2}, {"top_logprobs": 21}, {"stream_options": {"include_obfuscation": True}},
    ],
    "/v1/messages": [
        {"messages": []}, {"messages": [{"role": "system", "content": "a"}]}, {"messages": [{"role": "user",
        "content": []}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, {"model": "other"},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
        {"tools": [{"name": "a"}]}, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tool_choice": {"type": "tool", "name": "x"}}, {"tool_choice": {"type": "any"}},
        {"thinking": {"type": "enabled"}}, {"thinking": {"type": "enabled", "budget_tokens": 10}},
        {"stop_sequences": [""]}, {"max_tokens": 2000}, {"messages": HI * 600}, {"top_k": 1, "mcp_servers": []},
    ],
    "/api/generate": [
        {"model": "other"}, {"suffix": "x"}, {"images": ["a"]}, {"format": "xml"}, {"format": {"type": "none"}},
        {"raw": True, "system": "x"}, {"context": [99999]}, {"think": True}, {"options": {"num_ctx": 4096}},
        {"options": {"num_predict": -3}}, {"options": {"stop": 5}}, {"prompt": ""}, {"keep_alive": 0, "prompt": ""},
    ],
    "/api/chat": [
        {"model": "other"}, {"messages": []}, {"messages": [{"role": "user", "content": "x", "images": ["a"]}]},
        {"messages": [{"role": "x", "content": "y"}]}, {"tools": [{}]}, {"format": "xml"}, {"think": "high"},
    ],
    "/completion": [
        {"prompt": [[5], "a"]}, {"prompt": ["a", "b"]}, {"prompt": [5, "a"]}, {"n_predict": -2}, {"n_predict": 0},
        {"grammar": "root ::= x"}, {"grammar": "root ::= \"a\"", "json_schema": {}}, {"logit_bias": [[5, False]]},
        {"logit_bias": [["a", 1]]}, {"logit_bias": "x"}, {"samplers": "kx"}, {"samplers": ["x"]}, {"n_probs": 21},
        {"response_fields": ["content", "generation_settings/seed", "none"]}, {"id_slot": 3}, {"lora": []},
    ],
    "/v1/embeddings": [
        {"input": []}, {"input": ""}, {"input": [[]]}, {"input": ["a"] * 257}, {"input": [99999]}, {"dimensions": 0},
        {"dimensions": 100000}, {"encoding_format": "hex"}, {"pooling": "max"}, {"model": "other"},
        {"input": "a " * 4000},
    ],
}  # fmt: skip

BROKEN: dict[str, bytes] = {
    "empty": b"", "cut": b'{"prompt": "On', "list": b"[1]", "text": b'"x"', "number": b"5", "null": b"null",
    "bytes": b"\xff\xfe{}", "twice": b'{"prompt": "a", "prompt": "b", "max_tokens": 1, "seed": 1}',
    "nan": b'{"prompt": NaN}',
    "deep": b"[" * 5000 + b"]" * 5000, "deep-field": b'{"metadata": ' + b'{"a":' * 200 + b"1" + b"}" * 201,
    "surrogate": b'{"prompt": "\\ud800", "max_tokens": 1, "seed": 1}', "big": b'{"max_tokens": 1' + b"0" * 400 + b"}",
    "infinity": b'{"prompt": "a", "temperature": 1e999}', "tail": b"{} {}",
}  # fmt: skip


def take(record: Record, models: Path, work: Path) -> None:
    """Record all cases under http/answers/, http/refusals/ and http/keys/."""
    if record.wants("http/answers/"):
        flags = ["--storage-dir", str(work / "stored"), "--max-batch-concurrency", "1"]
        with serve(record, "http/answers", work, *flags) as server:
            for path in READS:
                server.exchange(f"read{path}", "GET", path)
            take_streams(server)
            for place, (path, body) in enumerate(OTHERS):
                server.exchange(f"other{path}/{place}", "POST", path, body)
            take_kept(server)
            metrics = server.send("GET", "/metrics").text.splitlines()
            names = {re.sub(r" \S+$", "", line) if not line.startswith("#") else line for line in metrics}
            record.add("http/answers/metrics", sorted(name for name in names if "_bucket{" not in name), "exchanges")
    if record.wants("http/refusals/"):
        with serve(record, "http/refusals", work, "--storage-dir", str(work / "refusals"), kind="refusals") as server:
            document = server.send("GET", "/openapi.json").json()
            take_fields(server, document)
            take_conflicts(server)
            take_broken(server)
            take_methods(server, document)
            take_queries(server)
    if record.wants("http/keys/"):
        take_keys(record, work)


def take_streams(server: Server) -> None:
    """Each body of the routes that generate, whole and as a stream."""
    text = {"prompt": "Once upon a time", "max_tokens": 24, "seed": 7}
    chat = {"messages": TALK, "max_tokens": 24, "seed": 7}
    routes: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
        ("/v1/completions", text, SAMPLING + COMPLETIONS), ("/v1/chat/completions", chat, SAMPLING + CHATS),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 24, "seed": 7}, RESPONSES),
        ("/v1/messages", {"model": "builtin", "messages": TALK[1:], "max_tokens": 24, "temperature": 0}, MESSAGES),
        ("/api/generate", {"model": "builtin", "prompt": "Once", "options": OPTIONS}, GENERATES),
        ("/api/chat", {"model": "builtin", "messages": TALK, "options": OPTIONS}, OLLAMA_CHATS),
        ("/completion", {"prompt": "Once", "n_predict": 12, "seed": 7}, LLAMA), ("/completions", {"prompt": "Once",
         "n_predict": 4, "seed": 7}, LLAMA[:2]),
    ]  # fmt: skip
    for path, base, changes in routes:
        for place, change in enumerate(changes):
            body = base | change
            name = f"answer{path}/{place} {json.dumps(change)[:60]}"
            server.exchange(f"{name}/whole", "POST", path, body | {"stream": False})
            server.exchange(f"{name}/stream", "POST", path, body | {"stream": True})
    for path, base in (("/v1/completions", text), ("/v1/chat/completions", chat)):
        for options in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}, {}):
            body = base | {"stream": True, "stream_options": options, "n": 2}
            server.exchange(f"usage{path}/{json.dumps(options)}", "POST", path, body)


def take_fields(server: Server, document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        reference = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if reference is None:
            continue
        schema = resolve(reference["schema"], schemas)
        base = BASES.get(path, {})
        for field, changed in bad_bodies(base, schema, schemas):
            server.exchange(f"fields{path}/{field}", "POST", path, changed)


def resolve(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def fields_of(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """The fields of a body; of one with several shapes, the fields of all."""
    shapes = [resolve(shape, schemas) for shape in schema.get("anyOf", [schema])]
    return {name: about for shape in shapes for name, about in shape.get("properties", {}).items()}


def bad_bodies(
    base: dict[str, Any], schema: dict[str, Any], schemas: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a title and a body for each bad value of each field, an unknown field, and each missing field."""
    yield "(as it is)", base
    yield "(nothing)", {}
    yield "(unknown)", base | {"no_such_field": 1}
    for field in base:
        yield f"{field}/(missing)", {name: value for name, value in base.items() if name != field}
    for field, about in fields_of(schema, schemas).items():
        for value in bad_values(about, schemas, depth=2):
            yield f"{field}/{json.dumps(value)}", base | {field: value}


def bad_values(about: dict[str, Any], schemas: dict[str, Any], depth: int) -> list[Any]:
    """null, one value of each JSON type, and values beyond each bound that the schema tells; each once."""
    values: list[Any] = [None, *OF_TYPE.values(), "", -(2**63) - 1, 2**63, [], {}, [None], ["x", 1]]
    for option in [about, *about.get("anyOf", [])]:
        option = resolve(option, schemas)
        for bound, step in (("minimum", -1), ("maximum", 1)):
            if bound in option:
                values += [option[bound] + step, option[bound] + step / 8]
        if "enum" in option:
            values.append("no-such-choice")
        if option.get("minItems"):
            values.append([])
        items = resolve(option.get("items", {}), schemas)
        if depth and "properties" in items:
            values += [[value] for value in nested(items, schemas, depth)]
        if depth and "properties" in option:
            values += nested(option, schemas, depth)
    return list({json.dumps(value): value for value in values}.values())


def nested(schema: dict[str, Any], schemas: dict[str, Any], depth: int) -> Iterator[dict[str, Any]]:
    whole = {name: example(schema["properties"][name], schemas) for name in schema.get("required", [])}
    yield whole
    yield whole | {"no_such_field": 1}
    for field, about in fields_of(schema, schemas).items():
        values = bad_values(about, schemas, depth - 1) if depth > 1 else [None, "x", 7, [1], {"x": 1}]
        for value in values:
            yield whole | {field: value}


def example(about: dict[str, Any], schemas: dict[str, Any]) -> Any:
    about = resolve(about, schemas)
    option = resolve(about["anyOf"][0], schemas) if "anyOf" in about else about
    if "enum" in option:
        return option["enum"][0]
    kind = option.get("type", "string")
    return OF_TYPE[kind if isinstance(kind, str) else kind[0]]


def take_conflicts(server: Server) -> None:
    for path, changes in CONFLICTS.items():
        for place, change in enumerate(changes):
            title = f"conflicts{path}/{place} {json.dumps(change)[:80]}"
            server.exchange(title, "POST", path, BASES[path] | change)


def take_broken(server: Server) -> None:
    for path in BASES:
        for name, content in BROKEN.items():
            server.exchange(f"broken{path}/{name}", "POST", path, content)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", ""):
        content = json.dumps(BASES["/v1/completions"]).encode()
        server.exchange(
            f"headers/content-type {kind}", "POST", "/v1/completions", content, headers={"content-type": kind}
        )
    headers = {
        "gzip": {"content-encoding": "gzip"}, "origin": {"origin": "https://elsewhere.example"},
        "host": {"host": "elsewhere.example"}, "id": {"x-request-id": "mine"}, "bad-id": {"x-request-id": "a b"},
        "long-id": {"x-request-id": "a" * 300}, "many": {f"x-{i}": "a" for i in range(150)},
        "long": {"x-a": "a" * 70000},
        "accept": {"accept": "text/html"}, "anthropic": {"anthropic-version": "2020-01-01"},
        "preflight": {"origin": "https://elsewhere.example", "access-control-request-method": "POST"},
    }  # fmt: skip
    for name, fields in headers.items():
        for path in ("/v1/completions", "/v1/messages", "/api/generate"):
            method = "OPTIONS" if name == "preflight" else "POST"
            server.exchange(f"headers/{name}{path}", method, path, BASES[path], headers=fields)
    server.exchange("address/long", "GET", "/v1/models?" + "a" * 60000)


def take_methods(server: Server, document: dict[str, Any]) -> None:
    for path in [*document["paths"], "/nothing", "/v1/nothing", "/api/nothing", "/v1/models/none", "//v1/models"]:
        real = path.replace("{name}", "builtin").replace("{", "").replace("}", "")
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            if method == "GET" and real == "/metrics":
                continue
            server.exchange(f"methods/{method} {path}", method, real)


def take_queries(server: Server) -> None:
    queries = ["limit=0", "limit=-1", "limit=x", "limit=101", "limit=100000", "order=up", "after=none", "purpose=x",
               "limit=1&limit=2", "stream=true", "stream=x", "fail_on_no_slot=1", "fail_on_no_slot=x", "none=1",
               "include=x", "starting_after=5"]  # fmt: skip
    paths = ["/v1/files", "/v1/batches", "/v1/responses/resp_0", "/v1/responses/resp_0/input_items", "/slots",
             "/v1/models"]  # fmt: skip
    for path in paths:
        for query in queries:
            server.exchange(f"queries{path}?{query}", "GET", f"{path}?{query}")
    for name, fields, files in (
        ("nothing", {}, None), ("no-file", {"purpose": "batch"}, None), ("no-purpose", {}, {"file": ("a", b"x")}),
        ("purpose", {"purpose": "x"}, {"file": ("a", b"x")}), ("empty", {"purpose": "batch"}, {"file": ("a", b"")}),
        ("unknown", {"purpose": "batch", "x": "y"}, {"file": ("a", b"x")}),
        ("name", {"purpose": "batch"}, {"file": ("../../a\nb", b"x")}),
    ):  # fmt: skip
        reply = server.client.post("/v1/files", data=fields, files=files)
        server.keep(f"files/{name}", reply)


def take_keys(record: Record, work: Path) -> None:
    keys = work / "keys.toml"
    keys.write_text('[alice]\nkey = "alice-key-1234"\nrequests_per_minute = 30\n\n'
                    '[watch]\nkey = "watch-key-1234"\nclasses = ["metrics"]\n\n'
                    '[poor]\nkey = "poor-key-12345"\nrequests_per_minute = 1\n')  # fmt: skip
    flags = ["--api-key-file", str(keys), "--admin-api-key", "admin-key-1234"]
    with serve(record, "http/keys", work, *flags, key="admin-key-1234", kind="refusals") as server:
        document = server.send("GET", "/openapi.json", headers={"authorization": "Bearer admin-key-1234"}).json()
        messages: dict[str, dict[str, str]] = {
            "none": {}, "wrong": {"authorization": "Bearer wrong-key-1234"}, "basic": {"authorization": "Basic YTpi"},
            "empty": {"authorization": "Bearer"}, "watch": {"authorization": "Bearer watch-key-1234"},
        }  # fmt: skip
        for path, methods in document["paths"].items():
            for method in methods:
                for name, headers in messages.items():
                    if path == "/metrics" and name == "watch":
                        continue
                    real = path.replace("{", "").replace("}", "")
                    server.exchange(f"{name}/{method} {path}", method.upper(), real, headers=headers)
        admin = {"x-api-key": "admin-key-1234"}
        for path in ("/api/create", "/api/copy", "/api/push", "/props", "/slots/0", "/infill"):
            server.exchange(f"admin{path}", "POST", path, {}, headers=admin)
        poor = {"x-api-key": "poor-key-12345"}
        paths = ("/v1/completions", "/v1/completions", "/v1/messages", "/api/generate", "/completion")
        for place, path in enumerate(paths):
            reply = server.send("POST", path, BASES[path], headers=poor)
            if reply.status_code == 429:
                # The message has the seconds to wait.
                value = {"status": 429, "headers": sorted(reply.headers.keys() - {"date", "content-length"})}
                record.add(f"http/keys/poor/{place}{path}", value, "refusals")
            else:
                server.keep(f"poor/{place}{path}", reply)
        for place in range(2):
            reply = server.send("POST", paths[0], BASES[paths[0]], headers={"x-api-key": "alice-key-1234"})
            server.keep(f"alice/{place}", reply, "exchanges")
