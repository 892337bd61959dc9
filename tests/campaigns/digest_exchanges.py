"""The answers of a take over HTTP: every route of every API, whole and as a stream, and every format of tool calls.

What the model says is forced (`trace_decode_token_ids`) where a format of tool calls or of reasoning is read. `digests
take` calls `take`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.campaigns.digest_http import Server, serve
from tests.campaigns.digests import Record

TALK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me a story."}]
LONG = [*TALK, {"role": "assistant", "content": "Once there was a cat."}, {"role": "user", "content": "And then?"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer"}},
         "required": ["city"], "additionalProperties": False}  # fmt: skip
WEATHER = {"name": "weather", "description": "The weather in a city", "parameters": PLACE}
TIME = {"name": "time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": TIME}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CALLED = [
    {"role": "user", "content": "Weather in Rome?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"},
]  # fmt: skip

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
FUNCTIONS = [{"type": "function"} | WEATHER, {"type": "function"} | TIME]
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
    {"messages": PARTS}, {"stop_sequences": ["."], "max_tokens": 60}, {"top_k": 5, "top_p": 0.9},
    {"tools": [{"name": "weather", "input_schema": PLACE}]}, {"metadata": {"user_id": "u"}},
    {"tools": [{"name": "weather", "input_schema": PLACE}], "tool_choice": {"type": "any"}, "max_tokens": 60},
    {"tools": [{"name": "weather", "input_schema": PLACE}], "tool_choice": {"type": "tool", "name": "weather"},
     "max_tokens": 60}, {"tools": [{"name": "weather", "input_schema": PLACE}], "tool_choice": {"type": "none"}},
    {"messages": [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": [
        {"type": "text", "text": "Let me see."}, {"type": "tool_use", "id": "t1", "name": "weather",
        "input": {"city": "Rome"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "18"}]}]},
    {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 60},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1000}, {"thinking": {"type": "disabled"}},
    {"messages": [*LONG[1:], {"role": "assistant", "content": "And so"}]}, {"no_such_field": 1},
]  # fmt: skip
OPTIONS = {"num_predict": 12, "temperature": 0}
GENERATES: list[dict[str, Any]] = [
    {}, {"options": {"num_predict": 12, "seed": 3, "top_k": 20, "top_p": 0.9, "repeat_penalty": 1.1}},
    {"system": "Be kind."}, {"raw": True}, {"format": "json"}, {"format": SCHEMA}, {"context": [518, 485]},
    {"options": OPTIONS | {"stop": ["."], "num_predict": 60}}, {"logprobs": True, "top_logprobs": 2}, {"think": False},
    {"keep_alive": "5m"}, {"options": OPTIONS | {"mirostat": 1, "num_ctx": 512, "tfs_z": 1.0}}, {"prompt": ""},
]  # fmt: skip
OLLAMA_CHATS: list[dict[str, Any]] = [
    {}, {"messages": LONG}, {"format": SCHEMA, "options": {"num_predict": 60, "seed": 2}}, {"tools": TOOLS},
    {"think": False},
    {"logprobs": True, "top_logprobs": 2}, {"options": {"num_predict": 12, "seed": 3}}, {"messages": []},
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
    ("/v1/messages/count_tokens", {"model": "builtin", "messages": LONG[1:], "system": "Be kind.",
                                   "tools": [{"name": "weather", "input_schema": PLACE}]}),
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
"/version",
         "/v1/models", "/v1/models/builtin", "/v1/models/none", "/api/tags", "/api/ps", "/api/version", "/openapi.json",
         "/slots?fail_on_no_slot=1", "/v1/files", "/v1/batches"]  # fmt: skip

TEMPLATE = """{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}\
{% for message in messages %}\
{{ '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' }}{{ message['content'] or '' }}\
{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
SAID: dict[str, list[str]] = {
    "hermes": ['<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
               'Well. <tool_call>{"name": "time", "arguments": {}}</tool_call><tool_call>{"name": "weather"'],
    "qwen3_coder": ["<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"],
    "llama3_json": ['{"name": "weather", "parameters": {"city": "Rome"}}',
                    '<|python_tag|>{"name": "time", "parameters": {}}'],
    "mistral": ['[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]',
                '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'],
    "pythonic": ['[weather(city="Rome", days=3), time()]'],
    "deepseek_v3": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
                    '{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'],
    "granite": ['<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]'],
    "glm45": ["<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"],
}  # fmt: skip
"""An answer with calls in each format; every format is given every answer."""
THOUGHT = {"hermes": "qwen3", "qwen3_coder": "qwen3", "llama3_json": "deepseek_r1", "mistral": "mistral",
           "pythonic": "gemma4", "deepseek_v3": "deepseek_v3", "granite": "granite", "glm45": "glm45"}  # fmt: skip
