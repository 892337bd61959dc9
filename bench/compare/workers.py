"""The measured processes, and how much of the machine others took meanwhile.

A worker holds one loaded model (`bench.peers.protocol`) and is stopped by SIGSTOP between its turns: thread pools that
spin while idle would take the CPU from the one that is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.compare.disturbance import FOREIGN_LIMIT
from bench.compare.environments import ROOT, last_words
from bench.tied import tied


class WorkerError(Exception):
    """A worker that failed, died, or took too long."""


class Worker:
    """One process that answers commands. Every method raises `WorkerError` if it fails; the process is then gone."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float, folder: Path = ROOT
    ) -> None:
        self._log = log
        with log.open("a") as file:
            print("$", *command, file=file, flush=True)
            self.process = subprocess.Popen(
                tied(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                bufsize=1,
                env=dict(environment),
                cwd=folder,
                start_new_session=True,
            )
        self.warm: set[str] = set()
        self.ready = self._reply(seconds)
        self.pause()

    def ask(self, seconds: float, **command: Any) -> dict[str, Any]:
        """Wake the process, run one command, stop the process again. It goes on after a reply with an error."""
        self._signal(signal.SIGCONT)
        stdin = self.process.stdin
        if stdin is None or self.process.poll() is not None:
            raise WorkerError(self._death())
        try:
            stdin.write(json.dumps(command) + "\n")
            stdin.flush()
        except OSError as error:
            raise WorkerError(self._death()) from error
        reply = self._reply(seconds)
        self.pause()
        return reply

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def rss(self) -> int:
        """Bytes resident now, children included."""
        return sum(process.memory_info().rss for process in family(self.process.pid))

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _reply(self, seconds: float) -> dict[str, Any]:
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._signal(signal.SIGKILL)

        clock = threading.Timer(seconds, kill)
        clock.start()
        try:
            line = self.process.stdout.readline() if self.process.stdout else ""
        finally:
            clock.cancel()
        if late.is_set():
            self.close()
            raise WorkerError(f"no answer within {seconds:.0f} s")
        if not line:
            raise WorkerError(self._death())
        return dict(json.loads(line))

    def _death(self) -> str:
        self.close()
        return f"ended with status {self.process.returncode}: {last_words(self._log)}"


def first_token(command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float) -> dict[str, Any]:
    """Measure the seconds from the start of a process to the line of its first token, as "value"."""
    with log.open("a") as file:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, text=True, env=dict(environment),
            cwd=ROOT,
        )  # fmt: skip
        clock = threading.Timer(seconds, process.kill)
        clock.start()
        try:
            line = process.stdout.readline() if process.stdout else ""
            seconds_to_line = time.perf_counter() - start
            process.communicate()
        finally:
            clock.cancel()
    if not line:
        raise WorkerError(f"ended with status {process.returncode}: {last_words(log)}")
    return dict(json.loads(line)) | {"value": seconds_to_line, "seconds": seconds_to_line}


def family(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        yield parent
        yield from parent.children(recursive=True)


class Watch:
    """Counts the CPU time that others take.

    `share()` is their part of the time of all cores since the start: of everything but this process, its finished
    children and the family of `pid`. A hypervisor's steal counts as theirs.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._cores = psutil.cpu_count() or 1
        self._start = (time.monotonic(), self._busy(), self._ours())

    def share(self) -> float:
        start, busy, ours = self._start
        wall = max(time.monotonic() - start, 1e-3)
        return max(0.0, (self._busy() - busy) - (self._ours() - ours)) / (self._cores * wall)

    @staticmethod
    def _busy() -> float:
        now = psutil.cpu_times()
        return float(now.user + now.nice + now.system + now.irq + now.softirq + now.steal)

    def _ours(self) -> float:
        now = os.times()
        seconds = now.user + now.system + now.children_user + now.children_system
        for process in family(self._pid) if self._pid else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                seconds += sum(process.cpu_times()[:2])
        return seconds


def pace(seconds: float = 0.06) -> float:
    """Products of float32 matrices of 384 by 384 in a second, on the threads of numpy's library."""
    matrix = np.full((384, 384), 0.5, np.float32)
    matrix @ matrix
    start, turns = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        matrix @ matrix
        turns += 1
    return turns / (time.perf_counter() - start)


class Conditions:
    """What a sample is judged by (`bench.compare.disturbance`): what others take while it is measured, and the pace."""

    def __init__(self, pid: int | None = None) -> None:
        self._pace = pace()
        self._watch = Watch(pid)

    def facts(self) -> dict[str, float]:
        """`foreign` and `pace`, at the end of the measurement."""
        foreign = self._watch.share()
        return {"foreign": round(foreign, 4), "pace": round(min(self._pace, pace()), 1)}


def wait_until_quiet(seconds: float) -> bool:
    """Wait, `seconds` at most, for half a second in which others leave the machine alone; True if there was one."""
    end = time.monotonic() + seconds
    while True:
        watch = Watch()
        time.sleep(min(0.5, max(seconds, 0.05)))
        if watch.share() < FOREIGN_LIMIT:
            return True
        if time.monotonic() >= end:
            return False
