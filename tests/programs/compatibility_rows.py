"""The rows of docs/compatibility.md: features, the names by which they are had, and the tests that show them."""

from __future__ import annotations

from typing import NamedTuple

# Shorter names of the files below.
FILES = {
    "sampler": "tests/sampling/test_sampler.py",
    "filters": "tests/sampling/test_filters.py",
    "choosers": "tests/sampling/test_choosers.py",
    "edits": "tests/sampling/test_edits.py",
    "watermark": "tests/sampling/test_watermark.py",
    "watermarked": "tests/e2e/test_watermark.py",
    "beams": "tests/serve/apis/openai/test_beams.py",
    "transformers' beams": "tests/models/test_beams.py",
    "law of samplers": "tests/e2e/test_law_samplers.py",
    "grammars": "tests/grammar/test_compile.py",
    "matchers": "tests/grammar/test_matchers.py",
    "parsers": "tests/text/tools/test_parsers.py",
    "bfcl": "tests/text/tools/test_bfcl.py",
    "detokenize": "tests/text/test_detokenize.py",
    "finish": "tests/core/test_finish.py",
    "sampling api": "tests/serve/call/test_sampling_api.py",
    "openai": "tests/serve/apis/openai/test_openai_client.py",
    "responses": "tests/serve/apis/openai/test_responses.py",
    "embeddings": "tests/serve/apis/openai/test_embeddings.py",
    "batches": "tests/serve/apis/openai/test_files_batches.py",
    "run-batch": "tests/e2e/test_run_batch.py",
    "anthropic": "tests/serve/apis/anthropic/test_anthropic_client.py",
    "ollama": "tests/serve/apis/ollama/test_ollama_client.py",
    "folder": "tests/serve/test_models_folder.py",
    "models": "tests/e2e/test_models.py",
    "infill": "tests/serve/apis/llama_server/test_infill.py",
    "slots": "tests/serve/apis/llama_server/test_slots.py",
    "sessions": "tests/engine/test_sessions.py",
    "vllm": "tests/serve/apis/openai/test_vllm_routes.py",
    "aliases": "tests/serve/test_aliases.py",
    "request templates": "tests/serve/call/test_request_templates.py",
    "stored responses": "tests/serve/apis/openai/test_responses_stored.py",
    "llama": "tests/serve/apis/llama_server/test_llama_server_api.py",
    "operations": "tests/serve/test_operations.py",
    "refusals": "tests/serve/test_refusals.py",
    "openapi": "tests/serve/test_openapi.py",
    "auth": "tests/serve/gates/test_auth.py",
    "browsers": "tests/security/test_browsers.py",
    "law": "tests/e2e/test_law.py",
    "golden": "tests/models/test_golden.py",
    "calls": "tests/serve/gates/test_calls.py",
    "replay": "tests/e2e/test_replay.py",
    "cli": "tests/cli/test_cli.py",
    "examples": "tests/e2e/test_examples.py",
    "lm-eval": "tests/e2e/test_lm_eval.py",
    "offline": "tests/test_llm.py",
}


class Row(NamedTuple):
    """`works` is "yes", "partly" or "no"; `how` the names by which it is had; `tests` are "file name:test name"."""

    feature: str
    works: str
    how: str
    tests: tuple[str, ...] = ()


