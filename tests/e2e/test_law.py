"""The determinism law (docs/architecture.md): output depends on the request alone, to the last bit.

54 prompts, at temperature 0 and 0.8, are run alone, one after the other, on a cold cache; these are the reference.
Then the same requests run in every other way that the engine has, and token ids and the bits of every reported
log-probability must be equal. The last tests break the law on purpose and see that it is noticed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import struct
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.law import (
    MAX_TOKENS,
    PROMPTS,
    Bits,
    assert_same,
    groups_of,
    make_core,
    make_requests,
    run,
    run_alone,
)  # fmt: skip
from tests.support.serving import serve, wait_for
from tests.support.shallow import shallow

from headrace import LLM
from headrace.backends.cpu.check.verify import View
from headrace.backends.cpu.matrix import unpacked
from headrace.backends.cpu.tape import Tape
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request
from headrace.sampling.sampler import Row


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests()


@pytest.fixture(scope="module")
def reference(requests: list[Request]) -> dict[str, Bits]:
    alone = run_alone(requests)
    assert len({tuple(ids) for ids, _ in alone.values()}) > len(PROMPTS)  # the model does say different things
    return alone


def test_I_13_in_a_batch_of_32_with_strangers(requests: list[Request], reference: dict[str, Bits]) -> None:
    core = make_core()
    for group in groups_of(requests, 32):
        assert_same(run(core, group), reference)
    core.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_I_13_chunked(chunk: int, requests: list[Request], reference: dict[str, Bits]) -> None:
    # One sequence at a time, so that the budget is the chunk size; then six together share a budget of the same size.
    for seqs in (1, 6) if chunk > 1 else (1,):
        core = make_core(max_num_batched_tokens=chunk, max_num_seqs=seqs, enable_prefix_caching=False)
        part = requests if chunk == 64 else requests[seqs % 2 :: 2]
        assert_same(run(core, part), reference)
        core.close()


def test_I_13_cold_and_warm_prefix_cache(requests: list[Request], reference: dict[str, Bits]) -> None:
    core = make_core()
    for group in groups_of(requests, 9):
        assert_same(run(core, group), reference)
    before = core.stats().prefix_cache_hits
    for group in groups_of(requests, 20):
        assert_same(run(core, group), reference)
    assert core.stats().prefix_cache_hits > before
    core.close()


def test_I_13_forced_preemption(requests: list[Request], reference: dict[str, Bits]) -> None:
    for caching in (True, False):
        core = make_core(enable_prefix_caching=caching)
        for group in groups_of(requests, 27):
            assert_same(run(core, group, preempt_every=3), reference)
        assert core.stats().num_preemptions > 8
        core.close()


def test_I_13_a_pool_too_small_for_all(requests: list[Request], reference: dict[str, Bits]) -> None:
    core = make_core(num_gpu_blocks_override=40, max_model_len=512)
    assert_same(run(core, groups_of(requests, 54)[0]), reference)
    assert core.stats().num_preemptions > 0
    core.close()


def test_I_13_resumed_from_tokens_so_far(requests: list[Request], reference: dict[str, Bits]) -> None:
    core = make_core()
    for request in requests[::5]:
        ids, logprob_bits = reference[request.request_id]
        for done in (1, 5):
            again = Request(
                request_id=f"{request.request_id}+{done}", prompt_token_ids=request.prompt_token_ids,
                params=request.params, resume_token_ids=ids[:done],
            )  # fmt: skip
            rest, rest_bits = run(core, [again])[again.request_id]
            assert rest == ids[done:]
            assert rest_bits == logprob_bits[done * 3 * 8 :]  # 3 doubles a token: its own and the top two
    core.close()


def test_I_13_with_two_threads(
    requests: list[Request], reference: dict[str, Bits], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(num_threads=2)
    tape = core.executor.program.tape  # type: ignore[attr-defined]
    right, seen = tape.run, set()

    def run_tape(dims: list[int], num_threads: int) -> None:
        seen.add(num_threads)
        right(dims, num_threads)

    monkeypatch.setattr(tape, "run", run_tape)
    assert_same(run(core, requests), reference)
    assert seen == {2}
    core.close()


def test_I_13_offline(requests: list[Request], reference: dict[str, Bits]) -> None:
    llm = LLM(shallow(), max_num_seqs=64, num_gpu_blocks_override=1024)
    prompts = [{"prompt_token_ids": r.prompt_token_ids} for r in requests]
    outputs = llm.generate(prompts, [r.params for r in requests], use_tqdm=False)
    for request, output in zip(requests, outputs, strict=True):
        answer = output.outputs[0]
        want_ids, want_bits = reference[request.request_id]
        assert answer.logprobs is not None
        logprobs = [entry[token_id].logprob for entry, token_id in zip(answer.logprobs, answer.token_ids, strict=True)]
        assert (answer.token_ids, doubles(logprobs)) == (want_ids, sampled_only(want_bits))
    llm.close()


def test_I_13_through_the_server(requests: list[Request], reference: dict[str, Bits]) -> None:
    """All at once over HTTP, half of them as streams; JSON writes doubles so that they read back to the bit."""

    async def ask(client: httpx.AsyncClient, request: Request, stream: bool) -> Bits:
        params = request.params
        body = {
            "prompt": request.prompt_token_ids, "max_tokens": params.max_tokens, "temperature": params.temperature,
            "seed": params.seed, "top_k": params.top_k, "top_p": params.top_p, "logprobs": 2, "ignore_eos": True,
            "return_token_ids": True, "stream": stream,
        }  # fmt: skip
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        events = [line[6:] for line in reply.text.split("\n") if line.startswith("data: {")] if stream else [reply.text]
        ids: list[int] = []
        logprobs_here: list[float] = []
        for event in events:
            for choice in json.loads(event)["choices"]:
                ids += choice.get("token_ids") or []
                logprobs_here += (choice.get("logprobs") or {}).get("token_logprobs") or []
        return ids, doubles(logprobs_here)

    async def ask_all(url: str) -> list[Bits]:
        async with httpx.AsyncClient(base_url=url, timeout=240) as client:
            return await asyncio.gather(*(ask(client, r, stream=i % 2 == 1) for i, r in enumerate(requests)))

    with serve(
        shallow(), "--served-model-name", "builtin", "--max-num-seqs", "48", "--num-gpu-blocks-override", "512"
    ) as served:
        answers = asyncio.run(ask_all(served.url))
        wait_for(served.url, "headrace:kv_cache_usage_perc", 0.0)
    wrong = []
    for request, (ids, own_bits) in zip(requests, answers, strict=True):
        want_ids, want_bits = reference[request.request_id]
        if (ids, own_bits) != (want_ids, sampled_only(want_bits)):
            wrong.append(request.request_id)
    assert not wrong


def doubles(numbers: list[float]) -> bytes:
    return struct.pack(f"{len(numbers)}d", *numbers)


def sampled_only(bits: bytes) -> bytes:
    """Of the reference's three log-probabilities a token, the sampled token's own."""
    return b"".join(bits[i : i + 8] for i in range(0, len(bits), 24))


def test_siblings_of_one_prompt_equal_lone_requests(requests: list[Request]) -> None:
    """`n` answers share the prompt's blocks by copy-on-write; each equals the request with its own seed alone."""
    base = requests[27]
    make = lambda i, group: Request(  # noqa: E731
        request_id=f"n{i}{group}", prompt_token_ids=base.prompt_token_ids, group=group,
        params=SamplingParams(temperature=0.8, seed=77 + i, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2),
    )  # fmt: skip
    core = make_core(enable_prefix_caching=False)
    alone = [run(core, [make(i, "")])[f"n{i}"] for i in range(4)]
    together = run(core, [make(i, "g") for i in range(4)])
    assert [together[f"n{i}g"] for i in range(4)] == alone
    core.close()


