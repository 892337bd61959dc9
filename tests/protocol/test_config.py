"""The two config objects and the sizes that people write."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.protocol.config import QUANTIZATIONS, EngineConfig, ServerConfig
from headrace.protocol.errors import RequestError
from headrace.protocol.human import human_int
from headrace.quant import schemes


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("1.5k", 1500), ("2G", 2**31), ("1m", 10**6), (" 7 ", 7)],
)
def test_human_int(text: str, value: int) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "1e3", "32kk", "32 k", "0x10", "nan", "1.0001k"])
def test_human_int_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="number"):
        human_int(text)


@pytest.mark.parametrize(
    ("struct", "field", "value"),
    [
        (EngineConfig, "dtype", "float8"),
        (EngineConfig, "quantization", "int3"),
        (EngineConfig, "kv_cache_dtype", "int3"),
        (EngineConfig, "num_threads", -1),
        (EngineConfig, "num_threads", 257),
        (EngineConfig, "quantization", "int5"),
        (EngineConfig, "scheduling_policy", "lifo"),
        (EngineConfig, "block_size", 0),
        (EngineConfig, "max_num_seqs", 0),
        (EngineConfig, "max_num_batched_tokens", True),
        (EngineConfig, "max_model_len", 1),
        (EngineConfig, "max_logprobs", -2),
        (EngineConfig, "seed", -1),
        (ServerConfig, "port", 65_536),
        (ServerConfig, "max_num_queued_reqs", 0),
        (ServerConfig, "max_restarts", -1),
        (ServerConfig, "generation_config", "vllm"),
        (ServerConfig, "uvicorn_log_level", "loud"),
        (ServerConfig, "port", "http"),
        (EngineConfig, "max_num_seqs", "x"),
        (EngineConfig, "seed", 1.5),
    ],
)
def test_a_bad_value_is_named_with_its_bound(struct: type, field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        struct(**{field: value})
    assert caught.value.field == field
    assert caught.value.bound


def test_config_crosses_a_process_as_msgpack() -> None:
    config = EngineConfig(model="x", max_model_len=64, enable_prefix_caching=False)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


def test_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        EngineConfig().model = "other"  # type: ignore[misc]


def test_the_config_names_the_quantizations_that_exist() -> None:
    assert QUANTIZATIONS == schemes.NAMES
    for name in QUANTIZATIONS:
        assert EngineConfig(quantization=name).quantization == schemes.parse(name).name
