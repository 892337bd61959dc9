"""R-31: a process that stands still, ends or answers badly is the server's fault: it is replaced after its watchdog's
time, and the job is done by another. A job that burns its time or breaks its process stays the caller's fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace.protocol.errors import ChildFailedError
from headrace.text.bounded import BoundedProcess

# Does what a job says, as long as the file that it names is there: it is removed first, so that another try answers.
CHILD = """
import os, signal, sys, time
from headrace.text.bounded import serve

def answer(body):
    what, _, file = body.lstrip(b"\\xda\\xd9\\0").decode("latin-1").partition(" ")
    if file and os.path.exists(file):
        os.unlink(file)
    elif file:
        what = ""
    what = what.rpartition("-")[2]
    if what in ("STOP", "KILL", "SEGV"):
        os.kill(os.getpid(), getattr(signal, "SIG" + what))
    elif what == "torn":
        os.write(1, b"\\x10\\0\\0\\0half")
        os._exit(0)
    elif what == "huge":
        os.write(1, b"\\xff\\xff\\xff\\xff")
    elif what == "slow":
        os.write(1, b"\\x10\\0\\0\\0")
        while True:
            time.sleep(0.1)
            os.write(1, b"x")
    elif what == "wrong":
        return b"\\x01"
    while what == "burn":
        pass
    return b"\\xa4done"

serve(answer, float(sys.argv[1]), 2**40)
"""
FAULTS = ("STOP", "KILL", "torn", "huge", "slow", "wrong")


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BoundedProcess]:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    bounded_process = BoundedProcess("child", 0.3)
    bounded_process.watchdog.timeout, bounded_process.watchdog.interval = 0.6, 0.05
    yield bounded_process
    bounded_process.close()


def once(what: str, folder: Path) -> str:
    (folder / "once").touch()
    return f"-{what} {folder / 'once'}"


def pid_of(process: BoundedProcess) -> int:
    assert process.pid is not None
    return process.pid


@pytest.mark.parametrize("what", FAULTS)
def test_R_31_a_fault_of_the_process_is_mended(process: BoundedProcess, what: str, tmp_path: Path) -> None:
    assert process.run(once(what, tmp_path), str) == "done"
    assert (process.num_faults, process.fault) == (1, "")


def test_R_31_what_fails_again_is_a_503_in_its_own_words(process: BoundedProcess) -> None:
    with pytest.raises(ChildFailedError, match="a process of the server failed") as caught:
        process.run("-KILL", str)
    assert (caught.value.status, caught.value.retry_after) == (503, 1)
    assert "exit status -9" in process.fault
    process.ping()
    assert process.fault == ""


def test_R_31_what_the_job_does_is_the_callers_fault(process: BoundedProcess) -> None:
    assert process.run("-burn", str) == "it took more than 0.3 s of processor time"
    assert process.run("-SEGV", str) == "it brought its process to an end"
    assert process.num_faults == 0


def test_R_31_a_stopped_process_that_does_not_read_is_replaced(process: BoundedProcess) -> None:
    """Of a large job the pipe takes a part only."""
    process.ping()
    first = pid_of(process)
    os.kill(first, signal.SIGSTOP)
    assert process.run("x" * 10**6, str) == "done"
    assert pid_of(process) != first
    assert not psutil.pid_exists(first)


def test_R_31_control_without_the_watchdog_it_waits(process: BoundedProcess, tmp_path: Path) -> None:
    process.ping()
    process.watchdog.timeout = 0.0
    os.kill(pid_of(process), signal.SIGSTOP)
    replies: list[str] = []
    thread = threading.Thread(target=lambda: replies.append(process.run("x", str)))
    thread.start()
    thread.join(1.5)
    assert thread.is_alive()
    os.kill(pid_of(process), signal.SIGCONT)
    thread.join()
    assert (replies, process.num_faults) == (["done"], 0)


def test_R_31_a_process_that_can_not_be_started_is_a_fault(process: BoundedProcess, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(tmp_path / "nothing there"))
        with pytest.raises(ChildFailedError):
            process.ping()
    assert "does not start" in process.fault
    process.ping()
    assert process.fault == ""


def test_R_23_closing_ends_a_job_that_stands_still(process: BoundedProcess) -> None:
    process.ping()
    process.watchdog.timeout = 0.0
    os.kill(pid_of(process), signal.SIGSTOP)
    errors: list[str] = []
    began = threading.Event()
    process.watchdog.starts_anew = began.set  # type: ignore[method-assign]

    def work() -> None:
        with pytest.raises(ChildFailedError) as caught:
            process.run("x", str)
        errors.append(str(caught.value))

    thread = threading.Thread(target=work)
    thread.start()
    assert began.wait(20)
    process.close()
    thread.join(20)
    assert errors == ["the server is shutting down"]


def test_R_23_a_job_that_closing_overtakes_starts_no_process(process: BoundedProcess) -> None:
    process.ping()
    child, closing = psutil.Process(pid_of(process)), threading.Thread(target=process.close)

    def close_first() -> None:
        closing.start()
        while child.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.001)

    process.watchdog.starts_anew = close_first  # type: ignore[method-assign]
    with pytest.raises(ChildFailedError, match="the server is shutting down"):
        process.run("x", str)
    closing.join(20)
    assert (process.pid, process.num_faults) == (None, 0)


SERVER = """
import os, signal
from headrace.text import sandbox
from headrace.text.bounded import BoundedProcess
process = BoundedProcess(sandbox.__name__, 1.0)
process.ping()
pid = process.pid
os.kill(pid, signal.SIGSTOP)
print(pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_R_23_a_stopped_process_does_not_outlive_its_server() -> None:
    """It does not notice the end of its input; the kernel ends it."""
    stdout = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True, check=False).stdout
    ended, left = psutil.wait_procs(
        [psutil.Process(pid) for pid in map(int, stdout.split()) if psutil.pid_exists(pid)], 10
    )
    assert stdout
    assert not left, ended
