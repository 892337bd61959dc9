"""docs/states.md: every route in every state, as its table says; the states themselves; and random walks over them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.campaigns import states as walks
from tests.programs.routes import application
from tests.serve.test_models_folder import write_model
from tests.support import orders
from tests.support.gated import GatedLink
from tests.support.orders import STATES, call, held, outcome

from headrace.protocol.errors import CheckpointError
from headrace.serve import routing
from headrace.serve.call import states
from headrace.serve.call.states import NEXT, NotReadyError, Sleep, State
from headrace.serve.gates.auth import class_of, is_public
from headrace.serve.lifespan import Lifespan
from headrace.text.tokenizer import Tokenizer

TABLE = orders.rows()
OF_FLEETS = ("POST /fleet/update", "POST /sleep", "POST /wake_up", "GET /health/ready", "POST /v1/completions")
CHANGING = frozenset({"POST /sleep", "POST /wake_up", "POST /fleet/update", "POST /v1/completions"})
"""Routes that end a state, or may wait for its end: each has a server to itself."""
IN_ORDER = ("POST /api/copy", "DELETE /api/delete")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_model(tmp_path / "models" / "tiny")
    return tmp_path / "models"


def test_every_route_that_watches_or_changes_the_server_has_a_row() -> None:
    expected = {"POST /v1/completions", "GET /v1/models", "GET /api/ps"}
    for operation in routing.operations(application()):
        is_page = is_public(operation.path) and operation.path != "/health/live"
        if not (is_page or operation.unserved) and class_of(operation.method, operation.path) != "infer":
            expected.add(f"{operation.method} {operation.path}")
    assert {name.replace(":path}", "}") for name in expected} == set(TABLE)


@pytest.mark.parametrize("state", STATES)
def test_each_route_in_each_state_replies_as_the_table_says(state: State, tokenizer: Tokenizer, root: Path) -> None:
    rest = [name for name in TABLE if name not in CHANGING and name not in IN_ORDER]

    async def go() -> dict[str, tuple[int, bool]]:
        replies = {}
        async with held(state, tokenizer, root) as server:
            for name in [*rest, *IN_ORDER]:
                replies[name] = await call(server, name), False
            assert server.lifespan.state is state
        for name in CHANGING - {"POST /fleet/update"}:
            async with held(state, tokenizer, root) as server:
                replies[name] = await outcome(server, name)
        return replies

    replies = asyncio.run(go())
    assert replies == {name: row[state] for name, row in TABLE.items() if name in replies}


@pytest.mark.parametrize("state", STATES)
def test_orders_to_several_engines_reply_as_the_table_says(state: State, tokenizer: Tokenizer, root: Path) -> None:
    async def go() -> dict[str, tuple[int, bool]]:
        replies = {}
        for name in OF_FLEETS:
            async with held(state, tokenizer, root, is_fleet=True) as server:
                replies[name] = await outcome(server, name)
        return replies

    replies = asyncio.run(go())
    assert replies == {name: TABLE[name][state] for name in replies}


def test_one_engine_is_never_updated(tokenizer: Tokenizer, root: Path) -> None:
    async def go() -> None:
        for state in (State.LOADING, State.READY, State.SLEEPING):
            async with held(state, tokenizer, root) as server:
                assert await call(server, "POST /fleet/update") == 409

    asyncio.run(go())


# -- the states ---------------------------------------------------------------------------------------------------


def test_only_the_listed_states_follow_each_other() -> None:
    async def nothing() -> None: ...

    for before in State:
        for after in State:
            sleep = Sleep(before, nothing, nothing)
            if after in NEXT.get(before, ()):
                sleep.become(after)
            elif before in NEXT:
                with pytest.raises(ValueError, match=f"the state {after} after {before}"):
                    sleep.become(after)


def test_an_order_waits_for_a_bounded_time_and_the_change_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "ORDER_S", 0.05)

    async def go() -> None:
        gate = asyncio.Event()

        async def wait() -> None:
            await gate.wait()

        sleep = Sleep(State.READY, wait, wait)
        for order in (sleep.fall_asleep, sleep.fall_asleep, sleep.wake_up):
            with pytest.raises(NotReadyError, match=r"still falling asleep after 0\.05 s; it goes on"):
                await order()
        gate.set()
        await asyncio.gather(sleep.fall_asleep(), sleep.fall_asleep())
        assert sleep.state is State.SLEEPING
        await sleep.wake_up()
        assert sleep.state is State.READY
        gate.clear()
        await asyncio.gather(sleep.fall_asleep(), sleep.wake_up(), return_exceptions=True)
        gate.set()
        await sleep.wake_up()
        assert sleep.state is State.READY

    asyncio.run(go())


def test_a_model_that_does_not_load_again_leaves_the_server_asleep_and_says_why(
    tokenizer: Tokenizer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: object, *args: object) -> Any:
        raise CheckpointError("model.safetensors: torn")

    async def go() -> None:
        async with held(State.SLEEPING, tokenizer, root) as server:
            with monkeypatch.context() as patch:
                patch.setattr(GatedLink, "start", fail)
                reply = await server.call("POST /wake_up")
                message = reply.json()["error"]["message"]
                assert (reply.status_code, message) == (
                    503,
                    "the model could not be loaded again: model.safetensors: torn",
                )
                assert (await server.call("GET /is_sleeping")).json() == {"is_sleeping": True}
            assert (await server.call("POST /wake_up")).status_code == 200
            assert (await server.call("GET /health/ready")).status_code == 200

    asyncio.run(go())


def test_an_order_keeps_the_deadline_of_its_call(tokenizer: Tokenizer, root: Path) -> None:
    async def go() -> None:
        async with held(State.WAKING, tokenizer, root) as server:
            reply = await server.call("POST /wake_up", headers={"x-request-timeout": "0.1"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (408, "deadline_exceeded")
            assert server.lifespan.state is State.WAKING

    asyncio.run(go())


# -- walks ----------------------------------------------------------------------------------------------------------


def test_random_walks_over_the_states() -> None:
    counts = walks.run_campaign((24, 0), 1000)
    assert counts["violations"] == 0, counts["examples"]
    assert counts["walks"] == 24
    assert counts["calls"] > 200


def test_control_an_order_in_a_wrong_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was before the states were in one place: the order sleeps, whatever the engine does."""
    monkeypatch.setattr(Lifespan, "check_order", lambda self, *allowed: None)

    async def fall_asleep(self: Sleep) -> None:
        self.state = State.SLEEPING

    monkeypatch.setattr(Sleep, "fall_asleep", fall_asleep)
    monkeypatch.setattr(walks, "PATIENCE_S", 1.0)
    counts = walks.run_campaign((24, 0), 1000)
    assert counts["violations"] > 0


def test_control_a_call_that_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(self: Sleep) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Sleep, "wake_up", hang)
    monkeypatch.setattr(walks, "PATIENCE_S", 0.5)
    counts = walks.run_campaign((4, 0), 1000)
    assert counts["violations"] > 0


def test_a_fleet_walks_too() -> None:
    counts = walks.run_campaign((8, 0), 2000, is_fleet=True)
    assert counts["violations"] == 0, counts["examples"]
