"""Offline scripts in the way of vLLM's documentation, with the line of imports changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

import headrace
from headrace import (
    LLM,
    CompletionOutput,
    EngineArgs,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from headrace.protocol.errors import RequestError

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    args = EngineArgs(
        model="builtin", max_model_len=512, trust_remote_code=True, tensor_parallel_size=1, max_num_seqs=8
    )
    engine = LLM(**asdict(args))
    yield engine
    engine.close()


def test_generate(llm: LLM) -> None:
    prompts = ["Once upon a time", "The ship left"]
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4)
    for prompt, output in zip(prompts, llm.generate(prompts, params, lora_request=None), strict=True):
        assert isinstance(output, RequestOutput)
        assert isinstance(output.outputs[0], CompletionOutput)
        assert output.prompt == prompt
        assert output.outputs[0].text


def test_prompts_as_dictionaries(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=4)
    token_ids = llm.get_tokenizer().encode("Once upon a time")
    prompts = [TokensPrompt(prompt_token_ids=token_ids), TextPrompt(prompt="Once upon a time")]
    one, other = llm.generate(prompts, greedy)
    assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_chat_with_tools(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Tell me a story."}]
    tokenizer = llm.get_tokenizer()
    template = {"chat_template": "{{ tools | tojson }} {{ messages[0].content }}"}
    text = tokenizer.apply_chat_template(conversation, [TOOL], add_generation_prompt=True, tokenize=False, **template)
    ids = tokenizer.apply_chat_template(conversation, [TOOL], add_generation_prompt=True, **template)
    [output] = llm.chat(conversation, SamplingParams(max_tokens=2), tools=[TOOL], use_tqdm=False, **template)
    assert (output.prompt, output.prompt_token_ids) == (text, ids)
    [plain] = llm.chat(conversation, SamplingParams(max_tokens=2), use_tqdm=False)
    assert "get_weather" in str(text)
    assert "get_weather" not in str(plain.prompt)


def test_structured_outputs(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]), max_tokens=8)
    copy = params.clone()
    assert copy == params
    assert copy is not params
    [output] = llm.generate("This is wonderful!", copy)
    assert output.outputs[0].text in ("Positive", "Negative")


def test_embed_encode_and_score(llm: LLM) -> None:
    texts = ["a dog ran home", "a dog ran away"]
    [vector] = llm.embed("a dog ran home")
    assert llm.encode("a dog ran home", pooling_task="embed")[0].outputs.embedding == vector.outputs.embedding
    same, near = llm.score("a dog ran home", texts)
    assert same.outputs.score == pytest.approx(1.0)
    assert near.outputs.score < 1.0
    assert [each.outputs.score for each in llm.score(texts, texts)] == pytest.approx([1.0, 1.0])
    with pytest.raises(RequestError, match="data_1: 2 .* one text, or as many as data_2 has"):
        llm.score(texts, ["a"])
    with pytest.raises(RequestError, match="pooling_task: not supported here"):
        llm.encode("a", pooling_task="classify")


@pytest.mark.parametrize("method", ["generate", "chat"])
def test_adapters_are_refused_by_name(llm: LLM, method: str) -> None:
    """By an engine that takes none, and where they are none."""
    call: Any = getattr(llm, method)
    prompt: Any = "a" if method == "generate" else [{"role": "user", "content": "a"}]
    with pytest.raises(RequestError, match="lora_request: 'adapter' is not allowed; it must be a LoRARequest"):
        call(prompt, lora_request="adapter")
    with pytest.raises(RequestError, match="enable_lora"):
        call(prompt, lora_request=headrace.LoRARequest("a", 1, "/nowhere"))


def test_every_public_name_is_there() -> None:
    assert all(getattr(headrace, name) for name in headrace.__all__)
