"""The determinism law through programs of models with states, whose slots the tests choose: chunks, company, threads,
and a start from a published state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.harness import WITH_STATES, chunk_sizes, follow, load, random_ids, save_random, scattered_tables
from tests.support.law import run

from headrace import models
from headrace.backends.step import Chunks
from headrace.engine.build import build_engine
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request
from headrace.runner.runner import Runner

LENGTH = 90
FORMS: dict[str, dict[str, Any]] = {
    "torch_ref": {"backend": "torch_ref"},
    "cpu": {"backend": "cpu"},
    "cpu, int4": {"backend": "cpu", "quantization": "int4"},
    "cpu, int8, cache of int8": {"backend": "cpu", "quantization": "int8", "kv_cache_dtype": "int8"},
    "cuda": {"backend": "cuda", "device": "cpu", "max_num_batched_tokens": 256},
}
SHOWN = [name for name in WITH_STATES if "text_config" not in models.find(name).TINY]


@pytest.fixture(scope="module", params=SHOWN)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_random(models.find(request.param).TINY, directory)
    return directory


@pytest.fixture(scope="module", params=FORMS)
def runner(request: pytest.FixtureRequest, directory: Path) -> Runner:
    return load(directory, block_size=8, **FORMS[request.param])


def computed(runner: Runner, chunks: Chunks) -> torch.Tensor:
    program = runner.program
    num_rows = sum(map(len, chunks.token_ids))
    finite, _ = program.forward(chunks.all_read(), [])
    assert all(finite)
    most = min(program.max_logits, num_rows)
    pieces = [list(range(i, min(i + most, num_rows))) for i in range(0, num_rows, most)]
    return torch.cat([torch.from_numpy(program.logits(rows).fetch().copy()) for rows in pieces])


@pytest.mark.sampled(3)
def test_I_13_bits_of_states_do_not_depend_on_chunks_company_or_threads(runner: Runner) -> None:
    program: Any = runner.program
    vocab_size, size = program.vocab_size, runner.block_size
    token_ids, other = random_ids(LENGTH, vocab_size, 7), random_ids(LENGTH, vocab_size, 8)
    program.num_threads = 1
    whole = follow(runner, token_ids, [LENGTH])
    for chunk, num_threads in ((1, 1), (7, 2), (64, 2)):
        program.num_threads = num_threads
        assert torch.equal(follow(runner, token_ids, chunk_sizes(LENGTH, [chunk]), seed=chunk), whole)
    # In company: the other sequence begins while this one goes on, and then both go on row by row.
    tables = scattered_tables([LENGTH, LENGTH], size, program.num_blocks, 5)
    steps = [(0, 33, 0, 20), (33, 34, 20, 61), *((34 + i, 35 + i, 61 + i, 62 + i) for i in range(4))]
    state = [-1, -1]
    for turn, (begin, end, first, last) in enumerate(steps):
        slots = [10 + turn % 2, 20 + turn % 2]
        chunks = Chunks(
            [first, begin], [other[first:last], token_ids[begin:end]], tables[::-1], states_in=state[::-1],
            states_out=[(last - first - 1, slots[1]), (last - first + end - begin - 1, slots[0])],
        )  # fmt: skip
        assert torch.equal(computed(runner, chunks)[last - first :], whole[begin:end])
        state = slots


def test_a_sequence_goes_on_from_a_published_state(runner: Runner) -> None:
    """After 40 tokens a snapshot; another sequence with these tokens starts there and gives the bits of a cold one."""
    program = runner.program
    shared = random_ids(40, program.vocab_size, 1)
    one, two = (shared + random_ids(20, program.vocab_size, seed) for seed in (2, 3))
    cold = follow(runner, two, [60])
    tables = scattered_tables([60, 60], runner.block_size, program.num_blocks, 9)
    computed(runner, Chunks([0], [one], tables[:1], states_in=[-1], states_out=[(39, 5), (59, 6)]))
    table = tables[0][: 40 // runner.block_size] + tables[1][40 // runner.block_size :]
    warm = Chunks([40], [two[40:]], [table], states_in=[5], states_out=[(19, 7)])
    assert torch.equal(computed(runner, warm), cold[40:])
    assert torch.equal(computed(runner, warm), cold[40:])  # the snapshot is as it was


def test_I_13_control_a_state_of_another_sequence_is_noticed(runner: Runner) -> None:
    program = runner.program
    token_ids = random_ids(50, program.vocab_size, 1)
    whole = follow(runner, token_ids, [50])
    (table,) = scattered_tables([50], runner.block_size, program.num_blocks, 9)
    computed(runner, Chunks([0], [token_ids[:40]], [table], states_in=[-1], states_out=[(38, 5)]))  # one row short
    assert not torch.equal(computed(runner, Chunks([40], [token_ids[40:]], [table], states_in=[5])), whole[40:])


def test_a_slot_is_copied_read_and_written(runner: Runner) -> None:
    program: Any = runner.program
    cache = getattr(program, "cache", program)
    (kind,) = [k for k, each in enumerate(program.kinds) if each.is_state]
    follow(runner, random_ids(20, program.vocab_size, 1), [20])
    stored = cache.read_block(0, kind)
    assert any(stored)
    program.copy_blocks([(0, 9)], kind)
    assert cache.read_block(9, kind) == stored
    cache.write_block(9, bytes(len(stored)), kind)
    assert not any(cache.read_block(9, kind))
    assert cache.read_block(0, kind) == stored


def test_a_step_without_slots_is_refused(runner: Runner) -> None:
    with pytest.raises(ValueError, match=r"states|zip"):
        runner.program.forward(Chunks([0], [[1, 2]], [[0]]), [])


def test_cuda_gives_the_logits_of_torch_ref(directory: Path) -> None:
    token_ids = random_ids(LENGTH, 199, 7)
    mine, reference = (
        follow(load(directory, block_size=8, dtype="float32", **FORMS[name]), token_ids, [60, 30])
        for name in ("cuda", "torch_ref")
    )
    assert (mine - reference).abs().max() < 1e-4
    assert torch.equal(mine.argmax(1), reference.argmax(1))


def test_an_engine_gives_the_tokens_of_the_program(directory: Path) -> None:
    """Greedy tokens of an engine, whose prompts come in pieces, are the likeliest of the program in one piece."""
    prompt = random_ids(37, 199, 4)
    config = EngineConfig(
        model=str(directory), backend="cpu", block_size=8, num_gpu_blocks_override=64, max_num_seqs=2,
        max_num_batched_tokens=16, max_model_len=100,
    )  # fmt: skip
    core = build_engine(config)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0, seed=1)
    ((ids, _),) = run(core, [Request(request_id="r", prompt_token_ids=prompt, params=params)]).values()
    core.close()
    logits = follow(load(directory, block_size=8, backend="cpu"), prompt + ids[:-1], [len(prompt) + len(ids) - 1])
    assert logits[len(prompt) - 1 :].argmax(1).tolist() == ids
