"""Mixtures of experts of real shape, whole, through the engine: steps of 1 and of 64 sequences beside the floor.

A floor counts the bytes that a step must read: of the dense weights, of the experts that its tokens choose in the mean
of even choices, and of the cache as far as each layer sees it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.gpu import serving
from bench.gpu.families import SHAPES
from bench.gpu.operators import Item
from bench.gpu.weights import BLOCK, make_program
from headrace import models

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.gpu.speed import Bench

Result = dict[str, Any]

BATCHES = (1, 64)
CONTEXT = 2048


class Mixture(NamedTuple):
    """quantization: as `weights.RandomWeights` takes it. expert_bits, dense_bits: of a weight, with its scales."""

    model: str
    quantization: str
    expert_bits: float
    dense_bits: float
    changes: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        shape = SHAPES[self.model]
        tiny: dict[str, Any] = models.find(shape["model_type"]).TINY
        return tiny | shape | self.changes

    @property
    def name(self) -> str:
        return f"{self.model} {self.quantization.split()[0]}"


MIXTURES = (
    Mixture(
        "gpt-oss-20b", "mxfp4 experts", 4.25, 16,
        {"num_hidden_layers": 24, "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128,
         "vocab_size": 201088, "max_position_embeddings": 131072},
    ),
    Mixture(
        "Qwen3-30B-A3B", "int4", 4.25, 4.25,
        {"num_hidden_layers": 48, "vocab_size": 151936, "max_position_embeddings": 40960},
    ),
)  # fmt: skip
TOY = Mixture("Qwen3-30B-A3B", "int4", 4.25, 4.25, models.find("qwen3_moe").TINY | {"hidden_size": 64, "head_dim": 32})


def items(bench: Bench) -> Iterator[Item]:
    """For each mixture the batches that its goals are judged by."""
    for mixture in (TOY,) if bench.device.toy else MIXTURES:
        yield f"compile {mixture.name}", functools.partial(compile_program, bench, mixture)
        for batch in BATCHES[: 1 if bench.device.toy else None]:
            yield f"engine {mixture.name} x{batch}", functools.partial(engine, bench, mixture, batch)
    yield "release mixtures", bench.release


def compile_program(bench: Bench, mixture: Mixture) -> Result:
    context, most = (40, 1) if bench.device.toy else (CONTEXT, max(BATCHES))
    positions = most * (context + BLOCK)

    def make() -> tuple[Any, Any]:
        return make_program(
            mixture.config, bench.device.name, mixture.quantization, context, most, context + 8, positions
        )

    return bench.compile_with((mixture.name, mixture.quantization), make)


def engine(bench: Bench, mixture: Mixture, batch: int) -> Result:
    if bench.program is None or bench.key != (mixture.name, mixture.quantization):
        compile_program(bench, mixture)
    if bench.program is None:
        raise RuntimeError("there is no program")
    context = 40 if bench.device.toy else CONTEXT
    result = serving.decode(bench.device, bench.program, batch, context)
    floor = bench.operators.floor(num_bytes(mixture, batch, result["positions"] / batch), 0)
    result |= {"floor": floor, "share": floor / result["seconds_of_step"]}
    if "seconds_of_gpu" in result:
        result["share_of_gpu"] = floor / result["seconds_of_gpu"]
    return result


def num_bytes(mixture: Mixture, batch: int, context: float) -> float:
    """Return the bytes that a step of `batch` sequences must read."""
    c = mixture.config
    hidden, head_dim = c["hidden_size"], c["head_dim"]
    num = c.get("num_local_experts") or c["num_experts"]
    inner = c["intermediate_size"] if "num_local_experts" in c else c["moe_intermediate_size"]
    chosen = num * (1 - (1 - c["num_experts_per_tok"] / num) ** batch)
    heads = 2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"]
    layers = c["num_hidden_layers"]
    sees = [min(context, c["sliding_window"]) if kind == "sliding_attention" else context
            for kind in c.get("layer_types", ["full_attention"] * layers)]  # fmt: skip
    cache = 4 * c["num_key_value_heads"] * head_dim * batch * sum(sees)
    dense = layers * heads * head_dim * hidden + c["vocab_size"] * hidden
    experts = layers * chosen * 3 * hidden * inner
    routers = layers * num * hidden * 2
    return float((experts * mixture.expert_bits + dense * mixture.dense_bits) / 8 + routers + cache)
