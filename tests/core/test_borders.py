"""Numbers at their borders: what one less or more would do. Found by changing them (tests/campaigns/mutation.py)."""

from __future__ import annotations

import itertools
from array import array
from functools import partial
from typing import Any

import msgspec
import pytest
from tests.programs.sim.bench import Bench

from headrace.core.blocks import BlockPool
from headrace.core.prefix import MAX_CANDIDATES, PrefixCache
from headrace.core.queue import ANSWER, MAX_TENANTS, Ranks, WaitingQueue
from headrace.core.sequence import Sequence
from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.errors import ContextLengthError, HeadraceError, InvariantError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Draft, Finish, Request, RowResult, StepResult


@pytest.mark.parametrize(
    ("field", "least"),
    [
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 1),
        ("max_overtaking", 1),
        ("max_model_len", 2),
        ("long_prefill_token_threshold", 0),
    ],
)
def test_the_least_number_works_and_one_less_does_not(field: str, least: int) -> None:
    Bench(**{field: least})
    with pytest.raises(ValueError, match=f"{field} must be at least {least}, got {least - 1}"):
        Bench(**{field: least - 1})


def test_without_chunks_a_step_holds_the_longest_prompt() -> None:
    Bench(enable_chunked_prefill=False, max_num_batched_tokens=64, max_model_len=64)
    with pytest.raises(ValueError, match="63"):
        Bench(enable_chunked_prefill=False, max_num_batched_tokens=63, max_model_len=64)


def test_what_is_refused_says_what_there_is_room_for() -> None:
    bench = Bench(max_model_len=12)
    with pytest.raises(ContextLengthError, match="at most 11 tokens"):
        bench.add("a", 12)
    with pytest.raises(RequestError, match="at most 3 tokens"):
        bench.add("a", 4, max_tokens=3, resume_token_ids=[5] * 4)
    with pytest.raises(RequestError, match="at most 2 tokens"):
        bench.add("a", 10, max_tokens=None, resume_token_ids=[5] * 3)


def pooled(bench: Bench, values: list[float]) -> dict[int, Any]:
    """One step, in which all that is wanted is `values`. Returns what the batch said of it."""
    batch = bench.scheduler.schedule()
    assert batch.samples == [False] * len(batch)
    rows = {i: RowResult(pooled=values) for i in batch.pooling}
    bench.commit(batch, StepResult(step_id=batch.step_id, token_ids=[-1] * len(batch), rows=rows))
    return batch.pooling


def test_a_mean_is_carried_from_chunk_to_chunk_and_told_once() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.add("a", 10, pooling="mean")
    assert pooled(bench, [1.0]) == {0: ("mean", [])}
    assert pooled(bench, [2.0]) == {0: ("mean", [1.0])}
    assert (bench.output.pooled, bench.finished) == ({}, {})
    bench.scheduler.preempt("a")
    assert pooled(bench, [4.0]) == {0: ("mean", [])}
    pooled(bench, [5.0])
    assert pooled(bench, [6.0]) == {0: ("mean", [5.0])}
    assert (bench.output.pooled, bench.finished) == ({"a": [6.0]}, {"a": Finish("stop")})


def test_the_last_row_is_wanted_of_the_last_chunk_alone() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.add("a", 6, pooling="last")
    assert pooled(bench, [1.0]) == {}
    assert pooled(bench, [2.0]) == {0: ("last", [])}
    assert (bench.output.pooled, bench.finished) == ({"a": [2.0]}, {"a": Finish("stop")})


def test_S_23_keys_are_of_32_bytes_and_their_parts_do_not_run_together() -> None:
    cache = PrefixCache(BlockPool(1, 2), b"key", b"model")
    root, child = cache.root("salt"), cache.child_key(cache.root("salt"), b"content")
    assert len(root) == len(child) == len(cache.family_key(root, "g", [1])) == 32
    assert cache.root("salt") != PrefixCache(cache.pool, b"key", b"tmodel").root("sal")
    assert cache.family_key(root, "g", [1]) != PrefixCache(cache.pool, b"other").family_key(root, "g", [1])
    assert child != PrefixCache(cache.pool, b"other").child_key(cache.root("salt"), b"content")


