"""Ollama's API: generate, chat, embed, and the descriptions of the models."""
