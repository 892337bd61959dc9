"""S-23, S-24, S-25: keys of one server share neither cache nor storage nor limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.security import rig
from tests.support.server import HTTP, Live, inproc

from headrace.engine import generation, tenants
from headrace.engine.tenants import Limits, RateLimitError, Rates, Tenant, acting_as
from headrace.protocol.config import ServerConfig
from headrace.serve.apis.llama_server.reply import COUNTERS
from headrace.serve.storage import store
from headrace.serve.storage.store import Store
from headrace.text import grammars, inputs
from headrace.text.tokenizer import Tokenizer

LONG = "The quick brown fox jumps over the lazy dog, and so on. " * 2


def ask(live: Live, key: str, path: str, body: dict[str, Any], **more: Any) -> Any:
    reply = HTTP.post(live.url + path, json=body, headers=rig.bearer(key), timeout=30, **more)
    assert reply.status_code == 200, reply.text
    return reply.json()


def cached(live: Live, key: str, prompt: str, **more: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "seed": 1} | more
    usage = ask(live, key, "/v1/completions", body)["usage"]
    cached_tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached_tokens


def hits(live: Live) -> float:
    text = HTTP.get(live.url + "/metrics", headers=rig.bearer(rig.ROOT)).text
    return sum(
        float(x.rpartition(" ")[2]) for x in text.splitlines() if x.startswith("headrace:prefix_cache_hits_total")
    )


def long_body(path: str) -> dict[str, Any]:
    texts = {"hi": path + LONG, "ho": "!" + path + LONG}
    data: dict[str, Any] = json.loads(
        json.dumps(rig.body_of(path)),
        object_hook=lambda d: {k: texts.get(v, v) if isinstance(v, str) else v for k, v in d.items()},
    )
    data |= {"documents": [texts["ho"]]} if "documents" in data else {}
    return data


@pytest.fixture
def many(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Live]:
    """A server with two fresh holders for each route, whose caches are empty."""
    text = rig.KEY_FILE + "".join(f"[{who}{i}]\nkey = '{who}{i}'\n" for i in range(len(rig.BODIES)) for who in "ab")
    config = ServerConfig(api_key_file=rig.write_keys(tmp_path, text), log_stats_interval=0)
    with Live(inproc(max_model_len=512), tokenizer, config) as live:
        yield live


def test_S_24_no_route_reads_another_keys_cache(many: Live) -> None:
    """Of every route: what the holder finds again, nobody else does."""
    result = []
    for index, path in enumerate(rig.BODIES):
        body = long_body(path)
        rig.call(many, "POST", path, json=body, headers=rig.bearer(f"a{index}"))
        before = hits(many)
        rig.call(many, "POST", path, json=body, headers=rig.bearer(f"b{index}"))
        assert hits(many) == before, path
        rig.call(many, "POST", path, json=body, headers=rig.bearer(f"a{index}"))
        result += [path] if hits(many) > before else []
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"} <= set(result)


def test_S_24_probing_anothers_prefix_finds_nothing(locked: Live) -> None:
    for index in range(30):
        # Of no two do the first letters agree.
        prompt = chr(33 + index) + LONG
        assert cached(locked, rig.ALICE, prompt) == 0
        assert cached(locked, rig.BOB, prompt + "x") == 0
        assert cached(locked, rig.ALICE, prompt + "x") > 0


def test_S_24_control_without_a_salt_it_is_seen(locked: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "salted", lambda salt: salt)
    assert cached(locked, rig.ALICE, "control" + LONG) == 0
    assert cached(locked, rig.BOB, "control" + LONG) > 0


FORM = {"prompt": "x", "max_tokens": 1, "seed": 1, "dry_multiplier": 1.0}


def work_for(live: Live, key: str, word: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[str]:
    """What had to be built for a call with a form and breakers of this word: all that a cache would save."""
    built = []
    with monkeypatch.context() as patch:
        for module, name in ((grammars.GrammarChecker, "_try"), (inputs, "_all_token_bytes")):
            right = getattr(module, name)
            patch.setattr(module, name, lambda *source, r=right, n=name: (built.append(n), r(*source))[1])
        body = FORM | {"structured_outputs": {"regex": word}, "dry_sequence_breakers": [word]} | more
        # The fake engine does not follow forms: what counts is done before it gets the call.
        HTTP.post(live.url + "/v1/completions", json=body, headers=rig.bearer(key), timeout=240)
    return built


def test_S_24_nothing_that_was_built_for_one_key_is_there_for_another(
    locked: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = ["_try", "_all_token_bytes"]
    assert work_for(locked, rig.ALICE, "secret", monkeypatch) == everything
    assert work_for(locked, rig.ALICE, "secret", monkeypatch) == []
    assert work_for(locked, rig.BOB, "secret", monkeypatch) == everything
    assert work_for(locked, rig.ALICE, "secret", monkeypatch, cache_salt="mine") == everything
    with acting_as(Tenant("alice")):
        form = {"regex": "secret", "cache_salt": tenants.salted("")}
    body = FORM | {"structured_outputs": form}
    reply = HTTP.post(locked.url + "/v1/completions", json=body, headers=rig.bearer(rig.BOB), timeout=240)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "structured_outputs.cache_salt")


def test_S_24_control_without_a_salt_what_was_built_is_shared(locked: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "salted", lambda salt: salt)
    assert work_for(locked, rig.ALICE, "shared", monkeypatch) == ["_try", "_all_token_bytes"]
    assert work_for(locked, rig.BOB, "shared", monkeypatch) == []


def test_S_24_no_salt_of_ones_own_reaches_anothers_cache(locked: Live) -> None:
    with acting_as(Tenant("alice")):
        alices = tenants.salted("mine")
    assert cached(locked, rig.ALICE, "salt" + LONG, cache_salt="mine") == 0
    for salt in ("mine", alices, alices[:32]):
        assert cached(locked, rig.BOB, "salt" + LONG, cache_salt=salt) == 0
    assert cached(locked, rig.ALICE, "salt" + LONG, cache_salt="mine") > 0
    assert cached(locked, rig.ALICE, "salt" + LONG) == 0
    assert tenants.salted("") == "", "without keys there is no salt, as before"


def test_S_24_a_salt_changes_no_output(locked: Live) -> None:
    body = {"prompt": LONG, "max_tokens": 20, "seed": 3, "logprobs": 1, "ignore_eos": True}
    one, other = (ask(locked, key, "/v1/completions", body)["choices"] for key in (rig.ALICE, rig.BOB))
    assert one == other


def test_S_25_two_callers_with_one_id_are_two(locked: Live) -> None:
    body = {"prompt": LONG, "max_tokens": 200, "request_id": "same", "ignore_eos": True}
    # Both are open at once. A call whose request is taken for the other's would never end.
    headers = {"x-request-timeout": "10"}
    calls = [
        rig.begin(locked, "POST", "/v1/completions", json=body | {"seed": seed}, headers=headers | rig.bearer(key))
        for seed, key in ((1, rig.ALICE), (2, rig.BOB))
    ]
    replies = [call() for call in calls]
    assert [reply.status_code for reply in replies] == [200, 200]
    one, two = (reply.json() for reply in replies)
    assert one["id"] == two["id"]
    assert one["choices"][0]["text"] != two["choices"][0]["text"]


# -- storage

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}'


@pytest.fixture
def objects(locked: Live) -> dict[str, str]:
    """Ids of what Alice keeps, by the name of the path's parameter."""
    headers = rig.bearer(rig.ALICE)
    response = HTTP.post(
        locked.url + "/v1/files", files={"file": ("in.jsonl", LINE)}, data={"purpose": "batch"}, headers=headers
    )
    file_id = response.json()["id"]
    expected = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = ask(locked, rig.ALICE, "/v1/batches", expected)["id"]

    def done() -> bool:
        return HTTP.get(locked.url + f"/v1/batches/{batch_id}", headers=headers).json()["status"] == "completed"

    Live.wait(done, 20)
    text = ask(locked, rig.ALICE, "/v1/responses", {"input": "hi", "max_output_tokens": 2})
    output = HTTP.get(locked.url + f"/v1/batches/{batch_id}", headers=headers).json()["output_file_id"]
    return {"file_id": file_id, "batch_id": batch_id, "response_id": text["id"], "output": output}


