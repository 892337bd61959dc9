"""Drafters with a model over the built-in target: drafts depend on the sequence alone, not on earlier
drafts, on other sequences in the step, or on how the tokens arrived. Faults are planted, and seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.drafters.play import (
    GREEDY,
    Greedy,
    Play,
    context_of,
    drafts_of,
    resized_drafter,
    run,
    show,
    spec_of,
    step,
    stories,
    target_of,
)

from headrace.drafters import context, draft_model, eagle, early_exit, features, medusa, mtp
from headrace.drafters.base import Context, Drafter
from headrace.drafters.context import Line, LineRows, PrivateContext
from headrace.protocol.errors import CheckpointError, RequestError

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "draft_model": (draft_model, {}),
    "early_exit": (early_exit, {"exit_layer": 2}),
    "eagle": (eagle, {}),
    "mtp": (mtp, {}),
    "medusa": (medusa, {"num_tree_nodes": 4}),
}
NODES = {"chains": 4, "trees": 11}
SHAPES = pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
ALL = pytest.mark.parametrize("kind", KINDS)
WITH_CACHE = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "medusa"])


def drafter_of(kind: str, nodes: int = 4, guide: Any = None, backend: str = "cpu", **fields: Any) -> Any:
    module, changes = KINDS[kind]
    more = {"num_tree_nodes": nodes} if nodes > 4 else {}
    max_num_seqs = fields.pop("max_num_seqs", 8)
    spec = spec_of(method=kind, **(changes | more | fields))
    return module.make(spec, target_of(backend=backend, guide=guide, max_num_seqs=max_num_seqs))


def plays_for(drafter: Drafter, backend: str = "cpu", **options: Any) -> list[Play]:
    result = stories(drafter.feature_layers, None, backend, **options)
    return [Play(number, story) for number, story in enumerate(result)]


@pytest.mark.sampled(5)
@SHAPES
@ALL
def test_guesses_depend_on_the_sequence_alone(kind: str, nodes: int) -> None:
    together = drafter_of(kind, nodes)
    plays = plays_for(together)
    run(together, plays, num_nodes=nodes)
    assert sum(len(draft.token_ids) for play in plays for draft in play.drafts) > 100
    for number in range(len(plays)):
        alone = drafter_of(kind, nodes)
        lone = [plays_for(alone)[number]]
        run(alone, lone, num_nodes=nodes, chunk=7)
        assert drafts_of(lone) == drafts_of([plays[number]])
        alone.close()
    if kind != "medusa":
        together.private.check()
    for play in plays:
        together.drop(play.seq_id)
    if kind != "medusa":
        assert together.private.pool.num_held == 0
        assert not together.private.lines
    together.close()
    together.close()


def first_guesses(kind: str, nodes: int, play: Play, at: int) -> Any:
    """What a drafter guesses that sees the sequence for the first time when `at` tokens are known."""
    fresh = drafter_of(kind, nodes)
    fresh_play = Play(5, play.story, known=at)
    show(fresh, fresh_play)
    (draft,) = fresh.propose([context_of(fresh_play, 4, nodes)])
    fresh.close()
    return draft.token_ids, draft.parents


@pytest.mark.sampled(3)
@SHAPES
@WITH_CACHE
def test_rejected_guesses_leave_nothing(kind: str, nodes: int) -> None:
    drafter = drafter_of(kind, nodes)
    (play, *_) = plays_for(drafter)
    for _ in range(12):
        at = play.known
        (draft,) = step(drafter, [play], num_nodes=nodes)
        assert (draft.token_ids, draft.parents) == first_guesses(kind, nodes, play, at)
    drafter.close()


@WITH_CACHE
def test_control_a_slot_of_a_rejected_guess_that_is_attended_is_seen(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = drafter_of(kind)
    expected = plays_for(right)
    run(right, expected)
    assert any(
        count < len(draft.token_ids) for count, draft in zip(expected[0].accepted, expected[0].drafts, strict=True)
    )
    wrong = drafter_of(kind)

    def one_too_many(self: PrivateContext, line: Line, length: int) -> None:
        del line.tokens[length + 1 :]

    monkeypatch.setattr(PrivateContext, "rewind", one_too_many)
    got = plays_for(wrong)
    try:
        run(wrong, got)
    except ValueError:
        return  # nothing was left to compute of a sequence whose guess was rejected
    assert drafts_of(got) != drafts_of(expected)


@ALL
def test_a_leap_a_drop_and_an_unknown_sequence(kind: str) -> None:
    drafter = drafter_of(kind)
    plays = plays_for(drafter)[:2]
    for _ in range(3):
        step(drafter, plays)
    # Tokens came that nobody was asked about, and that were not shown.
    plays[0].known += 30
    plays[0].observed = plays[0].known - 3
    at = plays[0].known
    (draft,) = step(drafter, plays[:1])
    if kind in ("draft_model", "early_exit"):
        assert (draft.token_ids, draft.parents) == first_guesses(kind, 4, plays[0], at)
    assert draft.token_ids
    # What the target has not computed yet can not be gone on from.
    ahead = context_of(plays[0], 4, 4)
    ahead.tokens += [5, 6]
    (draft,) = drafter.propose([ahead])
    assert bool(draft.token_ids) == (drafter.feature_layers is None)
    drafter.drop(plays[1].seq_id)
    drafter.drop(999)
    again = Play(plays[1].seq_id, plays[1].story)
    assert step(drafter, [again])[0].token_ids
    assert drafter.propose([]) == []
    assert drafter.propose([context_of(again, 0, 0)])[0].token_ids == []


@ALL
def test_a_sequence_that_is_shown_again_from_its_beginning(kind: str) -> None:
    """As after a preemption: the target computes once more what the drafter has seen."""
    drafter = drafter_of(kind)
    (play, *_) = plays_for(drafter)
    for _ in range(4):
        step(drafter, [play])
    play.observed = 0
    run(drafter, [play], chunk=5)
    other = drafter_of(kind)
    undisturbed = plays_for(other)[:1]
    run(other, undisturbed)
    assert drafts_of([play]) == drafts_of(undisturbed)


@SHAPES
@WITH_CACHE
def test_sequences_share_a_cache_that_is_too_small(kind: str, nodes: int) -> None:
    """The one longest unused gives its blocks; nothing is raised, and what is guessed is sound."""
    drafter = drafter_of(kind, nodes)
    blocks = drafter.private.pool.allocate(drafter.private.pool.num_available - 3)
    assert blocks is not None
    plays = plays_for(drafter)
    for turn in range(24):
        turn_plays = [plays[turn % 4]] if turn % 3 else plays
        step(drafter, [play for play in turn_plays if not play.done], num_nodes=nodes)
        drafter.private.check([Line(table=blocks)])
    assert any(draft.token_ids for play in plays for draft in play.drafts[4:])
    assert any(not draft.token_ids for play in plays for draft in play.drafts)
    for play in plays:
        drafter.drop(play.seq_id)
    assert drafter.private.pool.num_held == len(blocks)


@WITH_CACHE
def test_a_window_bounds_what_is_kept(kind: str) -> None:
    drafter = drafter_of(kind, max_model_len=32)
    plays = plays_for(drafter)
    while not all(play.done for play in plays):
        at = [play.known for play in plays]
        step(drafter, [play for play in plays if not play.done])
        if kind in ("draft_model", "early_exit") and len(plays[0].drafts) == 9:
            fresh = drafter_of(kind, max_model_len=32)
            fresh_play = Play(5, plays[0].story, known=at[0])
            assert fresh.propose([context_of(fresh_play, 4, 4)])[0].token_ids == plays[0].drafts[-1].token_ids
        assert all(len(line.table) <= 3 for line in drafter.private.lines.values())
    assert all(draft.token_ids for play in plays for draft in play.drafts)
    drafter.private.check()


@ALL
def test_rejection_sampling_gets_the_chances_of_what_was_drawn(kind: str) -> None:
    guide = Greedy(rejects=True)
    drafter = drafter_of(kind, guide=guide)
    # Also where the step would have room for a tree, as near the end of an answer.
    for play, draft in zip(plays := plays_for(drafter), step(drafter, plays, num_drafts=2, num_nodes=8), strict=True):
        assert play.known > 0
        assert not draft.parents
        probs = guide.take_probs(play.seq_id)
        assert probs is not None
        assert probs.shape == (len(draft.token_ids), 2048)
        assert np.allclose(probs.sum(axis=1), 1, atol=1e-4)
        assert (probs[range(len(draft.token_ids)), draft.token_ids] > 0).all()
        assert guide.take_probs(play.seq_id) is None


@pytest.mark.parametrize("kind", ["eagle", "mtp", "medusa"])
def test_features_that_are_not_finite_are_not_gone_on_from(kind: str) -> None:
    drafter = drafter_of(kind)
    plays = plays_for(drafter)[:2]
    step(drafter, plays)
    bad = plays[0]
    bad_features = bad.story.features[bad.observed : bad.known - 1].copy()
    bad_features[-1] = np.nan
    drafter.observe(bad.seq_id, bad.observed, bad.story.tokens[bad.observed : bad.known - 1], bad_features)
    bad.observed = bad.known - 1
    drafts = step(drafter, plays)
    assert drafts[0].token_ids == []
    assert drafts[1].token_ids


class Ranking(Greedy):
    """Keeps every row that a tree was grown by."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[list[int], list[int], Any]] = []

    def rank(self, logits: Any, contexts: Any, tails: Any, width: int) -> Any:
        for row, each_context, tail in zip(logits, contexts, tails, strict=True):
            self.rows.append((list(each_context.tokens), list(tail), row.copy()))
        return super().rank(logits, contexts, tails, width)