def test_of_children_with_one_first_token_the_eight_newest_are_looked_at() -> None:
    pool = BlockPool(16, 2)
    cache = PrefixCache(pool)
    for token in range(MAX_CANDIDATES + 2):
        cache.publish([1, token], [cache.root("")], pool.allocate(1) or [], 0, 1)
    result = [cache.match([1, token, 5], [cache.root("")], 2)[1] for token in range(MAX_CANDIDATES + 2)]
    assert result == [2] * len(result), "whole blocks are found by their keys"
    pool = BlockPool(16, 3)
    cache = PrefixCache(pool)
    for token in range(MAX_CANDIDATES + 2):
        cache.publish([1, token, 9], [cache.root("")], pool.allocate(1) or [], 0, 1)
    result = [cache.match([1, token, 5], [cache.root("")], 2)[1] for token in range(MAX_CANDIDATES + 2)]
    assert (MAX_CANDIDATES, result) == (8, [1, 1, *[2] * 8])


def test_of_children_that_agree_alike_the_newest_is_taken() -> None:
    pool = BlockPool(4, 3)
    cache = PrefixCache(pool)
    for token in (7, 8):
        cache.publish([1, 2, token], [cache.root("")], pool.allocate(1) or [], 0, 1)
    blocks, num = cache.match([1, 2, 5], [cache.root("")], 2)
    assert num == 2
    assert cache.entries[blocks[0]].content == array("q", [1, 2, 8]).tobytes()


def request(tenant: str = "a", num_prompt: int = 3, max_tokens: int | None = None, work: int = 0) -> Request:
    params = SamplingParams(seed=1, max_tokens=max_tokens)
    return Request(request_id="x", prompt_token_ids=[1] * num_prompt, params=params, tenant=tenant, work=work)


@pytest.mark.parametrize(
    ("inputs", "work"),
    [({}, 259), ({"max_tokens": 5}, 8), ({"max_tokens": 999, "num_prompt": 300}, 556), ({"work": 7}, 7)],
)
def test_the_work_of_a_request_is_what_is_told_or_its_prompt_and_256_tokens_at_most(
    inputs: dict[str, int], work: int
) -> None:
    ranks = Ranks("fair")
    assert ANSWER == 256
    assert ranks.rank(request(**inputs), float("inf")) == 0
    assert ranks.rank(request(), 0.0) == work


def test_a_newcomer_begins_where_the_least_that_waits_is() -> None:
    ranks = Ranks("fair")
    ranks.rank(request("a", work=10), float("inf"))
    assert ranks.rank(request("b", work=10), 4.0) == 4
    # One that was overtaken too often has the rank of minus infinity, which turns no clock back.
    assert ranks.rank(request("c", work=10), float("-inf")) == 4
    # Nobody waits: all begin where the last was to end.
    assert ranks.rank(request("d"), float("inf")) == 14


def test_tenants_are_forgotten_from_4096_on_if_their_time_is_over() -> None:
    ranks = Ranks("fair")
    for number in range(MAX_TENANTS):
        ranks.rank(request(f"t{number}", work=1 + number % 2), 0.0)
    assert (MAX_TENANTS, len(ranks._ends)) == (4096, 4096)
    ranks.rank(request("one more", work=1), 1.0)
    assert len(ranks._ends) == 2048 + 1, "those whose time is not over keep their debts"


