"""What a checkpoint's config says of the cache of keys and values: followed under "auto", or warned of."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.support.harness import save_random

from headrace.backends.torch_ref import TorchRef
from headrace.engine.library.load import build_runner
from headrace.engine.library.pools import choose_kv_dtype
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError

QUARK = {name: {"output_tensors": {"dtype": "fp8_e4m3"}} for name in ("*k_proj", "*v_proj")}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "requests", "chosen", "text"),
    [
        (None, "auto", "float32", ""),
        ({"kv_cache_scheme": None}, "auto", "float32", ""),
        ({"kv_cache_scheme": FP8}, "auto", "fp8_e4m3", "each token and head has a scale"),
        ({"kv_cache_quant_config": QUARK}, "auto", "fp8_e4m3", "each token and head has a scale"),
        (
            {"kv_cache_quant_config": QUARK | {"*v_proj": {"output_tensors": {"dtype": "int8"}}}},
            "auto",
            "float32",
            "fp8_e4m3, int8",
        ),
        ({"kv_cache_quant_config": {}}, "auto", "float32", ""),
        ({"kv_cache_quant_algo": "FP8"}, "auto", "fp8_e4m3", "k_scale and v_scale are not used"),
        ({"kv_cache_scheme": FP8}, "float32", "float32", ""),
        (
            {"kv_cache_scheme": FP8 | {"type": "int"}},
            "auto",
            "float32",
            "in int8, which the backend torch_ref does not",
        ),
        ({"kv_cache_quant_algo": "NVFP4"}, "auto", "float32", "in 'NVFP4', which the backend"),
    ],
)
def test_the_cache_is_what_the_checkpoint_says(
    config: dict[str, Any] | None, requests: str, chosen: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace")
    assert choose_kv_dtype(requests, TorchRef("cpu", "float32"), config) == chosen
    assert text in caplog.text
    assert bool(text) == bool(caplog.text)


@pytest.mark.parametrize(
    "scheme", ["fp8", [], {}, {"num_bits": 8}, {"num_bits": "8", "type": "float"}, {"num_bits": 99, "type": "int"}]
)
def test_a_scheme_that_makes_no_sense_is_refused(scheme: Any) -> None:
    with pytest.raises(CheckpointError, match=r"quantization_config\.kv_cache_scheme"):
        choose_kv_dtype("auto", TorchRef("cpu", "float32"), {"kv_cache_scheme": scheme})


def test_a_server_of_such_a_checkpoint_says_its_cache(tmp_path: Path) -> None:
    save_random(CONFIG, tmp_path)
    path = tmp_path / "config.json"
    stated = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": FP8}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stated}))
    for requests, chosen in (("auto", "fp8_e4m3"), ("float32", "float32")):
        options: dict[str, Any] = {"kv_cache_dtype": requests, "num_gpu_blocks_override": 4}
        _, info = build_runner(EngineConfig(model=str(tmp_path), backend="torch_ref", **options))
        assert info.kv_cache_dtype == chosen