THOUGHTS = ["<think>Hm. Let me see.</think>\n\nHello.", "Hm.</think>Hello.", "[THINK]Hm.[/THINK]Hello.", "<think>Hm",
            "Here is my thought process: Hm. Here is my response: Hello.",
            "<|channel>thought\nHm.<channel|>Hello."]  # fmt: skip


def take(record: Record, models: Path, work: Path) -> None:
    """Record all cases under http/answers/ and http/tools/."""
    if record.wants("http/answers/"):
        flags = ["--storage-dir", str(work / "stored"), "--max-batch-concurrency", "1"]
        with serve(record, "http/answers", work, *flags) as server:
            for path in READS:
                server.exchange(f"read{path}", "GET", path)
            take_streams(server)
            for place, (path, body) in enumerate(OTHERS):
                server.exchange(f"other{path}/{place}", "POST", path, body)
            take_stored(server)
            take_files(server)
            metrics = server.send("GET", "/metrics").text.splitlines()
            names = {re.sub(r" \S+$", "", line) if not line.startswith("#") else line for line in metrics}
            record.add("http/answers/metrics", sorted(name for name in names if "_bucket{" not in name), "exchanges")
    for parser, style in THOUGHT.items():
        if record.wants(f"http/tools/{parser}/"):
            take_tools(record, work, parser, style)


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


def take_stored(server: Server) -> None:
    """Stored responses: read, continued, listed, removed, cancelled."""
    body = {"input": "Hello", "max_output_tokens": 12, "seed": 7}
    first = server.exchange("stored/first", "POST", "/v1/responses", body).json()["id"]
    follow = server.exchange("stored/follow", "POST", "/v1/responses",
                             body | {"input": "And then?", "previous_response_id": first})  # fmt: skip
    for name, response_id in (("first", first), ("follow", follow.json()["id"])):
        path = f"/v1/responses/{response_id}"
        for query in (
            "",
            "/input_items",
            "/input_items?limit=1",
            "/input_items?order=asc",
            "?stream=true",
            "?include=x",
        ):
            server.exchange(f"stored/{name}/read{query}", "GET", path + query)
        server.exchange(f"stored/{name}/cancel", "POST", f"{path}/cancel")
        server.exchange(f"stored/{name}/delete", "DELETE", path)
        server.exchange(f"stored/{name}/deleted", "GET", path)
    background = server.exchange("stored/background", "POST", "/v1/responses", body | {"background": True})
    if background.status_code == 200:
        path = f"/v1/responses/{background.json()['id']}"
        server.keep("stored/background/done", server.wanted(path, ("completed", "incomplete", "failed")))
        server.exchange("stored/background/cancel", "POST", f"{path}/cancel")


