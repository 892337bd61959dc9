"""`Group`: the processes of a model's ranks, as rank 0 has them: their start, their gathers, their end.

On one host, rank 0 starts the others with a socket each, and a file in memory (memfd) that all of them map. Ranks of
other hosts come by themselves (`Hosts`). If one ends, stands still or falls out of step, the group is of no use: it is
killed, and the owner of rank 0 makes another. Knows messages as bytes; must not know models or requests. Called by
`engine.ranks`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from headrace.backends.native import require_native
from headrace.parallel.program import Call, RankLostError
from headrace.protocol import frames
from headrace.protocol.errors import HeadraceError, RequestError

SLOT_BYTES = 4 * 2**20
"""Of a gather at a time; longer ones go in portions."""
CLOSE_TIMEOUT_S = 2.0
LOAD_TIMEOUT_S = 3600.0
COMMAND = (sys.executable, "-m", "headrace.engine.rank")
"""The program of a rank; its last argument is the number of its socket."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """From a rank: it has its weights, of so many bytes."""

    weight_bytes: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From a rank: it has its program, and waits for calls."""


FromRank = Loaded | Ready | frames.Failed
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


class Gathers(Protocol):
    """Where the gathers of this rank meet those of the others: `_native.Ranks`, or `parallel.gloo.GlooRanks`."""

    def address(self) -> int: ...

    def begin(self, call_id: int) -> None: ...

    def fault(self) -> str: ...

    def break_group(self) -> None: ...


class Hosts(Protocol):
    """The hosts of the other ranks, each of which has its rank's process: `parallel.hosts.rendezvous.Rendezvous`."""

    def accept(self) -> list[socket.socket]:
        """Wait until all ranks are there, and return the sockets to them, in order."""
        ...

    def end_of(self, rank: int) -> str:
        """Return why a rank has hung up."""
        ...

    def hang_up(self) -> None:
        """Have the hosts end all ranks."""
        ...

    def close(self) -> None: ...


def framed(message: msgspec.Struct) -> bytes:
    """Return the whole frame of a message, as `protocol.frames` has them."""
    payload = _encoder.encode(message)
    return frames.HEADER.pack(len(payload)) + payload


