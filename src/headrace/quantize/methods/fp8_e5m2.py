"""8-bit floats with five bits of exponent and two of fraction (E5M2; Micikevicius et al. 2022): a wider range than
E4M3, at twice the rounding error. All but the dtype is as in `fp8`."""

from __future__ import annotations

from headrace.quantize.methods.fp8 import CALIBRATED, prepare, quantise, verify

__all__ = ["CALIBRATED", "prepare", "quantise", "verify"]
