"""Matrices of the native backend: what the kernels can not take is refused or taken as what it stands for."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.checkpoints import write_llama
from tests.support.tensors import arrays_of

from headrace.backends import make_backend
from headrace.backends.cpu import Cpu
from headrace.backends.cpu.matrix import MAX_GROUP, MAX_IN, CpuMatrix
from headrace.backends.cpu.tape import Tape
from headrace.backends.graph import LOGITS, ROWS, SEQS
from headrace.backends.native import native
from headrace.checkpoint.mapped import MappedCheckpoint
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


def resident_bytes(path: Path) -> int:
    """Bytes of a file's mappings that are in this process's memory."""
    num_bytes, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = line.endswith(str(path))
        elif is_ours and line.startswith("Rss:"):
            num_bytes += 1024 * int(line.split()[1])
    return num_bytes


@pytest.mark.skipif(not os.access("/proc/self/smaps", os.R_OK), reason="reads /proc")
def test_rows_of_a_checkpoints_table_are_read_and_not_mapped(tmp_path: Path) -> None:
    """A kernel may map 2 MiB for each row that is touched; what is read by the descriptor maps nothing."""
    height, width = 512, 2048
    weight = torch.randn(height, width, generator=torch.Generator().manual_seed(1))
    directory = write_llama(tmp_path, {"model.embed_tokens.weight": weight.to(torch.bfloat16)})
    path = directory / "model.safetensors"
    checkpoint, backend = MappedCheckpoint(directory), Cpu("cpu", "float32")
    ids = np.arange(0, height, 4, dtype=np.int32)
    table = backend.table(checkpoint.table("model.embed_tokens.weight", (height, width)))
    assert table.file >= 0
    ops = backend.ops
    ops.begin()
    out = ops.embedding(ids, table)
    ops.graph.read(out)
    tape = Tape(ops.graph, {ROWS: len(ids), SEQS: 1, LOGITS: 1})
    tape.run([len(ids), 1, 0], 2)
    assert np.array_equal(tape.floats(out.buffer, len(ids))[:, :width], weight.bfloat16().float().numpy()[ids])
    assert resident_bytes(path) == 0
    # Negative control: the same rows of the mapping.
    assert checkpoint.array("model.embed_tokens.weight").view(np.uint16)[ids].any()
    assert resident_bytes(path) >= ids.size * 4096


def test_a_table_that_is_no_files_lies_in_memory(tmp_path: Path) -> None:
    values = np.ones((4, 8), np.float32)
    table = Cpu("cpu", "float32").table(values)
    assert (table.file, table.data) == (-1, values.ctypes.data)
    # Numbers that are converted are in no file either.
    directory = write_llama(tmp_path, {"table": torch.ones(4, 8, dtype=torch.float64)})
    checkpoint = MappedCheckpoint(directory)
    assert Cpu("cpu", "float32").table(checkpoint.table("table", (4, 8))).file == -1


def test_a_files_descriptor_lives_as_long_as_a_table_of_it(tmp_path: Path) -> None:
    directory = write_llama(tmp_path, {"table": torch.ones(4, 8)})
    table = Cpu("cpu", "float32").table(MappedCheckpoint(directory).table("table", (4, 8)))
    gc.collect()
    assert os.path.samestat(os.fstat(table.file), (directory / "model.safetensors").stat())
    descriptor = table.file
    del table
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
