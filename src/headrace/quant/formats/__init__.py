"""One file for each checkpoint format, named after its `quant_method`; `quant.base.find_format` imports them by name.

`gguf_blocks` reads the block types of GGUF files.
"""
