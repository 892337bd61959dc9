"""Every record of every model_type and form of weights and cache beside the operators of torch_ref. The last tests
plant a wrong field in one record, and see that record named first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.formats.gguf.test_models import BIG, MIXTURES, quantised
from tests.models.test_encoders import save
from tests.support.harness import RandomModels, load, random_ids, save_random, scattered_tables

from headrace import models
from headrace.backends.cpu.check.verify import REFERENCE, Difference, verify
from headrace.backends.cpu.memory import aligned
from headrace.backends.cpu.program import TapedProgram
from headrace.backends.cpu.tape import Tape
from headrace.backends.graph import Node
from headrace.backends.native import require_native
from headrace.backends.step import Chunks

WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int4": {"quantization": "int4"},
    "int8": {"quantization": "int8"},
    "int8-g128": {"quantization": "int8-g128"},
    "int4-g32-asym": {"quantization": "int4-g32-asym"},
}
CACHES = ("float32", "float16", "bfloat16", "int8")
FORMS = [(weights, cache) for cache in CACHES for weights in WEIGHTS]
FORMS += [
    ("float32", "int8_dot"),
    ("float32", "int4"),
    ("int4", "int4"),
    ("float32", "fp8_e4m3"),
    ("float32", "fp8_e5m2"),
]
BLOCK_SIZES = {
    "float32": 16,
    "float16": 8,
    "bfloat16": 5,
    "int8": 16,
    "int8_dot": 8,
    "int4": 16,
    "fp8_e4m3": 8,
    "fp8_e5m2": 16,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Each record runs by itself here, where a second thread only costs time."""
    require_native().set_num_threads(1)
    yield
    require_native().set_num_threads(0)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return RandomModels(tmp_path_factory.mktemp("models"))


def program_of(directory: Path, cache: str = "float32", **options: Any) -> TapedProgram:
    fields = {"block_size": BLOCK_SIZES[cache], "kv_cache_dtype": cache, "backend": "cpu"} | options
    program: Any = load(directory, **fields).program
    return program  # type: ignore[no-any-return]


def step(program: TapedProgram) -> list[int]:
    """Compute a step of two sequences, and fill in the next: both go on and a third begins. Return its dims."""
    lengths = [71, 40, 33]
    tokens = [random_ids(n, program.vocab_size, i) for i, n in enumerate(lengths)]
    tables = scattered_tables(lengths, program.block_size, program.num_blocks, 3)
    states = {"states_in": [-1, -1], "states_out": [(69, 0), (98, 1)]}
    program.forward(Chunks([0, 0], [tokens[0][:70], tokens[1][:29]], tables[:2], **states), [])
    states = {"states_in": [0, 1, -1], "states_out": [(0, 2), (5, 3), (11, 4), (30, 5)]}
    num_rows = program.inputs.fill(Chunks([70, 29, 0], [tokens[0][70:], tokens[1][29:], tokens[2]], tables, **states))
    program.logit_rows[:3] = [0, 11, num_rows - 1]
    return [num_rows, 3, 3]


@pytest.mark.sampled(19)
@pytest.mark.parametrize(("weights", "cache"), FORMS)
@pytest.mark.parametrize("model_type", models.names())
def test_every_record_agrees_with_torch_ref(
    model_type: str, weights: str, cache: str, directories: dict[str, Path]
) -> None:
    program = program_of(directories[model_type], cache, **WEIGHTS[weights])
    assert verify(program.tape, step(program)) == []
    operators = {"float32": "linear_f", "bfloat16": "linear_f", "int4": "linear_i4", "int4-g32-asym": "linear_i4"}
    assert operators.get(weights, "linear_i8") in {node.op for node in program.tape.nodes}


@pytest.mark.parametrize("mixture", ["Q4_K_M", "Q3_K+Q2_K"])
def test_every_record_over_k_quants_agrees_with_torch_ref(mixture: str, tmp_path: Path) -> None:
    save_random(BIG, tmp_path)
    program = program_of(quantised(tmp_path, MIXTURES[mixture]))
    assert verify(program.tape, step(program)) == []
    assert {"linear_k", "embedding"} <= {node.op for node in program.tape.nodes}
    node = next(node for node in program.tape.nodes if node.op == "embedding")
    assert node.fields["type"] >= 12, "the table is of K-quants"
    assert planted(program, node, "ids", node.fields["ids"] + 1)[0].op == "embedding"


