"""The scheduler's promises one at a time, on small examples that can be followed by hand."""

import subprocess
import sys

import pytest
from tests.programs.sim.bench import EOS, Bench

from headrace.protocol.errors import ContextLengthError, HeadraceError, InvariantError, RequestError
from headrace.protocol.step import Finish, StepResult

# -- the step ------------------------------------------------------------------------------------------------------


def test_a_request_gets_the_oracles_tokens_and_one_end():
    bench = Bench()
    _, expected = bench.add("a", 10, max_tokens=6)
    bench.drain()
    assert bench.tokens == {"a": expected}
    assert bench.finished == {"a": Finish("length")}
    assert bench.started == {"a": 0}


def test_R_11_gaps_of_one_come_before_long_prompts():
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", 4, max_tokens=50)
    bench.add("b", 4, max_tokens=50)
    bench.step()
    bench.add("long", [9] * 40)
    for turn in range(3):
        assert bench.step() == {"a": (4 + turn, 1), "b": (4 + turn, 1), "long": (6 * turn, 6)}


def test_a_chunk_is_no_longer_than_the_threshold():
    bench = Bench(long_prefill_token_threshold=5)
    bench.add("a", 12)
    assert [bench.step()["a"] for _ in range(4)] == [(0, 5), (5, 5), (10, 2), (12, 1)]


def test_without_chunks_a_prompt_waits_for_a_step_that_it_fits():
    bench = Bench(max_num_batched_tokens=16, max_model_len=16, enable_chunked_prefill=False)
    bench.add("a", 10)
    bench.add("b", [2, *range(9)])
    assert bench.step() == {"a": (0, 10)}
    assert bench.step() == {"a": (10, 1), "b": (0, 10)}
    with pytest.raises(ValueError, match="max_model_len"):
        Bench(max_num_batched_tokens=15, max_model_len=16, enable_chunked_prefill=False)


def test_I_15_not_more_run_than_a_step_has_tokens():
    bench = Bench(max_num_batched_tokens=2)
    for name in "abc":
        bench.add(name, 1)
    assert list(bench.step()) == ["a", "b"]
    assert list(bench.step()) == ["a", "b"]


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_overtaking"])
def test_numbers_that_can_not_work_are_refused(field):
    with pytest.raises(ValueError, match=field):
        Bench(**{field: 0})


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="'lifo'"):
        Bench(policy="lifo")


def test_a_step_is_committed_before_the_next_and_with_its_own_result():
    bench = Bench()
    bench.add("a", 4)
    batch = bench.scheduler.schedule()
    with pytest.raises(HeadraceError, match="in flight"):
        bench.scheduler.schedule()
    result = bench.executor.run(batch)
    for wrong in (
        StepResult(step_id=batch.step_id + 1, token_ids=[1]),
        StepResult(step_id=batch.step_id, token_ids=[]),
    ):
        with pytest.raises(HeadraceError, match="commit"):
            bench.scheduler.commit(batch, wrong)
    bench.commit(batch, result)
    with pytest.raises(HeadraceError, match="commit"):
        bench.scheduler.commit(batch, result)


# -- what may come in ----------------------------------------------------------------------------------------------


def test_I_19_the_longest_prompt_that_fits_runs_and_one_more_is_refused():
    for numbers in ({"max_model_len": 20}, {"num_blocks": 5, "max_model_len": 500}):
        bench = Bench(**numbers)
        longest = bench.scheduler.max_model_len - 1
        _, expected = bench.add("fits", longest)
        with pytest.raises(ContextLengthError, match=f"at most {longest} tokens") as refused:
            bench.add("too long", longest + 1)
        assert (refused.value.field, refused.value.status) == ("prompt", 400)
        bench.drain()
        assert bench.tokens["fits"] == expected
        assert bench.finished == {"fits": Finish("length")}


