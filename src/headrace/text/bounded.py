"""Child processes of bounded time and memory, for work of unknown cost: both ends of the pipe.

`BoundedProcess` starts the program when it is first needed and again after it was killed; `serve` is the program's
loop, with a bound on processor time for each job and on memory for all. They exchange frames of msgpack on stdin and
stdout (4-byte length, little-endian). Knows no jobs; `templates` and `sandbox` render chat templates with it,
`grammars` and `grammar_sandbox` build grammars.
"""

from __future__ import annotations

import contextlib
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import BinaryIO, TypeVar, cast

import msgspec

from headrace.protocol.errors import HeadraceError

Reply = TypeVar("Reply")

MAX_WALL_SECONDS = 30.0
"""For a process that uses no processor time and does not answer; long enough for a machine under load."""


class BoundedProcess:
    """`python -m MODULE MAX_CPU_SECONDS`, which does one job at a time, for any thread.

    The process ends at `close`, or when this object or the program ends.

    Args:
        max_cpu_seconds: processor time of one job: the module's `serve` ends the process after it.
        greeting: makes the first frame for a new process; None: it gets none.
    """

    def __init__(self, module: str, max_cpu_seconds: float, greeting: Callable[[], bytes] | None = None) -> None:
        self._command = [sys.executable, "-P", "-m", module, str(max_cpu_seconds)]
        self._max_cpu_seconds = max_cpu_seconds
        self._greeting = greeting
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: weakref.finalize[[subprocess.Popen[bytes]], BoundedProcess] | None = None

    def run(self, job: object, reply_type: type[Reply]) -> Reply | str:
        """Return the reply to a job, or a text that says why its process ended.

        Raises `HeadraceError` if no process starts, and what msgspec raises for a job that is not plain data.
        """
        body = msgspec.msgpack.encode(job)
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._stop()
                self._process = self._start()
                self._ending = weakref.finalize(self, _end, self._process)
                if self._greeting is not None and self._exchange(self._process, self._greeting()) is None:
                    raise HeadraceError(f"the process of {self._command[3]} does not start: {self._reason_of_end()}")
            reply = self._exchange(self._process, body)
            if reply is None:
                return self._reason_of_end()
        return msgspec.msgpack.decode(reply, type=reply_type)

    def close(self) -> None:
        """End the process. A later `run` starts another."""
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise HeadraceError(f"the process of {self._command[3]} does not start: {error}") from error

    def _exchange(self, process: subprocess.Popen[bytes], body: bytes) -> bytes | None:
        deadline = time.monotonic() + MAX_WALL_SECONDS
        stdin, stdout = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
        try:
            write_frame(stdin, body)
        except BrokenPipeError:
            return None
        # The program writes a frame in one call: once a part of it can be read, the rest comes too.
        if not select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        return read_frame(stdout)

    def _stop(self) -> int:
        """End the process and return its exit status; 0 if there is none."""
        ending, self._ending, self._process = self._ending, None, None
        return (ending() if ending else None) or 0

    def _reason_of_end(self) -> str:
        returncode = self._stop()
        if returncode in (-signal.SIGPROF, -signal.SIGKILL):
            return f"it took more than {self._max_cpu_seconds:g} s of processor time"
        return "it brought its process to an end"


def _end(process: subprocess.Popen[bytes]) -> int:
    stdin, stdout = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
    # The process exits at the end of its input.
    with contextlib.suppress(BrokenPipeError):
        stdin.close()
    try:
        process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    stdout.close()
    return process.returncode


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return one frame, or None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "little")
    body = stream.read(size)
    return body if len(body) == size else None


def write_frame(stream: BinaryIO, body: bytes) -> None:
    stream.write(len(body).to_bytes(4, "little") + body)
    stream.flush()


def serve(answer: Callable[[bytes], bytes], max_cpu_seconds: float, max_memory: int) -> None:
    """Answer jobs until stdin ends, without writing files or starting processes from now on.

    A job that exceeds its processor time ends the process, by SIGPROF's default action. `max_memory`: bytes of address
    space of the whole process.
    """
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while (body := read_frame(stdin)) is not None:
        signal.setitimer(signal.ITIMER_PROF, max_cpu_seconds)
        reply = answer(body)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_frame(stdout, reply)
