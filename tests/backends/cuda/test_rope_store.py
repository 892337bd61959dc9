"""The kernel that rotates and stores: against its twin and the reference, codes to the bit, rows apart, copies kept."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from tests.support.interpreter import run_interpreted
from tests.support.kernels import DTYPES, TOLERANCES, assert_close, assert_twin_agrees, backwards, poisoned, written
from torch import Tensor

from headrace.backends.base import HeadForm, HeadNorm, Heads, LayerShape, RopeTable
from headrace.backends.cuda.cache import STORED, KVCache, LayerCache
from headrace.backends.cuda.kernels.rope_store import coded, rope_store
from headrace.backends.cuda.launch import Launch
from headrace.backends.step import Chunks
from headrace.backends.torch_ref.batch import make_forward_batch
from headrace.backends.torch_ref.cache import LayerCache as TorchCache
from headrace.backends.torch_ref.ops import RefOps
from headrace.backends.torch_ref.rounded import as_stored

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 8, 5, 48
CPU = torch.device("cpu")


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def launches(device: str = "meta") -> list[Launch]:
    """Representative launches: Llama-3.1-8B with each type of cache, with norms, and a small model."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    result = []
    for heads, pairs, dtype in ((Heads(32, 8, 128), 64, torch.bfloat16), (Heads(9, 3, 64), 16, torch.float16)):
        table = RopeTable(empty(4096, pairs, dtype=torch.float32), empty(4096, pairs, dtype=torch.float32))
        norm = HeadNorm(empty(heads.head_dim, dtype=dtype), 1e-5, 0.0)
        qkv = empty(256, sum(heads[:2]) * heads.head_dim + heads[1] * heads.head_dim, dtype=dtype)
        for kind in STORED:
            layer = KVCache(
                [LayerShape(heads.num_kv_heads, heads.head_dim)], [4], 16, kind, torch.device(device)
            ).layers[0]
            inputs = (qkv, heads, layer, empty(256), empty(256), empty(4), 256)
            result.append(rope_store(*inputs, HeadForm(table), copies=(empty(257), empty(64))))
            if kind == "bfloat16":
                result.append(rope_store(*inputs, HeadForm(table, norm, norm)))
                result.append(rope_store(*inputs))
    # Latent attention: keys that hold their values, queries alone; heads of 512 numbers, all of which turn.
    bf16, rows = torch.bfloat16, (empty(256), empty(256), empty(4), 256)
    angles = [empty(4096, pairs, dtype=torch.float32) for pairs in (32, 256)]
    shape = LayerShape(1, 576, 512, shares_key=True)
    for kind in ("bfloat16", "int8"):
        layer = KVCache([shape], [4], 16, kind, torch.device(device)).layers[0]
        form = HeadForm(RopeTable(angles[0], angles[0], 512))
        result.append(rope_store(empty(256, 576, dtype=bf16), Heads(0, 1, 576, 512), layer, *rows, form))
    query = empty(256, 128 * 576, dtype=bf16)
    result.append(rope_store(query, Heads(128, 0, 576), None, None, *rows[1:], form))
    norm, layer = (
        HeadNorm(empty(512, dtype=bf16), 1e-6, 0.0),
        KVCache([LayerShape(2, 512)], [4], 16, "bfloat16", torch.device(device)).layers[0],
    )
    form, qkv = HeadForm(RopeTable(angles[1], angles[1]), norm, norm), empty(256, 20 * 512, dtype=bf16)
    return [*result, rope_store(qkv, Heads(16, 2, 512), layer, *rows, form)]


