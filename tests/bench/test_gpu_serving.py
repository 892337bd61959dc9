"""The stage `bench` of the GPU checks at toy size: programs, the trace, FlashInfer and transformers beside them."""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.gpu import engine, goals, peers, serving, shapes, speed, yardsticks
from bench.gpu.device import Device
from bench.gpu.engine import Answers, Law, compare_logprobs
from bench.gpu.operators import Operators, heads_of
from bench.gpu.report import Report
from bench.gpu.weights import make_program

from headrace.protocol.step import TokenLogprob


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "bench.json", time.time() + 600)


@pytest.fixture(scope="module")
def device() -> Device:
    return Device(toy=True)


def test_bench(report: Report, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {"generate_batch": 8.0, "static": 4.0}
    monkeypatch.setattr(peers, "run", lambda device, config, job, loop: {"seconds_of_job": jobs[loop]})
    speed.run(report, device)
    items = {item["name"]: item for item in report.items}
    assert {name for name, item in items.items() if item["status"] != "ok"} == set()
    beside = items["transformers toy x3"]
    assert beside["times"] == beside["times_static"] == beside["times_generate_batch"] / 2
    trace = items["trace toy bf16"]
    assert trace["requests"] == 6
    assert trace["overlapped"] > 0
    assert 0 < trace["tpot_ms_p50"] <= trace["tpot_ms_p99"]
    assert items["engine toy bf16 x3"]["overlapped"] > 0
    assert items["price of the law toy"]["decode"] > -1


def test_every_goal_has_an_item(report: Report, device: Device) -> None:
    whole = Device(toy=True)
    whole.toy = False
    names = {name for name, _ in speed.Bench(report, whole).items()}
    assert all(names.intersection(goal.item.split("|")) for goal in goals.GOALS)
    assert {f"decode 8b bf16 x{batch}" for batch in (1, 8, 64, 256)} <= names
    assert {"trace 8b bf16", "flashinfer 8b decode", "flashinfer 8b prefill", "prefill 8b bf16 2048"} <= names
    assert all(any(name.startswith(word) for name in names) for word in speed.SECONDS)


def test_transformers_that_was_not_measured_is_named(report: Report, device: Device) -> None:
    bench = speed.Bench(report, device)
    assert "times" not in bench.beside_transformers("toy")
    report.run("job toy bf16", lambda: {"seconds_of_job": 2.0})
    report.run("transformers static toy x3", lambda: {"seconds_of_job": 8.0})
    assert bench.beside_transformers("toy") == {"generate_batch": "not measured", "times_static": 4.0, "times": 4.0}


@pytest.mark.filterwarnings("ignore:The `paged:FutureWarning")  # Older versions need the prefix.
def test_transformers_loops_run(device: Device) -> None:
    pytest.importorskip("transformers")
    job = peers.Job(2, 9, 3)
    for loop in peers.LOOPS:
        result = peers.run(device, shapes.TOY, job, loop)
        assert result["new_tokens_per_second"] == pytest.approx(6 / result["seconds_of_job"])


def test_what_is_not_carried_is_named(report: Report, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    operators = Operators(report, device)
    heads = heads_of(shapes.TOY)
    assert operators.flashinfer("toy", heads, "decode") == {"yardstick": "not carried"}
    assert peers.run(device, shapes.TOY, peers.Job(1, 2, 2), "static") == {"yardstick": "not carried"}


STAND_IN = '''
"""Calls of FlashInfer 0.5.3 that the GPU checks make, in plain torch."""
import torch

__version__ = "0.5.3"
ORDER = 1


def attend(q, cache, pages, last_page_len, causal):
    keys, values = (part[pages.long()].transpose(1, 2).flatten(0, 1) for part in cache[::ORDER])
    end = len(keys) - len(keys) // len(pages) + int(last_page_len)
    k, v = (part[:end].transpose(0, 1) for part in (keys, values))
    mask = torch.ones(len(q), end, dtype=torch.bool).tril(end - len(q)) if causal else None
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(0, 1)


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
                 paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None,
                 backend="auto", jit_args=None):
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "HND"

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
             pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
             data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, block_tables=None,
             seq_lens=None, fixed_split_size=None, disable_split_kv=False):
        assert all(each.dtype == torch.int32 for each in (indptr, indices, last_page_len))
        self.planned = indptr.tolist(), indices, last_page_len, (num_qo_heads, num_kv_heads, head_dim, page_size)

    def run(self, q, paged_kv_cache):
        indptr, indices, last, (heads, kv_heads, dim, page) = self.planned
        assert q.shape == (len(indptr) - 1, heads, dim) and paged_kv_cache[0].shape[1:] == (kv_heads, page, dim)
        places = [indices[a:b] for a, b in zip(indptr, indptr[1:])]
        return torch.cat([attend(q[i : i + 1], paged_kv_cache, at, last[i], False) for i, at in enumerate(places)])


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
                 paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
                 custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None):
        assert kv_layout == "HND"

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
             head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
             pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
             logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None):
        self.planned = qo_indptr.tolist(), paged_kv_indptr.tolist(), paged_kv_indices, paged_kv_last_page_len, causal

    def run(self, q, paged_kv_cache):
        rows, pages, indices, last, causal = self.planned
        return torch.cat([
            attend(q[rows[i] : rows[i + 1]], paged_kv_cache, indices[pages[i] : pages[i + 1]], last[i], causal)
            for i in range(len(last))
        ])
'''


@pytest.fixture
def flashinfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "flashinfer.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(yardsticks, "WORKSPACE", 1024)
    yield importlib.import_module("flashinfer")
    del sys.modules["flashinfer"]


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_flashinfer_is_measured_where_it_is_carried(
    kind: str, report: Report, device: Device, flashinfer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators, heads = Operators(report, device), heads_of(shapes.TOY)
    report.run(f"attention toy {kind}", lambda: {"us": 50.0})
    result = operators.flashinfer("toy", heads, kind)
    assert result["version"] == "0.5.3"
    assert result["fault"] == ""
    assert result["times_yardstick"] == result["yardstick_us"] / 50.0
    monkeypatch.setattr(flashinfer, "ORDER", -1)  # It would take values for keys.
    assert "differs by" in operators.flashinfer("toy", heads, kind)["fault"]


def test_the_trace_is_whole() -> None:
    rows = serving.read_trace(serving.TRACE)
    assert len(rows) == 256
    assert rows[0].seconds == 0
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    assert all(row.num_prompt > 0 and row.num_new > 0 for row in rows)
    assert max(row.num_prompt + row.num_new for row in rows) < max(speed.PREFILLS)
    assert "CC BY 4.0" in serving.TRACE.read_text().splitlines()[1]


def test_a_request_of_the_trace_that_fails_is_no_figure(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = make_program(shapes.TOY, "cpu", "", 16, 3, 40, 120)
    rows = [serving.Arrival(0.0, 5, 3), serving.Arrival(0.01, 20, 2)]
    assert serving.serve_trace(device, program, rows, 3)["requests"] == 2
    make_request = serving.make_request
    monkeypatch.setattr(serving, "make_request", lambda i, prompt, new: make_request(i, prompt, new - 1))
    with pytest.raises(RuntimeError, match="3 tokens came, not 5"):
        serving.serve_trace(device, program, rows, 3)
    program.close()


def test_idle_is_what_lies_between_steps_of_a_run() -> None:
    runs = [[(0.0, 2.0), (3.0, 5.0), (5.0, 6.0)], [(0.0, 4.0)]]
    assert serving.idle_between(runs) == {"idle_between_steps": 0.1, "idle_us_of_step": 0.25e6}


def test_percentiles() -> None:
    assert serving.percentiles("x", [float(i) for i in range(101)]) == {"x_p50": 50.0, "x_p90": 90.0, "x_p99": 99.0}
    assert serving.percentiles("x", []) == {}


def answers(*logprobs: float, token_ids: tuple[int, ...] = (7, 8)) -> Answers:
    one = Answers()
    one.token_ids["0"] = list(token_ids)
    one.logprobs["0"] = [
        TokenLogprob(i, x, 1, ((i, x), (5, x - 0.5))) for i, x in zip(token_ids, logprobs, strict=True)
    ]
    return one


@pytest.mark.parametrize(
    ("actual", "fault"),
    [
        (answers(-1.0, -2.001), ""),
        (answers(-1.0, -2.2), "differ by more than"),
        (answers(-1.0, math.nan), "differ by more than"),
        (answers(-1.0, -2.0, token_ids=(7, 5)), "other ids"),
    ],
)
def test_torch_ref_on_the_device_is_compared(actual: Answers, fault: str) -> None:
    result = compare_logprobs(answers(-1.0, -2.0), actual, "bfloat16")
    assert (fault in result["fault"]) if fault else result["fault"] == ""


def test_torch_ref_on_the_device_with_other_numbers_is_noticed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    law = Law(device)
    by_torch_ref: Callable[[str, str], Answers] = law.by_torch_ref
    calls: list[str] = []

    def scaled(place: str, dtype: str) -> Answers:
        result = by_torch_ref(place, dtype)
        for entries in result.logprobs.values() if calls else ():
            entries[:] = [TokenLogprob(e.token_id, e.logprob * 1.1, e.rank, e.top) for e in entries]
        calls.append(place)
        return result

    assert law.reference_backend("float32")["fault"] == ""
    monkeypatch.setattr(law, "by_torch_ref", scaled)
    assert "differ by more than" in law.reference_backend("float32")["fault"]
    assert calls == ["cpu", device.name]


def test_steps_that_do_not_overlap_show_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    law = Law(device)
    assert law.drawn(1)["fault"] == ""
    monkeypatch.setattr(engine, "count_overlaps", lambda core: [False, False])
    assert "0 of 2 steps overlapped" in law.drawn(1)["fault"]
