"""Matrices of the native backend: what the kernels can not take is refused or taken as what it stands for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.tensors import arrays_of

from headrace.backends import make_backend
from headrace.backends.cpu.matrix import MAX_GROUP, MAX_IN, CpuMatrix
from headrace.backends.native import native
from headrace.protocol.errors import CheckpointError
from headrace.quant.base import QWeight, source_of
from headrace.quant.schemes import Scheme

pytestmark = pytest.mark.skipif(native()[0] is None, reason="no native core")


@pytest.mark.parametrize("permuted", [False, True])
def test_codes_that_no_kernel_knows_are_dequantised(permuted: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = QWeight(
        torch.randint(0, 16, (33, 64), generator=generator, dtype=torch.int8),
        torch.rand(33, 2, generator=generator),
        zeros=torch.randint(0, 16, (33, 2), generator=generator).float(),
        group=32,
        bits=5,
        permutation=torch.randperm(64, generator=generator) if permuted else None,
    )
    matrix = make_backend("cpu", "cpu", "float32").ops.matrix(source_of([arrays_of(weight)]))
    assert isinstance(matrix, CpuMatrix)
    assert matrix.kind == "f"
    assert np.array_equal(matrix.dense(), weight.dequantize().numpy())


@pytest.mark.parametrize(("num_in", "group"), [(MAX_IN + 8, 32), (64, 12), (MAX_IN, MAX_GROUP + 8)])
def test_what_would_overrun_the_kernels_is_refused(num_in: int, group: int) -> None:
    with pytest.raises(CheckpointError, match="native kernels take at most"):
        CpuMatrix("layer", Scheme("i4", group), np.zeros(64, np.uint8), num_in, 1)
    CpuMatrix("layer", Scheme("f", group, dtype="float32"), np.zeros(64, np.uint8), num_in, 1)


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("i6", 32, book="nf4"),
        Scheme("i4", 32, True, book="nf4"),
        Scheme("i8", 0, True),
        Scheme("i4", 32, has_zero=True),
    ],
)
def test_a_form_without_a_kernel_is_refused(scheme: Scheme) -> None:
    with pytest.raises(CheckpointError, match="have no form"):
        CpuMatrix("layer", scheme, np.zeros(64, np.uint8), 64, 1)


@pytest.mark.parametrize(
    ("num_in", "scheme"),
    [(128, Scheme("k", 32, dtype="Q4_K")), (256, Scheme("k", 16, dtype="Q4_K")), (256, Scheme("k", 32, dtype="Q4_0"))],
)
def test_what_is_no_k_quant_is_refused(num_in: int, scheme: Scheme) -> None:
    with pytest.raises(CheckpointError, match="no K-quants"):
        CpuMatrix("layer", scheme, np.zeros(144, np.uint8), num_in, 1)
    CpuMatrix("layer", Scheme("k", 32, dtype="Q4_K"), np.zeros(144, np.uint8), 256, 1)
