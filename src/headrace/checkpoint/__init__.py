"""What reads weights: safetensors, GGUF files and packed files, mapped where they can be.

Each reader implements `models.weights.Weights` over one kind of file; `reader.Reader` has what they share. Others use
`source.with_weights`, `mapped.MappedCheckpoint`, `loader` and `gguf_config`.
"""
