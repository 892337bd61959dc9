"""The determinism law over ranks of several hosts, whose gathers gloo moves; and what becomes of their groups."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support import small_slots, wrong_ranks
from tests.support.hosts import RankHost, place, rank_host
from tests.support.law import Bits, assert_same, make_core, make_requests, run
from tests.support.ranks import check_out_of_step, is_gone, until
from tests.support.shallow import shallow

from headrace.engine.core import EngineCore
from headrace.parallel.gloo import Exchange
from headrace.parallel.program import RankLostError
from headrace.protocol.errors import CheckpointError

FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4"},
}


@pytest.fixture(scope="module")
def host() -> Iterator[RankHost]:
    """One host, for a group after the other."""
    with rank_host(model=shallow(2)) as host:
        yield host


def core_at(port: int, **form: Any) -> EngineCore:
    numbers: dict[str, Any] = {"tensor_parallel_size": 2, "num_threads": 1, "distributed_timeout": 5.0}
    return make_core(rendezvous=place(port), **({"model": shallow(2)} | numbers | form))


def stages_at(port: int, ranks: int, **form: Any) -> EngineCore:
    form = {"model": shallow(2), "num_threads": 1, "distributed_timeout": 5.0} | form
    return make_core(pipeline_parallel_size=ranks, rendezvous=place(port, None), **form)


def bits(core: EngineCore) -> dict[str, Bits]:
    try:
        return run(core, make_requests()[::9])
    finally:
        core.close()


@functools.cache
def alone(form: str = "bfloat16") -> dict[str, Bits]:
    """The bits of one process."""
    return bits(make_core(model=shallow(2), **FORMS[form]))


@pytest.mark.parametrize("form", FORMS)
def test_hosts_change_no_bit(form: str, host: RankHost) -> None:
    """Greedy and drawn, with log-probabilities, penalties and grammars, as `make_requests` has them."""
    assert_same(bits(core_at(host.port, **FORMS[form])), alone(form))
    assert host.error is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_stages_on_hosts_change_no_bit(form: str, host: RankHost) -> None:
    assert_same(bits(stages_at(host.port, 2, **FORMS[form])), alone(form))
    assert host.error is None


def test_rank_0_hands_on_the_rows_of_three_stages_and_no_interface_is_needed() -> None:
    expected, where = bits(make_core(model=shallow(4))), {"model": shallow(4), "world": 3, "interface": None}
    with rank_host(**where) as host, rank_host(host.port, rank=2, **where):
        assert_same(bits(stages_at(host.port, 3, model=shallow(4))), expected)


def test_a_stage_on_a_host_that_dies_ends_the_group(host: RankHost) -> None:
    core = stages_at(host.port, 2)
    os.kill(child(), signal.SIGKILL)
    core.add(make_requests()[0])
    with pytest.raises(RankLostError, match="SIGKILL"):
        core.step()
    core.close()
    assert_same(bits(stages_at(host.port, 2)), alone())


def test_a_rank_that_gathers_needs_an_interface_of_its_host() -> None:
    with rank_host(model=shallow(2), interface=None) as host:
        with pytest.raises(RankLostError):
            core_at(host.port)
        host.thread.join(20)
        assert "--distributed-interface is missing here" in str(host.error)


@pytest.mark.slow
def test_three_hosts_with_uneven_shares_change_no_bit() -> None:
    where = {"model": shallow(2), "world": 3}
    with rank_host(**where) as host, rank_host(host.port, rank=2, **where):
        result = bits(core_at(host.port, tensor_parallel_size=3))
    assert_same(result, alone())


def test_gathers_in_several_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts, and slots that have room for few of their rows."""
    monkeypatch.setattr("headrace.engine.ranks.SLOT_BYTES", small_slots.SLOT_BYTES)
    sizes: list[int] = []
    move = Exchange.__call__
    monkeypatch.setattr(Exchange, "__call__", lambda self, size: sizes.append(size) or move(self, size))
    with rank_host(model=shallow(2), command=(sys.executable, "-m", "tests.support.small_slots")) as host:
        result = bits(core_at(host.port))
    assert small_slots.SLOT_BYTES / 4 < max(sizes) <= small_slots.SLOT_BYTES + 64
    assert_same(result, alone())


@pytest.mark.parametrize("mode", [pytest.param("right", marks=pytest.mark.slow), "reverse"])
def test_control_parts_in_the_wrong_place_are_noticed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone()  # before the law is broken in this process
    with rank_host(model=shallow(2), command=(sys.executable, "-m", "tests.support.wrong_ranks", mode)) as host:
        wrong_ranks.patch(mode, monkeypatch.setattr)
        actual = bits(core_at(host.port))
    if mode == "right":
        assert_same(actual, expected)
    else:
        with pytest.raises(AssertionError, match="differ"):
            assert_same(actual, expected)


def child() -> int:
    """The process of the rank."""
    [pid] = [int(each) for each in os.listdir("/proc") if each.isdecimal() and is_rank(int(each))]
    return pid


def is_rank(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
        with open(f"/proc/{pid}/stat") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return False
    return b"headrace.engine.rank" in words and parent == os.getpid()


def test_a_rank_that_ends_or_stands_still_ends_the_group_and_the_host_serves_the_next(
    host: RankHost,
) -> None:
    core = core_at(host.port, distributed_timeout=2.0)
    before = child()
    os.kill(before, signal.SIGKILL)
    core.add(make_requests()[0])
    with pytest.raises(RankLostError):
        core.step()
    core.close()
    again = core_at(host.port, distributed_timeout=2.0)
    stopped = child()
    assert stopped != before
    os.kill(stopped, signal.SIGSTOP)
    again.add(make_requests()[0])
    with pytest.raises(RankLostError, match="Timed out"):
        again.step()
    again.close()
    until(lambda: is_gone(stopped))
    assert_same(bits(stages_at(host.port, 2)), alone())


def test_ranks_out_of_step_find_it_out(host: RankHost) -> None:
    core = core_at(host.port)
    check_out_of_step(core)
    core.close()


def test_a_rank_with_other_weights_is_refused_by_both() -> None:
    with rank_host(model=shallow(2), weights=lambda: "others") as host:
        with pytest.raises(CheckpointError, match=r"rank 1 has other weights \(digest others\) than rank 0 \(digest "):
            stages_at(host.port, 2)
        host.thread.join(20)
        assert "rank 1 has other weights (digest others)" in str(host.error)


def test_a_model_that_the_rank_can_not_load_is_an_error_of_both(tmp_path: Any) -> None:
    with rank_host(model=str(tmp_path), weights=lambda: "") as host:
        with pytest.raises(CheckpointError, match=r"config\.json"):
            stages_at(host.port, 2)
        host.thread.join(20)
        assert isinstance(host.error, CheckpointError)
