"""The arithmetic of quality: figures of known logits, errors of known matrices, and the audit's file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.backends.step import Chunks, HostLogits
from headrace.cli.bench.divergence import LayerError, Tally, distance, layer_errors, lockstep, score
from headrace.cli.bench.quality import held_bits
from headrace.insight import audit
from headrace.protocol.errors import CheckpointError, HeadraceError
from headrace.protocol.step import EngineInfo
from headrace.quant.schemes import Scheme

P, Q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])


def logits(*rows: Any) -> np.ndarray:
    return np.log(np.array(rows)).astype(np.float32)


def test_figures_of_two_known_distributions() -> None:
    tally = Tally()
    # Added constants change no probability, but they are differences of logits.
    tally.add([0, 1], logits(Q, P), logits(P, P) + np.float32(2.0))
    figures = tally.figures(num_bytes=3)
    kl = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert figures["num_tokens"] == 2
    assert figures["perplexity"] == pytest.approx(4.0)
    assert figures["bits_per_byte"] == pytest.approx(4 / 3)
    assert figures["reference_perplexity"] == pytest.approx(math.sqrt(8))
    assert figures["mean_kl"] == pytest.approx(kl / 2, rel=1e-6)
    assert figures["max_kl"] == pytest.approx(kl, rel=1e-6)
    assert figures["mean_kl_stderr"] == pytest.approx(kl / 2, rel=1e-6)
    assert figures["top1_flip_rate"] == 0.5
    assert figures["max_logit_difference"] == pytest.approx(2 + math.log(2), rel=1e-6)


def test_a_model_beside_itself_is_no_distance_away() -> None:
    tally = Tally()
    rows = np.random.default_rng(0).normal(0, 3, (50, 97)).astype(np.float32)
    tally.add(list(range(50)), rows, rows)
    figures = tally.figures(100)
    assert (figures["mean_kl"], figures["top1_flip_rate"], figures["max_logit_difference"]) == (0, 0, 0)
    assert figures["perplexity"] == figures["reference_perplexity"]


def test_tokens_that_are_never_said_cost_nothing() -> None:
    tally = Tally()
    with np.errstate(divide="ignore"):
        tally.add([0], logits([0.5, 0.5, 0.0]), logits([0.5, 0.5, 0.0]))
        tally.add([0], logits([0.25, 0.25, 0.5]), logits([0.5, 0.5, 0.0]))
    assert tally.kl == pytest.approx([0, math.log(2)], rel=1e-6)
    assert math.isfinite(tally.max_difference)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_distribution(bad: float) -> None:
    with pytest.raises(HeadraceError, match="not finite"):
        Tally().add([0], np.array([[0.0, bad, 1.0]], np.float32), None)


def test_no_token_to_score() -> None:
    with pytest.raises(HeadraceError, match="nothing to judge"):
        Tally().figures(0)


class Counting:
    """A program whose logits at a position are those of `table` [V, V] at its token; it lends one array to all."""

    def __init__(self, table: np.ndarray, max_rows: int, max_logits: int) -> None:
        self.table, self.max_rows, self.max_logits = table, max_rows, max_logits
        self.vocab_size, self.block_size, self.num_blocks = table.shape[1], 4, 64
        self.known: dict[int, int] = {}
        self.lent = np.empty((max_logits, self.vocab_size), np.float32)

    def forward(self, chunks: Chunks, rows: list[int]) -> tuple[list[bool], HostLogits]:
        [start], [token_ids], [blocks] = chunks[:3]
        assert len(token_ids) <= self.max_rows
        assert len(blocks) * self.block_size >= start + len(token_ids)
        self.rows = token_ids
        return [True], self.logits(rows)

    def logits(self, rows: list[int]) -> HostLogits:
        assert len(rows) <= self.max_logits
        out = self.lent[: len(rows)]
        out[:] = self.table[[self.rows[row] for row in rows]]
        return HostLogits(out, [True] * len(rows), out.argmax(1).tolist())


@pytest.mark.parametrize(("max_rows", "max_logits"), [(1000, 1000), (7, 3), (5, 100), (1, 1)])
def test_figures_do_not_depend_on_how_rows_are_cut(max_rows: int, max_logits: int) -> None:
    rng = np.random.default_rng(1)
    ours, theirs = (rng.normal(0, 2, (31, 31)).astype(np.float32) for _ in range(2))
    windows = [rng.integers(0, 31, size).tolist() for size in (40, 2, 17)]

    def told(*cut: int) -> dict[str, float]:
        tally = Tally()
        assert list(score(Counting(ours, *cut), Counting(theirs, 50, 50), windows, tally)) == [1, 2, 3]  # type: ignore[arg-type]
        return tally.figures(100)

    plain = Tally()
    for window in windows:
        plain.add(window[1:], ours[window[:-1]], theirs[window[:-1]])
    assert told(max_rows, max_logits) == plain.figures(100)
    # And a program that is one position off is another one.
    off = Tally()
    off.add(windows[0][1:], ours[windows[0][1:]], None)
    assert off.nll != plain.nll[: len(off.nll)]


def test_lockstep_gives_every_position_once() -> None:
    program: Any = Counting(np.zeros((5, 5), np.float32), 7, 3)
    assert [first for first, _ in lockstep([program], [0] * 20)] == [0, 3, 6, 7, 10, 13, 14, 17]


def test_different_vocabularies() -> None:
    a, b = (Counting(np.zeros((size, size), np.float32), 9, 9) for size in (5, 6))
    with pytest.raises(HeadraceError, match="5 logits and the reference 6"):
        list(score(a, b, [[0, 1]], Tally()))  # type: ignore[arg-type]


@dataclass
class Plain:
    name: str
    weights: np.ndarray

    @property
    def num_out(self) -> int:
        return self.weights.shape[0]

    @property
    def num_in(self) -> int:
        return self.weights.shape[1]

    def dense(self) -> np.ndarray:
        return self.weights


def test_errors_of_matrices_by_name() -> None:
    ones = np.ones((4, 8), np.float32)
    moved = ones.copy()
    moved[2, 3] = 3.0
    matrices = [Plain("model.layers.0.a", moved), Plain("lm_head", ones)]
    theirs = [Plain("lm_head", ones), Plain("layers.0.a", ones)]
    assert list(layer_errors(matrices, theirs)) == [
        LayerError("layers.0.a", 4, 8, math.sqrt(4 / 32), 2.0),
        LayerError("lm_head", 4, 8, 0.0, 0.0),
    ]
    with pytest.raises(HeadraceError, match="different matrices, such as layers.0.a"):
        list(layer_errors(matrices[1:], theirs))
    with pytest.raises(HeadraceError, match=r"\[4, 8\], the reference's is \[8, 4\]"):
        list(layer_errors(matrices[1:], [Plain("lm_head", ones.T)]))


def test_a_matrix_of_zeros() -> None:
    zeros = np.zeros((2, 2), np.float32)
    assert distance(zeros, zeros) == (0.0, 0.0)
    assert distance(zeros + 1, zeros) == (math.inf, math.inf)


@dataclass
class Held:
    scheme: Scheme
    num_in: int = 64


@pytest.mark.parametrize(
    ("matrix", "bits"),
    [
        (Held(Scheme("i4", 64)), 4.25),
        (Held(Scheme("i4", 64, True)), 4.5),
        (Held(Scheme("i4", 64, book="nf4")), 4.25),
        (Held(Scheme("i4", 32, book="e2m1")), 4.5),
        (Held(Scheme("i6", 64)), 6.25),
        (Held(Scheme("i8")), 8.5),
        (Held(Scheme("i8", 128)), 8.125),
        (Held(Scheme("f", dtype="float32")), 32),
        (Held(Scheme("f", dtype="bfloat16")), 16),
        (Held(Scheme("k", 32, dtype="Q4_K")), 4.5),
    ],
)
def test_bits_of_a_weight(matrix: Held, bits: float) -> None:
    assert held_bits(matrix) == bits


FORM = {"quantization": "int4", "dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "backend": "cpu"}
MEASURED = {"perplexity": 7.5, "mean_kl": 0.01, "text": "a.txt", "layers": [], "num_tokens": 9}


def info(**fields: Any) -> EngineInfo:
    plain = {"model": "m", "max_model_len": 9, "vocab_size": 9, "eos_token_ids": [], "block_size": 16, "num_blocks": 9}
    return EngineInfo(**(plain | {"max_num_seqs": 1, "max_num_batched_tokens": 9} | FORM | fields))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    data = np.random.default_rng(0).bytes(3 * audit.SAMPLES * audit.SAMPLE_BYTES)
    (tmp_path / "model.safetensors").write_bytes(data)
    return tmp_path


def test_an_audit_is_shown_for_its_own_weights_and_form(weights: Path) -> None:
    assert audit.find(weights) == []
    audit.save(weights, FORM, MEASURED)
    audit.save(weights, FORM | {"quantization": "int8"}, MEASURED | {"perplexity": 7.0})
    audits = audit.find(weights)
    form = audit.of_form(audits, info())
    assert form == {"perplexity": 7.5, "mean_kl": 0.01, "text": "a.txt", "num_tokens": 9}
    other = audit.of_form(audits, info(quantization="int8"))
    assert other is not None
    assert other["perplexity"] == 7.0
    assert audit.of_form(audits, info(kv_cache_dtype="int8")) is None
    # Measured again, it is one entry still.
    audit.save(weights, FORM, MEASURED | {"perplexity": 7.25})
    assert sorted(entry["measured"]["perplexity"] for entry in audit.find(weights)) == [7.0, 7.25]
    assert not list(weights.glob(".*"))


def test_an_audit_of_other_weights_is_not_shown(weights: Path) -> None:
    audit.save(weights, FORM, MEASURED)
    (weights / "model.safetensors").write_bytes(np.random.default_rng(1).bytes(3 * audit.SAMPLES * audit.SAMPLE_BYTES))
    assert audit.find(weights) == []
    audit.save(weights, FORM | {"quantization": "int8"}, MEASURED)
    assert len(json.loads((weights / audit.NAME).read_text())["audits"]) == 1


def test_a_copy_keeps_its_audit(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    audit.save(weights, FORM, MEASURED)
    copy = tmp_path_factory.mktemp("copy")
    for path in weights.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert len(audit.find(copy)) == 1


def test_gguf_files_of_one_folder_have_audits_of_their_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(name.encode() * 1000)
        audit.save(tmp_path / f"{name}.gguf", FORM, MEASURED | {"text": name})
    assert [audit.find(tmp_path / f"{name}.gguf")[0]["measured"]["text"] for name in "ab"] == ["a", "b"]


@pytest.mark.parametrize("text", ["", "[]", '{"audits": 3}', '{"audits": [3]}', "\xff"])
def test_a_file_that_is_no_audit(weights: Path, text: str) -> None:
    (weights / audit.NAME).write_text(text)
    with pytest.raises(CheckpointError):
        audit.find(weights)


def test_what_an_audit_may_not_say(weights: Path) -> None:
    audit.save(weights, FORM, MEASURED)
    path = weights / audit.NAME
    data = json.loads(path.read_text())
    data["audits"][0]["measured"] |= {"perplexity": math.inf, "mean_kl": True, "text": "x" * 999, "evil": {"a": 1}}
    path.write_text(json.dumps(data))
    assert audit.find(weights)[0]["measured"] == {"text": "x" * audit.MAX_WORD, "num_tokens": 9}