def seen_by(live: Live, objects: dict[str, str], key: str) -> list[str]:
    """Routes that tell `key` of Alice's."""
    result = []
    for method, path in rig.routes(live.app):
        for name in ("file_id", "batch_id", "response_id"):
            ids = [objects[name], objects["output"]] if name == "file_id" else [objects[name]]
            for entry_id in ids if f"{{{name}}}" in path else ():
                # What would end it is tried by others only.
                if key == rig.ALICE and method not in rig.READS:
                    continue
                reply = HTTP.request(method, live.url + path.replace(f"{{{name}}}", entry_id), headers=rig.bearer(key))
                if reply.status_code != 404:
                    result.append(f"{method} {path}")
    for path in ("/v1/files", "/v1/batches"):
        if HTTP.get(live.url + path, headers=rig.bearer(key)).json()["data"]:
            result.append(f"GET {path}")
    for path, body in (
        (
            "/v1/batches",
            {"input_file_id": objects["file_id"], "endpoint": "/v1/completions", "completion_window": "1h"},
        ),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1, "previous_response_id": objects["response_id"]}),
    ):
        if key != rig.ALICE and HTTP.post(live.url + path, json=body, headers=rig.bearer(key)).status_code != 404:
            result.append(f"POST {path}")
    return result


def test_S_21_what_one_key_keeps_is_not_there_for_others(locked: Live, objects: dict[str, str]) -> None:
    assert len(seen_by(locked, objects, rig.ALICE)) > 10
    assert seen_by(locked, objects, rig.BOB) == []
    assert seen_by(locked, objects, rig.ROOT) == []