class Problem:
    """Six rows of which the step has five, of sequences in any blocks. Row 3 is copied twice, row 4 once."""

    positions, slots = ints(0, 1, 7, 40, 12, 99), ints(16, 17, 23, 0, 36, 999)
    copies = ints(0, 0, 0, 0, 2, 3, 99), ints(8, 15, 30)
    written = (16, 17, 23, 0, 36, 8, 15, 30)
    source = (0, 1, 2, 3, 4, 3, 3, 4)

    def __init__(self, dtype: torch.dtype, kind: str, heads: Heads, pairs: int, norms: bool) -> None:
        width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        self.heads, self.kind = heads, kind
        self.qkv = random(6, width + 16, seed=1, dtype=dtype)[:, :width]
        self.qkv[1, -heads.head_dim :] = 0  # a head of zeros has the scale zero
        self.qkv[2, width // 2 :] *= 1e-3
        self.qkv[5] = torch.nan
        self.table = RopeTable(random(MAX_LEN, pairs, seed=2), random(MAX_LEN, pairs, seed=3)) if pairs else None
        weights = random(2, heads.head_dim, seed=4, dtype=dtype)
        self.norms = [HeadNorm(weight, 1e-5, 1.0) for weight in weights] if norms else [None, None]

    def outputs(self) -> dict[str, Tensor]:
        shape = LayerShape(self.heads.num_kv_heads, self.heads.head_dim)
        layer = KVCache([shape], [NUM_BLOCKS], BLOCK_SIZE, self.kind, CPU).layers[0]
        data = torch.stack((layer.keys, layer.values)).view(torch.uint8).fill_(85)
        scales = {}
        if layer.key_scales is not None:
            scales = {"scales": torch.full((2, *layer.key_scales.shape), torch.nan)}
        return {"qkv": self.qkv.clone(), "data": data} | scales

    def make(self, out: Mapping[str, Tensor], num_rows: int = 5, bucket: int = 8, copies: bool = True) -> list[Launch]:
        keys, values = out["data"].view(STORED[self.kind])
        scales = out.get("scales", (None, None))
        layer = LayerCache(self.kind, keys, values, *scales)
        return [
            rope_store(
                out["qkv"], self.heads, layer, self.slots, self.positions, ints(num_rows, 0, 0, 0), bucket,
                HeadForm(self.table, *self.norms), copies=self.copies if copies else None,
            )
        ]  # fmt: skip

    def numbers(self, out: Mapping[str, Tensor]) -> Tensor:
        """What the cache holds, float32 [2, slots, kv_heads, D]."""
        numbers = out["data"].view(STORED[self.kind]).float()
        if "scales" in out:
            numbers = numbers * out["scales"].unsqueeze(-1)
        return numbers.transpose(2, 3).flatten(1, 2)


SMALL = Heads(10, 2, 24)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize(("pairs", "norms"), [(0, False), (5, False), (12, True)])
def test_the_kernel_writes_what_its_twin_writes(kind: str, pairs: int, norms: bool) -> None:
    problem = Problem(torch.bfloat16, kind, SMALL, pairs, norms)
    outputs = problem.outputs()
    if not norms:
        assert_twin_agrees(problem.make, outputs)  # of integers to the bit
        return
    # The sums of a norm have another order in the twin, so a code may be the next one.
    twin, actual = written(problem.make, outputs), written(problem.make, outputs, "interpreted", backwards)
    assert_close(actual["qkv"], twin["qkv"])
    next_code = {"int8": 8e-3, "fp8_e4m3": 6.5e-2, "fp8_e5m2": 1.3e-1, "bfloat16": 8e-3}.get(kind, 1e-3)
    assert_close(problem.numbers(actual), problem.numbers(twin), next_code)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_queries_keys_and_values_are_those_of_the_reference(dtype: torch.dtype, mode: str) -> None:
    problem = Problem(dtype, "float32", SMALL, 5, True)
    ops = RefOps(CPU, dtype)
    chunks = Chunks([0, 7, 40, 12], [[1, 1], [1], [1], [1]], [[2], [2], [0] * 6, [3, 4]], [(3, 8), (3, 15), (4, 30)])
    batch = make_forward_batch(chunks, BLOCK_SIZE, CPU)
    assert batch.slot_mapping[0].tolist() == problem.slots[:5].tolist()
    cache = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, 2, 24), torch.nan)
    query = ops.rope_store(
        problem.qkv[:5].clone(), SMALL, batch, TorchCache(*cache), HeadForm(problem.table, *problem.norms)
    )
    out = written(problem.make, problem.outputs(), mode)
    # The reference rounds to the dtype between norm, rotation and store.
    assert_close(out["qkv"][:5, : query.shape[1]], query, 2 * TOLERANCES[dtype])
    places = list(problem.written)
    expected = cache.flatten(1, 2)[:, places]
    assert expected.isfinite().all()
    assert_close(problem.numbers(out)[:, places], expected, 2 * TOLERANCES[dtype])


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_codes_are_those_of_the_reference_to_the_bit(kind: str, mode: str) -> None:
    problem = Problem(torch.float32, kind, SMALL, 0, False)
    out = written(problem.make, problem.outputs(), mode)
    heads = problem.qkv[:5].reshape(5, -1, 24)
    places, source = list(problem.written), list(problem.source)
    for numbers, inputs in zip(problem.numbers(out), (heads[:, 10:12], heads[:, 12:]), strict=True):
        stored = (
            inputs.to(STORED[kind]).float() if kind in ("float32", "bfloat16", "float16") else as_stored(inputs, kind)
        )
        assert torch.equal(numbers[places], stored[source])


