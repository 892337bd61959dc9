"""The tree of the prefix cache: runs of blocks, their hits, and a bound on what is visited."""

from __future__ import annotations

from tests.support import fake

from headrace.engine import orders
from headrace.engine.cache_tree import CacheTree, ReadCache, read
from headrace.engine.core import EngineCore
from headrace.engine.holding import Hold
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request

SHARED = list(range(64))
MANY = ReadCache(1000)


def run(core: EngineCore, name: str, prompt: list[int]) -> None:
    params = SamplingParams(max_tokens=1, ignore_eos=True, seed=1)
    core.add(Request(request_id=name, prompt_token_ids=prompt, params=params))
    core.scheduler.cache.now += 1
    while core.has_work():
        core.step()


def engine(**config: int) -> EngineCore:
    return fake.build(EngineConfig(model="fake", block_size=16, **config))


def test_runs_are_merged_and_hits_are_summed_from_the_leaves() -> None:
    core = engine()
    for name, rest in (("a", [200] * 32), ("b", [201] * 16), ("c", [201] * 16)):
        run(core, name, [*SHARED, *rest, 7])
    tree = read(core.scheduler, MANY)
    assert (tree.num_blocks, tree.num_cached) == (7, 7)
    shared, *leaves = tree.nodes
    assert (shared.parent, shared.num_tokens, shared.token_ids) == (-1, 64, SHARED[:24])
    # b ended its lookup after the shared tokens, c after the others, too.
    assert (shared.hits, shared.last_use, shared.is_held) == (2, 3, False)
    by_token = {leaf.token_ids[0]: leaf for leaf in leaves}
    assert {token: (leaf.parent, leaf.num_tokens, leaf.hits) for token, leaf in by_token.items()} == {
        200: (shared.id, 32, 0),
        201: (shared.id, 16, 1),
    }


def test_the_hits_of_an_evicted_block_are_its_parents_and_a_reset_forgets_all() -> None:
    core = engine(num_gpu_blocks_override=7, max_model_len=112)
    for name in "ab":
        run(core, name, [*SHARED, *[200] * 17])
    run(core, "c", [*SHARED, 9, *range(100, 140)])
    nodes = read(core.scheduler, MANY).nodes
    # The block that b hit gave way to those of c.
    assert [node.token_ids[0] for node in nodes] == [0, 9]
    assert nodes[0].hits == 2
    run(core, "d", list(range(150, 250)))
    assert core.scheduler.cache.hits.keys() <= core.scheduler.cache.entries.keys()
    core.reset_prefix_cache()
    assert read(core.scheduler, MANY).nodes == []
    assert core.scheduler.cache.hits == {}


def test_a_bounded_number_of_blocks_is_visited_and_parents_come_first() -> None:
    core = engine()
    for i in range(20):
        run(core, f"r{i}", [*SHARED, *[100 + i] * 40])
    for num in (1, 3, 5, 17, 1000):
        tree = read(core.scheduler, ReadCache(num))
        assert tree.num_blocks == min(num, 44)
        assert sum(node.num_tokens for node in tree.nodes) == 16 * tree.num_blocks
        assert all(-1 <= node.parent < node.id for node in tree.nodes)
        assert [node.parent for node in tree.nodes].count(-1) == 1


def test_the_blocks_of_a_running_request_are_in_it() -> None:
    core = engine()
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
    core.add(Request(request_id="a", prompt_token_ids=[*SHARED, 1], params=params))
    core.step()
    [node] = orders_result(core).nodes
    assert (node.num_tokens, node.is_held) == (64, True)


def orders_result(core: EngineCore) -> CacheTree:
    import msgspec

    return msgspec.msgpack.decode(orders.carry_out(core, MANY, Hold()), type=CacheTree)
