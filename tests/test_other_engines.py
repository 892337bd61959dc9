"""Command lines and keywords of other engines: taken, without effect, or refused with what to use."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import typer.main
from typer.core import TyperOption

from headrace import other_engines
from headrace.cli.main import app
from headrace.other_engines import Setting, translate, translate_keywords
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import RequestError

FIELDS = {*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__}
ALL = (*other_engines.VLLM_SETTINGS, *other_engines.LLAMA_SERVER_SETTINGS)


def engine_config(**fields: Any) -> EngineConfig:
    return EngineConfig(**translate_keywords(fields, EngineConfig.__struct_fields__))


# Engine flags of `vllm serve` beside headrace's own, as scripts have them.
VLLM_LINES = [
    "--trust-remote-code", "--enforce-eager", "--nnodes=1",
    "--swap-space 16", "--cpu-offload-gb 0", "--load-format auto", "--tokenizer-mode auto",
    "--disable-log-requests", "--disable-log-stats", "--enable-log-requests", "--max-seq-len-to-capture 8192",
    "--disable-custom-all-reduce", "--distributed-executor-backend mp", "--model-impl auto", "--runner generate",
    "--task generate", "--limit-mm-per-prompt image=0", "--structured-outputs-config {}", "-O 3",
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


@pytest.mark.parametrize("line", VLLM_LINES)
def test_a_flag_of_vllms_is_taken(serve: Any, line: str) -> None:
    taken = parsed(serve, f"some/model {line} --max-model-len 4k")
    assert (taken["model"], taken["max_model_len"]) == ("some/model", 4000)
    if line != "--disable-log-stats":
        [note] = taken["notes"]
        assert note.startswith(line.partition(" ")[0].partition("=")[0] + " has no effect here: ")


@pytest.mark.parametrize("setting", ALL, ids=lambda setting: setting.names[0])
def test_each_row_does_what_it_says(serve: Any, setting: Setting) -> None:
    own = {name for option in serve.params if isinstance(option, TyperOption) for name in option.opts}
    assert setting.ours in ("", *FIELDS)
    assert setting.ours or setting.why
    for name in setting.names:
        assert name not in own or setting.convert, "a flag of our own needs no row, unless its values differ"
        if not setting.ours and not setting.has_no_effect:
            with pytest.raises(RequestError, match=f"^{name}: not supported here; "):
                parsed(serve, f"{name} 1")
        elif setting.has_no_effect and setting.takes_value:
            value = (setting.neutral or ("anything",))[0]
            assert len(parsed(serve, f"{name} {value}")["notes"]) == 1
            if setting.neutral:
                with pytest.raises(RequestError, match=f"^{name}: 'other' is not allowed; it must be "):
                    parsed(serve, f"{name} other")


def test_a_row_with_a_field_sets_it(serve: Any) -> None:
    line = "-m a.gguf -c 4096 -t 3 -np 4 -b 512 -a name -ctk q8_0 -ctv q8_0 --chat-template-file t.jinja --log-jsonl"
    taken = parsed(serve, line)
    expected = {
        "model": "a.gguf", "max_model_len": 4096, "num_threads": 3, "max_num_seqs": 4, "max_num_batched_tokens": 512,
        "served_model_name": ["name"], "kv_cache_dtype": "int8", "chat_template": "t.jinja", "log_format": "json",
    }  # fmt: skip
    assert {name: taken[name] for name in expected} == expected
    assert taken["notes"] == []
    assert parsed(serve, "--no-cache-prompt --dtype half --max_model_len=512") | {} == parsed(
        serve, "--no-enable-prefix-caching --dtype float16 --max-model-len 512"
    )
    assert parsed(serve, "-c 0 -np -1 -s -1") == parsed(serve, "")
    with pytest.raises(RequestError, match=r"^-ctv: 'f16' is not allowed; it must be int8, as --kv-cache-dtype was"):
        parsed(serve, "-ctk q8_0 -ctv f16")


def test_several_names_follow_the_model(serve: Any) -> None:
    for line in ("m --served-model-name a b --port 1 c", "--model m --served-model-name a b c"):
        if line.endswith("1 c"):
            with pytest.raises(Exception, match="unexpected extra argument"):
                parsed(serve, line)
            line = line.removesuffix(" c") + " --served-model-name=c"
        assert (parsed(serve, line)["model"], parsed(serve, line)["served_model_name"]) == ("m", ["a", "b", "c"])
    taken = parsed(serve, "--served-model-name a m")
    assert (taken["model"], taken["served_model_name"]) == ("m", ["a"])


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
        ("enable_lora", True, "enable_lora: not supported here; merge"),
        ("max_modle_len", 5, "it must be a field of EngineConfig"),
    ):
        with pytest.raises(RequestError, match=words):
            engine_config(**{name: value})
