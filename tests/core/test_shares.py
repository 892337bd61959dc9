"""R-10: under the policy fair no holder keeps another waiting, whatever it runs; each may use an equal share."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from tests.core.test_overlap import Pair
from tests.programs.sim.bench import Bench
from tests.programs.sim.simulation import Violation
from tests.programs.sim.waits import Program, run_programs

from headrace.core.shares import MAX_NUMBERS, Shares
from headrace.core.steps import Flight
from headrace.core.tables import BlockTables
from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.kinds import CacheKind
from headrace.protocol.step import ScheduledBatch

SIZES = {"max_num_seqs": 8, "num_blocks": 64, "max_num_batched_tokens": 64}


class Two(Bench):
    """A bench with two holders, each with a salt of its own."""

    def __init__(self, policy: str = "fair", **sizes: Any) -> None:
        super().__init__(policy=policy, **(SIZES | sizes))

    def send(self, name: str, num_prompt: int = 4, max_tokens: int = 100, **inputs: Any) -> None:
        """A request of the holder whose name `name` begins with."""
        inputs = {"ignore_eos": True, **inputs}
        self.add(name, num_prompt, tenant=name[0], cache_salt=name[0], max_tokens=max_tokens, **inputs)

    def flood(self, count: int, holder: str = "a", **inputs: Any) -> None:
        for index in range(count):
            self.send(f"{holder}{index}", **inputs)

    def runs(self, holder: str) -> list[str]:
        return [seq.request_id for seq in self.scheduler.running if seq.request_id[0] == holder]

    def steps_until(self, name: str, most: int = 40) -> int:
        for number in range(1, most + 1):
            self.step()
            if name in self.finished:
                return number
        return most + 1

    def just(self, holder: str) -> list[str]:
        """Those of a holder that ended with the last step."""
        return [name for name in self.output.finished if name[0] == holder]

    @property
    def waiting(self) -> set[str]:
        """The holders of waiting requests."""
        queue = self.scheduler.waiting
        return {queue[index].request_id[0] for index in range(len(queue))}

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.counters.num_preemptions


def test_R_10_one_who_takes_all_places_delays_another_by_no_step() -> None:
    bench = Two()
    bench.flood(20)
    bench.step()
    assert len(bench.runs("a")) == 8
    bench.send("b", max_tokens=1)
    assert bench.steps_until("b") == 1
    # The youngest of those that ran gave way, and goes on first.
    assert bench.num_preemptions == 1
    assert bench.scheduler.waiting[0].request_id == "a7"
    bench.step()
    assert bench.runs("a")[-1] == "a7"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_R_10_control_the_other_policies_let_it_wait(policy: str) -> None:
    bench = Two(policy)
    bench.flood(20)
    bench.step()
    bench.send("b", max_tokens=1)
    assert bench.steps_until("b") > 40
    assert bench.num_preemptions == 0


def test_R_10_two_that_want_all_get_a_half_each_and_disturb_one_another_no_more() -> None:
    bench = Two(num_blocks=1000, max_model_len=400)
    noise = random.Random(1)
    for index in range(20):
        bench.send(f"a{index}", max_tokens=noise.randint(30, 90))
    for _ in range(3):
        bench.step()
    for index in range(20):
        bench.send(f"b{index}", max_tokens=noise.randint(30, 90))
    for _ in range(3):
        bench.step()
    assert (len(bench.runs("a")), len(bench.runs("b"))) == (4, 4)
    assert bench.num_preemptions == 4
    while bench.waiting == {"a", "b"}:
        assert {
            len(bench.runs(holder) + ended) for holder, ended in (("a", bench.just("a")), ("b", bench.just("b")))
        } == {4}
        bench.step()
    assert bench.num_preemptions == 4
    bench.drain()


def test_R_10_what_one_holder_leaves_another_may_use() -> None:
    bench = Two()
    bench.send("b")
    bench.flood(20)
    bench.step()
    assert len(bench.runs("a")) == 7


def test_R_10_blocks_are_shared_too() -> None:
    """Four long answers hold all blocks; a prompt of another, of half of them, starts at once."""
    bench = Two(num_blocks=32, max_num_batched_tokens=256, enable_prefix_caching=False)
    bench.flood(4, num_prompt=30, max_tokens=60)
    bench.step()
    assert bench.scheduler.pool.num_available < 2
    bench.send("b", num_prompt=62, max_tokens=1)
    assert bench.steps_until("b") <= 3
    assert bench.runs("a") == ["a0", "a1"]
    bench.drain()


def test_R_10_more_than_a_share_waits_for_what_others_leave() -> None:
    bench = Two(num_blocks=32, max_num_batched_tokens=256, enable_prefix_caching=False)
    bench.flood(4, num_prompt=30, max_tokens=10)
    bench.step()
    bench.send("b", num_prompt=100, max_tokens=1)
    assert 3 < bench.steps_until("b") <= 40
    assert not any(seq.request_id[0] == "b" for seq in bench.scheduler.running)


def test_R_10_who_grows_takes_no_block_of_one_within_its_share() -> None:
    bench, is_disturbed = grown()
    assert not is_disturbed
    bench.drain()


def test_R_10_control_the_last_in_the_order_gives_way_without_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shares, "givers", lambda self, candidates: candidates)
    assert grown()[1]


def grown() -> tuple[Two, bool]:
    """Six answers of one holder grow until they lack blocks beside one of another, who came last and has less than a
    half. Whether that one was sent back to the queue."""
    bench, is_disturbed = Two(num_blocks=16, max_model_len=64), False
    bench.flood(6, num_prompt=4, max_tokens=40)
    bench.step()
    bench.send("b", num_prompt=12, max_tokens=16)
    while "b" not in bench.finished:
        bench.step()
        is_disturbed |= bench.runs("b") != ["b"] and "b" not in bench.finished
    assert bench.num_preemptions > 0
    return bench, is_disturbed


def test_R_10_the_tokens_of_a_step_are_shared() -> None:
    """Neither a long prompt that runs nor one that is first in the queue takes a whole step."""
    bench = Two(max_model_len=1000, num_blocks=600)
    bench.flood(3, num_prompt=500)
    assert bench.step() == {"a0": (0, 64)}
    bench.send("b0", num_prompt=40, max_tokens=1)
    lengths = {name: length for name, (_, length) in bench.step().items()}
    assert (lengths["a0"], lengths["b0"]) == (32, 32)
    lengths = {name: length for name, (_, length) in bench.step().items()}
    assert (lengths["a0"], lengths["b0"]) == (56, 8)


def test_R_10_a_beam_search_gives_way_as_a_whole() -> None:
    bench = Two(num_blocks=200)
    bench.send("a", max_tokens=40, temperature=0.0, beam=BeamSearchParams(beam_width=8))
    for _ in range(4):
        bench.step()
    assert len(bench.runs("a")) == 8
    bench.send("b", max_tokens=1)
    assert bench.steps_until("b") == 1
    assert bench.scheduler.waiting[0].request_id == "a"
    bench.drain()


def test_R_10_a_step_has_a_bounded_number_of_log_probabilities() -> None:
    """Of prompts, also where one holder alone has requests; the rest of a step is for the other."""
    vocab_size = 1023
    most = MAX_NUMBERS // (1 + vocab_size)
    bench = Two(vocab_size=vocab_size, max_num_batched_tokens=1000, max_model_len=1000, num_blocks=800)
    bench.flood(3, num_prompt=500, prompt_logprobs=-1)
    assert bench.step() == {"a0": (0, most)}
    bench.send("b", num_prompt=200, max_tokens=1)
    scheduled = bench.step()
    assert scheduled == {"a0": (most, most // 2), "b": (0, 200)}
    assert "b" in bench.finished
    while any(name not in bench.finished for name in ("a0", "a1", "a2")):
        scheduled = bench.step()
        assert sum(length for _, length in scheduled.values() if length > 1) <= most


def test_R_10_tokens_with_many_log_probabilities_take_more_of_a_share() -> None:
    bench = Two(vocab_size=MAX_NUMBERS // 4, num_blocks=200)
    bench.flood(8, logprobs=-1)
    bench.step()
    assert len(bench.runs("a")) == 3
    bench.send("b", logprobs=-1, max_tokens=1)
    assert bench.steps_until("b") == 1


def test_R_10_one_row_may_have_more_than_a_step() -> None:
    bench = Two(vocab_size=2 * MAX_NUMBERS)
    bench.flood(2, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    bench.send("b0", max_tokens=2, logprobs=-1)
    bench.drain()
    assert len(bench.finished) == 3


def test_one_holder_alone_has_the_schedule_of_first_come_first_served() -> None:
    rng = random.Random(5)
    works = [(rng.randint(0, 3), rng.randint(1, 40), rng.randint(1, 30)) for _ in range(60)]
    schedules = []
    for policy in ("fcfs", "fair"):
        bench, schedule = Two(policy, num_blocks=40), []
        for number, (pause, num_prompt, max_tokens) in enumerate(works):
            bench.send(f"a{number}", num_prompt=num_prompt, max_tokens=max_tokens)
            schedule += [bench.step() for _ in range(pause)]
        while bench.scheduler.has_work():
            schedule.append(bench.step())
        schedules.append((schedule, bench.num_preemptions))
    assert schedules[0] == schedules[1]
    assert schedules[0][1] > 0


def test_R_10_more_holders_than_places_take_turns_as_before() -> None:
    bench = Two(max_num_seqs=2)
    for holder in "abc":
        bench.flood(2, holder, max_tokens=8)
    bench.drain()
    assert len(bench.finished) == 6
    assert bench.num_preemptions == 0


# -- the law, over random programs -------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", range(0, 48, 6))
def test_R_10_no_short_request_waits_longer_than_the_law_says(first: int) -> None:
    counts, violations = run_programs(first, 6, 0)
    assert not violations
    assert counts["requests"] >= 6


# -- steps that overlap ------------------------------------------------------------------------------------------


def chunks_beside_answers(num_slots: int = 0, **inputs: Any) -> tuple[int, int]:
    """Three answers of one holder go on beside a long prompt of another. In how many steps was a token of the answers
    computed, and in how many some of the prompt, until the prompt's end?"""
    kinds = (CacheKind(), CacheKind(is_state=True)) if num_slots else (CacheKind(),)
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "enable_prefix_caching": False, "kinds": kinds}
    more = (num_slots,) if num_slots else ()
    bench = Two(runs_ahead=lambda params: params.logprobs is None, more_blocks=more, **sizes)
    bench.flood(3, max_tokens=60)
    pair = Pair(bench)
    batches: list[list[str]] = []

    def start(batch: ScheduledBatch) -> None:
        pair.start(batch)
        batches.append([seq.request_id for seq in bench.scheduler.flight])

    for number in range(60):
        if number == 5:
            bench.send("b", num_prompt=100, max_tokens=1, **inputs)
            batches.clear()
        if not pair.flight:
            start(bench.scheduler.schedule())
        if (ahead := bench.scheduler.schedule_ahead()) is not None:
            start(ahead)
        pair.finish()
        if "b" in bench.finished:
            pair.drain()
            return sum("a0" in names for names in batches), sum("b" in names for names in batches)
    raise AssertionError("the prompt did not end")


