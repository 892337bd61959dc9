"""The law with the drafters that have a model, each by its flag: chains and trees, in company, with preemption and a
prefix cache, with every kind of parameters. And rejection sampling with each, which keeps a part of what they guess."""

import msgspec
import pytest
from tests.drafters.play import resized_drafter
from tests.e2e.test_law_speculation import varied
from tests.support.law import assert_same, groups_of, make_core, make_requests, run, run_alone

DRAFTERS = {
    "draft_model": {"method": "draft_model"},
    "draft_model, trees": {"method": "draft_model", "num_tree_nodes": 9},
    "early_exit, trees": {"method": "early_exit", "exit_layer": 2, "num_tree_nodes": 9},
    "eagle": {"method": "eagle3"},
    "eagle, trees": {"method": "eagle", "num_tree_nodes": 9},
    "mtp, trees": {"method": "mtp", "num_tree_nodes": 9},
    "medusa, trees": {"method": "medusa", "num_tree_nodes": 9},
}


@pytest.fixture(scope="module")
def requests():
    result = make_requests()
    chosen = [msgspec.structs.replace(r, params=varied(r.params, i)) for i, r in enumerate(result)]
    # Some of each kind: prompts short and long, greedy and not.
    outcome = [request for i, request in enumerate(chosen) if i % 7 in (0, 3)][:30]
    for i in range(0, 30, 6):
        # Two answers to one prompt (n > 1): the second forks the first one's blocks.
        outcome[i] = msgspec.structs.replace(outcome[i], group=f"n{i}")
        common = {"group": f"n{i}", "prompt_token_ids": outcome[i].prompt_token_ids}
        outcome[i + 1] = msgspec.structs.replace(outcome[i + 1], **common)
    return outcome


@pytest.fixture(scope="module")
def reference(requests):
    return run_alone(requests, model="builtin")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", DRAFTERS)
def test_guesses_of_a_model_change_nothing(requests, reference, name):
    core = make_core(
        model="builtin", speculative_config={**DRAFTERS[name], "adaptive": False}, num_gpu_blocks_override=192
    )
    result = {}
    for group in groups_of(requests, 12):
        result |= run(core, group, preempt_every=7)
    assert_same(result, reference)
    stats = core.stats()
    core.close()
    assert stats.num_preemptions > 0
    assert stats.num_draft_tokens > 300
    assert stats.num_accepted_tokens > 0


@pytest.mark.parametrize(("size", "nodes"), [(1024, 4), (1024, 9), (2112, 9)])
def test_a_vocabulary_of_another_size_changes_nothing(requests, reference, size, nodes, tmp_path):
    """Of the smaller one many tokens are missing, so that some sequences get no draft."""
    config = {"model": str(resized_drafter(tmp_path, size)), "num_speculative_tokens": 4, "num_tree_nodes": nodes}
    core = make_core(model="builtin", speculative_config={**config, "adaptive": False})
    some = requests[:12]
    result = run(core, some)
    stats = core.stats()
    num_refused = core.executor.speculator.num_refused
    core.close()
    assert_same(result, {request.request_id: reference[request.request_id] for request in some})
    assert stats.num_accepted_tokens > 0
    assert num_refused == 0


@pytest.mark.parametrize("name", [*(name for name in DRAFTERS if "trees" not in name), "resized"])
def test_rejection_sampling_with_a_model(requests, name, tmp_path):
    config = DRAFTERS[name] if name in DRAFTERS else {"model": str(resized_drafter(tmp_path, 1024))}
    core = make_core(model="builtin", speculative_config={**config, "adaptive": False, "mode": "rejection"})
    plain = [r for r in requests if r.params.structured_outputs is None][:12]
    result = run(core, plain)
    stats = core.stats()
    core.close()
    assert all(0 <= token_id < 2048 for bits in result.values() for token_id in bits[0])
    assert stats.num_accepted_tokens > 0
    assert len(result) == len(plain)


@pytest.mark.parametrize("backend", ["cpu", "torch_ref"])
def test_a_cache_of_int4_that_the_drafter_has_too(requests, backend):
    """Its mean key is measured without a target's features."""
    shortened = [
        msgspec.structs.replace(r, params=msgspec.structs.replace(r.params, max_tokens=8)) for r in requests[:3]
    ]
    result, stats = [], None
    for more in ({}, {"speculative_config": {"method": "eagle", "adaptive": False}}):
        core = make_core(model="builtin", backend=backend, kv_cache_dtype="int4", **more)
        result.append(run(core, shortened))
        stats = core.stats()
        core.close()
    assert_same(result[1], result[0])
    assert stats.num_draft_tokens > 0