def take_files(server: Server) -> None:
    """Files and batches, one that succeeds, one with refused lines, one with broken lines."""
    requests = [
        ("/v1/completions", {"prompt": "Once", "max_tokens": 4}), ("/v1/completions", {"prompt": "A",
        "max_tokens": 3, "seed": 2}),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 0}),
    ]  # fmt: skip
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(requests)
    ]
    contents = {
        "good": "\n".join(map(json.dumps, lines[:2])), "refused": "\n".join(map(json.dumps, lines)),
        "broken": json.dumps(lines[0]) + "\n{\n" + json.dumps(lines[0]),
        "url": json.dumps(lines[0] | {"url": "/nothing"}),
    }  # fmt: skip
    for name, content in contents.items():
        reply = server.client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": (f"{name}.jsonl", content.encode())}
        )
        server.keep(f"files/{name}", reply)
        file_id = reply.json()["id"]
        server.exchange(f"files/{name}/read", "GET", f"/v1/files/{file_id}")
        server.exchange(f"files/{name}/content", "GET", f"/v1/files/{file_id}/content")
        body = {
            "input_file_id": file_id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"a": "b"},
        }
        batch = server.send("POST", "/v1/batches", body)
        server.record.add(f"{server.title}/batches/{name}/status", batch.status_code, "exchanges")
        done = server.wanted(f"/v1/batches/{batch.json()['id']}", ("completed", "failed", "expired", "cancelled"))
        server.keep(f"batches/{name}", done)
        for kind in ("output_file_id", "error_file_id"):
            if done.json().get(kind):
                output = server.send("GET", f"/v1/files/{done.json()[kind]}/content")
                for line in sorted(map(json.loads, output.text.splitlines()), key=lambda one: str(one["custom_id"])):
                    body = server.normal().value(line)
                    server.record.add(f"{server.title}/batches/{name}/{kind}/{line['custom_id']}", body, "exchanges")
        server.exchange(f"batches/{name}/cancel", "POST", f"/v1/batches/{batch.json()['id']}/cancel")
        server.exchange(f"files/{name}/delete", "DELETE", f"/v1/files/{file_id}")
        server.exchange(f"files/{name}/deleted", "GET", f"/v1/files/{file_id}")
    for query in ("", "?limit=2", "?order=asc", "?purpose=batch"):
        server.exchange(f"files/list{query}", "GET", f"/v1/files{query}")
    for query in ("", "?limit=1"):
        server.exchange(f"batches/list{query}", "GET", f"/v1/batches{query}")


def take_tools(record: Record, work: Path, parser: str, style: str) -> None:
    """A server that reads one format of calls and one of reasoning, with answers in every format."""
    template = work / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ["--chat-template", str(template), "--tool-call-parser", parser, "--reasoning-parser", style]
    with serve(record, f"http/tools/{parser}", work, *flags) as server:
        for place, text in enumerate([text for texts in SAID.values() for text in texts] + THOUGHTS):
            tokens = server.send("POST", "/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
            body = {
                "messages": TALK,
                "tools": TOOLS,
                "seed": 7,
                "max_tokens": len(tokens),
                "trace_decode_token_ids": tokens,
            }
            for stream in (False, True):
                server.exchange(f"chat/{place}/{stream}", "POST", "/v1/chat/completions", body | {"stream": stream})
            response = {
                "input": "Hi",
                "tools": FUNCTIONS,
                "max_output_tokens": len(tokens),
                "trace_decode_token_ids": tokens,
            }
            server.exchange(f"responses/{place}", "POST", "/v1/responses", response | {"seed": 7, "stream": True})
        fields = {"messages": CALLED, "tools": TOOLS, "seed": 7, "max_tokens": 80, "tool_choice": "required"}
        message = {"model": "builtin", "messages": TALK[1:],
        "max_tokens": 80, "temperature": 0, "tool_choice": {"type": "any"},
                   "tools": [{"name": "weather", "input_schema": PLACE}]}  # fmt: skip
        for stream in (False, True):
            server.exchange(f"required/{stream}", "POST", "/v1/chat/completions", fields | {"stream": stream})
            server.exchange(f"messages/{stream}", "POST", "/v1/messages", message | {"stream": stream})
            server.exchange(f"ollama/{stream}", "POST", "/api/chat", {"model": "builtin",
            "messages": TALK, "tools": TOOLS,
                            "options": OPTIONS, "stream": stream})  # fmt: skip
        server.exchange("template", "POST", "/apply-template", {"messages": CALLED, "tools": TOOLS})
