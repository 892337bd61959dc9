"""Encoders, one file per Hugging Face model_type as in `models`: texts become vectors, and no tokens are drawn."""
