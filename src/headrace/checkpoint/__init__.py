"""Reads weights: from safetensors, GGUF files and packed files, mapped where possible.

Each reader implements `models.weights.Weights` over one kind of file; `reader.Reader` is their common base. The entry
points are `source.with_weights`, `mapped.MappedCheckpoint`, `loader` and `gguf_config`.
"""
