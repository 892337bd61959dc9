"""Layers over ranks, at the level of operators: the stages of every type of model, in one process."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.campaigns.ranks import FORMS
from tests.support import wrong_stages
from tests.support.harness import RandomModels, save_random
from tests.support.shallow import shallow
from tests.support.stages import programs_of, results, staged

from headrace import models
from headrace.backends.base import SampleText
from headrace.backends.cpu.losses import activations
from headrace.backends.step import Chunks
from headrace.checkpoint.names import text_config
from headrace.parallel.pipeline import Piece, PipelinedProgram, cut, in_turn, num_pieces, num_rows_of
from headrace.parallel.program import Fault, HiddenRows, RankLostError
from headrace.parallel.stages import divide, joined_layers
from headrace.plan.forms import Forms
from headrace.plan.layers import count_layers
from headrace.protocol.errors import RequestError

SHARED = "gemma4_text"
"""Its last layers read the caches of the first ones; in the tests' size they leave no place to begin a stage."""
WITH_THREE = tuple(
    "afmoe deepseek_v3 gemma3 gpt_oss granitemoehybrid lfm2 llama4_text nemotron_h qwen3_5_text smollm3".split()
)


def vocab_size_of(name: str) -> int:
    return int(text_config(models.find(name).TINY, models.names())["vocab_size"])


def check(path: Path, world: int, vocab_size: int, **form: Any) -> None:
    expected = results(programs_of(path, None, **form), vocab_size)
    program, stages = staged(path, world, **form)
    assert results(program, vocab_size) == expected
    assert stages.num_sent > 5  # the calls went in pieces
    assert all(all(finite) for finite, *_ in expected[:3])


@pytest.mark.parametrize("name", [name for name in models.names() if name != SHARED])
def test_every_model_type(name: str, random_models: RandomModels) -> None:
    check(random_models[name], 2, vocab_size_of(name))


@pytest.mark.parametrize("name", WITH_THREE)
def test_three_stages(name: str, random_models: RandomModels) -> None:
    check(random_models[name], 3, vocab_size_of(name))


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "qwen3_5_moe_text"])
@pytest.mark.parametrize("form", ["int8, cache of int8", "int4", "cache of int4"])
def test_forms_of_experts_latents_and_states(name: str, form: str, random_models: RandomModels) -> None:
    fields = FORMS[form]
    kv_dtype = {"kv_dtype": fields["kv_cache_dtype"]} if "kv_cache_dtype" in fields else {}
    check(random_models[name], 2, vocab_size_of(name), **kv_dtype, quantization=fields.get("quantization"))


def test_layers_that_share_caches_stay_on_one_rank(random_models: RandomModels, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"pipeline_parallel_size: 2 .* at most 1, .* from 0 to 3 share caches"):
        staged(random_models[SHARED], 2)
    layers = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
    config = models.find(SHARED).TINY | layers
    save_random(config, tmp_path)
    check(tmp_path, 3, vocab_size_of(SHARED))
    program, _ = staged(tmp_path, 2)
    assert program.model.layer_ids.start == 2


