"""A whole model on the cuda backend, run on a CPU: by the kernels' twins, and in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.formats.quantised.formats import fp8
from tests.support.harness import load, random_ids, save_random, scattered_tables
from tests.support.interpreter import run_interpreted

from headrace import LLM, SamplingParams, models
from headrace.backends.cuda import program as program_module
from headrace.backends.cuda import tuned
from headrace.backends.cuda.drawing import Drawing
from headrace.backends.cuda.kernels.linear_8bit import EightBits
from headrace.backends.cuda.kernels.linear_codes import WIDEN
from headrace.backends.cuda.launch import Launch
from headrace.backends.cuda.program import CudaProgram, bucket_sizes, planned_bytes
from headrace.backends.cuda.staging import Staging
from headrace.backends.step import Chunks, Draw
from headrace.protocol.errors import RequestError
from headrace.sampling.sampler import F32

ON_CPU: dict[str, Any] = {"backend": "cuda", "device": "cpu"}
PROMPTS = ["Once upon a time", "def f(x):", "The quick brown fox", "I am"]
WAYS = [
    SamplingParams(temperature=0.0, max_tokens=10),
    SamplingParams(temperature=0.8, seed=5, max_tokens=10),
    SamplingParams(temperature=1.1, top_p=0.9, seed=6, max_tokens=10),
    SamplingParams(temperature=0.9, top_k=20, min_p=0.05, presence_penalty=0.5, seed=7, max_tokens=10),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_random(models.find("qwen3").TINY, path)
    return path


@pytest.fixture
def program(directory: Path) -> CudaProgram:
    program = load(directory, dtype="float32", block_size=8, max_num_batched_tokens=64, **ON_CPU).program
    assert isinstance(program, CudaProgram)
    return program


def chunks_of(lengths: list[int], program: CudaProgram, seed: int = 1) -> Chunks:
    tokens = [random_ids(length, program.vocab_size, seed + i) for i, length in enumerate(lengths)]
    tables = scattered_tables(lengths, program.block_size, program.num_blocks, seed)
    return Chunks([0] * len(lengths), tokens, tables)


def last_logits(program: CudaProgram, chunks: Chunks) -> F32:
    rows = np.cumsum([len(ids) for ids in chunks.token_ids]) - 1
    finite, logits = program.forward(chunks, rows.tolist())
    assert all(finite)
    assert all(logits.finite)
    return logits.fetch().copy()


def test_tokens_are_those_of_torch_ref() -> None:
    mine, reference = (
        LLM("builtin", max_model_len=256, dtype="float32", **how) for how in (ON_CPU, {"backend": "torch_ref"})
    )
    tokens = [[output.outputs[0].token_ids for output in llm.generate(PROMPTS, WAYS)] for llm in (mine, reference)]
    assert tokens[0] == tokens[1]


def test_tokens_that_a_cut_decides_are_drawn_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    send = Drawing.send

    def counted(self: Drawing, indices: list[int], draws: list[Draw]) -> None:
        rows.extend(indices)
        send(self, indices, draws)

    monkeypatch.setattr(Drawing, "send", counted)
    LLM("builtin", max_model_len=256, async_scheduling=False, **ON_CPU).generate(PROMPTS, WAYS)
    # Two of the four requests: a greedy one needs no draw, and penalties need the host.
    assert len(rows) == 20


def test_the_interpreted_program_agrees_with_its_twins(program: CudaProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = chunks_of([3, 1], program)
    by_twins = last_logits(program, chunks)
    monkeypatch.setattr(Launch, "run_twin", run_interpreted)
    interpreted = last_logits(program, chunks)
    assert np.abs(interpreted - by_twins).max() < 1e-4 * np.abs(by_twins).max()


def test_bits_do_not_depend_on_the_bucket_nor_on_what_lies_in_memory(program: CudaProgram) -> None:
    chunks = chunks_of([9, 5], program)
    reference = last_logits(program, chunks)
    assert program.whole.bucket(14) == 16
    program.whole.sizes = [64]
    for byte in (0, 0xFF):  # numbers of 0xFF bytes are NaN
        program.tape.arena.fill_(byte)
        assert np.array_equal(last_logits(program, chunks), reference)


def test_buckets_end_with_the_most_rows_and_are_few() -> None:
    assert bucket_sizes(64)[:6] == [1, 2, 4, 8, 16, 24]
    assert bucket_sizes(50)[-1] == 50
    assert len(bucket_sizes(8192)) < 100


def test_drafts_in_a_tree_reach_their_copies(program: CudaProgram) -> None:
    """A row's keys and values are also written to a second slot, where another sequence finds them."""
    (tokens,) = [random_ids(9, program.vocab_size, 3)]
    table, other = [3, 5], [3, 9]
    copies = [(8, 9 * 8)]
    program.forward(Chunks([0], [tokens], [table], copies), [8])
    again = random_ids(1, program.vocab_size, 4)
    mine, theirs = (last_logits(program, Chunks([9], [again], [blocks])) for blocks in (table, other))
    assert np.array_equal(mine, theirs)


