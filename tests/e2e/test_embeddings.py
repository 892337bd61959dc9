"""Vectors of prompts: the determinism law holds for them, and they are `transformers`' hidden states."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.harness import BACKENDS, save_random
from tests.support.law import PROMPTS, make_core

from headrace import LLM, hub
from headrace.engine.core import EngineCore
from headrace.models import llama, qwen3
from headrace.protocol.errors import RequestError
from headrace.protocol.step import Request
from headrace.runner.runner import Runner
from headrace.text.tokenizer import Tokenizer
from headrace.text.vectors import EMBEDDING_PARAMS

Bits = dict[str, list[float]]


def make_requests() -> list[Request]:
    tokenizer = Tokenizer.load(hub.resolve("builtin"))
    kinds = ("last", "mean", "cls", "max", "weightedmean", "tokens")
    return [
        Request(
            request_id=f"{kind}{i}", prompt_token_ids=tokenizer.encode(text), params=EMBEDDING_PARAMS, pooling=kind
        )
        for i, text in enumerate(dict.fromkeys(PROMPTS[::4]))
        for kind in kinds
    ]  # fmt: skip


def run(core: EngineCore, requests: list[Request], num_preemptions: int = 0) -> Bits:
    """To their ends; of the first steps every second one is followed by a preemption, that many times."""
    pooled: Bits = {}
    for request in requests:
        core.add(request)
    num_steps = 0
    while core.has_work():
        output = core.step()
        num_steps += 1
        core.scheduler.check()
        assert not output.token_ids
        assert all(finish.reason == "stop" for finish in output.finished.values()), output.finished
        assert output.pooled.keys() == output.finished.keys()
        pooled |= output.pooled
        running = core.scheduler.running
        if num_steps % 2 == 0 and num_steps <= 2 * num_preemptions and running:
            core.scheduler.preempt(max(running, key=lambda seq: seq.num_computed).request_id)
    return pooled


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests()


@pytest.fixture(scope="module")
def reference(requests: list[Request]) -> Bits:
    core = make_core(enable_prefix_caching=False)
    result: Bits = {}
    for request in requests:
        result |= run(core, [request])
    core.close()
    # Of a decoder the first rows differ only where the first tokens do.
    rest = [tuple(vector) for name, vector in result.items() if not name.startswith("cls")]
    assert len(set(rest)) == len(rest) < len(result) == len(requests)
    return result


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"max_num_batched_tokens": 7, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 64, "max_num_seqs": 5},
        {"num_threads": 2},
        {"num_gpu_blocks_override": 24, "max_model_len": 256},
    ],
)
def test_I_13_vectors(options: dict[str, Any], requests: list[Request], reference: Bits) -> None:
    core = make_core(**options)
    selected = requests[::5] if options.get("max_num_batched_tokens") == 1 else requests
    for _ in range(2):  # on a cold cache, and on a warm one
        assert run(core, selected) == {request.request_id: reference[request.request_id] for request in selected}
    core.close()


SMALL: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 3, "enable_prefix_caching": False}


def test_I_13_vectors_with_forced_preemption(requests: list[Request], reference: Bits) -> None:
    core = make_core(**SMALL)
    # Sums first, so that they are what is under way.
    assert run(core, sorted(requests, key=lambda request: request.pooling != "mean"), num_preemptions=12) == reference
    assert core.stats().num_recomputed_tokens > 100
    core.close()


def test_control_a_sum_that_begins_twice_is_noticed(
    requests: list[Request], reference: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.core import steps

    monkeypatch.setattr(steps, "pooling_of", lambda seq: (seq.pooling, seq.pooled))
    core = make_core(**SMALL)
    result = run(core, sorted(requests, key=lambda request: request.pooling != "mean"), num_preemptions=12)
    core.close()
    wrong = {name for name in result if result[name] != reference[name]}
    assert wrong
    assert all(name.startswith(("mean", "weightedmean")) for name in wrong)


def test_control_numbers_in_another_order_are_noticed(
    requests: list[Request], reference: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core()
    runner = core.executor
    assert isinstance(runner, Runner)
    right = runner.program.hidden_states
    monkeypatch.setattr(runner.program, "hidden_states", lambda rows: right(rows)[:, ::-1])
    assert run(core, requests[:4]) != {request.request_id: reference[request.request_id] for request in requests[:4]}
    core.close()


def test_tokens_and_vectors_in_one_batch(requests: list[Request], reference: Bits) -> None:
    """Requests for text beside them change nothing, and are changed by nothing."""
    from tests.support.law import make_requests as text_requests
    from tests.support.law import run_alone

    texts = text_requests()[:6]
    want = run_alone(texts)
    core = make_core()
    for request in (*texts, *requests[:8]):
        core.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in texts}
    vectors: Bits = {}
    while core.has_work():
        output = core.step()
        vectors |= output.pooled
        for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
            tokens[request_id] += token_ids
    core.close()
    assert vectors == {request.request_id: reference[request.request_id] for request in requests[:8]}
    assert tokens == {name: token_ids for name, (token_ids, _) in want.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", [llama.TINY, qwen3.TINY], ids=["llama", "qwen3"])
def test_vectors_are_the_hidden_states_of_transformers(config: dict[str, Any], backend: str, tmp_path: Path) -> None:
    model = save_random(config, tmp_path)
    noise = random.Random(0)
    prompts = [[noise.randrange(config["vocab_size"]) for _ in range(length)] for length in (1, 17, 90)]
    llm = LLM(str(tmp_path), backend=backend, dtype="float32", num_gpu_blocks_override=64, num_threads=1)
    for pooling in ("last", "mean"):
        outputs = llm.embed(prompts, use_tqdm=False, pooling=pooling, normalize=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            with torch.inference_mode():
                hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
            want = hidden[-1] if pooling == "last" else hidden.mean(dim=0)
            np.testing.assert_allclose(output.outputs.embedding, want.numpy(), rtol=2e-4, atol=2e-5)
            assert output.outputs.hidden_size == config["hidden_size"]
            assert output.prompt_token_ids == prompt
    llm.close()


def test_the_last_row_of_all_is_the_last(reference: Bits) -> None:
    for name, vector in reference.items():
        if name.startswith("last"):
            rows = reference[name.replace("last", "tokens")]
            assert rows[-len(vector) :] == vector
            assert rows[: len(vector)] == reference[name.replace("last", "cls")]


def test_embed_offline(model: str) -> None:
    llm = LLM(model, num_gpu_blocks_override=64, num_threads=1)
    texts = ["A cat sat on the mat.", "The cat was sitting on a mat.", "The ship left the harbour at dawn."]
    one, two, three = (output.outputs.embedding for output in llm.embed(texts, use_tqdm=False, pooling="mean"))
    assert np.linalg.norm(one) == pytest.approx(1)
    assert np.dot(one, two) > np.dot(one, three)
    [cut] = llm.embed(texts[0], use_tqdm=False, dimensions=32)
    assert len(cut.outputs.embedding) == 32
    assert cut.prompt == texts[0]
    for wrong in ({"pooling": "median"}, {"pooling": "max+mean"}, {"dimensions": 10_000}):
        with pytest.raises(RequestError):
            llm.embed(texts, use_tqdm=False, **wrong)  # type: ignore[arg-type]
    llm.close()
