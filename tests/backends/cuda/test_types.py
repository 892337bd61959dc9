"""Every model type on the cuda backend: its twins give torch_ref's tokens and keep the law, or it is refused.

A refusal names what there are no kernels for; a type that is neither right nor refused fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models import test_encoders as encoders
from tests.models import test_sparse as sparse
from tests.support.harness import chunk_sizes, follow, load, random_ids, save_random
from tests.support.refusals import load_or_skip

from headrace import models
from headrace.backends.cuda.ops import CudaOps

ON_CPU: dict[str, Any] = {"backend": "cuda", "device": "cpu"}
SMALL: dict[str, Any] = {"dtype": "float32", "block_size": 8, "max_num_batched_tokens": 64}
LENGTH = 40


@pytest.mark.parametrize("name", models.names())
def test_a_type_gives_the_tokens_of_torch_ref_or_is_refused(name: str, tmp_path: Path) -> None:
    save_random(models.find(name).TINY, tmp_path)
    mine, text = load_or_skip(tmp_path, **ON_CPU, **SMALL), random_ids(LENGTH, 199, 1)
    logits = follow(mine, text, [LENGTH - 3, 1, 1, 1])
    reference = follow(load(tmp_path, dtype="float32", backend="torch_ref"), text, [LENGTH])
    assert (logits - reference).abs().max() < 1e-4 * reference.abs().max()
    assert torch.equal(logits.argmax(-1), reference.argmax(-1))
    # Prefill, and chunks over other blocks, have the bits of decode.
    for seed, sizes in enumerate(([LENGTH], chunk_sizes(LENGTH, [7, 1, 20]))):
        assert torch.equal(follow(mine, text, sizes, seed), logits)


@pytest.mark.parametrize("name", encoders.TYPES)
def test_an_encoder_gives_the_vectors_of_torch_ref_or_is_refused(name: str, tmp_path: Path) -> None:
    encoders.save(name, tmp_path)
    load_or_skip(tmp_path, **ON_CPU, **SMALL)
    texts = encoders.texts_of((1, 30, 129))
    mine = encoders.open_llm(tmp_path, **ON_CPU)
    actual = np.array(encoders.vectors(mine, texts))
    reference = np.array(encoders.vectors(encoders.open_llm(tmp_path, "torch_ref"), texts))
    assert np.abs(actual - reference).max() < 1e-4 * np.abs(reference).max()
    alone = np.array([encoders.vectors(mine, [text])[0] for text in texts])
    assert np.array_equal(alone, actual)


@pytest.mark.parametrize("name", [each for each in sparse.TYPES if each != "mpnet"])
def test_weights_of_words_are_those_of_torch_ref(name: str, tmp_path: Path) -> None:
    """mpnet is refused for its biases by distance."""
    sparse.save(name, tmp_path)
    texts = sparse.texts_of((1, 30, 129))
    mine = sparse.open_llm(tmp_path, **ON_CPU)
    actual = np.array(sparse.vectors(mine, texts))
    reference = np.array(sparse.vectors(sparse.open_llm(tmp_path, "torch_ref"), texts))
    assert np.abs(actual - reference).max() < 1e-4 * np.abs(reference).max()
    assert np.array_equal(np.array([sparse.vectors(mine, [text])[0] for text in texts]), actual)


def test_control_a_wrong_type_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that computes something else is neither right nor refused."""
    scale = CudaOps.scale
    monkeypatch.setattr(CudaOps, "scale", lambda self, x, factor: scale(self, x, 1.01 * factor))
    with pytest.raises(AssertionError):
        test_a_type_gives_the_tokens_of_torch_ref_or_is_refused("granite", tmp_path)
