"""Request parameters that clients of other engines send: each works, is named in `warnings`, or is refused by name.

The names are those of vLLM, SGLang, OpenAI, llama-server and Ollama; the values are ones that ask for something.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.server import Live

from headrace.serve.apis.anthropic import request as anthropic_request
from headrace.serve.apis.llama_server import request as llama_request
from headrace.serve.apis.ollama import request as ollama_request
from headrace.serve.call import schema

SAMPLING: dict[str, Any] = {
    "n": 2, "max_tokens": 3, "min_tokens": 1, "ignore_eos": True, "thinking_token_budget": 5, "temperature": 0.5,
    "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.5,
    "repetition_penalty": 1.1, "logit_bias": {"5": 1}, "allowed_token_ids": [1, 2, 3], "bad_words": ["x"],
    "stop": ["zzz"], "stop_token_ids": [7], "include_stop_str_in_output": True, "repetition_detection": {"n": 3},
    "prompt_logprobs": 1, "logprob_token_ids": [1], "flat_logprobs": True, "detokenize": True, "output_kind": 1,
    "skip_special_tokens": False, "spaces_between_special_tokens": False, "stream_interval": 2,
    "structured_outputs": {"regex": "a+"}, "guided_json": {"type": "object"}, "guided_regex": "a+",
    "guided_choice": ["a"], "guided_grammar": "start: \"a\"", "guided_decoding_backend": "xgrammar",
    "extra_args": {"a": 1}, "skip_reading_prefix_cache": True, "trace_decode_token_ids": [1], "length_penalty": 1.5,
    "use_beam_search": True, "best_of": 2, "truncate_prompt_tokens": 5, "add_special_tokens": True, "priority": 0,
    "request_id": "me", "return_token_ids": True, "return_tokens_as_token_ids": True, "cache_salt": "s",
    "kv_transfer_params": {"a": 1}, "vllm_xargs": {"a": 1}, "include_metrics": True, "typical_p": 0.9,
    "response_format": {"type": "json_object"}, "user": "me", "metadata": {"a": "b"}, "service_tier": "flex",
    "store": True, "prediction": {"type": "content", "content": "x"}, "prompt_cache_key": "k", "safety_identifier": "i",
    "mirostat": 2, "adaptive_target": 0.3, "watermark": True, "dry_multiplier": 0.5, "xtc_probability": 0.5,
    "top_n_sigma": 1.0, "dynatemp_range": 0.5, "no_repeat_ngram_size": 3, "samplers": ["top_k"], "echo": True,
    "suffix": "x", "prompt_embeds": "AA==", "speculation": False,
    # SGLang's own words.
    "max_new_tokens": 3, "min_new_tokens": 1, "stop_regex": "a+", "regex": "a+", "ebnf": "root ::= x",
    "custom_logit_processor": "x", "custom_params": {"a": 1}, "sampling_seed": 1, "lora_path": "x",
    "separate_reasoning": True, "return_hidden_states": True,
}  # fmt: skip
CHAT: dict[str, Any] = {
    "add_generation_prompt": True, "continue_final_message": False, "documents": [{"text": "x"}],
    "chat_template": "{{ 1 }}", "chat_template_kwargs": {"enable_thinking": False}, "mm_processor_kwargs": {"a": 1},
    "logprobs": True, "max_completion_tokens": 3, "reasoning_effort": "low", "verbosity": "low",
    "web_search_options": {"user_location": None}, "modalities": ["text", "audio"], "audio": {"voice": "x"},
    "functions": [{"name": "f"}], "function_call": "auto", "parallel_tool_calls": False, "tool_choice": "none",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}  # fmt: skip
ROUTES: dict[str, tuple[dict[str, Any], dict[str, Any], type[Any]]] = {
    "/v1/completions": ({"prompt": "hi", "max_tokens": 3}, SAMPLING, schema.CompletionRequest),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        SAMPLING | CHAT,
        schema.ChatCompletionRequest,
    ),
    "/v1/messages": (
        {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        SAMPLING | {"container": "c", "speed": "fast", "inference_geo": "eu", "diagnostics": {}, "mcp_servers": []},
        anthropic_request.MessagesRequest,
    ),
    "/completion": ({"prompt": "hi", "n_predict": 3}, SAMPLING, llama_request.LlamaCompletionRequest),
    "/api/chat": (
        {
            "model": "fake",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": False,
            "options": {"num_predict": 3},
        },
        SAMPLING | {"keep_alive": "5m", "truncate": True, "shift": True},
        ollama_request.ChatRequest,
    ),
}
CASES = [(path, name) for path, (_, values, _) in ROUTES.items() for name in values]


def verdict(live: Live, path: str, name: str, value: Any) -> str:
    """What becomes of one parameter: "works", "told", "refused" or "dropped"."""
    body, _, kind = ROUTES[path]
    reply = live.post(path, body | {name: value})
    if reply.status_code == 400:
        error = reply.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert message.startswith(name), message
        return "refused"
    assert reply.status_code == 200, reply.text
    if any(output.startswith(f"{name}: ") for output in reply.json().get("warnings", ())):
        return "told"
    return "works" if name in kind.__struct_fields__ else "dropped"


@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_parameter_works_is_told_or_is_refused(live: Live, path: str, name: str) -> None:
    assert verdict(live, path, name, ROUTES[path][1][name]) != "dropped"


def test_options_of_ollama_work_or_are_told(live: Live) -> None:
    options = {"num_ctx": 9, "num_keep": 4, "tfs_z": 0.5, "penalize_newline": False, "unheard_of": 1}
    options |= dict.fromkeys(ollama_request.LOADING, 1)
    body = {"model": "fake", "prompt": "x", "stream": False, "options": options | {"num_predict": 2}}
    output = {line.partition(": ")[0] for line in live.post("/api/generate", body).json()["warnings"]}
    assert output == {f"options.{name}" for name in options}
    assert not set(ollama_request.Options.__struct_fields__) & set(ollama_request.LOADING)


def test_control_a_parameter_that_is_dropped_is_noticed(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.serve.call import parsing

    monkeypatch.setattr(parsing.Warnings, "add", lambda *_: None)
    assert verdict(live, "/v1/completions", "stop_regex", "a+") == "dropped"
