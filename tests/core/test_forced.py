"""Tokens that need no forward pass, and what a sampler remembers beyond the tokens: how a step takes them in."""

import msgspec
import pytest
from tests.programs.sim.bench import EOS, Bench

from headrace.protocol.step import Finish, Request, RowResult, ScheduledBatch, StepOutput, StepResult


def forced_step(bench, forced, token=None, **more):
    """One step in which `forced` follow the token of the only chunk."""
    batch = bench.scheduler.schedule()
    bench.scheduler.check()
    result = bench.executor.run(batch)
    result.row(0).forced = list(forced)
    if token is not None:
        result.token_ids[0] = token
    for name, value in more.items():
        setattr(result.row(0), name, value)
    bench.commit(batch, result)
    return batch


def test_forced_tokens_are_known_at_once_and_computed_in_the_next_step():
    bench = Bench()
    seq, expected = bench.add("a", 6, max_tokens=8)
    forced_step(bench, [11, 12, 13])
    assert bench.tokens == {"a": [expected[0], 11, 12, 13]}
    assert bench.scheduler.stats().num_generated_tokens == 4
    assert bench.step() == {"a": (6, 4)}
    assert bench.step() == {"a": (10, 1)}
    bench.drain()
    assert bench.tokens["a"][:4] == [expected[0], 11, 12, 13]
    assert len(bench.tokens["a"]) == 8
    assert seq.tokens[:6] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("params", "forced", "remaining", "finish"),
    [
        ({"max_tokens": 3}, [11, 12, 13, 14], [11, 12], Finish("length")),
        ({"max_tokens": 3}, [11, 12], [11, 12], Finish("length")),
        ({"max_tokens": 1}, [11], [], Finish("length")),
        ({}, [11, EOS, 13], [11, EOS], Finish("stop")),
        ({"ignore_eos": True}, [11, EOS, 13], [11, EOS, 13], None),
        ({"min_tokens": 4}, [11, EOS, EOS, EOS], [11, EOS, EOS], Finish("stop")),
        ({"stop_token_ids": [12]}, [11, 12, 13], [11, 12], Finish("stop", stop_reason=12)),
        ({"max_tokens": 3, "stop_token_ids": [12]}, [11, 12], [11, 12], Finish("stop", stop_reason=12)),
        ({"stop_token_ids": [7]}, [11], [11], None),
    ],
)
def test_each_forced_token_is_under_the_rules_of_an_end_and_the_rest_is_dropped(params, forced, remaining, finish):
    bench = Bench()
    bench.add("a", 6, **{"max_tokens": 30, **params})
    forced_step(bench, forced, token=9)
    assert bench.tokens == {"a": [9, *remaining]}
    assert bench.finished.get("a") == finish
    assert bench.scheduler.stats().num_generated_tokens == 1 + len(remaining)


def test_nothing_follows_a_token_that_ends_the_answer():
    bench = Bench()
    bench.add("a", 6, max_tokens=8)
    forced_step(bench, [11, 12], token=EOS)
    assert (bench.tokens, bench.finished) == ({"a": [EOS]}, {"a": Finish("stop")})


def test_an_abort_or_a_failure_in_flight_drops_the_forced_tokens_too():
    bench = Bench()
    bench.add("a", 6)
    bench.add("b", [7, 8, 9])
    batch = bench.scheduler.schedule()
    result = bench.executor.run(batch)
    result.rows = {0: RowResult(forced=[11], state=1.5), 1: RowResult(forced=[12], state=2.5, error="simulated")}
    bench.scheduler.abort("a")
    bench.commit(batch, result)
    assert (bench.tokens, bench.output.states) == ({}, {})
    assert {name: finish.reason for name, finish in bench.finished.items()} == {"a": "abort", "b": "error"}


def test_a_preemption_before_the_forced_tokens_were_computed_loses_nothing():
    bench = Bench(enable_prefix_caching=False)
    bench.add("a", 6, max_tokens=8)
    forced_step(bench, [11, 12, 13])
    assert bench.scheduler.preempt("a")
    assert bench.step() == {"a": (0, 10)}
    assert len(bench.tokens["a"]) == 5


def test_only_computed_blocks_are_published():
    bench = Bench()
    seq, _ = bench.add("a", 6, max_tokens=20)
    forced_step(bench, range(11, 17))
    assert (seq.num_computed, len(seq.tokens), len(bench.scheduler.cache)) == (6, 13, 1)
    bench.step()
    assert (seq.num_computed, len(bench.scheduler.cache)) == (13, 3)
    bench.drain()
    bench.add("again", seq.tokens[:13], max_tokens=1)
    bench.drain()
    assert bench.started["again"] == 12


def test_a_wide_gap_that_was_forced_is_cut_even_where_prompts_are_not():
    bench = Bench(max_num_batched_tokens=16, max_model_len=16, max_num_seqs=2, enable_chunked_prefill=False)
    bench.add("long", 2, max_tokens=14, ignore_eos=True)
    forced_step(bench, range(11, 21))
    bench.scheduler.chunk_limit = 4
    assert [bench.step()["long"] for _ in range(3)] == [(2, 4), (6, 4), (10, 3)]


def test_a_request_resumed_in_the_middle_of_forced_tokens_computes_them():
    bench = Bench()
    bench.add("a", 6, max_tokens=8, resume_token_ids=[9, 11], resume_state=2.5)
    batch = bench.scheduler.schedule()
    assert (batch.lens, batch.samples, batch.states) == ([8], [True], {0: 2.5})


def test_a_state_is_handed_back_told_and_outlives_a_preemption():
    bench = Bench()
    seq, _ = bench.add("a", 6, max_tokens=8)
    bench.add("plain", [7, 8], max_tokens=8)
    batch = forced_step(bench, [], state=4.5)
    assert (batch.states, bench.output.states, seq.state) == ({}, {"a": 4.5}, 4.5)
    bench.scheduler.preempt("a")
    batch = bench.scheduler.schedule()
    # By chunk: the preempted one now comes after the one that has a single token to compute.
    assert (batch.seq_ids, batch.states) == ([2, 1], {1: 4.5})


def test_chunks_that_sample_nothing_have_neither_history_nor_state():
    bench = Bench(max_num_batched_tokens=4)
    seq, _ = bench.add("a", 6, no_repeat_ngram_size=2, resume_state=1.0)
    bench.add("plain", [7])
    batch = bench.scheduler.schedule()
    assert (batch.samples, batch.histories, batch.states) == ([False], {}, {})
    bench.commit(batch, bench.executor.run(batch))
    batch = bench.scheduler.schedule()
    assert (batch.samples, batch.histories, batch.states) == ([True, True], {0: [1, 2, 3, 4, 5, 6]}, {0: 1.0})
    assert batch.histories[0] is seq.tokens


@pytest.mark.parametrize(
    "struct",
    [
        Request(request_id="a", prompt_token_ids=[1], params=Bench().add("x", 1)[0].params, resume_state=0.1),
        StepResult(step_id=1, token_ids=[3], rows={0: RowResult(forced=[4, 5], state=0.1)}),
        StepOutput(step_id=1, states={"a": 0.1}),
        ScheduledBatch(
            step_id=1, seq_ids=[1], starts=[0], lens=[1], token_ids=[1], block_tables=[[0]], samples=[True], params=[],
            num_prompts=[1], copies=[], histories={0: [1]}, states={0: 0.1},
        ),
    ],
)  # fmt: skip
def test_the_wire_carries_them(struct):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(struct), type=type(struct)) == struct
