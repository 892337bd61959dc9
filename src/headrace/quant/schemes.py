"""Names of the ways in which weights are quantised while loading, and what each means. No torch, no weights.

Called by `runner` (what `--quantization` says) and by the backends (the form of a matrix).
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from headrace.errors import RequestError

TYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}

Kind = Literal["i4", "i8", "f"]

HEAD_GROUP = 32
"""Group of the head where only "int4" is asked for: its errors go straight into the logits."""

METHOD = 1
"""Changes when the same weights get other codes: packed files of another method are made again."""

NAMES = (
    "int4", "int4-g32", "int4-g64", "int4-g128", "int4-g32-asym", "int4-g64-asym", "int4-g128-asym",
    "int8", "int8-channel", "int8-g128",
)  # fmt: skip


class Scheme(NamedTuple):
    """How one matrix is stored.

    kind: i4 and i8 are codes of 4 and 8 bits, f is plain floats of `dtype`. group: inputs that share a float16 scale;
    0 (i8) is one float32 scale for each output. has_min: (i4) weight = code * scale + minimum with codes 0 ... 15,
    instead of (code - 8) * scale.
    """

    kind: Kind
    group: int = 0
    has_min: bool = False
    dtype: str = ""

    @property
    def flag(self) -> int:
        """What the native formats call `flag`, beside the group (csrc/include/kernels.h, HrFormat)."""
        if self.kind == "f":
            return TYPE_CODES[self.dtype]
        return int(self.has_min) if self.kind == "i4" else self.group


class Quantization(NamedTuple):
    """What `--quantization NAME` does to the linear layers and to the head."""

    name: str
    layer: Scheme
    head: Scheme


def parse(name: str) -> Quantization:
    """Raises `RequestError` naming what exists."""
    if name not in NAMES:
        raise RequestError("quantization", name, "one of " + ", ".join(NAMES))
    if name == "int4":
        return Quantization(name, Scheme("i4", 64), Scheme("i4", HEAD_GROUP))
    if name in ("int8", "int8-channel"):
        return Quantization(name, Scheme("i8"), Scheme("i8"))
    bits, group = (int(number) for number in re.findall(r"\d+", name))
    scheme = Scheme("i4" if bits == 4 else "i8", group, name.endswith("-asym"))
    return Quantization(name, scheme, scheme)
