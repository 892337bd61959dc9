"""The drafters that look at tokens only: their drafts are well formed always, and right where text repeats."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.drafters.following import VOCAB, Told, fault, follow

from headrace.drafters import lookahead, ngram, suffix
from headrace.drafters.base import Context, Drafter
from headrace.drafters.lookahead import LookaheadDrafter
from headrace.drafters.ngram import NgramDrafter
from headrace.drafters.suffix import Automaton, SuffixDrafter
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.speculation import SpeculativeConfig
from headrace.protocol.step import Draft

NONE: Any = None
MADE: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NgramDrafter(2, 5),
    "ngram of one": lambda: NgramDrafter(1, 1),
    "suffix": lambda: SuffixDrafter(24, 1.0, 0.1, 0),
    "suffix of all": lambda: SuffixDrafter(24, 2.0, 0.0, 4),
    "lookahead": lambda: LookaheadDrafter(3, 4, 3),
    "lookahead of two": lambda: LookaheadDrafter(1, 2, 1),
}


def context(
    tokens: list[int], num_drafts: int = 4, num_nodes: int = 0, seq_id: int = 1, num_prompt: int = 0
) -> Context:
    nodes = max(num_nodes, num_drafts)
    return Context(seq_id, tokens, num_prompt or len(tokens), SamplingParams(), num_drafts, nodes)


def echo(prompt: list[int], changes: int = 0) -> Callable[[list[int]], int]:
    """A target that repeats its prompt, with every `changes`th token another."""

    def say(tokens: list[int]) -> int:
        place = len(tokens) - len(prompt)
        token = prompt[place % len(prompt)]
        return (token + 1) % VOCAB if changes and place % changes == changes - 1 else token

    return say


def cycle(tokens: list[int]) -> int:
    """A target whose next token depends on the last two: soon it goes in circles."""
    return (3 * tokens[-1] + 5 * (tokens[-2] if len(tokens) > 1 else 0) + 1) % 7


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MADE)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_drafts_are_well_formed_whatever_happens(name: str, data: st.DataObject) -> None:
    """Sequences grow, leap, shrink without notice, are dropped, and come back; their drafts are verified, or not."""
    drafter = MADE[name]()
    texts: dict[int, list[int]] = {}
    width = data.draw(st.sampled_from([1, 2, 5, VOCAB]))
    token = st.integers(0, width - 1)
    for _ in range(data.draw(st.integers(1, 12))):
        requests = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
        contexts = []
        for seq_id in requests:
            if data.draw(st.integers(0, 5)) == 0 or seq_id not in texts:
                texts[seq_id] = data.draw(st.lists(token, min_size=1, max_size=30))
                if data.draw(st.booleans()):
                    drafter.drop(seq_id)
            depth = data.draw(st.integers(1, 9))
            contexts.append(context(texts[seq_id], depth, data.draw(st.integers(depth, 24)), seq_id))
        for asking, draft in zip(contexts, drafter.propose(contexts), strict=True):
            assert fault(draft, asking, width) == ""
            size = len(draft.token_ids)
            if size and data.draw(st.booleans()):
                best = data.draw(st.lists(st.integers(-1, width - 1), min_size=size, max_size=size))
                drafter.verified(asking.seq_id, draft, best, [])
            texts[asking.seq_id] = texts[asking.seq_id] + data.draw(st.lists(token, min_size=1, max_size=6))
    drafter.drop(99)
    drafter.close()
    drafter.close()


@pytest.mark.parametrize(
    ("draft", "wrong"),
    [
        (Draft([1, 2, 3, 4, 5]), "5 nodes"),
        (Draft([1, VOCAB]), "vocabulary"),
        (Draft([1, -1]), "vocabulary"),
        (Draft([1, 1], [-1, -1]), "two children of a node are the same token"),
        (Draft([1, 2], [1, -1]), "make no tree"),
        (Draft([1, 2], [-1]), "parents"),
        (Draft([1, 2, 3, 4, 5], [-1, 0, 1, 2, 3]), "depth 5 of 4"),
    ],
)
def test_the_check_of_drafts_sees_what_is_wrong(draft: Draft, wrong: str) -> None:
    assert wrong in fault(draft, context([1], 4, 8))


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("say", [cycle, echo([*range(30)], 7)], ids=["cycle", "echo"])
def test_what_is_guessed_is_verified_and_nothing_else_comes(name: str, say: Callable[[list[int]], int]) -> None:
    tokens = [*range(30)]
    plain = list(tokens)
    while len(plain) < len(tokens) + 80:
        plain.append(say(plain))
    output = follow(MADE[name](), say, tokens, 80, num_drafts=6, num_nodes=18)
    assert output.tokens == plain[30:]
    assert output.num_drafted > 0


def run(drafter: Drafter, changes: int, num_drafts: int = 8, num_nodes: int | None = None) -> Told:
    random_text = random.Random(1)
    prompt = [random_text.randrange(VOCAB) for _ in range(200)]
    return follow(drafter, echo(prompt, changes), prompt, 200, num_drafts, num_nodes)


def test_an_echo_is_foretold_by_ngrams() -> None:
    assert run(NgramDrafter(2, 5), changes=0).mean_length > 7
    # After each change it takes two right tokens to find the place again.
    assert run(NgramDrafter(2, 5), changes=10).mean_length > 2.3
    assert run(NgramDrafter(5, 5), changes=10).mean_length < run(NgramDrafter(2, 5), changes=10).mean_length


def test_an_echo_is_foretold_by_suffixes() -> None:
    assert run(SuffixDrafter(24, 2.0, 0.1, 0), changes=0).mean_length > 6
    # The length of a guess grows with the match, so that few are in vain.
    output = run(SuffixDrafter(24, 1.0, 0.1, 0), changes=10)
    blind = run(NgramDrafter(1, 5), changes=10)
    assert output.mean_length > 1.8
    assert sum(output.accepted) / output.num_drafted > 1.2 * sum(blind.accepted) / blind.num_drafted


def test_words_are_foretold_by_lookahead() -> None:
    # 12 words of four tokens, in an order that never repeats: what the window found of a word fits when it comes again.
    def spell(tokens: list[int]) -> int:
        return tokens[-1] + 1 if tokens[-1] % 4 < 3 else 4 * random.Random(len(tokens)).randrange(VOCAB // 4)

    output = follow(LookaheadDrafter(4, 4, 3), spell, [*range(8)], 300, num_drafts=8, num_nodes=24)
    assert output.mean_length > 1.6
    # Without a window nothing is found: n-grams of two tokens, one of them the known one.
    narrow = follow(LookaheadDrafter(1, 2, 1), spell, [*range(8)], 300, num_drafts=1, num_nodes=1)
    assert narrow.mean_length < output.mean_length


def test_ngrams_find_the_longest_match_and_of_equal_ones_the_latest() -> None:
    drafter = NgramDrafter(2, 4)
    [draft] = drafter.propose([context([9, 1, 2, 3, 7, 8, 2, 3, 5, 1, 2, 3], 1)])
    assert draft.token_ids == [7]
    [draft] = NgramDrafter(2, 2).propose([context([9, 1, 2, 3, 7, 8, 2, 3, 5, 1, 2, 3], 1)])
    assert draft.token_ids == [5]
    [draft] = drafter.propose([context([1, 2, 3], 4, seq_id=2)])
    assert draft.token_ids == []


def test_the_longer_the_match_the_longer_the_guess() -> None:
    text = [*range(40)]
    for length in (2, 4, 7, 20):
        [draft] = NgramDrafter(2, 3).propose([context([*text, 99, *text[5 : 5 + length]], 16)])
        assert draft.token_ids == [*text, 99][5 + length :][: min(2 * length, 16)]


def test_a_period_goes_on_beyond_what_is_known() -> None:
    for drafter in (NgramDrafter(2, 5), SuffixDrafter(24, 4.0, 0.1, 0)):
        [draft] = drafter.propose([context([1, 2, 3, 1, 2, 3, 1, 2], 7)])
        assert draft.token_ids == [3, 1, 2, 3, 1, 2, 3][: len(draft.token_ids)]
        assert len(draft.token_ids) >= 4


def alive(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Any]:
    """The objects of a module's class that are made from now on and that something holds."""
    kind, objects = getattr(module, name), weakref.WeakSet[Any]()

    def make(*args: Any) -> Any:
        one = kind(*args)
        objects.add(one)
        return one

    monkeypatch.setattr(module, name, make)
    return objects