def test_each_branch_of_a_tree_attends_to_its_own_path() -> None:
    guide = Ranking()
    drafter = drafter_of("early_exit", 16, guide)
    plays = plays_for(drafter)
    for _ in range(3):
        step(drafter, plays, num_nodes=16)
    rows = guide.rows
    assert len({len(tail) for _, tail, _ in rows}) == 4
    plain = drafter_of("early_exit").private
    for tokens, tail, row in rows[::5]:
        line = Line()
        assert plain.reserve(line, len(tokens) + len(tail))
        result = plain.extend([LineRows(line, tokens + tail)])
        assert (result.logits[0] == row).all()
        plain.empty(line)


def test_control_branches_that_share_their_last_block_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(self: PrivateContext, line: Line) -> Line:
        blocks = line.table[: -(-len(line.tokens) // 16)]
        self.pool.take(blocks)
        return Line(line.start, list(line.tokens), list(blocks))

    right = drafter_of("early_exit", 16)
    expected = plays_for(right)[:2]
    run(right, expected, num_nodes=16)
    monkeypatch.setattr(PrivateContext, "fork", shared)
    wrong = drafter_of("early_exit", 16)
    got = plays_for(wrong)[:2]
    run(wrong, got, num_nodes=16)
    assert drafts_of(got) != drafts_of(expected)


def test_a_tree_keeps_more_than_a_chain() -> None:
    lengths = {}
    for name, nodes in NODES.items():
        drafter = drafter_of("early_exit", nodes)
        lengths[name] = run(drafter, plays_for(drafter), num_nodes=nodes)
    assert lengths["trees"] > lengths["chains"] > 1.1


def test_depths_and_numbers_of_nodes_may_differ_in_a_step() -> None:
    drafter = drafter_of("early_exit", 11)
    plays = plays_for(drafter)
    contexts = [context_of(plays[i], most, nodes) for i, (most, nodes) in enumerate([(1, 1), (4, 11), (2, 3), (0, 0)])]
    together = drafter.propose(contexts)
    assert [len(draft.token_ids) for draft in together] == [1, 11, 3, 0]
    for each, draft in zip(contexts, together, strict=True):
        alone = drafter_of("early_exit", 11)
        (lone_draft,) = alone.propose([each])
        # A chain is a tree of one branch.
        parents = lone_draft.parents or list(range(-1, len(lone_draft.token_ids) - 1))
        assert (lone_draft.token_ids, parents) == (draft.token_ids, draft.parents or parents)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["early_exit", "eagle", "medusa"])
def test_on_the_reference_backend(kind: str) -> None:
    drafter = drafter_of(kind, 11, backend="torch_ref")
    plays = plays_for(drafter, "torch_ref", num_tokens=12)[:2]
    other = drafter_of(kind, 11, backend="torch_ref")
    run(drafter, plays, num_nodes=11)
    again = plays_for(other, "torch_ref", num_tokens=12)[:1]
    run(other, again, num_nodes=11, chunk=3)
    assert drafts_of(again) == drafts_of(plays[:1])


def test_a_long_prompt_is_computed_as_it_comes() -> None:
    """What waits does not grow with the prompt."""
    drafter = drafter_of("mtp")
    width = 256
    random = np.random.default_rng(0)
    tokens = random.integers(0, 2048, 480).tolist()
    features = random.normal(size=(479, width)).astype(np.float32)
    for start in range(0, 479, 64):
        drafter.observe(1, start, tokens[start:479][:64], features[start : start + 64])
        assert len(drafter._waiting[1].ids) <= 256 + 64
    (draft,) = drafter.propose([Context(1, tokens, 480, GREEDY, 4, 4)])
    whole = drafter_of("mtp")
    whole.observe(1, 0, tokens[:479], features)
    assert whole.propose([Context(1, tokens, 480, GREEDY, 4, 4)])[0].token_ids == draft.token_ids


@pytest.mark.sampled(3)
@SHAPES
@ALL
def test_calls_that_do_not_fit_are_cut(kind: str, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drafter_of(kind, nodes)
    expected = plays_for(whole, num_tokens=24)
    run(whole, expected, num_nodes=nodes)
    for module in (context, features):
        monkeypatch.setattr(module, "MAX_ROWS", 8)
        monkeypatch.setattr(module, "MAX_LINES", 3)
    monkeypatch.setattr(features, "MAX_WAITING", 5)
    cut = drafter_of(kind, nodes)
    got = plays_for(cut, num_tokens=24)
    run(cut, got, num_nodes=nodes)
    assert drafts_of(got) == drafts_of(expected)


@pytest.mark.parametrize(
    ("num_layers", "output", "layer"),
    [(2, None, 1), (4, None, 3), (12, None, 3), (32, None, 8), (80, None, 20), (14, 4, 4), (14, None, 3)],
)
def test_where_a_model_is_left_early(num_layers: int, output: int | None, layer: int, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert early_exit.exit_of(file, num_layers) == early_exit.exit_of(tmp_path, num_layers)
    (tmp_path / "generation_config.json").write_text(json.dumps({"assistant_early_exit": output}))
    assert early_exit.exit_of(tmp_path, num_layers) == layer


@pytest.mark.parametrize("output", ['"4"', "0", "4", "true", "2.0"])
def test_a_layer_that_is_none_is_refused(output: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"assistant_early_exit": {output}}}')
    with pytest.raises(CheckpointError, match="assistant_early_exit is .* from 1 to 3, the model has 4 layers"):
        early_exit.exit_of(tmp_path, 4)


REFUSED: list[tuple[Callable[[Path], Any], type[Exception], str]] = [
    (lambda path: drafter_of("early_exit", exit_layer=14), RequestError, "exit_layer"),
]


@pytest.mark.parametrize(("make", "kind", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_what_does_not_fit_is_told(
    make: Callable[[Path], Any], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 199}')
    with pytest.raises(kind, match=words):
        make(tmp_path)


def of_tokens(seq_id: int, tokens: list[int]) -> Context:
    return Context(seq_id, tokens, 1, GREEDY, 4, 4)


def test_tokens_that_the_draft_model_lacks(tmp_path: Path) -> None:
    drafter = drafter_of("draft_model", model=str(resized_drafter(tmp_path, 1024)))
    [known] = drafter.propose([of_tokens(1, [5, 6, 7])])
    assert known.token_ids
    assert max(known.token_ids) < 1024
    [unknown, still] = drafter.propose([of_tokens(2, [5, 1024, 7]), of_tokens(1, [5, 6, 7])])
    assert unknown.token_ids == []
    assert still == known
    [after] = drafter.propose([of_tokens(2, [5, 6, 7])])
    assert after == known, "the sequence is drafted for where its tokens are known"


class Beyond(Greedy):
    """Chooses a token that the draft model lacks, as a request may that allows no other."""

    def choose(self, logits: Any, contexts: Any, tails: Any) -> list[int]:
        return [2000] * len(logits)


def test_a_guess_that_the_draft_model_can_not_read_ends_a_chain(tmp_path: Path) -> None:
    path = str(resized_drafter(tmp_path, 1024))
    [draft] = drafter_of("draft_model", guide=Beyond(), model=path).propose([of_tokens(1, [5, 6, 7])])
    assert draft.token_ids == [2000]
    [draft] = drafter_of("draft_model", guide=Beyond()).propose([of_tokens(1, [5, 6, 7])])
    assert draft.token_ids == [2000] * 4


def test_the_other_tokenizer_is_compared_before_the_model_is_loaded(tmp_path: Path) -> None:
    def compare(directory: Path) -> bool:
        raise CheckpointError(f"{directory} has another tokenizer")

    spec = spec_of(method="draft_model", model=str(tmp_path))
    with pytest.raises(CheckpointError, match="has another tokenizer"):
        draft_model.make(spec, target_of(compare_tokenizers=compare))
