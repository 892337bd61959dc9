"""Blocks that headrace writes are what gguf-py and headrace's own reader make of them, and near the weights."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.protocol.errors import CheckpointError
from headrace.quant import threads
from headrace.quant.formats import gguf_blocks
from headrace.quantize import gguf_encode
from headrace.quantize.gguf_encode import ENCODERS, bits_per_weight, encode

KINDS = list(ENCODERS)
BLOCKS = [kind for kind in KINDS if kind in gguf_blocks.TYPES]
# Root mean square error as a share of Gaussian weights' own size.
MOST = {
    "F32": 0.0, "F16": 3e-4, "BF16": 2e-3, "Q8_0": 6e-3, "Q4_0": 0.083, "Q4_1": 0.073, "Q5_0": 0.042, "Q5_1": 0.036,
    "Q2_K": 0.275, "Q3_K": 0.15, "Q4_K": 0.073, "Q5_K": 0.037, "Q6_K": 0.0175,
}  # fmt: skip


def gaussian(rows: int = 16, columns: int = 1024, seed: int = 0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((rows, columns)) * 0.02).astype(np.float32)


def read(kind: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    result: NDArray[np.float32] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return raw.view("<f4") if kind == "F32" else result


def error(weight: NDArray[np.float32], result: NDArray[np.float32]) -> float:
    return float(np.sqrt(((result - weight) ** 2).mean()) / np.sqrt((weight**2).mean()))


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_py_reads_what_was_meant(kind: str) -> None:
    weight = gaussian()
    raw = encode(kind, weight)
    assert raw.nbytes * 8 == bits_per_weight(kind) * weight.size
    theirs = read(kind, raw)
    assert error(weight, theirs) <= MOST[kind]
    if kind in BLOCKS:
        assert np.array_equal(gguf_blocks.decode(kind, raw).dequantize(), theirs)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_errors_are_no_larger_than_gguf_pys(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    for seed in range(3):
        weight = gaussian(seed=seed) * np.random.default_rng(seed).exponential(1, (16, 1024)).astype(np.float32)
        theirs = gguf.quants.dequantize(gguf.quants.quantize(weight, number), number)
        assert error(weight, read(kind, encode(kind, weight))) <= error(weight, theirs) * 1.0001


@pytest.mark.parametrize("kind", BLOCKS)
def test_hard_blocks(kind: str) -> None:
    zeros = np.zeros((2, 512), np.float32)
    assert not read(kind, encode(kind, zeros)).any()
    for value in (0.5, -0.5):
        constant = np.full((2, 512), value, np.float32)
        assert error(constant, read(kind, encode(kind, constant))) < 0.02
    tiny = gaussian(2, 512) * np.float32(1e-9)  # beyond float16: nothing, and no NaN
    assert np.abs(read(kind, encode(kind, tiny))).max() < 1e-6
    lone = zeros.copy()
    lone[1, 77] = 3.0
    content = read(kind, encode(kind, lone))
    assert abs(content[1, 77] - 3) < 0.05
    assert np.count_nonzero(np.abs(content) > 0.3) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_each_other_or_on_threads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = gaussian(300, 1024)
    monkeypatch.setattr(threads, "num_cores", lambda: 3)
    whole = encode(kind, weight)
    monkeypatch.setattr(threads, "num_cores", lambda: 1)
    alone = np.concatenate([encode(kind, weight[i : i + 1]) for i in (0, 150, 299)])
    assert np.array_equal(alone, whole[[0, 150, 299]])


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e5])
def test_what_can_not_be_said_is_refused(value: float) -> None:
    weight = gaussian(2, 256)
    weight[1, 3] = value
    for kind in ("Q4_0", "Q4_K", "F16"):
        with pytest.raises(CheckpointError, match="the name has weights up to"):
            encode(kind, weight, "the name")
    with pytest.raises(CheckpointError, match="multiple of 256"):
        encode("Q4_K", weight[:, :32])


def test_control_nibbles_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = gaussian()
    monkeypatch.setattr(gguf_encode, "_folded", lambda codes, size, bits: codes.astype(np.uint8)[:, ::2])
    assert error(weight, read("Q4_0", encode("Q4_0", weight))) > MOST["Q4_0"]


def test_control_without_the_search_of_scales_the_bound_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_encode, "SHARES", (1.3,))
    weight = gaussian()
    assert error(weight, read("Q4_0", encode("Q4_0", weight))) > MOST["Q4_0"]
