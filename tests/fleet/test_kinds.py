"""The simulator on models with windows and states: pools as the engine divides memory, and what they hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.plan import configs

from headrace.cli.main import main
from headrace.cli.simulate import pools_of
from headrace.engine.library.pools import choose_pool_sizes
from headrace.fleet.simulator import Simulation, Sizes
from headrace.fleet.traces import Call
from headrace.plan import hardware
from headrace.plan.planner import Planner, Subject
from headrace.plan.plans import Workload
from headrace.protocol.config import EngineConfig
from headrace.protocol.kinds import CacheKind

HYBRID = {
    "model_type": "qwen3_next", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "full_attention_interval": 4, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def planner(config: dict[str, Any], memory: float) -> Planner:
    machine = msgspec.structs.replace(hardware.TABLE["h100"], memory=memory)
    return Planner(Subject("x", config), machine, Workload())


@pytest.mark.parametrize(
    ("config", "memory", "kinds"),
    [
        (configs.LLAMA_3_8B, 80e9, (CacheKind(),)),
        (configs.GEMMA_3_27B, 80e9, (CacheKind(), CacheKind(1024))),
        (HYBRID, 1e9, (CacheKind(), CacheKind(is_state=True))),
    ],
    ids=["all", "windows", "states"],
)
def test_memory_is_divided_as_an_engine_divides_it(config: Any, memory: float, kinds: Any) -> None:
    one = planner(config, memory)
    result, sizes = pools_of(one, 16, 32, 512)
    assert result == kinds
    each = []
    for kind in kinds:
        if kind.is_state:
            each.append(int(one.counts.state_bytes))
        else:
            layers = [(layer, num) for layer, num in one.counts.layers if (layer.window or 0) == kind.window]
            each.append(int(16 * sum(layer.kept_bytes(one.kv_dtype) * num for layer, num in layers)))
    engine = EngineConfig(
        block_size=16, max_num_seqs=32, max_num_batched_tokens=512, kv_cache_memory_bytes=int(one.free)
    )
    backend = SimpleNamespace(block_bytes=lambda model, kind, block_size, kv_dtype: each[kind])
    model = SimpleNamespace(kinds=kinds)
    theirs = choose_pool_sizes(engine, cast(Any, model), one.max_context, cast(Any, backend), one.kv_dtype, 32)
    assert sizes == theirs
    assert sum(num * size for num, size in zip(sizes, each, strict=True)) <= one.free


def play(kinds: tuple[CacheKind, ...], more_blocks: tuple[int, ...], num_blocks: int) -> Any:
    sizes = Sizes(
        num_blocks=num_blocks, more_blocks=more_blocks, kinds=kinds, block_size=4, max_num_seqs=8,
        max_num_batched_tokens=32, max_model_len=256, enable_prefix_caching=False,
    )  # fmt: skip
    calls = [Call(float(i), 40, 60) for i in range(12)]
    return Simulation(1, "round-robin", sizes, lambda starts, lens, num_logits: 1.0 + sum(lens) / 100).run(calls)


def test_a_window_keeps_what_it_sees_and_so_more_sequences() -> None:
    # 24 blocks hold one sequence of 100 tokens whole, or the windows of several.
    whole, windowed = play((CacheKind(),), (), 26), play((CacheKind(16),), (), 26)
    assert {(life.num_new, life.end < 1e9) for run in (whole, windowed) for life in run.lives} == {(60, True)}
    assert len(whole.lives) == len(windowed.lives) == 12
    assert windowed.duration < whole.duration / 2


def test_sequences_wait_for_the_slots_of_states() -> None:
    few = play((CacheKind(), CacheKind(is_state=True)), (2,), 400)
    many = play((CacheKind(), CacheKind(is_state=True)), (16,), 400)
    assert len(few.lives) == len(many.lives) == 12
    # The control: with as many slots as sequences need, they run together.
    assert few.duration > 4 * many.duration


def test_the_command_plays_a_model_with_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configs.GEMMA_3_27B))
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * i, "input_length": 3000, "output_length": 20, "hash_ids": [0, i]} for i in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["simulate", str(tmp_path), "--hardware", "h200", "--trace", str(trace), "--json"]
    monkeypatch.setattr(sys, "argv", ["headrace", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    result = json.loads(capsys.readouterr().out)
    assert result["num_blocks"] > 0
    assert len(result["more_blocks"]) == 1