def test_who_is_overtaken_so_often_goes_first_and_is_not_counted_on() -> None:
    queue = WaitingQueue(2)
    bench = Bench()
    seqs = [bench.add(name, 4)[0] for name in "abc"]
    for seq, rank in zip(seqs, (3.0, 2.0, 1.0), strict=True):
        seq.rank = rank
        queue.add(seq)
    assert queue.least_rank == 1

    def passing(seq: Sequence) -> bool:
        return seq is seqs[1]

    assert not queue.count_overtaking(seqs[2], passing)
    assert queue.count_overtaking(seqs[2], passing)
    assert [seq.num_overtaken for seq in seqs] == [2, 0, 0]
    assert [queue[place] for place in range(3)] == [seqs[0], seqs[2], seqs[1]]
    assert not queue.count_overtaking(seqs[2], passing)
    queue.remove(seqs[2])
    assert (len(queue), queue.least_rank) == (2, float("-inf"))
    for seq in (seqs[0], seqs[1]):
        queue.remove(seq)
    assert queue.least_rank == float("inf")


def test_allocations_are_counted_and_a_failure_is_remembered() -> None:
    pool = BlockPool(4, 2)
    assert (pool.num_allocations, pool.has_failed) == (0, False)
    pool.fail_at = 2
    assert pool.allocate(1) == [0]
    assert not pool.has_failed
    assert pool.allocate(1) is None
    assert (pool.num_allocations, pool.has_failed) == (2, True)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(1) is None


def test_I_3_a_cached_block_in_both_lists_is_found() -> None:
    pool = BlockPool(2, 2)
    table = pool.allocate(1) or []
    pool.mark_cached(table[0])
    pool.release(table)
    pool.check([])
    pool.free[0] = table[0]
    with pytest.raises(InvariantError, match="I-3"):
        pool.check([])


def test_I_3_a_block_twice_in_the_free_list_is_called_so() -> None:
    pool = BlockPool(4, 2)
    pool.free[0] = pool.free[1]
    with pytest.raises(InvariantError, match="I-3: a block is twice in the free list"):
        pool.check([])


def test_K13_prompt_tokens_are_counted_as_their_chunks_are_computed() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=8)
    seen = [bench.scheduler.stats().num_prompt_tokens]

    def run(request_id: str, prompt: list[int]) -> list[int]:
        """Tokens counted in each step of a prompt."""
        bench.add(request_id, prompt, max_tokens=2)
        while bench.scheduler.has_work():
            bench.step()
            seen.append(bench.scheduler.stats().num_prompt_tokens)
        counts = [after - before for before, after in itertools.pairwise(seen)]
        del seen[:-1]
        return [count for count in counts if count]

    prompt = [1 + number % 7 for number in range(20)]
    # The cache has whole blocks of the second one: they are not computed again, and not counted.
    assert run("a", prompt) == [8, 8, 4]
    assert run("b", prompt) == [20 - bench.scheduler.stats().prefix_cache_hits]
    # The last token of a chunk and one counts with the chunk.
    assert run("c", [9] * 17) == [8, 9]
    assert run("d", [8]) == [1]


def test_steps_tokens_and_hits_are_counted() -> None:
    bench = Bench(num_blocks=8, max_num_batched_tokens=8)
    bench.add("a", 10, max_tokens=3)
    bench.step()
    bench.scheduler.preempt("a")
    bench.drain()
    stats = bench.scheduler.stats()
    # Eight rows and their two published blocks outlive the preemption; nothing is computed twice.
    assert (stats.num_steps, stats.num_preemptions, stats.num_recomputed_tokens) == (4, 1, 0)
    assert (stats.num_batched_tokens, stats.num_prompt_tokens, stats.num_generated_tokens) == (12, 10, 3)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (10, 0)
    bench.add("b", [1, 2, 3, 4, 5, 6, 7, 7], max_tokens=1)
    bench.drain()
    stats = bench.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18, 7)
    assert bench.scheduler.num_added == bench.scheduler.num_finished == 2


