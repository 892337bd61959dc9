"""Processes that end with the one that starts them: `tied` makes the command of one.

Benches, campaigns and tests start their servers with it, so that none is left behind when they are killed: Linux sends
a SIGKILL when the thread that started the process is gone, and the server's own children end with it. Elsewhere nothing
happens. Run as a program, it ties itself and becomes the command that follows. A user's server is never tied. The
standard library only: the peers' environments use it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def tied(command: Sequence[str]) -> list[str]:
    """Return the command of a process that becomes `command`, with the same process id, and ends with the thread that
    starts it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process, also a stopped one, when its parent `parent` is gone; if it is so already, end
    at once."""
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