def test_bad_requests_leave_nothing_behind():
    bench = Bench()
    bench.add("a", 4)
    for name, prompt, inputs, field in (
        ("a", 4, {}, "request_id"),
        ("b", [], {}, "prompt"),
        ("b", 4, {"resume_token_ids": [5] * 5}, "resume_token_ids"),
    ):
        with pytest.raises(RequestError) as refused:
            bench.add(name, prompt, **inputs)
        assert refused.value.field == field
    assert list(bench.scheduler.sequences) == ["a"]
    bench.drain()


def test_an_id_can_be_used_again_after_its_end_was_told():
    bench = Bench()
    bench.add("a", 4)
    bench.scheduler.abort("a")
    with pytest.raises(RequestError, match="not in use"):
        bench.add("a", 4)
    bench.step()
    bench.finished.clear()
    bench.add("a", 4)
    bench.drain()
    assert bench.finished["a"].reason == "length"


# -- ends ----------------------------------------------------------------------------------------------------------


def test_max_tokens_is_cut_to_the_context():
    bench = Bench(max_model_len=12)
    bench.add("a", 10, max_tokens=50)
    bench.add("b", 10, max_tokens=None)
    bench.drain()
    assert {name: len(tokens) for name, tokens in bench.tokens.items()} == {"a": 2, "b": 2}
    assert bench.finished["a"] == bench.finished["b"] == Finish("length")


def test_a_chosen_stop_token_ends_the_sequence_and_is_told():
    probe = Bench()
    _, expected = probe.add("a", 4, max_tokens=8)
    bench = Bench()
    bench.add("a", 4, max_tokens=8, stop_token_ids=[expected[3]])
    bench.drain()
    assert bench.tokens["a"] == expected[:4]
    assert bench.finished["a"] == Finish("stop", stop_reason=expected[3])


@pytest.mark.parametrize("num_resumed", [0, 1, 3, 5, 6])
def test_resumed_tokens_are_known_and_count(num_resumed):
    bench = Bench()
    _, expected = bench.add("whole", 7, max_tokens=6)
    bench.add("again", 7, max_tokens=6, resume_token_ids=expected[:num_resumed])
    bench.drain()
    assert bench.tokens["whole"] == expected
    assert bench.tokens.get("again", []) == expected[num_resumed:]
    assert bench.finished == {"whole": Finish("length"), "again": Finish("length")}


def test_a_request_resumed_after_its_stop_token_ends_at_once():
    bench = Bench()
    bench.add("a", 4, resume_token_ids=[7, EOS])
    assert bench.scheduler.has_work()
    assert bench.step() == {}
    assert bench.finished == {"a": Finish("stop")}
    assert not bench.scheduler.has_work()


def test_I_9_an_abort_ends_a_request_once_wherever_it_is():
    bench = Bench(max_num_seqs=1)
    for name in ("running", "waiting", "in flight"):
        bench.add(name, 6)
    bench.step()
    assert bench.scheduler.abort("running")
    assert bench.scheduler.abort("waiting")
    assert not bench.scheduler.abort("running")
    assert not bench.scheduler.abort("nobody")
    batch = bench.scheduler.schedule()
    assert [seq.request_id for seq in bench.scheduler.flight] == ["in flight"]
    num_held = bench.scheduler.pool.num_held
    assert bench.scheduler.abort("in flight")
    assert not bench.scheduler.abort("in flight")
    # I-7: what the step may still write stays held until it is retired.
    assert bench.scheduler.pool.num_held == num_held == 2
    bench.scheduler.check()
    bench.commit(batch, bench.executor.run(batch))
    assert bench.finished == dict.fromkeys(("running", "waiting", "in flight"), Finish("abort"))
    assert not bench.scheduler.has_work()
    assert bench.scheduler.stats().num_blocks_held == 0
    assert list(bench.tokens) == ["running"]


