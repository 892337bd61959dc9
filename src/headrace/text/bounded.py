"""Child processes of bounded time and memory, for work of unknown cost: the parent's side and the child's.

`BoundedProcess` starts the program when it is first needed and again after its end; `serve` is the program's loop, with
a bound on processor time for each job and on memory for all. They exchange frames of msgpack on stdin and stdout
(4-byte length, little-endian). A job that exceeds its bounds is the caller's fault. A process that stands still, is
ended from outside or sends a torn frame is no fault of the caller: a watchdog kills it, and the job is tried once more
in a new process. Knows no jobs; `templates` and `sandbox` render chat templates with it, `grammars` and
`grammar_sandbox` build grammars, `bounded_tokenizer` and `tokenizer_sandbox` turn text into tokens, and
`engine.fair_worker` shares it among the server's callers.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
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

from headrace.protocol.errors import ChildFailedError
from headrace.protocol.watchdog import Watchdog, usage

logger = logging.getLogger("headrace.server")

Reply = TypeVar("Reply")

WATCHDOG_S = 3.0
"""Seconds after which a process is killed that takes no processor time and sends no reply; ten times as many if it
computes, which is enough on a machine under load."""
MAX_FRAME_BYTES = 64 * 2**20
"""Twice the bytes of the longest prompt in UTF-8."""
NUM_TRIES = 2
PR_SET_PDEATHSIG = 1
_PIPE_BYTES = 2**16
_FROM_OUTSIDE = (0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
"""Exit statuses that no job causes: memory is bounded by the address space, so the kernel kills no process because of a
job, and a program that ends by itself with 0 has not answered."""


class BoundedProcess:
    """`python -m MODULE MAX_CPU_SECONDS`, which does one job at a time, for any thread.

    The process ends at `close`, or when this object or the program ends.

    Args:
        max_cpu_seconds: processor time of one job: the module's `serve` ends the process after it.
        greeting: makes the first frame for a new process; None: it gets none.

    Attributes:
        watchdog: watches the job that runs.
        fault: the reason why the last process could not work, until one can; empty: there is no fault.
        num_faults: processes that ended, stood still or did not start, through no fault of a job.
    """

    def __init__(self, module: str, max_cpu_seconds: float, greeting: Callable[[], bytes] | None = None) -> None:
        self.watchdog = Watchdog(WATCHDOG_S)
        self.fault = ""
        self.num_faults = 0
        self._module = module
        self._max_cpu_seconds = max_cpu_seconds
        self._greeting = greeting
        self._lock = threading.Lock()
        self._num_closed = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: weakref.finalize[[subprocess.Popen[bytes]], BoundedProcess] | None = None

    @property
    def pid(self) -> int | None:
        """The process's id, or None while there is none."""
        return None if self._process is None else self._process.pid

    def run(self, job: object, reply_type: type[Reply]) -> Reply | str:
        """Return the reply to a job, or a text with the reason why the job ended its process.

        Raises `ChildFailedError` if no process can do the job, and msgspec's error for a job that is not plain data.
        """
        body = msgspec.msgpack.encode(job)

        def read(reply: bytes | str) -> Reply | str:
            return reply if isinstance(reply, str) else msgspec.msgpack.decode(reply, type=reply_type)

        return self._try(body, read)

    def ping(self) -> None:
        """Check that the process answers, and start another if it does not. Raises `ChildFailedError`."""
        self._try(b"", lambda reply: reply)

    def close(self) -> None:
        """End the process, whatever it does. A later `run` starts another."""
        self._num_closed += 1
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._stop()

    def _try(self, body: bytes, read: Callable[[bytes | str], Reply]) -> Reply:
        num_closed, num_left = self._num_closed, NUM_TRIES
        with self._lock:
            while True:
                num_left -= 1
                try:
                    result = read(self._answer(body, num_closed))
                    self.fault = ""
                    return result
                except (ChildFailedError, msgspec.DecodeError) as error:
                    self._stop(at_once=True)
                    if self._num_closed != num_closed:
                        raise ChildFailedError("the server is shutting down") from error
                    self.fault = f"the process of {self._module} failed: {error}"
                    self.num_faults += 1
                    logger.error("%s", self.fault)
                    if not num_left:
                        raise ChildFailedError("a process of the server failed and is started again") from error

    def _answer(self, body: bytes, num_closed: int) -> bytes | str:
        """Return the reply, or the reason why the job ended the process. Raises `ChildFailedError`."""
        if self._process is None or self._process.poll() is not None:
            if self._num_closed != num_closed:
                # `close` has ended the process for good, and is waiting for this job.
                raise ChildFailedError("it was closed")
            self._stop()
            self._process = self._start()
            self._ending = weakref.finalize(self, _end, self._process)
            if self._greeting is not None and self._exchange(self._process, self._greeting()) is None:
                raise ChildFailedError(f"it does not start (exit status {self._stop()})")
        reply = self._exchange(self._process, body)
        if reply is not None:
            return reply
        status = self._stop()
        if status == -signal.SIGPROF:
            return f"it took more than {self._max_cpu_seconds:g} s of processor time"
        if status in _FROM_OUTSIDE:
            raise ChildFailedError(f"it ended with exit status {status}")
        return "it brought its process to an end"

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", self._module, str(self._max_cpu_seconds)]
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        except OSError as error:
            raise ChildFailedError(f"it does not start: {error}") from error
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(cast(BinaryIO, pipe).fileno(), False)
        return process

    def _exchange(self, process: subprocess.Popen[bytes], body: bytes) -> bytes | None:
        """Send a frame and return the one that comes back, or None at the end of the process. Raises
        `ChildFailedError` for a torn frame, and when the watchdog's time is over."""
        stdin, stdout = (cast(BinaryIO, pipe).fileno() for pipe in (process.stdin, process.stdout))
        unsent, received, size = memoryview(_frame(body)), bytearray(), None
        poller = select.poll()
        poller.register(stdin, select.POLLOUT)
        poller.register(stdout, select.POLLIN)
        watchdog = self.watchdog
        watchdog.starts_anew()
        due = time.monotonic() + watchdog.interval
        while True:
            ready = {fd for fd, _ in poller.poll(1000 * watchdog.interval)}
            if stdin in ready:
                try:
                    unsent = unsent[os.write(stdin, unsent[:_PIPE_BYTES]) :]
                except BrokenPipeError:
                    unsent = unsent[:0]
                if not unsent:
                    poller.unregister(stdin)
            if stdout in ready:
                data = os.read(stdout, _PIPE_BYTES)
                if not data:
                    return None
                received += data
                if size is None and len(received) >= 4:
                    size = 4 + int.from_bytes(received[:4], "little")
                if size is not None and (size > MAX_FRAME_BYTES or len(received) > size):
                    raise ChildFailedError("its reply is no frame")
                if len(received) == size:
                    watchdog.heard()
                    return bytes(received[4:])
            if (now := time.monotonic()) >= due:
                due = now + watchdog.interval
                if watchdog.tick(now, usage(process.pid)):
                    raise ChildFailedError(
                        f"no reply for {watchdog.silent:.1f} s, no processor time for {watchdog.frozen:.1f} s of them"
                    )

    def _stop(self, at_once: bool = False) -> int:
        """End the process and return its exit status; 0 if there is none."""
        ending, process = self._ending, self._process
        self._ending = self._process = None
        self.watchdog.heard()
        if at_once and process is not None:
            process.kill()
        return (ending() if ending else None) or 0