@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_every_kind_of_number_gets_the_code_of_torch(kind: str) -> None:
    """Half-way cases, numbers below the smallest normal one, and for fp8_e5m2 numbers that are too large or NaN."""
    bits = torch.arange(0, 2**16, dtype=torch.int32)
    halves = bits[(bits & 127) == 0].to(torch.int16).view(torch.float16).float()
    numbers = torch.cat([halves, halves * 1.0001, halves.nan_to_num() / 448, torch.tensor([-0.0, 7e4, 1e6, 1e-20])])
    if kind != "fp8_e5m2":
        numbers = numbers.nan_to_num().clamp(-448, 448)
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 64)).view(-1, 64)
    if kind != "fp8_e5m2":
        numbers[:, 0] = {"int8": 127.0, "fp8_e4m3": 448.0}[kind]
    heads = Heads(1, len(numbers), 64)
    layer = KVCache([LayerShape(heads.num_kv_heads, 64)], [1], 1, kind, CPU).layers[0]
    qkv = torch.cat([numbers[:1], numbers, numbers]).reshape(1, -1)
    run_interpreted(rope_store(qkv, heads, layer, ints(0), ints(0), ints(1, 0, 0, 0), 1))
    codes, scale = coded(numbers, kind)
    actual = layer.keys[0, :, 0].view(torch.uint8)
    zero = (codes.float() == 0) & (actual & 127 == 0)  # the sign of zero is free
    assert ((actual == codes.view(torch.uint8)) | zero | codes.float().isnan()).all()
    assert (layer.keys[0, :, 0].float().isnan() == codes.float().isnan()).all()
    if scale is not None and layer.key_scales is not None:
        assert torch.equal(layer.key_scales[0, :, 0], scale)


def test_a_number_that_is_not_finite_shows_in_its_scale() -> None:
    problem = Problem(torch.float32, "int8", SMALL, 0, False)
    problem.qkv[2, 24 * 10] = torch.nan
    for mode in ("twin", "interpreted"):
        numbers = problem.numbers(written(problem.make, problem.outputs(), mode))
        assert numbers[0, 23, 0].isnan().all()
        assert numbers[0, 23, 1].isfinite().all()


