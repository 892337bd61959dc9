"""The determinism law for every sampler: whatever a request asks of the samplers, its bits depend on it alone.

Each request of `sampler_requests` has other parameters. They run alone, one after the other, on a cold cache; then in
company, in chunks, from a warm cache, preempted, in a pool too small for all, resumed, and on a restarted engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import msgspec
import pytest
from tests.support.law import Bits, assert_same, bits_of, groups_of, make_core, make_requests, run, run_alone
from tests.support.shallow import shallow

from headrace import LLM, hub
from headrace.engine.client import ProcessClient
from headrace.engine.core import EngineCore
from headrace.engine.links import ProcessLink
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request, TokenLogprob
from headrace.text.inputs import with_token_ids
from headrace.text.tokenizer import Tokenizer

TOKENS = 20
SAMPLERS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "penalties of the last": {"repetition_penalty": 1.5, "repeat_last_n": 5, "top_k": 30},
    "dry": {"dry_multiplier": 9.0, "dry_allowed_length": 1, "temperature": 0.5},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.6},
    "top_n_sigma": {"top_n_sigma": 1.5, "temperature": 1.5},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    "dynatemp": {"dynatemp_range": 0.7},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 3.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "temperature": 0.0},
    "bad_words": {"bad_words": ["the", "and", "little girl"]},
    "allowed_token_ids": {"allowed_token_ids": list(range(20, 400))},
    "logit_bias": {"logit_bias": {50: 8.0, 51: 5.0}, "min_tokens": 3},
    "samplers": {"samplers": ["dry", "top_k", "typ_p", "top_p", "temperature", "penalties"], "top_k": 50, "top_p": 0.9,
                 "repetition_penalty": 1.2, "dry_multiplier": 0.8},
    # Every prompt begins with token 0.
    "thinking_token_budget": {"thinking_token_budget": 12, "thinking_token_ids": ([0], [62, 63])},
    "adaptive_p": {"adaptive_target": 0.3, "adaptive_decay": 0.8, "min_p": 0.02},
    "trace_decode_token_ids": {"trace_decode_token_ids": [62, 7, *range(100, 118)]},
    "watermark": {"watermark": True, "top_p": 0.95},
}  # fmt: skip
# Prompts are dealt out in as many pairs, in turn.
PAIRS = 16


def sampler_requests() -> list[Request]:
    tokenizer = Tokenizer.load(hub.resolve("builtin"))
    result = []
    inputs = make_requests()[1::2]
    for i, fields in enumerate(SAMPLERS.values()):
        for request in inputs[i % PAIRS :: PAIRS][:2]:
            params = SamplingParams(
                **{"seed": 1000 + i, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2, **fields}
            )
            params = with_token_ids(params, tokenizer, tokenizer.vocab_size)
            result.append(msgspec.structs.replace(request, request_id=f"{len(result)}", params=params))
    return result


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return sampler_requests()


@pytest.fixture(scope="module")
def reference(requests: list[Request]) -> dict[str, Bits]:
    return run_alone(requests)


def test_every_sampler_changes_what_is_said(requests: list[Request], reference: dict[str, Bits]) -> None:
    plain = [
        msgspec.structs.replace(
            request,
            params=SamplingParams(
                seed=request.params.seed, temperature=request.params.temperature, max_tokens=TOKENS, ignore_eos=True
            ),
        )
        for request in requests
    ]
    without = run_alone(plain)
    for at, name in enumerate(SAMPLERS):
        pair = [request.request_id for request in requests if request.params.seed == 1000 + at]
        assert any(reference[i][0] != without[i][0] for i in pair), name


def test_I_13_samplers_in_company_and_from_a_warm_cache(requests: list[Request], reference: dict[str, Bits]) -> None:
    core = make_core()
    strangers = make_requests()[:20]
    result = run(core, [*strangers, *requests])
    assert_same({name: result[name] for name in reference}, reference)
    before = core.stats().prefix_cache_hits
    for group in groups_of(requests, 9):
        assert_same(run(core, group), reference)
    assert core.stats().prefix_cache_hits > before
    core.close()


@pytest.mark.parametrize("chunk", [7, 64])
def test_I_13_samplers_in_chunks(chunk: int, requests: list[Request], reference: dict[str, Bits]) -> None:
    core = make_core(max_num_batched_tokens=chunk, max_num_seqs=6, enable_prefix_caching=False)
    assert_same(run(core, requests), reference)
    core.close()


def test_I_13_samplers_preempted(requests: list[Request], reference: dict[str, Bits]) -> None:
    core = make_core()
    assert_same(run(core, requests, preempt_every=2), reference)
    assert core.stats().num_preemptions > 8
    core.close()
    core = make_core(num_gpu_blocks_override=40, max_model_len=512)
    assert_same(run(core, requests), reference)
    assert core.stats().num_preemptions > 0
    core.close()


def states_of(core: EngineCore, request: Request) -> list[float | None]:
    """What a client remembers after each token."""
    message: list[float | None] = []
    core.add(request)
    while core.has_work():
        output = core.step()
        if output.request_ids:
            message.append(output.states.get(request.request_id))
    return message


def test_I_13_samplers_resumed(requests: list[Request], reference: dict[str, Bits]) -> None:
    core = make_core()
    for request in requests:
        ids, bits = reference[request.request_id]
        states = states_of(core, request)
        assert (states[0] is not None) == request.params.steers
        for done in (1, 6):
            again = msgspec.structs.replace(
                request, request_id="again", resume_token_ids=ids[:done], resume_state=states[done - 1]
            )
            rest, rest_bits = run(core, [again])["again"]
            assert rest == ids[done:], request.params
            assert rest_bits == bits[done * 3 * 8 :]
    core.close()


def test_control_a_sampler_without_its_state_is_noticed(requests: list[Request], reference: dict[str, Bits]) -> None:
    core = make_core()
    others = {True: 0, False: 0}
    for request in requests:
        if request.params.steers:
            ids, bits = reference[request.request_id]
            again = msgspec.structs.replace(request, request_id="again", resume_token_ids=ids[:6])
            others[request.params.adapts] += run(core, [again])["again"] != (ids[6:], bits[6 * 3 * 8 :])
    assert min(others.values()) > 0
    core.close()


def test_a_replayed_trace_has_the_log_probabilities_of_the_same_text_as_a_prompt(requests: list[Request]) -> None:
    """One token after the other, or all at once: the same bits. An end of text in the trace ends nothing."""
    llm = LLM(shallow(), max_num_seqs=8, num_gpu_blocks_override=256)
    prompt, trace = requests[0].prompt_token_ids, [50, 1, 51, *range(300, 340)]
    sampling_params = SamplingParams(max_tokens=100, logprobs=2, trace_decode_token_ids=trace)
    read = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    [replayed] = llm.generate([{"prompt_token_ids": prompt}], sampling_params, use_tqdm=False)
    [inputs] = llm.generate([{"prompt_token_ids": [*prompt, *trace]}], read, use_tqdm=False)
    [answer] = replayed.outputs
    assert (answer.token_ids, answer.finish_reason) == (trace, "length")
    assert answer.logprobs == inputs.prompt_logprobs[len(prompt) :]
    llm.close()


def test_I_13_samplers_on_a_restarted_engine(requests: list[Request], reference: dict[str, Bits]) -> None:
    """The engine is killed while all of them are on their way."""

    async def go() -> dict[str, Bits]:
        config = EngineConfig(model=shallow(), max_num_seqs=64, num_gpu_blocks_override=1024, num_threads=1)
        client = ProcessClient(config, ServerConfig(crash_report_dir=""))
        await client.start()
        link = client.replicas[0].link
        assert isinstance(link, ProcessLink)
        tokens: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[TokenLogprob]] = [[] for _ in requests]
        killed = False
        async with client.submit(requests) as stream:
            async for deltas in stream:
                for place, delta in deltas:
                    tokens[place] += delta.token_ids
                    logprobs[place] += delta.logprobs
                if not killed and all(len(token) >= 3 for token in tokens):
                    killed = True
                    assert not all(len(token) == TOKENS for token in tokens)
                    assert link.pid is not None
                    os.kill(link.pid, signal.SIGKILL)
        assert client.num_restarts == 1
        await client.close()
        return {r.request_id: bits_of(tokens[i], logprobs[i]) for i, r in enumerate(requests)}

    assert_same(asyncio.run(go()), reference)


def test_control_a_history_without_the_prompt_is_noticed(
    requests: list[Request], reference: dict[str, Bits], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core()
    runner: Any = core.executor
    right = runner.sampler.sample_rows

    def forgetful(logits: Any, rows: Any) -> Any:
        for row in rows:
            row.history = row.history[row.num_prompt :]
        return right(logits, rows)

    monkeypatch.setattr(runner.sampler, "sample_rows", forgetful)
    with pytest.raises(AssertionError, match="differ"):
        assert_same(run(core, requests), reference)
    core.close()


def test_prompt_logprobs_of_a_warm_prefix_cache_are_the_same_bits(requests: list[Request]) -> None:
    """The prompt is in the cache, whole or in part: its log-probabilities come all the same, with the same bits."""
    llm = LLM(shallow(), max_num_seqs=8, num_gpu_blocks_override=256)
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=2, seed=1)
    plain = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, seed=1)
    prompt = max((request.prompt_token_ids for request in requests), key=len)
    assert len(prompt) > 3 * llm.config.block_size

    def told(changed: SamplingParams) -> Any:
        [output] = llm.generate([{"prompt_token_ids": prompt}], changed, use_tqdm=False)
        return output.prompt_logprobs, output.outputs[0].logprobs, output.num_cached_tokens

    cold = told(params)
    assert (len(cold[0]), cold[0][0], cold[2]) == (len(prompt), None, 0)
    warm = told(params)
    assert warm[:2] == cold[:2]
    llm.reset_prefix_cache()
    told(plain)
    assert told(plain)[2] > 0, "the cache is warm"
    assert told(params)[:2] == cold[:2]
    llm.close()
