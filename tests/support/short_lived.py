"""The fake engine as a child process that ends in its first lives: `short_lived.py FILE NUM HOW FD`.

Each life is a byte of FILE. In the first NUM ones the process is killed before it is loaded (HOW is "kill"), or fails
with an error ("fail").
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.support import fake

from headrace.engine.child import main
from headrace.engine.core import EngineCore
from headrace.engine.links import ProcessLink
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError


def link(file: Path, num: int, how: str = "kill") -> ProcessLink:
    """A link to such a process; `lives` counts them."""
    command = (sys.executable, "-m", "tests.support.short_lived", str(file), str(num), how)
    return ProcessLink(EngineConfig(model="fake"), command)


def lives(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def run(file: Path, num: int, how: str, fd: int) -> int:
    def build(config: EngineConfig, is_restart: bool) -> EngineCore:
        if lives(file) <= num and how == "fail":
            raise CheckpointError("model.safetensors: torn")
        return fake.build(config)

    with file.open("ab") as counted:
        counted.write(b"x")
    if lives(file) <= num and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return main(fd, build)


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
