"""What benches, campaigns and tests start ends with them, however they end; what a user starts does not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from bench.tied import tied
from tests.support.shallow import shallow

ROOT = Path(__file__).resolve().parents[2]

SERVING = """
from tests.support.serving import serve
import sys, psutil
with serve(sys.argv[1]) as served:
    children = psutil.Process(served.pid).children(recursive=True)
    print(served.pid, *(child.pid for child in children), flush=True)
    input()
"""
STARTED = """
import subprocess, sys
from bench.tied import tied
command = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
child = subprocess.Popen({}(command), stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
input()
"""


def pids_of(code: str, *arguments: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A process that runs `code`, and those whose numbers it prints."""
    parent = subprocess.Popen(
        tied([sys.executable, "-c", code, *arguments]),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert parent.stdout is not None
    return parent, [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_a_server_and_its_engine_end_with_a_killed_campaign(state: str) -> None:
    parent, processes = pids_of(SERVING, shallow(1))
    assert len(processes) >= 2, "a server and its engine"
    assert not any(map(is_gone, processes))
    if state == "stopped":
        processes[0].send_signal(signal.SIGSTOP)
    parent.kill()
    parent.communicate()
    until(lambda: all(map(is_gone, processes)))


def test_control_what_is_not_tied_stays() -> None:
    """The same process by its plain command outlives its parent, for the time that a tied one takes to end."""
    starter, (child,) = pids_of(STARTED.format("tied"))
    left, (orphan,) = pids_of(STARTED.format(""))
    try:
        left.kill()
        left.wait()
        starter.kill()
        starter.wait()
        until(lambda: is_gone(child))
        assert not is_gone(orphan)
    finally:
        orphan.kill()
        for parent in (starter, left):
            parent.communicate()


def test_the_command_takes_the_place_of_the_process() -> None:
    process = subprocess.Popen(
        tied([sys.executable, "-c", "import os, sys; print(os.getpid(), sys.argv[1:]); sys.exit(7)", "a b", "-c"]),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.communicate()[0] == f"{process.pid} ['a b', '-c']\n"
    assert process.returncode == 7


def test_a_process_whose_parent_is_gone_before_it_is_tied_ends_at_once() -> None:
    command = tied([sys.executable, "-c", "print('it ran')"])
    command[4] = "1"  # as if another process were its parent by now
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
