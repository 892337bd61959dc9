"""The clients of the matrix and its features. Each client has a script, which `python -m tests.clients` runs."""

from __future__ import annotations

from typing import NamedTuple

# Each with what its cell says.
FEATURES = {
    "chat": "a question is answered",
    "stream": "in pieces, which make the same text",
    "system prompt": "it reaches the model",
    "tool call": "a tool of the request is called, with its arguments",
    "tool result": "the turn after it: the result comes back, beside a message without content",
    "structured output": "a document of a JSON schema",
    "embeddings": "a vector for each text",
    "any model name": "a server with one model and no key answers for every name",
    "unknown model": "a server with a key refuses it: the client's own error for a 404",
    "context overflow": "a prompt that is too long: the client's own error for it",
    "wrong key": "the client's own error for a 401",
    "usage": "tokens of prompt and answer",
    "cancel": "the server stops computing an answer that is no longer read",
    "max_tokens above the context": "refused as by OpenAI, or cut to the context as by Anthropic and Ollama",
    "reasoning": "apart from the answer",
}


class Client(NamedTuple):
    """`packages` are installed into an environment of its own, of `kind` "python" or "js"; kind "headrace" is the
    environment that headrace is in. The first package is the one whose version is shown. `seconds` bounds its run, and
    `feature_seconds` that of each feature."""

    name: str
    script: str
    packages: tuple[str, ...]
    kind: str = "python"
    seconds: int = 1_500
    feature_seconds: int = 300


CLIENTS = (
    Client("openai", "openai_python.py", ("openai",)),
    Client("openai (JavaScript)", "openai_js.mjs", ("openai",), "js"),
    Client("anthropic", "anthropic_python.py", ("anthropic",)),
    Client("anthropic (JavaScript)", "anthropic_js.mjs", ("@anthropic-ai/sdk",), "js"),
    Client("ollama", "ollama_python.py", ("ollama",)),
    Client("ollama (JavaScript)", "ollama_js.mjs", ("ollama",), "js"),
    Client("Vercel's ai", "ai_js.mjs", ("ai", "@ai-sdk/openai-compatible", "zod"), "js"),
    Client("Vercel's ai (Responses)", "ai_openai_js.mjs", ("@ai-sdk/openai", "ai", "zod"), "js"),
    Client(
        "langchain",
        "langchain_python.py",
        ("langchain", "langchain-openai", "langchain-anthropic", "langchain-ollama"),
    ),
    Client(
        "llama-index",
        "llama_index_python.py",
        ("llama-index-core", "llama-index-llms-openai-like", "llama-index-embeddings-openai-like"),
    ),
    Client("litellm", "litellm_python.py", ("litellm", "mcp")),
    Client("instructor", "instructor_python.py", ("instructor",)),
    Client("pydantic-ai", "pydantic_ai_python.py", ("pydantic-ai-slim[openai,anthropic]",)),
    Client("openai-agents", "openai_agents_python.py", ("openai-agents",)),
    Client("smolagents", "smolagents_python.py", ("smolagents[openai]",)),
    Client("dspy", "dspy_python.py", ("dspy", "numpy")),
    Client("guidance", "guidance_python.py", ("guidance", "openai")),
    Client("outlines", "outlines_python.py", ("outlines", "openai")),
    Client("semantic-kernel", "semantic_kernel_python.py", ("semantic-kernel",)),
    Client("haystack", "haystack_python.py", ("haystack-ai",)),
    Client("autogen", "autogen_python.py", ("autogen-agentchat", "autogen-ext[openai]")),
    Client("llm", "llm_python.py", ("llm",)),
    Client("aider", "aider_python.py", ("aider-chat",)),
    Client("huggingface_hub", "huggingface_hub_python.py", ("huggingface_hub",)),
    Client("text-generation", "text_generation_python.py", ("text-generation",)),
    Client("guidellm", "guidellm_python.py", ("guidellm",)),
    Client("Open WebUI", "open_webui_python.py", ("open-webui",)),
    Client("vLLM's offline scripts", "vllm_offline.py", (), "headrace"),
    Client("codex", "codex.py", ("@openai/codex",), "js"),
    Client("Continue", "continue_cli.py", ("@continuedev/cli",), "js"),
    Client("Claude Code", "claude_code.py", ("@anthropic-ai/claude-code",), "js"),
)
