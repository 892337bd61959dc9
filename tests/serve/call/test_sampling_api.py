"""What the front end does for the samplers: words to token ids, n and best_of, processors of the caller's own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.server import Live, inproc

from headrace import LLM, AsyncLLM, hub
from headrace.engine import build
from headrace.engine.client import InprocClient
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams, Watermark
from headrace.sampling.watermark import detect
from headrace.text.inputs import breakers, spellings, with_token_ids
from headrace.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.load(hub.resolve("builtin"))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    result = LLM(max_num_seqs=16, num_gpu_blocks_override=256)
    yield result
    result.close()


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer) -> Iterator[Live]:
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0)) as served:
        yield served


@pytest.fixture(scope="module")
def real(words: Tokenizer) -> Iterator[Live]:
    """A server over the built-in model: the other one draws nothing."""
    config = EngineConfig(model="builtin", num_gpu_blocks_override=128, num_threads=1)
    with Live(InprocClient(lambda: build.build_engine(config)), words, ServerConfig(log_stats_interval=0)) as served:
        yield served


# -- words


def test_dry_breakers_are_the_tokens_that_have_them(words: Tokenizer) -> None:
    for text in ("\n", '"', ":", "an"):
        want = [i for i in range(words.vocab_size) if text.encode() in words.token_bytes(i)]
        assert breakers(words, (text,)) == (want or words.encode(text, add_special_tokens=False)[-1:])
    assert breakers(words, ("zq!x",)) == words.encode("zq!x", add_special_tokens=False)[-1:], "no token has it whole"
    params = with_token_ids(SamplingParams(dry_multiplier=1.0), words, 300)
    assert params.dry_sequence_breaker_ids == [i for i in breakers(words, ("\n", ":", '"', "*")) if i < 300]
    assert with_token_ids(SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=[]), words, 300) == SamplingParams(
        dry_multiplier=1.0, dry_sequence_breakers=[], dry_sequence_breaker_ids=[]
    )


def test_bad_words_are_spelled_with_and_without_a_space(words: Tokenizer) -> None:
    for text in ("cat", "Once upon"):
        plain, spaced = (words.encode(x, add_special_tokens=False) for x in (text, " " + text))
        assert spellings(words, text) == ([plain, spaced] if plain != spaced else [plain])


def test_texts_need_a_tokenizer(words: Tokenizer) -> None:
    for fields in ({"bad_words": ["x"]}, {"dry_multiplier": 1.0, "dry_sequence_breakers": ["x"]},
                   {"thinking_token_budget": 3}):  # fmt: skip
        with pytest.raises(RequestError, match=next(iter(reversed(fields)))):
            with_token_ids(SamplingParams(**fields), None, 300)  # type: ignore[arg-type]
    sampling_params = SamplingParams(bad_words=["x"], bad_words_token_ids=[[1]])
    assert with_token_ids(sampling_params, None, 300) is sampling_params


def test_bad_words_never_come(llm: LLM, words: Tokenizer) -> None:
    message = {}
    for bad in (None, ["the", "she", "a"]):
        params = SamplingParams(temperature=0.0, max_tokens=40, bad_words=bad)
        [output] = llm.generate("Once upon a time there was", params, use_tqdm=False)
        message[bool(bad)] = output.outputs[0]
    banned = [ids for word in ("the", "she", "a") for ids in spellings(words, word)]
    runs = lambda ids, n: [ids[i : i + n] for i in range(len(ids) - n + 1)]  # noqa: E731
    came = {with_ban: any(bad in runs(message[with_ban].token_ids, len(bad)) for bad in banned) for with_ban in message}
    assert came == {False: True, True: False}


def test_thinking_token_budget_closes_what_the_prompt_opened(llm: LLM, words: Tokenizer) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, thinking_token_budget=5, ignore_eos=True)
    end = words.encode("</think>", add_special_tokens=False)
    [output] = llm.generate("Lily said: <think>", params, use_tqdm=False)
    ids = output.outputs[0].token_ids
    assert ids[5 : 5 + len(end)] == end
    assert end[:1] != ids[4:5]


# -- n and best_of


def mean(output: Any) -> float:
    return float(output.cumulative_logprob / len(output.token_ids))


def test_best_of_tells_the_likeliest_by_the_token(llm: LLM) -> None:
    fields: dict[str, Any] = {"seed": 5, "max_tokens": 12, "temperature": 1.2}
    [samples] = llm.generate("Once upon a time", SamplingParams(n=6, logprobs=0, **fields), use_tqdm=False)
    [best] = llm.generate("Once upon a time", SamplingParams(n=2, best_of=6, **fields), use_tqdm=False)
    want = sorted(samples.outputs, key=mean, reverse=True)[:2]
    assert [each.token_ids for each in best.outputs] == [each.token_ids for each in want]
    assert [each.index for each in best.outputs] == [0, 1]
    assert [mean(each) for each in best.outputs] == [mean(each) for each in want]
    assert all(each.logprobs is None for each in best.outputs), "asked for on the way only"
    assert len({tuple(each.token_ids) for each in samples.outputs}) > 3


def test_best_of_over_http(live: Live) -> None:
    body = {"prompt": "Hello", "max_tokens": 6, "seed": 3, "temperature": 1.0, "ignore_eos": True}
    many = live.post("/v1/completions", body | {"n": 5, "logprobs": 0, "return_token_ids": True}).json()["choices"]
    output = live.post("/v1/completions", body | {"n": 2, "best_of": 5, "return_token_ids": True}).json()
    means = [sum(choice["logprobs"]["token_logprobs"]) / 6 for choice in many]
    order = sorted(range(5), key=lambda i: -means[i])[:2]
    assert [choice["token_ids"] for choice in output["choices"]] == [many[i]["token_ids"] for i in order]
    assert [choice["index"] for choice in output["choices"]] == [0, 1]
    assert [choice["seed"] for choice in output["choices"]] == [3 + i for i in order]
    assert all(choice["logprobs"] is None for choice in output["choices"])
    assert output["usage"]["completion_tokens"] == 30, "all that were made are paid for"


def test_best_of_is_refused_where_it_can_not_be(live: Live) -> None:
    for more in ({"best_of": 3, "stream": True}, {"n": 3, "best_of": 2}):
        reply = live.post("/v1/completions", {"prompt": "x"} | more)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "best_of"
    assert live.post("/v1/completions", {"prompt": "x", "best_of": 2, "n": 2, "stream": True}).status_code == 200


# -- processors


def test_processors_of_the_callers_own(llm: LLM) -> None:
    def only(prompt: list[int], message: list[int], logits: np.ndarray) -> np.ndarray:
        logits[:] = -np.inf
        logits[40 + len(message)] = 0.0
        return logits

    params = SamplingParams(temperature=1.0, max_tokens=4, logits_processors=[only], ignore_eos=True)
    [output] = llm.generate("Hello", params, use_tqdm=False)
    assert output.outputs[0].token_ids == [40, 41, 42, 43]


def test_a_processor_that_fails_fails_its_request_alone(llm: LLM) -> None:
    def broken(prompt: list[int], output: list[int], logits: np.ndarray) -> np.ndarray:
        raise KeyError("oh")

    params = [SamplingParams(max_tokens=4, logits_processors=[broken]), SamplingParams(max_tokens=4, ignore_eos=True)]
    failed, fine = llm.generate(["Hello", "Hello"], params, use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert len(fine.outputs[0].token_ids) == 4


def test_processors_do_not_cross_a_process(live: Live) -> None:
    reply = live.post("/v1/completions", {"prompt": "x", "logits_processors": ["os.system"]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "logits_processors"

    async def go() -> None:
        async with AsyncLLM(model="builtin", in_process=False, num_gpu_blocks_override=64) as engine:
            params = SamplingParams(max_tokens=2, logits_processors=[lambda p, t, x: x])
            with pytest.raises(RequestError, match="own process"):
                async for _ in engine.generate("Hello", params):
                    pass

    asyncio.run(go())


# -- parameters over HTTP


@pytest.mark.parametrize(
    ("field", "value"),
    [("repetition_penalty", 0.0), ("frequency_penalty", 2.5), ("presence_penalty", "x"), ("typical_p", -0.1),
     ("xtc_probability", 1.5), ("dry_multiplier", -1.0), ("mirostat", 3), ("dynatemp_range", -0.1),
     ("no_repeat_ngram_size", -1), ("allowed_token_ids", []), ("samplers", ["heat"]), ("bad_words", [""]),
     ("thinking_token_budget", -1), ("adaptive_target", 1.5), ("adaptive_decay", 1.0), ("trace_decode_token_ids", []),
     ("watermark", 5), ("dry_sequence_breakers", ["x"] * 17), ("top_n_sigma", "NaN")],
)  # fmt: skip
def test_S_12_parameters_out_of_range_are_refused_by_name(live: Live, field: str, value: Any) -> None:
    reply = live.post("/v1/completions", {"prompt": "x", field: value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field


@pytest.mark.parametrize("token_id", [-1, 256, 257, 2**31])
@pytest.mark.parametrize("field", ["allowed_token_ids", "logit_bias", "trace_decode_token_ids"])
def test_S_13_token_ids_beyond_the_logits_are_refused(live: Live, field: str, token_id: int) -> None:
    value: Any = {str(token_id): 1.0} if field == "logit_bias" else [3, token_id]
    reply = live.post("/v1/completions", {"prompt": "x", field: value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field


# -- replay and watermark over HTTP


def test_a_trace_over_http(real: Live) -> None:
    """The answer is the trace, ends of text in it included; stop tokens and max_tokens still end it."""
    trace = [70, 1, 71, 72]
    body = {"prompt": "x", "trace_decode_token_ids": trace, "return_token_ids": True, "logprobs": 1}
    [choice] = real.post("/v1/completions", body).json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (trace, "length")
    assert len(choice["logprobs"]["token_logprobs"]) == 4
    [choice] = real.post("/v1/completions", body | {"max_tokens": 2}).json()["choices"]
    assert choice["token_ids"] == trace[:2]
    [choice] = real.post("/v1/completions", body | {"stop_token_ids": [71]}).json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (trace[:3], "stop")
    for more in ({"n": 2}, {"guided_regex": "a+"}, {"use_beam_search": True, "beam_width": 2}):
        reply = real.post("/v1/completions", body | {"logprobs": None} | more)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "trace_decode_token_ids"


def test_a_watermark_over_http(real: Live) -> None:
    body = {"prompt": "x", "max_tokens": 60, "seed": 3, "ignore_eos": True, "return_token_ids": True}
    scores = {}
    for name, value in {"off": False, "on": {"gamma": 0.5, "delta": 10.0, "hashing_key": 4}}.items():
        reply = real.post("/v1/completions", body | {"watermark": value}).json()
        token_ids = reply["choices"][0]["token_ids"]
        scores[name] = detect(token_ids, Watermark(gamma=0.5, hashing_key=4)).z_score
    assert scores["on"] > 4.0 > scores["off"]
    for bad, field in (({"gamma": 2}, "watermark.gamma"), ({"salt": 2}, "watermark.salt")):
        reply = real.post("/v1/completions", body | {"watermark": bad})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
