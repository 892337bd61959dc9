"""The labs at their small size on the built-in model: what the tables say, not how long it took."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli.lab import NAMES
from headrace.cli.main import main
from headrace.fleet.simulator import Life, SimulatedRun
from headrace.fleet.traces import Call
from headrace.labs import base, caching, catalogue, drawing, scheduling
from headrace.labs.base import Lab
from headrace.labs.engine import Bench
from headrace.plan.steps import tokens_per_pass
from headrace.protocol.errors import HeadraceError, RequestError


@cache
def result(name: str) -> Lab:
    return catalogue.run(name, "builtin", small=True)


def test_the_rows_of_cached_and_uncached_generation() -> None:
    lab = result("cache")
    for num, cached, uncached, seen, *_ in lab.rows:
        assert isinstance(num, int)
        assert (cached, uncached) == (8 + num - 1, 8 * num + num * (num - 1) // 2)
        # Row i looks back on i positions and itself.
        assert seen == (8 + num - 1) * (8 + num) // 2
    assert any("3,584, where the formula 2 x layers x hidden x bytes gives 14,336" in line for line in lab.right)


def test_an_answer_that_differs_without_the_cache_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    uncached = caching._uncached

    def planted(bench: Bench, prompt: list[int], num_new: int) -> tuple[list[int], float]:
        tokens, seconds = uncached(bench, prompt, num_new)
        return [*tokens[:-1], tokens[-1] ^ 1], seconds

    monkeypatch.setattr(caching, "_uncached", planted)
    with pytest.raises(HeadraceError, match="4 tokens differ without the cache"):
        catalogue.run("cache", "builtin", small=True)


def test_latency_is_ttft_and_the_other_tokens() -> None:
    lab = result("lengths")
    for length, first, each, whole, right, wrong in lab.rows:
        assert isinstance(length, int)
        assert right == pytest.approx(whole)
        assert float(wrong) - float(right) == pytest.approx(each)
        assert float(first) < float(whole)
    assert [row[0] for row in lab.rows] == [8, 32, 96]


def test_the_last_token_of_a_known_prompt_is_computed() -> None:
    assert [row[:3] for row in result("prefix").rows] == [[0, 0, 96], [40, 40, 56], [64, 64, 32], [96, 95, 1]]


def test_blocks_waste_the_ends_of_sequences() -> None:
    lab = result("paging")
    for size, tokens, places, waste, contiguous in lab.rows:
        assert isinstance(size, int)
        assert isinstance(tokens, int)
        assert isinstance(places, int)
        assert 0 <= places - tokens < 4 * size
        assert waste == 1 - tokens / places
        assert contiguous == 1 - tokens / (4 * 192)
    assert lab.numbers("waste, paged")[0] < lab.numbers("waste, paged")[1] < lab.numbers("waste, contiguous")[0]


def test_continuous_batches_gain_what_answers_are_unequal() -> None:
    lab = result("batching")
    equal, spread, few = lab.numbers("factor")[::2]
    assert equal == pytest.approx(1.0, abs=0.05)
    assert equal < spread < few
    for factor, ideal in zip([equal, spread, few], lab.numbers("longest / mean")[::2], strict=True):
        assert 0.6 * ideal < factor < 1.1 * ideal
    # Of equal answers that are all there no place is empty.
    assert (lab.numbers("static used")[0], lab.numbers("continuous used")[0]) == (1, 1)
    for theirs, ours in zip(lab.numbers("static used"), lab.numbers("continuous used"), strict=True):
        assert theirs <= ours <= 1
    # A request that comes while a batch runs waits for its end.
    streams = zip(lab.numbers("static latency")[1::2], lab.numbers("continuous latency")[1::2], strict=True)
    assert all(theirs > 1.2 * ours for theirs, ours in streams)


def test_a_static_batch_holds_those_who_have_come() -> None:
    """Two places: the third request waits for the longest of the first two, and the fourth for itself alone."""
    batches: list[int] = []

    def run(calls: Sequence[Call]) -> SimulatedRun:
        batches.append(len(calls))
        lives = [Life(call.time, 1, call.num_new, end=call.time + call.num_new) for call in calls]
        return SimulatedRun(lives, 0, max(call.num_new for call in calls), 0, 0.0)

    calls = [Call(0.0, 1, 4), Call(0.0, 1, 10), Call(1.0, 1, 2), Call(50.0, 1, 3)]
    served = scheduling.static(run, calls, 2)
    assert batches == [2, 1, 1]
    assert served == (53.0, 15, (10 + 10 + 11 + 3) / 4)


def test_four_bits_fewer_make_sixteen_times_the_error() -> None:
    lab = result("rounding")
    assert lab.column("form") == ["int8-g128", "int4-g64"]
    assert lab.numbers("bits a weight") == [8.125, 4.25]
    small, large = lab.numbers("error of weights, %")
    assert 8 < large / small < 32
    less, more = lab.numbers("nats a token")
    assert 0 < less < more


def test_int4_is_not_four_times_as_small() -> None:
    lab = result("precision")
    assert lab.column("weights") == ["bfloat16", "int8", "int4"]
    assert lab.numbers("fewer bytes") == pytest.approx([1, 1.97, 3.75], abs=0.01)


def test_a_mixture_is_counted_by_the_models_file() -> None:
    lab = result("experts")
    assert "46,702,792,704 parameters" in lab.right[0]
    assert "12,879,925,248" in lab.right[0]
    assert lab.numbers("experts read")[:4] == pytest.approx([1 - 0.75**n for n in (1, 2, 4, 8)])
    assert lab.numbers("GB read") == sorted(lab.numbers("GB read"))


def test_the_knobs_leave_what_they_promise() -> None:
    rows = {str(row[0]): [float(cell) for cell in row[1:-1]] for row in result("sampling").rows}
    assert rows["nothing"][0] > 1000
    assert rows["nothing"][3] == pytest.approx(1.0, abs=1e-4)
    assert rows["temperature 0"][:3] == [1, 0, 1]
    assert rows["top_k 5"][0] == 5
    # The fewest tokens with at least 0.8: without the least likely of them they have less.
    num, _, _, mass, *_ = rows["top_p 0.8"]
    assert 0.8 <= mass < 1
    assert 1 <= num < rows["temperature 2, top_p 0.8"][0]
    assert rows["temperature 0.5"][1] < rows["nothing"][1] < rows["temperature 2"][1]
    assert rows["min_p 0.1"][0] < rows["nothing"][0]
    # Two seeds have one text at temperature 0, and the least perplexity.
    assert rows["temperature 0"][5] <= 0.5
    assert rows["temperature 0"][6] == min(row[6] for row in rows.values())
    assert all(result("sampling").column("text"))
    assert drawing.distinct([[1, 2, 1, 2], [3]], 1) == 3 / 5
    assert drawing.distinct([[1, 2, 1, 2], [3]], 2) == 2 / 3


def test_the_softmax_of_the_textbooks_example() -> None:
    """The logits 2, 1 and 0.1 over temperature 0.5 and 2, by our sampler and by the definition."""
    stated = {0.5: (0.864, 0.117, 0.019), 1.0: (0.659, 0.242, 0.099), 2.0: (0.502, 0.304, 0.194)}
    for temperature, expected in stated.items():
        shares = drawing.softmax_of(drawing.EXAMPLE, temperature)
        powers = np.exp(np.array([2, 1, 0.1]) / temperature)
        assert shares == pytest.approx(powers / powers.sum(), abs=1e-7)
        assert tuple(round(share, 3) for share in shares) == expected
        words = f"{' / '.join(f'{share:.3f}' for share in expected)} at temperature {temperature:g}"
        assert any(words in line for line in result("sampling").right)
        for page in ("temperature.md", "lab-sampling.md"):
            assert words in (Path(__file__).parents[2] / "docs" / "labs" / page).read_text(encoding="utf-8")
    # The control: multiplying by the temperature, as if 0.5 flattened, gives others.
    assert drawing.softmax_of([2 * 0.5, 1 * 0.5, 0.1 * 0.5], 1.0) != pytest.approx(
        drawing.softmax_of(drawing.EXAMPLE, 0.5), abs=0.1
    )


def test_a_pass_gives_one_token_more_than_it_keeps() -> None:
    lab = result("speculation")
    for alpha, passes, guesses, tokens, formula, num_accepted, fewer in lab.rows:
        assert float(passes) > 0
        assert formula == tokens_per_pass(float(alpha), float(guesses))
        assert (float(tokens) - float(num_accepted), float(formula) - float(fewer)) == (
            pytest.approx(1),
            pytest.approx(1),
        )
    # Right guesses are all kept: the formula is exact, and the textbook's reading of it is off by one.
    assert lab.rows[-1][3] == pytest.approx(lab.rows[-1][4])
    assert lab.rows[-1][5] != pytest.approx(lab.rows[-1][4])


def test_speculation_that_changes_the_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Bench.run

    def planted(self: Bench, *arguments: Any, **fields: Any) -> Any:
        answers = run(self, *arguments, **fields)
        if self.core.stats().num_drafts:
            answers = [answer._replace(token_ids=answer.token_ids[::-1]) for answer in answers]
        return answers

    monkeypatch.setattr(Bench, "run", planted)
    with pytest.raises(HeadraceError, match="speculation changed the answer"):
        catalogue.run("speculation", "builtin", small=True)


def test_the_command_prints_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ", ".join(catalogue.LABS) == NAMES
    plot = tmp_path / "x" / "experts.svg"
    monkeypatch.setattr(sys, "argv", ["headrace", "lab", "experts", "--small", "--plot", str(plot)])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    printed = capsys.readouterr().out
    assert "Textbooks: 8 experts of 7 B are 56 B parameters" in printed
    assert plot.read_text().startswith("<?xml")
    monkeypatch.setattr(sys, "argv", ["headrace", "lab", "experts", "--small", "--json"])
    with pytest.raises(SystemExit):
        main()
    assert json.loads(capsys.readouterr().out)["columns"] == result("experts").columns
    for name, model, words in (("x", "builtin", "NAME: 'x' is not allowed; it must be one of cache"),):
        with pytest.raises(RequestError, match=words):
            catalogue.run(name, model)


@pytest.mark.parametrize("name", catalogue.LABS)
def test_the_page_of_a_lab_has_its_words_and_its_columns(name: str) -> None:
    lab = result(name)
    assert {*lab.series, *lab.counts, lab.x} <= set(lab.columns)
    assert all(len(row) == len(lab.columns) for row in lab.rows)
    page = (Path(__file__).parents[2] / "docs" / "labs" / f"lab-{name}.md").read_text(encoding="utf-8")
    theirs = base.page_of(lab, "").splitlines()
    lines = page.splitlines()
    assert lines[0] == theirs[0]
    assert f"| {' | '.join(lab.columns)} |" in lines
    assert f"**Textbooks** print: {lab.wrong}" in lines
    assert (Path(__file__).parents[2] / "docs" / "labs" / "figures" / f"lab-{name}.svg").is_file()
    with pytest.raises(HeadraceError, match="has no column"):
        lab.column("no such column")
