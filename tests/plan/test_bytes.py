"""The figures that textbooks print, counted by the engine's own model files."""

from __future__ import annotations

from typing import Any

import pytest
from tests.plan import configs

from headrace.plan import hardware, steps
from headrace.plan.counting import Counts
from headrace.plan.planner import Planner, Subject, counts_of
from headrace.plan.plans import Workload

GB = 1e9


def counts(config: dict[str, Any], quantization: str | None = None) -> Counts:
    return counts_of(Subject("x", config), Workload(quantization=quantization))[0]


def planner(config: dict[str, Any], machine: str, **fields: Any) -> Planner:
    return Planner(Subject("x", config), hardware.find(machine), Workload(**fields))


def test_kv_of_llama_2_7b_in_fp16_is_524288_bytes_a_token() -> None:
    assert counts(configs.LLAMA_2_7B).kv_token_bytes("float16") == 524_288


def test_kv_of_llama_3_8b_is_131072_bytes_a_token_and_17_2_gb_for_128k() -> None:
    assert counts(configs.LLAMA_3_8B).kv_token_bytes("bfloat16") == 131_072
    assert round(counts(configs.LLAMA_3_1_8B).kv_bytes(131_072, "bfloat16", windowed=False) / GB, 1) == 17.2


@pytest.mark.parametrize(("num_kv_heads", "num_bytes"), [(64, 2_621_440), (8, 327_680)])
def test_kv_of_70b_by_kv_heads(num_kv_heads: int, num_bytes: int) -> None:
    config = configs.LLAMA_3_70B | {"num_key_value_heads": num_kv_heads}
    assert counts(config).kv_token_bytes("bfloat16") == num_bytes


def test_kv_of_13b_at_4096_for_16_sequences_is_53687091200_bytes() -> None:
    assert 16 * counts(configs.LLAMA_2_13B).kv_bytes(4096, "float16", windowed=False) == 53_687_091_200


@pytest.mark.parametrize(("num_kv_heads", "gigabytes"), [(32, 137.4), (8, 34.4)])
def test_kv_of_7b_at_8k_for_32_sequences(num_kv_heads: int, gigabytes: float) -> None:
    config = configs.LLAMA_2_7B | {"num_key_value_heads": num_kv_heads}
    assert round(32 * counts(config).kv_bytes(8192, "float16", windowed=False) / GB, 1) == gigabytes


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (configs.LLAMA_3_8B, 8_030_261_248),
        (configs.MIXTRAL_8X7B, 46_702_792_704),
        (configs.QWEN_3_06B, 596_049_920),
        (configs.DEEPSEEK_V3, 671_026_419_200),
        (configs.OPT_6_7B, 6_658_473_984),
        (configs.PYTHIA_6_9B, 6_857_302_016),
    ],
    ids=["Llama-3-8B", "Mixtral-8x7B", "Qwen3-0.6B", "DeepSeek-V3", "OPT-6.7B", "Pythia-6.9B"],
)
def test_parameters(config: dict[str, Any], parameters: int) -> None:
    assert counts(config).parameters == parameters


def test_a_tied_head_in_a_form_of_its_own_takes_bytes_and_is_no_further_parameters() -> None:
    plain, quantised = counts(configs.QWEN_3_06B), counts(configs.QWEN_3_06B, "int8")
    assert (plain.tables, quantised.parameters) == (0, plain.parameters)
    assert quantised.tables == plain.head == 2 * 151936 * 1024
    assert quantised.weight_bytes == pytest.approx(sum(quantised.forms.values()))


def test_a_token_of_mixtral_meets_12_88_g_parameters() -> None:
    assert round(counts(configs.MIXTRAL_8X7B).active_parameters / 1e9, 2) == 12.88


def test_13b_in_fp16_does_not_fit_24_gb_and_in_int8_it_does() -> None:
    plain = planner(configs.LLAMA_2_13B, "l4", context=2048, concurrency=1).plan()
    assert not plain.fits
    assert plain.free_bytes < 0
    assert plain.speed is None
    assert any("--quantization int8" in change.flags for change in plain.changes)
    assert planner(configs.LLAMA_2_13B, "l4", context=2048, concurrency=1, quantization="int8").plan().fits


def test_70b_in_int4_with_scales_is_36_4_gb() -> None:
    """The linear layers of `--quantization int4` (4 bits, a scale of 16 for 64 weights); embedding and head come on
    top. The textbooks' 35 GB leave the scales out."""
    in_int4 = counts(configs.LLAMA_3_70B, "int4")
    assert round(in_int4.forms["iq4_nl-g64"] / GB, 1) == 36.4
    assert in_int4.weight_bytes == pytest.approx(sum(in_int4.forms.values()))
    assert round(in_int4.weight_bytes / GB, 1) == 39.1


def test_kv_of_gemma_3_27b_at_128k_is_66_6_gb_whole_and_11_2_windowed() -> None:
    gemma = counts(configs.GEMMA_3_27B)
    assert round(gemma.kv_bytes(131_072, "bfloat16", windowed=False) / GB, 1) == 66.6
    assert round(gemma.kv_bytes(131_072, "bfloat16", windowed=True) / GB, 1) == 11.2


def test_kv_of_deepseek_v3_is_70272_bytes_a_token() -> None:
    assert counts(configs.DEEPSEEK_V3).kv_token_bytes("bfloat16") == 70_272


def test_2_dollars_an_hour_at_2000_tokens_a_second_are_0_278_dollars_a_million() -> None:
    assert round(steps.dollars_per_million(2.0, 2000.0), 3) == 0.278


def test_latency_is_ttft_and_tpot_for_each_further_token() -> None:
    assert steps.latency(0.5, 0.02, 101) == 0.5 + 0.02 * 100
    assert steps.latency(0.5, 0.02, 1) == 0.5


def test_the_alpha_formula_counts_tokens_of_a_pass_and_kept_guesses_are_one_fewer() -> None:
    """By simulation of the rule itself: a pass keeps guesses up to the first wrong one, and draws one token more."""
    alpha, num = 0.8, 4
    chances = [alpha**total * (1 - alpha) for total in range(num)] + [alpha**num]
    total = sum(number * chance for number, chance in enumerate(chances))
    assert steps.kept_guesses(alpha, num) == pytest.approx(total)
    assert steps.tokens_per_pass(alpha, num) == pytest.approx(total + 1)
    assert round(steps.tokens_per_pass(alpha, num), 4) == 3.3616
    assert steps.tokens_per_pass(1.0, num) == num + 1