def test_an_index_is_extended_and_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_SEARCHES", 0)
    indexes = alive(ngram, "NGramIndex", monkeypatch)
    drafter = NgramDrafter(2, 5)
    tokens = [*range(5000)]
    drafter.propose([context(tokens)])
    (index,) = indexes
    seen: list[int] = []

    class Counted(list[int]):
        def append(self, value: int) -> None:
            seen.append(value)
            super().append(value)

    index.before = Counted(index.before)
    tokens += [3, 4]
    drafter.propose([context(tokens)])
    assert (len(seen), len(indexes)) == (2, 1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 256, 257, 2**24]), min_size=1, max_size=40), st.integers(1, 4))
def test_a_search_finds_what_an_index_finds(tokens: list[int], size: int) -> None:
    """Also where the bytes of a token look like those of another at an odd place."""
    index = ngram.NGramIndex(size)
    for stop in sorted({len(tokens) // 2, len(tokens)} - {0}):
        index.extend(tokens[:stop])
        naive = [end for end in range(stop - 1, size - 1, -1) if tokens[end - size : end] == tokens[stop - size : stop]]
        expected = naive if stop > size else []
        assert list(index.ends(tokens[:stop])) == list(ngram.found(tokens[:stop], size)) == expected


def naive_count(text: list[int], part: list[int]) -> int:
    return sum(text[i : i + len(part)] == part for i in range(len(text)))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_the_automaton_counts_as_counting_does(text: list[int]) -> None:
    automaton, last = Automaton(), 0
    for token in text:
        last = automaton.extend(last, token)
    assert len(automaton.next) <= 2 * len(text) + 1
    for start in range(len(text)):
        for stop in range(start + 1, min(len(text), start + 6) + 1):
            state = 0
            for token in text[start:stop]:
                state = automaton.next[state][token]
            assert automaton.count[state] == naive_count(text, text[start:stop])
    # The link of the whole text is its longest suffix that has come before.
    repeated = [size for size in range(1, len(text)) if naive_count(text, text[-size:]) > 1]
    assert automaton.length[automaton.link[last]] == max(repeated, default=0)


def test_a_suffix_guess_follows_what_came_most_often() -> None:
    text = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 8, 1, 2]
    [draft] = SuffixDrafter(24, 1.0, 0.1, 0).propose([context(text, 4)])
    assert draft.token_ids[0] == 3
    [draft] = SuffixDrafter(24, 1.0, 0.1, 0).propose([context(text, 4, 8)])
    roots = {token for token, parent in zip(draft.token_ids, draft.parents or [], strict=True) if parent < 0}
    assert roots == {3, 4}


def answer(drafter: SuffixDrafter, seq_id: int) -> None:
    tokens = [1, 2]
    drafter.propose([context(tokens, seq_id=seq_id, num_prompt=2)])
    drafter.propose([context([*tokens, 21, 22, 23, 24, 25], seq_id=seq_id, num_prompt=2)])
    drafter.drop(seq_id)


@pytest.mark.parametrize(("num_cached", "expected"), [(0, []), (10, [23, 24])])
def test_answers_of_others_help_only_if_that_was_asked_for(num_cached: int, expected: list[int]) -> None:
    drafter = SuffixDrafter(24, 1.0, 0.1, num_cached)
    answer(drafter, 1)
    [draft] = drafter.propose([context([7, 8, 21, 22], 4, seq_id=2)])
    assert draft.token_ids == expected
    # Prompts are nobody else's.
    [draft] = drafter.propose([context([7, 8, 1, 2], 4, seq_id=3)])
    assert draft.token_ids == []


def test_what_a_suffix_drafter_holds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("MAX_SEQ_TOKENS", 100), ("MAX_TOKENS", 300), ("MAX_SHARED_TOKENS", 200)):
        monkeypatch.setattr(suffix, name, most)
    automata, histories = alive(suffix, "Automaton", monkeypatch), alive(suffix, "History", monkeypatch)
    drafter = SuffixDrafter(24, 1.0, 0.1, 6)
    random_text = random.Random(2)
    tokens: dict[int, list[int]] = {}
    for step in range(400):
        seq_id = step % 7
        tokens.setdefault(seq_id, [1])
        tokens[seq_id] += [random_text.randrange(9) for _ in range(9)]
        [draft] = drafter.propose([context(tokens[seq_id], 4, seq_id=seq_id, num_prompt=1)])
        assert fault(draft, context(tokens[seq_id])) == ""
        num_tokens = [history.automaton.num_tokens for history in histories]
        assert max(num_tokens) <= 110
        assert sum(num_tokens) <= 400
        num_shared = sum(automaton.num_tokens for automaton in automata) - sum(num_tokens)
        assert num_shared <= 200
        if step % 50 == 49:
            drafter.drop(seq_id)
            del tokens[seq_id]
    assert num_shared > 0


