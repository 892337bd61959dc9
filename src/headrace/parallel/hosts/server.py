"""`RankServer`: a rank on its own host, for one group after the other.

It connects to rank 0, and starts the rank's process when it is taken. When the connection or the process ends, the
process is killed, and another one awaits the next group: so a rank that stands still is replaced, too. Knows frames,
and neither the model nor the contents of a call. Called by `headrace rank`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from secrets import token_bytes

import msgspec

from headrace.parallel.group import COMMAND, FromRank, Loaded, Ready
from headrace.parallel.hosts import seats
from headrace.parallel.hosts.seats import Ended, Note, Seat, Unfit
from headrace.protocol import frames
from headrace.protocol.errors import HeadraceError
from headrace.protocol.frames import TransportError
from headrace.protocol.watchdog import Watchdog, usage
from headrace.secure.channel import Channel
from headrace.secure.credentials import Credentials
from headrace.secure.door import Server, connect
from headrace.secure.handshake import HandshakeError, Timeouts, is_final

logger = logging.getLogger("headrace.engine")

RETRY_S = 0.5
LAST_S = 1.0
"""Time in which a process that has hung up ends."""

_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


class RankServer:
    """Rank `rank` of `world`, whose rank 0 is at `server`.

    Args:
        version: of all that ranks have to do alike.
        weights: returns the digest of the model's files (`hub.digest`); called on a worker thread before each group.
        prepare: changes the first frame to the rank's process: each host decides from which path its rank loads.
        command: the program of the rank; its last argument is the number of its socket.
    """

    def __init__(
        self,
        server: Server,
        rank: int,
        world: int,
        credentials: Credentials,
        version: str,
        weights: Callable[[], str],
        prepare: Callable[[bytes], bytes],
        timeouts: Timeouts = Timeouts(tls=3.0, proof=3.0),
        command: Sequence[str] | None = None,
    ) -> None:
        self._server, self._rank, self._world = server, rank, world
        self._credentials, self._protocol, self._timeouts = credentials, seats.protocol_version(version), timeouts
        self._digest, self._prepare, self._command = weights, prepare, command
        self._host_id = token_bytes(16)
        self.num_groups = 0
        """Groups in which this rank was ready to compute."""

    async def serve(self) -> None:
        """Serve until it is cancelled. Waits for a rank 0 that is not there.

        Raises `HandshakeError` if rank 0 will not have this rank, and the error of a model that cannot be loaded;
        neither once it has computed in a group.
        """
        name, reported = f"rank 0 at {self._server.host}:{self._server.port}", ""
        while True:
            try:
                seat = Seat(self._host_id, self._rank, self._world, await asyncio.to_thread(self._digest))
                reader, writer, terms = await connect(
                    self._server, self._credentials, self._protocol, self._timeouts, seats.encode(seat)
                )
                reported = ""
                logger.info("%s has taken rank %d", name, self._rank)
                timeout = seats.seated_of(terms).timeout
                text = await self._serve_group(seats.open_channel(reader, writer, timeout), timeout)
                logger.warning("the group of %s has ended: %s", name, text)
            except (OSError, HandshakeError, TransportError) as error:
                text = str(error) or type(error).__name__
                if not self.num_groups and is_final(error):
                    raise HandshakeError(f"{name}: {text}", is_final=True) from error
                if text != reported:
                    logger.warning("%s: %s; tried again until it is there", name, text)
                    reported = text
            await asyncio.sleep(RETRY_S)

    async def _serve_group(self, channel: Channel, timeout: float) -> str:
        """Be a rank of one group. Returns why that ended. Raises as `serve` does."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [*(self._command or COMMAND), str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        member = _Member(process.pid, timeout, self._prepare)
        watching = asyncio.create_task(member.watch(process))
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                is_local = await seats.relay(channel, reader, writer, member.note, member.down, member.up)
            finally:
                self.num_groups += member.was_ready
            text = channel.reason
            if is_local:
                text = member.reason or await _end_of(process)
                channel.send(seats.note_frame(Ended(text)))
            if member.error is not None and not self.num_groups:
                raise member.error
            return text
        except TransportError as error:
            channel.cut(str(error))
            raise
        finally:
            watching.cancel()
            channel.close()
            process.kill()
            process.wait()
            await channel.until_closed()


class _Member:
    """The state of a rank's process in one group, kept by its host."""

    def __init__(self, pid: int, timeout: float, prepare: Callable[[bytes], bytes]) -> None:
        self._pid, self._prepare = pid, prepare
        self._watchdog = Watchdog(timeout)
        # Whether rank 0 waits for a reply of the process, by itself: in a gather the ranks find out.
        self._owes = False
        self.was_ready = False
        self.error: HeadraceError | None = None
        self.reason = ""

    def down(self, payload: bytes) -> bytes:
        if self.was_ready:
            return payload
        kind = _kind_of(payload)
        self._owes = self._owes or kind in ("start", "set_up")
        self._watchdog.starts_anew()
        return self._prepare(payload) if kind == "start" else payload

    def up(self, payload: bytes) -> None:
        if self.was_ready:
            return
        try:
            message = _from_rank.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TransportError(f"not a message of a rank: {error}") from error
        match message:
            case Loaded() | Ready():
                self._owes, self.was_ready = False, isinstance(message, Ready)
            case frames.Failed():
                self.error = frames.startup_error(message)
                self.reason = str(self.error)

    def note(self, note: Note) -> None:
        if not isinstance(note, Unfit):
            raise TransportError(f"unexpected {type(note).__name__} from rank 0")
        raise HandshakeError(note.text, is_final=True)

    async def watch(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process that stands still while rank 0 waits for its reply."""
        while True:
            await asyncio.sleep(self._watchdog.interval)
            self._watchdog.tick(time.monotonic(), usage(self._pid))
            if self._owes and self._watchdog.frozen >= self._watchdog.timeout:
                self.reason = f"it stood still for {self._watchdog.timeout:g} s while it was loaded"
                process.kill()
                return


def _kind_of(payload: bytes) -> str:
    """Return the tag of a message. Raises `TransportError` for bytes that are none."""
    try:
        return msgspec.msgpack.decode(payload, type=_Tagged).type
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"not a message to a rank: {error}") from error


class _Tagged(msgspec.Struct):
    type: str = ""


async def _end_of(process: subprocess.Popen[bytes]) -> str:
    """Return how a process ended that has hung up."""
    end = time.monotonic() + LAST_S
    while (status := process.poll()) is None:
        if time.monotonic() > end:
            return "its process hung up"
        await asyncio.sleep(0.01)
    return f"its process ended ({signal.Signals(-status).name if status < 0 else f'exit status {status}'})"
