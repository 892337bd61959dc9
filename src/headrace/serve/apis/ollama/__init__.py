"""Ollama's API: generate, chat, embed, and what describes the model."""
