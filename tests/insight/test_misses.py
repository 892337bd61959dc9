"""Why the prefix cache had no more of a prompt: each reason, and beside it a case that differs in one thing only."""

from __future__ import annotations

from typing import Any

import pytest
from tests.insight.test_journal import engine
from tests.support.journal import request

from headrace.core import prefix
from headrace.core.journal import Admission, Note, decode_note
from headrace.core.prefix import Miss
from headrace.engine.core import EngineCore

A = list(range(10, 20))


def admit(core: EngineCore, name: str, prompt: list[int], num: int = 1, **more: Any) -> tuple[Admission, Note]:
    """Run a request to its end. Return its admission, and the note that has it."""
    core.add(request(name, prompt, num, **more))
    first = decode_note(core.step().note)
    while core.has_work():
        core.step()
    [admission] = first.step.admissions
    return admission, first


def verdict(core: EngineCore, name: str, prompt: list[int], num: int = 1, **more: Any) -> tuple[int, int, int]:
    admission, _ = admit(core, name, prompt, num, **more)
    return admission.num_cached, admission.miss, admission.at


def test_the_first_of_a_root_finds_nothing_and_the_next_the_same_prompt() -> None:
    core = engine()
    assert verdict(core, "a", A, 3) == (0, Miss.EMPTY, 0)
    # Three blocks were filled: 10 tokens and two of the answer.
    assert verdict(core, "b", A) == (9, Miss.NONE, 9)


def test_S_24_another_root_is_never_searched() -> None:
    core = engine()
    admit(core, "a", A, 3, cache_salt="one")
    admission, note = admit(core, "b", A, 3, cache_salt="two")
    assert (admission.num_cached, admission.miss, note.token_ids) == (0, Miss.EMPTY, {})
    # The control: the same prompt, less one token, under the same root shows what is there.
    admission, note = admit(core, "c", [*A[:6], 99, 98], cache_salt="one")
    assert note.token_ids == {admission.seq_id: ([*A[:6], 99, 98], A[:8])}


@pytest.mark.parametrize("at", [0, 3, 4, 6, 8])
def test_it_diverged_at_a_token(at: int) -> None:
    core = engine()
    admit(core, "a", A, 3)
    other = [*A[:at], 99, *A[at + 1 :]]
    admission, note = admit(core, "b", other)
    assert (admission.num_cached, admission.miss, admission.at) == (at, Miss.DIVERGED, at)
    ours, theirs = note.token_ids[admission.seq_id]
    start = max(0, at - 8)
    assert ours == other[start : at + 8]
    # Up to the end of the block.
    assert theirs[: at - start] == ours[: at - start]
    assert theirs[at - start] == A[at]
    assert verdict(core, "c", A) == (9, Miss.NONE, 9)


def test_it_shows_the_newest_of_those_that_differ() -> None:
    core = engine()
    for name, token in (("a", 1), ("b", 2), ("c", 1)):
        admit(core, name, [*A[:4], token, 50, 51, ord(name)])
    admission, note = admit(core, "d", [*A[:4], 3, 50, 51, 52])
    assert note.token_ids[admission.seq_id][1] == [*A[:4], 1, 50, 51, ord("c")]


def test_it_was_evicted_for_another() -> None:
    core = engine(num_gpu_blocks_override=5)
    admit(core, "a", A[:8])
    # Its five blocks need all of those that are cached.
    other, _ = admit(core, "b", [*range(100, 118)], 2)
    admission, note = admit(core, "c", A[:8])
    assert (admission.num_cached, admission.miss, admission.at, admission.by) == (0, Miss.EVICTED, 0, other.seq_id)
    assert 0 < admission.evicted_time < note.step.times[0]
    # The control: with blocks enough none is evicted.
    core = engine(num_gpu_blocks_override=16)
    admit(core, "a", A[:8])
    admit(core, "b", [*range(100, 118)], 2)
    assert verdict(core, "c", A[:8]) == (7, Miss.NONE, 7)


@pytest.mark.parametrize(("most", "miss"), [(1, Miss.EVICTED), (0, Miss.DIVERGED)])
def test_control_the_ring_of_evicted_keys_is_bounded(monkeypatch: pytest.MonkeyPatch, most: int, miss: Miss) -> None:
    monkeypatch.setattr(prefix, "MAX_EVICTED", most)
    core = engine(num_gpu_blocks_override=5)
    admit(core, "a", A[:8])
    admit(core, "b", [*range(100, 118)], 2)
    # Leaves are evicted first: the block that was evicted last is the first of the prompt.
    assert len(core.scheduler.cache.evicted) == most
    assert verdict(core, "c", A[:8])[1] == miss


def test_blocks_are_published_only_when_they_are_full() -> None:
    core = engine()
    admit(core, "a", A, 1)
    assert verdict(core, "b", A) == (8, Miss.PART_OF_A_BLOCK, 8)
    # The control: an answer of three tokens fills the third block.
    core = engine()
    admit(core, "a", A, 3)
    assert verdict(core, "b", A) == (9, Miss.NONE, 9)


def test_log_probabilities_of_the_prompt_need_every_row() -> None:
    core = engine()
    admit(core, "a", A, 3)
    assert verdict(core, "b", A, params={"prompt_logprobs": 1}) == (0, Miss.EVERY_ROW, 0)
    assert verdict(core, "c", A) == (9, Miss.NONE, 9)


def test_caching_is_off() -> None:
    core = engine(enable_prefix_caching=False)
    admit(core, "a", A, 3)
    assert verdict(core, "b", A) == (0, Miss.OFF, 0)


def test_a_reset_forgets_what_was_evicted() -> None:
    core = engine(num_gpu_blocks_override=5)
    admit(core, "a", A[:8])
    admit(core, "b", [*range(100, 118)], 2)
    core.reset_prefix_cache()
    assert verdict(core, "c", A[:8]) == (0, Miss.EMPTY, 0)
    core.scheduler.check()
