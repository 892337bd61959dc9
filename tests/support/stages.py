"""The stages of a pipeline in one process, without sockets: `staged` makes their program beside the usual one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from headrace.backends.base import SampleText, SetUp
from headrace.backends.step import Chunks
from headrace.engine.library.load import choose_activations, load_model
from headrace.parallel.pipeline import PipelinedProgram, give_rows
from headrace.parallel.program import CopyBlocks, Forward, Passed
from headrace.parallel.stages import StageSeat
from headrace.protocol.config import EngineConfig


class Together:
    """`Neighbours` of all stages, each on a thread."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.handed = [queue.SimpleQueue[Any]() for _ in range(world + 1)]
        self.values: list[list[float]] = [[]] * world
        self.barrier = threading.Barrier(world, timeout=60)

    def of(self, place: int) -> Any:
        together = self

        class One:
            def take(self, num_rows: int, width: int) -> Any:
                if not place:
                    return None
                rows = together.handed[place].get(timeout=60)
                assert rows.shape == (num_rows, width)
                return rows

            def give(self, rows: Any) -> None:
                together.handed[place + 1].put(rows.copy())

            def exchange(self, values: Sequence[float]) -> list[list[float]]:
                together.values[place] = list(values)
                together.barrier.wait()
                every = list(together.values)
                together.barrier.wait()
                return every

        return One()


class Stages:
    """The other ranks, which make each call as soon as it is sent."""

    def __init__(self, programs: list[Any], world: int) -> None:
        self.programs, self.world = programs, world
        self.call_id, self.num_sent = 0, 0
        self.passed: list[Passed] = []

    def begin(self) -> int:
        self.call_id += 1
        return self.call_id

    def send(self, call: Any) -> None:
        if isinstance(call, CopyBlocks):
            for program in self.programs:
                program.copy_blocks(call.pairs, call.kind)
        if not isinstance(call, Forward):
            return
        passed: list[Passed] = []
        for i, program in enumerate(self.programs):
            before = iter(passed)
            passed = []
            give_rows(
                program, self.world, call, (lambda call_id, piece, it=before: next(it)) if i else None, passed.append
            )
        self.passed = passed
        self.num_sent += len(passed)

    def take(self, call_id: int, piece: int) -> Passed:
        return self.passed.pop(0)

    def check(self) -> None: ...

    def close(self) -> None:
        for program in self.programs:
            program.close()


SIZES: dict[str, Any] = {
    "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_blocks_per_seq": 8, "num_threads": 1,
}  # fmt: skip
NUM_BLOCKS = 32


def programs_of(
    path: Path, seat: StageSeat | None, kv_dtype: str = "float32", text: SampleText | None = None, **fields: Any
) -> Any:
    """A program of the whole model, or of one stage."""
    config = EngineConfig(model=str(path), backend="cpu", max_model_len=128, num_threads=1, **fields)
    backend, model, model_config = load_model(config, path, lambda done, total: None, seat)
    choose_activations(config, backend, model, model_config, text)
    return backend.program(model, SetUp((NUM_BLOCKS,) * len(model.kinds), kv_dtype=kv_dtype, **SIZES))


def staged(path: Path, world: int, **fields: Any) -> tuple[PipelinedProgram, Stages]:
    """Return the program of a model over `world` stages, and the stages before the last."""
    together = Together(world)
    seats = [StageSeat(rank, world, together.of((rank - 1) % world)) for rank in range(world)]
    with ThreadPoolExecutor(world) as pool:
        last, *others = pool.map(lambda seat: programs_of(path, seat, **fields), seats)
    stages = Stages(others, world)
    return PipelinedProgram(last, stages, stages.take, world), stages


def results(program: Any, vocab_size: int) -> list[Any]:
    """All that comes out of some calls: prompts, further rows of one beside single rows, blocks that are copied, logits
    of other rows, hidden states. Sequences keep blocks out of order, and states where the model has them."""
    has_states = program.kinds[-1].is_state
    tables = [[9, 2, 20, 5, 14], [3, 17, 8, 11, 1], [30, 4, 6, 19, 28]]
    noise, result, done = np.random.default_rng(7), list[Any](), [0, 0, 0]

    def call(lengths: Sequence[int], copies: Sequence[tuple[int, int]] = (), later: Sequence[int] = ()) -> None:
        turn = len(result)
        ids = [noise.integers(0, vocab_size, num).tolist() for num in lengths]
        reads = [-1 if not at else 3 * s + (turn + 1) % 2 for s, at in enumerate(done)] if has_states else []
        ends = np.cumsum(lengths) - 1
        writes = [(int(end), 3 * s + turn % 2) for s, end in enumerate(ends)] if has_states else []
        chunks = Chunks(list(done), ids, tables, copies, (), reads, writes, later=later)
        finite, logits = program.forward(chunks, ends.tolist())
        result.append((finite, logits.fetch().tobytes(), list(logits.best)))
        for s, num in enumerate(lengths):
            done[s] += num

    call([37, 16, 5])
    call([1, 19, 1])
    for kind in range(len(program.kinds)):
        program.copy_blocks([(20, 21), (2, 22)] if not program.kinds[kind].is_state else [(1, 12)], kind)
    tables[0] = [9, 22, 21, 5, 14]
    call([1, 1, 33], [(1, 23 * 16 + 4)], [0, 3, 2, 34, 7])
    result.append(program.logits([0, 3]).fetch().tobytes())
    result.append(program.hidden_states([2, 34, 7]).tobytes())
    return result
