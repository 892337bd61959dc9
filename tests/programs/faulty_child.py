"""A program of `text.bounded` whose replies may be torn or slow: `python faulty_child.py MODULE MAX_CPU_SECONDS`.

SIGUSR1 tears its next reply (half a frame, then the process ends), SIGUSR2 makes it slow (a byte in half a second).
`python -m tests.programs.faulty_child serve ...` is the command `headrace` with such children.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

from headrace.text import bounded

MODULES = ("headrace.text.sandbox", "headrace.text.grammar_sandbox", "headrace.text.tokenizer_sandbox")


def misbehave() -> None:
    """Let the signals decide about the next reply."""
    fault = ""
    right = bounded.write_frame

    def note(number: int, _: object) -> None:
        nonlocal fault
        fault = "torn" if number == signal.SIGUSR1 else "slow"

    def write_frame(stream: BinaryIO, body: bytes) -> None:
        frame = len(body).to_bytes(4, "little") + body
        if fault == "torn":
            os.write(stream.fileno(), frame[: len(frame) // 2])
            os._exit(0)
        while fault == "slow":
            os.write(stream.fileno(), frame[:1])
            frame = frame[1:] or b"\0"
            time.sleep(0.5)
        right(stream, body)

    bounded.write_frame = write_frame
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, note)


def main() -> None:
    if sys.argv[1] in MODULES:
        misbehave()
        importlib.import_module(sys.argv[1]).main(float(sys.argv[2]))
        return
    from headrace.cli.main import main as command

    class Faulty(subprocess.Popen[bytes]):
        def __init__(self, args: Sequence[str], **options: Any) -> None:
            if list(args[1:3]) == ["-P", "-m"] and args[3] in MODULES:
                args = [args[0], "-P", __file__, *args[3:]]
            super().__init__(args, **options)

    subprocess.Popen = Faulty  # type: ignore[misc, assignment]
    command()


if __name__ == "__main__":
    main()
