"""Ollama's ADAPTER: a model that is created with an adapter answers by it, in every API and in `LLM`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
import torch
from tests.support.adapters import write_adapter, write_gguf
from tests.support.serving import serve
from tests.support.shallow import shallow

from headrace import LLM, AsyncLLM, LoRARequest, SamplingParams
from headrace.engine.library.model_settings import with_adapter
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import RequestError

SHAPES = {"self_attn.q_proj": (256, 256), "self_attn.k_proj": (64, 256), "mlp.down_proj": (256, 512)}
WEIGHTS = {f"model.layers.{i}.{name}.weight": torch.empty(shape) for i in range(2) for name, shape in SHAPES.items()}
GREEDY = SamplingParams(max_tokens=12, temperature=0)
PROMPT = "Once upon a time"


def text(llm: LLM, chosen: LoRARequest | None = None) -> str:
    [output] = llm.generate(PROMPT, GREEDY, lora_request=chosen)
    return output.outputs[0].text


async def text_of(model: Path) -> str:
    async with AsyncLLM(model=str(model), num_gpu_blocks_override=64) as engine:
        outputs = [each async for each in engine.generate(PROMPT, GREEDY)]
    return outputs[-1].outputs[0].text


def test_a_model_created_with_an_adapter_answers_by_it(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "base").symlink_to(shallow())
    paths = [write_adapter(tmp_path / name, WEIGHTS, seed=i, spread=0.3) for i, name in enumerate("ab")]
    file = write_gguf(paths[1], tmp_path / "b.gguf", Path(shallow()))
    llm = LLM(shallow(), enable_lora=True, num_gpu_blocks_override=64)
    plain, by_a, by_b = (text(llm, None if path is None else LoRARequest("x", 1, str(path))) for path in (None, *paths))
    assert len({plain, by_a, by_b}) == 3
    with serve("--models-dir", str(models), "--num-gpu-blocks-override", "64") as served:
        client = ollama.Client(host=served.url, timeout=240)
        parts = ("adapter_config.json", "adapter_model.safetensors")
        client.create("first", from_="base", adapters={name: client.create_blob(paths[0] / name) for name in parts})
        client.create("second", from_="base", adapters={"b.gguf": client.create_blob(file)}, system="Be brief.")
        client.create("third", from_="second", parameters={"temperature": 0.5})  # has what the second has

        def generated(name: str) -> str:
            options = {"temperature": 0, "num_predict": 12}
            return str(client.generate(name, PROMPT, raw=True, options=options).response)

        assert [generated(name) for name in ("first", "third")] == [by_a, by_b]
        body: dict[str, Any] = {"model": "first", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        reply = httpx.post(f"{served.url}/v1/completions", json=body, timeout=240).json()
        assert (reply["model"], reply["choices"][0]["text"]) == ("first", by_a)
        assert "ADAPTER adapter\n" in str(client.show("third").modelfile)
        assert "ADAPTER" not in str(client.show("base").modelfile)
        assert {str(card.model) for card in client.list().models} == {f"{name}:latest" for name in NAMES}

        digest = "sha256:" + "0" * 64
        for name, words in (("../a.gguf", "adapters: '../a.gguf'"), ("adapter_config.json", "or one GGUF file")):
            with pytest.raises(ollama.ResponseError, match=words):
                client.create("wrong", from_="base", adapters={name: digest})

        # A file that is none is an error of the model, which names it.
        (tmp_path / "x.gguf").write_bytes(b"GGUF" * 9)
        client.create("broken", from_="base", adapters={"x.gguf": client.create_blob(tmp_path / "x.gguf")})
        with pytest.raises(ollama.ResponseError, match="x.gguf: version is"):
            generated("broken")
        client.delete("broken")
        client.close()
    assert [text(LLM(str(models / name), num_gpu_blocks_override=64)) for name in ("first", "third")] == [by_a, by_b]
    assert asyncio.run(text_of(models / "first")) == by_a


NAMES = ("base", "first", "second", "third")


def test_a_model_s_own_adapter_is_the_only_one_with_a_scale(tmp_path: Path) -> None:
    write_adapter(tmp_path / ".adapter", WEIGHTS)
    config = with_adapter(EngineConfig(model=str(tmp_path), enable_lora=True, lora_modules=["a=b"]))
    assert config.lora_modules is not None
    assert len(config.lora_modules) == 2
    assert with_adapter(config) == config
    other = EngineConfig(model=str(tmp_path), enable_lora=True, lora_modules=['{"name": "a", "path": "b", "scale": 1}'])
    with pytest.raises(RequestError, match="at most one with a scale other than 0"):
        with_adapter(other)
