"""The API of Hugging Face's Text Embeddings Inference (TEI): vectors, scores and classes of texts."""
