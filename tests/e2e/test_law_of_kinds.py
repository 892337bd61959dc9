"""The determinism law through the engine for every type, in full for those whose layers look back differently far
(windows, states) or keep latents.

Requests run alone on a cold cache; then together, in chunks, from a warm prefix and after preemptions, while blocks
behind windows are freed, written over at once, and used again. The bits must be equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.harness import random_ids, save_random
from tests.support.law import Bits, assert_same, run

from headrace import models
from headrace.engine import build
from headrace.engine.core import EngineCore
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request

TYPES = ("gemma3_text", "qwen3_5_text", "falcon_h1", "lfm2_moe", "deepseek_v3", "qwen3_5_text, states alone")
ON_CUDA = ("lfm2", "qwen3_5_moe_text")
NUM_BLOCKS = 96


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {name: tmp_path_factory.mktemp(name) for name in TYPES}
    for name, directory in directories.items():
        tiny = models.find(name.removesuffix(", states alone")).TINY
        changes = {"layer_types": ["linear_attention"] * len(tiny["layer_types"])} if name not in models.names() else {}
        save_random(tiny | changes, directory)
    return directories


@pytest.fixture(scope="module", params=TYPES)
def directory(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Path:
    return directories[request.param]


def make_core(directory: Path, **options: Any) -> EngineCore:
    fields = {
        "model": str(directory), "block_size": 8, "num_gpu_blocks_override": NUM_BLOCKS, "max_num_seqs": 8,
        "max_model_len": 300, "num_threads": 1, "backend": "cpu",
    } | options  # fmt: skip
    return build.build_engine(EngineConfig(**fields))


def make_requests() -> list[Request]:
    """Some share a beginning, of one or two blocks or in the middle of one."""
    stem = random_ids(90, 60, 1)
    prompts = [stem[:at] + random_ids(number, 60, number) for number, at in enumerate((90, 88, 61, 40, 16, 3, 90), 1)]
    return [
        Request(
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            params=SamplingParams(
                seed=number, max_tokens=24, temperature=0.8 * (number % 2), logprobs=2, ignore_eos=True
            ),
        )
        for number, prompt in enumerate(prompts)
    ]


def run_alone(directory: Path, **options: Any) -> dict[str, Bits]:
    core, result = make_core(directory, enable_prefix_caching=False, max_num_batched_tokens=256, **options), {}
    for request in make_requests():
        result |= run(core, [request])
    core.close()
    assert len({bits for _, bits in result.values()}) == len(result)
    return result


@pytest.fixture(scope="module")
def reference(directory: Path) -> dict[str, Bits]:
    return run_alone(directory)


def test_I_13_in_company_and_from_a_warm_prefix(directory: Path, reference: dict[str, Bits]) -> None:
    core = make_core(directory)
    assert_same(run(core, make_requests()), reference)
    before = core.stats().prefix_cache_hits
    assert_same(run(core, make_requests()), reference)
    assert core.stats().prefix_cache_hits > before + 200
    core.close()


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_I_13_in_chunks(chunk: int, directory: Path, reference: dict[str, Bits]) -> None:
    core = make_core(directory, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 3))
    assert_same(run(core, make_requests()[:: 3 if chunk == 1 else 1]), reference)
    core.close()


def test_I_13_after_preemption(directory: Path, reference: dict[str, Bits]) -> None:
    for caching in (True, False):
        core = make_core(directory, enable_prefix_caching=caching)
        assert_same(run(core, make_requests(), preempt_every=3), reference)
        assert core.stats().num_preemptions > 3
        core.close()


def test_I_13_in_pools_too_small_for_all(directory: Path, reference: dict[str, Bits]) -> None:
    core = make_core(directory, num_gpu_blocks_override=40)
    assert_same(run(core, make_requests()), reference)
    core.close()


def test_I_13_with_two_threads(directory: Path, reference: dict[str, Bits]) -> None:
    core = make_core(directory, num_threads=2)
    assert_same(run(core, make_requests()), reference)
    core.close()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("model_type", models.names())
def test_I_13_of_every_type_from_a_warm_prefix_and_after_preemption(model_type: str, tmp_path: Path) -> None:
    save_random(models.find(model_type).TINY, tmp_path)
    expected = run_alone(tmp_path)
    core = make_core(tmp_path)
    assert_same(run(core, make_requests()), expected)
    before = core.stats().prefix_cache_hits
    assert_same(run(core, make_requests(), preempt_every=3), expected)
    assert core.stats().prefix_cache_hits > before + 200
    assert core.stats().num_preemptions > 3
    core.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ON_CUDA)
def test_I_13_of_states_on_cuda(model_type: str, tmp_path: Path) -> None:
    """By the twins of the kernels, in chunks of at most 32 rows."""
    save_random(models.find(model_type).TINY, tmp_path)
    options = {"backend": "cuda", "device": "cpu"}
    expected = run_alone(tmp_path, **options)
    core = make_core(tmp_path, max_num_batched_tokens=32, **options)
    assert_same(run(core, make_requests()), expected)
    before = core.stats().prefix_cache_hits
    assert_same(run(core, make_requests(), preempt_every=5), expected)
    assert core.stats().prefix_cache_hits > before + 200
    assert core.stats().num_preemptions > 3
    core.close()


def spoil(core: EngineCore, num_too_many: int) -> list[int]:
    """After each step, write over all free blocks of windows, and over so many more that the window of a running
    sequence still covers. Returns the number of blocks behind windows so far, in a list of one."""
    memory, scheduler = core.executor.program.cache, core.scheduler  # type: ignore[attr-defined]
    commit, junk = scheduler.commit, {}

    def and_spoil(*args: Any) -> Any:
        output = commit(*args)
        for kind in scheduler.tables.windows:
            blocks = list(kind.pool.free)
            for seq in scheduler.running[:1]:
                first = kind.behind(seq.num_computed)
                num_freed[0] += first
                blocks += seq.tables[kind.index][first : first + num_too_many]
            junk.setdefault(kind.index, b"\x41" * len(memory.read_block(0, kind.index)))
            for block in blocks:
                memory.write_block(block, junk[kind.index], kind.index)
        return output

    num_freed = [0]
    scheduler.commit = and_spoil  # type: ignore[method-assign]
    return num_freed


def test_what_windows_let_go_of_is_not_read_and_control_what_they_hold_is(
    directories: dict[str, Path],
) -> None:
    reference = run_alone(directories["gemma3_text"])
    for num_too_many in (0, 1):
        core = make_core(directories["gemma3_text"], enable_prefix_caching=False)
        num_freed = spoil(core, num_too_many)
        result = run(core, make_requests())
        assert num_freed[0] > 100
        assert (result == reference) == (not num_too_many)
        core.close()