def test_control_copies_that_are_not_sent_are_noticed(program: CudaProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    send = Staging.send
    monkeypatch.setattr(Staging, "send", lambda self, whole: send(self, False))
    with pytest.raises(AssertionError):
        test_drafts_in_a_tree_reach_their_copies(program)


def test_control_a_grid_from_a_number_of_the_step_is_noticed(program: CudaProgram) -> None:
    """Launches bound for the rows of the first step, as if the host's number were theirs, lose rows of the next."""
    long, short = chunks_of([9, 5], program), chunks_of([2], program)
    reference = last_logits(program, long)
    last_logits(program, short)
    program.whole._launches[16] = program.whole.launches(program.whole.bucket(2))
    program.tape.arena.fill_(0)
    with pytest.raises((AssertionError, RuntimeError)):
        assert np.array_equal(last_logits(program, long), reference)


def test_what_is_not_finite_is_reported_for_its_chunk_alone(program: CudaProgram) -> None:
    chunks = chunks_of([4, 4], program)
    program.model.embedding[chunks.token_ids[1][2]] = torch.inf
    finite, logits = program.forward(chunks, [3, 7])
    assert finite == [True, False]
    assert logits.finite == [True, False]


def test_blocks_are_copied_one_pair_after_the_other(program: CudaProgram) -> None:
    layer = program.cache.layers[0]
    layer.keys.copy_(torch.arange(len(layer.keys))[:, None, None, None].expand_as(layer.keys))
    program.copy_blocks([(1, 2), (2, 3)])
    assert layer.keys[2, 0, 0, 0] == layer.keys[3, 0, 0, 0] == 1


@pytest.mark.parametrize("options", [{"block_size": 12}, {"kv_cache_dtype": "int4"}])
def test_options_without_kernels_are_refused(directory: Path, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        load(directory, **(ON_CPU | options))


@pytest.mark.parametrize("block", [None, (64, 128)])
def test_eight_bit_floats_are_multiplied_as_they_are(tmp_path: Path, block: tuple[int, int] | None) -> None:
    """A checkpoint of fp8 weights: rows are rounded to fp8 too, so logits are near those of the widened weights."""
    directory = fp8(tmp_path, block).directory
    options: dict[str, Any] = {"dtype": "bfloat16", "max_num_batched_tokens": 64}
    mine = load(directory, **(ON_CPU | options)).program
    assert isinstance(mine, CudaProgram)
    matrices = [node.fields["matrix"].data for node in mine.tape.nodes if node.op == "linear"]
    assert sum(isinstance(data, EightBits) for data in matrices) > len(matrices) / 2
    reference = load(directory, backend="torch_ref", **options).program
    chunks = chunks_of([20, 9], mine)
    exact = reference.forward(chunks, [19, 28])[1].fetch()
    logits = last_logits(mine, chunks)
    assert np.abs(logits - exact).max() < 0.1 * np.abs(exact).max()
    alone = Chunks([0], chunks.token_ids[:1], chunks.tables[:1])
    assert np.array_equal(last_logits(mine, alone)[0], logits[0])


FORMS = {"plain": {}, "codes": {"quantization": "int4"}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model_type", ["qwen3", "mixtral", "hunyuan_v1_moe", "gemma4_text"])
def test_memory_is_planned_without_allocating_it(tmp_path: Path, model_type: str, form: str) -> None:
    save_random(models.find(model_type).TINY, tmp_path)
    options = {"dtype": "bfloat16", "max_model_len": 256, "max_num_batched_tokens": 200, **FORMS[form]}
    assert_planned(load(tmp_path, **(ON_CPU | options)).program, 256)


def test_memory_of_eight_bit_floats_is_planned(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 64, "max_num_batched_tokens": 48}
    assert_planned(load(fp8(tmp_path, None).directory, **(ON_CPU | options)).program, 64)


def assert_planned(program: Any, max_len: int) -> None:
    """What is planned is what is there after all buckets are bound, and what their launches hold."""
    planned = planned_bytes(program.model, program.model.ops, program.max_rows, program.max_logits, max_len)
    scratch = set()
    for size in bucket_sizes(program.max_rows):
        for launch in program.whole.launches(size):
            names = ("partial", "arrived") if "SPAN" in launch.arguments else ()
            responses = [launch.arguments.get(name) for name in names]
            responses += [each for each in [launch.arguments.get("out")] if launch.kernel is WIDEN]
            scratch |= {each.untyped_storage().data_ptr() for each in responses if isinstance(each, torch.Tensor)}
    assert planned == program.num_bytes > program.tape.arena.nbytes > 0
    assert len(scratch) <= 3, "scratch has grown, and launches hold what it was before"


@pytest.mark.parametrize("gpu", [80, 86, 90, 100, 120])
def test_memory_is_planned_for_the_gpu_that_is_there(
    directory: Path, monkeypatch: pytest.MonkeyPatch, gpu: int
) -> None:
    """Its configs are chosen in the plan as in the program. The plan's own device is none."""
    devices: list[torch.device] = []

    def capability(device: torch.device) -> int:
        devices.append(device)
        return gpu

    def largest(device: torch.device, kernel: str, shape: str, rows: int, configs: Any, default: Any) -> Any:
        devices.append(device)
        return max((each for each in configs if each.fits(gpu)), key=lambda each: each.tiles.get("BN", 0))

    monkeypatch.setattr(program_module, "capability", capability)
    monkeypatch.setattr(tuned, "choose", largest)
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 64, "max_num_batched_tokens": 48}
    assert_planned(load(directory, **(ON_CPU | options)).program, 64)
    assert {device.type for device in devices} == {"cpu"}


@pytest.mark.parametrize(
    ("gpu", "rows", "stages"),
    [(80, 64, 2), (86, 64, 2), (89, 64, 2), (90, 128, 3), (100, 64, 3), (103, 64, 3), (120, 64, 2), (121, 64, 2)],
)
def test_every_gpu_has_configs_of_attention(monkeypatch: pytest.MonkeyPatch, gpu: int, rows: int, stages: int) -> None:
    monkeypatch.setattr(program_module, "capability", lambda device: gpu)
    shape = (32, 8, 128, torch.bfloat16, torch.bfloat16)
    few, many = program_module.attention_configs(torch.device("cpu"), shape)
    assert (few.tiles["BM"], many.tiles["BM"], many.num_stages) == (16, rows, stages)
