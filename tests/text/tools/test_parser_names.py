"""vLLM's names of parsers: each is one of ours, or its refusal says which of ours is nearest."""

from __future__ import annotations

import re

import pytest

from headrace.protocol.errors import RequestError
from headrace.text import parser_names, reasoning
from headrace.text.parser_names import Alias
from headrace.text.tools import formats

# The registries of vLLM 0.33.0.
TOOL_PARSERS = (
    "dots deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 cohere_command3 cohere_command4 ernie45 glm45 "
    "glm47 ling3 granite granite4 hermes hf beam poolside_v1 hunyuan_a13b hy_v3 hy_v4 internlm jamba lfm2 "
    "granite-20b-fc "
    "kimi_k2 kimi_k3 k2_horizon llama3_json llama4_json llama4_pythonic longcat mimo minimax_m2 minimax_m3 minicpm5 "
    "mistral olmo3 plamo3 muse muse_glimmer musespark1x openai phi4_mini_json pythonic qwen3_coder qwen3_xml "
    "qwen3_json "
    "seed_oss step3 step3p5 step5 inkling xlam gigachat3 functiongemma gemma4 apertus"
).split()
REASONING_PARSERS = (
    "deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 poolside_v1 cohere_command3 cohere_command4 ernie45 gemma4 glm45 "
    "glm47 ling3 openai_gptoss granite granite_thinking_parser hf beam holo2 hunyuan_a13b hy_v3 hy_v4 kimi_k2 kimi_k3 "
    "k2_horizon mimo minicpmv minimax_m2 minimax_m2_append_think minimax_m3 mistral nemotron_v3 olmo3 plamo3 muse "
    "muse_glimmer musespark1x qwen3 seed_oss step3 step3p5 step5 inkling"
).split()


def test_every_name_of_vllm_is_known() -> None:
    assert (len(TOOL_PARSERS), len(REASONING_PARSERS)) == (58, 42)
    for names, aliases, find, keys in (
        (TOOL_PARSERS, parser_names.TOOL_CALLS, formats.format_name, formats.FORMATS),
        (REASONING_PARSERS, parser_names.REASONING, reasoning.style_name, reasoning.STYLES),
    ):
        assert set(names) <= {*aliases, *keys, *parser_names.FOUND}
        refusals = []
        for name in [*aliases, *keys]:
            try:
                assert find(name) in keys
            except RequestError as error:
                refusals.append(error)
        for refusal in refusals:
            nearest = re.match(r"(\w+), which is the nearest that headrace has \(it has no (.*?)\)", refusal.bound)
            assert nearest is not None
            assert nearest[1] in {*keys, parser_names.NONE}
            assert nearest[2] == refusal.value


def test_a_format_that_comes_later_is_found_by_its_names() -> None:
    aliases = {"openai": Alias(("harmony",), ("hermes",)), "kimi_k2": Alias((), ("hermes",))}
    for name in aliases:
        with pytest.raises(RequestError, match=f"{name}.*must be hermes, which is the nearest"):
            parser_names.resolve("tool_call_parser", name, aliases, ["hermes"])
    assert parser_names.resolve("tool_call_parser", "openai", aliases, ["hermes", "harmony"]) == "harmony"
    assert parser_names.resolve("tool_call_parser", "kimi_k2", aliases, ["hermes", "kimi_k2"]) == "kimi_k2"


def test_a_name_that_nobody_has_says_which_there_are() -> None:
    with pytest.raises(RequestError, match="must be hermes, perhaps, or another one of .*deepseek_v31, .*qwen3_json"):
        formats.format_name("hermess")
    with pytest.raises(RequestError, match="must be one of .*deepseek_r1, .*step3"):
        reasoning.style_name("?")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen3_xml", "qwen3_coder"),
        ("deepseek_v31", "deepseek_v3"),
        ("glm47", "glm45"),
        ("jamba", "hunyuan_a13b"),
    ],
)
def test_names_that_are_the_same_format(name: str, key: str) -> None:
    assert formats.format_name(name) == key
