"""A slice of the simulation; `make sim` runs the whole. Each seed checks I-1 ... I-20 after every step."""

import os
import subprocess
import sys
from functools import cache

import pytest
from tests.programs.sim.__main__ import main
from tests.programs.sim.simulation import Simulation
from tests.programs.sim.world import EVENTS

NUM_SEEDS, NUM_STEPS = 40, 200


@cache
def events(seed, overlapping=False):
    """What happened in one run; a violation is raised."""
    return Simulation(seed, overlapping=overlapping).run(NUM_STEPS).events


@pytest.mark.sampled(3)
@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 10))
def test_I_1_to_I_20_hold_under_a_swarm_of_events(first, overlapping):
    for seed in range(first, first + 10):
        events(seed, overlapping)


@pytest.mark.parametrize("overlapping", [False, True])
def test_the_slice_meets_every_kind_of_event(overlapping):
    missing = {*EVENTS, "preemption", "copy", "end by stop", "end by length", "end by abort", "end by error"}
    missing |= {"step ahead"} if overlapping else set()
    for seed in range(NUM_SEEDS):
        seen = {name for name, count in events(seed, overlapping).items() if count}
        assert overlapping or "step ahead" not in seen
        missing -= seen
        if not missing:
            break
    assert not missing


def test_I_20_a_seed_replays_byte_identically_in_another_process():
    here = [Simulation(seed).run(100).digest for seed in (1, 2, 3)]
    assert len(set(here)) == 3
    code = (
        "from tests.programs.sim.simulation import Simulation\n"
        "print(*[Simulation(seed).run(100).digest for seed in (1, 2, 3)])"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    there = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert there.stdout.split() == here


def test_the_command_replays_a_seed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tests.programs.sim", "--seed", "5", "--steps", "20"])
    assert main() == 0
    log = capsys.readouterr().out
    assert log.startswith("0: world World(")
    assert f"0 violations, digest {Simulation(5, overlapping=True, kinds=True).run(20).digest}" in log
