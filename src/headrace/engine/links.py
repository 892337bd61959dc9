"""Links carry messages to the engine: over a socket to a child process, or through a queue to a thread.

A link starts the engine, carries messages both ways in order, and calls back once when the engine is gone. Knows no
requests; `engine.replica.Replica` is its only caller, on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import IO, Protocol

import msgspec

from headrace.engine import logs
from headrace.engine.core import EngineCore
from headrace.engine.parts import Joiner
from headrace.engine.records.black_box import BlackBox
from headrace.protocol import frames
from headrace.protocol.adapters import NamedAdapter, named_paths
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import EngineDeadError, EngineLostError, HeadraceError
from headrace.protocol.step import EngineInfo
from headrace.protocol.watchdog import usage

logger = logging.getLogger("headrace.engine")

CLOSE_TIMEOUT_S = 5.0
MAX_LINE_BYTES = 2**16
# Seconds in which a process that is about to be killed writes its stacks.
STACKS_S = 0.5
READ_BYTES = 16 << 10
"""Bytes that a transport takes at most for a read.

asyncio allocates 256 KiB and shrinks them to the bytes that came. The next read does not find such a gap again if
something small was allocated meanwhile, and the heap grows: by 7 MiB an hour with 20 requests a second.
"""
POSTED_BYTES = 1 << 16
"""Bytes of messages after whose encoding the event loop runs others: a call may post a thousand long requests."""
ENGINE_COMMAND = (sys.executable, "-m", "headrace.engine.child")

OnMessage = Callable[[frames.FromEngine], None]
OnLost = Callable[[str], None]


def engine_level(server_level: str) -> str:
    """Return the level of the engine's log, by the level of the server's. It is never debug: that level shows messages
    of errors, and the engine's may quote a request (S-22)."""
    return "info" if server_level in ("debug", "trace") else server_level


def read_small(transport: asyncio.BaseTransport) -> None:
    """Let a transport of asyncio's take no more than `READ_BYTES` for a read. Other transports stay as they are."""
    if hasattr(transport, "max_size"):
        transport.max_size = READ_BYTES


class Link(Protocol):
    in_process: bool
    """Whether requests stay objects of this process, functions in them too."""
    was_killed: bool
    """Whether a SIGKILL from outside ended the last engine."""
    black_box: BlackBox | None
    """The record of the engine, alive or dead; None for an engine in this process."""
    adapters: dict[str, str]
    """Paths of the adapters by name, those of the config first: a restarted engine loads them again."""
    load_seconds: float
    """How long the engine took to load, if it was loaded before `start`; else 0."""

    @property
    def pid(self) -> int | None:
        """The id of the engine's process; None for an engine in this process, and while there is none."""
        ...

    async def start(self, on_message: OnMessage, on_lost: OnLost) -> EngineInfo:
        """Start an engine and wait until it is loaded. Raises the error that it failed with. May be called again after
        a loss."""
        ...

    def post(self, message: frames.ToEngine) -> None:
        """Send, without waiting. Messages to an engine that is gone are dropped, for `on_lost` reports it."""
        ...

    def usage(self) -> tuple[float, bool] | None:
        """Return the processor time of the engine so far, in seconds, and whether it waits for a processor or a disk
        just now; None where that is unknown."""
        ...

    async def kill(self) -> None:
        """End an engine that does not answer, after it has written its stacks. No more messages of it come, and
        `on_lost` is not called. Does nothing to an engine in this process."""
        ...

    async def close(self, at_once: bool = False) -> None:
        """Stop the engine and wait for its end; with `at_once` it is killed, where it is a process. May be called
        twice; `start` may be called again."""
        ...


