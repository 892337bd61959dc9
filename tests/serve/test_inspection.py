"""The data of the inspector's views: requests, the cache's tree and misses, numbers, limits, and recordings."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.security import rig
from tests.support.journal import notes_of_life, recorded
from tests.support.server import HTTP, Live, inproc

from headrace import hub
from headrace.core.prefix import Miss
from headrace.insight import summaries
from headrace.insight.limits import Machine
from headrace.insight.lives import Lives
from headrace.insight.summaries import MAX_MISSES, MAX_REQUESTS, misses_of, requests_of
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.quantize import samples
from headrace.text.bounded import BoundedProcess
from headrace.text.tokenizer import Tokenizer

BODY = {"max_tokens": 20, "seed": 1, "ignore_eos": True}
PROMPT = "A cat that was very, very {} sat there on a wall of stones"


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Live]:
    with Live(inproc(delay=0.0005), tokenizer, ServerConfig(log_stats_interval=0)) as live:
        for word in ("white", "black", "black"):
            live.post("/v1/completions", BODY | {"prompt": PROMPT.format(word)})
        yield live


def get(live: Live, path: str) -> Any:
    reply = HTTP.get(f"{live.url}/inspect/{path}")
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_requests_are_listed_newest_first_as_their_explanations_say(server: Live) -> None:
    rows = get(server, "requests")["requests"]
    assert [row["arrived"] for row in rows] == sorted((row["arrived"] for row in rows), reverse=True)
    # Those of the server's start; other tests may have added some.
    rows = rows[-3:]
    assert [row["num_cached_tokens"] for row in rows] == [60, 26, 0]
    for row in rows:
        assert (row["phase"], row["reason"], row["num_generated_tokens"]) == ("", "length", 20)
        [explanation] = HTTP.get(f"{server.url}/v1/requests/{row['id']}/explain").json()["data"]
        assert (row["ttft"], row["latency"]) == (explanation["ttft"], explanation["latency"])
        spans = explanation["spans"]
        assert spans[0][:2] == ["tokenising", 0.0]
        assert spans[-1][0] == "delivery"
        assert spans[-1][2] == pytest.approx(row["latency"])
        assert all(begin <= end for _, begin, end in spans)


def test_an_open_request_has_a_phase_and_counts_its_tokens(server: Live) -> None:
    body = BODY | {"prompt": "Hello there", "max_tokens": 1000, "stream": True}
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
        events = reply.iter_lines()
        for _ in range(20):
            next(events)
        row = get(server, "requests")["requests"][0]
    assert (row["phase"], row["reason"], row["num_prompt_tokens"]) == ("decode", "", 11)
    assert 1 < row["num_generated_tokens"] < 1000
    assert row["latency"] > row["ttft"] > 0


def test_the_texts_of_the_cache_are_decoded_beside_the_event_loop(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    cache_of = summaries.cache_of

    def noted(*args: Any) -> Any:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        threads.append(threading.current_thread().name)
        return cache_of(*args)

    monkeypatch.setattr(summaries, "cache_of", noted)
    assert get(server, "cache")["nodes"]
    assert len(threads) == 1


def test_the_cache_is_a_tree_with_texts_and_the_latest_misses(server: Live) -> None:
    cache = get(server, "cache")
    texts = {node["text"][:16]: node for node in cache["nodes"]}
    shared = texts["A cat that was v"]
    white, black = texts["ery, very white "], texts["ery, very black "]
    assert (shared["parent"], white["parent"], black["parent"]) == (None, shared["id"], shared["id"])
    assert (shared["hits"], black["hits"]) == (2, 1)
    assert black["last_use"] > 0
    assert all(len(node["text"]) <= 40 for node in cache["nodes"])
    assert cache["num_blocks_shown"] == cache["num_blocks_cached"] >= 6
    reasons = {miss["at"]: miss for miss in cache["misses"]}
    assert reasons[26]["reason"] == "diverged"
    assert (reasons[26]["prompt"], reasons[26]["cached"]) == ("y, very black sa", "y, very white ")
    assert reasons[0]["sentence"] == "nothing was cached under this root yet"


def test_lists_are_bounded_and_hits_are_no_misses(tmp_path: Path) -> None:
    core, lives = recorded(tmp_path / "log"), Lives()
    for note in notes_of_life(core):
        lives.follow(note)
    core.close()
    lists = misses_of(lives, lambda life: "other", None)
    assert 0 < len(lists) <= MAX_MISSES
    assert Miss.NONE.name.lower() not in {miss.reason for miss in lists}
    assert [miss.time for miss in lists] == sorted((miss.time for miss in lists), reverse=True)
    ended = list(lives.ended.items())
    for i in range(MAX_REQUESTS // len(ended) + 1):
        lives.ended |= {f"{i}-{name}": life for name, life in ended}
    assert len(requests_of(lives, 0.0).requests) == MAX_REQUESTS


def test_a_recording_is_replayed_as_a_viewer_had_seen_it(server: Live, tmp_path: Path) -> None:
    core = recorded(tmp_path / "log")
    assert core.journal is not None
    core.journal.watch(True)
    notes = list(notes_of_life(core))
    core.close()
    body = (tmp_path / "log").read_bytes()
    reply = HTTP.post(f"{server.url}/inspect/recording", content=body)
    assert reply.status_code == 200, reply.text
    replay = reply.json()
    steps = [{name: getattr(note.step, name) for name in note.step.__struct_fields__} for note in notes]
    assert replay["steps"] == json.loads(msgspec.json.encode(steps))
    assert replay["snapshot"] == {"step_id": 0, "blocks": [[6, [0], []], [3, [0], []]]}
    assert replay["num_steps"] == len(steps)
    for request in replay["requests"]:
        assert sum(part["seconds"] for part in request["parts"]) == pytest.approx(request["latency"], abs=1e-6)
        assert request["arrived"] > 0
    assert len(replay["requests"]) == sum(len(note.step.ends) for note in notes)


@pytest.mark.parametrize(("body", "words"), [(b"no", "no recording"), (b"", "no recording")])
def test_what_is_no_recording_is_refused(server: Live, body: bytes, words: str) -> None:
    reply = HTTP.post(f"{server.url}/inspect/recording", content=body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]
    assert "/headrace-" not in reply.text


def test_S_24_only_an_administrator_inspects(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = ServerConfig(api_key_file=rig.write_keys(tmp_path), log_stats_interval=0)
    with Live(inproc(), tokenizer, config) as locked:
        for path in ("requests", "cache", "limits"):
            url = f"{locked.url}/inspect/{path}"
            codes = [HTTP.get(url, headers=rig.bearer(key)).status_code for key in (rig.ALICE, rig.ROOT)]
            assert codes == [403, 200]


def test_a_model_without_files_has_no_numbers_and_no_limit(server: Live) -> None:
    reply = HTTP.get(f"{server.url}/inspect/numbers")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
    limits = get(server, "limits")
    assert (limits["weight_bytes"], limits["bandwidth"], limits["memory"]) == (0, None, None)


def test_numbers_are_read_by_a_process_of_their_own(tokenizer: Tokenizer) -> None:
    with Live(inproc(), tokenizer, ServerConfig(log_stats_interval=0), engine=EngineConfig(model="builtin")) as live:
        names = get(live, "numbers")["names"]
        assert len(names) == len(set(names)) > 3
        sample = get(live, f"numbers?name={names[1]}&group=3")
        assert (sample["name"], sample["group"], len(sample["values"])) == (names[1], 3, 128)
        assert [each["bits"] for each in sample["roundings"]] == [16, 8, 4, 2]
        for query, words in (("name=no", "name: 'no'"), (f"name={names[1]}&group=-1", "group: '-1'")):
            reply = HTTP.get(f"{live.url}/inspect/numbers?{query}")
            assert reply.status_code == 400
            assert words in reply.json()["error"]["message"]


def test_codes_scales_and_errors_of_a_group_agree() -> None:
    path = hub.resolve("builtin")
    for name in samples.names_of(path)[:3]:
        sample = samples.group_of(path, name, 5)
        exact = np.array(sample["values"])
        errors = []
        for each in sample["roundings"]:
            numbers = np.array(each["values"])
            errors.append(each["rms_error"])
            assert each["rms_error"] == pytest.approx(np.sqrt(np.mean((exact - numbers) ** 2)))
            if each["bits"] < 16:
                codes, groups = np.array(each["codes"]), np.arange(len(numbers)) // each["group_size"]
                zeros, mins = (np.array(each[part] or [0.0] * 99)[groups] for part in ("zeros", "minima"))
                again = (codes - zeros) * np.array(each["scales"])[groups] + mins
                assert again == pytest.approx(numbers, rel=1e-5, abs=1e-6)
                assert len(set(codes)) <= 2 ** each["bits"]
        assert errors == sorted(errors)
        assert errors[-1] > 0


def test_the_machine_is_measured_once_and_never_beside_a_request(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    run = BoundedProcess.run

    def fake_run(self: BoundedProcess, job: object, reply_type: Any) -> Any:
        if reply_type is not Machine:
            return run(self, job, reply_type)
        calls.append(job)
        return Machine(bandwidth=1e9, peaks={"f32": 1e12})

    monkeypatch.setattr(BoundedProcess, "run", fake_run)
    client = inproc(delay=0.002)
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as live:
        client.replicas[0].info = msgspec.structs.replace(client.info, weight_bytes=1000, kv_token_bytes=10)
        live.app.state.lifespan.models.default.explainer.lives.reads.set_sizes(client.info)
        body = BODY | {"prompt": "Hello there", "max_tokens": 1500, "stream": True}
        with HTTP.stream("POST", f"{live.url}/v1/completions", json=body) as reply:
            events = reply.iter_lines()
            next(events)
            Live.wait(lambda: get(live, "limits")["tokens_per_second"] > 0)
            limits = get(live, "limits")
        assert calls == []
        assert (limits["is_measured"], limits["tokens_per_step"]) == (False, 1.0)
        assert 1000 < limits["bytes_per_step"] < 1000 + 10 * 1520
        assert 0 < limits["memory"]["share"] <= 1
        Live.wait(lambda: get(live, "limits")["is_measured"])
        limits = get(live, "limits")
        assert (limits["bandwidth"], len(calls)) == (1e9, 1)
        [explanation] = live.post("/v1/completions", BODY | {"prompt": "x", "explain": True}).json()["explain"]
        memory = explanation["memory"]
        assert (memory["limit"], memory["is_measured"]) == (1e9, True)
        assert memory["share"] == pytest.approx(memory["bytes_per_second"] / 1e9)
