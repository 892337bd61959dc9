"""The thread team: idle it costs nothing, with too many threads it still ends, and it outlives fork and exit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from headrace.backends.native import record

BEGIN = """
import os, sys, threading, time
import numpy as np
from headrace.backends.native import record, require_native
native = require_native()
x = np.ones((8, 32), np.float32)
out = np.zeros_like(x)
def tape(num_records=20, to=out):
    made, at = native.Tape(), to.ctypes.data
    for _ in range(num_records):
        record(made, "add", dim=0, x=x.ctypes.data, ld_x=32, y=at, ld_y=32, width=32, out=at, ld_out=32)
    return made
def check(made, num_threads):
    out[:] = 0
    made.run([8, 0, 0], num_threads)
    assert (out == len(made)).all(), out
"""


def run(script: str) -> str:
    """What a new interpreter prints; a hang is an error."""
    done = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def busy_seconds(wait: Callable[[], None]) -> float:
    """CPU time of this process while `wait` runs."""
    start = time.process_time()
    wait()
    return time.process_time() - start


def spin(seconds: float) -> None:
    """Use so much CPU time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_an_idle_team_uses_no_cpu(native: ModuleType) -> None:
    x = np.ones((8, 32), np.float32)
    tape = native.Tape()
    record(tape, "softcap", dim=0, x=x.ctypes.data, ld_x=32, width=32, cap=1.0, out=x.ctypes.data, ld_out=32)
    tape.run([8, 0, 0], 4)
    time.sleep(0.05)
    assert busy_seconds(lambda: time.sleep(1.0)) < 0.1
    assert busy_seconds(lambda: spin(0.2)) > 0.1, "CPU time of a busy process is not seen"


def test_workers_have_cpus_of_their_own_and_the_caller_keeps_its_own_choice(native: ModuleType) -> None:
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU")
    places = run(
        """
before = os.sched_getaffinity(0)
num = min(4, native.num_threads())
check(tape(), num)
assert os.sched_getaffinity(0) == before
for task in os.listdir("/proc/self/task"):
    if open(f"/proc/self/task/{task}/comm").read().startswith("headrace/"):
        print(*os.sched_getaffinity(int(task)))
"""
    ).splitlines()
    assert len(places) == len(set(places)) == min(4, native.num_threads()) - 1
    assert all(len(place.split()) == 1 for place in places)


@pytest.mark.parametrize("num_cpus", [1, 2])
def test_more_threads_than_cpus_end_and_are_right(num_cpus: int) -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("no affinity here")
    run(
        f"""
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{num_cpus}])
for num_threads in (4, 1, 2, 7, 4):
    check(tape(300), num_threads)
"""
    )


def test_as_many_threads_as_asked_for(native: ModuleType) -> None:
    try:
        before = native.num_threads()
        native.set_num_threads(3)
        assert native.num_threads() == 3
        for wrong in (-1, 257):
            with pytest.raises(ValueError, match="num_threads"):
                native.set_num_threads(wrong)
    finally:
        native.set_num_threads(0)
    assert native.num_threads() == before >= 1


def test_runs_of_several_threads_take_turns() -> None:
    run(
        """
def loop():
    mine = np.zeros_like(x)
    made = tape(20, mine)
    for turn in range(1, 101):
        made.run([8, 0, 0], 1 + turn % 3)
    right.append((mine == 2000).all())
right = []
threads = [threading.Thread(target=loop) for _ in range(3)]
[t.start() for t in threads]
[t.join() for t in threads]
assert right == [True] * 3
"""
    )


def test_a_child_makes_its_own_team() -> None:
    run(
        """
made = tape()
check(made, 3)
for _ in range(5):
    child = os.fork()
    if child == 0:
        check(made, 3)
        check(tape(), 2)
        grandchild = os.fork()
        if grandchild == 0:
            check(made, 4)
            os._exit(0)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    check(made, 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
check(made, 3)
"""
    )


def test_a_fork_beside_a_run_leaves_the_child_a_team() -> None:
    run(
        """
made, stop = tape(), []
def loop():
    sums = np.zeros_like(x)
    mine = tape(500, sums)
    while not stop:
        mine.run([8, 0, 0], 2)
thread = threading.Thread(target=loop)
thread.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        check(made, 2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
stop.append(1)
thread.join()
"""
    )


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "time.sleep(0.01)"])
def test_the_process_ends_at_once(end: str) -> None:
    assert run(f"check(tape(), 4)\nprint('done')\n{end}") == "done\n"


def test_the_process_ends_while_a_daemon_computes() -> None:
    run(
        """
made = tape(500)
def forever():
    while True:
        made.run([8, 0, 0], 2)
threading.Thread(target=forever, daemon=True).start()
time.sleep(0.1)
"""
    )
