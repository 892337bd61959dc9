"""Makes quantised checkpoints, one method and one layout a file; nothing that serves imports it.

Others call `driver`, `gguf_writer` and `mixed`.
"""
