"""Matchers follow running sequences: masks and forced tokens are functions of the tokens so far, of nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.grammar.rig import EOS, allowed, campaign, load, make_matchers

from headrace.grammar import compile as compiling
from headrace.grammar import matchers as module
from headrace.grammar.matchers import GrammarError, Matchers, jumps
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.params import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"first name": {"enum": ["Ann", "Bob"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["first name", "n"],
    "additionalProperties": False,
}
JSON = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
PARAMS = SamplingParams(max_tokens=100)


@pytest.fixture
def matchers() -> Iterator[Matchers]:
    result = make_matchers()
    yield result
    result.close()


def mask_of(matchers: Matchers, constraint: StructuredOutputs, tokens: list[int], seq_id: int = 1) -> list[int]:
    matchers.begin([(seq_id, constraint, tokens)])
    assert matchers.wait([seq_id], others=False) == set()
    return allowed(matchers.mask(seq_id, constraint, tokens))


def walk(matchers: Matchers, constraint: StructuredOutputs, choose: int, jump: bool, seq_id: int = 1) -> list[int]:
    """A whole answer: at each choice the `choose`-th allowed token. Ends with the end-of-text token."""
    params = PARAMS if jump else SamplingParams(max_tokens=100, logprobs=0)
    tokens: list[int] = []
    while not tokens or tokens[-1] != EOS:
        mask = mask_of(matchers, constraint, tokens, seq_id)
        tokens.append(mask[choose % len(mask)])
        tokens += matchers.accept(seq_id, tokens[-1], params, len(tokens))
    return tokens


def text_of(tokens: list[int]) -> str:
    return campaign().tokenizer.decode(tokens)


@pytest.mark.parametrize("choose", range(6))
def test_forced_tokens_are_those_that_masks_would_leave(matchers: Matchers, choose: int) -> None:
    with_jump = walk(matchers, JSON, choose, jump=True)
    assert matchers.num_forced > len(with_jump) / 3
    before = matchers.num_forced
    assert walk(matchers, JSON, choose, jump=False) == with_jump
    assert matchers.num_forced == before
    assert text_of(with_jump).startswith('{"first name":')


@pytest.mark.parametrize("choose", range(3))
def test_an_answer_goes_on_the_same_wherever_it_was_cut(choose: int) -> None:
    first = make_matchers()
    whole = walk(first, JSON, choose, jump=True)
    for cut in range(1, len(whole)):
        fresh = make_matchers()
        tokens = whole[:cut]
        while tokens[-1] != EOS:
            mask = mask_of(fresh, JSON, tokens)
            tokens.append(mask[choose % len(mask)])
            tokens += fresh.accept(1, tokens[-1], PARAMS, len(tokens))
        assert tokens == whole
        fresh.close()
    first.close()


def test_a_step_that_was_taken_back(matchers: Matchers) -> None:
    """The runner may have taken a token in that the scheduler never committed."""
    mask = mask_of(matchers, JSON, [])
    forced = matchers.accept(1, mask[0], PARAMS, 1)
    again = mask_of(matchers, JSON, [])
    assert again == mask
    assert matchers.accept(1, again[0], PARAMS, 1) == forced
    # A part of a step that is computed twice, with nothing begun in between.
    assert allowed(matchers.mask(1, JSON, [])) == mask


def test_a_gone_matcher_is_built_again(matchers: Matchers) -> None:
    tokens = walk(matchers, JSON, 2, jump=True)
    assert len(matchers) == 0  # an answer that has ended leaves nothing behind
    assert mask_of(matchers, JSON, tokens[:5], seq_id=9)


def test_matchers_of_sequences_that_are_gone_are_dropped() -> None:
    few = make_matchers(capacity=4)
    for seq_id in range(20):
        mask_of(few, JSON, [], seq_id)
    assert len(few) <= 5
    for _ in range(module.MAX_IDLE + 5):
        few.begin([])
    assert len(few) == 0
    few.close()


def test_eos_is_allowed_only_where_the_form_is_complete(matchers: Matchers) -> None:
    constraint = StructuredOutputs(regex="[ab]{2,4}")
    a = campaign().encode("a")[0]
    assert EOS not in mask_of(matchers, constraint, [])
    matchers.accept(1, a, PARAMS, 1)
    assert EOS not in mask_of(matchers, constraint, [a])
    matchers.accept(1, a, PARAMS, 2)
    assert EOS in mask_of(matchers, constraint, [a, a])
    # Where nothing else may come, the end is forced.
    matchers.accept(1, a, PARAMS, 3)
    assert matchers.accept(1, a, PARAMS, 4) == [EOS]


def test_no_end_is_forced_before_min_tokens(matchers: Matchers) -> None:
    constraint = StructuredOutputs(choice=["a"])
    [a] = mask_of(matchers, constraint, [])
    assert matchers.accept(1, a, SamplingParams(max_tokens=9, min_tokens=5), 1) == []
    # The mask leaves nothing but the end, which the sampler will refuse and say why.
    assert mask_of(matchers, constraint, [a]) == [EOS]


def test_a_stop_token_ends_the_forced_run(matchers: Matchers) -> None:
    constraint = StructuredOutputs(regex="xyz123")
    x = mask_of(matchers, constraint, [])[0]
    run = matchers.accept(1, x, PARAMS, 1)
    assert len(run) > 2
    mask_of(matchers, constraint, [], seq_id=2)
    stopping = SamplingParams(max_tokens=9, stop_token_ids=[run[1]])
    assert matchers.accept(2, x, stopping, 1) == run[:2]


def test_a_token_that_does_not_follow_is_an_error_of_its_request(matchers: Matchers) -> None:
    matchers.begin([(1, JSON, campaign().encode("no")), (2, JSON, [])])
    with pytest.raises(GrammarError):
        matchers.mask(1, JSON, campaign().encode("no"))
    assert allowed(matchers.mask(2, JSON, []))


def test_a_constraint_that_can_not_be_built_is_an_error_of_its_request(matchers: Matchers) -> None:
    bad = StructuredOutputs(regex="(")
    matchers.begin([(1, bad, []), (2, JSON, [])])
    with pytest.raises(GrammarError, match="regex"):
        matchers.mask(1, bad, [])
    assert allowed(matchers.mask(2, JSON, []))


def test_padding_of_the_logits_is_never_allowed() -> None:
    wide = make_matchers(width=2500)
    mask = mask_of(wide, StructuredOutputs(regex="(.|\\n)*"), [])
    assert len(mask) > 1900
    assert max(mask) < 2048
    special = {i for i in range(2048) if campaign().tokenizer.is_special(i)}
    assert special & set(mask) <= {EOS}
    wide.close()


def test_a_slow_grammar_delays_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    right = compiling.compile_grammar

    def slow(constraint: StructuredOutputs) -> Any:
        if constraint.regex == "slow":
            gate.wait(30)
        return right(constraint)

    monkeypatch.setattr(compiling, "compile_grammar", slow)
    result = make_matchers()
    mask_of(result, JSON, [], seq_id=2)
    late = StructuredOutputs(regex="slow")
    result.begin([(1, late, []), (2, JSON, [])])
    assert result.wait([1, 2], others=True) == {1}
    assert allowed(result.mask(2, JSON, []))
    assert result.num_deferred == 1
    gate.set()
    # Alone, it is waited for.
    result.begin([(1, late, [])])
    assert result.wait([1], others=False) == set()
    assert allowed(result.mask(1, late, []))
    result.close()


def test_prefilling_builds_ahead(matchers: Matchers) -> None:
    matchers.begin([(1, JSON, None)])
    matchers.begin([(1, JSON, None)])
    assert mask_of(matchers, JSON, [])


def test_without_an_end_of_text_there_are_no_constraints() -> None:
    result = Matchers(load, 2048, [])
    result.begin([(1, JSON, [])])
    with pytest.raises(GrammarError, match="end-of-text"):
        result.mask(1, JSON, [])
    result.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 0},
        {"mirostat": 2},
        {"adaptive_target": 0.3},
        {"no_repeat_ngram_size": 2},
        {"allowed_token_ids": [1]},
    ],
)
def test_who_wants_to_see_or_change_every_token_gets_no_jump(fields: dict[str, Any]) -> None:
    assert jumps(SamplingParams())
    assert not jumps(SamplingParams(**fields))


def test_control_a_run_that_is_forced_at_once_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """To take all of llguidance's forced tokens at once gives other tokens where an answer is cut."""
    calls = 0

    def first_two(self: Any, matcher: Any) -> int | None:
        nonlocal calls
        calls += 1
        forced = matcher.compute_ff_tokens()
        return int(forced[-1]) if forced and calls % 2 else None

    monkeypatch.setattr(Matchers, "_only", first_two)
    with pytest.raises((AssertionError, GrammarError)):
        test_an_answer_goes_on_the_same_wherever_it_was_cut(1)


def test_the_tokenizer_is_read_once_and_ahead_of_its_use() -> None:
    reads = []

    def counted(width: int, eos_token_ids: list[int]) -> Any:
        reads.append(width)
        return load(width, eos_token_ids)

    result = Matchers(counted, 2048, [EOS])
    assert reads == []
    result.warm()
    result.warm()
    assert mask_of(result, JSON, [])
    assert reads == [2048]
    result.close()
