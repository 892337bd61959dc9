"""Linear layers of transformers whose weights become codes while they are loaded: `quantise`.

A layer's product goes through the reference backend's operator, which computes with the floats that the codes stand
for: it shows what the codes lose, and saves no memory. Called by `loading`.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from headrace.backends.torch_ref import TorchRef
from headrace.backends.torch_ref.ops import RefOps
from headrace.quant import rtn
from headrace.quant.base import QWeight, Stacked
from headrace.quant.schemes import Quantization, Scheme

PLAIN = re.compile(r"(.*\.)?(gate|router|classifier|shared_expert_gate|router_proj)")
"""Names of the layers that choose experts, which stay floats."""


class Quantised(torch.nn.Module):
    """A linear layer as a matrix of the reference backend."""

    def __init__(self, layer: torch.nn.Linear, ops: RefOps, scheme: Scheme, name: str) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self._ops = ops
        self._matrix = ops.matrix(Codes(layer.weight, scheme, name), layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.linear(x.reshape(-1, x.shape[-1]), self._matrix).view(*x.shape[:-1], -1)


class Codes(Stacked):
    """The weights [out, in] of a layer, quantised as they are read."""

    def __init__(self, weight: Tensor, scheme: Scheme, name: str) -> None:
        super().__init__(name, [QWeight(weight.float().cpu().numpy())], scheme)

    def slab(self, first: int, last: int) -> QWeight:
        return rtn.quantise(self.parts[0].codes[first:last], self.scheme, self.name)


def quantise(theirs: Any, backend: TorchRef, quantization: Quantization) -> None:
    """Put quantised layers in place of a model's linear layers, other than routers."""
    head = theirs.get_output_embeddings()
    for name, layer in list(theirs.named_modules()):
        if type(layer) is not torch.nn.Linear or PLAIN.fullmatch(name):
            continue
        scheme = quantization.head if layer is head else quantization.layer
        backend.ops.weight_bytes -= layer.weight.numel() * layer.weight.element_size()
        quantised = Quantised(layer, backend.ops, scheme, name)
        if layer is head:
            # The table of a tied head stays as it is.
            layer.forward = quantised.forward
            continue
        owner, _, last = name.rpartition(".")
        setattr(theirs.get_submodule(owner), last, quantised)
