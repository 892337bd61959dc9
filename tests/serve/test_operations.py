"""Health, metrics, models and the small routes; AsyncLLM; and that the server process never loads torch."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support import fake
from tests.support.server import HTTP, Live, inproc

from headrace import AsyncLLM, __version__
from headrace.engine import context
from headrace.engine.client import InprocClient
from headrace.engine.core import EngineCore
from headrace.engine.library.model_settings import advised_params
from headrace.insight.simulated import Behaviour
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import CheckpointError, EngineDeadError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.serve import app, process
from headrace.serve.call.call import ModelDefaults
from headrace.text.tokenizer import Tokenizer


@pytest.fixture
def fresh(tokenizer: Tokenizer) -> Iterator[Live]:
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        yield live


def test_the_server_process_never_loads_torch() -> None:
    code = (
        "import sys, headrace.serve.app, headrace.engine.child, headrace.async_llm\n"
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_R_12_the_collector_leaves_alone_what_lives_as_long_as_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was imported: tens of thousands of objects. Walked, they are a pause for everybody who calls."""
    calls = list[str]()

    def serving(work: Coroutine[Any, Any, int]) -> int:
        work.close()
        calls.append("serve")
        return 0

    # Not the collector itself: what it has frozen in this process must stay so, or it walks all tests from then on.
    collector = SimpleNamespace(collect=lambda: calls.append("collect"), freeze=lambda: calls.append("freeze"))
    monkeypatch.setattr(process, "gc", collector)
    monkeypatch.setattr(process.asyncio, "run", serving)
    application: Any = SimpleNamespace(state=SimpleNamespace(lifespan=SimpleNamespace()))
    sockets = process.listen("127.0.0.1", 0)
    try:
        process.run(application, ServerConfig(), sockets)
    finally:
        sockets[0].close()
    assert calls == ["collect", "freeze", "serve"]


def test_small_routes(live: Live) -> None:
    assert HTTP.get(live.url + "/version").json() == {"version": __version__}
    for path in ("/health", "/health/ready", "/ping"):
        assert HTTP.get(live.url + path).json() == {"status": "ready"}
    assert HTTP.post(live.url + "/ping").status_code == 200
    assert HTTP.get(live.url + "/load").json() == {"server_load": 0}
    card = HTTP.get(live.url + "/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"], card["owned_by"]) == ("fake", 2048, "headrace")


def test_tokenize_and_detokenize(live: Live) -> None:
    body = live.post("/tokenize", {"prompt": "Hé", "return_token_strs": True}).json()
    assert body["tokens"] == list("Hé".encode())
    assert (body["count"], body["token_strs"][0]) == (3, "H")
    assert live.post("/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": "Hé", "content": "Hé"}
    chat = live.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    assert bytes(chat["tokens"]) == b"[user]x[a]"


def test_a_callers_id_is_echoed_and_names_nothing(live: Live) -> None:
    """S-25: two calls with one id are two requests."""
    body = {"prompt": "x", "max_tokens": 3, "request_id": "same\r\nid", "seed": 1}
    reply = live.post("/v1/completions", body)
    assert reply.json()["id"] == "cmpl-same\r\nid"
    assert context.REQUEST_ID.fullmatch(reply.headers["x-request-id"])
    assert "same" not in reply.headers["x-request-id"]
    response = live.post("/v1/completions", body, headers={"x-request-id": "trace-7"})
    assert response.headers["x-request-id"] == "trace-7"


