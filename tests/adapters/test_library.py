"""Adapters in every call of `LLM` and `AsyncLLM`: vLLM's `lora_request`, and more of them than there are slots."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import write_adapter

from headrace import LLM, AsyncLLM, BeamSearchParams, LoRARequest, SamplingParams
from headrace.checkpoint import adapters as checkpoint_adapters
from headrace.protocol.errors import RequestError

SHAPES = {"self_attn.q_proj": (256, 256), "self_attn.v_proj": (64, 256), "mlp.down_proj": (256, 512)}
WEIGHTS = {f"model.layers.{i}.{name}.weight": torch.empty(shape) for i in range(14) for name, shape in SHAPES.items()}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
TALK = [{"role": "user", "content": "Tell me a story."}]
PROMPT = "Once upon a time"
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "num_threads": 1, "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    paths = [write_adapter(folder / name, WEIGHTS, seed=i, spread=0.2) for i, name in enumerate("abc")]
    return [LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(paths)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin", **OPTIONS)


def texts(llm: LLM, chosen: Any, count: int = 1) -> list[str]:
    outputs = llm.generate([PROMPT] * count, GREEDY, lora_request=chosen)
    return [output.outputs[0].text for output in outputs]


def test_every_call_takes_one_adapter_or_one_for_each_prompt(llm: LLM, adapters: list[LoRARequest]) -> None:
    a, b, _ = adapters
    plain, with_a, with_b = (texts(llm, chosen)[0] for chosen in (None, a, b))
    assert len({plain, with_a, with_b}) == 3
    assert texts(llm, [a, None, b], 3) == [with_a, plain, with_b]
    assert texts(llm, a, 2) == [with_a] * 2

    calls: dict[str, Any] = {
        "chat": lambda chosen: llm.chat(TALK, GREEDY, lora_request=chosen)[0].outputs[0].text,
        "embed": lambda chosen: llm.embed(PROMPT, lora_request=chosen)[0].outputs.embedding,
        "encode": lambda chosen: llm.encode(PROMPT, lora_request=chosen)[0].outputs.embedding,
        "score": lambda chosen: llm.score(PROMPT, "The sea", lora_request=chosen)[0].outputs.score,
        "beam_search": lambda chosen: (
            llm.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=8), chosen)[0].sequences[0].tokens
        ),
        "stream": lambda chosen: [*llm.stream(PROMPT, GREEDY, chosen)][-1].outputs[0].text,
    }
    for name, call in calls.items():
        assert call(None) != call(a) != call(b), name
    assert calls["stream"](a) == with_a


def test_the_least_recently_used_adapter_makes_room(llm: LLM, adapters: list[LoRARequest]) -> None:
    expected = [texts(llm, chosen)[0] for chosen in adapters]  # three, of which two are in memory at once
    assert [texts(llm, chosen)[0] for chosen in adapters] == expected
    a, b, c = adapters
    stream = llm.stream(PROMPT, GREEDY, a)
    next(stream)
    assert texts(llm, b)[0] == expected[1]
    assert texts(llm, c)[0] == expected[2]  # in place of b: a stream has a
    assert [*stream][-1].outputs[0].text == expected[0]
    with pytest.raises(RequestError, match="max_loras"):
        texts(llm, adapters, 3)
    assert texts(llm, a)[0] == expected[0]


def test_a_wrong_lora_request_is_named(llm: LLM, tmp_path: Path) -> None:
    wrong: list[tuple[Any, str]] = [
        ("adapters/a", "lora_request.*a LoRARequest"),
        ([None, None], "lora_request.*one for each of the 1 prompts"),
        (LoRARequest("x", 1, ""), "lora_request.lora_path"),
        (LoRARequest("x", 1, str(tmp_path / "none")), "lora_path.*is no folder"),
    ]
    for chosen, words in wrong:
        with pytest.raises(RequestError, match=words):
            texts(llm, chosen)
    with pytest.raises(RequestError, match="enable_lora"):
        texts(LLM("builtin", num_gpu_blocks_override=64), LoRARequest("x", 1, "y"))
    with pytest.raises(RequestError, match="lora_request"):
        llm.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=8), True)  # type: ignore[arg-type]


@pytest.mark.parametrize("in_process", [True, False])
def test_async_calls_take_an_adapter(in_process: bool, llm: LLM, adapters: list[LoRARequest]) -> None:
    expected = [texts(llm, chosen)[0] for chosen in (None, *adapters)]
    search = BeamSearchParams(beam_width=3, max_tokens=8)
    beams = llm.beam_search(PROMPT, search, adapters[0])[0].sequences[0].tokens

    async def work() -> None:
        async with AsyncLLM(model="builtin", in_process=in_process, **OPTIONS) as engine:

            async def text(chosen: LoRARequest | None) -> str:
                outputs = [each async for each in engine.generate(PROMPT, GREEDY, lora_request=chosen)]
                return outputs[-1].outputs[0].text

            a, b, c = adapters
            assert await asyncio.gather(*(text(chosen) for chosen in (None, a, b, a))) == [*expected[:3], expected[1]]
            assert [await text(chosen) for chosen in (c, a)] == [expected[3], expected[1]]
            assert (await engine.beam_search(PROMPT, search, lora_request=a)).sequences[0].tokens == beams
            # A call that is left early frees its adapter at once.
            long = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)
            for chosen in (b, c):
                async for _ in engine.generate(PROMPT, long, lora_request=chosen):
                    break
            assert await text(a) == expected[1]
            with pytest.raises(RequestError, match="is no folder"):
                await text(LoRARequest("x", 1, "none"))

    asyncio.run(work())


def test_streams_go_on_while_an_adapter_is_read(adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch) -> None:
    """The read ends only after the others have had many tokens; a new request begins meanwhile, too."""
    reading, gate, read = threading.Event(), threading.Event(), checkpoint_adapters.read

    def held(*arguments: Any) -> Any:
        reading.set()
        assert gate.wait(60)
        return read(*arguments)

    monkeypatch.setattr(checkpoint_adapters, "read", held)
    long = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)

    async def work() -> None:
        async with AsyncLLM(model="builtin", **OPTIONS) as engine:

            async def text(chosen: LoRARequest | None) -> str:
                outputs = [each async for each in engine.generate(PROMPT, GREEDY, lora_request=chosen)]
                return outputs[-1].outputs[0].text

            stream = engine.generate(PROMPT, long)
            await anext(stream)
            adapted = asyncio.create_task(text(adapters[0]))
            assert await asyncio.to_thread(reading.wait, 60)
            for _ in range(20):
                await anext(stream)
            before = await text(None)
            assert not adapted.done()
            # An engine without work takes in requests too.
            await stream.aclose()  # type: ignore[attr-defined]
            assert await text(None) == before
            gate.set()
            assert await adapted != before

    asyncio.run(asyncio.wait_for(work(), 120))
