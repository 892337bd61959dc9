"""What activations are in where the products of integer codes are computed in floats: on torch_ref and on a GPU.

Knows names of modes; must not know models. Called by those backends.
"""

from __future__ import annotations

from collections.abc import Collection

from headrace.protocol.errors import RequestError


def float_activations(backend: str, mode: str, kinds: Collection[str]) -> str:
    """Return what the activations of matrices of these kinds (`quant.schemes.Scheme.kind`) are in: 16bit, fp8 where the
    backend has kernels for weights of 8-bit floats, mixed where both, or "" for plain weights.

    Raises `RequestError` for a mode without kernels: int8, and 16bit beside weights of 8-bit floats.
    """
    quantised = set(kinds) - {"f"}
    if mode == "int8" or (mode == "16bit" and "f8" in quantised):
        bound = "auto" if "f8" in quantised else "auto or 16bit"
        raise RequestError("activations", mode, f"{bound} for these weights on backend {backend}")
    if "f8" in quantised:
        return "fp8" if len(quantised) == 1 else "mixed"
    return "16bit" if quantised else ""