def test_what_is_computed_again_is_counted_once() -> None:
    bench = Bench(max_num_batched_tokens=4, enable_prefix_caching=False)
    bench.add("a", 10, max_tokens=2)
    for _ in range(2):
        bench.step()
    bench.scheduler.preempt("a")
    bench.drain()
    stats = bench.scheduler.stats()
    assert (stats.num_recomputed_tokens, stats.num_batched_tokens) == (8, 19)


def test_blocks_are_published_when_they_are_full_and_not_looked_at_before() -> None:
    bench = Bench()
    seq, _ = bench.add("a", 9, max_tokens=20)
    bench.step()
    assert (seq.num_published, seq.publish_at) == (2, 12)
    for _ in range(3):
        bench.step()
    assert (seq.num_published, seq.publish_at) == (3, 16)
    other, _ = bench.add("b", [1, 2, 3, 4, 5, 6], max_tokens=20)
    bench.scheduler.schedule()
    assert (other.num_computed, other.num_published, other.publish_at) == (5, 1, 8)


def test_kept_guesses_are_computed_and_the_token_after_them_is_not() -> None:
    bench = Bench(speculates=True)
    seq, _ = bench.add("a", 4, max_tokens=20)
    batch = bench.scheduler.schedule()
    bench.commit(batch, StepResult(step_id=batch.step_id, token_ids=[7], rows={0: RowResult(draft=Draft([8, 9, 10]))}))
    batch = bench.scheduler.schedule()
    assert batch.drafts[0].token_ids == [8, 9, 10]
    assert len(seq.block_table) == 2
    bench.commit(batch, StepResult(step_id=batch.step_id, token_ids=[8], rows={0: RowResult(further=[9, 11])}))
    assert (seq.tokens[4:], seq.num_computed, len(seq.block_table)) == ([7, 8, 9, 11], 7, 2)
    stats = bench.scheduler.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 3, 2)
    assert (stats.num_batched_tokens, stats.num_generated_tokens) == (8, 4)
    batch = bench.scheduler.schedule()
    assert (batch.starts, batch.lens, batch.token_ids) == ([7], [1], [11])


@pytest.mark.parametrize("speculates", [True, False])
def test_who_guesses_is_told_who_ended(speculates: bool) -> None:
    bench = Bench(speculates=speculates)
    seq, _ = bench.add("a", 4, max_tokens=1)
    bench.step()
    assert bench.scheduler.schedule().ended == ([seq.seq_id] if speculates else [])


def test_who_was_thrown_out_in_a_step_holds_up_nobody_behind() -> None:
    bench = Bench(num_blocks=6, policy="priority", long_prefill_token_threshold=1, enable_prefix_caching=False)
    bench.add("edge", 1, priority=-1, max_tokens=12, ignore_eos=True)
    bench.add("low", [9] * 12, priority=5, max_tokens=2)
    for _ in range(2):
        bench.step()
    bench.add("high", [8] * 8, priority=0, max_tokens=2)
    for _ in range(6):
        bench.step()
    assert [seq.request_id for seq in bench.scheduler.running] == ["edge", "low", "high"]
    # `edge` needs a block, and `low`, which was to compute before `high`, has to give it.
    assert bench.step() == {"edge": (8, 1), "high": (6, 1)}


def test_growing_into_what_is_held_asks_for_nothing() -> None:
    bench = Bench()
    seq, _ = bench.add("a", 4)
    bench.step()
    pool = bench.scheduler.pool
    seq.block_table += pool.allocate(2) or []
    before = pool.num_allocations
    assert bench.scheduler.tables.grow(seq, 1)
    assert (pool.num_allocations, len(seq.block_table)) == (before, 3)


def test_a_batch_that_looks_like_the_one_in_flight_is_refused() -> None:
    bench = Bench()
    bench.add("a", 4)
    batch = bench.scheduler.schedule()
    with pytest.raises(HeadraceError, match="commit"):
        bench.scheduler.commit(msgspec.structs.replace(batch), bench.executor.run(batch))


