"""schemathesis against a server over the fake engine: `python -m tests.programs.fuzz_openapi [EXAMPLES] [OPTIONS]`.

Prints its report and ends with its exit status; 0 means that no check failed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.server import Live, inproc, write_tokenizer

from headrace.protocol.config import ServerConfig
from headrace.text.tokenizer import Tokenizer

CONFIG = Path(__file__).with_name("schemathesis.toml")
# `ast.parse` of Python 3.11 in several threads at once may fail so (python/cpython#106905), in the tool's own workers.
ACCIDENT = "AST constructor recursion depth mismatch"


def run(url: str, num_examples: int, *options: str) -> subprocess.CompletedProcess[str]:
    """At most `num_examples` cases for each operation and phase, the same ones each time."""
    tool = str(Path(sys.executable).with_name("schemathesis"))
    command = [tool, "--config-file", str(CONFIG), "run", f"{url}/openapi.json", "-n", str(num_examples)]
    command += ["--seed", "1", "--no-color", "--no-shrink", "--workers", "4", "--request-timeout", "60", *options]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
            if ACCIDENT not in done.stdout:
                break
    return done


def main() -> int:
    num_examples = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.load(write_tokenizer(Path(folder)))
        server = ServerConfig(log_stats_interval=0, uvicorn_log_level="error")
        # Answers without a limit fill the context: a small one keeps them short.
        with Live(inproc(max_num_seqs=64, max_model_len=256), tokenizer, server) as live:
            done = run(live.url, num_examples, *sys.argv[2:])
    print(done.stdout + done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
