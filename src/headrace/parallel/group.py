"""`Group`: the processes of a model's ranks, as rank 0 has them: their start, their gathers, their end.

On one host, rank 0 starts the others with a socket each, and a file in memory (memfd) that all of them map. Ranks of
other hosts connect by themselves (`Hosts`). If a rank ends, hangs or makes other calls than the rest, the whole group
is killed, and the owner of rank 0 makes another. Knows messages as bytes; must not know models or requests. Called by
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
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from headrace.backends.native import require_native
from headrace.parallel.program import Call, Fault, Gathers, HiddenRows, Numbers, Passed, RankLostError
from headrace.protocol import frames
from headrace.protocol.errors import HeadraceError, RequestError

SLOT_BYTES = 4 * 2**20
"""The most bytes of a rank that are gathered at a time; longer parts go in portions."""
CLOSE_TIMEOUT_S = 2.0
LOAD_TIMEOUT_S = 3600.0
COMMAND = (sys.executable, "-m", "headrace.engine.rank")
"""The program of a rank; its last argument is the number of its socket."""


T = TypeVar("T")


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """From a rank: it has loaded its weights, `weight_bytes` in all."""

    weight_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**50)]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From a rank: it has its program, and waits for calls."""


FromRank = Loaded | Ready | frames.Failed | HiddenRows | Fault | Numbers
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


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


class SeparateMemory:
    """`Gathers` of a pipeline, which gathers nothing: its ranks check their calls where rows are handed on."""

    def begin(self, call_id: int) -> None:
        """Do nothing: nothing is gathered."""

    def fault(self) -> str:
        return ""

    def break_group(self) -> None:
        """Do nothing: there are no gathers to break."""


class Group:
    """Ranks 1 ... `world` - 1, from rank 0's side. `at_end` is called by the first `close`; `on_passed` is called, on
    the thread that watches, with each message that a rank hands on while calls are made.

    Args:
        timeout: seconds that a rank waits for the others in a gather, and for room in a socket.
        spins: whether ranks wait in a busy loop, because each has processors to itself.
        first: makes the first message to a rank, of its number and the number of the memory's file.
        on_lost: called once, on the thread that watches, when the group is of no use any more; not after `close`.
        gathers: of ranks that share no memory; `first` is then called with the number -1.
        hosts: of ranks that run on other hosts.
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
        self._messages: list[deque[FromRank]] = [deque() for _ in range(world - 1)]
        # Two threads send: one the calls, the other the messages that are handed on.
        self._sending = [threading.Lock() for _ in range(world - 1)]
        self.on_passed: Callable[[int, Passed], None] | None = None
        self._lock = threading.Lock()
        self._reason = ""
        self._closed = False
        self.at_end: Callable[[], None] | None = None
        self._call_id = 0
        self.native: Gathers = gathers or SeparateMemory()
        try:
            if hosts is not None:
                self._sockets += hosts.accept()
                for rank, sock in enumerate(self._sockets, 1):
                    sock.settimeout(timeout)
                    sock.sendall(framed(first(rank, -1)))
            elif gathers is not None:
                for rank in range(1, world):
                    self._start(rank, -1, first(rank, -1), command or COMMAND)
            else:
                self.native = self._start_sharing(spins, first, command or COMMAND)
        except BaseException:
            self.close()
            raise

    def _start_sharing(
        self, spins: bool, first: Callable[[int, int], msgspec.Struct], command: Sequence[str]
    ) -> Gathers:
        """Start the other ranks on this host, which share memory. Returns rank 0's gathers."""
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
                    pass_fds=[fd for fd in (theirs.fileno(), memory) if fd >= 0],
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
        return [self.receive(rank, kind) for rank in range(1, self.world)]

    def receive(self, rank: int, kind: type[T]) -> T:
        """Wait for a message of `kind` from a rank, while the model is loaded. Raises as `expect`."""
        sock = self._sockets[rank - 1]
        sock.settimeout(LOAD_TIMEOUT_S)
        message = self._receive(rank)
        sock.settimeout(self._timeout)
        if isinstance(message, frames.Failed):
            raise frames.startup_error(message)
        if not isinstance(message, kind):
            raise RankLostError(f"rank {rank} sent {type(message).__name__}, expected {kind.__name__}")
        return message

    def _receive(self, rank: int) -> FromRank:
        messages = self._messages[rank - 1]
        while not messages:
            try:
                data = self._sockets[rank - 1].recv(frames.READ_BYTES)
            except OSError as error:
                raise RankLostError(f"rank {rank}: {error}") from error
            if not data:
                raise RankLostError(self._end_of(rank))
            try:
                messages += map(_decoder.decode, self._buffers[rank - 1].feed(data))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise RankLostError(f"rank {rank} sent what is no message: {error}") from error
        return messages.popleft()

    def watch(self) -> None:
        """Look after the ranks from now on, on a thread."""
        threading.Thread(target=self._watch, name="headrace-ranks", daemon=True).start()

    def _watch(self) -> None:
        poll = select.poll()
        for sock in self._sockets:
            poll.register(sock, select.POLLIN)
        descriptors = [sock.fileno() for sock in self._sockets]
        while not self._closed:
            events = poll.poll(200)
            if self._closed or not events:
                continue
            rank = 1 + descriptors.index(events[0][0])
            try:
                reason = self._heard(rank)
            except HeadraceError as error:
                reason = str(error)
            if reason and not self._closed:
                self.lose(reason)
                if self._on_lost is not None:
                    self._on_lost(self._reason)
            if reason:
                return

    def _heard(self, rank: int) -> str:
        """Take a rank's messages: pass on those for other stages; return why the group is at its end, or ""."""
        message: Any = self._receive(rank)
        while isinstance(message, Passed) and self.on_passed is not None:
            self.on_passed(rank, message)
            if not self._messages[rank - 1]:
                return ""
            message = self._receive(rank)
        if isinstance(message, frames.Failed):
            return f"rank {rank}: {message.message or message.kind}"
        return f"rank {rank} sent {type(message).__name__}"

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
        for rank in range(1, self.world):
            self._send_frame(rank, frame)
        self.check()

    def send_to(self, rank: int, message: msgspec.Struct) -> None:
        self._send_frame(rank, framed(message))

    def _send_frame(self, rank: int, frame: bytes) -> None:
        try:
            with self._sending[rank - 1]:
                self._sockets[rank - 1].sendall(frame)
        except OSError as error:
            self.lose(f"rank {rank} takes no calls: {error}")
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