@pytest.mark.parametrize("kind", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_a_row_has_the_same_bits_alone_and_among_others(mode: str, kind: str) -> None:
    problem = Problem(torch.bfloat16, kind, SMALL, 12, True)
    together = written(problem.make, problem.outputs(), mode)
    for row in (0, 3):
        alone = Problem(torch.bfloat16, kind, SMALL, 12, True)
        alone.qkv = problem.qkv[row:]
        alone.positions, alone.slots = problem.positions[row:], problem.slots[row:]
        out = written(lambda out, p=alone: p.make(out, 1, 3, copies=False), alone.outputs(), mode)
        assert torch.equal(out["qkv"][0], together["qkv"][row])
        slot = problem.slots[row]
        assert torch.equal(alone.numbers(out)[:, slot], problem.numbers(together)[:, slot])


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_nothing_else_is_written(mode: str) -> None:
    problem = Problem(torch.bfloat16, "int8", SMALL, 5, True)
    outputs = problem.outputs()
    out = written(problem.make, outputs, mode)
    others = [slot for slot in range(NUM_BLOCKS * BLOCK_SIZE) if slot not in problem.written]
    slots = out["data"].transpose(2, 3).flatten(1, 2)
    assert (slots[:, others] == 85).all()
    assert out["scales"].transpose(2, 3).flatten(1, 2)[:, others].isnan().all()
    assert torch.equal(out["qkv"][:5, 240:], problem.qkv[:5, 240:])
    assert out["qkv"][5].isnan().all()


LATENT, WIDER = Heads(0, 1, 24, 16), Heads(3, 2, 24, 40)


@pytest.mark.parametrize("kind", ["float32", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("heads", [LATENT, WIDER], ids=["values in the keys", "wider values"])
def test_keys_and_values_of_other_sizes_are_those_of_the_reference(heads: Heads, kind: str) -> None:
    """Numbers 16 ... 23 of a head turn; the values of a shared key are not there, wider ones lie behind the keys."""
    shares = heads is LATENT
    width = (heads.num_heads + heads.num_kv_heads) * 24 + (0 if shares else 2 * 40)
    qkv, table = random(6, width, seed=1), RopeTable(random(MAX_LEN, 4, seed=2), random(MAX_LEN, 4, seed=3), 16)
    shape = LayerShape(heads.num_kv_heads, 24, heads.value_dim, shares_key=shares)

    def run(mode: str) -> tuple[Tensor, LayerCache]:
        layer = KVCache([shape], [NUM_BLOCKS], BLOCK_SIZE, kind, CPU).layers[0]
        out = qkv.clone()
        launch = rope_store(
            out, heads, layer, Problem.slots, Problem.positions, ints(5, 0, 0, 0), 8, HeadForm(table),
            copies=Problem.copies,
        )  # fmt: skip
        launch.run_twin() if mode == "twin" else run_interpreted(launch, backwards)
        return out, layer

    (query, layer), (twin_query, twin) = run("interpreted"), run("twin")
    assert_close(query, twin_query)
    for part, expected in zip(layer.parts(), twin.parts(), strict=True):
        assert_close(part.float(), expected.float(), 1.1e-2 if kind == "int8" else 6.5e-2)
    chunks = Chunks([0, 7, 40, 12], [[1, 1], [1], [1], [1]], [[2], [2], [0] * 6, [3, 4]], [(3, 8), (3, 15), (4, 30)])
    batch = make_forward_batch(chunks, BLOCK_SIZE, CPU)
    keys = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, heads.num_kv_heads, 24)
    values = keys[..., :16] if shares else torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, 40)
    reference = TorchCache(keys, values, shares_key=shares, rounds_to="" if kind == "float32" else kind)
    RefOps(CPU, torch.float32).rope_store(qkv[:5].clone(), heads, batch, reference, HeadForm(table))
    for codes, scales, expected in (
        (layer.keys, layer.key_scales, keys), (layer.values, layer.value_scales, values),
    ):  # fmt: skip
        numbers = codes.float() if scales is None else codes.float() * scales[..., None]
        assert_close(numbers.transpose(1, 2), expected, 1.1e-2 if kind == "int8" else 6.5e-2)


def test_queries_turn_alone_without_a_cache() -> None:
    heads, table = Heads(9, 0, 24), RopeTable(random(MAX_LEN, 4, seed=2), random(MAX_LEN, 4, seed=3), 16)
    x = random(6, 9 * 24 + 5, seed=1, dtype=torch.bfloat16)

    def make(out: Mapping[str, Tensor]) -> list[Launch]:
        positions, sizes = Problem.positions, ints(5, 0, 0, 0)
        return [rope_store(out["x"], heads, None, None, positions, sizes, 8, HeadForm(table))]

    assert_twin_agrees(make, {"x": x})
    out = written(make, {"x": x}, "interpreted")["x"]
    batch = make_forward_batch(Chunks([0, 7, 40, 12], [[1, 1], [1], [1], [1]], [[2], [2], [0] * 6, [3, 4]]), 8, CPU)
    assert_close(out[:5], RefOps(CPU, torch.bfloat16).rope(x[:5], 9, 24, batch, table))
    assert torch.equal(out[5], x[5])
    assert torch.equal(out[:, 9 * 24 :], x[:, 9 * 24 :])


def test_forgotten_copies_are_seen() -> None:
    """The negative control of copies: without them, the slots that the tests above compare keep what they had."""
    problem = Problem(torch.float32, "float32", SMALL, 0, False)
    outputs = {"qkv": problem.qkv.clone(), "data": poisoned(2, 5, 2, 8, 24, dtype=torch.float32).view(torch.uint8)}
    for copies in (True, False):
        out = written(lambda out, c=copies: problem.make(out, copies=c), outputs, "interpreted")
        assert problem.numbers(out)[:, list(problem.written)].isfinite().all() == copies
