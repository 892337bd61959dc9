"""Makes quantised checkpoints, one method and one layout a file; nothing that serves imports it.

Others use `driver.quantize` and `gguf_writer`.
"""