@pytest.mark.parametrize("budget", [3, 4])
def test_a_last_chunk_of_one_token_is_a_last_chunk(budget: int) -> None:
    bench = Bench(max_num_batched_tokens=budget)
    bench.add("a", budget + 1, pooling="last")
    assert pooled(bench, [1.0]) == {}
    assert pooled(bench, [2.0]) == {0: ("last", [])}


def test_who_is_protected_need_not_fit_beside_those_that_can_be_thrown_out() -> None:
    bench = Bench(num_blocks=8, max_model_len=33)
    bench.add("a", 4, max_tokens=24)
    b, _ = bench.add("b", [9] * 8, max_tokens=24)
    b.num_preemptions = 2
    assert bench.step() == {"a": (0, 4), "b": (0, 8)}


def test_what_protected_searches_and_sequences_claim_is_added_up() -> None:
    bench = Bench(num_blocks=60)
    alone, _ = bench.add("a", 8, max_tokens=25)
    search, _ = bench.add("b", [7] * 8, max_tokens=8, ignore_eos=True, beam=BeamSearchParams(beam_width=3))
    claims = partial(bench.scheduler.searches.claims, kind=bench.scheduler.tables.all_kinds[0])
    # Equal, so that to add them is neither to join their bits nor to take the larger.
    assert (claims([alone]), claims([search]), claims([search, alone])) == (8, 8, 16)


def test_a_step_that_raised_protects_nobody() -> None:
    bench = Bench()
    a, _ = bench.add("a", 4)
    for _ in range(3):
        bench.scheduler.schedule()
        bench.scheduler.retract()
    assert (a.num_preemptions, a.num_forced) == (0, 3)


def test_guesses_are_asked_for_by_how_many_sequences_a_step_has() -> None:
    bench = Bench(speculates=True)
    request, requests = bench.scheduler.drafts.request, []
    bench.scheduler.drafts.request = lambda num_seqs: (requests.append(num_seqs), request(num_seqs))[1]
    bench.add("a", 4)
    bench.step()
    bench.add("b", [9] * 4)
    assert len(bench.step()) == 2
    assert requests == [1, 2]


@pytest.mark.parametrize("other", [b"\x00" * 16, b"\xff" * 16])
def test_S_23_a_key_is_taken_by_any_other_content(other: bytes) -> None:
    pool = BlockPool(2, 2)
    cache = PrefixCache(pool, b"key")
    cache.child_key = lambda parent, content: b"k" * 32  # type: ignore[method-assign]
    root = cache.root("")
    for content, fits in ((other, True), (array("q", [5, 6]).tobytes(), False)):
        tokens = array("q", content).tolist()
        [block] = pool.allocate(1) or []
        assert cache.publish(tokens, [root], [block], 0, 1) is fits


def test_of_what_is_shared_only_the_blocks_that_are_shared_are_not_needed() -> None:
    bench = Bench(num_blocks=8, long_prefill_token_threshold=4)
    bench.add("a", 16, max_tokens=4)
    while bench.scheduler.pool.num_available != 3:
        bench.step()
    bench.add("b", [1, 2, 3, 4, *range(50, 64)], max_tokens=1)  # five blocks, of which one is shared
    assert list(bench.step()) == ["a"]
    bench.drain()
    assert bench.scheduler.stats().num_preemptions == 0


def test_room_is_kept_for_beams_that_are_to_come_and_for_no_more() -> None:
    bench = Bench(max_num_seqs=8, long_prefill_token_threshold=4)
    bench.add("a", 8, max_tokens=4, ignore_eos=True, beam=BeamSearchParams(beam_width=3))
    bench.step()
    for name in "bcdefg":
        bench.add(name, [ord(name)] * 2, max_tokens=9, ignore_eos=True)
    assert list(bench.step()) == ["a", "b", "c", "d", "e", "f"]