def test_every_operator_of_a_tape_has_a_reference() -> None:
    assert REFERENCE.keys() == require_native().schema().keys() - {"choose", "gather"}


def planted(program: TapedProgram, node: Node, field: str, value: Any) -> list[Difference]:
    """Return what `verify` reports if record `node` has another `value` than the graph."""
    right = node.fields[field]
    node.fields[field] = value
    program.tape = Tape(program.tape.graph, program.tape.most)
    node.fields[field] = right
    return verify(program.tape, step(program))


def spoilt(weights: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a copy with some bytes reversed."""
    copy = aligned(len(weights))
    copy[:] = weights
    copy[256:288] = copy[256:288][::-1]
    return copy


PLANTS: list[tuple[str, dict[str, Any], str, str, Callable[[Any], Any]]] = [
    ("llama", {}, "embedding", "scale", lambda old: old * 1.001),
    ("llama", {}, "embedding", "ids", lambda old: old + 1),
    ("llama", {}, "select_rows", "rows", lambda old: np.zeros_like(old)),
    ("llama", {}, "rms_norm", "eps", lambda old: 0.1),
    ("llama", {"quantization": "int8"}, "rms_norm", "weight", lambda old: old * np.float32(1.001)),
    ("gpt2", {}, "layer_norm", "bias", lambda old: old + np.float32(0.01)),
    ("gpt2", {}, "add", "width", lambda old: old - 1),
    ("gpt2", {}, "activation", "kind", lambda old: 1),
    ("llama", {}, "gated", "kind", lambda old: 2),
    ("llama", {"quantization": "int4"}, "gated", "kind", lambda old: 3),
    ("llama", {"quantization": "int4-g32-asym"}, "quantize", "group", lambda old: old // 2),
    ("gemma2", {}, "softcap", "cap", lambda old: old * 1.01),
    ("llama", {}, "rope_store", "pairs", lambda old: old - 1),
    ("qwen3", {}, "rope_store", "k_norm", lambda old: None),
    ("llama", {"cache": "int8"}, "rope_store", "slots", lambda old: np.zeros_like(old)),
    ("gemma2", {"cache": "bfloat16"}, "rope_store", "positions", lambda old: np.zeros_like(old)),
    ("llama", {"cache": "int4"}, "rope_store", "slots", lambda old: np.zeros_like(old)),
    ("llama", {"cache": "int4"}, "rope_store", "k_mean", lambda old: None),
    ("llama", {"cache": "int4"}, "rope_store", "k_scale", lambda old: np.zeros_like(old)),
    ("mistral", {"cache": "int4"}, "attention", "window", lambda old: old - 1),
    ("llama", {"cache": "int4"}, "attention", "v_scale", lambda old: old[..., ::-1].copy()),
    ("llama", {"cache": "fp8_e4m3"}, "attention", "kv_type", lambda old: 3),
    ("llama", {}, "attention", "scale", lambda old: old * 1.001),
    ("mistral", {}, "attention", "window", lambda old: old - 1),
    ("llama", {}, "attention", "start", lambda old: np.zeros_like(old)),
    ("llama", {}, "linear_f", "residual", lambda old: None),
    ("qwen2", {"quantization": "int8"}, "linear_i8", "bias", lambda old: None),
    ("llama", {}, "linear_f", "weights", lambda old: spoilt(old)),
    ("llama", {"quantization": "int8"}, "linear_i8", "weights", lambda old: spoilt(old)),
    ("llama", {"quantization": "int4"}, "linear_i4", "weights", lambda old: spoilt(old)),
    ("mixtral", {}, "route", "num_experts", lambda old: old - 1),
    ("qwen3_moe", {}, "route", "renormalise", lambda old: 0),
    ("qwen2_moe", {}, "route", "scale", lambda old: 1.001),
    ("mixtral", {}, "moe_group", "top_k", lambda old: 1),
    ("qwen3_moe", {}, "moe_gather", "width", lambda old: old - 1),
    ("qwen3_moe", {"quantization": "int8"}, "moe_gather", "ld_q", lambda old: old - 1),
    ("qwen3_moe", {}, "linear_each", "experts", lambda old: old[::-1].copy()),
    ("qwen3_moe", {}, "linear_each", "count", lambda old: old - 3),
    ("qwen3_moe", {"quantization": "int4"}, "linear_each", "experts", lambda old: np.roll(old, 1)),
    ("qwen2_moe", {"quantization": "int8"}, "linear_each", "begin", lambda old: np.roll(old, 1)),
    ("qwen2_moe", {}, "moe_combine", "top_k", lambda old: old - 1),
    ("mixtral", {}, "moe_combine", "weights", lambda old: None),
    ("mixtral", {}, "moe_combine", "residual", lambda old: None),
    ("qwen2_moe", {}, "multiply", "kind", lambda old: 0),
    ("qwen2_moe", {}, "multiply", "ld_gate", lambda old: 0),
    ("olmo2", {}, "rms_norm", "width", lambda old: old - 1),
    ("hunyuan_v1_dense", {}, "rope_store", "heads", lambda old: old - 1),
    ("apertus", {"quantization": "int4"}, "xielu", "negative", lambda old: old * 1.01),
    ("ministral3", {}, "multiply", "gate_width", lambda old: old + 1),
    ("llama4_text", {}, "attention", "window", lambda old: old + 1),
    ("llama4_text", {}, "moe_gather", "weights", lambda old: None),
    ("nemotron_h", {}, "activation", "kind", lambda old: 0),
    ("deepseek_v3", {}, "rope_store", "first", lambda old: old - 1),
    ("deepseek_v3", {}, "spread", "step_x", lambda old: old - 1),
    ("mistral4", {}, "spread", "width", lambda old: old - 1),
    ("deepseek_v3", {}, "linear_each", "count", lambda old: old - 1),
    ("deepseek_v3", {"quantization": "int8"}, "linear_each", "count", lambda old: old - 1),
    ("granite", {}, "scale", "factor", lambda old: old * 1.001),
    ("gpt_oss", {}, "attention", "sinks", lambda old: old + np.float32(0.01)),
    ("gpt_oss", {}, "attention", "sinks", lambda old: None),
    ("gpt_oss", {}, "gated", "kind", lambda old: 0),
    ("llama", {}, "finite", "finite", lambda old: np.zeros_like(old)),
    ("llama", {}, "top_k", "width", lambda old: old - 150),
    ("llama", {}, "attention", "scale", lambda old: old * 1.0001),
    ("gpt2", {}, "layer_norm", "eps", lambda old: old * 100),
    ("qwen2", {}, "linear_f", "bias", lambda old: old * np.float32(1.0002)),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model_type", "options", "op", "field", "change"), PLANTS, ids=[f"{p[0]} {p[2]}.{p[3]}" for p in PLANTS]
)
def test_control_a_wrong_field_of_one_record_is_named_first(
    model_type: str, options: dict[str, Any], op: str, field: str, change: Any, directories: dict[str, Path]
) -> None:
    program = program_of(directories[model_type], **options)
    nodes = [node for node in program.tape.nodes if node.op == op and node.fields[field] is not None]
    node = nodes[len(nodes) // 2]
    differences = planted(program, node, field, change(node.fields[field]))
    assert differences
    assert (differences[0].index, differences[0].op) == (node.index, op)


def test_HEADRACE_DEBUG_3_logs_what_differs(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADRACE_DEBUG", "3")
    program = program_of(directories["llama"])
    step(program)
    assert not caplog.records
    node = next(node for node in program.tape.nodes if node.op == "attention")
    planted(program, node, "scale", 0.5)
    assert caplog.messages[0].startswith(f"record {node.index}, attention: out differs by 0.")


def test_biases_by_distance_agree_with_torch_ref(tmp_path: Path) -> None:
    save("mpnet", tmp_path)
    program = program_of(tmp_path, dtype="float32")
    assert verify(program.tape, step(program)) == []
    node = next(node for node in program.tape.nodes if node.op == "attention")
    assert planted(program, node, "bias", node.fields["bias"][::-1].copy())[0].op == "attention"
