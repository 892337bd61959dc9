"""`Scheme`, the form in which a matrix is stored, and the names of `--quantization`. No torch, no weights.

Called by `runner` and the readers of checkpoints (the names), and by the backends (the form of a matrix).
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from headrace.protocol.errors import CheckpointError, RequestError

TYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}

Kind = Literal["i2", "i3", "i4", "i5", "i6", "i8", "f8", "k", "f"]

_FP4 = tuple(n / 12 for n in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))

LEVELS: dict[str, tuple[float, ...]] = {
    # Dettmers et al. 2023, QLoRA, appendix E.
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    # Twice the numbers of E2M1 (OCP Microscaling Formats, 5.3.3).
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    # ggml's IQ4_NL.
    "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    # bitsandbytes' 4-bit floats.
    "fp4": (*_FP4, *(-level for level in _FP4)),
}  # fmt: skip
"""The tables of which codes of 4 bits are indices, as float32 has them (hr_level in csrc/isa/linear_layout.h)."""

BOOKS: dict[str, tuple[int, ...]] = {
    name: tuple(int(level) for level in levels)
    if name in ("e2m1", "iq4_nl")
    else tuple(round(127 * level) for level in levels)
    for name, levels in LEVELS.items()
}
"""The same as whole numbers, for kernels that multiply integers (hr_books). Levels up to 1 are counted in 127ths: a
weight moves by at most 0.4 % of its group's largest."""

ROUNDED_BOOKS = frozenset(name for name, levels in LEVELS.items() if max(levels) == 1)
"""Books that are exact only with activations that are floats."""

BITS = {"i2": 2, "i3": 3, "i4": 4, "i5": 5, "i6": 6, "i8": 8, "f8": 8}

K_BLOCK, K_GROUP = 256, 32
"""Weights of a block of K-quants, which have scales in two levels, and inputs that share a scale of activations."""


class KType(NamedTuple):
    """code: its number in the native library. size: bytes of a block in a file. bits: of a weight when packed.

    scales: the bytes of a block's one or two float16.
    """

    code: int
    size: int
    bits: float
    scales: slice


K_TYPES = {
    "Q2_K": KType(12, 84, 2.625, slice(80, 84)),
    "Q3_K": KType(13, 110, 3.5625, slice(108, 110)),
    "Q4_K": KType(14, 144, 4.5, slice(0, 4)),
    "Q5_K": KType(15, 176, 5.5, slice(0, 4)),
    "Q6_K": KType(16, 210, 6.5625, slice(208, 210)),
}

GROUPS = (128, 64, 32, 16, 8)
"""Inputs that may share a scale. Powers of two, so that the smallest of several divides the others."""

HEAD_GROUP = 32
"""Group of the head under plain "int4": its errors go straight into the logits."""

METHOD = 4
"""Changes when the same weights get other codes: packed files of another method are written anew."""

NAMES = (
    "int4", "int4-g32", "int4-g64", "int4-g128", "int4-g32-asym", "int4-g64-asym", "int4-g128-asym",
    "int6", "int8", "int8-channel", "int8-g128", "fp8-channel", "fp8-g128", "nf4", "mxfp4", "iq4_nl",
)  # fmt: skip


