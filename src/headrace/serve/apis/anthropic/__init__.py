"""Anthropic's API: messages and their token counts."""