def test_a_failed_chunk_ends_its_request_alone_and_is_never_published():
    bench = Bench(fail=lambda step_id, index: (step_id, index) == (2, 0))
    bench.add("bad", 40, max_tokens=2)
    bench.scheduler.chunk_limit = 16
    bench.step()
    _, expected = bench.add("good", [7, 8, 9], max_tokens=3)
    bench.step()
    assert bench.finished == {"bad": Finish("error", message="simulated failure")}
    # The first chunk was sound: 16 tokens in 4 blocks. Of the second, nothing is known.
    assert len(bench.scheduler.cache) == 4
    bench.drain()
    assert bench.tokens == {"good": expected}
    bench.add("again", 40, max_tokens=2)
    bench.drain()
    assert bench.started["again"] == 16


def test_a_token_that_was_asked_for_and_not_given_is_an_error():
    bench = Bench()
    bench.add("a", 4)
    batch = bench.scheduler.schedule()
    bench.commit(batch, StepResult(step_id=batch.step_id, token_ids=[-1]))
    assert bench.finished == {"a": Finish("error", message="no token was sampled")}


# -- preemption and order ------------------------------------------------------------------------------------------


def test_the_last_to_come_is_preempted_and_loses_nothing():
    bench = Bench(num_blocks=6, max_model_len=17)
    expected = {}
    for name in "ab":
        _, expected[name] = bench.add(name, 8, cache_salt=name, max_tokens=8, seed=ord(name))
    bench.step()
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    assert [seq.request_id for seq in bench.scheduler.running] == ["a"]
    bench.drain()
    assert bench.tokens == expected
    assert 0 < bench.scheduler.stats().num_recomputed_tokens <= 2 * 16


def test_I_17_twice_preempted_is_protected():
    bench = Bench(num_blocks=8, max_model_len=33)
    a, _ = bench.add("a", 8, max_tokens=24)
    a.num_preemptions = 2
    bench.add("b", [9] * 8, max_tokens=24)
    b = bench.scheduler.sequences["b"]
    b.num_preemptions = 2
    # Each may need 8 blocks: they can not both be promised them.
    assert bench.step() == {"a": (0, 8)}
    c, _ = bench.add("c", [8] * 4, max_tokens=8)
    bench.drain()
    assert (a.num_preemptions, b.num_preemptions) == (2, 2)
    assert c.num_preemptions == 0


def test_priority_comes_before_arrival_and_the_least_urgent_is_the_victim():
    bench = Bench(policy="priority", max_num_seqs=2, num_blocks=6)
    bench.add("late", 8, priority=5, max_tokens=9)
    bench.add("soon", [7] * 8, priority=-1, max_tokens=9)
    bench.add("mid", [6] * 8, priority=0, max_tokens=9)
    assert list(bench.step()) == ["soon", "mid"]
    while not bench.scheduler.stats().num_preemptions:
        bench.step()
    assert [seq.request_id for seq in bench.scheduler.running] == ["soon"]
    bench.drain()
    assert list(bench.finished) == ["soon", "mid", "late"]


def test_under_fcfs_priority_means_nothing():
    bench = Bench(max_num_seqs=1)
    bench.add("a", 2, priority=5)
    bench.add("b", 2, priority=-5)
    bench.drain()
    assert list(bench.finished) == ["a", "b"]


def test_I_18_overtaken_so_often_and_no_more():
    bench = Bench(policy="priority", max_num_seqs=1, max_overtaking=3)
    bench.add("patient", 2, priority=1, max_tokens=1)
    for index in range(10):
        bench.add(f"urgent{index}", [5, index], priority=0, max_tokens=1)
    bench.drain()
    assert list(bench.finished)[:5] == ["urgent0", "urgent1", "urgent2", "patient", "urgent3"]


def test_what_does_not_fit_holds_up_the_rest_and_is_not_looked_up_again_in_vain():
    bench = Bench(num_blocks=6, max_model_len=25)
    bench.add("a", 16, max_tokens=4)
    bench.add("big", [7] * 20, max_tokens=1)
    bench.add("small", [8], max_tokens=1)
    lookups = []
    match = bench.scheduler.cache.match

    def counting(tokens, keys, limit):
        lookups.append(tokens[0])
        return match(tokens, keys, limit)

    bench.scheduler.cache.match = counting
    assert bench.step() == {"a": (0, 16)}
    assert bench.step() == {"a": (16, 1)}
    assert bench.step() == {"a": (17, 1)}
    assert lookups == [1, 7]
    bench.drain()
    assert list(bench.finished) == ["a", "big", "small"]