class Group:
    """Ranks 1 ... `world` - 1, from rank 0's side. `at_end` is called by the first `close`.

    Args:
        timeout: seconds that a rank waits for the others in a gather, and for room in a socket.
        spins: whether every rank has processors of its own.
        first: makes the first message to a rank, of its number and the number of the memory's file.
        on_lost: called once, on the thread that watches, when the group is of no use any more; not after `close`.
        gathers, hosts: of ranks on hosts of their own.
    """

    def __init__(
        self,
        world: int,
        timeout: float,
        spins: bool,
        first: Callable[[int, int], msgspec.Struct],
        on_lost: Callable[[str], None] | None = None,
        command: Sequence[str] | None = None,
        gathers: Gathers | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self.world, self._timeout, self._on_lost = world, timeout, on_lost
        self.hosts = hosts
        self._sockets: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._buffers = [frames.FrameBuffer() for _ in range(world - 1)]
        self._lock = threading.Lock()
        self._reason = ""
        self._closed = False
        self.at_end: Callable[[], None] | None = None
        self._call_id = 0
        try:
            if hosts is not None and gathers is not None:
                self.native = gathers
                self._sockets += hosts.accept()
                for rank, sock in enumerate(self._sockets, 1):
                    sock.settimeout(timeout)
                    sock.sendall(framed(first(rank, -1)))
            else:
                self.native = self._start_all(spins, first, command or COMMAND)
        except BaseException:
            self.close()
            raise

    def _start_all(self, spins: bool, first: Callable[[int, int], msgspec.Struct], command: Sequence[str]) -> Gathers:
        """Start the other ranks on this host. Returns rank 0's gathers."""
        if not hasattr(os, "memfd_create"):
            bound = "1 on this system: ranks share memory as Linux has it"
            raise RequestError("tensor_parallel_size", self.world, bound)
        native = require_native().Ranks
        memory = os.memfd_create("headrace-ranks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, native.bytes(SLOT_BYTES))
            gathers: Gathers = native(memory, 0, self.world, SLOT_BYTES, self._timeout, spins)
            for rank in range(1, self.world):
                self._start(rank, memory, first(rank, memory), command)
            return gathers
        finally:
            os.close(memory)

    def _start(self, rank: int, memory: int, first: msgspec.Struct, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        self._sockets.append(ours)
        with theirs:
            # Not on a worker thread: the child ends with the thread that made it.
            self._processes.append(
                subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno(), memory],
                    stdin=subprocess.DEVNULL,
                )
            )
        ours.settimeout(self._timeout)
        ours.sendall(framed(first))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def expect(self, kind: type[Any]) -> list[Any]:
        """Wait for a message of `kind` from each rank. Raises the error with which one failed, or `RankLostError`."""
        messages = []
        for rank, (sock, buffer) in enumerate(zip(self._sockets, self._buffers, strict=True), 1):
            sock.settimeout(LOAD_TIMEOUT_S)
            message = self._receive(rank, sock, buffer)
            sock.settimeout(self._timeout)
            if isinstance(message, frames.Failed):
                raise frames.startup_error(message)
            if not isinstance(message, kind):
                raise RankLostError(f"rank {rank} sent {type(message).__name__}, expected {kind.__name__}")
            messages.append(message)
        return messages

    def _receive(self, rank: int, sock: socket.socket, buffer: frames.FrameBuffer) -> FromRank:
        while True:
            try:
                data = sock.recv(frames.READ_BYTES)
            except OSError as error:
                raise RankLostError(f"rank {rank}: {error}") from error
            if not data:
                raise RankLostError(self._end_of(rank))
            for payload in buffer.feed(data):
                try:
                    return _decoder.decode(payload)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise RankLostError(f"rank {rank} sent what is no message: {error}") from error

    def watch(self) -> None:
        """Look after the ranks from now on, on a thread."""
        threading.Thread(target=self._watch, name="headrace-ranks", daemon=True).start()

    def _watch(self) -> None:
        poll = select.poll()
        for sock in self._sockets:
            poll.register(sock, select.POLLIN)
        descriptors = [sock.fileno() for sock in self._sockets]
        # A rank says nothing any more, unless it ends.
        while not self._closed:
            events = poll.poll(200)
            if self._closed or not events:
                continue
            rank = 1 + descriptors.index(events[0][0])
            try:
                message: Any = self._receive(rank, self._sockets[rank - 1], self._buffers[rank - 1])
                reason = f"rank {rank}: {message.message or message.kind}"
            except HeadraceError as error:
                reason = str(error)
            if not self._closed:
                self.lose(reason)
                if self._on_lost is not None:
                    self._on_lost(self._reason)
            return

    def _end_of(self, rank: int) -> str:
        """Return how a rank ended that has hung up."""
        if self.hosts is not None:
            return self.hosts.end_of(rank)
        try:
            status = self._processes[rank - 1].wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"rank {rank} hung up"
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return f"rank {rank} ended ({name})"

    def lose(self, reason: str) -> None:
        """Break the group: gathers return at once, and the ranks are killed."""
        with self._lock:
            if self._reason or self._closed:
                return
            self._reason = reason
        self.native.break_group()
        self._kill()

    def begin(self) -> int:
        self._call_id += 1
        self.native.begin(self._call_id)
        return self._call_id

    def send(self, call: Call | msgspec.Struct) -> None:
        frame = framed(call)
        for rank, sock in enumerate(self._sockets, 1):
            try:
                sock.sendall(frame)
            except OSError as error:
                self.lose(f"rank {rank} takes no calls: {error}")
                self.check()
        self.check()

    def check(self) -> None:
        fault = self.native.fault()
        if fault and not self._reason:
            self.lose(f"the ranks are apart: {fault}")
        if fault or self._reason:
            raise RankLostError(self._reason or fault)

    def _kill(self) -> None:
        if self.hosts is not None:
            self.hosts.hang_up()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def close(self) -> None:
        """End the other ranks. May be called twice."""
        with self._lock:
            self._closed = True
            at_end, self.at_end = self.at_end, None
        if at_end is not None:
            at_end()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        if self.hosts is not None:
            self.hosts.close()
        for process in self._processes:
            try:
                process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
