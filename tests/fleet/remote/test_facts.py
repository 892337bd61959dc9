"""A proven engine with absurd numbers is refused at the handshake, in words that name field, value and bound."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import msgspec
import pytest
from tests.engine.test_client import request
from tests.support import fake
from tests.support.remote import child, front, listening, until

from headrace.engine.links import InprocLink, OnLost, OnMessage
from headrace.fleet.engines.client import Fleet
from headrace.fleet.remote import facts, wire
from headrace.protocol.adapters import LoadedAdapter
from headrace.protocol.config import EngineConfig
from headrace.protocol.kinds import CacheKind
from headrace.protocol.step import Classes, EngineInfo, VectorForm
from headrace.secure.channel import pack
from headrace.secure.handshake import HandshakeError, is_final

INFO = fake.build(EngineConfig(model="fake")).info
LOADED = wire.Loaded(INFO, "0123456789abcdef", 2.5)
OUTSIDE: list[tuple[str, Any]] = [
    *((name, value) for name, bound in facts.BOUNDS.items() for value in (bound.low - 1, bound.high + 1)),
    ("vocab_size", 2**62),
    ("eos_token_ids", [-1]),
    ("eos_token_ids", [fake.VOCAB_SIZE]),
    ("eos_token_ids", [1] * 2000),
    ("kinds", ()),
    ("kinds", (CacheKind(),) * 100),
    ("kinds", (CacheKind(window=-5),)),
    ("more_blocks", (1,)),
    ("kinds and more_blocks", ((CacheKind(), CacheKind(window=8)), (-1,))),
    ("scheduling_policy", "mine"),
    ("model", "m" * 10_000),
    ("adapters", {str(i): LoadedAdapter("d", 1, 1) for i in range(2000)}),
    ("adapters", {"a": LoadedAdapter("d" * 5000, 1, 1)}),
    ("adapters", {"a": LoadedAdapter("d", 0, 1)}),
    ("adapters", {"a": LoadedAdapter("d", 1, 2**40)}),
    ("vectors", VectorForm({str(i): "" for i in range(2000)})),
    ("vectors", VectorForm({"a": "b" * 5000})),
    ("vectors", VectorForm(dimensions=2**30)),
    ("pooling", "mean+median"),
    ("pooling", "mean+mean"),
    ("classes", Classes(())),
    ("classes", Classes(("a",) * 2**17)),
    ("classes", Classes(("a" * 5000,))),
    ("classes", Classes(("a",), second_type=2**30)),
]


def changed(name: str, value: Any) -> wire.Loaded:
    values = dict(zip(name.split(" and "), value, strict=True)) if " and " in name else {name: value}
    return msgspec.structs.replace(LOADED, info=msgspec.structs.replace(INFO, **values))


@pytest.mark.parametrize(("name", "value"), OUTSIDE, ids=str)
def test_S_42_a_number_that_no_engine_has_is_refused(name: str, value: Any) -> None:
    with pytest.raises(
        HandshakeError, match=rf"it can not be used: .*info\.{name.split()[-1]}.* is .*, and must be"
    ) as refusal:
        facts.check(changed(name, value))
    assert is_final(refusal.value)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, 1e18])
def test_S_42_seconds_that_no_load_takes_are_refused(value: float) -> None:
    with pytest.raises(HandshakeError, match=r"seconds is .*, and must be from 0 to 86,400"):
        facts.check(msgspec.structs.replace(LOADED, seconds=value))


def test_the_numbers_of_engines_are_within_the_bounds() -> None:
    facts.check(LOADED)
    facts.check(changed("kinds and more_blocks", ((CacheKind(), CacheKind(window=8), CacheKind(is_state=True)), (5,))))
    facts.check(changed("adapters", {"a": LoadedAdapter("d" * 64, 16, 7)}))


def test_every_number_of_an_engine_has_a_bound() -> None:
    """Also one that is added later."""
    kinds: dict[str, set[str]] = {"int": set(), "str": set()}
    rest = set()
    for field in msgspec.structs.fields(EngineInfo):
        name = getattr(field.type, "__name__", "")
        kinds[name].add(field.name) if name in kinds else rest.add(field.name)
    assert kinds["int"] == set(facts.BOUNDS)
    assert kinds["str"] == {*facts.TEXTS, "scheduling_policy", "pooling"}
    flags = {"generates", "whole_texts"}
    assert rest - flags == {"eos_token_ids", "kinds", "more_blocks", "adapters", "classes", "vectors"}


@pytest.mark.parametrize("is_checked", [True, False], ids=["", "control"])
def test_S_42_a_front_takes_no_engine_with_such_numbers(is_checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_checked:
        monkeypatch.setattr(facts, "check", lambda loaded: None)

    async def go() -> str:
        engine = child()
        start = engine.start

        async def lie(on_message: OnMessage, on_lost: OnLost) -> EngineInfo:
            return msgspec.structs.replace(await start(on_message, on_lost), max_model_len=-1)

        engine.start = lie  # type: ignore[method-assign]
        async with listening(engine) as (port, _):
            link = front(port)
            refusal = ""
            try:
                await link.start(lambda message: None, lambda reason: None)
            except HandshakeError as error:
                refusal = str(error)
            await link.close()
        return refusal.replace(str(port), "PORT")

    expected = "the engine at 127.0.0.1:PORT: it can not be used: info.max_model_len is -1, and must be from 1 to"
    assert asyncio.run(go()).startswith(expected) is is_checked


@pytest.mark.parametrize("seconds", [math.nan, -1.0, math.inf])
def test_S_42_a_processor_time_that_is_none_ends_the_connection(seconds: float) -> None:
    async def go() -> str:
        lost: list[str] = []
        async with listening(child()) as (port, server):
            link = front(port)
            await link.start(lambda message: None, lost.append)
            await until(lambda: server.served)
            assert server.served is not None
            server.served.send(pack(wire.Sent(time.monotonic(), wire.Beat((seconds, False)))))
            await until(lambda: lost)
            await link.close()
        return lost[0]

    assert "s of processor time" in asyncio.run(go())


@pytest.mark.parametrize("num_tokens", [fake.VOCAB_SIZE, 2 * fake.VOCAB_SIZE], ids=["alike", "another"])
def test_a_replica_of_another_model_gets_no_requests(num_tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> list[str]:
        config = EngineConfig(model="fake")
        links = [InprocLink(lambda: fake.build(config)), InprocLink(lambda: fake.build(config, vocab_size=num_tokens))]
        fleet = Fleet(links, router="round-robin")
        await fleet.start()
        for seed in range(4):
            async for _ in fleet.submit([request(seed=seed)]):
                pass
        phases = [replica.phase for replica in fleet.replicas]
        assert fleet.info.vocab_size in (fake.VOCAB_SIZE, num_tokens)
        await fleet.close()
        return phases

    phases = sorted(asyncio.run(go()))
    if num_tokens == fake.VOCAB_SIZE:
        assert phases == ["ready", "ready"]
    else:
        assert phases == ["lost", "ready"]
        assert "is not of the same model: its vocab_size is" in caplog.text
