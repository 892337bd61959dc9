"""Ranks with devices of their own, on CPUs that stand for GPUs: the determinism law over columns and over layers, spans
that are those of whole matrices, and a rank that ends."""

from __future__ import annotations

import functools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.harness import RandomModels
from tests.support.law import assert_same, make_core, make_requests, run
from tests.support.ranks import PP, TP, bits, check, check_end, check_uneven, few, group_of, is_gone, requests_of, until
from tests.support.shallow import shallow

from headrace import models
from headrace.backends.cuda import gathers
from headrace.backends.cuda.gathers import Gather
from headrace.backends.cuda.kernels.linear import Scratch, default, linear, scratch_numbers, span_of
from headrace.backends.shares import Layout, Plan
from headrace.engine import ranks
from headrace.parallel.devices import DeviceRanks
from headrace.parallel.program import RankLostError
from headrace.protocol.errors import RequestError

ON_CPU: dict[str, Any] = {"backend": "cuda", "device": "cpu"}
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8 and an int8 cache": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    "float32": {"dtype": "float32"},
}


@functools.cache
def requests() -> list[Any]:
    return list(few())[:6]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("field", "ranks"), [(TP, 2), (TP, 3), (PP, 2)])
def test_ranks_change_no_bit(field: str, ranks: int, form: str) -> None:
    check(requests(), ranks, field=field, model=shallow(2), **ON_CPU, **FORMS[form])


@pytest.mark.parametrize(("field", "ranks"), [(TP, 2), pytest.param(PP, 2, marks=pytest.mark.slow)])
def test_uneven_shares_change_no_bit(field: str, ranks: int, tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "intermediate_size": 104}
    check_uneven(6, ranks, field, tmp_path, sizes, dtype="bfloat16", **ON_CPU)


@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(x, marks=pytest.mark.slow) for x in ("qwen3", "gemma2", "qwen2"))]
)
@pytest.mark.parametrize(("field", "ranks"), [(TP, 2), pytest.param(PP, 2, marks=pytest.mark.slow)])
def test_norms_of_heads_experts_soft_caps_and_biases(
    field: str, ranks: int, name: str, random_models: RandomModels
) -> None:
    path = random_models[name]
    vocab_size = models.find(name).TINY["vocab_size"]
    form = {"model": str(path), "skip_tokenizer_init": True, "dtype": "bfloat16"} | ON_CPU
    check(requests_of(vocab_size)[:4], ranks, field=field, **form)


def columns_of(num_whole: int) -> torch.Tensor:
    """The first 70 outputs of a matrix of 8,192, computed as a part of one of `num_whole`."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(8192, 1536, generator=generator).bfloat16()
    x = torch.randn(3, 1536, generator=generator).bfloat16()
    sizes = torch.tensor([3, 0, 0], dtype=torch.int32)
    out = torch.zeros(3, 70)
    whole = torch.zeros(3, 8192)
    for part, to, num in ((weight[:70], out, num_whole), (weight, whole, 0)):
        scratch = Scratch(*(torch.zeros(size) for size in scratch_numbers(part, 3, default(part, 3, False, num), num)))
        linear(x, part, to, sizes, 0, 3, num_programs=1, num_whole=num, scratch=scratch).run_twin()
    return out - whole[:, :70]


def test_a_part_of_a_matrix_has_the_spans_of_the_whole() -> None:
    assert span_of(70, 1536) != span_of(8192, 1536)
    assert not columns_of(8192).any()


def test_control_spans_of_the_part_are_noticed() -> None:
    assert columns_of(0).any()


class Together:
    """The exchange of ranks that are threads of one process."""

    def __init__(self, world: int, turned: bool = False) -> None:
        self._parts: list[Any] = [None] * world
        self._meet, self._turned = threading.Barrier(world), turned

    def of(self, rank: int) -> Any:
        every, meet, turned = self._parts, self._meet, self._turned

        class Exchange:
            def gather(self, parts: torch.Tensor, part: torch.Tensor) -> None:
                every[rank] = part.clone()
                meet.wait(10)
                for row, each in zip(parts, reversed(every) if turned else every, strict=True):
                    row.copy_(each)
                meet.wait(10)

        return Exchange()


def gathered(layout: Layout, world: int, turned: bool = False) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Rows, and what each rank has of them after a gather of its columns."""
    whole = torch.arange(5 * layout.width, dtype=torch.float32).view(5, -1).bfloat16()
    outs = [torch.zeros_like(whole) for _ in range(world)]
    together = Together(world, turned)

    def rank_of(rank: int) -> None:
        x = torch.cat([whole[:, begin:end] for begin, end in layout.bounds(rank)], 1)
        memory = torch.zeros(gathers.num_bytes(layout, 5, 2), dtype=torch.uint8)
        Gather(together.of(rank), layout, x, outs[rank], memory).run_twin()

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return whole, outs


@pytest.mark.parametrize("widths", [[64], [40, 24], [7, 7, 3]])
@pytest.mark.parametrize("world", [2, 3])
def test_a_gather_puts_the_columns_of_all_ranks_together(world: int, widths: list[int]) -> None:
    layout = Plan(0, world).layout(widths)
    assert layout is not None
    whole, outs = gathered(layout, world)
    assert all(torch.equal(out, whole) for out in outs)
    assert not torch.equal(gathered(layout, world, turned=True)[1][0], whole)


@pytest.mark.parametrize("field", [TP, PP])
def test_a_rank_that_ends_is_the_end_of_the_group(field: str) -> None:
    core = make_core(model=shallow(2), distributed_timeout=2.0, **{field: 2}, **ON_CPU)
    try:
        check_end(core, "rank 1|gloo")
    finally:
        core.close()


def test_a_gather_that_waits_for_a_stopped_rank_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(model=shallow(2), distributed_timeout=1.0, tensor_parallel_size=2, **ON_CPU)
    try:
        run(core, make_requests()[:1])
        (pid,) = group_of(core).pids
        os.kill(pid, signal.SIGSTOP)
        core.add(make_requests()[1])
        with pytest.raises(RankLostError, match="rank 1|gloo"):
            core.step()
        until(lambda: is_gone(pid))
    finally:
        core.close()


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "choose_backend", lambda name, device: ("cuda", device))
    monkeypatch.setattr(ranks, "num_gpus", lambda: 2)
    for device, most in (("cuda", 2), ("cuda:1", 1)):
        with pytest.raises(RequestError, match=rf"tensor_parallel_size.*at most {most}: this host has 2 GPUs"):
            make_core(model=shallow(2), tensor_parallel_size=3, device=device)


def test_whole_experts_are_refused() -> None:
    with pytest.raises(RequestError, match="enable_expert_parallel.*backend cuda"):
        make_core(model=shallow(2), tensor_parallel_size=2, enable_expert_parallel=True, **ON_CPU)


def test_gathers_that_are_not_connected_are_a_fault() -> None:
    alone = DeviceRanks(0, 2, "lo", 1.0, "cpu")
    alone.gather(torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8))
    assert alone.fault() == "the ranks are not connected"


def test_tokens_are_those_of_one_device() -> None:
    """The control of the law's own check: other requests have other bits."""
    alone = bits(requests(), model=shallow(2), dtype="bfloat16", **ON_CPU)
    other = bits(requests(), model=shallow(2), dtype="float32", **ON_CPU)
    with pytest.raises(AssertionError, match="differ"):
        assert_same(other, alone)
