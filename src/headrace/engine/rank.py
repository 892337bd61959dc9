"""The process of one rank: `python -m headrace.engine.rank FD`, started by `parallel.group.Group`, or on another host
by `parallel.hosts.server.RankServer`.

It loads its part of the model, makes the same program as rank 0, and then makes rank 0's calls. It schedules nothing,
samples nothing and knows no requests. When rank 0 is gone the socket is at its end, and this process ends too.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import queue
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.backends.base import SampleText, SetUp
from headrace.backends.native import require_native
from headrace.backends.shares import DeviceSeat, Seat
from headrace.engine.child import set_up_process
from headrace.engine.library.load import choose_activations, load_model
from headrace.engine.ranks import Go, Start, gathers_at, seat_of
from headrace.parallel.group import SLOT_BYTES, Loaded, Ready, SeparateMemory, framed
from headrace.parallel.pipeline import RankNeighbours, follow_stage, in_turn
from headrace.parallel.program import (
    Call,
    CopyBlocks,
    Fault,
    Forward,
    HiddenRows,
    HiddenStatesOf,
    LogitsOf,
    Numbers,
    Passed,
    RankLostError,
    follow,
)
from headrace.parallel.stages import StageSeat
from headrace.protocol import frames
from headrace.protocol.errors import HeadraceError

logger = logging.getLogger("headrace.engine")

_setting_up: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Start | Go | SetUp | HiddenRows | Numbers)
_calls: msgspec.msgpack.Decoder[Call | Passed] = msgspec.msgpack.Decoder(
    Forward | LogitsOf | HiddenStatesOf | CopyBlocks | HiddenRows | Fault
)

T = TypeVar("T")


class Inbox:
    """The messages of rank 0, one at a time. `receive` returns None at the end."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._buffer = sock, frames.FrameBuffer()
        self._payloads: deque[bytes] = deque()

    def payload(self) -> bytes | None:
        while not self._payloads:
            try:
                data = self._socket.recv(frames.READ_BYTES)
            except ConnectionError:
                return None
            if not data:
                return None
            self._payloads += self._buffer.feed(data)
        return self._payloads.popleft()

    def call(self) -> Any:
        payload = self.payload()
        return None if payload is None else _calls.decode(payload)

    def expect(self, kind: type[T]) -> T:
        """Wait for a message of `kind`. Raises EOFError at the end."""
        payload = self.payload()
        if payload is None:
            raise EOFError
        message = _setting_up.decode(payload)
        if not isinstance(message, kind):
            raise frames.TransportError(f"rank 0 sent {type(message).__name__}, expected {kind.__name__}")
        return message


class Mail:
    """The messages of rank 0 to a stage, sorted: its calls, and the rows that the stage before hands on.

    It is read on a thread at all times, so that rank 0 never waits for a rank that computes.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._calls, self._passed = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
        threading.Thread(target=self._read, name="headrace-mail", daemon=True).start()

    def _read(self) -> None:
        message: Any = True
        while message is not None:
            try:
                message = self._inbox.call()
            except (OSError, ValueError, HeadraceError) as error:
                logger.error("rank 0 sent what is no message", exc_info=error)
                message = None
            if isinstance(message, Passed):
                self._passed.put(message)
            else:
                self._calls.put(message)
        self._passed.put(None)

    def call(self) -> Any:
        """Wait for the next call; None at the end."""
        return self._calls.get()

    def passed(self) -> Passed:
        """Wait for the rows that the stage before hands on. Raises EOFError at the end."""
        message: Passed | None = self._passed.get()
        if message is None:
            raise EOFError
        return message


def serve(sock: socket.socket) -> None:
    """Load, make the program, and make rank 0's calls until it hangs up. Raises EOFError if it does so before."""
    inbox = Inbox(sock)
    start = inbox.expect(Start)
    if start.cpus:
        os.sched_setaffinity(0, start.cpus)
    config = start.config

    def send(message: msgspec.Struct) -> None:
        sock.sendall(framed(message))

    native, seat = place_of(start, inbox, send)
    backend, model, model_config = load_model(config, Path(config.model), lambda done, total: None, seat)
    send(Loaded(backend.ops.weight_bytes))
    go = inbox.expect(Go)
    if go.host:
        native.connect(go.host, go.port)
    choose_activations(config, backend, model, model_config, SampleText(str, lambda: go.token_ids))
    set_up = msgspec.structs.replace(inbox.expect(SetUp), num_threads=config.num_threads)
    program: Any = backend.program(model, set_up)
    if fault := native.fault():
        raise RankLostError(f"the ranks are apart: {fault}")
    send(Ready())
    gc.collect()
    gc.freeze()
    if config.pipeline_parallel_size > 1:
        mail = Mail(inbox)
        take = functools.partial(in_turn, mail.passed) if start.rank > 1 else None
        follow_stage(program, start.world, mail.call, take, send)
    else:
        follow(program, inbox.call, native)
    program.close()


def place_of(
    start: Start, inbox: Inbox, send: Callable[[msgspec.Struct], None]
) -> tuple[Any, Seat | DeviceSeat | StageSeat]:
    """Return the gathers in which the calls of this rank meet the other ranks' calls, and its seat."""
    if start.config.pipeline_parallel_size > 1:
        return SeparateMemory(), StageSeat(start.rank, start.world, RankNeighbours(start.rank, inbox.expect, send))
    native: Any
    if start.interface:
        native = gathers_at(start.config, start.rank, start.interface)
    else:
        native = require_native().Ranks(start.memory, start.rank, start.world, SLOT_BYTES, start.timeout, start.spins)
        os.close(start.memory)
    return native, seat_of(native, start.rank, start.world, start.config.enable_expert_parallel)


def main(fd: int) -> int:
    set_up_process()
    with socket.socket(fileno=fd) as sock:
        try:
            serve(sock)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return 0
        except BaseException as error:
            if not isinstance(error, HeadraceError):
                logger.error("a rank failed", exc_info=error)
            with contextlib.suppress(OSError):
                sock.sendall(framed(frames.Failed(type(error).__name__, str(error) or repr(error))))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
