"""What bob sees of a server does not depend on alice: a few of the programs of the campaign C-16, and its controls."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

import pytest
from tests.campaigns.interference import LIMITS, LONG, Call, Rig, flood, random_program, run_programs

from headrace.engine import generation
from headrace.serve.storage import store
from headrace.serve.storage.store import Store

WAIT = "wait"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("rig"))


def differences(shared: Rig, *program: Call) -> list[str]:
    return asyncio.run(shared.differences(list(program)))


def respond(who: str, **more: object) -> Call:
    return Call(who, "POST", "/v1/responses", {"input": "hi", "max_output_tokens": 2} | more)


def upload(who: str, *lines: str) -> Call:
    body = '{"custom_id": "%s", "method": "POST", "url": "/v1/completions", "body": {"prompt": "%s", "max_tokens": 2}}'
    data = "\n".join(body % (number, line) for number, line in enumerate(lines))
    return Call(who, "POST", "/v1/files", ("in.jsonl", data.encode()))


def batch(who: str) -> list[Call]:
    expected = {"input_file_id": f"<{who} file--1>", "endpoint": "/v1/completions", "completion_window": "24h"}
    return [
        upload(who, "a", "b"),
        Call(who, "POST", "/v1/batches", expected),
        Call(who, "GET", f"/v1/batches/<{who} batch_-1>", manner=WAIT),
    ]


def complete(who: str, **more: object) -> Call:
    return Call(who, "POST", "/v1/completions", {"prompt": LONG, "max_tokens": 2, "seed": 1} | more)


def test_S_40_random_programs_of_two_holders(shared: Rig) -> None:
    counts, bad = asyncio.run(run_programs(shared, 12, 0))
    assert bad == []
    assert counts["calls_of_bob"] > 50
    assert counts["calls_of_alice"] > 50


def test_S_40_programs_repeat_and_cover_all_manners() -> None:
    assert random_program(3) == random_program(3)
    calls = [call for number in range(200) for call in random_program(number)]
    paths = Counter(call.path.partition("<")[0] for call in calls)
    assert {call.manner for call in calls} == {"whole", "open", "gone", "wait"}
    assert {"/v1/chat/completions", "/api/chat", "/v1/messages", "/completion", "/v1/embeddings", "/tokenize"} <= set(
        paths
    )
    assert {"/v1/responses", "/v1/files", "/v1/batches", "/v1/responses/", "/v1/files/", "/v1/batches/"} <= set(paths)
    assert {call.manner for call in calls if call.who == "bob"} == {"whole", "wait"}


def test_S_40_anothers_responses_evict_none(shared: Rig) -> None:
    assert differences(shared, respond("bob"), *[respond("alice")] * LIMITS["responses"]) == []


def test_S_40_anothers_files_fail_no_batch(shared: Rig) -> None:
    assert differences(shared, *[upload("alice", "x")] * LIMITS["files"], *batch("bob")) == []


def test_S_40_anothers_long_batch_holds_up_none(shared: Rig) -> None:
    assert differences(shared, *flood(), *batch("bob")) == []


@pytest.mark.parametrize("who", ["alice", "twin"])
def test_S_40_an_id_in_use_overwrites_nothing(shared: Rig, who: str) -> None:
    fields = {"request_id": "<bob resp_0 bare>", "store": False, "cache_salt": "another"}
    assert differences(shared, respond("bob"), respond(who, **fields), respond("bob")) == []


def test_S_40_control_a_shared_eviction_is_noticed(shared: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    put, ids = Store.put, defaultdict[Store, list[str]](list)

    def evicting(self: Store, entry_id: str, metadata: dict[str, object], body: bytes = b"") -> None:
        put(self, entry_id, metadata, body)
        ids[self].append(entry_id)
        if self.evict and len(ids[self]) > self.max_items:
            self.delete(ids[self].pop(0))

    monkeypatch.setattr(Store, "put", evicting)
    assert differences(shared, respond("bob"), *[respond("alice")] * LIMITS["responses"]) != []


def test_S_40_control_a_shared_quota_is_noticed(shared: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    put, num_items = Store.put, Counter[Store]()

    def bounded(self: Store, entry_id: str, metadata: dict[str, object], body: bytes = b"") -> None:
        if num_items[self] >= self.max_items:
            raise store.StoreFullError("it is full")
        put(self, entry_id, metadata, body)
        num_items[self] += 1

    monkeypatch.setattr(Store, "put", bounded)
    assert differences(shared, *[upload("alice", "x")] * LIMITS["files"], *batch("bob")) != []


def test_S_40_control_a_shared_space_of_ids_is_noticed(shared: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(self: Store) -> str:
        return f"{self.prefix}{1 + self.num_items:032x}"

    monkeypatch.setattr(Store, "new_id", counted)
    assert differences(shared, respond("alice"), respond("bob", input="another")) != []


def test_S_40_control_storage_that_all_can_read_is_noticed(shared: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.tenants, "may_see", lambda owner: True)
    steal = Call("alice", "DELETE", "/v1/responses/<bob resp_0>")
    assert differences(shared, respond("bob"), steal) != []


def test_S_40_control_a_cache_without_a_salt_is_noticed(shared: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    program = complete("alice"), complete("bob")
    assert differences(shared, *program) == []
    monkeypatch.setattr(generation, "salted", lambda salt: salt)
    assert differences(shared, *program) != []
