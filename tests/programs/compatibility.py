"""What users of other engines look for, and the tests that show it: the table of docs/compatibility.md.

`python -m tests.programs.compatibility docs/compatibility.md` (`make compatibility`) runs every test that is named here
and writes the page with what came out; with `--keep` (`make docs`) the results of rows that did not change are kept and
nothing is run, with `--again` only the tests of rows that failed or changed are. `tests/laws/test_compatibility.py`
holds names and page to this table.
"""

from __future__ import annotations

import ast
import collections
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

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
        "Ollama: pull, push, create, copy, delete",
        "no",
        "pull of the model that is served succeeds; the rest is a 501",
        ("ollama:test_ollama_what_is_not_done_is_told",),
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
    Row("llama-server: infill, slot files, props set", "no", "a 501", ("llama:test_llama_what_is_not_done_is_told",)),
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
    Row("web page, sleep and weight reload, several models, planner", "no", ""),
)

TABLES = {"Decoding": DECODING, "APIs and operation": APIS}
HEAD = """# What works

What users of vLLM, llama-server, Ollama and the hosted APIs look for, and the tests that show it here. Each API is
tested with its own client library (openai {openai}, anthropic {anthropic}, ollama {ollama}) against a live server;
llama-server has none, and is tested over HTTP. Written by `make compatibility`, which runs the tests named here; a
test fails when the page is stale. [How to serve](howto-serve.md) has the base URLs.
"""


def node_id(name: str) -> str:
    """pytest's name of a test of the table."""
    file, _, test = name.partition(":")
    return f"{FILES[file]}::{test}"


def all_tests() -> list[str]:
    """Every test that is named, once."""
    return list(dict.fromkeys(name for rows in TABLES.values() for row in rows for name in row.tests))


def missing_tests(names: list[str]) -> list[str]:
    """Those that are no test function of their file."""
    found: dict[str, set[str]] = {}
    for file in {name.partition(":")[0] for name in names}:
        tree = ast.parse((ROOT / FILES[file]).read_text(encoding="utf-8"))
        found[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return [name for name in names if name.partition(":")[2] not in found[name.partition(":")[0]]]


def page(results: dict[str, str]) -> str:
    """The page; `results` says what came of each test."""
    pins = dict(re.findall(r"^(\S+?)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    text = HEAD.format(**{name: pins[name] for name in ("openai", "anthropic", "ollama")})
    for title, rows in TABLES.items():
        text += f"\n## {title}\n\n| feature | works | how | tests | result |\n|---|---|---|---|---|\n"
        for row in rows:
            shown = ", ".join(f"[{name.partition(':')[2]}](../{FILES[name.partition(':')[0]]})" for name in row.tests)
            result = "; ".join(dict.fromkeys(results.get(name, "not run") for name in row.tests))
            text += f"| {row.feature} | {row.works} | {row.how} | {shown} | {result} |\n"
    return text


def without_results(text: str) -> str:
    """A page less its last column, for comparison."""
    return re.sub(r"\| [^|\n]* \|$", "|", text, flags=re.MULTILINE)


def run(names: list[str]) -> dict[str, str]:
    """Run the tests: "passed", "skipped", or "FAILED" if any of a test's cases did."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        ids = [node_id(name) for name in names]
        subprocess.run([sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *ids], cwd=ROOT)
        outcomes: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
        for case in ET.parse(report).getroot().iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "FAILED" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            outcomes[case.get("classname", ""), case.get("name", "").partition("[")[0]].add(outcome)
    made = {}
    for name in names:
        file, _, test = node_id(name).partition("::")
        seen = outcomes[file.removesuffix(".py").replace("/", "."), test]
        made[name] = next((each for each in ("FAILED", "passed", "skipped") if each in seen), "not run")
    return made


def with_results_of(text: str, old: str) -> str:
    """A page with the results that an older one has for the same rows."""
    known = {without_results(line): line for line in old.splitlines()}
    return "".join(known.get(without_results(line), line) + "\n" for line in text.splitlines())


def settled(text: str) -> str:
    """The lines of a page that need no other run."""
    return "\n".join(line for line in text.splitlines() if "FAILED" not in line and "not run" not in line)


def open_tests(text: str) -> list[str]:
    """The tests of the rows that a page does not have as settled."""
    known = {without_results(line) for line in settled(text).splitlines()}
    lines = page({}).splitlines()
    names = all_tests()
    return [
        name
        for name in names
        if any(f"[{name.partition(':')[2]}]" in line and without_results(line) not in known for line in lines)
    ]


def main() -> int:
    target = Path(sys.argv[1])
    if "--keep" in sys.argv:
        target.write_text(with_results_of(page({}), target.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    kept = target.read_text(encoding="utf-8") if "--again" in sys.argv else ""
    results = run(open_tests(kept))
    fresh = page(results)
    target.write_text(with_results_of(fresh, settled(kept)), encoding="utf-8")
    counts = collections.Counter(results.values())
    print(", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())))
    return 1 if counts["FAILED"] or counts["not run"] else 0


if __name__ == "__main__":
    sys.exit(main())