CASES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "a third slot": ({"num_slots": 10}, BlockTables, "has_room"),
    "a prompt that can not run ahead": ({"logprobs": 0}, Flight, "has_room"),
}
"""By the reason for which a prompt could be left out of each second step: the sizes, and what prevents that."""


@pytest.mark.parametrize("name", CASES)
def test_R_10_no_step_goes_ahead_of_a_prompt_without_it(name: str) -> None:
    num_steps, num_chunks = chunks_beside_answers(**CASES[name][0])
    # The steps in flight when it comes may be without it.
    assert num_chunks <= num_steps <= num_chunks + 3


@pytest.mark.parametrize("name", CASES)
def test_R_10_control_steps_ahead_leave_a_prompt_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, owner, member = CASES[name]
    right = getattr(owner, member)
    is_tables = owner is BlockTables
    monkeypatch.setattr(owner, member, lambda self, _: True if is_tables else right(self, False))
    num_steps, num_chunks = chunks_beside_answers(**inputs)
    assert num_steps > num_chunks + 3


def both_start_beside_a_copy() -> bool:
    """In a cache of two blocks a prompt of one holder ends within a cached block, and another holder wants a block."""
    bench = Two(num_blocks=2, max_model_len=8, eos_token_ids=[])
    bench.send("a0", num_prompt=4, max_tokens=1)
    bench.drain()
    bench.send("a1", num_prompt=3, max_tokens=2)
    bench.send("b", num_prompt=3, max_tokens=1)
    return bench.step().keys() == {"a1", "b"}