class Scheme(NamedTuple):
    """How one matrix is stored.

    kind: i2 to i6 and i8 are codes of so many bits, f8 is floats of 8 bits of `dtype`, f is plain floats of `dtype`, k
    is GGUF's blocks of type `dtype` (`K_TYPES`). group: inputs that share a scale, float16 or (f8) float32; 0 (i8, f8)
    is one float32 scale for each output. has_min: (i4, i5, i6, i8 in groups) weight = code * scale + minimum, instead
    of (code - middle) * scale, where the middle is 2 (i2), 4 (i3), 8 (i4), 16 (i5), 32 (i6) or 0 (i8). book: (i4)
    weight = LEVELS[book][code] * scale. has_zero: (i2, i3) weight = (code - zero) * scale, with a whole number from 0
    to 15 for each group.
    """

    kind: Kind
    group: int = 0
    has_min: bool = False
    dtype: str = ""
    book: str = ""
    has_zero: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return BITS[self.kind]

    def bits_per_weight(self, num_in: int) -> float:
        """Bits of a weight of rows of `num_in` as the kernels read it: scales and minima included, padding not."""
        if self.kind == "f":
            return 32.0 if self.dtype == "float32" else 16.0
        if self.kind == "k":
            return K_TYPES[self.dtype].bits
        scale_bits = 32 if self.kind == "f8" or not self.group else 16 * (1 + self.has_min) + 4 * self.has_zero
        return self.bits + scale_bits / (self.group or num_in)

    @property
    def middle(self) -> int:
        """The code of weight 0 if there are neither minima nor zeros nor a book."""
        return 0 if self.kind in ("i8", "f8") or self.has_min or self.has_zero or self.book else 2 ** (self.bits - 1)


def kernel_name(scheme: Scheme) -> str:
    """The kernel of a scheme of codes as `--quantization` names it: int4-g64-asym, int8-channel, fp8-g128."""
    if scheme.book:
        return f"{scheme.book}-g{scheme.group}"
    bits = f"{'fp' if scheme.kind == 'f8' else 'int'}{scheme.bits}"
    return (
        f"{bits}-g{scheme.group}{'-asym' if scheme.has_min or scheme.has_zero else ''}"
        if scheme.group
        else f"{bits}-channel"
    )


SCHEMES = frozenset(
    [
        *[Scheme(kind, group, has_min) for kind in ("i4", "i6") for group in GROUPS for has_min in (False, True)],
        *[Scheme("i5", group, has_min) for group in GROUPS if group > 8 for has_min in (False, True)],
        *[Scheme("i4", group, book=book) for group in GROUPS for book in BOOKS],
        *[Scheme("i8", group) for group in (0, *GROUPS)],
        *[Scheme("i8", group, True) for group in GROUPS],
        *[Scheme("i2", group, has_zero=has_zero) for group in GROUPS for has_zero in (False, True)],
        *[Scheme("i3", group, has_zero=has_zero) for group in GROUPS if group > 8 for has_zero in (False, True)],
        *[Scheme("k", K_GROUP, dtype=name) for name in K_TYPES],
    ]
)
"""Every quantised scheme of integers. A backend declares which of them it has kernels for, and which of `F8_SCHEMES`
(`backends.base.Backend.schemes`)."""

E4M3 = "float8_e4m3fn"
F8_SCHEMES = frozenset(Scheme("f8", group, dtype=E4M3) for group in (0, *GROUPS))
"""Schemes of 8-bit floats, which not every GPU has."""


ZEROS = 6
"""HR_FORM_ZERO of csrc/include/kernels.h."""


def native_flag(scheme: Scheme) -> int:
    """The number that the native library, and packed files, have for a scheme in addition to its kind and group.

    It is `flag` of HrFormat in csrc/include/kernels.h: the type of floats and K-quants, the group of i8 and f8 codes
    (one more where i8 has minima), and for codes of 2 to 6 bits 0 without minima, 1 with minima, 2 and more for the
    books, ZEROS with zeros.
    """
    if scheme.kind == "f":
        return TYPE_CODES[scheme.dtype]
    if scheme.kind == "k":
        return K_TYPES[scheme.dtype].code
    if scheme.kind in ("i8", "f8"):
        return scheme.group + scheme.has_min
    if scheme.has_zero:
        return ZEROS
    return 2 + list(BOOKS).index(scheme.book) if scheme.book else int(scheme.has_min)


_BY_FLAG: dict[tuple[str, int, int], Scheme] = {
    (scheme.kind, scheme.group, native_flag(scheme)): scheme
    for scheme in (*SCHEMES, *F8_SCHEMES, *[Scheme("f", dtype=dtype) for dtype in TYPE_CODES])
}


def scheme_of_flag(kind: str, group: int, flag: int) -> Scheme | None:
    """The inverse of `native_flag`; None for numbers that stand for no scheme."""
    return _BY_FLAG.get((kind, group, flag))


