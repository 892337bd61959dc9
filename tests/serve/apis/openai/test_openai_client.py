"""OpenAI's own Python client against a live server, over the fake engine."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.support.server import Live

from headrace.text.tokenizer import Tokenizer

MESSAGES: Any = [{"role": "user", "content": "Wer fährt so spät?"}]


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=240) as openai_client:
        yield openai_client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat_plain_and_streamed_are_one_text(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="fake", messages=MESSAGES, max_completion_tokens=40, seed=5)
    assert plain.usage is not None
    assert plain.usage.completion_tokens <= 40
    assert plain.choices[0].finish_reason in ("length", "stop")
    text, roles, reasons = "", [], []
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(
        model="fake", messages=MESSAGES, max_completion_tokens=40, seed=5, stream=True, stream_options=options
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == plain.choices[0].message.content
    assert roles == ["assistant"]
    assert reasons == [plain.choices[0].finish_reason]
    assert chunk.usage is not None
    assert chunk.usage.completion_tokens == plain.usage.completion_tokens
    # The second call found the first one's prompt in the cache, and says so.
    assert chunk.usage.prompt_tokens_details is not None
    assert chunk.usage.prompt_tokens_details.cached_tokens == plain.usage.prompt_tokens - 1


@pytest.mark.parametrize("prompt", ["Hällo", ["one", "two"], [72, 73], [[72], [73, 74]]])
def test_completions_of_all_prompt_forms(client: openai.OpenAI, prompt: Any) -> None:
    inputs: Any = {"model": "fake", "prompt": prompt, "max_tokens": 12, "n": 2, "seed": 9, "echo": True}
    plain = client.completions.create(**inputs)
    texts = [""] * len(plain.choices)
    for chunk in client.completions.create(**inputs, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in plain.choices]
    num_prompts = 2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert len(texts) == 2 * num_prompts
    first = prompt if isinstance(prompt, str) else "one" if prompt[0] == "one" else "HI" if prompt[0] == 72 else "H"
    assert texts[0].startswith(first)
    # Answer i has the seed + i, so two of one prompt differ, and each can be had alone.
    assert texts[0] != texts[1]
    alone = client.completions.create(**(inputs | {"n": 1, "seed": 10}))
    assert alone.choices[0].text == texts[1]


def test_logprobs(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=3, seed=1
    )
    content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert len(content) == 6
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in content)
    streamed = [
        entry
        for chunk in client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=3, seed=1, stream=True
        )
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or []
    ]
    assert streamed == content
    text = client.completions.create(model="fake", prompt="abc", max_tokens=4, logprobs=2, echo=True, seed=1)
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.tokens[:3] == ["a", "b", "c"]
    assert len(logprobs.tokens) == 7
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[:4] == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "echoed", "offsets"),
    [
        # Here, as with a begin of text that the tokenizer adds, the text leaves a special token out.
        ([255, 97, 98], "ab", [0, 0, 1]),
        # This one the client spelt itself, and it comes back as it was given.
        ("<eos>ab", "<eos>ab", [0, 5, 6]),
        ("ü", "ü", [0, 0]),
    ],
)
def test_text_offsets_are_places_in_the_text(
    client: openai.OpenAI, prompt: Any, echoed: str, offsets: list[int], stream: bool
) -> None:
    inputs: Any = {"model": "fake", "prompt": prompt, "max_tokens": 4, "logprobs": 0, "echo": True, "seed": 1}
    text, output, tokens = "", [], []
    for part in client.completions.create(**inputs, stream=True) if stream else [client.completions.create(**inputs)]:
        for choice in part.choices:
            text += choice.text
            if choice.logprobs is not None:
                output += choice.logprobs.text_offset or []
                tokens += choice.logprobs.tokens or []
    assert text.startswith(echoed)
    assert output[: len(offsets)] == offsets
    assert output[len(offsets)] == len(echoed)
    for token, offset in zip(tokens[len(offsets) :], output[len(offsets) :], strict=True):
        assert text[offset:].startswith(token) or token.startswith(("bytes:", "<eos>"))


def test_a_truncated_prompt_is_echoed_as_the_model_saw_it(client: openai.OpenAI) -> None:
    extra = {"truncate_prompt_tokens": 3}
    result = client.completions.create(model="fake", prompt="abcdef", max_tokens=1, echo=True, extra_body=extra)
    assert result.choices[0].text.startswith("def")


def test_R_15_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    inputs: Any = {"model": "fake", "prompt": "abc", "max_tokens": 200, "seed": 4, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**inputs)
    text = whole.choices[0].text
    stop = text[60:62]
    cut = client.completions.create(**inputs, stop=[stop, "never in there"])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].stop_reason == stop  # type: ignore[attr-defined]
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.usage is not None
    assert cut.usage.completion_tokens < 200
    streamed = "".join(c.choices[0].text for c in client.completions.create(**inputs, stop=stop, stream=True))
    assert streamed == cut.choices[0].text
    with_stop = client.completions.create(**(inputs | {"extra_body": {"include_stop_str_in_output": True}}), stop=stop)
    assert with_stop.choices[0].text == cut.choices[0].text + stop


def test_vllms_extras(client: openai.OpenAI) -> None:
    extra: Any = {
        "top_k": 5,
        "min_p": 0.1,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "min_tokens": 5,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": True,
        "truncate_prompt_tokens": 4,
        "prompt_logprobs": 1,
        "add_special_tokens": False,
        "priority": 0,
        "request_id": "mine",
        "return_token_ids": True,
        "cache_salt": "salt",
        "use_beam_search": False,
        "repetition_penalty": 1.0,
    }
    result: Any = client.completions.create(model="fake", prompt="abcdefgh", max_tokens=5, extra_body=extra)
    assert result.id == "cmpl-mine"
    choice = result.choices[0]
    assert choice.prompt_token_ids == list(b"efgh")
    assert len(choice.token_ids) == 5
    assert choice.prompt_logprobs[0] is None
    assert [list(entry) for entry in choice.prompt_logprobs[1:]] == [[str(x)] for x in b"fgh"]
    # A seed was drawn, and told: with it the same answer comes again.
    again: Any = client.completions.create(
        model="fake", prompt="abcdefgh", max_tokens=5, extra_body=extra | {"seed": result.seed}
    )
    assert again.choices[0].token_ids == choice.token_ids
    chat: Any = client.chat.completions.create(
        model="fake",
        messages=[*MESSAGES, {"role": "assistant", "content": "Es ist"}],
        max_tokens=3,
        extra_body={"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True},
    )
    assert bytes(chat.prompt_token_ids).decode() == "[user]Wer fährt so spät?[assistant]Es ist"


def test_timings_and_usage_agree(client: openai.OpenAI) -> None:
    result: Any = client.completions.create(model="fake", prompt="a long enough prompt", max_tokens=9, seed=1)
    timings = result.timings
    assert timings["cache_n"] + timings["prompt_n"] == result.usage.prompt_tokens
    assert timings["predicted_n"] == result.usage.completion_tokens
    assert timings["prompt_ms"] > 0
    # The first token ends the prompt: eight came in that time.
    assert timings["predicted_per_second"] == pytest.approx(1e3 * 8 / timings["predicted_ms"])
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 8)
    alone: Any = client.completions.create(model="fake", prompt="x", max_tokens=1)
    assert (alone.timings["predicted_n"], alone.timings["predicted_per_second"]) == (1, 0.0)
    *_, last = client.completions.create(model="fake", prompt="x", max_tokens=2, stream=True)
    assert last.timings["predicted_n"] == 2  # type: ignore[attr-defined]


def test_64_concurrent_streams(live: Live, client: openai.OpenAI) -> None:
    """I-14: each stream is the text that its request has alone."""

    def one(index: int, stream: bool) -> str:
        inputs: Any = {"model": "fake", "prompt": f"prompt {index % 5}", "max_tokens": 10 + index // 4, "seed": index}
        if stream:
            return "".join(c.choices[0].text for c in client.completions.create(**inputs, stream=True))
        return client.completions.create(**inputs).choices[0].text

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        streamed = list(pool.map(lambda i: one(i, True), range(64)))
    assert streamed == [one(index, False) for index in range(64)]
    live.wait(lambda: live.metric("kv_cache_usage_perc") == 0)
    assert live.metric("num_requests_running") == live.metric("num_requests_waiting") == 0
