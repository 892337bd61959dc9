"""The determinism law with speculation: guesses, right and wrong, chains and trees, change no token and no bit."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from tests.e2e.speculation import Prophet, futures_of, speculate
from tests.support.law import assert_same, groups_of, make_core, make_requests, run, run_alone

from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.params import SamplingParams


def varied(params: SamplingParams, i: int) -> SamplingParams:
    """Parameters whose samplers look at the tokens so far, have a state, or mask."""
    kinds = [
        {},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"presence_penalty": 0.5, "min_tokens": 4, "ignore_eos": False},
        {"no_repeat_ngram_size": 2, "min_p": 0.05},
        {"mirostat": 2, "top_k": 0, "top_p": 1.0},
        {"structured_outputs": StructuredOutputs(regex=r"[a-z ,.]{3,40}"), "ignore_eos": False},
        {"temperature": 1.2, "dry_multiplier": 0.8},
        {"typical_p": 0.9},
        {"speculation": False},
    ]
    kind = kinds[i % len(kinds)]
    if params.greedy:
        kind = {name: value for name, value in kind.items() if name not in ("mirostat", "temperature", "typical_p")}
    return msgspec.structs.replace(params, **kind)


@pytest.fixture(scope="module")
def requests():
    result = make_requests()
    return [msgspec.structs.replace(r, params=varied(r.params, i)) for i, r in enumerate(result)]


@pytest.fixture(scope="module")
def reference(requests):
    return run_alone(requests)


def drafter_of(core, requests, reference, share, tree):
    answers = {name: bits[0] for name, bits in reference.items()}
    return Prophet(futures_of(requests, answers), core.info.vocab_size, share, tree)


@pytest.mark.parametrize(("share", "tree"), [(0.9, False), (0.6, True)])
def test_guesses_change_nothing(requests, reference, share, tree):
    core = make_core()
    drafter = drafter_of(core, requests, reference, share, tree)
    speculate(core, drafter, num_drafts=5, num_nodes=9)
    result = {}
    for group in groups_of(requests, 16):
        result |= run(core, group)
    assert_same(result, reference)
    stats = core.stats()
    assert stats.num_accepted_tokens > len(requests), stats
    assert (
        sum(stats.num_accepted_per_pos)
        == stats.num_accepted_tokens
        == sum(num_accepted for _, num_accepted in drafter.fates)
    )
    if not tree:
        assert stats.num_draft_tokens > stats.num_accepted_tokens
    # Fewer steps than tokens: that is what it is for.
    assert stats.num_steps < sum(len(bits[0]) for bits in reference.values()) / 8
    assert drafter.num_dropped >= sum(r.params.speculation for r in requests) - 16
    core.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False, "max_num_batched_tokens": 40, "max_num_seqs": 7, "block_size": 4},
        {"num_gpu_blocks_override": 24, "max_model_len": 256},
        {"backend": "torch_ref", "dtype": "float32"},
    ],
)
def test_guesses_change_nothing_in_small_rooms(requests, reference, options):
    some = requests[::6]
    if options.get("backend"):
        alone = run_alone(some, **options)
    else:
        alone = {r.request_id: reference[r.request_id] for r in some}
    core = make_core(**options)
    speculate(core, drafter_of(core, some, alone, 0.8, tree=True), num_drafts=4, num_nodes=6)
    actual = {}
    for group in groups_of(some, 9):
        actual |= run(core, group, preempt_every=40)
    assert_same(actual, alone)
    assert core.stats().num_accepted_tokens
    core.close()


def test_resumed_answers_go_on_with_guesses(requests, reference):
    some = [r for r in requests[::7] if r.params.mirostat == 0 and r.params.structured_outputs is None]
    core = make_core()
    speculate(core, drafter_of(core, some, reference, 0.8, tree=False))
    cut = []
    for i, request in enumerate(some):
        tokens = reference[request.request_id][0]
        cut.append(msgspec.structs.replace(request, resume_token_ids=tokens[: min(len(tokens) - 1, i % 5)]))
    result = run(core, cut)
    for request in cut:
        assert [*request.resume_token_ids, *result[request.request_id][0]] == reference[request.request_id][0]
    core.close()


def test_an_accepted_wrong_token_is_seen(requests, reference, monkeypatch):
    """The planted fault: whatever is guessed first is kept."""
    from headrace.runner.drawing import Verification

    take = Verification.take

    def gullible(self, samples):
        if self.children() and len(self.token_ids) == 1:
            samples.token_id = self.draft.token_ids[self.children()[0]]
        return take(self, samples)

    monkeypatch.setattr(Verification, "take", gullible)
    core = make_core()
    # Where a grammar holds, it refuses the token before anybody compares.
    some = [r for r in requests if r.params.structured_outputs is None][:24]
    speculate(core, drafter_of(core, some, reference, 0.7, tree=False))
    with pytest.raises(AssertionError, match="differ"):
        assert_same(run(core, some), {r.request_id: reference[r.request_id] for r in some})
    core.close()


def test_a_slot_of_a_rejected_guess_that_is_read_is_seen(requests, reference, monkeypatch):
    """The planted fault: the token that was drawn is right, but the slot of the wrong guess in its place is kept."""
    from headrace.runner.drawing import Verification

    take = Verification.take

    def careless(self, samples):
        children = self.children()
        accepted = take(self, samples)
        if not accepted and children:
            self.accepted.append(children[0])
        return accepted or bool(children)

    monkeypatch.setattr(Verification, "take", careless)
    core = make_core()
    some = [r for r in requests[:24] if r.params.structured_outputs is None]
    speculate(core, drafter_of(core, some, reference, 0.5, tree=False))
    with pytest.raises(AssertionError, match="differ"):
        assert_same(run(core, some), {r.request_id: reference[r.request_id] for r in some})
    core.close()


def test_a_guess_beyond_the_vocabulary_is_refused(requests, reference):
    """Twice: by the caller of the drafter, and by the runner for every batch."""
    core = make_core()
    some = requests[:6]
    drafter = drafter_of(core, some, reference, 1.0, tree=False)
    drafter.guess = lambda context: type(drafter).guess(drafter, context) if context.seq_id % 2 else bad(core)
    speculate(core, drafter)
    assert_same(run(core, some), {r.request_id: reference[r.request_id] for r in some})
    assert core.executor.speculator.num_refused > 0
    core.close()


def bad(core):
    from headrace.protocol.step import Draft

    return Draft([core.info.vocab_size])


@pytest.mark.parametrize("token_id", [-1, 2**20])
def test_a_batch_with_a_guess_beyond_the_vocabulary_fails_its_chunk_alone(token_id):
    from headrace.protocol.step import Draft

    core = make_core()
    requests = make_requests()[:2]
    for request in requests:
        core.add(request)
    batch = core.scheduler.schedule()
    batch.drafts[0] = Draft([token_id])
    result = core.executor.run(batch)
    assert "invalid_chunk" in result.column("error")[0]
    assert result.token_ids[1] >= 0
    core.close()


class Untouchable:
    """A speculator that no step may call."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} was called")


def test_a_step_without_speculation_calls_nothing_of_it():
    core = make_core()
    expected = run(core, make_requests()[:2])
    core.executor.speculator = Untouchable()
    assert_same(run(core, make_requests()[:2]), expected)
    # The control: where drafts are requested it is called, which ends the step.
    core.scheduler.drafts.enabled = True
    with pytest.raises(AssertionError, match="begin_step was called"):
        run(core, make_requests()[:2])


def test_streams_of_noise_are_disjoint():
    from headrace.sampling import noise

    purposes = [noise.SAMPLE, noise.XTC, noise.WATERMARK, noise.DRAFT, noise.ACCEPT, noise.RECOVER]
    assert len(set(purposes)) == len(purposes)
    samples = {noise.uniform(5, 9, purpose) for purpose in purposes}
    assert len(samples) == len(purposes)
    assert all(a != b for a, b in itertools.combinations(samples, 2))