def _end(process: subprocess.Popen[bytes]) -> int:
    stdin, stdout = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
    # The process exits at the end of its input.
    stdin.close()
    for _ in range(2):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
            break
        # A process that waits for a disk is reaped later, by `subprocess` itself.
        process.kill()
    stdout.close()
    return process.returncode or 0


def _frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return one frame, or None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "little")
    body = stream.read(size)
    return body if len(body) == size else None


def write_frame(stream: BinaryIO, body: bytes) -> None:
    stream.write(_frame(body))
    stream.flush()


def serve(
    answer: Callable[[bytes], bytes], max_cpu_seconds: float, max_memory: int, max_data: int | None = None
) -> None:
    """Answer jobs until stdin ends, under the bounds of `confine`. An empty frame is a ping. A job that exceeds its
    processor time ends the process."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    confine(max_memory, max_data)
    while (body := read_frame(stdin)) is not None:
        signal.setitimer(signal.ITIMER_PROF, max_cpu_seconds)
        reply = answer(body) if body else b""
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_frame(stdout, reply)


def confine(max_memory: int, max_data: int | None = None) -> None:
    """Write no files and start no processes from now on, and let SIGPROF, the timer's signal, end the process.

    `max_memory`: bytes of address space of the whole process; a later call may lower it. `max_data`: bytes of its own
    memory, in which mapped files do not count.
    """
    # A stopped process does not notice the end of its input.
    die_with_parent()
    _limit(resource.RLIMIT_AS, max_memory)
    if max_data is not None:
        _limit(resource.RLIMIT_DATA, max_data)
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        _limit(kind, 0)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def address_space() -> int:
    """Return the bytes of address space that this process has."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _limit(kind: int, most: int) -> None:
    """Set a limit of the process, or leave it where the system has set a lower one."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def die_with_parent() -> None:
    """Make Linux send a SIGKILL when the parent's thread ends, so that a killed server leaves no orphan (R-23)."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(1)
