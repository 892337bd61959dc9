"""What reads weights: safetensors, GGUF files and packed files, mapped where they can be.

Others use `source.with_weights`, `mapped.MappedCheckpoint`, `loader` and `gguf_config`.
"""