def test_control_a_product_over_all_rows_is_noticed(
    requests: list[Request], reference: dict[str, Bits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant what every framework does, one matmul for all rows of a batch: the law must break."""
    dense: dict[int, NDArray[np.float32]] = {}

    def multiply(view: View) -> None:
        fields = view.node.fields
        num_in, num_out = fields["num_in"], fields["num_out"]
        key = fields["weights"].ctypes.data
        if key not in dense:
            dense[key] = unpacked("f", fields["weights"], num_out, num_in, 0, fields["type"], range(num_out))
        out = view.array("x", np.float32, view.num_rows, fields["ld_x"])[:, :num_in] @ dense[key].T
        if fields["residual"] is not None:
            out += view.array("residual", np.float32, view.num_rows, fields["ld_res"])[:, :num_out]
        view.array("out", np.float32, view.num_rows, fields["ld_out"])[:, :num_out] = out

    def run_tape(tape: Tape, dims: list[int], num_threads: int = 0) -> None:
        for node in tape.nodes:
            if node.op == "linear_f" and dims[node.dim]:
                multiply(View(tape, node, dims[node.dim], dims))
            else:
                tape.run_range(node.index, node.index + 1, dims, num_threads)

    monkeypatch.setattr(Tape, "run", run_tape)
    core = make_core()
    result = run(core, groups_of(requests, 54)[0])
    same = sum(result[name][0] == reference[name][0] for name in result)
    assert same > len(result) / 2  # the product is right, but for the last bits
    with pytest.raises(AssertionError, match="differ"):
        assert_same(result, reference)
    core.close()


def test_control_noise_by_row_is_noticed(
    requests: list[Request], reference: dict[str, Bits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant noise that depends on the row in the batch: the law must break at temperature 0.8 and only there."""
    core = make_core()
    runner: Any = core.executor
    right = runner.sampler.sample_rows

    def sample_rows(logits: Any, rows: list[Row]) -> Any:
        moved = [dataclasses.replace(row, position=row.position + 1000 * i) for i, row in enumerate(rows)]
        return right(logits, moved)

    monkeypatch.setattr(runner.sampler, "sample_rows", sample_rows)
    result = run(core, groups_of(requests, 54)[0])
    assert_same({k: v for k, v in result.items() if k.endswith("@0.0")}, reference)
    with pytest.raises(AssertionError, match="differ"):
        assert_same(result, reference)
    core.close()
