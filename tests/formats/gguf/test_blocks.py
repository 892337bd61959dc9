"""GGUF's block types: ggml's own numbers to the bit, and the kernels' forms with no more than float16's rounding."""

from __future__ import annotations

from pathlib import Path

import gguf as ecosystem
import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.formats.gguf.models import random_blocks
from tests.support.tensors import decode, native

from headrace.gguf import TENSOR_TYPES
from headrace.protocol.errors import CheckpointError
from headrace.quant import threads
from headrace.quant.base import QWeight
from headrace.quant.formats import gguf_blocks, gguf_grids
from headrace.quant.formats.gguf_blocks import TYPES, k_blocks, keeps_codes, scheme_for
from headrace.quant.schemes import K_TYPES, SCHEMES, Scheme, native_flag

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4")
"""Types whose scales are float16 or powers of two to begin with."""
VECTORS = sorted(TYPES.keys() - {"Q8_K"})


@pytest.mark.parametrize("kind", VECTORS)
def test_equals_ggml_to_the_bit(kind: str, shared_data: Path) -> None:
    with safe_open(shared_data / "quant" / "gguf_block_vectors.safetensors", "np") as file:
        raw, expected = file.get_tensor(f"{kind}.raw"), file.get_tensor(f"{kind}.ref")
    actual = decode(kind, raw.reshape(4, -1)).dequantize().numpy()
    assert np.array_equal(actual.ravel(), expected.ravel())


@pytest.mark.parametrize("kind", VECTORS)
def test_equals_gguf_py_on_random_bytes(kind: str) -> None:
    """More blocks than are decoded at once, on several threads."""
    raw, expected = random_blocks(kind, (3, 512, 256), seed=1)
    decoded = decode(kind, raw.reshape(-1, raw.shape[-1]))
    assert np.array_equal(decoded.dequantize().numpy(), expected.reshape(-1, 256))
    values = decoded.codes if decoded.codebook is None else decoded.codebook
    assert TYPES[kind].low <= int(values.min())
    assert int(values.max()) <= TYPES[kind].high


def test_q8_k_is_a_float_and_256_codes() -> None:
    codes = np.random.default_rng(0).integers(-128, 128, 512).astype(np.int8)
    scales = np.array([0.37, -1.5e-3], np.float32)
    blocks = [scales[i : i + 1].tobytes() + codes[256 * i : 256 * i + 256].tobytes() + bytes(32) for i in range(2)]
    decoded = decode("Q8_K", np.frombuffer(b"".join(blocks), np.uint8).reshape(1, -1))
    assert np.array_equal(decoded.dequantize().numpy()[0], codes * np.repeat(scales, 256))


def test_the_directory_knows_the_same_blocks() -> None:
    sizes = {name: (elements, size) for name, elements, size in TENSOR_TYPES.values() if elements > 1}
    assert sizes == {name: (block.elements, block.size) for name, block in TYPES.items()}
    numbers = {number: name for number, (name, _, _) in TENSOR_TYPES.items()}
    theirs = {int(number): number.name for number in ecosystem.GGMLQuantizationType}
    assert all(theirs[number] == name for number, name in numbers.items())
    assert all(ecosystem.GGML_QUANT_SIZES[ecosystem.GGMLQuantizationType[n]] == size for n, size in sizes.items())


def test_grids_have_all_their_points() -> None:
    numbers = {"IQ2_XXS": 256, "IQ2_XS": 512, "IQ2_S": 1024, "IQ3_XXS": 256, "IQ3_S": 512, "IQ1_S": 2048}
    for name, number in numbers.items():
        points = gguf_grids.grid(name)
        assert len(points) == number == len({point.tobytes() for point in points})
    assert (gguf_grids.even_signs().prod(1) == 1).all()


@pytest.mark.parametrize("kind", sorted(TYPES.keys() - K_TYPES.keys()))
def test_kernels_get_the_same_codes_where_a_form_has_them(kind: str) -> None:
    if kind == "Q8_K":
        raw = np.random.default_rng(2).integers(0, 256, (4, 2 * 292), np.uint8)
        raw[:, 0:4] = raw[:, 292:296] = np.frombuffer(np.float32(0.01).tobytes(), np.uint8)
    else:
        raw = random_blocks(kind, (64, 512), seed=2)[0]
    weight, scheme = decode(kind, raw), scheme_for({kind})
    actual = native(weight, kind, scheme, "w")
    expected, result = weight.dequantize(), actual.dequantize()
    assert actual.group == scheme.group
    assert actual.group % 8 == 0
    assert (actual.mins is not None) == scheme.has_min
    error = float((result - expected).norm() / expected.norm())
    if kind in EXACT:
        assert error == 0
    else:
        assert keeps_codes(kind, scheme)
        assert error <= 1e-3, "float16's rounding of scales and minima"
    assert actual.scales is not None
    assert torch.equal(actual.scales, actual.scales.half().float())


@pytest.mark.parametrize("kind", K_TYPES)
def test_kernels_get_the_blocks_themselves_of_k_quants(kind: str) -> None:
    raw, expected = random_blocks(kind, (64, 512), seed=2)
    actual = k_blocks(kind, raw, "w")
    assert scheme_for({kind}) == Scheme("k", 32, dtype=kind)
    assert native_flag(scheme_for({kind})) == K_TYPES[kind].code == 10 + int(kind[1])
    assert actual.shape == (64, 512)
    assert actual.codes.tobytes() == raw.tobytes()
    assert np.array_equal(actual.dequantize(), expected)
    assert (TYPES[kind].elements, TYPES[kind].size) == (256, K_TYPES[kind].size)


