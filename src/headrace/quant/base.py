"""`QWeight`: the one form in which weights, quantised or not, pass from checkpoint formats to backends.

A checkpoint format is one file `quant/<quant_method>.py` with a function `read` (see `Format`); a backend takes the
QWeight apart as its kernels like, or calls `dequantize`. Knows no files, no models, no kernels. Called by
`runner.loader` and by the backends.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.errors import CheckpointError

PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes whose numbers are the weights themselves."""


@dataclass(frozen=True, slots=True)
class QWeight:
    """A matrix [out, in]: w[o, permutation[j]] = (codes[o, j] - zeros[o, j // group]) * scales[o, j // group].

    codes: integers [out, in], or the weights themselves if `scales` is None.
    scales: float32 [out, ceil(in / group)]. zeros: the same shape in units of codes, or None for symmetric formats.
    group: inputs that share a scale. bits: of one code as stored. permutation: int64 [in], or None for the identity.
    """

    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    group: int = 0
    bits: int = 32
    permutation: Tensor | None = None

    def __post_init__(self) -> None:
        if self.codes.dim() != 2:
            raise CheckpointError(f"codes have shape {list(self.codes.shape)}, expected [out, in]")
        if self.scales is None:
            if self.zeros is not None or self.permutation is not None or self.codes.dtype not in PLAIN:
                raise CheckpointError(f"a weight without scales must be plain floats, not {self.codes.dtype}")
            return
        if self.group < 1:
            raise CheckpointError(f"group is {self.group}, expected at least 1")
        expected = (self.codes.shape[0], -(-self.codes.shape[1] // self.group))
        for name, part in (("scales", self.scales), ("zeros", self.zeros)):
            if part is not None and tuple(part.shape) != expected:
                raise CheckpointError(f"{name} have shape {list(part.shape)}, expected {list(expected)}")
        if self.permutation is not None and tuple(self.permutation.shape) != (self.codes.shape[1],):
            raise CheckpointError(f"permutation has shape {list(self.permutation.shape)}, expected one entry per input")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Tensor:
        """The weights as float32 [out, in], inputs in the model's order."""
        if self.scales is None:
            return self.codes.float()
        group_of = torch.arange(self.codes.shape[1], device=self.codes.device) // self.group
        weight = self.codes.float()
        if self.zeros is not None:
            weight = weight - self.zeros.float()[:, group_of]
        weight = weight * self.scales.float()[:, group_of]
        if self.permutation is None:
            return weight
        out = torch.empty_like(weight)
        out[:, self.permutation] = weight
        return out


class Format(Protocol):
    """A module `quant/<quant_method>.py`."""

    def read(self, tensor: Callable[[str], Tensor], name: str, config: dict[str, Any]) -> QWeight:
        """The weight of the linear layer `name` (without ".weight").

        `tensor(full_name)` maps a tensor of the checkpoint and marks it as used; `config` is config.json's
        quantization_config.
        """
        ...


def find_format(config: Any) -> Format:
    """The format that config.json's `quantization_config` names; plain weights if there is none.

    Raises `CheckpointError` naming a method that headrace does not read.
    """
    if config is not None and not isinstance(config, dict):
        raise CheckpointError(f"quantization_config is {config!r}, expected an object")
    method = "none" if config is None else str(config.get("quant_method"))
    module = f"headrace.quant.{method}"
    if method == "base" or not re.fullmatch(r"[a-z][a-z0-9_]*", method) or importlib.util.find_spec(module) is None:
        raise CheckpointError(
            f"quantization_config: quant_method {method!r} is not supported; use an unquantised checkpoint"
        )
    found: Format = importlib.import_module(module)
    return found
