"""headrace: an LLM inference and serving engine. `LLM`, `AsyncLLM` and the parameters are loaded on first use."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    # CMakeLists.txt and pyproject.toml say the same to those who install.
    _SENTENCE = (
        "headrace runs on Linux only (x86-64 or AArch64) and has no wheel for this system: use Docker, or WSL 2 on "
        f"Windows (docs/howto-deploy.md). This Python's platform is {sys.platform}."
    )
    # The command ends with the sentence alone, `python -m headrace` too. A program that imports headrace gets an error
    # that it can catch.
    if sys.argv and os.path.basename(sys.argv[0]).startswith(("headrace", "-m")):
        sys.exit(_SENTENCE)
    raise ImportError(_SENTENCE)

from headrace import env

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

if TYPE_CHECKING:
    from headrace.async_llm import AsyncLLM
    from headrace.llm import LLM, EngineArgs
    from headrace.protocol.adapters import LoRARequest
    from headrace.protocol.beam import BeamSearchParams
    from headrace.protocol.constraints import StructuredOutputs as StructuredOutputsParams
    from headrace.protocol.params import SamplingParams
    from headrace.text.inputs import TextPrompt, TokensPrompt
    from headrace.text.outputs import CompletionOutput, RequestOutput

env.tame_openmp()

_HOMES = {
    "LLM": "headrace.llm",
    "AsyncLLM": "headrace.async_llm",
    "BeamSearchParams": "headrace.protocol.beam",
    "CompletionOutput": "headrace.text.outputs",
    "EngineArgs": "headrace.llm",
    "LoRARequest": "headrace.protocol.adapters",
    "RequestOutput": "headrace.text.outputs",
    "SamplingParams": "headrace.protocol.params",
    "StructuredOutputsParams": "headrace.protocol.constraints",
    "TextPrompt": "headrace.text.inputs",
    "TokensPrompt": "headrace.text.inputs",
}
# vLLM's names of things that have another here.
_NAMES = {"StructuredOutputsParams": "StructuredOutputs"}


def __getattr__(name: str) -> Any:
    # PEP 562: torch and the server's libraries are imported only by those who use them.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), _NAMES.get(name, name))
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
