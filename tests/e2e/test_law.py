"""The determinism law (docs/architecture.md): output depends on the request alone, to the last bit.

54 prompts, at temperature 0 and 0.8, are run alone, one after the other, on a cold cache; these are the reference.
Then the same requests run in every other way that the engine has, and token ids and the bits of every reported
log-probability must be equal. The last tests break the law on purpose and see that it is noticed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import struct

import httpx
import pytest
import torch
from tests.e2e.serving import serve, wait_for

from headrace import LLM, compose, hub
from headrace.backends.torch_ref.ops import RefMatrix, RefOps
from headrace.config import EngineConfig
from headrace.core.engine import EngineCore
from headrace.sampling.params import SamplingParams
from headrace.server.text import Tokenizer
from headrace.types import Request, TokenLogprob

MAX_TOKENS = 12
TEMPERATURES = (0.0, 0.8)
OPENINGS = [
    "Once upon a time",
    "One day, a little girl named Lily found a needle in her room.",
    "Tom and his dog Max went to the park. They saw a big tree",
    '"Where are you going?" asked the old woman.',
    "The ship left the harbour at dawn, and nobody",
    "In the middle of the night there was a knock",
]
MIDDLES = ["", " and then", " It was very cold, but the sun was shining over the hills and the river ran fast below."]
REPEATS = [1, 2, 9]  # the longest prompts pass one attention span and many blocks
PROMPTS = [opening + middle * n for opening, middle, n in itertools.product(OPENINGS, MIDDLES, REPEATS)]

Bits = tuple[list[int], bytes]


def bits_of(token_ids: list[int], logprobs: list[TokenLogprob]) -> Bits:
    numbers = [x for entry in logprobs for x in (entry.logprob, *(p for _, p in entry.top))]
    return list(token_ids), struct.pack(f"{len(numbers)}d", *numbers)


def make_core(**kwargs: object) -> EngineCore:
    options: dict[str, object] = {"model": "builtin", "max_num_seqs": 64, "num_gpu_blocks_override": 1024}
    return compose.build_engine(EngineConfig(**(options | kwargs)))  # type: ignore[arg-type]


def run(core: EngineCore, requests: list[Request], preempt_every: int = 0) -> dict[str, Bits]:
    """Run the requests together to their ends; forcibly preempt a running sequence at each n-th step."""
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    logprobs: dict[str, list[TokenLogprob]] = {r.request_id: [] for r in requests}
    ended: set[str] = set()
    for request in requests:
        core.add(request)
    for step in itertools.count(1):
        if not core.has_work():
            break
        output = core.step()
        if step % 8 == 0:
            core.scheduler.check()
        for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
            tokens[request_id] += token_ids
        for request_id, entries in output.logprobs.items():
            logprobs[request_id] += entries
        ended |= output.finished.keys()
        assert all(f.reason in ("stop", "length") for f in output.finished.values()), output.finished
        if preempt_every and step % preempt_every == 0:
            alive = [request_id for request_id in tokens if request_id not in ended]
            core.scheduler.preempt(alive[step % len(alive)]) if alive else None
    return {r.request_id: bits_of(tokens[r.request_id], logprobs[r.request_id]) for r in requests}


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    tokenizer = Tokenizer.load(hub.resolve("builtin"))
    made = []
    for (i, text), temperature in itertools.product(enumerate(PROMPTS), TEMPERATURES):
        params = SamplingParams(
            temperature=temperature, seed=1000 + i, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2,
            top_k=40 if i % 3 == 1 else 0, top_p=0.9 if i % 3 == 2 else 1.0,
        )  # fmt: skip
        made.append(Request(request_id=f"{i}@{temperature}", prompt_token_ids=tokenizer.encode(text), params=params))
    return made


@pytest.fixture(scope="module")
def reference(requests: list[Request]) -> dict[str, Bits]:
    core = make_core(enable_prefix_caching=False)
    found: dict[str, Bits] = {}
    for request in requests:
        found |= run(core, [request])
    core.close()
    assert len({tuple(ids) for ids, _ in found.values()}) > len(PROMPTS)  # the model does say different things
    return found


def groups_of(requests: list[Request], size: int) -> list[list[Request]]:
    # A stride walk makes neighbours of strangers.
    mixed = [requests[(i * 31) % len(requests)] for i in range(len(requests))]
    assert len({r.request_id for r in mixed}) == len(requests)
    return [mixed[i : i + size] for i in range(0, len(mixed), size)]


def assert_same(found: dict[str, Bits], reference: dict[str, Bits]) -> None:
    wrong = {k for k in found if found[k] != reference[k]}
    assert not wrong, f"{len(wrong)} of {len(found)} differ, such as {sorted(wrong)[:4]}"


def test_I_13_in_a_batch_of_32_with_strangers(requests: list[Request], reference: dict[str, Bits]) -> None:
    core = make_core()
    for group in groups_of(requests, 32):
        assert_same(run(core, group), reference)
    core.close()


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
    core = make_core()
    core.executor.num_threads = 2  # type: ignore[attr-defined]
    seen: set[int] = set()
    model = core.executor.model  # type: ignore[attr-defined]
    forward = model.forward

    def spy(*args: object) -> object:
        seen.add(torch.get_num_threads())
        return forward(*args)

    monkeypatch.setattr(model, "forward", spy)
    assert_same(run(core, requests[::4]), reference)
    assert seen == {2}
    core.close()


def test_I_13_offline(requests: list[Request], reference: dict[str, Bits]) -> None:
    llm = LLM(max_num_seqs=64, num_gpu_blocks_override=1024)
    prompts = [{"prompt_token_ids": r.prompt_token_ids} for r in requests]
    outputs = llm.generate(prompts, [r.params for r in requests], use_tqdm=False)
    for request, output in zip(requests, outputs, strict=True):
        answer = output.outputs[0]
        want_ids, want_bits = reference[request.request_id]
        assert answer.logprobs is not None
        own = [entry[token_id].logprob for entry, token_id in zip(answer.logprobs, answer.token_ids, strict=True)]
        assert (answer.token_ids, doubles(own)) == (want_ids, sampled_only(want_bits))
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
        events = (
            [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")] if stream else [reply.text]
        )
        ids: list[int] = []
        own: list[float] = []
        for event in events:
            for choice in json.loads(event)["choices"]:
                ids += choice.get("token_ids") or []
                own += (choice.get("logprobs") or {}).get("token_logprobs") or []
        return ids, doubles(own)

    async def ask_all(url: str) -> list[Bits]:
        async with httpx.AsyncClient(base_url=url, timeout=100) as client:
            return await asyncio.gather(*(ask(client, r, stream=i % 2 == 1) for i, r in enumerate(requests)))

    with serve("--max-num-seqs", "48", "--num-gpu-blocks-override", "512") as served:
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

    def linear(self: RefOps, x: torch.Tensor, matrix: RefMatrix) -> torch.Tensor:
        out = (x.float() @ matrix.data[: matrix.num_in])[:, : matrix.num_out]
        return (out if matrix.bias is None else out + matrix.bias).to(self.dtype)

    monkeypatch.setattr(RefOps, "linear", linear)
    core = make_core()
    found = run(core, groups_of(requests, 54)[0])
    with pytest.raises(AssertionError, match="differ"):
        assert_same(found, reference)
    core.close()


def test_control_noise_by_row_is_noticed(
    requests: list[Request], reference: dict[str, Bits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant noise that depends on the row in the batch: the law must break at temperature 0.8 and only there."""
    core = make_core()
    sampler = core.executor.sampler  # type: ignore[attr-defined]
    right = sampler.sample

    def wrong(logits, params, positions, num_prompts):  # type: ignore[no-untyped-def]
        positions = [p + 1000 * i for i, p in enumerate(positions)]
        return right(logits, params, positions, [n + 1000 * i for i, n in enumerate(num_prompts)])

    monkeypatch.setattr(sampler, "sample", wrong)
    found = run(core, groups_of(requests, 54)[0])
    assert_same({k: v for k, v in found.items() if k.endswith("@0.0")}, reference)
    with pytest.raises(AssertionError, match="differ"):
        assert_same(found, reference)
    core.close()
