"""Penalties, DRY, bans and masks against slow references written from their definitions, and against transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.sampling import edits
from headrace.sampling.sampler import Drawn, Row, Sampler

V = 12
LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=V, max_size=V)
HISTORY = st.lists(st.integers(0, V - 1), min_size=1, max_size=60)
# Few letters, so that runs repeat.
BABBLE = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def edited(logits: list[float], history: list[int], params: SamplingParams, num_prompt: int = 0) -> list[float]:
    """The row before any filter."""
    x = np.array(logits, np.float32)
    for stage, on in (("penalties", params.penalizes), ("dry", params.dries)):
        if on:
            edits.edit(stage, x, np.array(history, np.int64), num_prompt, params)
    return [float(value) for value in x]


def step(logits: list[float], row: Row) -> int:
    """The token that the whole sampler picks."""
    [samples] = Sampler(len(logits), [1]).sample_rows(np.array([logits], np.float32), [row])
    assert isinstance(samples, Drawn), samples
    return samples.token_id


def penalized(logits: list[float], history: list[int], num_prompt: int, params: SamplingParams) -> list[float]:
    """Token by token, from the definitions."""
    window = range(len(history)) if params.repeat_last_n < 0 else range(len(history))[-params.repeat_last_n :]
    if params.repeat_last_n == 0:
        window = range(0)
    result = []
    for token_id, value in enumerate(logits):
        if any(history[i] == token_id for i in window):
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = sum(history[i] == token_id for i in window if i >= num_prompt)
        value -= params.frequency_penalty * count
        value -= params.presence_penalty * (count > 0)
        result.append(value)
    return result


@given(LOGITS, HISTORY, st.integers(0, 60), st.floats(0.1, 3), st.floats(-2, 2), st.floats(-2, 2), st.integers(-1, 70))
def test_penalties(
    logits: list[float],
    history: list[int],
    num_prompt: int,
    repetition: float,
    frequency: float,
    presence: float,
    last_n: int,
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence, repeat_last_n=last_n
    )
    want = penalized(logits, history, num_prompt, params)
    assert edited(logits, history, params, num_prompt) == pytest.approx(want, rel=1e-6, abs=1e-6)


@given(LOGITS, HISTORY, st.floats(0.1, 3))
def test_repetition_penalty_is_transformers(logits: list[float], history: list[int], penalty: float) -> None:
    theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), torch.tensor([logits]))
    got = edited(logits, history, SamplingParams(repetition_penalty=penalty))
    assert got == pytest.approx(theirs[0].tolist(), rel=1e-6)


def repetition_length(history: list[int], token_id: int, breakers: set[int]) -> int:
    """Most last tokens n such that those n tokens, then `token_id`, come somewhere before, no breaker among them."""
    if token_id in breakers:
        return 0
    longest = 0
    for at in range(1, len(history)):
        if history[at] != token_id:
            continue
        n = 0
        while n < at and history[at - 1 - n] == history[-1 - n] and history[-1 - n] not in breakers:
            n += 1
        longest = max(longest, n)
    return longest


@given(LOGITS, BABBLE, st.integers(0, 4), st.sets(st.integers(0, 3)), st.integers(-1, 40))
def test_dry(logits: list[float], history: list[int], allowed: int, breakers: set[int], last_n: int) -> None:
    params = SamplingParams(
        dry_multiplier=0.7, dry_base=1.5, dry_allowed_length=allowed, dry_penalty_last_n=last_n,
        dry_sequence_breaker_ids=sorted(breakers),
    )  # fmt: skip
    seen = history if last_n < 0 else history[max(0, len(history) - last_n) :]
    want = []
    for token_id, value in enumerate(logits):
        length = repetition_length(seen, token_id, breakers)
        value -= 0.7 * 1.5 ** (length - allowed) if length and length >= allowed else 0.0
        want.append(value)
    assert edited(logits, history, params) == pytest.approx(want, rel=1e-5, abs=1e-5)


@given(LOGITS, BABBLE, st.sets(st.integers(0, V - 1), min_size=1), st.integers(0, 20))
def test_edits_of_some_are_those_of_all(
    logits: list[float], history: list[int], ids: set[int], num_prompt: int
) -> None:
    params = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3, dry_multiplier=0.5)
    some = np.array(sorted(ids))
    for stage in ("penalties", "dry"):
        x = np.array(logits, np.float32)
        edits.edit(stage, x, np.array(history), num_prompt, params)
        values = np.array(logits)[some]
        got = edits.edit_some(stage, some, values, np.array(history), num_prompt, params)
        assert got.astype(np.float32).tolist() == x[some].tolist()


def test_dry_by_hand() -> None:
    # "a b c d a b": c would make it "a b c" again, two tokens and itself.
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0)
    assert edited([0.0] * 5, [0, 1, 2, 3, 0, 1], params) == [0.0, 0.0, -1.0, 0.0, 0.0]
    assert edited([0.0] * 5, [4, 0, 1, 2, 3, 4, 0, 1], params) == [0.0, 0.0, -2.0, 0.0, 0.0]


def test_a_penalty_out_of_all_bounds_forbids_nothing_else() -> None:
    params = SamplingParams(temperature=0.0, dry_multiplier=100.0, dry_base=100.0, dry_sequence_breaker_ids=[])
    row = Row(params, 200, 0, [3] * 200)
    assert step([0.0, 1.0, 0.5, 9.0], row) == 1
    assert step([9.0] * 4, Row(params, 200, 0, [0, 1, 2, 3] * 50)) == 1, "all but one are as likely as before"


@given(LOGITS, BABBLE, st.integers(1, 4))
def test_no_repeat_ngram_is_transformers(logits: list[float], history: list[int], size: int) -> None:
    theirs = transformers.NoRepeatNGramLogitsProcessor(size)(torch.tensor([history]), torch.tensor([logits]))
    banned = {i for i, value in enumerate(theirs[0].tolist()) if value == -math.inf}
    params = SamplingParams(no_repeat_ngram_size=size)
    got = edits.banned(params, np.array(history, np.int64), 0, len(history), [])
    assert set(got) == banned


@given(BABBLE, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4))
def test_bad_words_are_transformers(history: list[int], words: list[list[int]]) -> None:
    theirs = transformers.NoBadWordsLogitsProcessor(words, eos_token_id=V - 1)(
        torch.tensor([history]), torch.zeros(1, V)
    )
    banned = {i for i, value in enumerate(theirs[0].tolist()) if value == -math.inf}
    params = SamplingParams(bad_words_token_ids=words)
    assert set(edits.banned(params, np.array(history, np.int64), 0, len(history), [])) == banned


def test_allowed_token_ids_and_the_grammars_mask() -> None:
    logits = [float(i) for i in range(70)]
    params = SamplingParams(temperature=0.0, allowed_token_ids=[3, 40, 65])
    assert step(logits, Row(params, 1, 1)) == 65
    mask = np.zeros(3, np.uint32)
    for token_id in (3, 40, 69):
        mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    assert step(logits, Row(SamplingParams(temperature=0.0), 1, 1, mask=mask)) == 69
    assert step(logits, Row(params, 1, 1, mask=mask)) == 40


def test_what_forbids_everything_is_told_and_is_its_own_rows() -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=[3], bad_words_token_ids=[[3]])
    fine = Row(SamplingParams(temperature=0.0), 1, 1)
    got = Sampler(5, []).sample_rows(np.zeros((3, 5), np.float32), [fine, Row(params, 1, 1), fine])
    assert [isinstance(each, Drawn) for each in got] == [True, False, True]
    assert "no token is left" in str(got[1])


def test_processors_of_the_caller() -> None:
    seen = []

    def only_odd(prompt: list[int], output: list[int], x: np.ndarray) -> np.ndarray:
        seen.append((prompt, output))
        x[::2] = -np.inf
        return x

    params = SamplingParams(temperature=0.0, logits_processors=[only_odd], logit_bias={2: 50.0})
    assert step([0.0, 1.0, 2.0, 0.5], Row(params, 3, 2, [7, 8, 9])) == 1
    assert seen == [([7, 8], [9])]


@pytest.mark.parametrize(
    "processor",
    [lambda p, t, x: x[:2], lambda p, t, x: x * math.nan, lambda p, t, x: 1 / 0, lambda p, t, x: x + math.inf],
)
def test_processors_that_fail_fail_their_row(processor: object) -> None:
    params = SamplingParams(temperature=0.0, logits_processors=[processor])
    fine = Row(SamplingParams(temperature=0.0), 1, 1)
    got = Sampler(4, []).sample_rows(np.zeros((2, 4), np.float32), [Row(params, 1, 1, [0]), fine])
    assert "logits_processors" in str(got[0])
    assert got[1] == Drawn(0)


START, END = [5], [6, 7]


def thinking(history: list[int], budget: int) -> int | None:
    params = SamplingParams(thinking_token_budget=budget, thinking_token_ids=(START, END))
    return edits.forced(params, np.array(history, np.int64))


def test_thinking_token_budget() -> None:
    assert thinking([1, 2], 0) is None, "reasoning has not begun"
    assert thinking([1, 5], 0) == 6
    assert [thinking([1, 5, *[2] * n], 3) for n in range(4)] == [None, None, None, 6]
    assert thinking([1, 5, 2, 2, 2, 6], 3) == 7, "the end is under way"
    assert thinking([1, 5, 2, 2, 6], 3) == 7, "it had begun by itself"
    assert thinking([1, 5, 2, 2, 2, 6, 7], 3) is None
    assert thinking([1, 5, 2, 2, 2, 6, 7, 1, 1, 1, 1, 1], 3) is None
    assert thinking([1, 5, 2, 6, 7, 5], 3) is None, "it began again"
    assert thinking([1, 5, 2, 6, 7, 5, 1, 1, 1], 3) == 6


def test_thinking_ends_within_the_budget_whatever_the_model_wants() -> None:
    logits = [0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    params = SamplingParams(
        temperature=0.0, thinking_token_budget=4, thinking_token_ids=(START, END), logprobs=0, max_tokens=20
    )
    history = [1, 5]
    for _ in range(8):
        history.append(step(logits, Row(params, len(history), 2, list(history))))
    assert history[2:] == [2, 2, 2, 2, 6, 7, 2, 2]


# -- a trace that is replayed


def test_trace_decode_token_ids() -> None:
    """Its tokens come whatever the model, bans and other parameters say; log-probabilities stay the model's."""
    logits = np.array([[0.0, 5.0, 9.0, 1.0, -np.inf]], np.float32)
    trace = [3, 1, 4, 0]
    plain = SamplingParams(temperature=0.0, logprobs=1)
    params = SamplingParams(
        seed=1, trace_decode_token_ids=trace, logprobs=1, min_tokens=3, top_k=1, allowed_token_ids=[2], max_tokens=50
    )
    assert (params.max_tokens, params.ignore_eos) == (4, True), "the answer is the trace"
    for place, token_id in enumerate(trace):
        rows = [Row(params, 7 + place, 7, []), Row(plain, 7 + place, 7, [])]
        samples, second = Sampler(5, [1]).sample_rows(np.repeat(logits, 2, axis=0), rows)
        assert isinstance(samples, Drawn)
        assert isinstance(second, Drawn)
        assert (samples.token_id, second.token_id) == (token_id, 2)
        assert samples.logprob is not None
        assert second.logprob is not None
        assert samples.logprob.top == second.logprob.top
        want = float(logits[0, token_id]) - 9.0 + dict(second.logprob.top)[2]
        assert samples.logprob.logprob == pytest.approx(want)
    assert step(logits[0].tolist(), Row(params, 11, 7, [])) == 2, "beyond it the model goes on"


def test_a_trace_comes_before_a_budget_of_thinking() -> None:
    fields = {"thinking_token_budget": 0, "thinking_token_ids": (START, END), "temperature": 0.0}
    logits = [0.0] * 8
    params = SamplingParams(trace_decode_token_ids=[4, 4], **fields)  # type: ignore[arg-type]
    assert step(logits, Row(params, 2, 2, [1, 5])) == 4
    assert step(logits, Row(params, 4, 2, [1, 5, 4, 4])) == END[0]


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"trace_decode_token_ids": []}, "trace"), ({"trace_decode_token_ids": [-1]}, "trace"),
     ({"trace_decode_token_ids": 0}, "trace"), ({"trace_decode_token_ids": [1], "n": 2}, "trace"),
     ({"trace_decode_token_ids": [1], "best_of": 2}, "trace"),
     ({"trace_decode_token_ids": [1], "structured_outputs": {"regex": "a+"}}, "trace"),
     ({"trace_decode_token_ids": [1], "min_tokens": 2}, "min_tokens")],
)  # fmt: skip
def test_traces_that_are_refused(fields: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError, match=f"^{field}"):
        SamplingParams(**fields)  # type: ignore[arg-type]