def test_S_21_control_a_store_that_tells_everybody_is_noticed(
    locked: Live, objects: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.tenants, "may_see", lambda owner: True)
    result = seen_by(locked, {name: "x-1" if name == "batch_id" else entry for name, entry in objects.items()}, rig.BOB)
    assert "GET /v1/files/{file_id}/content" in result


def test_owners_outlive_the_server(tmp_path: Path) -> None:
    def opened() -> Store:
        return Store("file-", tmp_path, max_items=9, max_bytes=10**6)

    first = opened()
    nobodys = first.new_id()
    first.put(nobodys, {"a": 1}, b"before keys")
    with acting_as(Tenant("alice")):
        alices = first.new_id()
        first.put(alices, {"a": 2}, b"body")
    first.set_metadata(alices, {"a": 3})
    first.close()
    second = opened()
    assert set(second) == {nobodys, alices}
    with acting_as(Tenant("bob")):
        assert list(second) == []
        assert alices not in second
        assert second.metadata(alices) is None
        with pytest.raises(KeyError):
            second.body(alices)
    with acting_as(Tenant("alice")):
        assert (second.metadata(alices), second.body(alices), list(second)) == ({"a": 3}, b"body", [alices])
    with acting_as(Tenant("root", is_admin=True)):
        assert list(second) == [nobodys]
    second.close()


# -- rates


def test_buckets_refill_evenly_and_may_go_into_debt() -> None:
    now = [0.0]
    rates = Rates(Limits(requests=2, tokens=60), {"alice": Limits(tokens=6000)}, lambda: now[0])
    rates.count_request()
    rates.count_request()
    with pytest.raises(RateLimitError) as caught:
        rates.count_request()
    assert caught.value.retry_after == 30
    now[0] = 29.9
    with pytest.raises(RateLimitError):
        rates.count_request()
    now[0] = 30.0
    rates.count_request()
    rates.check_tokens(60)
    meter = rates.meter()
    assert meter is not None
    meter(90)
    with pytest.raises(RateLimitError) as caught:
        rates.check_tokens(1)
    assert caught.value.retry_after == 31
    now[0] = 200.0
    # More than a minute's worth comes in when the bucket is full.
    rates.check_tokens(1000)
    with acting_as(Tenant("alice")):
        rates.check_tokens(1000)
        rates.count_request()
    assert Rates(Limits()).meter() is None


@pytest.fixture
def limited(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Live]:
    text = rig.KEY_FILE + "[carol]\nkey = 'carol'\nrequests_per_minute = 1000000\ntokens_per_minute = 40\n"
    config = ServerConfig(api_key_file=rig.write_keys(tmp_path, text), max_requests_per_minute=2, log_stats_interval=0)
    with Live(inproc(), tokenizer, config) as live:
        yield live


def test_a_key_that_used_up_its_minute_gets_429_on_every_route(limited: Live) -> None:
    for _ in range(2):
        ask(limited, rig.ALICE, "/tokenize", {"prompt": "x"})
    for method, path in rig.routes(limited.app):
        counted = method not in rig.READS and rig.access_of(method, path) == "infer"
        reply = rig.call(limited, method, path, headers=rig.bearer(rig.ALICE))
        assert (reply.status_code == 429) == counted, (method, path)
        if counted:
            assert 1 <= int(reply.headers["retry-after"]) <= 60
    ask(limited, rig.BOB, "/tokenize", {"prompt": "x"})


def test_tokens_of_prompts_and_answers_are_counted(limited: Live) -> None:
    body = {"prompt": "x" * 10, "max_tokens": 40, "ignore_eos": True}
    assert ask(limited, "carol", "/v1/completions", body)["usage"]["completion_tokens"] == 40
    refused = [HTTP.post(limited.url + path, json=long_body(path), headers=rig.bearer("carol")) for path in rig.BODIES]
    output = {reply.request.url.path: reply.status_code for reply in refused}
    free = {"/tokenize", "/detokenize", "/apply-template", "/v1/messages/count_tokens", "/api/show", "/api/pull"}
    free |= {"/v1/responses/input_tokens", "/v1/conversations", *COUNTERS}
    assert {path for path, status in output.items() if status != 429} == free
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused if reply.status_code == 429)
    ask(limited, rig.BOB, "/v1/completions", body)
