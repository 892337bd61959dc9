"""One file for each method of quantisation; see `quantize.base.Method`."""
