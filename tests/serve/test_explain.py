"""A call explains itself to its caller: in its reply, in the last event of its stream, and afterwards by its id."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.security import rig
from tests.support.server import HTTP, Live, inproc

from headrace.engine import generation
from headrace.protocol.config import ServerConfig
from headrace.protocol.step import Request
from headrace.text.inputs import make_requests
from headrace.text.tokenizer import Tokenizer

BODY = {
    "prompt": "Once upon a time there was a dog.",
    "max_tokens": 6,
    "seed": 1,
    "temperature": 0.0,
    "ignore_eos": True,
}


WAITED = "waited in the queue for a place among the running"


def total(explanation: dict[str, Any]) -> float:
    return sum(part["seconds"] for part in explanation["parts"])


def test_a_reply_has_the_parts_of_its_latency(live: Live) -> None:
    start = time.monotonic()
    reply = live.post("/v1/completions", BODY | {"explain": True, "n": 2}).json()
    seconds = time.monotonic() - start
    assert len(reply["explain"]) == 2
    for explanation in reply["explain"]:
        assert total(explanation) == pytest.approx(explanation["latency"], abs=1e-6)
        assert 0 < explanation["ttft"] <= explanation["latency"] < seconds
        assert {"prefill", "decode", "delivery"} <= {part["name"] for part in explanation["parts"]}
        assert explanation["finish_reason"] == "length"
        assert 0 < len(explanation["sentences"]) <= 5
    later = HTTP.get(f"{live.url}/v1/requests/{reply['id']}/explain").json()["data"]
    assert [each["parts"] for each in later] == [each["parts"] for each in reply["explain"]]


def test_a_reply_without_explain_has_none_and_the_same_bits(live: Live) -> None:
    plain = live.post("/v1/completions", BODY | {"logprobs": 3}).json()
    assert "explain" not in plain
    explained = live.post("/v1/completions", BODY | {"logprobs": 3, "explain": True}).json()
    assert [each["finish_reason"] for each in explained["explain"]] == ["length"]
    for name in ("text", "logprobs", "finish_reason"):
        assert explained["choices"][0][name] == plain["choices"][0][name]


def test_the_last_event_of_a_stream_has_it_also_after_a_stop_string(live: Live) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 40,
        "seed": 3,
        "stream": True,
        "explain": True,
    }
    text = live.post("/v1/chat/completions", body | {"stream": False}).json()["choices"][0]["message"]["content"]
    for more in ({}, {"stop": text[3]}):
        events = live.post("/v1/chat/completions", body | more).text.split("\n")
        chunks = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
        assert [("explain" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        [explanation] = chunks[-1]["explain"]
        assert total(explanation) == pytest.approx(explanation["latency"], abs=1e-6)
        assert min(part["seconds"] for part in explanation["parts"]) >= 0


def test_the_prefix_cache_says_why_with_the_text_on_both_sides(live: Live) -> None:
    for name in ("white", "black"):
        prompt = f"A cat that was very, very {name} sat there on a wall"
        [explanation] = live.post("/v1/completions", BODY | {"prompt": prompt, "explain": True}).json()["explain"]
    [verdict] = explanation["prefix_cache"]
    assert (verdict["reason"], verdict["at_token"], verdict["num_cached_tokens"]) == ("diverged", 26, 26)
    assert verdict["prompt"] == "ry, very black sa"[1:]
    assert verdict["cached"].startswith("y, very white")


def test_an_id_that_is_not_known_is_not_found(live: Live) -> None:
    answer = HTTP.get(f"{live.url}/v1/requests/cmpl-nobody/explain")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_S_24_a_holder_reads_its_own_calls_and_an_administrator_all(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = ServerConfig(api_key_file=rig.write_keys(tmp_path), log_stats_interval=0)
    with Live(inproc(delay=0.002, max_num_seqs=1), tokenizer, config) as locked:

        def post(key: str, **more: Any) -> dict[str, Any]:
            reply = locked.post("/v1/completions", BODY | {"explain": True} | more, headers=rig.bearer(key))
            result: dict[str, Any] = reply.json()
            return result

        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(post, rig.ALICE, prompt="a" * 200, max_tokens=100)
            Live.wait(lambda: locked.client.stats.num_running == 1)
            bobs = post(rig.BOB)
            alices = long.result()
        [explanation] = bobs["explain"]
        [alice_explanation] = alices["explain"]
        text = json.dumps(explanation)
        assert explanation["sentences"][0].endswith(f"of {1e3 * explanation['latency']:.0f} ms: " + WAITED)
        assert alice_explanation["id"] not in text
        # The same prompt under another root: nothing of it is searched or shown.
        assert explanation["prefix_cache"][0]["reason"] == "empty"
        codes = {}
        for key in (rig.ALICE, rig.BOB, rig.ROOT):
            url = f"{locked.url}/v1/requests/{bobs['id']}/explain"
            codes[key] = HTTP.get(url, headers=rig.bearer(key)).status_code
        assert codes == {rig.ALICE: 404, rig.BOB: 200, rig.ROOT: 200}


def test_responses_have_it_when_they_have_ended(live: Live) -> None:
    body = {"input": "Tell me a story", "max_output_tokens": 8, "seed": 4}
    plain = live.post("/v1/responses", body).json()
    reply = live.post("/v1/responses", body | {"explain": True}).json()
    assert "explain" not in plain
    assert "warnings" not in reply, reply
    assert reply["output"][0]["content"] == plain["output"][0]["content"]
    [explanation] = reply["explain"]
    assert total(explanation) == pytest.approx(explanation["latency"], abs=1e-6)
    lines = live.post("/v1/responses", body | {"explain": True, "stream": True}).text.split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    whole = [event["response"] for event in events if "response" in event]
    assert [("explain" in response) for response in whole] == [False] * (len(whole) - 1) + [True]


@pytest.mark.parametrize(
    ("path", "body", "num"),
    [
        ("/v1/embeddings", {"input": ["one text", "another"]}, 2),
        ("/pooling", {"input": "one text"}, 1),
        ("/v1/score", {"text_1": "one", "text_2": ["two", "three"]}, 3),
        ("/v1/rerank", {"query": "one", "documents": ["two", "three"]}, 3),
    ],
)
def test_vectors_have_an_explanation_for_each_text(live: Live, path: str, body: dict[str, Any], num: int) -> None:
    plain, explained = (live.post(path, body | more).json() for more in ({}, {"explain": True}))
    assert "explain" not in plain
    name = "results" if path == "/v1/rerank" else "data"
    assert explained[name] == plain[name]
    assert len(explained["explain"]) == num
    for each in explained["explain"]:
        assert total(each) == pytest.approx(each["latency"], abs=1e-6)
        assert "prefill" in {part["name"] for part in each["parts"]}


def test_the_engines_requests_have_the_replys_id(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def noted(*args: Any, **options: Any) -> list[Request]:
        requests = make_requests(*args, **options)
        names.extend(each.request_id for each in requests)
        return requests

    monkeypatch.setattr(generation, "make_requests", noted)
    for path, begin in (("/v1/completions", "cmpl-"), ("/v1/chat/completions", "chatcmpl-")):
        body = BODY if begin == "cmpl-" else {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        reply = live.post(path, body | {"n": 2})
        assert reply.json()["id"].startswith(begin)
        assert all(name.startswith(reply.json()["id"].removeprefix(begin)) for name in names)
        assert len(set(names)) == 2
        names.clear()
    # An id that the client chose is its own; the reply then has the engine's.
    reply = HTTP.post(live.url + "/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    assert reply.json()["id"] == f"cmpl-{names[0]}"
