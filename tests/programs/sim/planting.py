"""Planting bugs in the scheduler, to see that the simulation catches each by an invariant that forbids it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from tests.programs.sim.simulation import Simulation, Violation

from headrace.core.options import SchedulerOptions
from headrace.core.scheduler import Scheduler
from headrace.protocol.errors import InvariantError

NUM_SEEDS, NUM_STEPS = 120, 200

Plant = Callable[[Any, pytest.MonkeyPatch], None]


class Bug(NamedTuple):
    """How it is planted, who may catch it, whether the scheduler's `check()` looks too, whether steps overlap, whether
    the model has several kinds of cache, and the seed to begin with."""

    plant: Plant
    invariants: tuple[str, ...]
    checking: bool
    overlapping: bool = False
    kinds: bool = False
    first_seed: int = 0


Bugs = dict[str, Bug]


def register(
    bugs: Bugs, *invariants: str, checking: bool = True, first_seed: int = 0, **more: bool
) -> Callable[[Plant], Plant]:
    """A decorator that puts a function, which plants its bug in a scheduler, among `bugs`."""

    def put(plant: Plant) -> Plant:
        bugs[plant.__name__] = Bug(plant, invariants, checking, first_seed=first_seed, **more)
        return plant

    return put


def expect_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run seeds until the bug is caught. Fails if it is not, or by an invariant that it should not break."""

    def make_scheduler(options: SchedulerOptions) -> Scheduler:
        scheduler = Scheduler(options)
        bug.plant(scheduler, monkeypatch)
        return scheduler

    for seed in (*range(bug.first_seed, NUM_SEEDS), *range(bug.first_seed)):
        simulation = Simulation(
            seed,
            make_scheduler=make_scheduler,
            checking=bug.checking,
            overlapping=bug.overlapping,
            kinds=bug.kinds,
        )
        try:
            simulation.run(NUM_STEPS)
        except (Violation, InvariantError) as error:
            caught = str(error)
            break
    else:
        pytest.fail(f"{bug.plant.__name__} went unseen through {NUM_SEEDS} seeds")
    assert caught.split(":")[0] in bug.invariants, caught
