"""What a program keeps for drafters: residual streams before chosen layers, or hidden states after the final norm,
beside those of transformers; to ask for them changes no bit of anything else."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.harness import BACKENDS, load, random_ids, save_random, scattered_tables

from headrace import models
from headrace.backends.base import SetUp
from headrace.backends.graph import Graph
from headrace.backends.step import Chunks, StepSizes

LENGTHS = [71, 5]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    result = {}
    for name in models.names():
        directory = tmp_path_factory.mktemp(name)
        result[name] = directory, save_random(models.find(name).TINY, directory)
    return result


def program_of(directory: Path, backend: str, layers: tuple[int, ...] = ()) -> Any:
    """A program of the same model that keeps the streams before `layers`."""
    runner = load(directory, backend=backend)
    program: Any = runner.program
    ops = program.model.ops
    if backend == "cpu":
        from headrace.backends.cpu.program import TapedProgram, TapeOptions

        return TapedProgram(program.model, ops, program.cache, StepSizes(96, 8, 64), TapeOptions(1), layers)
    from headrace.backends.torch_ref.program import EagerProgram

    return EagerProgram(
        program.model, ops, SetUp(program.pool_sizes, program.block_size, "float32", 1, 1, 1, 1), layers
    )


def computed(program: Any, cuts: tuple[int, ...] = ()) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Features and logits of two sequences, the first one cut at `cuts`."""
    tokens = [random_ids(n, program.vocab_size, i) for i, n in enumerate(LENGTHS)]
    tables = scattered_tables(LENGTHS, program.block_size, program.num_blocks, 3)
    features, logits = [], []
    bounds = [0, *cuts, LENGTHS[0]]
    for begin, end in itertools.pairwise(bounds):
        before = 0 if begin else -1
        chunks = Chunks(
            [begin], [tokens[0][begin:end]], [tables[0]], states_in=[before], states_out=[(end - begin - 1, 0)]
        )
        if end == LENGTHS[0]:
            chunks = Chunks([begin, 0], [tokens[0][begin:end], tokens[1]], tables, states_in=[before, -1])
        rows = list(range(sum(map(len, chunks.token_ids))))
        _, result = program.forward(chunks._replace(observed=rows), rows[-1:])
        logits.append(result.fetch().copy())
        features.append(program.features(rows))
    return np.concatenate(features), np.concatenate(logits)[-1:]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model_type", models.names())
def test_features_are_those_of_transformers_and_do_not_depend_on_the_cut(
    model_type: str, backend: str, checkpoint: dict[str, tuple[Path, Any]]
) -> None:
    directory, reference = checkpoint[model_type]
    plain = program_of(directory, backend)
    num_layers = len(plain.model.layers)
    layers = (0, num_layers, 1)
    final, logits = computed(plain)
    streams, same = computed(program_of(directory, backend, layers))
    assert (logits == same).all()
    width = plain.model.hidden_size
    assert final.shape == (sum(LENGTHS), width)
    assert streams.shape == (sum(LENGTHS), 3 * width)
    for cuts in ((1,), (16, 40)):
        again, last = computed(program_of(directory, backend, layers), cuts)
        assert (again == streams).all()
        assert (last == logits).all()
    first = 0
    for i, n in enumerate(LENGTHS):
        ids = torch.tensor([random_ids(n, plain.vocab_size, i)])
        with torch.inference_mode():
            hidden_states = reference(ids, output_hidden_states=True).hidden_states
        expected = {0: hidden_states[0][0], width: None, 2 * width: hidden_states[1][0]}
        for at, hidden in expected.items():
            if hidden is not None:
                assert np.abs(streams[first : first + n, at : at + width] - hidden.numpy()).max() < 2e-3
        assert np.abs(final[first : first + n] - hidden_states[-1][0].numpy()).max() < 2e-3
        first += n


def test_the_stream_after_the_last_layer_is_what_the_final_norm_takes(checkpoint: dict[str, tuple[Path, Any]]) -> None:
    directory, _ = checkpoint["llama"]
    program = program_of(directory, "cpu", (2,))
    streams, _ = computed(program)
    norm = program.model.norm
    x = streams.astype(np.float64)
    normed = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + norm.eps) * norm.weight
    final, _ = computed(program_of(directory, "cpu"))
    assert np.abs(normed - final).max() < 1e-4


def test_control_streams_whose_buffers_are_given_away_early_are_wrong(
    checkpoint: dict[str, tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = checkpoint["llama"]
    right, _ = computed(program_of(directory, "cpu", (0, 1)))
    plan = Graph.plan

    def short(graph: Graph, most: dict[int, int]) -> int:
        for buffer in graph.buffers:
            if buffer.last == len(graph.nodes) and buffer.first < 12:
                buffer.last = buffer.first + 2
        return plan(graph, most)

    monkeypatch.setattr(Graph, "plan", short)
    wrong, _ = computed(program_of(directory, "cpu", (0, 1)))
    assert (wrong != right).any()


def test_features_of_another_width_than_the_model_takes_are_refused(checkpoint: dict[str, tuple[Path, Any]]) -> None:
    program = program_of(checkpoint["llama"][0], "cpu")
    with pytest.raises(ValueError, match="broadcast"):
        program.forward(Chunks([0], [[1, 2]], [[0]]), [1], np.zeros((2, 3), np.float32))
