"""The determinism law for every form of weights and cache, on the reference backend, and across threads and ISAs.

What `test_law` does with all requests in all ways for the default, this does with some of them in the ways that can
differ: in company, in chunks, preempted, with prefixes from the cache, by two threads, on every ISA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.law import Bits, assert_same, groups_of, make_core, make_requests, run, run_alone
from tests.support.shallow import shallow

from headrace.backends.native import require_native
from headrace.backends.torch_ref.ops import RefMatrix, RefOps
from headrace.protocol.step import Request

ROOT = Path(__file__).parents[2]
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "int4": {"quantization": "int4"},
    "int4-g128-asym": {"quantization": "int4-g128-asym", "kv_cache_dtype": "float16"},
    "int8": {"quantization": "int8"},
    "int8, floats": {"quantization": "int8", "activations": "16bit"},
    "int4, floats": {"quantization": "int4-g128-asym", "activations": "16bit", "kv_cache_dtype": "float16"},
    "nf4": {"quantization": "nf4"},
    "nf4, int8": {"quantization": "nf4", "activations": "int8"},
    "int8-channel": {"quantization": "int8-channel", "kv_cache_dtype": "float32"},
    "int8, cache of int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "cache of int8": {"kv_cache_dtype": "int8"},
    "cache of int4": {"kv_cache_dtype": "int4"},
    "cache of fp8": {"kv_cache_dtype": "fp8"},
    "cache of fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "torch_ref": {"backend": "torch_ref"},
    "cuda": {"backend": "cuda", "device": "cpu"},
}


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests()[::4]


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FORMS[request.param]


@pytest.fixture(scope="module")
def reference(requests: list[Request], form: dict[str, Any]) -> dict[str, Bits]:
    alone = run_alone(requests, **form)
    assert len({tuple(ids) for ids, _ in alone.values()}) > len(alone) / 2
    return alone


@pytest.mark.sampled(7)
def test_I_13_in_company(requests: list[Request], reference: dict[str, Bits], form: dict[str, Any]) -> None:
    core = make_core(**form)
    assert_same(run(core, groups_of(requests, len(requests))[0]), reference)
    before = core.stats().prefix_cache_hits
    for group in groups_of(requests, 9):
        assert_same(run(core, group), reference)
    assert core.stats().prefix_cache_hits > before
    core.close()


@pytest.mark.sampled(5, 2)
def test_I_13_in_chunks(requests: list[Request], reference: dict[str, Bits], form: dict[str, Any]) -> None:
    core = make_core(max_num_batched_tokens=7, max_num_seqs=6, enable_prefix_caching=False, **form)
    assert_same(run(core, requests[::2]), reference)
    core.close()


@pytest.mark.sampled(5, 1)
def test_I_13_preempted_in_a_small_pool(
    requests: list[Request], reference: dict[str, Bits], form: dict[str, Any]
) -> None:
    core = make_core(num_gpu_blocks_override=70, max_model_len=512, block_size=8, **form)
    assert_same(run(core, requests, preempt_every=3), reference)
    assert core.stats().num_preemptions > 3
    core.close()


def test_the_forms_do_differ(requests: list[Request]) -> None:
    outputs = [run_alone(requests[:2], **form) for form in FORMS.values()]
    assert len({str(bits) for bits in outputs}) == len(FORMS)


def test_control_torch_ref_with_a_product_over_all_rows_is_noticed(
    requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMS["torch_ref"]
    reference = run_alone(requests[::2], **form)

    def linear(self: RefOps, x: torch.Tensor, matrix: RefMatrix) -> torch.Tensor:
        out = (x.float() @ matrix.data[: matrix.num_in])[:, : matrix.num_out]
        return (out if matrix.bias is None else out + matrix.bias).to(self.dtype)

    monkeypatch.setattr(RefOps, "linear", linear)
    core = make_core(**form)
    with pytest.raises(AssertionError, match="differ"):
        assert_same(run(core, requests[::2]), reference)
    core.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first", range(3))
def test_I_13_every_isa_gives_the_same_bits(first: int) -> None:
    """In processes of their own: the ISA is chosen once. One line for each form, on two layers; `scalar` is slow."""
    forms = [form | {"model": shallow(2)} for form in FORMS.values() if "backend" not in form][first::3]
    command = [sys.executable, "-m", "tests.support.law", json.dumps(forms)]
    output = {}
    for isa in require_native().isas():
        env = os.environ | {"HEADRACE_ISA": isa}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        served, *output[isa] = done.stdout.split()
        assert served == isa
    first = output["scalar"]
    assert len(set(first)) == len(forms)
    assert all(lines == first for lines in output.values()), output


@pytest.mark.sampled(2)
def test_I_13_with_two_threads(requests: list[Request], reference: dict[str, Bits], form: dict[str, Any]) -> None:
    core = make_core(**(form | {"num_threads": 2}))
    assert_same(run(core, requests[::3]), reference)
    core.close()