def test_R_10_a_copied_block_takes_none_that_another_claims() -> None:
    assert both_start_beside_a_copy()


def test_R_10_control_a_copied_block_delays_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shares, "num_spare", property(lambda self: 1, lambda self, num: None), raising=False)
    assert not both_start_beside_a_copy()


@pytest.mark.parametrize("seed", [653, 1787, 7139, 8888])
def test_R_10_programs_that_broke_the_law(seed: int) -> None:
    """By a prompt that could not run ahead, twice by a third slot, and by a copied block."""
    run_all([seed])


def run_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        Program(seed).run_probes()


BEGIN = Shares.begin_step
BROKEN: dict[str, tuple[int, str, Any]] = {
    "all shares": (0, "are_equal", property(lambda self: False)),
    "who starts first": (0, "claims", lambda self, num_tokens: []),
    "who gives way": (0, "victim", lambda self, claims: None),
    "the tokens of a step": (44, "begin_step", lambda self, seqs, budget: BEGIN(self, [], budget)),
}
"""By the part that is left out: the seed to begin with, and a wrong member of `Shares`."""


@pytest.mark.parametrize("name", BROKEN)
def test_R_10_control_a_scheduler_without_a_part_breaks_the_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *wrong = BROKEN[name]
    monkeypatch.setattr(Shares, *wrong)
    with pytest.raises(Violation, match="^R-10"):
        run_all(range(first, first + 40))


def test_R_10_one_who_has_used_its_part_holds_up_no_other() -> None:
    """Its next request is first in the queue, fits into its share, and waits for the next step alone."""
    bench = Two(vocab_size=1023, max_num_batched_tokens=1000, max_model_len=1000, num_blocks=800)
    bench.flood(2, num_prompt=300, prompt_logprobs=-1)
    bench.step()
    bench.send("b", max_tokens=1)
    assert bench.steps_until("b") == 1
