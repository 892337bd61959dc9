"""How deep to draft, in a modelled world: steps take the time that a formula says, and guesses are kept by chance."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from headrace.drafters.pace import ASKING_SHARE, MARGIN, Costs, Pace

Seconds = Callable[[int], float]


def processor(rows: int) -> float:
    """A CPU: weights are read anyway (30 ms), and 32 rows are as much work as that."""
    return max(0.030, 0.030 * rows / 32) + 0.0006 * rows


def accelerator(rows: int) -> float:
    """Rows cost nothing up to 256."""
    return 0.010 + max(0.0, 0.00002 * (rows - 256))


def small(rows: int) -> float:
    """A model so small that rows are all of it."""
    return 0.0004 + 0.00015 * rows


@dataclass
class World:
    """Sequences whose guesses are kept with a chance each; `seconds` of a step by rows, `draft_seconds` for a token's
    depth of one sequence."""

    seconds: Seconds
    chances: list[float]
    draft_seconds: float = 0.0
    noise: float = 0.05
    seed: int = 1

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.clock = 0.0
        self.num_tokens = 0
        self.depths = [0] * len(self.chances)

    def step(self, pace: Pace, most: int) -> None:
        rows = len(self.chances) + sum(pace.nodes(depth) for depth in self.depths if depth)
        # The clock that counts is the formula's; what is measured has noise, and a slow step now and then.
        self.clock += self.seconds(rows)
        took = self.seconds(rows) * (1.0 + self.noise * self.random.uniform(-1.0, 1.0))
        took *= 3.0 if self.random.random() < 0.2 * self.noise else 1.0
        self.num_tokens += len(self.chances)
        for seq_id, (depth, chance) in enumerate(zip(self.depths, self.chances, strict=True)):
            kept = 0
            while kept < depth and self.random.random() < chance:
                kept += 1
            self.num_tokens += kept
            if depth:
                pace.verified(seq_id, depth, kept)
        pace.stepped(rows, len(self.chances), took)
        self.depths = pace.plan([(seq_id, most) for seq_id in range(len(self.chances))])
        asked = [depth for depth in self.depths if depth]
        if asked:
            drafting = max(asked) * self.draft_seconds * len(asked) ** 0.5
            self.clock += drafting
            pace.drafted(len(asked), max(asked), drafting)

    def run(self, pace: Pace, num_steps: int, most: int = 8) -> float:
        """Tokens per second of so many steps."""
        start, before = self.clock, self.num_tokens
        for _ in range(num_steps):
            self.step(pace, most)
        return (self.num_tokens - before) / (self.clock - start)


LOADS = (1, 4, 16, 64)


@pytest.mark.parametrize("seconds", [processor, accelerator, small], ids=lambda each: str(each.__name__))
@pytest.mark.parametrize("draft_seconds", [0.0, 0.1], ids=["free", "tenth"])
@pytest.mark.parametrize("chance", [0.02, 0.4, 0.8])
def test_never_slower_than_none_at_any_load(seconds: Seconds, draft_seconds: float, chance: float) -> None:
    for load in LOADS:
        cost, steps = draft_seconds * seconds(1), 400 if load < 16 else 150
        plain = load / seconds(load)
        world, pace = World(seconds, [chance] * load, cost), Pace(8, 8)
        world.run(pace, 50)
        paced = world.run(pace, steps)
        assert paced > 0.97 * plain, f"load {load}: {paced / plain:.3f} of none"
        best = max(expected(seconds, load, chance, depth, cost) for depth in (1, 2, 4, 8))
        share = 0.84 if load <= 4 else 0.6
        assert paced > share * max(best, plain), f"load {load}: {paced / max(best, plain):.3f} of the best depth"


def expected(seconds: Seconds, load: int, chance: float, depth: int, cost: float) -> float:
    """Tokens per second of a fixed depth."""
    kept = sum(chance**place for place in range(depth + 1))
    return load * kept / (seconds(load + load * depth) + depth * cost * load**0.5)


@pytest.mark.parametrize("depth", [2, 8])
def test_without_measuring_it_would_be_slower(depth: int) -> None:
    """The control: a fixed depth under load loses far more than is allowed, and so does a bar that never moves."""
    plain = 64 / processor(64)
    assert expected(processor, 64, 0.4, depth, 0.0) < 0.8 * plain
    blind = Pace(depth, depth)

    def look(wanted: object, base: int) -> None:
        blind._room = 10**6
        blind._set(0.0, 1.0, depth)

    blind._look = look  # type: ignore[method-assign]
    assert World(processor, [0.4] * 64).run(blind, 60) < 0.8 * plain


def test_a_single_stream_gains_what_the_formula_promises() -> None:
    plain = 1 / processor(1)
    paced = World(processor, [0.8], noise=0.0).run(Pace(4, 4), 1500, most=4)
    formula = (1 - 0.8**5) / (1 - 0.8) * processor(1) / processor(5)
    assert paced / plain > 0.96 * formula


def test_who_guesses_well_drafts_and_who_does_not_rests() -> None:
    world = World(processor, [0.95] * 4 + [0.02] * 12)
    pace = Pace(8, 8)
    world.run(pace, 400)
    total = [0] * 16
    for _ in range(100):
        world.step(pace, 8)
        total = [a + b for a, b in zip(total, world.depths, strict=True)]
    assert sum(total[:4]) / 4 > 10 * sum(total[4:]) / 12


@pytest.mark.parametrize("load", [1, 8])
def test_it_finds_back_when_guesses_become_good_again(load: int) -> None:
    world = World(processor, [0.8] * load)
    pace = Pace(8, 8)
    good = world.run(pace, 600)
    world.chances = [0.0] * load
    plain = load / processor(load)
    assert world.run(pace, 600) > 0.96 * plain
    assert world.run(pace, 100) > 0.97 * plain
    assert pace.plan([(0, 8)]) in ([0], [1], [2], [3])
    world.chances = [0.8] * load
    world.run(pace, 250)
    assert world.run(pace, 300) > 0.93 * good


def test_it_follows_the_load_up_and_down() -> None:
    pace = Pace(8, 8)
    for load in (1, 64, 1, 16, 64):
        world = World(processor, [0.6] * load, seed=load)
        world.run(pace, 60)
        plain = load / processor(load)
        paced = world.run(pace, 200)
        assert paced > 0.97 * plain
        assert load > 1 or paced > 1.5 * plain
        for seq_id in range(load):
            pace.drop(seq_id)


def test_it_follows_a_machine_whose_speed_changes() -> None:
    speed = [1.0]
    world = World(lambda rows: processor(rows) * speed[0], [0.8])
    pace = Pace(8, 8)
    before = world.run(pace, 500)
    for factor in (3.0, 0.5, 1.0):
        speed[0] = factor
        world.run(pace, 100)
        assert world.run(pace, 300) == pytest.approx(before / factor, rel=0.1)


def test_a_drafter_that_is_slower_than_the_model_is_not_asked() -> None:
    world = World(small, [0.9] * 2, draft_seconds=0.002)
    pace = Pace(8, 8)
    world.run(pace, 300)
    asked = 0
    for _ in range(300):
        world.step(pace, 8)
        asked += any(world.depths)
    assert asked < 6


def test_trying_costs_no_more_than_its_share() -> None:
    """A drafter that is never right, and takes as long as the model: what was spent on it is under 1 %."""
    world = World(processor, [0.0], draft_seconds=0.030, noise=0.0)
    pace = Pace(8, 8)
    world.run(pace, 200)
    assert world.run(pace, 2000) > 0.985 / processor(1)


def test_asking_costs_no_more_than_its_share() -> None:
    """Where nobody is worth a guess the pace says for how long; where somebody is there is no rest."""
    world, pace = World(small, [0.0], draft_seconds=0.002), Pace(4, 4)
    for _ in range(300):
        world.step(pace, 4)
        pace.asked(1, 20e-6)
    share = 20e-6 / (pace.rest(1) * small(1))
    assert 0.9 * ASKING_SHARE < share < 1.1 * ASKING_SHARE
    # One slow look is an accident; of a large model's time it is nothing.
    pace.asked(1, 1.0)
    assert pace.rest(1) < 2 * 20e-6 / (ASKING_SHARE * small(1))
    world, pace = World(processor, [0.0], draft_seconds=0.030), Pace(4, 4)
    world.run(pace, 300)
    pace.asked(1, 20e-6)
    assert pace.rest(1) == 0
    world, pace = World(processor, [0.9]), Pace(4, 4)
    world.run(pace, 300)
    pace.asked(1, 1.0)
    assert pace.rest(1) == 0


@pytest.mark.parametrize(("num_empty", "rests"), [(1, True), (0, False)])
def test_questions_without_an_answer_count(num_empty: int, rests: bool) -> None:
    """Guesses that are right are not worth it if they are seldom there and asking takes a step."""
    world, pace = World(small, [0.9]), Pace(4, 4)
    for _ in range(300):
        world.step(pace, 4)
        pace.asked(1, 600e-6)
        pace.drafted(1, 4, 0.0, num_empty=num_empty)
        pace.drafted(1, 4, 0.0, num_empty=num_empty)
    assert (pace.rest(1) > 0) == rests


def test_catching_up_is_paid_for_and_is_not_what_drafting_costs() -> None:
    world, pace = World(small, [0.0], draft_seconds=0.002), Pace(4, 4)
    world.run(pace, 300)
    before = pace._drafting_seconds(1)
    tried = 0
    for _ in range(3000):
        world.step(pace, 4)
        if any(world.depths):
            tried += 1
            pace.drafted(1, 3, 0.1, is_behind=True)
    assert pace._drafting_seconds(1) == pytest.approx(before)
    assert 1 <= tried <= 3


def test_whole_drafts_are_made_in_full_or_not_at_all() -> None:
    pace = Pace(5, 18, whole=True)
    world = World(accelerator, [0.5])
    world.run(pace, 100, most=5)
    seen = set()
    for _ in range(100):
        world.step(pace, 5)
        seen |= set(world.depths)
    assert seen == {0, 5}
    assert pace.nodes(1) == pace.nodes(5) == 18
    slow = World(small, [0.2])
    pace = Pace(5, 18, whole=True)
    slow.run(pace, 100, most=5)
    assert slow.run(pace, 500, most=5) > 0.97 / small(1)


def test_trees_have_nodes_in_proportion() -> None:
    pace = Pace(4, 10)
    assert [pace.nodes(depth) for depth in (1, 2, 3, 4)] == [3, 5, 8, 10]
    assert [Pace(4, 4).nodes(depth) for depth in (1, 2, 3, 4)] == [1, 2, 3, 4]


def test_no_deeper_than_is_of_use() -> None:
    pace = Pace(8, 8)
    world = World(accelerator, [0.9] * 3)
    world.run(pace, 50)
    for _ in range(50):
        depths = pace.plan([(0, 1), (1, 3), (2, 8)])
        assert all(0 <= depth <= most for depth, most in zip(depths, (1, 3, 8), strict=True))
    assert pace.plan([]) == []


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clock_gone_wrong_is_not_believed(seconds: float) -> None:
    pace = Pace(4, 4)
    pace.stepped(1, 1, 0.01)
    pace.stepped(1, 1, seconds)
    pace.drafted(1, 2, -1.0)
    assert pace.costs.of(1) == 0.01
    assert pace.plan([(1, 4)])


def test_what_is_held_of_sequences_goes_with_them() -> None:
    pace = Pace(4, 4)
    for seq_id in range(100):
        pace.plan([(seq_id, 4)])
        pace.verified(seq_id, 4, 2)
        pace.drop(seq_id)
    pace.drop(7)
    assert not pace._runs


def test_costs_never_fall_and_are_straight_between() -> None:
    costs = Costs()
    assert costs.of(3) == 0.0
    for rows, seconds in ((1, 1.0), (5, 1.4), (9, 1.2), (17, 3.0)):
        for _ in range(20):
            costs.add(rows, seconds)
    assert costs.of(1) == 1.0
    assert costs.of(5) == pytest.approx(1.3)
    assert costs.of(9) == pytest.approx(1.3)
    assert costs.of(13) == pytest.approx(2.15)
    assert costs.of(25) == pytest.approx(3.0 + 8 * 2.0 / 16)
    drawn = [costs.of(rows) for rows in range(1, 200)]
    assert drawn == sorted(drawn)
    # One slow step is an accident.
    costs.add(1, 100.0)
    assert costs.of(1) < 1.5


def test_the_margin_is_more_than_nothing() -> None:
    assert 1.0 < MARGIN < 1.1