def test_I_21_metrics_count_what_happened(fresh: Live) -> None:
    before = {
        name: fresh.metric(name) for name in ("prompt_tokens_total", "generation_tokens_total", "num_steps_total")
    }
    assert set(before.values()) == {0}, "the start's own probe must not count"
    assert fresh.metric("prefix_cache_queries_total") == 0
    body = {"prompt": "x" * 40, "max_tokens": 7, "ignore_eos": True, "seed": 1}
    for _ in range(3):
        assert fresh.post("/v1/completions", body).status_code == 200
    fresh.post("/v1/completions", body | {"stop": ["\x00", "�"]})
    assert fresh.post("/v1/completions", body | {"n": 0}).status_code == 400
    assert fresh.metric("prompt_tokens_total") == 160
    assert fresh.metric("prompt_tokens_cached_total") == fresh.metric("prefix_cache_hits_total") == 3 * 32
    assert fresh.metric("request_success_total", finished_reason="length") >= 3
    assert fresh.metric("request_success_total") == 4
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert fresh.metric(f"{name}_seconds_count") == 4
    assert fresh.metric("inter_token_latency_seconds_count") >= 18
    assert fresh.metric("prompt_tokens_by_source_total", source="local_cache_hit") == 96
    assert fresh.metric("prompt_tokens_by_source_total", source="local_compute") == 64
    assert fresh.metric("request_prefill_kv_computed_tokens_sum") == 64
    assert fresh.metric("request_params_max_tokens_sum") == 28
    assert fresh.metric("request_time_per_output_token_seconds_count") >= 3
    assert fresh.metric("cache_config_info") == 1
    assert fresh.metric("kv_cache_usage_perc") == 0
    text = HTTP.get(fresh.url + "/metrics").text
    assert 'model_name="fake"' in text
    assert 'engine="0"' in text


def test_R_27_not_ready_before_a_token_was_made(tokenizer: Tokenizer) -> None:
    started = threading.Event()

    def build() -> EngineCore:
        core = fake.build(EngineConfig(model="fake"))
        executor: Any = core.executor
        executor.behaviour = Behaviour(fail=lambda step_id, index: not started.wait(60))
        return core

    client = InprocClient(build)
    live = Live(client, tokenizer, ServerConfig(log_stats_interval=0))
    live.thread.start()
    live.wait(lambda: HTTP.get(live.url + "/health/live").status_code == 200)
    live.wait(lambda: client.is_started)
    loading = HTTP.get(live.url + "/health/ready")
    assert (loading.status_code, loading.json()) == (503, {"status": "loading"})
    started.set()
    live.wait(lambda: HTTP.get(live.url + "/health/ready").status_code == 200)
    live.__exit__()


def test_an_engine_that_can_not_start_is_dead_and_says_so(tokenizer: Tokenizer) -> None:
    def broken() -> None:
        raise RuntimeError("no such thing")

    client = InprocClient(broken)  # type: ignore[arg-type]
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as live:
        live.wait(lambda: HTTP.get(live.url + "/health").json() == {"status": "dead"})
        assert live.post("/v1/completions", {"prompt": "x"}).status_code == 503
        assert HTTP.get(live.url + "/v1/models").status_code == 503
        assert HTTP.get(live.url + "/metrics").status_code == 200


