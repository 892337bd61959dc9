"""What is loaded before it is needed. `import headrace` and `headrace --help` load nothing heavy, so they are quick.

The times themselves are figures, printed by `python -m bench.startup`; what is loaded can be tested without a clock.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "starlette",
    "uvicorn",
    "httpx",
    "huggingface_hub",
}
RUNNING = (
    "engine.build",
    "engine.library.load",
    "runner.runner",
    "checkpoint.packed",
    "backends.cpu",
    "sampling.sampler",
)
SERVER = ("engine.client", "text.outputs", "text.inputs", "protocol.frames", "engine.generation")

PROBE = """
import io, sys
from contextlib import redirect_stdout
{code}
print(" ".join(sorted({{name.split(".")[0] for name in sys.modules}})))
"""

# The console script's own code, without leaving the process at its end.
COMMAND = """
from headrace.__main__ import main
sys.argv = ["headrace", *{words!r}]
with redirect_stdout(io.StringIO()) as printed:
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""


def loaded(code: str) -> set[str]:
    """Top-level modules that a new interpreter has loaded after running `code`."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(code=code)], capture_output=True, text=True, timeout=100, check=True
    )
    return set(done.stdout.split())


def test_import_headrace_loads_nothing() -> None:
    assert not loaded("import headrace") & (HEAVY | {"typer", "rich", "msgspec"})


@pytest.mark.parametrize(
    "words", [["doctor", "--help"], ["--help"], ["--version"], ["serve", "--help"], ["bench", "serve", "--help"]]
)
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    assert not loaded(COMMAND.format(words=words)) & HEAVY


@pytest.mark.parametrize("module", ["protocol.step", "engine.core", "core.scheduler", *SERVER, "cli.main", *RUNNING])
def test_module_loads_no_torch(module: str) -> None:
    """The import graph as a whole, which the law on single imports can not see."""
    assert not loaded(f"import headrace.{module}") & {"torch", "transformers"}


def test_model_files_load_no_torch() -> None:
    code = "from headrace import models; [models.find(name) for name in models.names()]"
    assert not loaded(code) & {"torch", "transformers"}


def test_an_engine_starts_without_what_few_requests_need() -> None:
    """Each of them takes a good part of the time to a first token."""
    code = "import headrace.llm, headrace.engine.build, headrace.engine.library.load, headrace.backends.cpu"
    assert not loaded(code) & {"torch", "transformers", "llguidance", "asyncio", "ssl", "starlette"}


def test_a_heavy_import_is_noticed() -> None:
    assert "numpy" in loaded("import headrace, numpy") & HEAVY
