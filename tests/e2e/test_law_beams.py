"""The determinism law for beam searches: answers and the bits of their scores depend on the request alone."""

from __future__ import annotations

import itertools
import os
import signal
import struct
import threading
import time
from typing import Any

import httpx
import pytest
from tests.support.law import PROMPTS, make_core, make_requests
from tests.support.serving import serve, wait_for
from tests.support.shallow import shallow

from headrace import LLM, hub
from headrace.core.scheduler import Scheduler
from headrace.core.tables import BlockTables
from headrace.engine.core import EngineCore
from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import BeamResult, Request
from headrace.text.tokenizer import Tokenizer

MAX_TOKENS = 14
KINDS: list[dict[str, Any]] = [
    {"beam_width": 2},
    {"beam_width": 5, "length_penalty": 0.0, "early_stopping": "never"},
    {"beam_width": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "length_penalty": 2.0},
    {"beam_width": 3, "early_stopping": True, "n": 1},
]

Found = dict[str, list[tuple[list[int], bytes]]]


def make_searches() -> list[Request]:
    tokenizer = Tokenizer.load(hub.resolve("builtin"))
    result = []
    for index, text in enumerate(PROMPTS[::3]):
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=MAX_TOKENS)
        beam = BeamSearchParams(**KINDS[index % len(KINDS)])
        token_ids = tokenizer.encode(text)
        result.append(Request(request_id=f"beams {index}", prompt_token_ids=token_ids, params=params, beam=beam))
    return result


def bits_of(result: BeamResult) -> list[tuple[list[int], bytes]]:
    return [(beam.token_ids, struct.pack("2d", beam.score, beam.cumulative_logprob)) for beam in result.beams]


def run(core: EngineCore, requests: list[Request], preempt_every: int = 0) -> Found:
    """Run all together; what the searches among them found. Force preemptions at each n-th step."""
    outcome: Found = {}
    for request in requests:
        core.add(request)
    for step in itertools.count(1):
        if not core.has_work():
            return outcome
        output = core.step()
        core.scheduler.check()
        outcome |= {name: bits_of(result) for name, result in output.beams.items()}
        assert all(finish.reason in ("stop", "length") for finish in output.finished.values()), output.finished
        if preempt_every and step % preempt_every == 0:
            alive = [name for name in core.scheduler.sequences if name.startswith("beams")]
            core.scheduler.preempt(alive[step % len(alive)]) if alive else None
    raise AssertionError


@pytest.fixture(scope="module")
def searches() -> list[Request]:
    return make_searches()


@pytest.fixture(scope="module")
def reference(searches: list[Request]) -> Found:
    """Each by itself on a cold cache, its prompt in one piece."""
    core = make_core(enable_prefix_caching=False)
    result: Found = {}
    for request in searches:
        result |= run(core, [request])
    core.close()
    assert len({str(answers) for answers in result.values()}) == len(searches)
    return result


def strangers() -> list[Request]:
    return make_requests()[::4]


def test_I_13_beams_in_company(searches: list[Request], reference: Found) -> None:
    core = make_core()
    assert run(core, [*searches[::2], *strangers(), *searches[1::2]]) == reference
    core.close()


@pytest.mark.parametrize("chunk", [5, 16])
def test_I_13_beams_chunked(chunk: int, searches: list[Request], reference: Found) -> None:
    core = make_core(max_num_batched_tokens=chunk, max_num_seqs=chunk, enable_prefix_caching=False)
    assert run(core, searches) == reference
    core.close()


def test_I_13_beams_on_a_warm_prefix_cache(searches: list[Request], reference: Found) -> None:
    core = make_core()
    assert run(core, searches) == reference
    before = core.stats().prefix_cache_hits
    assert run(core, searches) == reference
    assert core.stats().prefix_cache_hits > before
    core.close()


@pytest.mark.parametrize("caching", [True, False])
def test_I_13_beams_preempted(caching: bool, searches: list[Request], reference: Found) -> None:
    core = make_core(enable_prefix_caching=caching, max_num_batched_tokens=64)
    assert run(core, [*searches, *strangers()], preempt_every=2) == reference
    assert core.stats().num_preemptions > 12
    core.close()


def test_I_13_beams_in_a_pool_too_small_for_all(searches: list[Request], reference: Found) -> None:
    core = make_core(num_gpu_blocks_override=48, max_model_len=512)
    assert run(core, [*searches, *strangers()]) == reference
    assert core.stats().num_preemptions > 0
    core.close()


def test_I_13_beams_offline(searches: list[Request], reference: Found) -> None:
    llm = LLM(shallow(), num_threads=1)
    for request in searches:
        beam = request.beam
        assert beam is not None
        params = BeamSearchParams(
            **{name: getattr(beam, name) for name in beam.__struct_fields__} | {"max_tokens": MAX_TOKENS}
        )
        (result,) = llm.beam_search([request.prompt_token_ids], params)
        output = [
            (answer.tokens[len(request.prompt_token_ids) :], struct.pack("2d", answer.score, answer.cum_logprob))
            for answer in result.sequences
        ]
        assert output == reference[request.request_id]
    llm.close()


def test_I_13_beams_through_a_server_whose_engine_dies(searches: list[Request], reference: Found) -> None:
    replies: dict[str, httpx.Response] = {}

    def ask(url: str, request: Request) -> None:
        beam = request.beam
        assert beam is not None
        body = {
            "prompt": request.prompt_token_ids, "max_tokens": MAX_TOKENS, "use_beam_search": True,
            "n": beam.num_answers, "beam_width": beam.beam_width, "length_penalty": beam.length_penalty,
            "return_token_ids": True, "early_stopping": beam.early_stopping, "num_beam_groups": beam.num_beam_groups,
            "diversity_penalty": beam.diversity_penalty,
        }  # fmt: skip
        replies[request.request_id] = httpx.post(f"{url}/v1/completions", json=body, timeout=240)

    with serve(
        shallow(), "--served-model-name", "builtin", "--max-num-seqs", "16", "--num-gpu-blocks-override", "256"
    ) as served:
        asking = [threading.Thread(target=ask, args=(served.url, request)) for request in searches]
        for thread in asking:
            thread.start()
        time.sleep(0.3)
        os.kill(served.engine().pid, signal.SIGKILL)
        for thread in asking:
            thread.join()
        wait_for(served.url, "headrace:engine_restarts_total", 1.0)
        wait_for(served.url, "headrace:kv_cache_usage_perc", 0.0)
    for name, reply in replies.items():
        assert reply.status_code == 200, reply.text
        output = [
            (choice["token_ids"], struct.pack("2d", choice["beam_score"], choice["cumulative_logprob"]))
            for choice in reply.json()["choices"]
        ]
        assert output == reference[name]


def test_control_a_tail_written_by_two_beams_is_noticed(
    searches: list[Request], reference: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockTables, "shares_tail", lambda self, seq: False)
    monkeypatch.setattr(Scheduler, "check", lambda self: None)
    core = make_core(enable_prefix_caching=False)
    assert run(core, searches) != reference
    core.close()
