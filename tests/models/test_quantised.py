"""Weights that are quantised while loading: the same on both backends, and what quantised activations and caches add.

torch_ref computes with the very weights that the codes stand for, in float32; the native kernels quantise the rows that
go into a layer as well. How far that moves the built-in model's logits is bounded here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.harness import follow, load, save_random

from headrace import hub, models
from headrace.backends.cpu.matrix import CpuMatrix
from headrace.backends.torch_ref.ops import RefMatrix
from headrace.quant.schemes import NAMES, parse
from headrace.text.tokenizer import Tokenizer

TEXT = (
    "Once upon a time there was a little girl named Lily. She loved to play outside in the park with her dog. One day, "
    "they found a big box under a tree. Lily wanted to open it, but her mother said that it was not theirs. "
    '"Whose is it, then?" asked Lily. Nobody knew. They sat down beside the box and waited until it was almost dark.'
)


def matrices(thing: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """The weights of every matrix below `thing`, in the order of the attributes, as float32 [out, in]."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, RefMatrix):
        return [thing.dense()]
    if isinstance(thing, CpuMatrix):
        return [torch.from_numpy(thing.dense())]
    below = thing if isinstance(thing, list) else vars(thing).values() if hasattr(thing, "__dict__") else ()
    return [matrix for part in below for matrix in matrices(part, seen)]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("quantization", [None, *NAMES])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_both_backends_have_the_same_weights(model_type: str, quantization: str | None, tmp_path: Path) -> None:
    save_random(models.find(model_type).TINY, tmp_path)
    programs: list[Any] = [
        load(tmp_path, backend=backend, quantization=quantization, dtype="float32").program
        for backend in ("cpu", "torch_ref")
    ]
    actual, expected = (matrices(program.model) for program in programs)
    assert len(actual) == len(expected) >= 9
    for native, reference in zip(actual, expected, strict=True):
        assert torch.equal(native, reference)


def logits_of(backend: str, quantization: str | None, cache: str = "auto", activations: str = "auto") -> torch.Tensor:
    token_ids = Tokenizer.load(hub.resolve("builtin")).encode(TEXT)
    form = {"quantization": quantization, "kv_cache_dtype": cache, "activations": activations}
    runner = load(hub.resolve("builtin"), dtype="float32", backend=backend, **form)
    return follow(runner, token_ids, [len(token_ids)]).double()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Root of the mean square of differences, of the spread of `b`."""
    return float((a - b).pow(2).mean().sqrt() / b.std())


MOST = 0.025
"""Seen: 0.012 to 0.019, caches of int8 included; float32 without quantisation: 1e-6."""


@pytest.mark.sampled(9)
@pytest.mark.parametrize("cache", ["float32", "int8"])
@pytest.mark.parametrize("quantization", NAMES)
def test_quantised_activations_cost_little(quantization: str, cache: str) -> None:
    has_codes = parse(quantization).layer.kind != "f8"  # these take floats alone
    native = logits_of("cpu", quantization, cache, "int8" if has_codes else "auto")
    reference = logits_of("torch_ref", quantization)
    is_exact = cache == "float32" and not has_codes
    assert (0 if is_exact else 0.001) < distance(native, reference) < (1e-5 if is_exact else MOST)
    assert (native.argmax(1) == reference.argmax(1)).double().mean() > 0.94


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("cache", "most"),
    [
        ("float32", 1e-5),
        ("float16", 1e-3),
        ("bfloat16", 0.006),
        ("int8", 0.015),
        ("int8_dot", 0.02),
        ("fp8_e4m3", 0.1),
        ("fp8_e5m2", 0.2),
    ],
)
def test_a_narrow_cache_costs_little(cache: str, most: float) -> None:
    native, reference = logits_of("cpu", None, cache), logits_of("torch_ref", None)
    assert most / 100 < distance(native, reference) < most
    assert (native.argmax(1) == reference.argmax(1)).double().mean() > 1 - max(0.02, most / 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("cache", "most"), [("int8", 0.002), ("int4", 0.03), ("fp8_e4m3", 0.01), ("fp8_e5m2", 0.02)])
def test_both_backends_round_a_cache_alike(cache: str, most: float) -> None:
    """Sums in another order move a number across a boundary now and then, which costs far less than the rounding."""
    native, reference = (logits_of(backend, None, cache) for backend in ("cpu", "torch_ref"))
    plain = logits_of("torch_ref", None)
    assert distance(native, reference) < most
    assert distance(native, reference) < distance(native, plain) / 3
    assert (native.argmax(1) == reference.argmax(1)).double().mean() > 0.98


def test_int8_is_near_the_weights_as_they_were_and_int4_is_not_far() -> None:
    plain = logits_of("torch_ref", None)
    assert distance(logits_of("cpu", "int8"), plain) < 0.03
    assert distance(logits_of("cpu", "int4"), plain) < 0.25


def test_control_other_codes_of_the_same_weights_are_noticed() -> None:
    assert distance(logits_of("cpu", "int4-g64"), logits_of("torch_ref", "int4-g128")) > 2 * MOST
    assert distance(logits_of("cpu", "int8-channel"), logits_of("torch_ref", "int4-g32")) > 2 * MOST