def test_the_models_advice_is_the_default(tokenizer: Tokenizer, tmp_path: Path) -> None:
    directory = tmp_path
    advice = '{"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 3, "do_sample": true, "eos_token_id": 2'
    advice += ', "repetition_penalty": 1.1}'
    (directory / "generation_config.json").write_text(advice)
    defaults = advised_params(str(directory), None)
    assert defaults == {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "max_tokens": 3}
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0), defaults=ModelDefaults.of(defaults)) as live:
        body = {"prompt": "x", "ignore_eos": True}
        assert live.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 3
        assert live.post("/v1/completions", body | {"max_tokens": 5}).json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("advice", "words"),
    [
        ('{"temperature": -5}', "temperature: -5 .* a finite number from 0 to 100"),
        ('{"temperature": "abc"}', "temperature: 'abc' .* a finite number from 0 to 100"),
        ('{"temperature": NaN}', "temperature: nan .* a finite number"),
        ('{"top_p": 2.0}', "top_p: 2.0 .* to 1"),
        ('{"top_k": [1]}', r"top_k: \[1\] .* an integer from -1"),
        ('{"repetition_penalty": 1e400}', "repetition_penalty: inf .* to 100"),
        ('{"max_new_tokens": -1}', "max_new_tokens: -1 .* an integer from 1"),
        ('{"no_repeat_ngram_size": true}', "no_repeat_ngram_size: True .* an integer"),
        ("[1, 2]", "holds list, not an object"),
    ],
)
def test_S_28_advice_that_no_request_may_follow_is_refused_at_the_start(
    advice: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(advice)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json.*{words}"):
        advised_params(str(tmp_path), None)


def test_async_llm_gives_vllms_outputs(tokenizer: Tokenizer) -> None:
    async def go() -> None:
        client = InprocClient(lambda: fake.build(EngineConfig(model="fake"), delay=0.005))
        async with AsyncLLM(client=client, tokenizer=tokenizer, model="fake") as llm:
            params = SamplingParams(n=2, max_tokens=5, seed=3, logprobs=1, prompt_logprobs=0, ignore_eos=True)
            outputs = [output async for output in llm.generate("Hello", params, "mine")]
            last = outputs[-1]
            assert (last.request_id, last.prompt, last.prompt_token_ids) == ("mine", "Hello", list(b"Hello"))
            assert last.finished
            assert not outputs[0].finished
            assert [len(one.token_ids) for one in last.outputs] == [5, 5]
            assert [one.finish_reason for one in last.outputs] == ["length", "length"]
            assert last.prompt_logprobs is not None
            assert len(last.prompt_logprobs) == 5
            assert last.metrics is not None
            assert last.metrics.finished_time is not None
            for earlier, later in itertools.pairwise(outputs):
                for a, b in zip(earlier.outputs, later.outputs, strict=True):
                    assert b.token_ids[: len(a.token_ids)] == a.token_ids
                    assert b.text.startswith(a.text)
            async for _ in llm.generate("Hello", SamplingParams(max_tokens=500, ignore_eos=True), "long"):
                llm.abort("long")
            assert client.num_unfinished == 0
            with pytest.raises(RequestError, match="prompt"):
                await anext(llm.generate(""))
            with pytest.raises(RequestError, match="prompt: 5"):
                await anext(llm.generate(5))  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="sampling_params"):
                await anext(llm.generate("x", {"max_tokens": 1}))  # type: ignore[arg-type]
        with pytest.raises(EngineDeadError):
            await anext(llm.generate("x"))
        with pytest.raises(RequestError, match="a field of EngineConfig"):
            AsyncLLM(blok_size=3)

    asyncio.run(go())


def test_draining_is_not_ready(fresh: Live) -> None:
    fresh.app.state.lifespan.draining = True
    assert HTTP.get(fresh.url + "/health/ready").json() == {"status": "draining"}
    assert isinstance(fresh.app.state.lifespan, app.Lifespan)


def test_the_servers_seed_decides_the_seeds_that_it_draws(tokenizer: Tokenizer) -> None:
    def told(seed: int | None) -> list[int]:
        app_client = inproc()
        with Live(app_client, tokenizer, ServerConfig(), seed=seed) as live:
            replies = [live.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 1}) for _ in range(3)]
            return [reply.json()["choices"][0]["seed"] for reply in replies]

    assert told(7) == told(7)
    assert len({*told(7), *told(8), *told(None), *told(None)}) == 12


def test_serve_hands_the_seed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[object] = []
    monkeypatch.setattr(app, "create_app", lambda client, server, model, parts, folder: seeds.append(parts.seed))
    monkeypatch.setattr(app.process, "run", lambda app, server, sockets, reach: 0)
    app.serve(EngineConfig(seed=7), ServerConfig(port=0, uvicorn_log_level="critical"))
    assert seeds == [7]


def test_R_27_a_start_that_fails_for_any_reason_ends_the_server(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not only by the errors that are thought of: it would load for ever, and say nothing."""
    client = inproc()

    async def broken() -> None:
        raise KeyError("planted")

    monkeypatch.setattr(client, "start", broken)
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as live:
        life = live.app.state.lifespan
        live.wait(life.ended.is_set)
        assert life.status() == "dead"
    assert "planted" in caplog.text
    assert "Traceback" in caplog.text
