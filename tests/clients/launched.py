"""`python -m tests.clients.launched [NAME ...]`: installs the agents of `headrace launch` into build/clients/launched,
each in a folder of its own, for `tests/cli/test_launched_agents.py`, which is skipped for those that are not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from headrace.cli.agents import AGENTS

FOLDER = Path(__file__).resolve().parents[2] / "build" / "clients" / "launched"
MAX_INSTALL_S = 300
HEADLESS = {
    "claude": ("-p", "Say hello."),
    "codex": ("exec", "--skip-git-repo-check", "--sandbox", "read-only", "Say hello."),
    "opencode": ("run", "Say hello."),
    "qwen": ("Say hello.",),
    "aider": ("--message", "Say hello.", "--no-git", "--yes-always", "--no-pretty"),
    "pi": ("-p", "Say hello.", "--no-session"),
    "crush": ("run", "Say hello."),
}
"""The words with which an agent answers one question and ends."""


def programs(name: str) -> Path:
    """The folder in which an agent's program is, if it was installed."""
    folder = FOLDER / name
    return folder / "bin" if AGENTS[name].install.startswith("pip") else folder / "node_modules" / ".bin"


def installed(name: str) -> str | None:
    """The path of an agent's program: of the folder here, or else of PATH."""
    return shutil.which(AGENTS[name].program, path=f"{programs(name)}{os.pathsep}{os.environ.get('PATH', '')}")


def install(name: str) -> int:
    """Install an agent, and return the exit status."""
    folder, package = FOLDER / name, AGENTS[name].install.split()[-1]
    folder.mkdir(parents=True, exist_ok=True)
    words = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", package]
    if AGENTS[name].install.startswith("pip"):
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        words = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", package]
    return subprocess.run(words, cwd=folder, timeout=MAX_INSTALL_S).returncode


def main() -> int:
    status = 0
    for name in sys.argv[1:] or AGENTS:
        failed = install(name)
        print(f"{name}: {'not installed' if failed else installed(name)}", flush=True)
        status = status or failed
    return status


if __name__ == "__main__":
    sys.exit(main())
