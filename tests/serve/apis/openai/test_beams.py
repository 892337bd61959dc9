"""Beam search over the API: its parameters, what is refused, its reply; and that nothing is lost with the engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
from array import array
from typing import Any

import pytest
from tests.engine.test_client import pid_of
from tests.programs.sim.plain_beams import plain_beams
from tests.support import fake
from tests.support.server import Live, child

from headrace import AsyncLLM, BeamSearchParams
from headrace.insight.simulated import Oracle
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.params import SamplingParams
from headrace.text.tokenizer import Tokenizer

PROMPT = list(b"Once upon a time there was a beam")
BODY = {"prompt": PROMPT, "use_beam_search": True, "max_tokens": 8, "return_token_ids": True}


def expected(params: BeamSearchParams, max_tokens: int) -> list[tuple[float, float, list[int]]]:
    """What the fake engine's model must be found to say."""
    oracle = Oracle(fake.VOCAB_SIZE, [fake.EOS])
    seedless = SamplingParams(seed=0, temperature=0.0)

    def tops(token_ids: list[int]) -> tuple[tuple[int, float], ...]:
        context = array("q")
        for position, token in enumerate([*PROMPT, *token_ids]):
            context.extend((0, token, position))
        token = oracle.next_token(context, seedless, len(token_ids))
        return oracle.logprob(token, len(PROMPT) + len(token_ids), fake.VOCAB_SIZE).top

    return plain_beams(tops, params, frozenset([fake.EOS]), max_tokens)


@pytest.mark.parametrize(
    ("inputs", "params"),
    [
        ({"n": 3}, {"beam_width": 3, "n": 3}),
        ({"n": 2, "best_of": 5}, {"beam_width": 5, "n": 2}),
        ({"beam_width": 4}, {"beam_width": 4, "n": 1}),
        ({"n": 2, "beam_width": 4, "length_penalty": 0.0}, {"beam_width": 4, "n": 2, "length_penalty": 0.0}),
        ({"n": 3, "early_stopping": "never"}, {"beam_width": 3, "n": 3, "early_stopping": "never"}),
        ({"n": 2, "early_stopping": True}, {"beam_width": 2, "n": 2, "early_stopping": True}),
        (
            {"n": 4, "num_beam_groups": 2, "diversity_penalty": 1.5},
            {"beam_width": 4, "n": 4, "num_beam_groups": 2, "diversity_penalty": 1.5},
        ),
    ],
)
def test_use_beam_search_finds_the_likeliest_answers(live: Live, inputs: Any, params: Any) -> None:
    answers = expected(BeamSearchParams(**params), 8)
    reply = live.post("/v1/completions", BODY | inputs)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    choices = body["choices"]
    assert [choice["token_ids"] for choice in choices] == [ids for _, _, ids in answers]
    assert [choice["beam_score"] for choice in choices] == [score for score, _, _ in answers]
    assert [choice["cumulative_logprob"] for choice in choices] == [total for _, total, _ in answers]
    assert [choice["index"] for choice in choices] == list(range(len(answers)))
    assert {choice["finish_reason"] for choice in choices} <= {"length", "stop"}
    assert body["usage"]["prompt_tokens"] == len(PROMPT)
    assert body["usage"]["completion_tokens"] == sum(len(ids) for _, _, ids in answers)
    blocks = body["beam_search"]
    width = params["beam_width"]
    assert 3 <= blocks["num_blocks"] < blocks["num_blocks_unshared"] == 3 * width or width == 1
    assert "warnings" not in body