def test_forms_of_stacked_types() -> None:
    assert scheme_for({"Q4_0"}) == Scheme("i4", 32)
    assert scheme_for({"Q4_K", "Q4_0"}) == scheme_for({"Q4_0", "Q4_1"}) == Scheme("i4", 32, True)
    assert scheme_for({"Q5_0"}) == Scheme("i5", 32)
    assert scheme_for({"Q5_1"}) == scheme_for({"Q5_1", "Q4_K"}) == Scheme("i5", 32, True)
    assert scheme_for({"Q6_K", "Q5_0"}) == Scheme("i6", 16)
    assert scheme_for({"Q4_K", "Q6_K"}) == Scheme("i6", 16, True)
    assert scheme_for({"Q8_0", "Q4_0"}) == scheme_for({"Q8_0", "Q4_1"}) == Scheme("i8", 32)
    assert scheme_for({"Q2_K", "Q3_K"}) == Scheme("i4", 16, True)
    assert scheme_for({"TQ1_0"}) == Scheme("i2", 128)
    # TQ2_0 has a code for 2 beside those for -1, 0 and 1.
    assert scheme_for({"TQ2_0"}) == scheme_for({"TQ1_0", "TQ2_0"}) == Scheme("i2", 128, has_zero=True)
    assert scheme_for({"TQ1_0", "Q4_0"}) == Scheme("i4", 32)
    assert scheme_for({"IQ4_NL", "IQ4_XS"}) == Scheme("i4", 32, book="iq4_nl")
    assert scheme_for({"MXFP4"}) == Scheme("i4", 32, book="e2m1")
    assert scheme_for({"NVFP4"}) == Scheme("i4", 16, book="e2m1")
    assert scheme_for({"MXFP4", "Q4_0"}) == Scheme("i5", 32)
    assert scheme_for({"MXFP4", "IQ4_XS"}) == Scheme("i8", 32)


def test_a_backend_without_some_kernels_gets_the_next_fitting_form_or_none() -> None:
    few = {Scheme("i6", 32), Scheme("i8", 32)}
    assert scheme_for({"Q4_0"}, few) == Scheme("i6", 32)
    assert scheme_for({"Q6_K"}, SCHEMES - {Scheme("k", 32, dtype="Q6_K")}) == Scheme("i6", 16)
    assert scheme_for({"Q4_K", "Q6_K"}, few) is None
    assert scheme_for({"Q8_0"}, {Scheme("i6", 32)}) is None


PAIRS = [("Q4_0", "Q4_1"), ("Q8_0", "Q4_0"), ("Q4_K", "Q6_K"), ("Q2_K", "Q3_K"), ("Q3_K", "TQ2_0"), ("Q8_0", "Q5_1"),
         ("MXFP4", "IQ4_XS"), ("NVFP4", "Q5_0"), ("IQ3_S", "Q6_K")]  # fmt: skip


@pytest.mark.parametrize("kinds", PAIRS)
def test_a_type_in_the_form_of_a_wider_one(kinds: tuple[str, str]) -> None:
    scheme = scheme_for(set(kinds))
    for kind in kinds:
        weight = decode(kind, random_blocks(kind, (32, 512), seed=3)[0])
        expected, actual = weight.dequantize(), native(weight, kind, scheme, "w").dequantize()
        assert float((actual - expected).norm() / expected.norm()) <= (1e-3 if keeps_codes(kind, scheme) else 1e-2)


@pytest.mark.parametrize("d", [np.inf, -np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_refused(d: float) -> None:
    bad = np.frombuffer(np.float16(d).tobytes(), np.uint8)
    for kind, form in K_TYPES.items():
        for at in range(form.scales.start, form.scales.stop, 2):
            raw = random_blocks(kind, (3, 512))[0]
            k_blocks(kind, raw, "head")
            raw[1, form.size + at : form.size + at + 2] = bad
            with pytest.raises(CheckpointError, match="head has a scale"):
                k_blocks(kind, raw, "head")
    raw = random_blocks("IQ4_XS", (2, 256))[0]
    raw[1, :2] = bad
    with pytest.raises(CheckpointError, match="head has a scale"):
        native(decode("IQ4_XS", raw), "IQ4_XS", scheme_for({"IQ4_XS"}), "head")
    raw[1, :2] = np.frombuffer(np.float16(60000.0).tobytes(), np.uint8)  # times up to 31 is beyond float16
    with pytest.raises(CheckpointError, match="beyond float16"):
        native(decode("IQ4_XS", raw), "IQ4_XS", scheme_for({"IQ4_XS"}), "w")


def test_control_swapped_nibbles_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, expected = random_blocks("Q4_K", (4, 256))

    def equal() -> bool:
        return np.array_equal(decode("Q4_K", raw).dequantize().numpy(), expected)

    assert equal()
    right = gguf_blocks._chunks
    monkeypatch.setattr(gguf_blocks, "_chunks", lambda b, size: right((b >> 4) | (b << 4), size))
    assert not equal()


def test_threads_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks("IQ3_S", (1024, 512), seed=4)[0]

    def made(num_threads: int) -> QWeight:
        monkeypatch.setattr(threads, "num_cores", lambda: num_threads)
        return decode("IQ3_S", raw)

    one, three = made(1), made(3)
    assert torch.equal(one.codes, three.codes)
    assert one.scales is not None
    assert three.scales is not None
    assert torch.equal(one.scales, three.scales)
