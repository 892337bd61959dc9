"""Calibration text, and the command around it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.cli.quantize import calibration_text
from headrace.hub import resolve
from headrace.protocol.errors import RequestError
from headrace.quantize import driver
from headrace.quantize.calibration import BATCH, cut, generated_text, read_texts


def test_texts_are_cut_into_pieces_up_to_the_number() -> None:
    texts = [list(range(10)), [5], list(range(7))]
    assert cut(texts, 4, 100) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3], [4, 5, 6]]
    assert cut(texts, 4, 6) == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(RequestError, match="calibration"):
        cut([[5], []], 4, 6)


def test_generated_text_end_when_there_are_enough() -> None:
    requests: list[int] = []

    def answer(seeds: range) -> Sequence[Sequence[int]]:
        requests.extend(seeds)
        return [[seed, 1, 2] for seed in seeds]

    assert generated_text(answer, 8, 7) == [[0, 1, 2], [1, 1, 2]]
    assert requests == list(range(BATCH))
    with pytest.raises(RequestError, match="FILE"):
        generated_text(lambda seeds: [[0] for _ in seeds], 8, 7)


def test_generated_text_does_not_depend_on_how_much_is_generated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(seeds: range) -> Sequence[Sequence[int]]:
        rounds.append(len(seeds))
        return [[seed] * (1 + seed % 9) for seed in seeds]

    def text(most: int) -> list[list[int]]:
        monkeypatch.setattr("headrace.quantize.calibration.MOST_AT_ONCE", most)
        rounds.clear()
        return generated_text(answer, 9, 700, lambda num_done, total: calls.append((num_done, total)))

    rounds: list[int] = []
    calls: list[tuple[int, int]] = []
    wide = text(64)
    assert (rounds, sum(map(len, wide))) == ([64, 64, 17], 700)
    assert (calls[-1], len(calls)) == ((700, 700), 3)
    assert text(16) == wide
    assert set(rounds) == {16}


def test_files(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("One.\nTwo.\n")
    lines.write_text('{"text": "One."}\n\n{"text": "Two.", "id": 2}\n{"token_ids": [3, 0]}\n')
    assert read_texts(plain) == ["One.\nTwo.\n"]
    assert read_texts(lines) == ["One.", "Two.", [3, 0]]
    for bad in (
        "{",
        "[1]",
        '{"words": "x"}',
        '{"text": 3}',
        '{"token_ids": [1, -1]}',
        '{"token_ids": [true]}',
        "[" * 100_000,
    ):
        lines.write_text('{"text": "One."}\n' + bad)
        with pytest.raises(RequestError, match="line 2"):
            read_texts(lines)
    plain.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="UTF-8"):
        read_texts(plain)
    with pytest.raises(RequestError, match="readable"):
        read_texts(tmp_path / "none")


def test_the_model_s_generated_text_are_the_same_each_time() -> None:
    first = calibration_text("builtin", resolve("builtin"), None, 300, 64)
    assert first == calibration_text("builtin", resolve("builtin"), None, 300, 64)
    assert sum(map(len, first)) in (299, 300)  # a last token alone is left out
    assert max(map(len, first)) <= 64
    assert all(piece[0] == 0 for piece in first[:2])


def test_the_command(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl who had a red ball. " * 40)
    out = tmp_path / "out"
    command = ["quantize", "builtin", str(out), "--method", "gptq", "--group-size", "64", "--calibration", str(text)]
    done = CliRunner().invoke(app, [*command, "--num-calibration-tokens", "200"])
    assert done.exit_code == 0, done.output
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"], config["group_size"]) == ("gptq", 4, 64)
    report = json.loads((out / driver.REPORT).read_text())
    assert report["num_calibration_tokens"] == 200
    assert (out / "tokenizer.json").is_file()
    assert "98 layers quantised" in done.output


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--method", "best"], "method"),
        (["--bits", "3.5"], "bits"),
        (["--method", "rtn", "--bits", "7"], "bits"),
        (["--method", "gptq", "--act-order", "up"], "act_order"),
        (["--format", "zip"], "format"),
        (["--method", "smoothquant", "--format", "awq"], "format"),
        (["--method", "gptq", "--calibration", "/nowhere/at-all"], "calibration"),
        (["--method", "mixed"], "out"),
        (["--method", "Q4_K_M"], "out"),
    ],
)
def test_wrong_flags_are_told(tmp_path: Path, flags: list[str], field: str) -> None:
    done = CliRunner().invoke(app, ["quantize", "builtin", str(tmp_path / "out"), *flags])
    assert isinstance(done.exception, RequestError)
    assert done.exception.field == field
    assert not (tmp_path / "out").exists()