DECODING = (
    Row("greedy", "yes", "`temperature` 0", ("sampler:test_greedy_is_the_first_of_the_likeliest",)),
    Row(
        "beam search",
        "yes",
        "`use_beam_search`, `LLM.beam_search`; groups, length penalty, early stopping",
        (
            "transformers' beams:test_beams_are_those_of_transformers",
            "beams:test_use_beam_search_finds_the_likeliest_answers",
        ),
    ),
    Row("temperature", "yes", "`temperature`", ("filters:test_temperature",)),
    Row("top-k", "yes", "`top_k`", ("filters:test_top_k",)),
    Row("top-p", "yes", "`top_p`", ("filters:test_top_p", "choosers:test_top_p_is_transformers")),
    Row("min-p", "yes", "`min_p`", ("filters:test_min_p", "choosers:test_min_p_is_transformers")),
    Row("typical-p", "yes", "`typical_p`", ("choosers:test_typical_p", "choosers:test_typical_p_is_transformers")),
    Row(
        "repetition, frequency, presence penalty",
        "yes",
        "`repetition_penalty`, `frequency_penalty`, `presence_penalty`, `repeat_last_n`",
        ("edits:test_penalties", "edits:test_repetition_penalty_is_transformers"),
    ),
    Row("no repeated n-gram", "yes", "`no_repeat_ngram_size`", ("edits:test_no_repeat_ngram_is_transformers",)),
    Row("DRY", "yes", "`dry_multiplier` and its kin", ("edits:test_dry", "edits:test_dry_by_hand")),
    Row("XTC", "yes", "`xtc_probability`, `xtc_threshold`", ("choosers:test_xtc",)),
    Row(
        "mirostat 1 and 2",
        "yes",
        "`mirostat`, `mirostat_tau`, `mirostat_eta`",
        ("choosers:test_mirostat_1", "choosers:test_mirostat_2"),
    ),
    Row("top-n-sigma", "yes", "`top_n_sigma`", ("choosers:test_top_n_sigma",)),
    Row("dynamic temperature", "yes", "`dynatemp_range`, `dynatemp_exponent`", ("choosers:test_dynamic_temperature",)),
    Row(
        "adaptive-p",
        "yes",
        "`adaptive_target`, `adaptive_decay`",
        ("choosers:test_adaptive_p", "choosers:test_adaptive_p_holds_the_mean_probability_at_its_target"),
    ),
    Row("order of samplers", "yes", "`samplers`", ("choosers:test_samplers_run_in_the_order_given",)),
    Row("logit bias", "yes", "`logit_bias`", ("sampler:test_logit_bias", "llama:test_llama_logit_bias_and_settings")),
    Row("allowed token ids", "yes", "`allowed_token_ids`", ("edits:test_allowed_token_ids_and_the_grammars_mask",)),
    Row("bad words", "yes", "`bad_words`", ("edits:test_bad_words_are_transformers",)),
    Row(
        "stop strings",
        "yes",
        "`stop`",
        ("detokenize:test_R_15_stop_strings", "openai:test_R_15_a_stop_string_ends_the_text_before_it"),
    ),
    Row("stop token ids", "yes", "`stop_token_ids`, `ignore_eos`, `min_tokens`", ("finish:test_the_rules",)),
    Row(
        "seed of a request",
        "yes",
        "`seed`; the reply tells it",
        ("sampler:test_seed_and_position_matter", "law:test_I_13_in_a_batch_of_32_with_strangers"),
    ),
    Row(
        "n",
        "yes",
        "`n`",
        ("openai:test_completions_of_all_prompt_forms", "law:test_siblings_of_one_prompt_equal_lone_requests"),
    ),
    Row(
        "best_of",
        "yes",
        "`best_of`",
        ("sampling api:test_best_of_over_http", "sampling api:test_best_of_tells_the_likeliest_by_the_token"),
    ),
    Row("logprobs", "yes", "`logprobs`, `top_logprobs`", ("sampler:test_logprobs", "openai:test_logprobs")),
    Row(
        "logprobs of the prompt",
        "yes",
        "`prompt_logprobs`, `echo`; the same bits from a warm cache",
        ("law of samplers:test_prompt_logprobs_of_a_warm_prefix_cache_are_the_same_bits",),
    ),
    Row(
        "structured output",
        "yes",
        "`response_format`, `structured_outputs` (json, regex, choice, grammar, structural_tag), `guided_*`",
        (
            "grammars:test_takes_its_answers_and_no_others",
            "matchers:test_forced_tokens_are_those_that_masks_would_leave",
        ),
    ),
    Row(
        "tool calls",
        "yes",
        "`tools`, `tool_choice`",
        ("bfcl:test_rendered_written_and_parsed_is_what_was_meant", "parsers:test_each_format_whatever_the_pieces"),
    ),
    Row(
        "reasoning",
        "yes",
        "`--reasoning-parser`; `reasoning_content`",
        ("parsers:test_each_style_whatever_the_pieces",),
    ),
    Row("budget of thinking", "yes", "`thinking_token_budget`", ("edits:test_thinking_token_budget",)),
    Row(
        "logits processors of one's own",
        "yes",
        "`SamplingParams.logits_processors`, offline",
        ("edits:test_processors_of_the_caller",),
    ),
    Row(
        "replay of forced tokens",
        "yes",
        "`trace_decode_token_ids`",
        ("edits:test_trace_decode_token_ids", "sampling api:test_a_trace_over_http"),
    ),
    Row(
        "watermark",
        "yes",
        "`watermark`; `headrace.sampling.watermark.detect`",
        (
            "watermark:test_watermark",
            "watermarked:test_marked_texts_are_told_from_unmarked_ones",
            "sampling api:test_a_watermark_over_http",
        ),
    ),
)