def test_a_newcomer_does_not_lean_on_blocks_that_a_running_prompt_needs():
    bench = Bench(num_blocks=6, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    bench.add("a", 20, max_tokens=1)
    bench.add("b", [9] * 8, max_tokens=1)
    bench.add("c", [8] * 4, max_tokens=1)
    # There are 5 blocks left, but `a` is going to need 4 of them.
    assert bench.step() == {"a": (0, 4)}
    bench.drain()
    assert bench.scheduler.stats().num_preemptions == 0


def test_forced_preemption_is_refused_for_what_does_not_run_or_is_in_flight():
    bench = Bench()
    bench.add("a", 4)
    assert not bench.scheduler.preempt("a")
    assert not bench.scheduler.preempt("nobody")
    bench.step()
    batch = bench.scheduler.schedule()
    assert not bench.scheduler.preempt("a")
    bench.commit(batch, bench.executor.run(batch))
    assert bench.scheduler.preempt("a")
    bench.scheduler.check()


# -- looking in ----------------------------------------------------------------------------------------------------


def test_R_22_gauges_are_the_state_and_return_to_zero():
    bench = Bench()
    bench.add("a", 10)
    assert (bench.scheduler.stats().num_waiting, bench.scheduler.stats().num_running) == (1, 0)
    bench.step()
    stats = bench.output.stats
    assert (stats.num_waiting, stats.num_running, stats.num_blocks_held) == (0, 1, 3)
    assert stats.kv_cache_usage == 3 / 64
    bench.drain()
    stats = bench.output.stats
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_held, stats.kv_cache_usage) == (0, 0, 0, 0)
    assert stats.num_blocks_cached == 3
    assert (stats.num_prompt_tokens, stats.num_generated_tokens, stats.num_batched_tokens) == (10, 4, 13)


def test_check_finds_damage():
    bench = Bench()
    seq, _ = bench.add("a", 10)
    bench.step()
    seq.block_table.append(seq.block_table[0])
    with pytest.raises(InvariantError, match="I-2"):
        bench.scheduler.check()


def test_I_10_an_illegal_transition_is_refused():
    bench = Bench()
    seq, _ = bench.add("a", 10)
    bench.scheduler.abort("a")
    with pytest.raises(InvariantError, match="I-10"):
        seq.move(seq.status)


def test_S_05_checks_survive_optimised_python():
    code = (
        "from headrace.core.options import SchedulerOptions\n"
        "from headrace.core.scheduler import Scheduler\n"
        "from headrace.protocol.errors import InvariantError\n"
        "s = Scheduler(SchedulerOptions(num_blocks=2, block_size=2, max_num_seqs=1, max_num_batched_tokens=2, "
        "max_model_len=4))\n"
        "s.pool.free.pop()\n"
        "try:\n    s.check()\nexcept InvariantError as error:\n    print(error.invariant)\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "I-1\n"


def test_nobody_is_asked_for_guesses_while_the_executor_rests() -> None:
    """`StepResult.rest` steps without a question and without histories, unless fewer sequences run."""
    bench = Bench(speculates=True)
    bench.add("a", 6, max_tokens=20)
    bench.add("b", 6, max_tokens=6)
    requests = []
    while bench.scheduler.has_work():
        batch = bench.scheduler.schedule()
        requests.append(batch.asks)
        assert len(batch.histories) == (len(batch) if batch.asks else 0)
        result = bench.executor.run(batch)
        result.rest = 3 if batch.asks else 0
        bench.commit(batch, result)
    # The second ends in the sixth step; the first is asked about at once.
    assert requests == [i % 4 == 0 for i in range(6)] + [i % 4 == 0 for i in range(14)]
