"""Pictures that are seen whole: no step ends inside one, and none waits for ever."""

from __future__ import annotations

import random
import re

import pytest
from tests.programs.sim.bench import Bench

from headrace.core.sequence import Sequence
from headrace.protocol.errors import RequestError
from headrace.protocol.pictures import Picture, fit_wholes, wholes_of
from headrace.runner.pieces import Piece, make_portions


def picture(*spans: tuple[int, int], sees_whole: bool = True) -> Picture:
    return Picture("00", b"", 0, 0, list(spans), sees_whole)


def test_the_places_of_pictures_that_are_seen_whole() -> None:
    assert wholes_of([picture((3, 4)), picture((9, 2), sees_whole=False), picture((20, 5))]) == [(3, 7), (20, 25)]


def test_a_length_that_fits() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        cuts = sorted(rng.sample(range(40), 4))
        wholes = [(cuts[0], cuts[1]), (cuts[2], cuts[3])]
        start = rng.randrange(40)
        most = rng.randrange(1, 45 - start)
        length = rng.randint(0, most)
        fit = fit_wholes(wholes, start, length, most)
        assert 0 <= fit <= most
        assert not fit or not any(first < start + fit < end for first, end in wholes)
        if not any(first < start + length < end for first, end in wholes):
            assert fit == length
        elif length and not fit:
            [needed] = [end - start for first, end in wholes if first <= start < end]
            assert needed > most


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_num_batched_tokens": 10}, [(0, 4), (4, 10), (14, 6), (20, 10)]),
        ({"max_num_batched_tokens": 16}, [(0, 16), (16, 14)]),
        ({"max_num_batched_tokens": 13}, [(0, 4), (4, 13), (17, 13)]),
        ({"long_prefill_token_threshold": 3}, [(0, 3), (3, 1), (4, 10), (14, 3), (17, 3), (20, 8), (28, 2)]),
    ],
)
def test_no_step_ends_inside_a_picture(options: dict[str, int], steps: list[tuple[int, int]]) -> None:
    bench = Bench(**options)
    bench.add("a", 30, pictures=[picture((4, 10)), picture((20, 8))])
    assert [bench.step()["a"] for _ in steps] == steps


def test_control_without_the_rule_steps_end_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "fit", lambda seq, start, length, most: length)
    bench = Bench(max_num_batched_tokens=10)
    bench.add("a", 30, pictures=[picture((4, 10))])
    assert bench.step()["a"] == (0, 10)


def test_a_picture_waits_for_running_ones_alone() -> None:
    """It needs a whole step: others decode on, and no new one starts before it."""
    bench = Bench(max_num_batched_tokens=10, max_num_seqs=4)
    bench.add("short", 3, max_tokens=6)
    bench.add("a", 30, pictures=[picture((4, 10))])
    assert bench.step() == {"short": (0, 3), "a": (0, 4)}
    for name in "bcd":
        bench.add(name, [7, *range(20)], max_tokens=30)
    waits = 0
    while "a" not in (step := bench.step()):
        assert set(step) == {"short"}
        waits += 1
    assert waits > 2
    assert step["a"] == (4, 10)
    bench.drain()
    assert len(bench.finished) == 5


def test_one_that_lacked_a_step_starts_in_the_next() -> None:
    """With no more room in blocks than before, but with a step of its own."""
    bench = Bench(max_num_batched_tokens=10)
    bench.add("b", 3, max_tokens=3)
    bench.add("a", [5, *range(20)], pictures=[picture((0, 10))])
    assert [set(bench.step()) for _ in range(4)] == [{"b"}, {"b"}, {"b"}, {"a"}]


def test_a_picture_that_no_step_holds_is_refused() -> None:
    bench = Bench(max_num_batched_tokens=9)
    with pytest.raises(RequestError, match=re.escape("at most 9 for a picture")):
        bench.add("a", 30, pictures=[picture((4, 10))])
    bench.add("b", 30, pictures=[picture((4, 10), sees_whole=False)])
    assert bench.step()["b"] == (0, 9)


def test_passes_of_a_step_end_inside_no_picture() -> None:
    piece = Piece(0, 0, list(range(50)), [0] * 50, wholes=[(5, 20), (22, 40)])
    other = Piece(1, 0, list(range(7)), [0] * 7)
    portions = make_portions([[other], [piece]], 20, 8)
    assert [[(each.chunk_id, each.start, len(each.token_ids)) for each in portion] for portion in portions] == [
        [(1, 0, 7), (0, 0, 5)], [(0, 5, 17)], [(0, 22, 20)], [(0, 42, 8)],
    ]  # fmt: skip
    assert [each.last for portion in portions for each in portion] == [True, False, False, False, True]
    with pytest.raises(ValueError, match="more than one pass takes"):
        make_portions([[piece]], 14, 8)
