"""One file for each layout of a quantised checkpoint; see `quantize.base.Writer`."""