@pytest.mark.parametrize("mode", ["rounded", "reverse"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
def test_control_what_breaks_the_law_is_noticed(
    mode: str, name: str, random_models: RandomModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(random_models[name], 2, vocab_size_of(name))
    wrong_stages.patch(mode, monkeypatch.setattr)
    with pytest.raises(AssertionError):
        check(random_models[name], 2, vocab_size_of(name))


def test_a_stage_holds_its_layers_alone() -> None:
    path = Path(shallow(4))
    alone = programs_of(path, None)
    program, stages = staged(path, 3)
    parts = [program._program, *stages.programs]
    assert sum(part.model.ops.weight_bytes for part in parts) == alone.model.ops.weight_bytes
    caches = [sum(layer.keys.nbytes for layer in part.cache.layers) for part in (alone, *parts)]
    assert sum(caches[1:]) == caches[0]
    assert all(0 < size < caches[0] for size in caches[1:])
    assert [part.kinds for part in parts] == [alone.kinds] * 3


def test_memory_is_that_of_the_fullest_host() -> None:
    path = Path(shallow(4))
    program, _ = staged(path, 2)
    stage, backend_bytes = program.model, []
    from headrace.backends.cpu import make

    backend = make("cpu", "bfloat16")
    for hosts in ([0, 0], [1, 0]):
        parted = type(stage)(stage.whole, 1, [range(1), range(1, 4)], [{0}, {1}, {2}, {3}], hosts, stage.neighbours)
        backend_bytes.append(backend.block_bytes(parted, 0, 16, "bfloat16"))
    assert backend_bytes[0] * 3 == backend_bytes[1] * 4


# Shares.


def test_shares_are_even_by_cost_and_the_head_counts_for_the_last() -> None:
    assert divide([1.0] * 8, 0.0, 2) == [range(4), range(4, 8)]
    assert divide([1.0] * 8, 4.0, 2) == [range(6), range(6, 8)]
    assert divide([1.0] * 8, 100.0, 3)[-1] == range(7, 8)
    assert divide([9.0, 1.0, 1.0, 1.0], 1.0, 2) == [range(1), range(1, 4)]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_no_other_shares_are_better(world: int) -> None:
    costs, head, joined = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0], 5.0, [(2, 3)]

    def most(starts: tuple[int, ...]) -> float:
        parts = [sum(costs[a:b]) for a, b in itertools.pairwise([0, *starts, len(costs)])]
        return max([*parts[:-1], parts[-1] + head])

    shares = divide(costs, head, world, joined)
    assert [i for share in shares for i in share] == list(range(8))
    every = itertools.combinations([at for at in range(1, 8) if at != 3], world - 1)
    assert most(tuple(share.start for share in shares[1:])) == min(map(most, every))


def test_more_ranks_than_layers_are_refused() -> None:
    with pytest.raises(RequestError, match="pipeline_parallel_size: 3 .* at most 2, the 2 layers of the model"):
        divide([1.0, 1.0], 0.0, 3)


def test_layers_that_look_at_one_cache_are_joined() -> None:
    assert joined_layers([{0}, {1}, {2}, {1, 3}, {0, 4}]) == [(0, 4), (1, 3)]


@pytest.mark.parametrize("name", ["llama", "falcon_h1", "nemotron_h", "gemma4"])
def test_layers_are_counted_as_the_plan_counts_the_model(name: str) -> None:
    from headrace.plan.counting import count

    values, forms = text_config(models.find(name).TINY, models.names()), Forms("bfloat16")
    reads, head = count_layers(values, forms)
    counts = count(values, forms)
    assert head == counts.head
    chosen = sum(each.num_bytes * each.top_k / each.num * num for each, num in counts.mixtures)
    # But for norms, which are small.
    assert 0.95 < sum(each.num_bytes for each in reads) / (counts.dense + chosen) <= 1
    places = {place for each in reads for place in each.caches}
    assert len(places) == max(places) + 1


# Pieces.


def whole_of(pieces: list[Piece], num_chunks: int) -> tuple[list[list[int]], list[Any]]:
    """Tokens of each chunk, and copies by row of the call."""
    tokens: list[list[int]] = [[] for _ in range(num_chunks)]
    copies, row = [], 0
    for piece in pieces:
        for c, ids in enumerate(piece.chunks.token_ids, piece.first):
            tokens[c] += ids
        copies += [(row + at, slot) for at, slot in piece.chunks.copies]
        row += num_rows_of(piece.chunks)
    return tokens, copies


@pytest.mark.parametrize("lengths", [[1], [200], [7, 1, 90, 1, 1, 60], [1] * 64, [3] * 40])
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("has_states", [False, True])
def test_pieces_have_every_row_once_and_in_order(lengths: list[int], world: int, has_states: bool) -> None:
    ids = iter(range(10**6))
    starts = [5 * i for i in range(len(lengths))]
    ends = [end - 1 for end in itertools.accumulate(lengths)]
    total = sum(lengths)
    chunks = Chunks(
        starts,
        [[next(ids) for _ in range(num)] for num in lengths],
        [[i] for i in range(len(lengths))],
        [(row, row + 7) for row in range(0, total, 5)],
        [[[-i] for i in range(len(lengths))]],
        list(range(100, 100 + len(lengths))) if has_states else [],
        [(end, 200 + i) for i, end in enumerate(ends)] if has_states else [],
    )
    pieces = cut(chunks, world)
    assert len(pieces) == num_pieces(total, world) or has_states
    assert whole_of(pieces, len(lengths)) == (chunks.token_ids, list(chunks.copies))
    sizes = [num_rows_of(piece.chunks) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1
    # A chunk goes on where it stopped, with the state that was kept.
    at, states = list(starts), {i: 100 + i for i in range(len(lengths))}
    for piece in pieces:
        parts, row = piece.chunks, 0
        writes = dict(parts.states_out)
        for k, part in enumerate(parts.token_ids):
            c = piece.first + k
            assert parts.starts[k] == at[c]
            assert (parts.tables[k], parts.more_tables[0][k]) == ([c], [-c])
            at[c] += len(part)
            row += len(part)
            if has_states:
                assert parts.states_in[k] == states[c]
                states[c] = writes[row - 1]
    if has_states:
        assert states == {i: 200 + i for i in range(len(lengths))}


def test_a_chunk_whose_state_goes_nowhere_is_not_cut() -> None:
    chunks = Chunks([0, 0], [list(range(30)), list(range(60))], [[0], [1]], (), (), [1, 2], [(3, 5), (89, 6)])
    pieces = cut(chunks, 2)
    assert [num_rows_of(piece.chunks) for piece in pieces] == [30, 30, 30]
    inside = Chunks([0, 0], [list(range(40)), list(range(50))], [[0], [1]], (), (), [1, 2], [(3, 5), (89, 6)])
    assert [num_rows_of(piece.chunks) for piece in cut(inside, 2)] == [40, 20, 30]


def test_few_rows_go_at_once() -> None:
    assert [num_pieces(num, 2) for num in (1, 8, 32, 512)] == [1, 1, 2, 8]


class Stage:
    """A program whose hidden rows are finite or not, piece by piece, as `are_finite` says."""

    vocab_size = block_size = num_blocks = max_rows = max_logits = 1
    kinds = pool_sizes = ()
    model = SimpleNamespace(hidden_size=2, feature_size=2)

    def __init__(self, are_finite: list[bool]) -> None:
        self.are_finite = are_finite

    def begin(self) -> int:
        return 1

    def send(self, call: Any) -> None:
        pass

    def hidden_rows(self, chunks: Chunks, features: Any) -> tuple[list[bool], Any]:
        return [self.are_finite.pop(0)] * len(chunks.starts), features[list(chunks.later)]

    def logits_of(self, hidden: Any, rows: list[int]) -> Any:
        return hidden


@pytest.mark.parametrize("bad", [None, 0, 1, 2])
def test_a_chunk_is_finite_if_all_of_its_pieces_are(bad: int | None) -> None:
    chunks = Chunks([0], [[1] * 64], [[0]])
    num = len(cut(chunks, 2))
    assert num == 3
    stage: Any = Stage([piece != bad for piece in range(num)])
    sizes = [num_rows_of(piece.chunks) for piece in cut(chunks, 2)]

    def take(call_id: int, piece: int) -> HiddenRows:
        return HiddenRows(call_id, piece, 2, np.full((sizes[piece], 2), piece, "<f4").tobytes())

    program = PipelinedProgram(stage, stage, take, 2)
    finite, hidden = program.forward(chunks._replace(later=[30]), [63])
    assert finite == [bad is None]
    assert hidden[:, 0].tolist() == [piece for piece, size in enumerate(sizes) for _ in range(size)][30:]


# Messages.


def test_what_is_left_of_an_earlier_call_is_dropped() -> None:
    rows = [HiddenRows(3, 1, 2, b""), Fault(3, "MemoryError", ""), HiddenRows(4, 0, 2, b"")]
    assert in_turn(iter(rows).__next__, 4, 0) == rows[2]
    assert in_turn(iter([Fault(4, "MemoryError", "")]).__next__, 4, 1).call_id == 4


@pytest.mark.parametrize("message", [HiddenRows(5, 0, 2, b""), HiddenRows(4, 1, 2, b""), Fault(5, "", "")])
def test_control_rows_of_another_piece_end_the_group(message: HiddenRows | Fault) -> None:
    with pytest.raises(RankLostError, match="out of step"):
        in_turn(lambda: message, 4, 0)


def test_the_form_of_activations_is_chosen_for_the_model_as_a_whole(
    random_models: RandomModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tolerance in the middle of the losses, so that some matrices get 16 bits; experts that no row of the text
    reaches get what the worst of all layers get."""
    monkeypatch.setattr(activations, "LENGTH", 1)
    form: dict[str, Any] = {"quantization": "int4"}
    whole = programs_of(random_models["mixtral"], None, **form)
    losses = activations.measure(whole.model.ops, whole.model, 1).losses
    monkeypatch.setattr(activations, "TOLERANCE", sorted(losses.values())[len(losses) // 2])
    whole = programs_of(random_models["mixtral"], None, **form)
    program, stages = staged(random_models["mixtral"], 2, **form)
    parts = [program._program.model.ops, *(part.model.ops for part in stages.programs)]
    wide = sorted(matrix.name for ops in parts for matrix in ops.wide)
    assert wide == sorted(matrix.name for matrix in whole.model.ops.wide)
    assert all(0 < len(ops.wide) < len(ops.matrices) for ops in parts)


def test_stages_choose_by_a_text_as_one_process_does(random_models: RandomModels) -> None:
    """Whose logits the last stage alone has."""
    text = SampleText(str, lambda: [(7 * i * i + i) % 199 for i in range(40)])
    for name in ("mixtral", "llama"):
        form: dict[str, Any] = {"quantization": "int4", "text": text}
        whole = programs_of(random_models[name], None, **form)
        program, stages = staged(random_models[name], 2, **form)
        parts = [program._program.model.ops, *(part.model.ops for part in stages.programs)]
        wide = sorted(matrix.name for ops in parts for matrix in ops.wide)
        assert wide == sorted(matrix.name for matrix in whole.model.ops.wide)
        assert wide
