"""Text to token ids and back: tokenizers, chat templates, tool calls, reasoning, stop strings.

Others use `tokenizer.Tokenizer`, `templates.ChatTemplate`, `inputs.make_requests` and `outputs.RequestState`.
"""