def test_chat_and_several_prompts_search_too(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "use_beam_search": True, "n": 2, "max_tokens": 5}
    reply = live.post("/v1/chat/completions", body).json()
    assert len(reply["choices"]) == 2
    assert all(choice["message"]["role"] == "assistant" for choice in reply["choices"])
    assert reply["choices"][0]["beam_score"] >= reply["choices"][1]["beam_score"]
    two = live.post("/v1/completions", BODY | {"prompt": [PROMPT, PROMPT[:9]], "n": 2}).json()
    one = live.post("/v1/completions", BODY | {"prompt": PROMPT[:9], "n": 2}).json()
    assert [choice["index"] for choice in two["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in two["choices"][2:]] == [choice["token_ids"] for choice in one["choices"]]


def test_a_stream_gives_the_answers_at_the_end(live: Live) -> None:
    whole = live.post("/v1/completions", BODY | {"n": 2}).json()["choices"]
    lines = live.post("/v1/completions", BODY | {"n": 2, "stream": True}).text.strip().split("\n")
    chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert lines[-1] == "data: [DONE]"
    for index, choice in enumerate(whole):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        assert [token for chunk in mine for token in chunk.get("token_ids") or []] == choice["token_ids"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["beam_score"] == choice["beam_score"]


@pytest.mark.parametrize(
    ("field", "inputs"),
    [
        ("n", {"n": 5, "beam_width": 3}),
        ("beam_width", {"beam_width": 0}),
        ("beam_width", {"beam_width": 1000}),
        ("temperature", {"n": 2, "temperature": 0.5}),
        ("top_p", {"n": 2, "top_p": 0.5}),
        ("logprobs", {"n": 2, "logprobs": 1}),
        ("prompt_logprobs", {"n": 2, "prompt_logprobs": 1}),
        ("stop", {"n": 2, "stop": "x"}),
        ("min_tokens", {"n": 2, "min_tokens": 3}),
        ("structured_outputs", {"n": 2, "structured_outputs": {"regex": "a+"}}),
        ("repetition_penalty", {"n": 2, "repetition_penalty": 1.2}),
        ("early_stopping", {"n": 2, "early_stopping": "soon"}),
        ("num_beam_groups", {"n": 4, "num_beam_groups": 3}),
        ("length_penalty", {"use_beam_search": False, "length_penalty": 0.5}),
        ("beam_width", {"use_beam_search": None, "beam_width": 4}),
        ("diversity_penalty", {"use_beam_search": None, "diversity_penalty": 1.0}),
    ],
)
def test_what_does_not_go_together_is_a_400_by_name(live: Live, field: str, inputs: dict[str, Any]) -> None:
    reply = live.post("/v1/completions", BODY | inputs)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field


def test_neutral_values_without_a_search_are_no_matter(live: Live) -> None:
    body = {"prompt": "a", "max_tokens": 2, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}
    assert live.post("/v1/completions", body).status_code == 200


def test_a_search_too_wide_for_the_engine_is_a_400(live: Live) -> None:
    reply = live.post("/v1/completions", BODY | {"beam_width": 64, "max_tokens": 500})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "beam_width"
    assert "blocks" in reply.json()["error"]["message"]


def test_a_killed_engine_costs_a_search_time_and_nothing_else(tokenizer: Tokenizer) -> None:
    params = {"n": 3, "beam_width": 4, "max_tokens": 120}
    with Live(child(delay=0.01), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            requests = pool.submit(live.post, "/v1/completions", BODY | params)
            live.wait(lambda: live.client.stats.num_beam_blocks_unshared > 12)
            assert live.metric("beam_search_blocks") < live.metric("beam_search_blocks_unshared")
            os.kill(pid_of(live.client), signal.SIGKILL)
            reply = requests.result()
        assert live.client.num_restarts == 1
        assert reply.status_code == 200, reply.text
        answers = expected(BeamSearchParams(beam_width=4, n=3), 120)
        assert [choice["token_ids"] for choice in reply.json()["choices"]] == [ids for _, _, ids in answers]
        live.wait(lambda: live.metric("kv_cache_usage_perc") == 0.0)


def test_async_llm_searches(tokenizer: Tokenizer) -> None:
    async def search() -> Any:
        from headrace.engine.client import InprocClient

        client = InprocClient(lambda: fake.build(EngineConfig(model="fake")))
        config = EngineConfig(model="fake", skip_tokenizer_init=True)
        async with AsyncLLM(config, client=client, tokenizer=tokenizer) as llm:
            return await llm.beam_search({"prompt_token_ids": PROMPT}, BeamSearchParams(beam_width=3, max_tokens=6))

    actual = asyncio.run(search())
    answers = expected(BeamSearchParams(beam_width=3), 6)
    assert [answer.tokens for answer in actual.sequences] == [[*PROMPT, *ids] for _, _, ids in answers]
    assert [answer.text.startswith("Once upon") for answer in actual.sequences] == [True] * 3
    assert actual.num_blocks < actual.num_blocks_unshared
