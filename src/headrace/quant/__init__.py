"""Weights of few bits: `schemes` names the forms, `base` holds `QWeight` and finds the reader of a checkpoint's format.

`formats/` has one file for each `quant_method`. Knows no kernels and no models.
"""
