"""Command lines and keywords of other engines: taken, without effect, or refused with what to use."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperOption

from headrace.cli.main import app
from headrace.migration.llama_server import LLAMA_SERVER_SETTINGS
from headrace.migration.settings import Setting
from headrace.migration.vllm import VLLM_SETTINGS
from headrace.other_engines import translate, translate_keywords
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.defaults import sampling_defaults
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.serve.reach import Reach

FIELDS = {*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__, *Reach.__struct_fields__}
ALL = (*VLLM_SETTINGS, *LLAMA_SERVER_SETTINGS)
VALUES = {
    "--rope-scaling": "yarn", "--chat-template-kwargs": "{}", "-rea": "on", "--reasoning-format": "none",
    "-l": "7-inf", "-j": "{}", "--spec-type": "ngram-mod", "--override-kv": "llama.context_length=int:64",
    "--speculative-model": "draft", "--samplers": "top_k;typ_p", "--sampler-seq": "kyt", "--rope-freq-scale": "0.25",
    "--data-parallel-backend": "mp", "--adaptive-decay": "0.5", "--lora-scaled": "a:0.5",
}  # fmt: skip
"""A value of the flags that take no number."""
BESIDE = {"--lora-init-without-apply": ["--lora", "a"]}
"""Flags without which another one has nothing to set."""


def engine_config(**fields: Any) -> EngineConfig:
    return EngineConfig(**translate_keywords(fields, EngineConfig.__struct_fields__))


# Engine flags of `vllm serve` beside headrace's own, as scripts have them.
VLLM_LINES = [
    "--trust-remote-code", "--enforce-eager", "--nnodes=1",
    "--swap-space 16", "--cpu-offload-gb 0", "--load-format auto", "--tokenizer-mode auto",
    "--disable-log-requests", "--disable-log-stats", "--enable-log-requests", "--max-seq-len-to-capture 8192",
    "--disable-custom-all-reduce", "--distributed-executor-backend mp", "--runner generate",
    "--task generate", "--mm-processor-cache-gb 0", "--structured-outputs-config {}", "-O 3",
    "--compilation-config {}", "--guided-decoding-backend xgrammar", "--stream-interval 1",
    "--enable-prompt-tokens-details", "--response-role assistant", "--chat-template-content-format auto",
    "--prefix-caching-hash-algo sha256", "--kv-offloading-size 0", "--api-server-count 1",
    "--enable-server-load-tracking", "--disable-uvicorn-access-log", "--calculate-kv-scales",
    "--attention-backend FLASH_ATTN",
]  # fmt: skip


@pytest.fixture(scope="module")
def serve() -> Any:
    return typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]


def parsed(serve: Any, line: str) -> dict[str, Any]:
    context = serve.make_context("serve", line.split())
    return {**context.params, "notes": context.meta["notes"]}


@pytest.mark.parametrize(
    ("value", "ours"),
    [("auto", "auto"), ("vllm", "headrace"), ("headrace", "headrace"), ("transformers", "transformers")],
)
def test_vllms_own_models_are_headraces(serve: Any, value: str, ours: str) -> None:
    assert parsed(serve, f"some/model --model-impl {value}")["model_impl"] == ours
    assert engine_config(model_impl=value).model_impl == ours


@pytest.mark.parametrize("line", VLLM_LINES)
def test_a_flag_of_vllms_is_taken(serve: Any, line: str) -> None:
    config = parsed(serve, f"some/model {line} --max-model-len 4k")
    assert (config["model"], config["max_model_len"]) == ("some/model", 4000)
    if line != "--disable-log-stats":
        [note] = config["notes"]
        assert note.startswith(line.partition(" ")[0].partition("=")[0] + " has no effect here: ")


@pytest.mark.parametrize("setting", ALL, ids=lambda setting: setting.names[0])
def test_each_row_does_what_it_says(serve: Any, setting: Setting, tmp_path: Path) -> None:
    names = {name for option in serve.params if isinstance(option, TyperOption) for name in option.opts}
    fields = {setting.ours.partition(".")[0], *(path.partition(".")[0] for path, _ in setting.also)} - {""}
    assert fields <= FIELDS
    assert setting.ours or setting.why
    (tmp_path / "f").write_text("{}")
    value = VALUES.get(setting.names[0], str(tmp_path / "f") if "file" in setting.names[-1] else "1")
    for name in setting.names:
        assert name not in names or setting.convert, "a flag of our own needs no row, unless its values differ"
        line = [name, value] if setting.takes_value else [name]
        if setting.ours and name not in ("--yarn-ext-factor", "--yarn-attn-factor"):
            rest = BESIDE.get(name, []) + ["m"] * (setting.ours != "model")
            words, notes = translate([*line, *rest], dict.fromkeys(names, True))
            assert words != translate(rest, dict.fromkeys(names, True))[0] or notes, "it sets something"
        elif not setting.ours and not setting.has_no_effect:
            with pytest.raises(RequestError, match=f"^{name}: not supported here; "):
                parsed(serve, " ".join(line))
        elif setting.has_no_effect and setting.takes_value:
            value = (setting.neutral or setting.may_follow or ("anything",))[0]
            assert len(parsed(serve, f"{name} {value}")["notes"]) == 1
            if setting.neutral:
                with pytest.raises(RequestError, match=f"^{name}: 'other' is not allowed; it must be "):
                    parsed(serve, f"{name} other")


def test_no_name_has_two_rows_of_one_engine() -> None:
    for rows in (VLLM_SETTINGS, LLAMA_SERVER_SETTINGS):
        names = [name for row in rows for name in row.names]
        assert sorted(names) == sorted(set(names))


def test_a_row_with_a_field_sets_it(serve: Any) -> None:
    line = "-m a.gguf -c 4096 -t 3 -np 4 -b 512 -a name,other -ctk q8_0 -ctv q8_0 --chat-template-file t.jinja"
    config = parsed(serve, f"{line} --log-jsonl --cors-origins localhost,https://a.example --tags a,b")
    expected = {
        "model": "a.gguf", "max_model_len": 4096, "num_threads": 3, "max_num_seqs": 4, "max_num_batched_tokens": 512,
        "served_model_name": ["name", "other"], "kv_cache_dtype": "int8", "chat_template": "t.jinja",
        "log_format": "json", "allowed_origins": ["localhost", "https://a.example"], "tags": ["a,b"],
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    assert config["notes"] == []
    assert parsed(serve, "--no-cache-prompt --dtype half --max_model_len=512") | {} == parsed(
        serve, "--no-enable-prefix-caching --dtype float16 --max-model-len 512"
    )
    assert parsed(serve, "-c 0 -np -1 -s -1 -n -1 --spec-type none --reasoning-budget -1") == parsed(serve, "")
    config = parsed(serve, "-b 1 -b 2")
    assert (config["max_num_batched_tokens"], config["notes"]) == (2, ["-b 2 takes the place of 1, which came before"])


def test_keys_and_values_of_two_types_take_the_one_with_more_bits(serve: Any) -> None:
    config = parsed(serve, "-ctk q8_0 -ctv q4_0")
    assert config["kv_cache_dtype"] == "int8"
    assert config["notes"] == ["keys and values are kept in one format, int8; see --kv-cache-dtype"]
    assert parsed(serve, "-ctk q4_0 -ctv f16")["kv_cache_dtype"] == "float16"


def test_a_recipe_of_llama_servers_is_taken(serve: Any) -> None:
    line = "-m model.gguf -c 8192 -ngl 99 --jinja --temp 0.6 --top-k 20 --top-p 0.95 --min-p 0"
    config = parsed(serve, f"{line} --reasoning-format deepseek --chat-template chatml")
    assert (config["model"], config["max_model_len"], config["chat_template"]) == ("model.gguf", 8192, "chatml")
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}
    assert config["override_generation_config"] == defaults
    assert [note.partition(" ")[0] for note in config["notes"]] == ["-ngl", "--jinja"]
    ServerConfig(**{name: value for name, value in config.items() if name in ServerConfig.__struct_fields__})


SAMPLING_LINES = {
    "--top-p 0": {"top_p": 1e-6},
    "--repeat-penalty 1.1 --repeat-last-n 64 -n 256": {
        "repetition_penalty": 1.1, "repeat_last_n": 64, "max_tokens": 256},
    "--presence-penalty 1.5 --frequency-penalty 0.5 -s 7": {
        "presence_penalty": 1.5, "frequency_penalty": 0.5, "seed": 7},
    "--samplers top_k;typ_p;top_p;temperature": {"samplers": ["top_k", "typ_p", "top_p", "temperature"]},
    "--sampling-seq kyt": {"samplers": ["top_k", "typ_p", "temperature"]},
    "--ignore-eos -sp": {"ignore_eos": True, "skip_special_tokens": False},
    "-r User: -r Human:": {"stop": ["User:", "Human:"]},
    "--dry-multiplier 0.8 --dry-sequence-breaker a --dry-sequence-breaker b": {
        "dry_multiplier": 0.8, "dry_sequence_breakers": ["a", "b"]},
    "-l 15043+1 --logit-bias 2-inf": {"logit_bias": {"15043": 1.0, "2": -100.0}},
    "--grammar root::=[0-9]": {"structured_outputs": {"grammar": "root::=[0-9]"}},
    '-j {"type":"integer"}': {"structured_outputs": {"json": {"type": "integer"}}},
    "--reasoning-budget 0 --mirostat 2 --mirostat-ent 6 --mirostat-lr 0.2": {
        "thinking_token_budget": 0, "mirostat": 2, "mirostat_tau": 6.0, "mirostat_eta": 0.2},
    '--override-generation-config {"max_new_tokens":9} --override-generation-config.top_k 5': {
        "max_new_tokens": 9, "top_k": 5},
}  # fmt: skip


@pytest.mark.parametrize("line", SAMPLING_LINES)
def test_flags_are_sampling_defaults(serve: Any, line: str) -> None:
    config = parsed(serve, line)
    assert config["override_generation_config"] == SAMPLING_LINES[line]
    assert config["notes"] == []
    defaults = sampling_defaults(config["override_generation_config"])
    SamplingParams(**defaults)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--temp -1", "--temp: -1.0 is not allowed; it must be a finite number from 0 to 100"),
        ("--top-k many", "--top-k: 'many' is not allowed"),
        ("--repeat-penalty 0", "--repeat-penalty: 0.0 is not allowed; it must be a finite number from 0.01"),
        ("--samplers top_q", "--samplers: 'top_q' is not allowed; it must be one of"),
        ("-l 5", "-l: '5' is not allowed; it must be a token id and a bias"),
        ("--chat-template-kwargs [1]", "--chat-template-kwargs: '[1]' is not allowed; it must be a JSON object"),
        ("--hf-overrides 5", "--hf-overrides: '5' is not allowed; it must be a JSON object"),
        ("--reasoning-format xml", "--reasoning-format: 'xml' is not allowed; it must be one of none, auto, deepseek"),
        ("--grammar-file nowhere.gbnf", "--grammar-file: 'nowhere.gbnf' is not allowed; it must be a file"),
        ("--override-kv tokenizer.ggml.add_bos_token=bool:false", "--override-kv: not supported here; token"),
        ("--spec-type draft-dflash", "--spec-type: not supported here; see --speculative-config"),
        ("--yarn-attn-factor 2", "--yarn-attn-factor: not supported here; set attention_factor"),
    ],
)
def test_a_bad_value_is_named_by_its_flag(serve: Any, line: str, message: str) -> None:
    with pytest.raises(RequestError, match="^" + re.escape(message)):
        parsed(serve, line)


def test_a_bad_default_is_named_in_the_record() -> None:
    for values, message in (
        ({"temperature": -1}, "override_generation_config.temperature: -1 is not allowed"),
        ({"top_kk": 1}, "override_generation_config.top_kk: 1 is not allowed; it must be a default of: adaptive_decay"),
        ({"n": 2}, "override_generation_config.n: 2 is not allowed"),
    ):
        with pytest.raises(RequestError, match=f"^{message}"):
            ServerConfig(override_generation_config=values)
    assert sampling_defaults({"do_sample": True, "eos_token_id": [1], "max_new_tokens": 5}) == {"max_tokens": 5}


RECORD_LINES = {
    "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768": (
        "hf_overrides",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}),
    '--rope-scaling {"rope_type":"yarn","factor":2.0} --rope-theta 1e6': (
        "hf_overrides", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1e6}),
    "--rope-freq-base 10000 --rope-freq-scale 0.5": (
        "hf_overrides", {"rope_theta": 10000.0, "rope_scaling": {"factor": 2.0}}),
    "--override-kv qwen3moe.expert_used_count=int:4,qwen3moe.context_length=int:512": (
        "hf_overrides", {"num_experts_per_tok": 4, "max_position_embeddings": 512}),
    '--hf-overrides {"a":{"b":1}} --hf-overrides.a.c 2 --hf_overrides.d true': (
        "hf_overrides", {"a": {"b": 1, "c": 2}, "d": True}),
    "--reasoning off": (
        "default_chat_template_kwargs", {"enable_thinking": False, "thinking": False, "thinking_mode": "disabled"}),
    '--chat-template-kwargs {"a":1} --reasoning-effort high': (
        "default_chat_template_kwargs", {"a": 1, "reasoning_effort": "high"}),
}  # fmt: skip


@pytest.mark.parametrize("line", RECORD_LINES)
def test_flags_are_values_of_a_record(serve: Any, line: str) -> None:
    field, record = RECORD_LINES[line]
    config = parsed(serve, line)
    assert (config[field], config["notes"]) == (record, [])


def test_flags_make_a_speculative_config(serve: Any) -> None:
    config = parsed(serve, "-md draft.gguf --draft-max 16 --draft-min 4 -ngld 99")
    assert (config["speculative_config"].method, config["speculative_config"].model) == ("draft_model", "draft.gguf")
    assert config["speculative_config"].num_speculative_tokens == 16
    assert [note.partition(" ")[0] for note in config["notes"]] == ["--draft-min", "-ngld"]
    assert parsed(serve, "--spec-type ngram-mod,draft-simple")["speculative_config"].method == "ngram"
    config = parsed(serve, "--speculative-config.method=qwen3_next_mtp --speculative-config.num_speculative_tokens=2")
    assert (config["speculative_config"].method, config["speculative_config"].num_drafts) == ("mtp", 2)
    config = parsed(serve, '--speculative-config {"method":"ngram","draft_tensor_parallel_size":1}')
    assert config["speculative_config"].method == "ngram"
    assert config["notes"][0].startswith("speculative_config.draft_tensor_parallel_size has no effect here")
    config = parsed(serve, "--draft-max 16")
    assert (config["speculative_config"], len(config["notes"])) == (None, 1)


def test_ways_of_vllms_parser_to_write_a_flag(serve: Any) -> None:
    for line in ("-O3", "-O.mode=3", "-cc.mode=3", "--compilation-config.mode 3",
                 "--cudagraph-capture-sizes 1 2 4", "--mm_processor_kwargs {}"):  # fmt: skip
        config = parsed(serve, f"{line} m" if not line.endswith("4") else f"m {line}")
        assert (config["model"], len(config["notes"])) == ("m", 1)
    for line, limits in (
        ("--limit-mm-per-prompt.video 0", {"video": 0}),
        ("--limit-mm-per-prompt image=2,video=0", {"image": 2, "video": 0}),
    ):
        assert parsed(serve, line)["limit_mm_per_prompt"] == limits
    assert parsed(serve, "--no-enforce-eager --no-enable-log-requests") == parsed(serve, "")
    assert parsed(serve, "--tensor-parallel 2")["tensor_parallel_size"] == 2
    assert parsed(serve, "--max-model-len auto --generation-config vllm") == parsed(
        serve, "--generation-config headrace"
    )
    config = parsed(serve, "-dp 2 --enable-expert-parallel")
    assert (config["enable_expert_parallel"], len(config["notes"])) == (False, 1)
    assert not parsed(serve, "-tp 1 -ep")["enable_expert_parallel"]
    assert parsed(serve, "-tp 2 -ep")["enable_expert_parallel"]
    assert parsed(serve, "--tensor-parallel-size=2 --enable-expert-parallel")["enable_expert_parallel"]
    with pytest.raises(Exception, match="No such option: --max-num"):
        parsed(serve, "--max-num 5")


def test_a_file_of_flags(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: some/model\nport: 9000\nmax-model-len: 4096\nenforce-eager: true\nenable_prefix_caching: false\n"
        "served-model-name: [a, b]\ncompilation-config: {mode: 3}\noverride-generation-config: {temperature: 0.5}\n"
        "async-scheduling: true\ntrust-remote-code: false\nkv-cache-dtype: fp8\n"
    )
    config = parsed(serve, f"--config {file} --port 9001")
    assert (config["model"], config["port"], config["max_model_len"]) == ("some/model", 9001, 4096)
    assert (config["enable_prefix_caching"], config["async_scheduling"]) == (False, True)
    assert (config["served_model_name"], config["kv_cache_dtype"]) == (["a", "b"], "fp8")
    assert config["override_generation_config"] == {"temperature": 0.5}
    assert [note.partition(" ")[0] for note in config["notes"]] == ["--enforce-eager", "--compilation-config"]
    assert parsed(serve, f"other --config={file}")["model"] == "other"
    for text in ("[1]", ": :", "\0"):
        file.write_text(text)
        with pytest.raises(RequestError, match="^--config: .* a YAML file of flags"):
            parsed(serve, f"--config {file}")
    with pytest.raises(RequestError, match="^--config: 'nowhere.yaml' is not allowed"):
        parsed(serve, "--config nowhere.yaml")


def test_a_value_that_may_follow_is_not_the_model(serve: Any) -> None:
    assert parsed(serve, "-fa -m a.gguf")["model"] == "a.gguf"
    assert parsed(serve, "-fa on -m a.gguf")["model"] == "a.gguf"
    assert parsed(serve, "-fa a.gguf")["model"] == "a.gguf"


def test_several_names_follow_the_model(serve: Any) -> None:
    for line in ("m --served-model-name a b --port 1 c", "--model m --served-model-name a b c"):
        if line.endswith("1 c"):
            with pytest.raises(Exception, match="unexpected extra argument"):
                parsed(serve, line)
            line = line.removesuffix(" c") + " --served-model-name=c"
        assert (parsed(serve, line)["model"], parsed(serve, line)["served_model_name"]) == ("m", ["a", "b", "c"])
    config = parsed(serve, "--served-model-name a m")
    assert (config["model"], config["served_model_name"]) == ("m", ["a"])


def test_values_that_look_like_flags_stay_values() -> None:
    ours = {"--api-key": True, "--save-packed": False}
    assert translate(["--api-key", "-tp", "--save-packed", "m"], ours) == (
        ["--api-key", "-tp", "--save-packed", "m"],
        [],
    )


def test_keywords_of_vllms_LLM(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = engine_config(
            model="m", quantization="awq", gpu_memory_utilization=0.9, dtype="half", trust_remote_code=True,
            nnodes=1, swap_space=4, enforce_eager=False, hf_token=None,
        )  # fmt: skip
    assert config == EngineConfig(model="m", quantization="awq", dtype="float16")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "trust_remote_code=True has no effect here",
        "nnodes=1 has no effect here",
        "swap_space=4 has no effect here",
    ]
    for name, value, words in (
        ("nnodes", 2, "it must be 1: ranks of other hosts come by themselves"),
        (
            "default_mm_loras",
            {"image": "a"},
            "default_mm_loras: not supported here; pictures are",
        ),
        ("max_modle_len", 5, "it must be a field of EngineConfig"),
    ):
        with pytest.raises(RequestError, match=words):
            engine_config(**{name: value})
