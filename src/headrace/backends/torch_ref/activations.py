"""The precision of activations where the products of integer codes are computed in floats: on torch_ref and on a GPU.

Knows names of modes; must not know models. Called by those backends.
"""

from __future__ import annotations

from collections.abc import Collection

from headrace.protocol.errors import RequestError


def float_activations(backend: str, mode: str, kinds: Collection[str], always_fp8: bool = False) -> str:
    """Return the precision of the activations of matrices of these kinds (`quant.schemes.Scheme.kind`): 16bit, fp8 for
    weights of 8-bit floats if the mode is fp8 or the backend has no other kernels for them, mixed where both, or "" for
    plain weights.

    Raises `RequestError` for a mode without kernels: int8, fp8 without such weights, 16bit where they are `always_fp8`.
    """
    quantised = set(kinds) - {"f"}
    has_f8 = "f8" in quantised
    rounded = has_f8 and (always_fp8 or mode == "fp8")
    if mode == "int8" or (mode == "16bit" and rounded) or (mode == "fp8" and not has_f8):
        bound = "auto or fp8" if rounded else "auto or 16bit"
        raise RequestError("activations", mode, f"{bound} for these weights on backend {backend}")
    if rounded:
        return "fp8" if len(quantised) == 1 else "mixed"
    return "16bit" if quantised else ""
