"""A relay of IP packets between two network namespaces, which delays, loses and doubles them.

`python -m tests.campaigns.relay PID NAME` makes a TUN device NAME in its own network namespace and one in that of the
process PID, prints a line when both are there, and carries packets between them. Each line of its input sets what
becomes of packets from then on, as JSON: `{"delay": [0.1, 0.3], "loss": [0, 0.5], "double": [0, 0]}`, the numbers of
both directions (first those that leave this namespace). It ends with its input. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time

from bench.tied import tied

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
NOTHING = {"delay": [0.0, 0.0], "loss": [0.0, 0.0], "double": [0.0, 0.0]}
MAX_PACKETS = 20_000
"""That wait; later ones are lost, as in any network."""


def open_tun(name: str, pid: int | None = None) -> int:
    """The descriptor of a new device, here or in the network namespace of a process."""
    opened: list[int] = []

    def work() -> None:
        if pid is not None:
            # Of this thread alone.
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/proc/{pid}/ns/net") as namespace:
                if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
        opened.append(fd)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    [fd] = opened
    return fd


def carry(ends: tuple[int, int], noise: random.Random) -> None:
    """Carry packets until the input ends."""
    rule, waiting, number = NOTHING, list[tuple[float, int, int, bytes]](), 0
    poll = select.poll()
    for fd in (*ends, 0):
        poll.register(fd, select.POLLIN)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, fd, packet = heapq.heappop(waiting)
            # Where the device is down, or full, the packet is lost.
            with contextlib.suppress(OSError):
                os.write(fd, packet)
        rest = 1000.0 * (waiting[0][0] - now) if waiting else 1000.0
        for fd, _ in poll.poll(max(0.0, rest)):
            if fd == 0:
                line = sys.stdin.readline()
                if not line:
                    return
                rule = NOTHING | json.loads(line)
                continue
            direction = ends.index(fd)
            try:
                packet = os.read(fd, 65536)
            except OSError:
                time.sleep(0.001)  # the device is down
                continue
            for _ in range(2 if noise.random() < rule["double"][direction] else 1):
                if noise.random() < rule["loss"][direction] or len(waiting) >= MAX_PACKETS:
                    continue
                number += 1
                due = time.monotonic() + noise.uniform(0.5, 1.0) * rule["delay"][direction]
                heapq.heappush(waiting, (due, number, ends[1 - direction], packet))


def main() -> None:
    pid, name = int(sys.argv[1]), sys.argv[2]
    ends = open_tun(name), open_tun(name, pid)
    print("there", flush=True)
    carry(ends, random.Random(1))


class Relay:
    """The relay as a process."""

    def __init__(self, pid: int, name: str) -> None:
        command = [sys.executable, "-m", "tests.campaigns.relay", str(pid), name]
        self._process = subprocess.Popen(tied(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "there\n":
            raise OSError("the relay has not begun")

    def set(self, **rule: list[float]) -> None:
        """What becomes of packets from now on; without a rule they pass."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(rule) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)


if __name__ == "__main__":
    main()
