"""`bench.adaptive`: the same answers on all sides, and counts that tell constant from adaptive speculation."""

from __future__ import annotations

from bench.adaptive import ADAPTIVE, CONSTANT, PLAIN, arguments, measure, summed, texts_of

from headrace.cli.bench.speculate import BatchRun


def test_sides_are_counted_and_answer_alike() -> None:
    words = "builtin --rounds 1 --streams 2 --kinds random --prompt-len 24 --output-len 24 --threads 1"
    rows = {row["side"]: row for row in measure(arguments(words.split()))["rows"]}
    assert list(rows) == [PLAIN, ADAPTIVE, CONSTANT]
    assert [row["num_asks"] for row in rows.values()][::2] == [0, rows[CONSTANT]["num_steps"]]
    assert rows[ADAPTIVE]["num_asks"] < rows[CONSTANT]["num_asks"]
    assert rows[PLAIN]["num_batched_tokens"] == 2 * (24 + 23)


def test_texts_differ_from_round_to_round_and_one_side_is_the_measure() -> None:
    args = arguments(["--prompt-len", "9", "--output-len", "5"])
    first, second = (texts_of("random", 2, 1000, None, args, start) for start in (0, 2))
    assert len({tuple(text.prompt) for text in first + second}) == 4
    assert {(len(text.prompt), len(text.answer or [])) for text in first} == {(9, 5)}
    plain, other = [BatchRun(10.0, []), BatchRun(20.0, [])], [BatchRun(20.0, []), BatchRun(10.0, [])]
    assert summed(other, plain)["ratio"] == 1.0
    assert summed(other, plain)["ratios"] == [0.5, 2.0]
