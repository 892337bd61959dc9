"""The checks of a new request: both sides of the process border refuse the same requests, in the same words."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.options import SchedulerOptions
from headrace.core.requests import verify_size
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore, verify
from headrace.insight.simulated import Oracle, SimulatedExecutor
from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.errors import ContextLengthError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import EngineInfo, Request

NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE = 16, 4, 50


def make_core() -> EngineCore:
    scheduler = Scheduler(
        SchedulerOptions(
            num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=6, max_model_len=999
        )
    )
    info = EngineInfo(
        model="simulated",
        max_model_len=scheduler.max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[],
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=8,
        max_num_batched_tokens=6,
    )
    executor = SimulatedExecutor(NUM_BLOCKS, BLOCK_SIZE, Oracle(VOCAB_SIZE))
    return EngineCore(scheduler, executor, info, lambda: 0.0)


def request(prompt: list[int], beam_width: int = 0, params: dict[str, Any] | None = None, **fields: Any) -> Request:
    sampling = SamplingParams(**{"seed": 1, "max_tokens": 4, **(params or {})})
    beam = BeamSearchParams(beam_width=beam_width) if beam_width else None
    return Request(request_id="a", prompt_token_ids=prompt, params=sampling, beam=beam, **fields)


BAD = {
    "empty": (request([]), "prompt: "),
    "too long": (request([1] * 65), "prompt: 65 .*at most 64 tokens long"),
    "resumed too far": (request([1], resume_token_ids=[1] * 5), "resume_token_ids: 5 .*at most 4"),
    "resumed search": (request([1], 2, resume_token_ids=[1]), "resume_token_ids: 1 .*none for a beam search"),
    "more beams than rows": (request([1], 7), "beam_width: 7 .*at most 6"),
    "more beams than blocks": (request([1], 4, {"max_tokens": 20}), "beam_width: 4 .*20 blocks fit the cache's 16"),
    "no such token": (request([1, VOCAB_SIZE]), "prompt: 50 .*from 0 to 49"),
    "no such stop token": (request([1], params={"stop_token_ids": [99]}), "stop_token_ids: 99"),
    "too many logprobs": (request([1], params={"logprobs": 21}), "logprobs: 21 .*at most 20"),
    "no such pooling": (request([1], pooling="sum"), "pooling: 'sum'"),
    "pooled search": (request([1], 2, pooling="last"), "pooling: 'last' .*beam search"),
    "no seed": (request([1], params={"seed": None}), "params: .*complete"),
}


@pytest.mark.parametrize("name", BAD)
def test_both_sides_refuse_a_request_in_the_same_words(name: str) -> None:
    bad, words = BAD[name]
    core = make_core()
    with pytest.raises(RequestError, match=words) as here:
        verify(bad, core.info)
    with pytest.raises(RequestError, match=words) as there:
        core.add(bad)
    assert (type(here.value), str(here.value)) == (type(there.value), str(there.value))
    assert isinstance(here.value, ContextLengthError) == (name == "too long")
    assert not core.has_work()


@pytest.mark.parametrize(
    "good",
    [
        request([1] * 64),
        request([1], resume_token_ids=[1] * 4),
        request([1], 6),
        request([1], 4, {"max_tokens": 16}),
        request([VOCAB_SIZE - 1], params={"logprobs": 20}),
        request([1], pooling="mean"),
    ],
)
def test_what_just_fits_is_accepted_on_both_sides(good: Request) -> None:
    core = make_core()
    verify(good, core.info)
    core.add(good)
    assert core.has_work()


def test_a_call_has_a_bounded_number_of_log_probabilities_where_a_token_has_many() -> None:
    """Of all its answers together; 20 of a token are never too many."""
    wide = request([1] * 2048, params={"prompt_logprobs": -1})
    verify_size([wide] * 2, 1024)
    with pytest.raises(RequestError, match="prompt_logprobs: -1 .*at most 4194304 of them in all, and not 6291456"):
        verify_size([wide] * 3, 1024)
    answers = [request([1], params={"logprobs": 1024, "max_tokens": 2048})] * 2
    verify_size(answers, 5000)
    with pytest.raises(RequestError, match="logprobs: 1024 .*and not 6291456"):
        verify_size([*answers, answers[0]], 5000)
    verify_size([request([1] * 10**6, params={"prompt_logprobs": 20, "logprobs": 20})] * 128, 5000)