WHOLE = {
    "iq4_nl": Scheme("i4", HEAD_GROUP, book="iq4_nl"),
    "int8": Scheme("i8"),
    "int8-channel": Scheme("i8"),
    "fp8-channel": Scheme("f8", dtype=E4M3),
    "fp8-g128": Scheme("f8", 128, dtype=E4M3),
    "int6": Scheme("i6", 64),
    "nf4": Scheme("i4", 64, book="nf4"),
    "mxfp4": Scheme("i4", 32, book="e2m1"),
}


class Quantization(NamedTuple):
    """The schemes that `--quantization NAME` gives the linear layers and the head."""

    name: str
    layer: Scheme
    head: Scheme


def parse(name: str) -> Quantization:
    """Return the quantization of that name. Raises `RequestError` naming those that exist."""
    if name not in NAMES:
        raise RequestError("quantization", name, "one of " + ", ".join(NAMES))
    if name == "int4":
        return Quantization(name, Scheme("i4", 64, book="iq4_nl"), Scheme("i4", HEAD_GROUP, book="iq4_nl"))
    if name in WHOLE:
        return Quantization(name, WHOLE[name], WHOLE[name])
    bits, group = (int(number) for number in re.findall(r"\d+", name))
    scheme = Scheme("i4" if bits == 4 else "i8", group, name.endswith("-asym"))
    return Quantization(name, scheme, scheme)


def find_method(config: Any) -> str:
    """Return the `quant_method` of config.json's `quantization_config`, or "none". Raises `CheckpointError`."""
    if config is not None and not isinstance(config, dict):
        raise CheckpointError(f"quantization_config is {config!r:.80}, expected an object")
    method = "none" if config is None else str(config.get("quant_method"))
    return SAME_METHODS.get(method, method)


SAME_METHODS = {
    "awq_marlin": "awq", "gptq_marlin": "gptq", "fbgemm_fp8": "fp8", "finegrained_fp8": "fp8",
    "modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt", "modelopt_mxfp8": "modelopt",
    "auto_round": "auto-round", "intel/auto-round": "auto-round", "inc": "auto-round",
}  # fmt: skip
"""Other names of methods, by which writers and vLLM call the same layouts."""


FP8_CACHE = "fp8_e4m3"


def cache_scheme(config: dict[str, Any] | None) -> str | None:
    """The form in which a `quantization_config` stores keys and values (compressed-tensors' `kv_cache_scheme`,
    ModelOpt's `kv_cache_quant_algo`, Quark's `kv_cache_quant_config`): FP8_CACHE, a text that describes another form,
    or None.

    Raises `CheckpointError` for a scheme that is no object or has no whole number of bits."""
    scheme = (config or {}).get("kv_cache_scheme")
    by_layer = (config or {}).get("kv_cache_quant_config")
    if scheme is None and isinstance(by_layer, dict) and by_layer:
        outputs = [settings.get("output_tensors") for settings in by_layer.values() if isinstance(settings, dict)]
        types = sorted({str(output.get("dtype")) for output in outputs if isinstance(output, dict)})
        return FP8_CACHE if types == [FP8_CACHE] else ", ".join(types)[:40] or "a form that it does not name"
    if scheme is None:
        algorithm = (config or {}).get("kv_cache_quant_algo")
        return None if algorithm is None else FP8_CACHE if algorithm == "FP8" else f"{algorithm!r:.40}"
    where = "config.json: quantization_config.kv_cache_scheme"
    if not isinstance(scheme, dict):
        raise CheckpointError(f"{where} is {scheme!r:.80}, expected an object")
    bits, kind = scheme.get("num_bits"), scheme.get("type")
    if type(bits) is not int or not 1 <= bits <= 16 or kind not in ("int", "float"):
        raise CheckpointError(f"{where}: num_bits {bits!r:.40} and type {kind!r:.40}, expected 1 to 16, int or float")
    return FP8_CACHE if (bits, kind) == (8, "float") else f"{kind}{bits}"
