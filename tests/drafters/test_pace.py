"""How deep to draft, in a modelled world with a simulated clock: steps take the time of a formula, and draft tokens are
accepted by chance. The decisions of `Pace` are compared with the formula's best depth."""

from __future__ import annotations

import numpy as np
import pytest
from tests.drafters.paced import Seconds, World, accelerator, expected, processor, small

from headrace.drafters.pace import MAX_REST, PROBE_DEPTH, SHARE, Curve, Pace


class Eager(Pace):
    """The planted fault: every depth is taken to be worth it."""

    def _choose(self, limits, num_seqs):  # type: ignore[no-untyped-def]
        super()._choose(limits, num_seqs)
        self._is_awake, self.depths = True, {seq_id: self.num_drafts for seq_id, _ in limits}


class Blind(Pace):
    """The planted fault: acceptance is not counted."""

    def verified(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        return None


class Stubborn(Pace):
    """The planted fault: the choice that does not look best is never tried again."""

    def _choose(self, limits, num_seqs):  # type: ignore[no-untyped-def]
        hopeful = super()._choose(limits, num_seqs)
        return hopeful if self._step < 10 else None


LOADS = (1, 4, 16, 64)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seconds", [processor, accelerator, small], ids=lambda each: str(each.__name__))
@pytest.mark.parametrize("draft_seconds", [0.0, 0.1], ids=["free", "tenth"])
@pytest.mark.parametrize("chance", [0.02, 0.4, 0.8])
def test_near_the_best_depth_and_never_slower_than_none(seconds: Seconds, draft_seconds: float, chance: float) -> None:
    for load in LOADS:
        cost, num_steps = draft_seconds * seconds(1), 400 if load < 16 else 150
        plain = load / seconds(load)
        world, pace = World(seconds, [chance] * load, cost), Pace(8, 8)
        world.run(pace, 400)
        speed = world.run(pace, num_steps)
        assert speed > 0.97 * plain, f"load {load}: {speed / plain:.3f} of none"
        best = max(plain, *(expected(seconds, load, chance, depth, cost) for depth in range(1, 9)))
        assert speed > 0.85 * best, f"load {load}: {speed / best:.3f} of the best depth"


@pytest.mark.parametrize("fault", [Eager, Blind])
def test_control_without_the_rule_it_is_slower_than_none(fault: type[Pace]) -> None:
    assert World(small, [0.1]).run(fault(8, 8), 300) < 0.9 / small(1)
    assert World(small, [0.1]).run(Pace(8, 8), 300) > 0.95 / small(1)


@pytest.mark.parametrize(
    ("seconds", "load", "chance", "cost"),
    [(processor, 1, 0.4, 0.002), (processor, 16, 0.7, 0.0), (small, 1, 0.8, 0.0), (small, 1, 0.7, 0.00005)],
)
def test_it_converges_to_the_best_depth(seconds: Seconds, load: int, chance: float, cost: float) -> None:
    speeds = [expected(seconds, load, chance, depth, cost) for depth in range(9)]
    world, pace = World(seconds, [chance] * load, cost, noise=0.0), Pace(8, 8)
    world.run(pace, 300)
    depth = world.mean_depth(pace, 300)
    near = [each for each, speed in enumerate(speeds) if speed > 0.95 * max(speeds)]
    assert near[0] - 0.75 <= depth <= near[-1] + 0.25, f"{depth} of {near}"
    assert near[-1] < 8


def test_a_single_stream_gains_what_the_formula_promises() -> None:
    plain = 1 / processor(1)
    speed = World(processor, [0.8], noise=0.0).run(Pace(4, 4), 1500, most=4)
    formula = (1 - 0.8**5) / (1 - 0.8) * processor(1) / processor(5)
    assert speed / plain > 0.96 * formula


def test_sequences_that_guess_well_draft_and_the_others_rest() -> None:
    world, pace = World(processor, [0.95] * 4 + [0.02] * 12), Pace(8, 8)
    world.run(pace, 400)
    totals = [0] * 16
    for _ in range(100):
        world.step(pace, 8)
        totals = [a + b for a, b in zip(totals, world.depths, strict=True)]
    assert sum(totals[:4]) / 4 > 10 * sum(totals[4:]) / 12


@pytest.mark.parametrize("load", [1, 8])
@pytest.mark.parametrize("kind", [Pace, Stubborn])
def test_it_rests_when_guessing_loses_and_wakes_when_acceptance_rises(load: int, kind: type[Pace]) -> None:
    world, pace = World(processor, [0.8] * load), kind(8, 8)
    good = world.run(pace, 600)
    world.chances = [0.0] * load
    plain = load / processor(load)
    world.run(pace, 100)
    assert world.run(pace, 600) > 0.97 * plain
    num_drafted = world.num_drafted
    world.run(pace, 400)
    assert world.num_drafted - num_drafted < 60
    world.chances = [0.8] * load
    world.run(pace, 250)
    is_awake = world.run(pace, 300) > 0.9 * good
    assert is_awake == (kind is Pace)


def test_it_follows_the_load_up_and_down() -> None:
    pace, step_id = Pace(8, 8), 0
    for load in (1, 64, 1, 16, 64):
        world = World(processor, [0.6] * load, seed=load, step_id=step_id)
        world.run(pace, 60)
        plain = load / processor(load)
        speed = world.run(pace, 200)
        step_id = world.step_id
        assert speed > 0.97 * plain
        assert load > 1 or speed > 1.5 * plain
        for seq_id in range(load):
            pace.drop(seq_id)


def test_it_follows_a_machine_whose_speed_changes() -> None:
    speed = [1.0]
    world, pace = World(lambda rows: processor(rows) * speed[0], [0.8]), Pace(8, 8)
    before = world.run(pace, 500)
    for factor in (3.0, 0.5, 1.0):
        speed[0] = factor
        world.run(pace, 100)
        assert world.run(pace, 300) == pytest.approx(before / factor, rel=0.12)


def test_a_drafter_that_is_slower_than_the_model_is_seldom_called() -> None:
    world, pace = World(small, [0.9] * 2, draft_seconds=0.002), Pace(8, 8)
    world.run(pace, 300)
    world.num_drafted = 0
    world.run(pace, 300)
    assert world.num_drafted < 6


@pytest.mark.parametrize(("seconds", "draft_seconds"), [(processor, 0.030), (small, 0.002), (small, 0.0)])
def test_trying_costs_no_more_than_its_share(seconds: Seconds, draft_seconds: float) -> None:
    world, pace = World(seconds, [0.0], draft_seconds, noise=0.0), Pace(8, 8)
    world.run(pace, 300)
    assert world.run(pace, 5000) > (1.0 - 1.5 * SHARE) / seconds(1)


def test_deciding_costs_no_more_than_its_share() -> None:
    seconds = accelerator(1)
    world, pace = World(accelerator, [0.0], noise=0.0, deciding=0.5 * seconds), Pace(8, 8)
    world.run(pace, 300)
    assert world.run(pace, 5000) > (1.0 - 2.5 * SHARE) / seconds


def test_accidents_make_no_long_rests() -> None:
    """One call of the drafter, or one decision, that takes a thousand times as long is not the usual price."""
    for accident in (True, False):
        world, pace = World(accelerator, [0.0], 0.0001, noise=0.0, deciding=0.0001), Pace(4, 4)
        world.run(pace, 400, most=4)
        while not any(world.depths):
            world.step(pace, 4)
        pace.drafted(1, 3, 0.3 if accident else 0.0003)
        world.deciding = 0.1 if accident else 0.0001
        world.step(pace, 4)
        assert 0 < world.rest < 60
        # The control: a price that stays is paid for.
        for _ in range(9):
            pace.drafted(1, 3, 0.3)
        world.deciding = 0.0001
        while not any(world.depths):
            world.step(pace, 4)
        pace.drafted(1, 3, 0.3)
        world.step(pace, 4)
        assert world.rest > 1000


def test_requests_without_a_draft_count() -> None:
    """Draft tokens that are right are not worth it if they are seldom there and each request takes a step's time."""
    for answers, rests in ((0.02, True), (1.0, False)):
        world, pace = World(small, [0.95], 0.0001, answers=answers), Pace(4, 4)
        world.run(pace, 300, most=4)
        assert (pace.rest(0.0) > 0 or world.rest > 0) == rests, answers


def test_catching_up_is_paid_for_and_is_not_the_price_of_drafting() -> None:
    world, pace = World(small, [0.0], draft_seconds=0.0001), Pace(4, 4)
    world.run(pace, 300, most=4)
    price = float(pace.draft_seconds.at(1))
    while not any(world.depths):
        world.step(pace, 4)
    pace.drafted(1, 3, 0.1, is_behind=True)
    assert float(pace.draft_seconds.at(1)) == price
    world.step(pace, 4)
    assert world.rest > 0.9 * MAX_REST


def test_whole_drafts_are_made_in_full_or_not_at_all() -> None:
    world, pace = World(accelerator, [0.5]), Pace(5, 18, whole=True)
    world.run(pace, 100, most=5)
    depths = set()
    for _ in range(200):
        world.step(pace, 5)
        depths |= set(world.depths)
    assert depths == {0, 5}
    assert pace.nodes(1) == pace.nodes(5) == 18
    slow, pace = World(small, [0.2]), Pace(5, 18, whole=True)
    slow.run(pace, 100, most=5)
    assert slow.run(pace, 500, most=5) > 0.97 / small(1)


def test_trees_have_nodes_in_proportion() -> None:
    pace = Pace(4, 10)
    assert [pace.nodes(depth) for depth in (1, 2, 3, 4)] == [3, 5, 8, 10]
    assert [Pace(4, 4).nodes(depth) for depth in (1, 2, 3, 4)] == [1, 2, 3, 4]
    world = World(accelerator, [0.9])
    world.run(pace, 100, most=4)
    assert world.mean_depth(pace, 50) > 3


def test_no_deeper_than_is_of_use() -> None:
    world, pace = World(accelerator, [0.9] * 3), Pace(8, 8)
    world.run(pace, 50)
    limits = ((0, 1), (1, 3), (2, 8))
    for step_id in range(51, 100):
        pace.stepped(step_id, 3, 3, 0, accelerator(3))
        depths = pace.plan(limits, range(3))
        assert all(0 <= depths.get(seq_id, 0) <= most for seq_id, most in limits)
    assert not pace.plan([], range(3))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clock_gone_wrong_is_not_believed(seconds: float) -> None:
    pace = Pace(4, 4)
    pace.stepped(1, 1, 1, 0, 0.01)
    pace.stepped(2, 1, 1, 0, seconds)
    pace.drafted(1, 2, -1.0)
    assert pace.step_seconds.at(1) == 0.01
    assert pace.plan([(1, 4)], [1])


def test_the_first_step_is_plain_and_prompts_are_no_measure() -> None:
    pace = Pace(4, 4)
    assert pace.current([1]) == {}
    pace.stepped(1, 1, 100, 0, 5.0)
    assert pace.current([1]) == {}
    assert pace.rest(1.0) == 0
    pace.stepped(2, 1, 1, 0, 0.01)
    assert pace.current([1]) is None
    assert pace.plan([(1, 4)], [1]) == {1: PROBE_DEPTH}


def test_what_is_held_of_sequences_goes_with_them() -> None:
    pace = Pace(4, 4)
    pace.stepped(1, 1, 1, 0, 0.01)
    for seq_id in range(100):
        pace.plan([(seq_id, 4)], [seq_id])
        pace.verified(seq_id, 4, 2)
        pace.drop(seq_id)
    pace.drop(7)
    assert not pace._counts
    assert not pace.depths


def test_a_curve_never_falls_and_is_straight_between() -> None:
    curve = Curve()
    assert curve.at(3) == 0.0
    assert not curve.knows(1)
    for count, seconds in ((1, 1.0), (5, 1.4), (9, 1.2), (17, 3.0)):
        for _ in range(9):
            curve.add(count, seconds)
    assert curve.at(1) == 1.0
    assert curve.at(5) == pytest.approx(1.2)
    assert curve.at(9) == pytest.approx(1.2)
    assert curve.at(13) == pytest.approx(1.2 + 1.8 * 4 / 9)
    assert curve.at(28) == pytest.approx(3.0 + 10 * 1.8 / 9)
    samples = curve.at(np.arange(1.0, 200.0))
    assert (np.diff(samples) >= 0.0).all()
    assert curve.knows(10)
    assert not curve.knows(40)
    # One slow step is an accident, and so are three; a change is seen.
    for _ in range(3):
        curve.add(1, 1.1)
    assert curve.at(1) == 1.0
    for _ in range(9):
        curve.add(1, 1.1)
    assert curve.at(1) == 1.1


def test_measurements_are_forgotten_but_for_the_latest() -> None:
    curve = Curve()
    curve.add(5, 3.0)
    for _ in range(300):
        curve.add(1, 1.0)
    assert curve.at(5) == 3.0
    for _ in range(2):
        curve.add(5, 4.0)
    assert curve.at(5) == 4.0


def test_what_was_measured_once_is_doubted() -> None:
    """It sinks to the line between what was measured often, so that it is tried again."""
    curve = Curve()
    for count, seconds, num in ((1, 1.0, 3), (2, 9.0, 1), (5, 5.0, 3), (7, 9.0, 2), (8, 4.0, 1)):
        for _ in range(num):
            curve.add(count, seconds)
    for _ in range(9):
        curve.doubt(0.7)
    assert [float(curve.at(count)) for count in (1, 2, 5, 7)] == [1.0, 2.0, 4.0, 4.0]
    assert curve._values[7] == 7.0
