"""Problems for the kernels on pieces of a row: norms of heads, rotation beside the cache, products by head, xIELU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.gpu.cache_problems import cache_of, make_cache
from bench.gpu.problems import Problem, Tensors, normal, poisoned, sizes
from headrace.backends.base import HeadForm, Heads, RopeTable
from headrace.backends.cuda.kernels import by_head, norm, rope_store, xielu
from headrace.backends.cuda.launch import Config, Launch


def pieces_problem(num_rows: int, heads: int, width: int, dtype: torch.dtype, weights: int) -> Problem:
    """Norms of pieces in columns of a wider row, in place. weights: 0 for none, 1 for one of all pieces, 2 for all."""
    x, all_weights = normal(num_rows + 1, (heads + 2) * width, dtype=dtype), normal(heads * width, seed=1, dtype=dtype)
    tensors = {"x": x, "sizes": sizes(num_rows)}
    if weights:
        tensors["weight"] = all_weights[: heads * width if weights > 1 else width]
    columns = slice(width, (heads + 1) * width)

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        part = t["x"][:, columns]
        return [norm.norm(part, t.get("weight"), part, t["sizes"], 0, num_rows + 1, eps=1e-6, offset=1.0, heads=heads)]

    pieces = x[:num_rows, columns].double().view(num_rows, heads, width)
    pieces = pieces / (pieces.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    if weights:
        pieces = pieces * (tensors["weight"].double().view(-1, width) + 1)
    exact = x.double()
    exact[:num_rows, columns] = pieces.flatten(1)
    return Problem(tensors, ("x",), make, {"x": exact})


def by_head_problem(num_rows: int, heads: int, num_in: int, num_out: int, tail: int, dtype: torch.dtype) -> Problem:
    x, weights = (
        normal(num_rows, heads * (num_in + tail), dtype=dtype),
        normal(heads, num_out, num_in, seed=1, dtype=dtype),
    )
    tensors = {
        "x": x, "weights": weights, "sizes": sizes(num_rows),
        "out": poisoned(num_rows + 1, heads * (num_out + tail), dtype=dtype),
    }  # fmt: skip

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        return [by_head.by_head(t["x"], t["weights"], t["out"], t["sizes"], 0, num_rows + 1, tail, config)]

    each = x.double().view(num_rows, heads, -1)
    products = torch.einsum("rhi,hoi->rho", each[..., :num_in], weights.double())
    exact = torch.cat([products, each[..., num_in:]], -1).flatten(1)
    return Problem(tensors, ("out",), make, {"out": exact}, by_head.configs(dtype))


def xielu_problem(num_rows: int, width: int, dtype: torch.dtype) -> Problem:
    x = 3 * normal(num_rows, width, dtype=dtype)
    tensors = {"x": x, "sizes": sizes(num_rows), "out": poisoned(num_rows + 1, width, dtype=dtype)}

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        factors = {"positive": 0.8, "negative": 1.3, "beta": 0.5}
        return [xielu.xielu(t["x"], t["out"], t["sizes"], 0, num_rows + 1, config=config, **factors)]

    d = x.double()
    exact = 0.5 * d + torch.where(d > 0, 0.8 * d * d, 1.3 * (torch.expm1(d.clamp(max=0)) - d))
    return Problem(tensors, ("out",), make, {"out": exact}, xielu.KERNEL.configs)


def latent_problem(num_rows: int, heads: Heads, kind: str, dtype: torch.dtype, stores: bool) -> Problem:
    """The last numbers of a head, behind its values', turn: of keys that go to the cache, or of queries alone."""
    heads = heads._replace(num_heads=0) if stores else heads._replace(num_kv_heads=0)
    num, block, pairs = heads.num_heads + heads.num_kv_heads, 16, (heads.head_dim - heads.value_dim) // 2
    angles = torch.arange(512)[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
    tensors = {
        "x": normal(num_rows + 1, num * heads.head_dim, dtype=dtype), "cos": angles.cos().float(),
        "sin": angles.sin().float(), "positions": torch.arange(num_rows, dtype=torch.int32) * 3 % 512,
        "slots": torch.arange(num_rows).flip(0).int(), "sizes": sizes(num_rows),
    }  # fmt: skip
    if stores:
        tensors |= make_cache(heads, num_rows // block + 1, block, kind, shared=True)

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        form = HeadForm(RopeTable(t["cos"], t["sin"], heads.value_dim))
        cache, slots = (cache_of(t, kind, heads.value_dim), t["slots"]) if stores else (None, None)
        return [rope_store.rope_store(t["x"], heads, cache, slots, t["positions"], t["sizes"], num_rows + 1, form)]

    rows = tensors["x"][:num_rows].double().view(num_rows, num, heads.head_dim)
    cos, sin = (tensors[name].double()[tensors["positions"].long()][:, None] for name in ("cos", "sin"))
    before, left, right = torch.split(rows, [heads.value_dim, pairs, pairs], -1)
    turned = torch.cat([before, left * cos - right * sin, right * cos + left * sin], -1)
    if not stores:
        exact = tensors["x"].double()
        exact[:num_rows] = turned.flatten(1)
        return Problem(tensors, ("x",), make, {"x": exact})
    at, most = tensors["slots"].long(), rope_store.MOST.get(kind)
    keys = tensors["keys"].double()
    scale = torch.ones(num_rows, num).double() if most is None else turned.abs().amax(-1) / most
    keys[at // block, :, at % block] = turned / scale[..., None]
    steps = {"int8": 0.01, "fp8_e4m3": 0.08, "fp8_e5m2": 0.15}
    exact_keys = keys.round().to(torch.int8) if kind == "int8" else keys
    return Problem(tensors, ("keys",), make, {"keys": exact_keys}, (), steps.get(kind))
