"""The composition root: numbers that contradict each other are refused."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.backends import native
from headrace.engine.build import build_engine
from headrace.engine.library import load
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError, RequestError


def test_R_09_the_pool_holds_the_told_context_or_there_is_no_engine() -> None:
    with pytest.raises(RequestError, match=r"num_gpu_blocks_override: 5 .* at least 6, to hold one sequence"):
        build_engine(EngineConfig(num_gpu_blocks_override=5, max_model_len=81))
    core = build_engine(EngineConfig(num_gpu_blocks_override=5, max_model_len=80))
    assert core.info.max_model_len == core.scheduler.max_model_len == 80
    core.close()


def test_R_27_no_chunked_prefill_needs_a_budget_for_the_longest_prompt() -> None:
    with pytest.raises(RequestError, match=r"max_num_batched_tokens: 512 .* at least max_model_len"):
        build_engine(EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=512))
    core = build_engine(EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=2048, max_model_len=1024))
    core.close()


def test_a_cache_that_the_backend_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.backends.torch_ref.TorchRef.kv_dtypes", ("float32", "bfloat16"))
    with pytest.raises(RequestError, match=r"kv_cache_dtype: 'int8' .* one of auto, .* on backend torch_ref"):
        build_engine(EngineConfig(backend="torch_ref", kv_cache_dtype="int8"))


def test_fp8_is_e4m3() -> None:
    core = build_engine(EngineConfig(num_gpu_blocks_override=64, kv_cache_dtype="fp8"))
    assert core.info.kv_cache_dtype == "fp8_e4m3"
    core.close()


@pytest.mark.parametrize("fields", [{}, {"kv_cache_dtype": "int8", "quantization": "int4", "num_threads": 1}])
def test_what_runs_is_told(fields: dict[str, Any]) -> None:
    core = build_engine(EngineConfig(num_gpu_blocks_override=64, **fields))
    assert (core.info.backend, core.info.device, core.info.dtype) == ("cpu", "cpu", "bfloat16")
    assert core.info.kv_cache_dtype == fields.get("kv_cache_dtype", "bfloat16")
    assert core.info.quantization == fields.get("quantization", "")
    core.close()


def test_without_the_native_library_auto_is_the_slow_path_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "native", lambda: (None, "it was not built; install a compiler"))
    core = build_engine(EngineConfig(num_gpu_blocks_override=64))
    assert core.info.backend == "torch_ref"
    assert "native kernels are missing (it was not built; install a compiler)" in caplog.text
    core.close()
    with pytest.raises(HeadraceError, match="no native core: it was not built"):
        build_engine(EngineConfig(num_gpu_blocks_override=64, backend="cpu"))


def test_the_native_backend_is_for_cpus() -> None:
    with pytest.raises(RequestError, match="device: 'cuda'"):
        build_engine(EngineConfig(backend="cpu", device="cuda"))


def test_the_checkpoints_own_method_may_be_named_and_no_other() -> None:
    config = EngineConfig(quantization="awq_marlin")
    assert load.as_stored(config, "awq", ()).quantization is None
    assert load.as_stored(EngineConfig(quantization="int4"), "none", ()).quantization == "int4"
    assert load.as_stored(EngineConfig(quantization="mxfp4"), "none", ()).quantization == "mxfp4", "to quantise by"
    assert load.as_stored(EngineConfig(quantization="mxfp4"), "mxfp4", ()).quantization is None
    with pytest.raises(RequestError, match="quantization: 'awq' .* left out: the checkpoint's own method is none"):
        build_engine(EngineConfig(quantization="awq"))


def test_a_share_of_a_gpu_has_no_effect_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    for share, warned in ((0.9, 0), (0.5, 1)):
        caplog.clear()
        build_engine(EngineConfig(gpu_memory_utilization=share, max_num_seqs=1, max_model_len=64)).close()
        assert len([r for r in caplog.records if "gpu_memory_utilization" in r.getMessage()]) == warned