class ProcessLink:
    """A child process on a socketpair. Its death is an end-of-file.

    `command` is the program; its last argument is the number of its end of the socket. With `logs_stderr` each line
    that the process writes to stderr is logged here, and each record that it logs is logged as such. `log_level` is the
    lowest level that the process logs. `cpus` are the processors that the engine is bound to; none: it is not bound.

    Attributes:
        drain: awaited after each message of the engine, so that a slow reader of these makes it wait.
    """

    in_process = False
    load_seconds = 0.0
    was_killed = False

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str] = ENGINE_COMMAND,
        logs_stderr: bool = False,
        log_level: str = "warning",
        cpus: Sequence[int] = (),
    ) -> None:
        self.black_box: BlackBox | None = None
        self.drain: Callable[[], Awaitable[None]] | None = None
        self._config = config
        self.adapters = named_paths(config.lora_modules or ())
        self._command = command
        self._logs_stderr = logs_stderr
        self._log_level = log_level
        self._cpus = list(cpus)
        self._errors: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pump: asyncio.Task[None] | None = None
        # Messages that are posted and not encoded yet, in order.
        self._posted: deque[frames.ToEngine] = deque()
        self._is_restart = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def num_unsent_bytes(self) -> int:
        """The number of posted bytes that the process has not read; messages that are not encoded yet do not count."""
        return self._writer.transport.get_write_buffer_size() if self._writer else 0

    async def start(self, on_message: OnMessage, on_lost: OnLost) -> EngineInfo:
        await self._reap()
        self._close_box()
        self._pump = None
        box = self.black_box = BlackBox.make()
        server_end, engine_end = socket.socketpair()
        with engine_end:
            # Not on a worker thread: the child ends with the thread that made it.
            command = [*self._command, str(engine_end.fileno())]
            self._process = subprocess.Popen(
                command,
                pass_fds=[engine_end.fileno(), *box.fds],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE if self._logs_stderr else None,
            )
        if self._process.stderr is not None:
            self._errors = asyncio.create_task(_log_lines(self._process.stderr))
        reader, self._writer = await asyncio.open_connection(sock=server_end)
        read_small(self._writer.transport)
        form = "json" if self._logs_stderr else "text"
        config = self._config
        if config.enable_lora:
            modules = [NamedAdapter(name, path).text() for name, path in self.adapters.items()]
            config = msgspec.structs.replace(config, lora_modules=modules or None)
        start = frames.Start(config, box.fds, self._is_restart, form, self._log_level, self._cpus)
        self._writer.write(frames.encode(start))
        messages = _messages(reader)
        try:
            first = await anext(messages, None)
        except frames.TransportError:
            self._process.kill()
            raise
        match first:
            case None:
                status = await self._reap()
                self._log_stacks()
                raise EngineLostError(f"the engine's process ended while it started ({status})")
            case frames.Ready(info):
                self._is_restart = True
                self._pump = asyncio.create_task(self._receive(messages, on_message, on_lost))
                return info
            case frames.Failed() as failed:
                await self._reap()
                raise frames.startup_error(failed)
            case other:
                await self._reap()
                raise frames.TransportError(f"the engine began with {type(other).__name__}")

    def post(self, message: frames.ToEngine) -> None:
        self._posted.append(message)
        if len(self._posted) == 1:
            asyncio.get_running_loop().call_soon(self._send_posted)

    def _send_posted(self) -> None:
        """Encode and send posted messages until they are many bytes, and the others after the loop has run others."""
        num_bytes = 0
        if self._writer is None or self._writer.is_closing():
            self._posted.clear()
            return
        try:
            while self._posted and num_bytes < POSTED_BYTES:
                frame = frames.encode(self._posted.popleft())
                self._writer.write(frame)
                num_bytes += len(frame)
        finally:
            if self._posted:
                asyncio.get_running_loop().call_soon(self._send_posted)

    def usage(self) -> tuple[float, bool] | None:
        return None if self._process is None else usage(self._process.pid)

    async def kill(self) -> None:
        self._stop_listening()
        process = self._process
        if process is not None and process.poll() is None:
            # In this order: a stopped process takes the first when it goes on.
            for name in (frames.LAST_WORDS_SIGNAL, signal.SIGCONT):
                process.send_signal(name)
            await asyncio.sleep(STACKS_S)
            process.kill()
        await self._reap()
        self._log_stacks()
        self.was_killed = False

    async def close(self, at_once: bool = False) -> None:
        # A process that loads would not read the message.
        if self._process is not None and (at_once or self._pump is None):
            self._process.kill()
        self._stop_listening()
        self._posted.clear()
        self.post(frames.Shutdown())
        self._send_posted()
        await self._reap()
        self._close_box()
        if self._errors is not None:
            await self._errors

    def _close_box(self) -> None:
        if self.black_box is not None:
            self.black_box.close()
            self.black_box = None

    def _log_stacks(self) -> None:
        for line in self.black_box.stacks() if self.black_box is not None else ():
            logger.error("%s", line)

    def _stop_listening(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            self._pump = None

    async def _receive(
        self, messages: AsyncIterator[frames.FromEngine], on_message: OnMessage, on_lost: OnLost
    ) -> None:
        reason = ""
        try:
            async for message in messages:
                if isinstance(message, frames.Failed):
                    reason = ": ".join(filter(None, (message.kind, message.message)))
                else:
                    on_message(message)
                    if self.drain is not None:
                        await self.drain()
        except frames.TransportError as error:
            reason = str(error)
        except Exception as error:  # a defect of the server; the engine is of no use without its reader
            logger.exception("the reader of the engine's messages failed")
            reason = f"{type(error).__name__} in the server"
        status = await self._reap()
        self._log_stacks()
        on_lost(reason or status)

    async def _reap(self) -> str:
        """End the child, by closing its socket and if need be by SIGKILL, and return how it ended."""
        process = self._process
        self._posted.clear()
        # Messages that are posted from now on are dropped.
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                if writer.can_write_eof():
                    writer.write_eof()
        status = "no process"
        if process is not None:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    while process.poll() is None:
                        await asyncio.sleep(0.01)
            except TimeoutError:
                process.kill()
                process.wait()
            status = f"exit status {process.returncode}"
            self.was_killed = process.returncode == -signal.SIGKILL
            # Only now, so that `usage` and `pid` still find the process in the meantime.
            self._process = None
        if writer is not None:
            writer.close()
        return status


async def _log_lines(pipe: IO[bytes]) -> None:
    """Log the lines that come through `pipe` until its end."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    while True:
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            line = error.partial
            if not line:
                return
        except asyncio.LimitOverrunError as error:
            line = await reader.read(max(1, error.consumed))
        text = line.decode("utf-8", "replace").rstrip()
        record = logs.record_of(text)
        if record is None:
            logger.warning("%s", text)
        elif logger.isEnabledFor(record.levelno):
            logger.handle(record)


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[frames.FromEngine]:
    """Yield the engine's messages until its end. Raises `TransportError`."""
    buffer, joiner = frames.FrameBuffer(), Joiner()
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(frames.READ_BYTES):
            for payload in buffer.feed(data):
                message = frames.decode_from_engine(payload)
                if isinstance(message, frames.Output) and (message.output.alternatives or joiner.rows):
                    joiner.join(message.output)
                yield message
            # A read of bytes that are here already does not yield to other tasks.
            await asyncio.sleep(0)


class InprocLink:
    """The same loop on a thread, without bytes: messages are passed as objects."""

    in_process = True
    load_seconds = 0.0
    was_killed = False
    pid = None

    def __init__(self, build: Callable[[], EngineCore]) -> None:
        self.black_box: BlackBox | None = None
        self.adapters = dict[str, str]()
        self._build = build
        self._inbox: queue.SimpleQueue[frames.ToEngine | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def start(self, on_message: OnMessage, on_lost: OnLost) -> EngineInfo:
        if self._thread is not None:
            raise EngineDeadError("an engine in this process can not be restarted")
        self._inbox = queue.SimpleQueue()
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[EngineInfo] = loop.create_future()
        joiner = Joiner()

        def deliver(message: frames.FromEngine) -> None:
            if isinstance(message, frames.Ready):
                ready.set_result(message.info)
                return
            if isinstance(message, frames.Output) and (message.output.alternatives or joiner.rows):
                joiner.join(message.output)
            on_message(message)

        def lost(error: BaseException) -> None:
            if not ready.done():
                failed = error if isinstance(error, HeadraceError) else EngineDeadError(repr(error))
                failed.__cause__ = error
                ready.set_exception(failed)
            else:
                on_lost(repr(error))

        def call(function: Callable[..., None], *args: object) -> None:
            # The loop may have closed before the thread; then the message is dropped.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(function, *args)

        def run() -> None:
            from headrace.engine.child import drive

            core = None
            try:
                core = self._build()
                drive(core, self._receive, lambda message: call(deliver, message))
            except BaseException as error:
                logger.exception("the engine's thread failed")
                call(lost, error)
            finally:
                if core is not None:
                    core.close()

        self._thread = threading.Thread(target=run, name="headrace-engine", daemon=True)
        self._thread.start()
        return await ready

    def post(self, message: frames.ToEngine) -> None:
        self._inbox.put(message)

    def usage(self) -> tuple[float, bool] | None:
        return None

    async def kill(self) -> None:
        return

    async def close(self, at_once: bool = False) -> None:
        self._inbox.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    def _receive(self, wait: bool) -> list[frames.ToEngine] | None:
        messages: list[frames.ToEngine] = []
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._inbox.get(block=wait and not messages)
                if message is None:
                    return None
                messages.append(message)
        return messages