def test_a_long_prompt_is_learnt_over_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_NEW_TOKENS", 50)
    drafter = SuffixDrafter(24, 1.0, 0.1, 0)
    tokens = [*range(40)] * 4
    sizes = [len(drafter.propose([context(tokens)])[0].token_ids) for _ in range(5)]
    assert sizes == [0, 0, 0, 4, 4]


def test_lookahead_keeps_a_bounded_number_of_ngrams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "MAX_NGRAMS", 20)
    windows = alive(lookahead, "Window", monkeypatch)
    drafter = LookaheadDrafter(4, 3, 3)
    tokens = [1]
    random_text = random.Random(3)
    for _ in range(300):
        [draft] = drafter.propose([context(tokens, 6, 20)])
        drafter.verified(1, draft, [random_text.randrange(40) for _ in draft.token_ids], [])
        tokens = [*tokens, random_text.randrange(40)]
        (window,) = windows
        assert window.num_ngrams == sum(map(len, window.ngrams.values())) <= 20
    drafter.drop(1)
    del window
    assert not windows


@pytest.mark.parametrize("module", [ngram, suffix, lookahead])
def test_each_file_makes_its_drafter_of_a_config(module: Any) -> None:
    method = module.__name__.rpartition(".")[2]
    drafter = module.make(SpeculativeConfig(method=method), NONE)
    assert drafter.feature_layers is None
    [draft] = drafter.propose([context([1, 2, 1, 2])])
    assert fault(draft, context([1, 2, 1, 2], 4, 99)) == ""


def test_lookahead_needs_trees() -> None:
    with pytest.raises(RequestError, match="mode"):
        lookahead.make(SpeculativeConfig(method="lookahead", mode="rejection"), NONE)
