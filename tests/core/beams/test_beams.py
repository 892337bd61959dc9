"""Beam search in the core: the rules against a plain search, and what its sequences hold."""

import random

import pytest
from tests.programs.sim.bench import EOS, Bench
from tests.programs.sim.plain_beams import plain_beams

from headrace.core.beams.rules import BeamSearch
from headrace.protocol.beam import BeamSearchParams, check_combination
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Finish

VOCAB = 12


def tops_of(seed, peaked=1.0):
    """A "model": log-probabilities that are a function of the tokens so far."""

    def tops(token_ids):
        noise = random.Random(f"{seed} {token_ids}")
        result = [(token, -peaked * noise.expovariate(1.0)) for token in range(VOCAB)]
        return sorted(result, key=lambda pair: (-pair[1], pair[0]))

    return tops


def search(tops, params, stop_ids, max_tokens):
    """`BeamSearch` on lists, with no more candidates than it asks for."""
    rules = BeamSearch(params, stop_ids, max_tokens)
    live = [[-7]]
    num = params.num_candidates(len(stop_ids))
    while not rules.finished:
        children = rules.advance([tops(ids[1:])[:num] for ids in live], live, 1)
        live = [[*live[child.parent], child.token_id] for child in children]
    return [(ended.score, ended.total, ended.token_ids) for ended in rules.answers()]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.5, -1.0])
def test_the_rules_are_those_of_a_plain_search(early_stopping, length_penalty):
    for seed in range(40):
        groups = random.Random(seed).choice([1, 1, 2, 3])
        width = groups * random.Random(seed + 1).choice([1, 2, 3])
        params = BeamSearchParams(
            beam_width=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            num_beam_groups=groups,
            diversity_penalty=0.7 if groups > 1 else 0.0,
            n=random.Random(seed + 2).choice([None, 1]),
        )
        stop_ids = frozenset(random.Random(seed + 3).choice([(), (0,), (0, 5)]))
        tops = tops_of(seed, random.Random(seed).choice([0.3, 1.0, 3.0]))
        assert search(tops, params, stop_ids, 9) == plain_beams(tops, params, stop_ids, 9)


def test_modes_and_penalties_do_make_a_difference():
    tops, stop_ids = tops_of(3, 0.5), frozenset((0, 5))
    result = {
        str(search(tops, BeamSearchParams(beam_width=3, **more), stop_ids, 9))
        for more in (
            {},
            {"early_stopping": True},
            {"length_penalty": 3.0},
            {"length_penalty": -2.0},
            {"length_penalty": 3.0, "early_stopping": "never"},
            {"num_beam_groups": 3, "diversity_penalty": 1.0},
        )
    }
    assert len(result) >= 5


def test_one_beam_is_greedy():
    tops, ids = tops_of(1), []
    for _ in range(6):
        ids.append(tops(ids)[0][0])
    (answer,) = search(tops, BeamSearchParams(beam_width=1), frozenset(), 6)
    assert answer[2] == ids


def test_groups_that_pay_for_likeness_differ_from_one_another():
    # The likeliest token is the same after every beginning, so that beams without a penalty all take it.
    tops = lambda ids: [(token, -0.1 * token) for token in range(VOCAB)]  # noqa: E731
    alike = search(tops, BeamSearchParams(beam_width=3, num_beam_groups=3), frozenset(), 4)
    params = BeamSearchParams(beam_width=3, num_beam_groups=3, diversity_penalty=5.0)
    apart = search(tops, params, frozenset(), 4)
    assert [answer[2] for answer in alike] == [[0, 0, 0, 0]] * 3
    assert sorted(answer[2] for answer in apart) == [[0] * 4, [1] * 4, [2] * 4]
    # The score has paid; the sum of the log-probabilities has not.
    assert all(score == pytest.approx(total / 4) for score, total, _ in apart)


