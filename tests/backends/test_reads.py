"""Rows that nobody reads are left out behind the last write to the cache, and no bit of what is read changes: beside a
program that computes all rows to the end, over every family of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import llama_tensors, write_llama
from tests.support.harness import BACKENDS, load, random_ids, save_random, scattered_tables
from tests.support.law import make_core, make_requests, run
from tests.support.steps import make_runner

from headrace import models
from headrace.backends.cpu.cache import KVCache, numbers
from headrace.backends.cpu.program import TapedProgram, TapeOptions
from headrace.backends.cpu.reads import narrow
from headrace.backends.cpu.reads.narrow import BY_ROW, WRITERS, Cut, Reads
from headrace.backends.cpu.tape import Tape
from headrace.backends.graph import ROWS, Graph
from headrace.backends.native import require_native
from headrace.backends.reads import ReadRows
from headrace.backends.step import Chunks, StepSizes
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request

FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({}, "float32"),
    "int4, cache of int8": ({"quantization": "int4"}, "int8"),
    "int8, cache of float16": ({"quantization": "int8"}, "float16"),
}
SIZE = 8
LENGTHS = [71, 40, 33]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    result = {}
    for name in models.names():
        result[name] = tmp_path_factory.mktemp(name)
        save_random(models.find(name).TINY, result[name])
    return result


def pair_of(directory: Path, form: str, layers: tuple[int, ...] = ()) -> list[TapedProgram]:
    """The program of a model, and one that computes all rows to the end."""
    options, kv_dtype = FORMS[form]
    base: Any = load(directory, backend="cpu", block_size=SIZE, **options).program
    result = []
    for reads_all in (False, True):
        shapes = base.model.ops.cache_shapes(base.model)
        cache = KVCache(shapes, [64] * len(base.kinds), SIZE, kv_dtype)
        sizes = StepSizes(96, 8, 128)
        tape_options = TapeOptions(1, reads_all=reads_all)
        result.append(TapedProgram(base.model, base.model.ops, cache, sizes, tape_options, layers))
    return result


def played(program: TapedProgram) -> list[bytes]:
    """All that is read of a few calls, and all blocks of the cache: chunks of which no row is read, of which the last
    is, several are, and all are, alone and side by side."""
    tokens = [random_ids(n, program.vocab_size, i) for i, n in enumerate(LENGTHS)]
    tables = scattered_tables(LENGTHS, SIZE, program.num_blocks, 3)
    has_states, done, seen = program.kinds[-1].is_state, [0] * len(LENGTHS), list[bytes]()

    def call(lengths: dict[int, int], rows: list[int], later: list[int], observed: list[int]) -> None:
        turn, ends, at = len(seen), list[int](), 0
        for num in lengths.values():
            at += num
            ends.append(at - 1)
        chunks = Chunks(
            [done[i] for i in lengths], [tokens[i][done[i] : done[i] + num] for i, num in lengths.items()],
            [tables[i] for i in lengths],
            states_in=[-1 if not done[i] else 3 * i + (turn + 1) % 2 for i in lengths] if has_states else [],
            states_out=[(end, 3 * i + turn % 2) for i, end in zip(lengths, ends, strict=True)] if has_states else [],
            later=later, observed=observed,
        )  # fmt: skip
        finite, logits = program.forward(chunks, rows)
        parts = [logits.fetch().copy(), program.logits(later).fetch().copy(), program.hidden_states(later).copy()]
        parts.append(program.features(observed))
        seen.append(repr((finite, logits.best)).encode() + b"".join(part.tobytes() for part in parts))
        for i, num in lengths.items():
            done[i] += num

    call({0: 40, 1: 9}, [], [], [])
    call({0: 1, 2: 20, 1: 3}, [0], [], [])
    call({2: 5, 0: 7, 1: 11}, [4, 11, 22], [], [5, 6])
    call({0: 13, 1: 10, 2: 1}, [23], [3, 12, 4], [])
    call({0: 5, 1: 7, 2: 7}, [4, 11, 18], [0, 5, 12], list(range(19)))
    blocks = [program.cache.read_block(block, kind) for kind in range(len(program.kinds)) for block in range(64)]
    return [*seen, *blocks]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model_type", models.names())
def test_no_bit_of_what_is_read_changes(model_type: str, form: str, directories: dict[str, Path]) -> None:
    narrowed, whole = pair_of(directories[model_type], form)
    expected = played(whole)
    assert whole.reads.is_whole
    assert played(narrowed) == expected
    narrowed.fill(Chunks([0], [[1, 2, 3]], [[0]], states_in=[-1] if narrowed.kinds[-1].is_state else []), [2])
    assert (narrowed.reads.is_whole, narrowed.reads.num_read) == (False, 1)


@pytest.mark.parametrize("layers", [(0, 2), (1,), (2,)])
@pytest.mark.parametrize("model_type", ["llama", "gemma4_text", "falcon_h1"])
def test_streams_of_the_rows_that_are_observed(
    model_type: str, layers: tuple[int, ...], directories: dict[str, Path]
) -> None:
    narrowed, whole = pair_of(directories[model_type], "int4, cache of int8", layers)
    assert played(narrowed) == played(whole)


def test_streams_from_before_the_cut_cost_no_row_behind_it(directories: dict[str, Path]) -> None:
    program, _ = pair_of(directories["llama"], "float32", (0, 1))
    chunks = Chunks([0], [[1, 2, 3]], [[0]], observed=[0, 1, 2])
    program.fill(chunks, [2])
    assert program.reads.num_read == 1
    program, _ = pair_of(directories["llama"], "float32", (2,))
    program.fill(chunks, [2])
    assert program.reads.num_read == 3


def wrong_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention as if the rows that are read were a chunk's first ones."""
    right = Reads.fill

    def fill(reads: Reads, chunks: Chunks, rows: Any, num_rows: int) -> None:
        right(reads, chunks, rows, num_rows)
        reads.here.start[: len(chunks.starts)] = chunks.starts

    monkeypatch.setattr(Reads, "fill", fill)


def wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows before those that are read."""
    right = ReadRows.rows
    monkeypatch.setattr(ReadRows, "rows", lambda read: np.maximum(right(read) - 1, 0))


def short_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies whose memory others get too early."""
    right = Graph.plan

    def plan(graph: Graph, most: dict[int, int]) -> int:
        for node in graph.nodes:
            if node.op == "select_rows" and node.dim == ROWS:
                out = node.fields["out"]
                out.last = out.first + 1
        return right(graph, most)

    monkeypatch.setattr(Graph, "plan", plan)


@pytest.mark.parametrize("break_it", [wrong_start, wrong_rows, short_lives])
def test_control_wrong_rows_behind_the_cut_are_noticed(
    break_it: Any, directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = played(pair_of(directories["gemma4_text"], "int4, cache of int8")[1])
    break_it(monkeypatch)
    result = played(pair_of(directories["gemma4_text"], "int4, cache of int8")[0])
    assert result != expected
    assert result[5:] == expected[5:], "what is kept of all rows is right"


def test_a_call_that_is_not_read_ends_behind_the_last_write(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, _ = pair_of(directories["mixtral"], "float32")
    seen: list[list[str]] = []
    second: Any = program.reads.second
    for tape in (program.tape, second):

        def run_range(first: int, last: int, *args: Any, tape: Tape = tape, right: Any = tape.run_range) -> None:
            seen.append([node.op for node in tape.nodes[first:last]])
            right(first, last, *args)

        monkeypatch.setattr(tape, "run_range", run_range)
    program.forward(Chunks([0], [[1, 2, 3]], [[0]]), [])
    stored, checked = seen
    assert stored.count("rope_store") == 2
    assert (stored[-1], stored.count("attention")) == ("rope_store", 1)
    assert set(checked) == {"finite"}
    program.forward(Chunks([3], [[4, 5, 6]], [[0]]), [2])
    assert seen[2:4] == [stored, checked]
    assert {"attention", "route", "moe_group", "finite"} <= set(seen[4])
    assert seen[5][-1] == "top_k"
    assert len(seen) == 6


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_was_not_announced_is_refused(backend: str, directories: dict[str, Path]) -> None:
    program = load(directories["llama"], backend=backend).program
    chunks = Chunks([0, 0], [[1, 2, 3, 4], [5, 6, 7]], [[0], [1]], later=[2])
    program.forward(chunks, [6])
    for rows in ([2], [3], [6]):
        program.logits(rows)
        program.hidden_states(rows)
        program.features(rows)
    for call in (program.logits, program.hidden_states, program.features):
        for rows in ([1], [4], [5], [7], [-1], [6, 0]):
            with pytest.raises(ValueError, match="announce|of a call with 7 rows"):
                call(rows)
    program.forward(Chunks([4], [[1, 2, 3]], [[0]]), [])
    for call in (program.logits, program.hidden_states, program.features):
        with pytest.raises(ValueError, match="row 2 was not announced by the call"):
            call([2])


def test_streams_are_of_the_last_call_alone(directories: dict[str, Path]) -> None:
    program, _ = pair_of(directories["llama"], "float32", (0,))
    program.forward(Chunks([0], [[1, 2, 3, 4]], [[0]]), [])
    program.forward(Chunks([4], [[1, 2]], [[0]]), [1])
    assert program.features([0]).shape == (1, program.hidden.width)
    with pytest.raises(ValueError, match="rows 2 to 2 of a call with 2 rows"):
        program.features([2])


def test_an_operator_that_nobody_has_judged_is_refused(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert BY_ROW | WRITERS.keys() | {"attention", "finite", "top_k", "choose"} == require_native().schema().keys()
    monkeypatch.setattr(narrow, "BY_ROW", BY_ROW - {"gated"})
    with pytest.raises(ValueError, match="gated behind the last write"):
        load(directories["llama"], backend="cpu")


# A fault of a row that nobody reads.


def overflowing(tmp_path: Path, kv_dtype: str) -> tuple[Any, int]:
    """A model whose last layer has one value beyond float16's range, of a token among twelve, and that token's row."""
    tensors = llama_tensors()
    runner = make_runner(write_llama(tmp_path / "right", tensors), "cpu", kv_cache_dtype="float32")
    program: Any = runner.program
    program.forward(Chunks([0], [list(range(12))], [[0, 1, 2]]), [])
    (*_, store) = (node.fields for node in program.tape.nodes if node.op == "rope_store")
    greatest = np.abs(numbers(store, "v", np.arange(12))).reshape(12, -1).max(axis=1)
    second, first = np.sort(greatest)[-2:]
    assert first > 1.02 * second
    tensors["model.layers.1.self_attn.v_proj.weight"] *= float(65520 * 1.01 / first)
    right = make_runner(write_llama(tmp_path / "large", tensors), "cpu", kv_cache_dtype=kv_dtype).program
    return right, int(greatest.argmax())


@pytest.mark.parametrize(("kv_dtype", "sound"), [("float32", True), ("bfloat16", True), ("float16", False)])
@pytest.mark.parametrize("reads", ["nothing", "other rows", "the row"])
def test_R_17_an_infinity_in_the_cache_alone(kv_dtype: str, sound: bool, reads: str, tmp_path: Path) -> None:
    """What a row leaves in the cache is judged as the cache holds it: the hidden states of that row would have been
    infinite, and nothing of the request may be published."""
    program, row = overflowing(tmp_path, kv_dtype)
    tokens = list(range(12))
    others = [token for token in tokens if token != row][:5]
    chunks = Chunks([0, 0, 0], [others, tokens, others], [[10, 11], [0, 1, 2], [20, 21]])
    later = {"nothing": [], "other rows": [4, 16], "the row": [5 + row]}[reads]
    if reads == "other rows" and row == 11:
        later = [4]
    finite, _ = program.forward(chunks._replace(later=later), [])
    assert finite == [True, sound, True]


@pytest.mark.parametrize("num_read", [0, 2, 7])
def test_all_of_a_chunk_that_is_read_in_part(num_read: int) -> None:
    lens = [3, 1, 7, 2]
    later = [row for end, num in ((3, 1), (11, num_read), (13, 2)) for row in range(end - num, end)]
    read = ReadRows(Chunks([0] * 4, [[0] * num for num in lens], []), (), with_observed=False)
    assert (read.num_read, read.num_unread) == (0, 13)
    read = ReadRows(Chunks([0] * 4, [[0] * num for num in lens], [], later=later[::-1]))
    assert read.rows().tolist() == later
    assert sorted([*read.rows().tolist(), *read.unread().tolist()]) == list(range(13))
    assert read.places(later) == list(range(len(later)))
    flags, others = np.ones(read.num_read, np.int32), np.ones(read.num_unread, np.bool_)
    assert read.all_of_chunks(flags, others) == [True] * 4
    for row in range(13):
        bad = [flags.copy(), others.copy()]
        at = later.index(row) if row in later else read.unread().tolist().index(row)
        bad[row not in later][at] = 0
        chunk = next(c for c, end in enumerate(read.ends) if row < end)
        assert read.all_of_chunks(*bad) == [c != chunk for c in range(4)]  # type: ignore[arg-type]


# Whole engines.


def answers(**options: Any) -> list[Any]:
    """Everything that an engine says to some requests: tokens, log-probabilities, also of prompts, and embeddings."""
    core = make_core(max_num_batched_tokens=48, **options)
    requests = make_requests()[3:40:6]
    result: list[Any] = [run(core, requests)]
    params = SamplingParams(max_tokens=2, seed=1, temperature=0.0, prompt_logprobs=2, logprobs=1)
    for i, request in enumerate(requests):
        ids = request.prompt_token_ids
        core.add(Request(request_id=f"p{i}", prompt_token_ids=ids, params=params))
        pooling: Any = ("last", "mean")[i % 2]
        one = SamplingParams(seed=1, max_tokens=1)
        core.add(Request(request_id=f"e{i}", prompt_token_ids=ids, params=one, pooling=pooling))
    while core.has_work():
        output = core.step()
        result += [output.token_ids, output.logprobs, output.prompt_logprobs, output.pooled, output.finished]
    core.close()
    return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"speculative_config": {"method": "early_exit", "num_speculative_tokens": 2, "exit_layer": 1}},
    ],
    ids=["plain", "int8", "ngram", "early_exit"],
)
def test_an_engine_says_the_same(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    result = answers(**options)
    monkeypatch.setattr(Cut, "of", lambda *args: None)
    assert answers(**options) == result
