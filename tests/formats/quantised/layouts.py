"""Layers of the layouts whose writers are not among the packages of the tests, packed here as they pack them.

A `Stored` is one layer "l" with the weights that its codes stand for, computed without headrace. `writers.py` beside
this file runs the writers themselves, and compares.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NUM_OUT, NUM_IN = 64, 128


class Stored(NamedTuple):
    """note: what the metadata of the file say of the layer, if it is torchao's."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weight: Tensor


def codes(low: int, high: int, num_in: int = NUM_IN, seed: int = 1) -> Tensor:
    """int64 [NUM_OUT, num_in], low ... high."""
    return torch.randint(low, high + 1, (NUM_OUT, num_in), generator=torch.Generator().manual_seed(seed))


def scales(groups: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """[NUM_OUT, groups]; in float16 they are exact in every form."""
    return (torch.rand(NUM_OUT, groups, generator=torch.Generator().manual_seed(2)) + 0.1).mul(0.05).to(dtype)


def spread(part: Tensor, num_in: int = NUM_IN) -> Tensor:
    """[out, groups] as float32 [out, num_in]."""
    return part.float().repeat_interleave(num_in // part.shape[1], 1)


def stream(values: Tensor, bits: int) -> Tensor:
    """[rows, n] -> int32 words, of which each row is one little-endian number."""
    each = (values[:, :, None].numpy() >> np.arange(bits)) & 1
    packed = np.packbits(each.reshape(len(values), -1).astype(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(packed.view(np.int32).copy())


def gptq(bits: int, group: int, offset: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """offset: 1 for the first version of the layout."""
    q, s = codes(0, 2**bits - 1), scales(NUM_IN // group)
    z = torch.randint(1, 2**bits, s.shape, generator=torch.Generator().manual_seed(3))
    parts = {
        "l.qweight": stream(q, bits).t().contiguous(),
        "l.qzeros": stream((z - offset).t(), bits),
        "l.scales": s.t().contiguous(),
    }
    return parts, (q - spread(z)) * spread(s)


def dynamic(rule: str, base: dict[str, Any], settings: dict[str, Any], bits: int, group: int) -> Stored:
    """GPTQModel's overrides, of which `rule` decides for "l"."""
    rules = {"-:(?!l).*": {}, rule: settings, ".*": {"bits": 2}}
    config = {"quant_method": "gptq", "checkpoint_format": "gptq", "sym": False, **base, "dynamic": rules}
    return Stored(config, *gptq(bits, group))


def auto_round(packing: str, bits: int, group: int, **settings: Any) -> Stored:
    config = {"quant_method": "auto-round", "packing_format": packing, "bits": bits, "group_size": group}
    config |= {"sym": False, "data_type": "int"} | settings
    values = next(iter(settings.get("extra_config", {"": {}}).values()))
    bits, group = values.get("bits", bits), values.get("group_size", group)
    if not packing.endswith("awq"):
        return Stored(config, *gptq(bits, group, 1 if packing.endswith("auto_gptq") else 0))
    q, s = codes(0, 15), scales(NUM_IN // group)
    z = torch.randint(0, 16, s.shape, generator=torch.Generator().manual_seed(3))

    def words(columns: Tensor) -> Tensor:
        return stream(columns.t().reshape(columns.shape[1], -1, 8)[:, :, list(AWQ_ORDER)].flatten(1), 4)

    parts = {"l.qweight": words(q), "l.qzeros": words(z), "l.scales": s.t().contiguous()}
    return Stored(config, parts, (q - spread(z)) * spread(s))


def exponents() -> Tensor:
    return torch.randint(115, 125, (NUM_OUT, NUM_IN // 32), generator=torch.Generator().manual_seed(4))


def mxfp8(config: dict[str, Any], stem: str = "l.weight", scale: str = "l.weight_scale") -> Stored:
    """8-bit floats of which 32 share a power of two."""
    q = torch.randn(NUM_OUT, NUM_IN, generator=torch.Generator().manual_seed(1)).mul(50).to(torch.float8_e4m3fn)
    e = exponents()
    weight = q.float() * spread(torch.exp2(e.float() - 127))
    return Stored(config, {stem: q, scale: e.to(torch.uint8)}, weight)


def pairs(q: Tensor) -> Tensor:
    """Two codes of 4 bits a byte, the first in the lower half."""
    return (q[:, ::2] & 15 | (q[:, 1::2] & 15) << 4).to(torch.uint8)


def torchao(kind: str, parts: dict[str, Tensor], weight: Tensor, **text: Any) -> Stored:
    note = {"_type": kind, "_data": {"block_size": [1, 32]} | text}
    return Stored(
        {"quant_method": "torchao", "note": note}, {f"l._weight_{key}": t for key, t in parts.items()}, weight
    )


def typed(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def torchao_int(bits: int, zero: int, dtype: str = "Int8Tensor", group: int = 32) -> Stored:
    half = 2 ** (bits - 1)
    q, s = codes(-half, half - 1), scales(NUM_IN // group)
    z = torch.full(s.shape, zero, dtype=torch.int8)
    parts = {"qdata": q.to(torch.int8), "scale": s, "zero_point": z}
    text = {"block_size": [1, group], "target_dtype": typed(f"int{bits}")}
    return torchao(dtype, parts, (q - spread(z)) * spread(s), **text)


def torchao_int4() -> Stored:
    q, s = codes(-8, 7), scales(4)
    z = s.flip(0) * 3
    parts = {"qdata": pairs(q).view(torch.int8), "scale": s.t().contiguous(), "zero_point": z.t().contiguous()}
    return torchao("Int4Tensor", parts, q * spread(s) + spread(z), shape=[NUM_OUT, NUM_IN])


def torchao_tiles(num_in: int = 1024, inner: int = 8) -> Stored:
    """The words of PyTorch's matrix_to_m16n8k16_Bint4_layout, one by one; the last 100 inputs are padding."""
    q = codes(0, 15, num_in)
    s = scales(num_in // 32, torch.bfloat16)
    z = (s.flip(0) * 3).to(torch.bfloat16)
    words = np.zeros((NUM_OUT // 8, num_in // (16 * inner), 32, inner // 2), np.uint32)
    for tile, outer, t, j in np.ndindex(words.shape):
        row, first = 8 * tile + t // 4, (outer * inner + 2 * j) * 16 + 2 * (t % 4)
        v = [int(q[row, first + k]) for k in (0, 1, 8, 9, 16, 17, 24, 25)]
        order = (v[7], v[5], v[3], v[1], v[6], v[4], v[2], v[0])  # from the highest bits on
        for value in order:
            words[tile, outer, t, j] = words[tile, outer, t, j] << 4 | value
    parts = {
        "qdata": torch.from_numpy(words.view(np.int32)),
        "scale_and_zero": torch.stack([s.t(), z.t()], 2).contiguous(),
    }
    weight = (q - 8) * spread(s, num_in) + spread(z, num_in)
    return torchao("Int4TilePackedTo4dTensor", parts, weight[:, : num_in - 100], shape=[NUM_OUT, num_in - 100])


def torchao_float8(block: tuple[int, int]) -> Stored:
    q = torch.randn(NUM_OUT, NUM_IN, generator=torch.Generator().manual_seed(1)).mul(50).to(torch.float8_e4m3fn)
    rows, columns = block
    s = torch.rand(NUM_OUT // rows, NUM_IN // columns) + 0.1
    weight = q.float() * s.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return torchao("Float8Tensor", {"qdata": q, "scale": s}, weight, block_size=list(block))


def torchao_mxfp8(swizzled: bool) -> Stored:
    stored = mxfp8({}, "qdata", "scale")
    parts = dict(stored.tensors)
    if swizzled:
        parts["scale"] = swizzle(parts["scale"])
    return torchao(
        "MXTensor", parts, stored.weight, block_size=32, elem_dtype=typed("float8_e4m3fn"), is_swizzled_scales=swizzled
    )


def torchao_nvfp4(swizzled: bool) -> Stored:
    q = codes(0, 15)
    s = (torch.rand(NUM_OUT, NUM_IN // 16) * 3 + 0.1).to(torch.float8_e4m3fn)
    outer = torch.tensor(0.25)
    weight = E2M1[q] * spread(s) * outer
    stored = swizzle(s.view(torch.uint8)).view(torch.float8_e4m3fn) if swizzled else s
    parts = {"qdata": pairs(q), "scale": stored, "per_tensor_scale": outer}
    return torchao("NVFP4Tensor", parts, weight, block_size=16, is_swizzled_scales=swizzled)


def swizzle(part: Tensor) -> Tensor:
    """Scales [rows, columns] padded to 128 x 4, in the order in which tensor cores take them: row r of a block lies in
    line r % 32, at place 4 * (r / 32)."""
    rows, columns = part.shape
    tall, wide = -(-rows // 128), -(-columns // 4)
    values = torch.zeros(tall, wide, 32, 16, dtype=part.dtype)
    for row, column in np.ndindex(rows, columns):
        inside = row % 128
        values[row // 128, column // 4, inside % 32, inside // 32 * 4 + column % 4] = part[row, column]
    return values.reshape(tall * 32, wide * 16)


def two_of_four(num_in: int) -> Tensor:
    """bool [NUM_OUT, num_in], two in each four."""
    noise = torch.rand(NUM_OUT, num_in // 4, 4, generator=torch.Generator().manual_seed(5))
    return torch.zeros_like(noise).scatter_(2, noise.topk(2, 2).indices, 1.0).reshape(NUM_OUT, num_in).bool()


def marlin_24(bits: int, group: int, num_in: int = 512) -> Stored:
    """Marlin's words for 2:4 sparsity, code by code, as compressed-tensors 0.9 packs them. group: 0 for rows."""
    half, mask = 2 ** (bits - 1), two_of_four(num_in)
    q = codes(-half, half - 1, num_in)
    s = scales(num_in // group if group else 1)
    weight = q * mask * spread(s, num_in)
    nonzero = (q[mask] + half).reshape(NUM_OUT, num_in // 2).t()  # [in / 2, out]
    tiles = nonzero.reshape(num_in // 32, 16, NUM_OUT // 16, 16).transpose(1, 2).reshape(-1, 1024)
    order = []
    for lane in range(32):
        column, rows = lane // 4, [2 * (lane % 4) + r for r in (0, 1, 8, 9)]
        for shift in range(4):
            for block in (0, 4):
                order += [16 * row + column // 2 * 256 + 8 * (column % 2) + block + shift for row in rows]
    places = (0, 2, 4, 6, 1, 3, 5, 7) if bits == 4 else (0, 2, 1, 3)
    mixed = tiles[:, order].reshape(-1, len(places))[:, list(places)]
    where = mask.reshape(NUM_OUT, -1, 4).nonzero()[:, 2].reshape(NUM_OUT, -1, 4, 2)  # four fours a word
    words = ((where[..., 0] | where[..., 1] << 2) << torch.tensor([0, 4, 8, 12])).sum(-1)
    meta = torch.zeros(words.numel(), dtype=torch.int64)
    for row, column in np.ndindex(*words.shape):
        line = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 4 // 2 * 32 + row % 64 // 8 * 4
        shift = int(line % 2 == 0 and column % 2 == 1) - int(line % 2 == 1 and column % 2 == 0)
        meta[(column - shift) // 2 * NUM_OUT * 2 + (line + shift) * 2 + (column - shift) % 2] = words[row, column]
    parts = {
        "l.weight_packed": stream(mixed, bits).reshape(num_in // 32, -1),
        "l.meta": torch.where(meta > 32767, meta - 65536, meta).to(torch.int16).reshape(num_in // 32, -1),
        "l.scale_packed": s.t().reshape(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7] if group else range(8)].reshape(-1, NUM_OUT),
    }
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, **strategy}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": groups, "ignore": []}
    return Stored(config, parts, weight)


def bitmask_24() -> Stored:
    """int8 codes of which a bitmask says the places."""
    q, mask, s = codes(-128, 127), two_of_four(NUM_IN), scales(1, torch.float32)
    parts = {
        "l.compressed": q[mask].reshape(NUM_OUT, -1).to(torch.int8),
        "l.bitmask": torch.from_numpy(np.packbits(mask.numpy(), axis=1, bitorder="little")),
        "l.shape": torch.tensor([[NUM_OUT], [NUM_IN]]),
        "l.weight_scale": s,
    }
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    config: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": []}
    config["sparsity_config"] = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return Stored(config, parts, q * mask * spread(s))


def hqq(bits: int, group: int, axis: int) -> Stored:
    """The rows of [-1, group] or [group, -1] in stripes, of which the first lies in the highest bits of an item."""
    packing, per_item = {8: ("8bit_u8", 1), 4: ("4bit_u8", 2), 3: ("3bit_32", 10), 2: ("2bit_u8", 4)}[bits]
    q = codes(0, 2**bits - 1).reshape((-1, group) if axis == 1 else (group, -1))
    generator = torch.Generator().manual_seed(6)
    s = torch.rand(q.sum(axis, keepdim=True).shape, generator=generator) + 0.1
    z = torch.rand(s.shape, generator=generator) * 2**bits
    steps = -(-len(q) // per_item)
    padded = torch.cat([q, torch.zeros(steps * per_item - len(q), q.shape[1], dtype=q.dtype)])
    items = sum(padded[i * steps : (i + 1) * steps] << bits * (per_item - 1 - i) for i in range(per_item))
    parts = {
        "l.W_q": torch.as_tensor(items).to(torch.int32 if bits == 3 else torch.uint8),
        "l.scale": s,
        "l.zero": z,
        "l.shape": torch.tensor([NUM_OUT, NUM_IN]),
        "l.packing": torch.tensor([ord(letter) for letter in packing], dtype=torch.uint8),
        "l.nbits": torch.tensor(bits, dtype=torch.int32),
        "l.axis": torch.tensor(axis, dtype=torch.int32),
        "l.group_size": torch.tensor(group, dtype=torch.int32),
        "l.quant_scale": torch.tensor(0, dtype=torch.uint8),
    }
    config = {"quant_method": "hqq", "skip_modules": ["lm_head"]}
    return Stored(config, parts, ((q - z) * s).reshape(NUM_OUT, NUM_IN))


def quark(dtype: str, group: int = 0, order: str = "reorder") -> Stored:
    """AMD Quark's integers: per group [in, out], else [out, in] with a scale for each output."""
    bits, unsigned = int(dtype[-1]), dtype.startswith("u")
    low = 0 if unsigned else -(2 ** (bits - 1))
    q, s = codes(low, low + 2**bits - 1), scales(NUM_IN // group if group else 1, torch.float32)
    z = torch.randint(low, low + 2**bits, s.shape, generator=torch.Generator().manual_seed(3))

    def stored(part: Tensor) -> Tensor:
        part = part.t() if group else part if part.shape[1] > 1 else part.t()
        if bits == 8:
            return part.to(torch.uint8 if unsigned else torch.int8).contiguous()
        eights = part.reshape(len(part), -1, 8)[:, :, list(AWQ_ORDER) if order == "reorder" else slice(None)]
        return stream(eights.flatten(1) & 15, 4)

    zero = stored(z)
    parts = {
        "l.weight": stored(q),
        "l.weight_scale": s.t().contiguous() if group else s.flatten(),
        "l.weight_zero_point": zero if group else zero.flatten(),
    }
    weight = {"dtype": dtype, "qscheme": "per_group" if group else "per_channel", "group_size": group or None}
    return Stored(quark_config(weight, order), parts, (q - spread(z)) * spread(s))


def quark_config(weight: dict[str, Any], order: str = "reorder") -> dict[str, Any]:
    config: dict[str, Any] = {"quant_method": "quark", "exclude": ["head"], "export": {"pack_method": order}}
    other = {"weight": {"dtype": "fp6_e3m2"}}
    return config | {"global_quant_config": other, "layer_quant_config": {"x*": other, "l*": {"weight": weight}}}


def quark_mxfp4() -> Stored:
    q, e = codes(0, 15), exponents()
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    parts = {"l.weight": pairs(q), "l.weight_scale": e.to(torch.uint8)}
    return Stored(quark_config(weight), parts, E2M1[q] * spread(torch.exp2(e.float() - 127)))


def bitnet(linear_class: str) -> Stored:
    """transformers' packing: the codes of outputs r, r + out / 4, ... in a byte, the first lowest; one scale."""
    q, s = codes(-1, 1), torch.tensor([0.375])
    rows = (q + 1).reshape(4, -1, NUM_IN)
    packed = sum(rows[i] << 2 * i for i in range(4))
    parts = {"l.weight": torch.as_tensor(packed).to(torch.uint8), "l.weight_scale": s}
    config = {"quant_method": "bitnet", "linear_class": linear_class, "quantization_mode": "offline"}
    return Stored(config, parts, q / s if linear_class == "bitlinear" else q * s)


def bitnet_floats() -> Stored:
    """Ternary weights that are stored as floats."""
    stored = bitnet("autobitlinear")
    scale = stored.tensors["l.weight_scale"]
    return Stored(stored.config, stored.tensors | {"l.weight": (stored.weight / scale).bfloat16()}, stored.weight)


LAYOUTS = {
    "bitnet": lambda: bitnet("bitlinear"),
    "bitnet, factors": lambda: bitnet("autobitlinear"),
    "bitnet, floats": bitnet_floats,
    "dynamic": lambda: dynamic(r"+:.*l$", {"bits": 8, "group_size": -1}, {"bits": 4, "group_size": 32}, 4, 32),
    "dynamic, a part of the settings": lambda: dynamic("l", {"bits": 3, "group_size": 64}, {"mse": 2.4}, 3, 64),
    "auto-round": lambda: auto_round("auto_round", 4, 128, extra_config={"l": {"bits": 8, "group_size": 64}}),
    "auto-round, a pattern": lambda: auto_round("auto_round", 4, 128, extra_config={".*l.*": {"bits": 2}}),
    "auto-round 3 bits": lambda: auto_round("auto_round:auto_gptq", 3, 32),
    "auto-round 5 bits": lambda: auto_round("auto_round:gptqmodel", 5, 64),
    "auto-round awq": lambda: auto_round("auto_round:auto_awq", 4, 32),
    "auto-round mxfp8": lambda: mxfp8(
        {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 8, "data_type": "mx_fp",
         "group_size": 32}
    ),
    "modelopt mxfp8": lambda: mxfp8({"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    "compressed-tensors mxfp8": lambda: mxfp8(
        {
            "quant_method": "compressed-tensors", "format": "mxfp8-quantized", "ignore": [],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
                }
            },
        }
    ),
    "marlin-24, groups": lambda: marlin_24(4, 128),
    "marlin-24, rows": lambda: marlin_24(4, 0),
    "marlin-24, 8 bits": lambda: marlin_24(8, 128),
    "sparse-24-bitmask": bitmask_24,
    "hqq": lambda: hqq(4, 64, 1),
    "hqq, groups of outputs": lambda: hqq(4, 32, 0),
    "hqq 3 bits": lambda: hqq(3, 32, 1),
    "hqq 2 bits": lambda: hqq(2, 32, 1),
    "hqq 8 bits": lambda: hqq(8, 64, 1),
    "quark int4, groups": lambda: quark("int4", 32),
    "quark uint4, groups, in order": lambda: quark("uint4", 64, "order"),
    "quark int4, rows": lambda: quark("int4"),
    "quark int8, rows": lambda: quark("int8"),
    "quark uint8, groups": lambda: quark("uint8", 32),
    "quark mxfp4": quark_mxfp4,
    "torchao int8": lambda: torchao_int(8, 0),
    "torchao int8, zero points": lambda: torchao_int(8, 3),
    "torchao int8, rows": lambda: torchao_int(8, 0, group=NUM_IN),
    "torchao intx 4 bits": lambda: torchao_int(4, 0, "IntxUnpackedToInt8Tensor"),
    "torchao intx 3 bits, zero points": lambda: torchao_int(3, -1, "IntxUnpackedToInt8Tensor"),
    "torchao int4": torchao_int4,
    "torchao tiles": torchao_tiles,
    "torchao tiles, 4 a lane": lambda: torchao_tiles(512, 4),
    "torchao float8, one": lambda: torchao_float8((NUM_OUT, NUM_IN)),
    "torchao float8, rows": lambda: torchao_float8((1, NUM_IN)),
    "torchao float8, blocks": lambda: torchao_float8((32, 64)),
    "torchao mxfp8": lambda: torchao_mxfp8(False),
    "torchao mxfp8, swizzled": lambda: torchao_mxfp8(True),
    "torchao nvfp4": lambda: torchao_nvfp4(False),
    "torchao nvfp4, swizzled": lambda: torchao_nvfp4(True),
}  # fmt: skip