@pytest.mark.parametrize(
    ("field", "inputs"),
    [
        ("beam_width", {"beam_width": 0}),
        ("beam_width", {"beam_width": 65}),
        ("n", {"n": 5}),
        ("num_beam_groups", {"num_beam_groups": 3}),
        ("diversity_penalty", {"diversity_penalty": 1.0}),
        ("early_stopping", {"early_stopping": "sometimes"}),
        ("length_penalty", {"length_penalty": float("nan")}),
        ("temperature", {"temperature": 0.7}),
        ("max_tokens", {"max_tokens": 0}),
        ("stop_token_ids", {"stop_token_ids": [-1]}),
    ],
)
def test_parameters_that_can_not_be_are_refused_by_name(field, inputs):
    with pytest.raises(RequestError) as refused:
        BeamSearchParams(**{"beam_width": 4, **inputs})
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2), ("logprobs", 1), ("prompt_logprobs", 1), ("top_k", 5), ("top_p", 0.5), ("min_tokens", 2),
        ("stop", "x"), ("temperature", 0.5), ("logit_bias", {3: 1.0}), ("best_of", 2), ("mirostat", 2),
        ("watermark", True), ("trace_decode_token_ids", [3]),
        ("structured_outputs", {"regex": "a"}), ("repetition_penalty", 1.5),
    ],
)  # fmt: skip
def test_what_has_no_meaning_in_a_search_is_refused_by_name(field, value):
    check_combination(SamplingParams(temperature=0.0, seed=3, max_tokens=5, ignore_eos=True))
    with pytest.raises(RequestError) as refused:
        check_combination(SamplingParams(**{field: value}))
    assert refused.value.field == field


# -- in the scheduler ----------------------------------------------------------------------------------------------


def beams(bench, name, prompt, width, max_tokens, **more):
    return bench.add(
        name, prompt, beam=BeamSearchParams(beam_width=width, **more), max_tokens=max_tokens, ignore_eos=True
    )[0]


def test_all_beams_advance_in_one_step_and_come_in_one_result():
    bench = Bench()
    beams(bench, "a", 6, 3, 4)
    assert [list(bench.step().values()) for _ in range(1)] == [[(0, 6)]]
    for position in (6, 7, 8):
        batch = bench.scheduler.schedule()
        bench.scheduler.check()
        assert (batch.starts, batch.lens) == ([position] * 3, [1] * 3)
        bench.commit(batch, bench.executor.run(batch))
    result = bench.output.beams["a"]
    assert [len(beam.token_ids) for beam in result.beams] == [4, 4, 4]
    assert [beam.finish for beam in result.beams] == [Finish("length")] * 3
    assert result.beams == sorted(result.beams, key=lambda beam: -beam.score)
    assert (bench.finished, bench.tokens) == ({"a": Finish("length")}, {})
    assert bench.scheduler.stats().num_generated_tokens == 12
    assert not bench.scheduler.has_work()


def test_beams_share_the_prompt_and_copy_only_the_block_that_they_write():
    bench = Bench(num_blocks=64, enable_prefix_caching=False)
    beams(bench, "a", 18, 4, 5)
    bench.step()
    assert bench.scheduler.stats().num_blocks_held == 5
    batch = bench.scheduler.schedule()
    # Four whole blocks are shared; the fifth is half full: one beam keeps it, three have a copy.
    stats = bench.scheduler.stats()
    assert (stats.num_blocks_held, stats.num_beam_blocks, stats.num_beam_blocks_unshared) == (8, 8, 20)
    assert len(batch.copies) == 3
    bench.commit(batch, bench.executor.run(batch))
    while bench.scheduler.has_work():
        bench.step()
    result = bench.output.beams["a"]
    assert (result.num_blocks, result.num_blocks_unshared) >= (8, 20)
    assert bench.scheduler.stats().num_blocks_held == 0


def test_a_search_too_wide_for_the_pool_or_the_step_is_refused_and_leaves_nothing():
    bench = Bench(num_blocks=10, max_model_len=41)
    with pytest.raises(RequestError, match=r"beam_width.*13 blocks") as refused:
        beams(bench, "a", 4, 4, 12)
    assert refused.value.field == "beam_width"
    with pytest.raises(RequestError, match="max-num-seqs"):
        beams(bench, "a", 4, 9, 2)
    with pytest.raises(RequestError, match="resume_token_ids"):
        bench.add("a", 4, beam=BeamSearchParams(beam_width=2), resume_token_ids=[3])
    assert not bench.scheduler.has_work()
    assert not bench.scheduler.searches.open
    beams(bench, "a", 4, 3, 12)
    bench.drain()


