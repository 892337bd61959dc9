"""The one queue of a fleet under the policy fair: who has nothing in a replica does not wait for room."""

from __future__ import annotations

from headrace.fleet.dispatch import Dispatcher
from headrace.fleet.router import Router
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request


def send(dispatcher: Dispatcher[str], *names: str) -> None:
    for name in names:
        params = SamplingParams(max_tokens=9)
        dispatcher.add(name, Request(request_id=name, prompt_token_ids=[1], params=params, tenant=name[0]), [])


def go(dispatcher: Dispatcher[str], room: int) -> list[str]:
    """The requests that go to a replica with so much room, in their order."""
    items: list[str] = []
    for item, _ in dispatcher.dispatch(lambda index: len(items) < room, lambda item: [0]):
        items.append(item)
    return items


def test_R_10_the_only_request_of_a_holder_goes_at_once() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(Router("least-work", 1, 1), "fair")
    send(dispatcher, "a0", "a1", "a2")
    assert go(dispatcher, 2) == ["a0", "a1"]
    send(dispatcher, "b0", "b1")
    assert go(dispatcher, 0) == ["b0"]
    assert go(dispatcher, 0) == []
    dispatcher.ended("b")
    assert go(dispatcher, 0) == ["b1"]
    assert list(dispatcher) == ["a2"]


def test_R_10_control_the_other_policies_let_it_wait() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(Router("least-work", 1, 1), "fcfs")
    send(dispatcher, "a0", "a1", "a2")
    assert go(dispatcher, 2) == ["a0", "a1"]
    send(dispatcher, "b0")
    assert go(dispatcher, 0) == []
