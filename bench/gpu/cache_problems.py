"""Problems for the kernels that write and read the paged cache: rope_store and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.gpu.problems import PROGRAMS, Problem, Tensors, normal, poisoned, sizes
from headrace.backends.base import HeadForm, HeadNorm, Heads, RopeTable
from headrace.backends.cuda.cache import STORED, LayerCache
from headrace.backends.cuda.kernels import attention as paged
from headrace.backends.cuda.kernels import rope_store, spans
from headrace.backends.cuda.launch import Config, Launch


def make_cache(heads: Heads, num_blocks: int, block: int, kind: str, shared: bool = False) -> Tensors:
    """Return keys, values and their scales: normal numbers as the cache's type has them. shared: keys alone, of which
    values are a part."""
    shape = (2, num_blocks, heads.num_kv_heads, block, max(heads.head_dim, heads.value_size))
    numbers = normal(*shape, seed=7)
    scaled = kind in ("int8", "fp8_e4m3")
    scales = numbers.abs().amax(-1) / 100 + 0.001 if scaled else None
    numbers = numbers if scales is None else numbers / scales[..., None]
    codes = (numbers.round() if kind == "int8" else numbers).to(STORED[kind])
    # Bits: fp8 has few operators in torch.
    widths = (heads.head_dim,) if shared else (heads.head_dim, heads.value_size)
    named = {
        name: part.view(torch.uint8)[..., : width * part.itemsize].contiguous().view(part.dtype)
        for name, part, width in zip(("keys", "values"), codes, widths, strict=False)
    }
    listed = ("key_scales", "value_scales")[: len(widths)]
    return named | ({} if scales is None else dict(zip(listed, scales, strict=False)))


def cache_of(t: Tensors, kind: str, value_dim: int = 0) -> LayerCache:
    """value_dim: of a cache that has no values but in its keys."""
    if "values" in t:
        return LayerCache(kind, t["keys"], t["values"], t.get("key_scales"), t.get("value_scales"))
    scales = t.get("key_scales")
    return LayerCache(kind, t["keys"], t["keys"][..., :value_dim], scales, scales, shares_key=True)


def rope_problem(num_rows: int, heads: Heads, kind: str, dtype: torch.dtype, whole: bool = False) -> Problem:
    """whole: with norms of queries and keys, and copies of every third row at one or two more slots."""
    block, num_blocks = 16, 2 * num_rows // 16 + 2
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    angles = torch.arange(512)[:, None] * 10000.0 ** (-torch.arange(heads.head_dim // 2) / (heads.head_dim // 2))
    places = torch.randperm(num_blocks * block, generator=torch.Generator().manual_seed(4)).int()
    slots = places[:num_rows]
    counts = torch.tensor([(1, 0, 0, 2, 0, 0)[i % 6] * whole for i in range(num_rows)])
    begin = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    tensors = {
        "qkv": normal(num_rows + 1, width, dtype=dtype), "slots": slots, "cos": angles.cos().float(),
        "sin": angles.sin().float(), "positions": torch.arange(num_rows, dtype=torch.int32) * 3 % 512,
        "sizes": sizes(num_rows), **make_cache(heads, num_blocks, block, kind),
        "copy_begin": begin.int(), "copy_slots": places[num_rows : 2 * num_rows],
        "q_weight": normal(heads.head_dim, seed=8, dtype=dtype),
        "k_weight": normal(heads.head_dim, seed=9, dtype=dtype),
    }  # fmt: skip

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        form, copies = HeadForm(RopeTable(t["cos"], t["sin"])), None
        if whole:
            norms = (HeadNorm(t[name], 1e-6, 1.0) for name in ("q_weight", "k_weight"))
            form, copies = HeadForm(form.rope_table, *norms), (t["copy_begin"], t["copy_slots"])
        return [
            rope_store.rope_store(
                t["qkv"], heads, cache_of(t, kind), t["slots"], t["positions"], t["sizes"], num_rows + 1,
                form, copies=copies,
            )
        ]  # fmt: skip

    # In float64: queries turned in their columns, keys turned and values as they are at their slots.
    numbers = tensors["qkv"].double().view(num_rows + 1, -1, heads.head_dim).clone()
    last_key = heads.num_heads + heads.num_kv_heads
    normed = numbers[:num_rows].clone()
    parts = {"q_weight": slice(0, heads.num_heads), "k_weight": slice(heads.num_heads, last_key)}
    for name, part in parts.items() if whole else ():
        v = normed[:, part]
        normed[:, part] = v * (v.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (tensors[name].double() + 1)
    cos, sin = (tensors[name].double()[tensors["positions"].long()][:, None] for name in ("cos", "sin"))
    left, right = normed.chunk(2, -1)
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
    exact, most = {}, rope_store.MOST.get(kind)
    at = torch.cat([slots, tensors["copy_slots"][: counts.sum()]]).long()
    of = torch.cat([torch.arange(num_rows), torch.repeat_interleave(torch.arange(num_rows), counts)])
    for name, rows in (("keys", turned[:, heads.num_heads : last_key]), ("values", numbers[:num_rows, last_key:])):
        scale = torch.ones(rows.shape[:2]).double() if most is None else rows.abs().amax(-1) / most
        codes = rows / scale[..., None]
        exact[name] = tensors[name].double()
        exact[name][at // block, :, at % block] = codes[of]
        if most is not None:
            exact[f"{name[:-1]}_scales"] = tensors[f"{name[:-1]}_scales"].double()
            exact[f"{name[:-1]}_scales"][at // block, :, at % block] = scale[of]
        if kind == "int8":
            exact[name] = exact[name].round().to(torch.int8)
    numbers[:num_rows, : heads.num_heads] = turned[:, : heads.num_heads]
    exact["qkv"] = numbers.flatten(1)
    outputs = ("qkv", "keys", "values", *(name for name in ("key_scales", "value_scales") if name in tensors))
    # Codes may differ by one where a number lies between two: by 1/14 of the number in e4m3, 1/7 in e5m2.
    steps = {"int8": 0.01, "fp8_e4m3": 0.08, "fp8_e5m2": 0.15}
    return Problem(tensors, outputs, make, exact, (), steps.get(kind))


def attention_problem(
    chunks: Sequence[tuple[int, int]], heads: Heads, kind: str, dtype: torch.dtype, window: int = 0,
    softcap: float = 0.0, block: int = 16, partials: int = 4096, sinks: bool = False, shared: bool = False,
    ahead: int = 0,
) -> Problem:  # fmt: skip
    """chunks: (first position, rows) of sequences, each of its own. window: negative for chunks of positions. shared:
    values are a part of the keys."""
    starts, lens = [first for first, _ in chunks], [rows for _, rows in chunks]
    counts = [-(-(first + rows) // block) for first, rows in chunks]
    places = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(5)).int()
    begin = [sum(counts[:i]) for i in range(len(counts))]
    width, size = heads.num_heads * heads.head_dim, max(heads.head_dim, heads.value_size)
    tensors = {
        "query": 2 * normal(sum(lens), width, dtype=dtype), "blocks": places[: sum(counts)],
        "out": poisoned(sum(lens) + 1, heads.num_heads * heads.value_size, dtype=dtype),
        **make_cache(heads, sum(counts) + 2, block, kind, shared),
    }  # fmt: skip
    if sinks:
        tensors["sinks"] = normal(heads.num_heads, seed=11, dtype=dtype)
    # Blocks of nobody, and what lies behind a sequence's end, are NaN: a read beyond shows.
    if STORED[kind].is_floating_point and STORED[kind].itemsize > 1:
        for name in ("keys", "values")[: 2 - shared]:
            tensors[name][places[sum(counts) :].long()] = torch.nan
            for at, (first, num), count in zip(begin, chunks, counts, strict=True):
                tensors[name][places[at + count - 1].long(), :, (first + num - 1) % block + 1 :] = torch.nan
    scale = heads.head_dim**-0.5
    options: dict[str, Any] = {"heads": heads.num_heads, "kv_heads": heads.num_kv_heads, "scale": scale}
    options |= {"window": window, "softcap": softcap, "programs": 2 * PROGRAMS, "ahead": ahead}
    kinds = (heads.num_heads, heads.num_kv_heads, size, dtype, STORED[kind])
    group = heads.num_heads, heads.num_kv_heads
    few, many = (paged.configs(kernel, *kinds, shared=shared) for kernel in (paged.FEW, paged.MANY))

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        chosen = few[0], many[0]
        if config is not None:
            chosen = (config, chosen[1]) if config in few else (chosen[0], config)
        tiles = paged.tile_rows(*group, chosen, size)
        items = spans.work_list(starts, lens, begin, *tiles, partials, ahead > 0)
        sums = spans.make_scratch(max(partials, 1), *group, heads.head_dim, t["query"].device, heads.value_size)
        listed = torch.from_numpy(items).to(t["query"].device)
        return paged.attention(
            t["query"], t["out"], cache_of(t, kind, heads.value_size), t["blocks"], listed, sums, chosen=chosen,
            sinks=t.get("sinks"), **options,
        )  # fmt: skip

    exact = torch.cat([
        exact_attention(tensors, kind, heads, sum(lens[:i]), *chunks[i], places[at : at + counts[i]].long(), window,
                        softcap, scale, ahead)
        for i, at in enumerate(begin)
    ])  # fmt: skip
    return Problem(tensors, ("out",), make, {"out": exact}, few + tuple(each for each in many if each not in few))


def exact_attention(
    t: Tensors, kind: str, heads: Heads, row: int, first: int, num: int, blocks: Tensor, window: int, softcap: float,
    scale: float, ahead: int = 0,
) -> Tensor:  # fmt: skip
    end, group = first + num, heads.num_heads // heads.num_kv_heads

    def gathered(name: str) -> Tensor:
        numbers = t[name].double()[blocks]  # [blocks, kv_heads, block, D]
        if f"{name[:-1]}_scales" in t:
            numbers = numbers * t[f"{name[:-1]}_scales"].double()[blocks][..., None]
        return numbers.transpose(1, 2).flatten(0, 1)[:end].repeat_interleave(group, 1)

    query = t["query"][row : row + num].double().view(num, heads.num_heads, heads.head_dim)
    keys = gathered("keys")
    values = gathered("values") if "values" in t else keys[..., : heads.value_size]
    s = torch.einsum("rhd,nhd->hrn", query, keys) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    position, at = torch.arange(first, end)[:, None], torch.arange(end)
    seen = at <= position + ahead
    if window:
        seen &= at > position - window if window > 0 else at >= position // -window * -window
    s = s.masked_fill(~seen, -torch.inf)
    if "sinks" in t:
        s = torch.cat([s, t["sinks"].double()[:, None, None].expand(-1, num, 1)], -1)
    return torch.einsum("hrn,nhd->rhd", s.softmax(-1)[..., :end], values).flatten(1)
