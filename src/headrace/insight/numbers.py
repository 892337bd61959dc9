"""The forms of `GET /inspect/numbers`: real weights of the model in fewer and fewer bits (`quantize.samples`)."""

from __future__ import annotations

import msgspec


class Rounding(msgspec.Struct, frozen=True, kw_only=True):
    """The weights in `bits` bits: their codes, the values of these, and the root of the mean squared error, also
    relative to the root mean square of the weights. Code c of group g stands for (c - zeros[g]) * scales[g] +
    minima[g], where a group has `group_size` codes and missing lists are 0; the codes of bfloat16 are its bits."""

    bits: int
    format: str
    codes: list[int]
    values: list[float]
    rms_error: float
    relative_error: float
    group_size: int = 0
    scales: list[float] = []
    zeros: list[float] = []
    minima: list[float] = []


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Group `group` of `num_groups` of a matrix: the weights from `column` on in a row, as float32. `stored` is the
    form of the file. Where that form `is_plain` not, the values come from its codes."""

    name: str
    group: int
    num_groups: int
    row: int
    column: int
    stored: str
    is_plain: bool
    values: list[float]
    roundings: list[Rounding]


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """Names of some matrices: in the first, middle and last layer, and outside of layers."""

    names: list[str]


class SampleReply(msgspec.Struct, frozen=True):
    """The reply of `quantize.samples`; `error` is a field and its bound."""

    error: tuple[str, str] | None = None