APIS = (
    Row(
        "OpenAI: completions and chat, streamed",
        "yes",
        "`/v1/completions`, `/v1/chat/completions`",
        ("openai:test_chat_plain_and_streamed_are_one_text", "openai:test_completions_of_all_prompt_forms"),
    ),
    Row(
        "OpenAI: responses",
        "yes",
        "`/v1/responses`, stored and in the background",
        ("responses:test_plain_streamed_and_helper_are_one_text", "responses:test_stored_and_gone_on_with"),
    ),
    Row(
        "OpenAI: streams of stored responses, conversations, input_tokens",
        "yes",
        "`/v1/responses/ID?stream=true`, `/v1/conversations`, `/v1/responses/input_tokens`",
        (
            "stored responses:test_a_stored_response_is_replayed_byte_for_byte",
            "stored responses:test_a_conversation_grows_with_its_responses",
            "stored responses:test_input_tokens_are_those_of_the_response",
        ),
    ),
    Row("OpenAI: compact", "no", "opaque state of OpenAI's own models; [routes](routes.md)"),
    Row("OpenAI: models", "yes", "`/v1/models`", ("openai:test_models",)),
    Row(
        "embeddings, score, rerank",
        "yes",
        "`/v1/embeddings`, `/v1/score`, `/v1/rerank`: pooled decoder states",
        ("embeddings:test_all_forms_of_input_are_one_vector", "embeddings:test_score_and_rerank"),
    ),
    Row("classify", "no", "no classifier models"),
    Row(
        "files and batches",
        "yes",
        "`/v1/files`, `/v1/batches`, `headrace run-batch`",
        ("batches:test_a_batch_of_every_kind", "run-batch:test_killed_and_taken_up_again_is_the_same_file"),
    ),
    Row(
        "tokenize, detokenize",
        "yes",
        "`/tokenize`, `/detokenize`, in vLLM's and llama-server's words",
        ("operations:test_tokenize_and_detokenize", "llama:test_llama_tokenize_and_detokenize"),
    ),
    Row(
        "Anthropic: messages",
        "yes",
        "`/v1/messages`",
        (
            "anthropic:test_anthropic_messages",
            "anthropic:test_anthropic_stream_events",
            "anthropic:test_anthropic_tools_and_thinking",
        ),
    ),
    Row("Anthropic: count_tokens", "yes", "`/v1/messages/count_tokens`", ("anthropic:test_anthropic_count_tokens",)),
    Row(
        "Anthropic: prompt cache",
        "yes",
        "`cache_control` taken; `cache_read_input_tokens`",
        ("anthropic:test_anthropic_cache_read_input_tokens",),
    ),
    Row(
        "Ollama: generate, chat",
        "yes",
        "`/api/generate`, `/api/chat`",
        ("ollama:test_ollama_generate", "ollama:test_ollama_chat", "ollama:test_ollama_tools_and_thinking"),
    ),
    Row(
        "Ollama: options",
        "yes",
        "sampling works; loading is reported in `warnings`",
        ("ollama:test_ollama_options", "ollama:test_ollama_warnings"),
    ),
    Row("Ollama: embed", "yes", "`/api/embed`, `/api/embeddings`", ("ollama:test_ollama_embed",)),
    Row(
        "Ollama: tags, show, ps, version",
        "yes",
        "`/api/tags`, `/api/show`, `/api/ps`, `/api/version`",
        ("ollama:test_ollama_tags_show_ps_version",),
    ),
    Row(
        "Ollama: pull, create, copy, delete, load and unload",
        "partly",
        "with `--models-dir`; `create` takes files or a model, system, parameters and a template in Jinja; no `push`",
        (
            "folder:test_K16_create_copy_and_delete",
            "folder:test_K16_create_sets_system_template_and_parameters",
            "folder:test_K16_pull_fetches_from_the_hub_and_shows_its_progress",
            "folder:test_K16_every_api_loads_what_it_names_and_keep_alive_unloads_it",
            "ollama:test_ollama_what_is_not_done_is_told",
        ),
    ),
    Row("llama-server: completion", "yes", "`/completion`", ("llama:test_llama_completion", "llama:test_llama_stream")),
    Row(
        "llama-server: props, slots",
        "yes",
        "`/props`, `/slots` (places of the batch)",
        ("llama:test_llama_props_and_slots",),
    ),
    Row(
        "llama-server: apply-template, embedding",
        "yes",
        "`/apply-template`, `/embedding`",
        ("llama:test_llama_apply_template", "llama:test_llama_embedding"),
    ),
    Row("llama-server: infill", "yes", "`/infill`", ("infill:test_the_prompt_has_the_files_and_then_the_gap",)),
    Row(
        "llama-server: slot files",
        "yes",
        "`POST /slots/ID?action=save`, `restore`, `erase`, with `--slot-save-path`",
        (
            "slots:test_saved_forgotten_and_restored_it_is_found_again",
            "sessions:test_I_13_a_restored_session_gives_the_same_bits",
        ),
    ),
    Row(
        "llama-server: adapters, POST /props",
        "no",
        "no adapters and no settings",
        ("llama:test_llama_what_is_not_done_is_told", "llama:test_llama_props_takes_no_settings"),
    ),
    Row(
        "vLLM: invocations, pooling, server_info, tokenizer_info, reset_prefix_cache",
        "yes",
        "[routes](routes.md), under all of their names",
        (
            "vllm:test_invocations_finds_the_route_by_the_field",
            "vllm:test_pooling_has_the_vectors_of_embeddings",
            "vllm:test_reset_prefix_cache_forgets_what_was_cached",
            "aliases:test_an_alias_is_its_target",
        ),
    ),
    Row(
        "a chat's own template, documents, echo",
        "yes",
        "`chat_template` with `--trust-request-chat-template`, `documents`, `echo`",
        (
            "request templates:test_a_template_of_the_request_is_rendered_where_it_is_trusted",
            "request templates:test_documents_reach_the_template_or_a_warning",
            "request templates:test_echo_repeats_the_last_message_before_the_answer",
        ),
    ),
    Row("timings in every reply", "yes", "`timings`, `usage`", ("openai:test_timings_and_usage_agree",)),
    Row(
        "what is not honoured is reported",
        "yes",
        "`warnings` in the reply",
        ("refusals:test_what_is_not_honoured_comes_back_in_warnings",),
    ),
    Row(
        "OpenAPI",
        "yes",
        "`/openapi.json`; `make test-openapi`",
        ("openapi:test_openapi_has_every_route", "openapi:test_schemathesis_finds_nothing"),
    ),
    Row("Prometheus", "yes", "`/metrics`, vLLM's names", ("operations:test_I_21_metrics_count_what_happened",)),
    Row(
        "OpenTelemetry",
        "yes",
        "`--otlp-traces-endpoint`; the extra `otel`",
        ("calls:test_each_answer_is_a_span", "calls:test_a_callers_trace_is_taken_over_if_it_is_well_formed"),
    ),
    Row("request ids", "yes", "`X-Request-Id`, in and out", ("calls:test_every_reply_has_an_id",)),
    Row(
        "record and replay of the schedule",
        "yes",
        "`--record-schedule`, `headrace replay`",
        ("replay:test_what_the_model_did_it_does_again", "replay:test_control_one_bit_is_noticed"),
    ),
    Row(
        "API key",
        "yes",
        "`--api-key`; Bearer or `x-api-key`; classes, rates: `--api-key-file`",
        ("auth:test_S_18_every_route_in_the_table_needs_the_key", "anthropic:test_anthropic_bearer_and_x_api_key"),
    ),
    Row("CORS", "yes", "`--allowed-origins`; none by default", ("browsers:test_pages_that_are_allowed",)),
    Row("lm-eval", "yes", "`local-completions`", ("lm-eval:test_the_score_is_that_of_transformers",)),
    Row(
        "offline",
        "yes",
        "`LLM.generate`, `chat`, `beam_search`, `embed`",
        ("law:test_I_13_offline", "examples:test_generate_example"),
    ),
    Row(
        "command line",
        "yes",
        "serve, generate, chat, bench, run-batch, replay, doctor",
        ("cli:test_help_lists_the_commands",),
    ),
    Row(
        "the same bits whatever the load",
        "yes",
        "always on",
        ("law:test_I_13_in_a_batch_of_32_with_strangers", "law:test_I_13_through_the_server"),
    ),
    Row(
        "several models in one server",
        "yes",
        "`--models-dir`, `--models-max`, `--models-memory`, `--keep-alive`",
        ("models:test_K16_models_come_and_go_answers_stay_and_memory_comes_back",),
    ),
    Row("sleep", "yes", "`/sleep`, `/wake_up`, `/is_sleeping`", ("folder:test_K16_sleep_and_wake_up",)),
    Row("web page, weight reload, planner", "no", ""),
)

TABLES = {"Decoding": DECODING, "APIs and operation": APIS}
