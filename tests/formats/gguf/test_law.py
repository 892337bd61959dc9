"""I-13, the determinism law, for GGUF files: forms that no other checkpoint has (groups of 16, minima) included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from tests.formats.gguf.models import convert, random_blocks
from tests.support.law import Bits, assert_same, groups_of, make_core, make_requests, run, run_alone
from tests.support.shallow import shallow

from headrace.backends.native import require_native
from headrace.protocol.step import Request

PATH = Path(shallow(2))

ROOT = Path(__file__).parents[3]
KINDS = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q3_K", "ffn_gate": "Q2_K",
         "ffn_up": "Q2_K", "ffn_down": "IQ1_M", "token_embd": "Q6_K"}  # fmt: skip


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The built-in model's shape with random blocks: int8 and int4 in groups of 16, with and without minima."""

    def form(name: str, weight: Any) -> tuple[Any, Any]:
        kind = next(kind for part, kind in KINDS.items() if part in name)
        return random_blocks(kind, weight.shape, seed=len(name))[0], gguf.GGMLQuantizationType[kind]

    return {"model": str(convert(PATH, tmp_path_factory.mktemp("law") / "mixture.gguf", form)), "backend": "cpu"}


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests()[::5]


@pytest.fixture(scope="module")
def reference(requests: list[Request], mixture: dict[str, Any]) -> dict[str, Bits]:
    alone = run_alone(requests, **mixture)
    assert len({tuple(ids) for ids, _ in alone.values()}) > len(alone) / 2
    return alone


@pytest.mark.parametrize(
    "ways",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 6, "enable_prefix_caching": False},
        {"num_threads": 2},
        {"num_gpu_blocks_override": 70, "max_model_len": 512, "block_size": 8},
    ],
    ids=["in company", "in chunks", "two threads", "preempted"],
)
def test_I_13_bits_of_a_gguf_file(
    ways: dict[str, Any], requests: list[Request], reference: dict[str, Bits], mixture: dict[str, Any]
) -> None:
    core = make_core(**mixture, **ways)
    preempt_every = 3 if "block_size" in ways else 0
    for group in groups_of(requests, len(requests)):
        assert_same(run(core, group, preempt_every), reference)
    core.close()


@pytest.mark.slow
def test_I_13_every_isa_gives_the_same_bits_of_a_gguf_file(mixture: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "tests.support.law", json.dumps([mixture])]
    output = {}
    for isa in require_native().isas():
        env = os.environ | {"HEADRACE_ISA": isa}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        served, output[isa] = done.stdout.split()
        assert served == isa
    assert len(set(output.values())) == 1, output
