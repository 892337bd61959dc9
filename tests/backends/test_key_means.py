"""The mean key that an int4 cache leaves out: what it is, and that no request and no setting moves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.harness import load, save_random

from headrace import hub, models
from headrace.backends.key_means import HORIZON_BITS, LENGTH, NUM_SEQS, mean_key, probe_tokens

ANGLES = np.array([1.3, 0.02, 1e-5])


def turned(x: Any, positions: Any) -> Any:
    """x [..., 6] with its first 3 pairs turned by the angles of `positions`; pairs are (i, i + 3)."""
    z = (x[..., :3] + 1j * x[..., 3:6]) * np.exp(1j * positions * ANGLES)
    return np.concatenate([z.real, z.imag, x[..., 6:]], -1)


def test_without_angles_it_is_the_mean_of_all_but_the_first_position() -> None:
    keys = np.random.default_rng(1).normal(size=(NUM_SEQS, LENGTH, 2, 7))
    np.testing.assert_allclose(mean_key(keys, None, None), keys[:, 1:].mean((0, 1)), rtol=1e-6)


def test_with_angles_it_is_what_all_positions_have_in_common() -> None:
    rng = np.random.default_rng(2)
    common, mean = rng.normal(size=(2, 8)), rng.normal(size=(NUM_SEQS, LENGTH, 2, 8))
    mean -= mean[:, 1:].mean((0, 1))
    at = np.arange(LENGTH)[:, None, None]
    angles = np.arange(LENGTH)[:, None] * ANGLES
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    actual = mean_key(turned(common + mean, at), cos, sin)
    expected = np.mean([turned(common, position) for position in range(2**HORIZON_BITS)], 0)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert abs(actual[:, 0]).max() < 1e-2  # it turns fast
    np.testing.assert_allclose(actual[:, 2], common[:, 2], atol=0.1)  # it hardly turns


def test_probe_tokens_are_spread_over_the_vocabulary() -> None:
    tokens = np.array(probe_tokens(1000))
    assert tokens.shape == (NUM_SEQS, LENGTH)
    assert 0 <= tokens.min() < 20
    assert 980 < tokens.max() < 1000
    assert len(np.unique(tokens)) > 100


def means(path: Path, **options: Any) -> list[Any]:
    program: Any = load(path, backend="cpu", kv_cache_dtype="int4", **options).program
    return [layer.key_mean.copy() for layer in program.cache.layers]


def test_it_is_the_model_s_alone() -> None:
    first = means(hub.resolve("builtin"))
    assert all(np.abs(mean).max() > 0.1 for mean in first)
    for options in (
        {"max_model_len": 64},
        {"num_threads": 2},
        {"block_size": 8, "max_model_len": 40, "num_gpu_blocks_override": 9},
    ):
        for measured, other in zip(first, means(hub.resolve("builtin"), **options), strict=True):
            assert (measured == other).all()


def test_models_that_cap_their_scores_do_without(tmp_path: Path) -> None:
    save_random(models.find("gemma2").TINY, tmp_path)
    assert not any(mean.any() for mean in means(tmp_path))


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_both_backends_measure_the_same(model_type: str, tmp_path: Path) -> None:
    save_random(models.find(model_type).TINY, tmp_path)
    program: Any = load(tmp_path, backend="torch_ref", dtype="float32", kv_cache_dtype="int4").program
    for mean, cache in zip(means(tmp_path, dtype="float32"), program.caches, strict=True):
        np.testing.assert_allclose(mean, cache.mean.numpy(), atol=1e-5)
        assert mean.any()
