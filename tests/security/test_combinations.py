"""S-14: any two features of a request together are answered or refused, and the engine lives, whatever its options."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.security import rig
from tests.support.server import Live, brittle

from headrace import hub
from headrace.engine import build
from headrace.engine.client import InprocClient
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.serve.call import schema
from headrace.text.tokenizer import Tokenizer

# A value for each field that changes what the engine does.
FEATURES: dict[str, Any] = {
    "prompt": ["one", "two"],
    "n": 3,
    "best_of": 4,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "post_sampling_probs": True,
    "echo": True,
    "stream": True,
    "max_tokens": 1,
    "min_tokens": 3,
    "ignore_eos": True,
    "stop": ["a", "\x00"],
    "stop_token_ids": [66],
    "include_stop_str_in_output": True,
    "seed": 2**53,
    "temperature": 0.0,
    "top_k": 2,
    "top_p": 0.5,
    "min_p": 0.3,
    "typical_p": 0.5,
    "top_n_sigma": 1.0,
    "xtc_probability": 0.5,
    "mirostat": 2,
    "dynatemp_range": 0.5,
    "adaptive_target": 0.5,
    "samplers": ["top_k", "temperature"],
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "dry_multiplier": 1.0,
    "no_repeat_ngram_size": 2,
    "logit_bias": {"65": 50.0},
    "allowed_token_ids": [65, 66, 67],
    "bad_words": ["x"],
    "structured_outputs": {"regex": "[ab]+"},
    "response_format": {"type": "json_object"},
    "thinking_token_budget": 2,
    "trace_decode_token_ids": [65, 66],
    "watermark": True,
    "speculation": False,
    "use_beam_search": True,
    "truncate_prompt_tokens": 1,
    "cache_salt": "s",
    "priority": 3,
    "timeout": 50.0,
}
# Numbers of the features above, other names of theirs, and what never reaches the engine.
DETAILS = set(
    "model stream_options request_id return_token_ids skip_special_tokens spaces_between_special_tokens "
    "add_special_tokens user metadata safety_identifier prompt_cache_key guided_json guided_regex guided_choice "
    "guided_grammar guided_json_object guided_structural_tag guided_whitespace_pattern beam_width length_penalty "
    "early_stopping num_beam_groups diversity_penalty repeat_last_n xtc_threshold dry_base dry_allowed_length "
    "dry_penalty_last_n dry_sequence_breakers mirostat_tau mirostat_eta dynatemp_exponent adaptive_decay "
    "lora explain return_progress timings_per_token verbose grammar json_schema".split()
)
FEW = list(FEATURES)[::2]

Outcome = tuple[int, Any]


def test_S_14_every_field_of_a_completion_is_tried() -> None:
    """A new field is red until it is in the table above."""
    fields = set(schema.CompletionRequest.__struct_fields__) - {"warnings"}
    assert fields - FEATURES.keys() - DETAILS == set()
    assert FEATURES.keys() <= fields


def outcomes(live: Live, names: list[str]) -> dict[tuple[str, str], Outcome]:
    """Status and choices, or error, for each pair of features; many at once."""
    pairs = list(itertools.combinations(names, 2))
    result: dict[tuple[str, str], Outcome] = {}
    for some in (pairs[first : first + 48] for first in range(0, len(pairs), 48)):
        tasks_begun = {
            pair: rig.begin(
                live,
                "POST",
                "/v1/completions",
                json={"prompt": "Once upon", "max_tokens": 4, "seed": 1} | {name: FEATURES[name] for name in pair},
            )
            for pair in some
        }
        for pair, wait in tasks_begun.items():
            reply = wait()
            assert reply.status_code in (200, 400), (pair, reply.text)
            assert '"error"' not in reply.text or reply.status_code == 400, (pair, reply.text)
            body = reply.json() if "stream" not in pair or reply.status_code == 400 else {}
            result[pair] = reply.status_code, body.get("choices") or body.get("error", {}).get("message")
    assert live.client.is_alive
    assert live.client.num_restarts == 0
    Live.wait(lambda: live.client.num_unfinished == 0)
    assert live.client.stats.num_running == live.client.stats.kv_cache_usage == 0
    return result


def test_S_14_any_two_features_together_are_answered_or_refused(live: Live) -> None:
    result = outcomes(live, FEW)
    assert sum(status == 200 for status, _ in result.values()) > 0.7 * len(result)
    # A beam search draws nothing and edits no logits, and an answer of one token has no three.
    others = ["top_k", "mirostat", "logit_bias", "watermark", "structured_outputs", "min_tokens"]
    result = outcomes(live, ["use_beam_search", "max_tokens", *others])
    refused = {pair for pair, (status, _) in result.items() if status == 400}
    assert refused >= {("use_beam_search", name) for name in others} | {("max_tokens", "min_tokens")}


ENGINES: dict[str, dict[str, Any]] = {
    "crowded": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
        "max_num_batched_tokens": 40,
        "max_num_seqs": 6,
        "num_gpu_blocks_override": 24,
        "max_model_len": 128,
        "enable_prefix_caching": False,
    },
    "drafting": {"speculative_config": {"method": "mtp"}},
    "coarse": {"kv_cache_dtype": "int8", "quantization": "int4", "speculative_config": {"method": "suffix"}},
}


def real(tokenizer: Tokenizer, **options: Any) -> Live:
    options = {"max_model_len": 128, "scheduling_policy": "priority"} | options
    config = EngineConfig(model="builtin", num_threads=1, **options)
    client = InprocClient(lambda: build.build_engine(config))
    return Live(client, tokenizer, ServerConfig(log_stats_interval=0))


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, str], Outcome]:
    with real(Tokenizer.load(hub.resolve("builtin"))) as live:
        return outcomes(live, list(FEATURES))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_S_14_with_a_model_any_two_are_answered_alike_by_every_engine(
    name: str, plain: dict[tuple[str, str], Outcome]
) -> None:
    """All pairs of features with a model: what one engine answers, each other answers, to the bit, or all refuse."""
    with real(Tokenizer.load(hub.resolve("builtin")), **ENGINES[name]) as live:
        result = outcomes(live, list(FEATURES))
    assert len(result) > 900
    if name == "coarse":
        # Other numbers, so other answers; what is allowed is the same.
        result, plain = ({pair: (outcome[0], None) for pair, outcome in each.items()} for each in (result, plain))
    assert {pair: (outcome, plain[pair]) for pair, outcome in result.items() if outcome != plain[pair]} == {}


def test_S_14_control_an_engine_that_dies_is_noticed(tokenizer: Tokenizer) -> None:
    with (
        Live(brittle(num_steps=20), tokenizer, ServerConfig(log_stats_interval=0)) as live,
        pytest.raises(AssertionError),
    ):
        outcomes(live, FEW)