def test_a_search_waits_until_all_of_its_beams_may_run():
    bench = Bench(max_num_seqs=4)
    bench.add("first", 4, max_tokens=3)
    bench.add("second", 4, max_tokens=30)
    beams(bench, "wide", 4, 3, 6)
    bench.add("behind", 4, max_tokens=2)
    # Strictly in order: the search needs three places, and nobody passes it by.
    assert list(bench.step()) == ["first", "second"]
    while "first" not in bench.finished:
        bench.step()
    assert list(bench.step()) == ["second", "wide"]
    bench.step()
    bench.drain()
    assert len(bench.finished) == 4


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("turn", range(1, 8))
def test_a_preempted_search_goes_on_as_if_nothing_had_been(turn, caching):
    def run(preempt):
        bench = Bench(max_num_batched_tokens=9, enable_prefix_caching=caching)
        beams(bench, "a", 10, 4, 9)
        result = {}
        for step in range(200):
            if not bench.scheduler.has_work():
                break
            bench.step()
            result.update(bench.output.beams)
            if preempt and step == turn and "a" not in result:
                assert bench.scheduler.preempt("a")
                bench.scheduler.check()
                assert bench.scheduler.stats().num_blocks_held == 0
        return [(beam.token_ids, beam.score) for beam in result["a"].beams], bench.scheduler.stats().num_preemptions

    whole, _ = run(preempt=False)
    again, num_preemptions = run(preempt=True)
    assert (again, num_preemptions) == (whole, 1)


def test_an_abort_in_flight_and_a_failed_beam_end_the_whole_search():
    bench = Bench()
    beams(bench, "aborted", 6, 3, 9)
    beams(bench, "failed", [9, 8, 7], 3, 9)
    bench.step()
    bench.step()
    batch = bench.scheduler.schedule()
    names = [seq.request_id for seq in bench.scheduler.flight]
    assert sorted(names) == ["aborted"] * 3 + ["failed"] * 3
    assert bench.scheduler.abort("aborted")
    bench.scheduler.check()
    result = bench.executor.run(batch)
    result.row(names.index("failed")).error = "simulated"
    bench.commit(batch, result)
    assert {name: finish.reason for name, finish in bench.finished.items()} == {"aborted": "abort", "failed": "error"}
    assert not bench.scheduler.has_work()
    assert bench.scheduler.stats().num_blocks_held == 0


def test_answers_that_stop_say_so():
    bench = Bench()
    bench.oracle.vocab_size = 6
    bench.add("a", 3, beam=BeamSearchParams(beam_width=2, length_penalty=-4.0), max_tokens=20, stop_token_ids=[2])
    while bench.scheduler.has_work():
        bench.step()
    for beam in bench.output.beams["a"].beams:
        last = beam.token_ids[-1]
        response = {EOS: Finish("stop"), 2: Finish("stop", stop_reason=2)}.get(last, Finish("length"))
        assert beam.finish == response
    assert bench.finished["a"] == bench.output.beams["a"].beams[0].finish
    assert bench.finished["a"].reason == "stop"


def test_a_step_that_raised_is_taken_back_with_its_copies():
    bench = Bench(enable_prefix_caching=False)
    beams(bench, "a", 6, 3, 6)
    bench.step()
    bench.scheduler.schedule()
    bench.scheduler.retract()
    bench.scheduler.check()
    assert bench.scheduler.stats().num_blocks_held == 0
    bench.drain()
    assert bench.finished["a"] == Finish("length")


def test_a_late_sampler_costs_a_step_and_no_block():
    bench = Bench(num_blocks=4, max_model_len=16)
    late = {(2, 0)}
    bench.executor.behaviour = bench.executor.behaviour._replace(defer=lambda step_id, index: (step_id, index) in late)
    _, expected = bench.add("a", 8, max_tokens=4)
    bench.step()
    assert bench.step() == {"a": (8, 1)}
    assert bench.scheduler.stats().num_blocks_held == 2
    assert bench.step() == {"a": (8, 1)}
    bench.drain()
    assert bench.tokens["a"] == expected
