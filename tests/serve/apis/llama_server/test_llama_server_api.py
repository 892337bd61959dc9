"""llama-server's own routes over HTTP, as its documentation has them (there is no client library of its own)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.fake import EOS as EOS_ID
from tests.support.server import HTTP, Live, brittle, inproc

from headrace import hub
from headrace.engine.build import build_engine
from headrace.engine.client import InprocClient
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.text.tokenizer import Tokenizer


def events(text: str) -> list[dict[str, Any]]:
    assert all(line.startswith("data: ") for line in text.split("\n\n") if line)
    return [json.loads(line[6:]) for line in text.split("\n\n") if line]


def post(live: Live, **more: Any) -> Any:
    reply = live.post("/completion", {"prompt": "Hello", "n_predict": 8} | more)
    assert reply.status_code == 200, reply.text
    return reply


def test_llama_completion(live: Live, say: Callable[[str], None]) -> None:
    say("one\ntwo three")
    body = post(live, n_predict=40).json()
    assert body["content"] == "one\ntwo three"
    assert (body["stop"], body["stop_type"], body["stopping_word"], body["model"]) == (True, "eos", "", "fake")
    assert (body["tokens_predicted"], body["tokens_evaluated"], body["tokens_cached"]) == (14, 5, 18)
    assert (body["has_new_line"], body["truncated"], body["tokens"], body["index"]) == (True, False, [], 0)
    assert body["timings"]["predicted_n"] == 14
    assert body["generation_settings"]["n_predict"] == 40
    assert live.post("/completions", {"prompt": "Hello"}).json()["content"] == "one\ntwo three"
    assert post(live, n_predict=3).json()["stop_type"] == "limit"
    word = post(live, stop=["wo"]).json()
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("one\nt", "word", "wo")


def test_llama_stream(live: Live) -> None:
    whole = post(live, seed=4).json()
    *parts, last = events(post(live, seed=4, stream=True).text)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert all(part["stop"] is False for part in parts)
    assert sum(len(part["tokens"]) for part in parts) == 8
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", "limit")
    assert last["timings"]["predicted_n"] == 8
    assert events(post(live, stream=True, timings_per_token=True).text)[0]["timings"]["predicted_n"] >= 1


def test_llama_prompts(live: Live) -> None:
    """A text, token ids, both mixed, several of them: the same tokens give the same answer."""
    text, ids, mixed = (post(live, prompt=prompt, seed=1).json() for prompt in ("Hi!", [72, 105, 33], [72, "i", 33]))
    assert [each["tokens_evaluated"] for each in (text, ids, mixed)] == [3, 3, 3]
    both = post(live, prompt=["Hi!", [72, 105, 33]], seed=1).json()
    assert [each["index"] for each in both] == [0, 1]
    assert both[0]["content"] == text["content"]
    assert ids["content"] == mixed["content"] == both[1]["content"]
    wrapped = [{"prompt_string": "Hi!"}, {"prompt_string": "Hi!", "multimodal_data": []}]
    assert [each["content"] for each in post(live, prompt=wrapped, seed=1).json()] == [text["content"]] * 2
    assert post(live, prompt=wrapped[0], seed=1).json()["content"] == text["content"]


def test_llama_n_probs_and_tokens(live: Live) -> None:
    body = post(live, n_probs=3, return_tokens=True).json()
    assert len(body["tokens"]) == 8
    entries = body["completion_probabilities"]
    assert [entry["id"] for entry in entries] == body["tokens"]
    assert all(len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0 for entry in entries)
    parts = events(post(live, n_probs=1, stream=True).text)
    assert sum(len(part.get("completion_probabilities", [])) for part in parts) == 8


def test_llama_response_fields(live: Live) -> None:
    fields = ["content", "generation_settings/n_predict", "timings/predicted_n", "nothing/here"]
    assert set(post(live, response_fields=fields).json()) == set(fields[:3])
    assert "generation_settings" in post(live, response_fields=[]).json()


def test_llama_logit_bias_and_settings(live: Live) -> None:
    """By id, by text (each of its tokens), false to forbid; what was asked for stands in generation_settings."""
    body: dict[str, Any] = {"logit_bias": [[5, 1.5], ["Hi", -2], [7, False]], "temperature": 0.5, "repeat_penalty": 1.2}
    body |= {
        "samplers": ["top_k", "typ_p", "temperature"],
        "mirostat": 2,
        "adaptive_target": 0.25,
        "dry_multiplier": 0.8,
        "xtc_probability": 0.1,
    }
    settings = post(live, **body).json()["generation_settings"]
    assert biases(settings) == {5: 1.5, 72: -2, 105: -2, 7: -100}
    assert (settings["temperature"], settings["repeat_penalty"], settings["mirostat"]) == (0.5, 1.2, 2)
    assert settings["samplers"] == ["top_k", "typical_p", "temperature"]
    assert (settings["dry_multiplier"], settings["xtc_probability"]) == (0.8, 0.1)
    assert (settings["adaptive_target"], settings["adaptive_decay"]) == (0.25, 0.9)
    assert isinstance(settings["seed"], int)
    by_name = post(live, logit_bias={"5": 1.5, "i": False}).json()["generation_settings"]
    assert biases(by_name) == {5: 1.5, 105: -100}
    # The end of the text is forbidden: minus infinity, which JSON has not.
    assert biases(post(live, ignore_eos=True).json()["generation_settings"]) == {EOS_ID: None}
    assert biases(post(live).json()["generation_settings"]) == {}


def biases(settings: dict[str, Any]) -> dict[int, float | None]:
    return {entry["token"]: entry["bias"] for entry in settings["logit_bias"]}


def test_llama_n_predict_without_a_limit_fills_the_context(live: Live) -> None:
    body = post(live, n_predict=-1, seed=-1).json()
    assert (body["tokens_predicted"], body["stop_type"], body["truncated"]) == (2048 - 5, "limit", True)


def test_llama_cache_prompt(live: Live) -> None:
    prompt = "C" * 200
    first, second, third = (
        post(live, prompt=prompt, cache_prompt=cache, seed=1).json() for cache in (True, True, False)
    )
    assert second["timings"]["cache_n"] >= 192
    assert third["timings"]["cache_n"] == 0
    assert first["content"] == second["content"]


def test_llama_probabilities_after_the_samplers_have_other_names(live: Live) -> None:
    body = {"n_predict": 1, "seed": 1, "n_probs": 5}
    [before] = post(live, **body).json()["completion_probabilities"]
    [after] = post(live, **body, post_sampling_probs=True).json()["completion_probabilities"]
    assert before.keys() - after.keys() == {"logprob", "top_logprobs"}
    # The simulated engine has no samplers.
    assert after["prob"] == pytest.approx(math.exp(before["logprob"]))
    assert [each["prob"] for each in after["top_probs"]] == pytest.approx(
        [math.exp(each["logprob"]) for each in before["top_logprobs"]]
    )


def test_llama_probabilities_after_the_samplers_are_those_of_the_tokens_that_are_left() -> None:
    client = InprocClient(lambda: build_engine(EngineConfig(model="builtin", num_gpu_blocks_override=64)))
    with Live(client, Tokenizer.load(hub.resolve("builtin")), ServerConfig(log_stats_interval=0)) as live:
        body = {"prompt": "Once upon", "n_predict": 2, "seed": 1, "n_probs": 5, "post_sampling_probs": True}
        entries = live.post("/completion", body | {"top_k": 3, "min_p": 0.0}).json()["completion_probabilities"]
        plain = live.post("/completion", body | {"top_k": 0, "min_p": 0.0, "top_p": 1.0}).json()
    assert all(0 < len(entry["top_probs"]) <= 3 for entry in entries)
    assert all(each["prob"] > 0 for entry in entries for each in entry["top_probs"])
    assert [len(entry["top_probs"]) for entry in plain["completion_probabilities"]] == [5, 5]


def test_llama_warnings(live: Live) -> None:
    inputs = {"id_slot": 1, "min_keep": 2, "t_max_predict_ms": 5, "n_probs": 1, "nprobs": 1}
    output = [
        "id_slot: ignored: a prefix is found wherever it was computed; see --slot-save-path",
        "min_keep: ignored: filters keep at least one token, and no other number",
        "nprobs: unknown, and ignored; did you mean n_probs?",
        "t_max_predict_ms: ignored: the same request must give the same answer at every speed; use n_predict",
    ]
    assert sorted(post(live, **inputs).json()["warnings"]) == output
    first, *others = events(post(live, **inputs, stream=True).text)
    assert sorted(first["warnings"]) == output
    assert not any("warnings" in other for other in others)


def test_llama_props_and_slots(live: Live) -> None:
    props = HTTP.get(live.url + "/props").json()
    assert (props["total_slots"], props["model_alias"], props["eos_token"]) == (64, "fake", "<eos>")
    assert props["default_generation_settings"]["n_ctx"] == 2048
    params = props["default_generation_settings"]["params"]
    assert [params[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [0.8, 40, 0.95, 0.05]
    assert props["chat_template"].startswith("{% for m in messages %}")
    slots = HTTP.get(live.url + "/slots").json()
    assert [slot["id"] for slot in slots] == list(range(64))
    live.wait(lambda: live.client.stats.num_running == 0)
    with HTTP.stream("POST", live.url + "/completion", json={"prompt": "x", "stream": True}, timeout=240) as reply:
        next(reply.iter_lines())
        live.wait(lambda: [s["is_processing"] for s in HTTP.get(live.url + "/slots").json()][:2] == [True, False])
    live.wait(lambda: live.client.num_unfinished == 0)
    assert HTTP.get(live.url + "/slots?fail_on_no_slot=1").status_code == 200


def test_llama_apply_template(live: Live) -> None:
    body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    assert live.post("/apply-template", body).json() == {"prompt": "[system]s[user]u[a]"}


def test_llama_embedding(live: Live) -> None:
    many = live.post("/embedding", {"content": ["one", "two"]}).json()
    assert [each["index"] for each in many] == [0, 1]
    (one,) = live.post("/embeddings", {"content": "one"}).json()
    assert one["embedding"] == many[0]["embedding"]
    assert sum(x * x for x in one["embedding"][0]) == pytest.approx(1)
    (ids,) = live.post("/embedding", {"content": [111, 110, 101]}).json()
    assert ids["embedding"] == one["embedding"]
    (raw,) = live.post("/embedding", {"content": "one", "embd_normalize": -1}).json()
    assert sum(x * x for x in raw["embedding"][0]) != pytest.approx(1)
    refused = live.post("/embedding", {"content": "one", "embd_normalize": 1})
    assert refused.json()["error"]["message"].startswith("embd_normalize: ")


def test_llama_tokenize_and_detokenize(live: Live) -> None:
    plain = live.post("/tokenize", {"content": "Hä"}).json()["tokens"]
    assert len(plain) == 3
    pieces = live.post("/tokenize", {"content": "Hä", "with_pieces": True}).json()["tokens"]
    assert [each["id"] for each in pieces] == plain
    assert [each["piece"] for each in pieces] == ["H", [0xC3], [0xA4]]
    assert live.post("/detokenize", {"tokens": plain}).json()["content"] == "Hä"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, 2.5]}, "prompt[1]"),
        ({"prompt": [1, "a"] * 100}, "prompt"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}}, "prompt.multimodal_data"),
        ({"prompt": ["x", {"text": "x"}]}, "prompt[1].text"),
        ({"prompt": {}}, "prompt.prompt_string"),
        ({"n_predict": -3}, "n_predict"),
        ({"n_predict": 2**31}, "n_predict"),
        ({"n_predict": "many"}, "n_predict"),
        ({"seed": -2}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"n_predict": None, "max_tokens": -3}, "max_tokens"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"temperature": -1}, "temperature"),
        ({"n_probs": 99}, "n_probs"),
        ({"logit_bias": [[1]]}, "logit_bias[0]"),
        ({"logit_bias": [[1, True]]}, "logit_bias[0]"),
        ({"logit_bias": [[256, 1]]}, "logit_bias"),
        ({"logit_bias": [[1, 1000]]}, "logit_bias"),
        ({"samplers": ["magic"]}, "samplers"),
        ({"grammar": "root ::= x", "json_schema": {}}, "grammar"),
    ],
)
def test_llama_refusals_name_the_field(live: Live, more: dict[str, Any], field: str) -> None:
    inputs = {"prompt": "x", "n_predict": 2} | more
    reply = live.post("/completion", {name: value for name, value in inputs.items() if value is not None})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"code", "message", "type"}
    assert error["code"] == 400
    assert error["message"].startswith(field), error


def test_a_prompt_that_does_not_fit_is_told_in_llama_servers_words(live: Live) -> None:
    prompt: dict[str, Any] = {"prompt": "x" * 2049, "max_tokens": 2}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 2049}]}
    for path, body in (("/completion", prompt), ("/v1/completions", prompt), ("/chat/completions", chat)):
        reply = live.post(path, body)
        error = reply.json()["error"]
        assert (reply.status_code, error["n_ctx"], error["n_prompt_tokens"] >= 2049) == (400, 2048, True), error
        if path == "/completion":
            assert error["type"] == "exceed_context_size_error"
            assert error["message"] == (
                "request (2049 tokens) exceeds the available context size (2048 tokens), try increasing it"
            )
    assert "n_ctx" not in live.post("/completion", {"prompt": []}).json()["error"]


def test_llama_what_is_not_done_is_told(live: Live) -> None:
    reply = live.post("/slots/0?action=save", {})
    assert (reply.status_code, reply.json()["error"]["type"]) == (501, "not_supported_error")
    assert live.post("/completion", {"prompt": "x", "model": "gpt"}).status_code == 404


def test_llama_props_takes_no_settings(live: Live) -> None:
    assert live.post("/props", {}).json() == {"success": True}
    reply = live.post("/props", {"n_ctx": 5})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, 400)
    assert reply.json()["error"]["message"].startswith("n_ctx: 5 is not allowed")
    assert HTTP.get(live.url + "/lora-adapters").json() == []
    assert HTTP.post(live.url + "/lora-adapters", json=[]).json() == {"success": True}
    reply = HTTP.post(live.url + "/lora-adapters", json=[{"id": 0, "scale": 1}])
    assert (reply.status_code, "none is loaded" in reply.json()["error"]["message"]) == (400, True)


def test_llama_a_broken_stream_ends_with_an_error(tokenizer: Tokenizer) -> None:
    with Live(brittle(8), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        output = events(live.post("/completion", {"prompt": "x", "stream": True}).text)
        assert set(output[-1]) == {"error"}
        assert not any(each.get("stop") for each in output[:-1])


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_stream_has_the_progress_of_its_prompt(tokenizer: Tokenizer, is_chat: bool) -> None:
    """Chunk by chunk, of all tokens, with those that the cache had; the text is the same without."""
    with Live(inproc(delay=0.01, max_num_batched_tokens=64), tokenizer, ServerConfig(log_stats_interval=0)) as small:
        text = "".join(map(str, range(150)))

        def stream(**more: Any) -> list[dict[str, Any]]:
            body = {"stream": True, "max_tokens": 4, "seed": 1, "temperature": 0.0} | more
            chat = {"messages": [{"role": "user", "content": text}]}
            path = "/v1/chat/completions" if is_chat else "/completion"
            body |= chat if is_chat else {"prompt": text}
            return events(small.post(path, body).text.partition("data: [")[0])

        def shown(parts: list[dict[str, Any]]) -> list[dict[str, int]]:
            return [part["prompt_progress"] for part in parts if "prompt_progress" in part]

        first, plain, again = stream(return_progress=True), stream(), stream(return_progress=True)
        assert not shown(plain)
        total = shown(first)[0]["total"]
        processed = [each["processed"] for each in shown(first)]
        assert processed == [*range(0, total, 64), total]
        assert {each["cache"] for each in shown(first)} == {0}
        times = [each["time_ms"] for each in shown(first)]
        assert times == sorted(times)
        beginning, last = shown(again)
        assert beginning["processed"] == beginning["cache"] == last["cache"]
        assert last["processed"] == last["total"] == total
        assert total - 32 <= last["cache"] < total
        # It ends before the first token, and no token is missing.
        place = [index for index, part in enumerate(first) if "prompt_progress" in part]
        contents = [each.get("content") or each.get("choices") for each in first]
        assert not any(contents[index] for index in place)
        rest = [part for part in first if "prompt_progress" not in part]
        assert text_of(rest) == text_of(plain) != ""


def text_of(parts: list[dict[str, Any]]) -> str:
    deltas = [part["choices"][0]["delta"] if part.get("choices") else part for part in parts]
    return "".join(delta.get("content") or "" for delta in deltas)
