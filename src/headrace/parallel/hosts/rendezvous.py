"""`Rendezvous`: where rank 0 awaits the ranks of other hosts, and the connections to them.

Each rank that has proven itself gets a local socket, by which `parallel.group.Group` sends and receives as it does with
a child. The end of a connection closes that socket. The connections have their own thread with an event loop, so that
signs of life go out while rank 0 computes. Called by `engine.ranks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from headrace.parallel.hosts import seats
from headrace.parallel.hosts.seats import Ended, Note, Seat, Seated, Unfit
from headrace.protocol.errors import CheckpointError
from headrace.protocol.frames import TransportError
from headrace.secure.channel import Channel
from headrace.secure.credentials import Credentials
from headrace.secure.door import Door, Peer
from headrace.secure.handshake import Timeouts

logger = logging.getLogger("headrace.engine")

LAST_NOTES_S = 2.0
"""Time in which the last notes are sent."""


class Place:
    """The connection of one rank. `socket` is rank 0's end of its local socket."""

    def __init__(self, seat: Seat, channel: Channel, sock: socket.socket) -> None:
        self.seat, self.channel, self.socket = seat, channel, sock
        self.reason = ""
        self.is_over = asyncio.Event()

    def note(self, note: Note) -> None:
        if not isinstance(note, Ended):
            raise TransportError(f"unexpected {type(note).__name__} from a rank")
        self.reason = note.text


class Rendezvous:
    """Awaits ranks 1 ... `world` - 1 at `listener`, which it owns from now on.

    Args:
        timeout: seconds without a sign of life after which a rank is lost.
        version: of all that ranks have to do alike.
        weights: returns the digest of the model's files (`hub.digest`); called once, on a thread.
    """

    def __init__(
        self,
        listener: socket.socket,
        world: int,
        timeout: float,
        credentials: Credentials,
        version: str,
        weights: Callable[[], str],
        timeouts: Timeouts = Timeouts(),
    ) -> None:
        self._listener, self._world, self._timeout = listener, world, timeout
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._timeouts = timeouts
        self.places: dict[int, Place] = {}
        self._is_complete = False
        self._changed = threading.Condition()
        self._door = Door(credentials, seats.protocol_version(version), timeouts, self._serve)
        self._executor = ThreadPoolExecutor(1, "headrace-weights")
        self._weights = self._executor.submit(weights)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-hosts", daemon=True)
        self._thread.start()

    # -- by rank 0's own thread

    def accept(self) -> list[socket.socket]:
        """Wait until all ranks are there. Returns rank 0's ends of the sockets to them, in order."""
        missing: list[int] = []
        with self._changed:
            while before := [rank for rank in range(1, self._world) if rank not in self.places]:
                if before != missing:
                    names = ", ".join(map(str, before))
                    logger.warning("waits at %s port %d for rank %s", *self.address, names)
                    missing = before
                # In portions, so that a signal is seen.
                self._changed.wait(0.5)
            self._is_complete = True
            return [self.places[rank].socket for rank in range(1, self._world)]

    def check_weights(self) -> None:
        """Compare the weights of all ranks with rank 0's. Refuses ranks with others, and raises `CheckpointError`."""
        digest, wrong = self._weights.result(), []
        for rank, place in sorted(self.places.items()):
            if place.seat.weights != digest:
                text = f"rank {rank} has other weights (digest {place.seat.weights}) than rank 0 (digest {digest})"
                wrong.append(text)
                self._loop.call_soon_threadsafe(place.channel.send, seats.note_frame(Unfit(text)))
        if wrong:
            raise CheckpointError("; ".join(wrong))

    def end_of(self, rank: int) -> str:
        """Return why the connection of a rank ended."""
        place = self.places[rank]
        return f"rank {rank}: {place.reason or place.channel.reason}"

    def hang_up(self) -> None:
        """End all connections, after the messages that were sent, without waiting."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        """End all connections, after the messages that were sent. May be called twice."""
        self.hang_up()
        self._thread.join(LAST_NOTES_S + 1.0)
        self._executor.shutdown(wait=False, cancel_futures=True)

    # -- on the thread of the connections

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, self._listener:
            runner.run(self._connections())

    async def _connections(self) -> None:
        accepting = asyncio.create_task(self._door.accept(self._listener))
        await self._stop.wait()
        for place in self.places.values():
            place.channel.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_NOTES_S):
                await asyncio.gather(*(place.is_over.wait() for place in self.places.values()))
        accepting.cancel()

    async def _serve(self, peer: Peer) -> None:
        try:
            seat = seats.seat_of(peer.client)
        except TransportError as error:
            raise peer.refuse("unfit", str(error)) from error
        rank = seat.rank
        if seat.world != self._world:
            raise peer.refuse("unfit", f"the model has {self._world} ranks here, and --world is {seat.world}")
        if not 0 < rank < self._world:
            raise peer.refuse("unfit", f"--rank {rank} is not one of 1 to {self._world - 1}")
        before = self.places.get(rank)
        if before is not None and before.seat.host_id == seat.host_id and not self._is_complete:
            before.channel.cut("the same host has come again")
            async with asyncio.timeout(self._timeouts.proof):
                await before.is_over.wait()
        with self._place(seat, peer) as (place, theirs):
            try:
                reader, writer = await asyncio.open_connection(sock=theirs)
                logger.warning("rank %d is there, at %s", rank, peer.name)
                await seats.relay(place.channel, reader, writer, place.note)
            except TransportError as error:
                place.reason = place.reason or str(error)
        try:
            await place.channel.until_closed()
        finally:
            place.is_over.set()

    @contextlib.contextmanager
    def _place(self, seat: Seat, peer: Peer) -> Iterator[tuple[Place, socket.socket]]:
        """Give a rank its place for as long as its connection lasts, with the end of its local socket that belongs to
        the connection. Raises `HandshakeError` if it is not free."""
        with self._changed:
            if seat.rank in self.places:
                raise peer.refuse("busy", f"rank {seat.rank} is there already")
            peer.welcome(seats.encode(Seated(self._timeout)))
            channel = seats.open_channel(peer.reader, peer.writer, self._timeout)
            ours, theirs = socket.socketpair()
            place = self.places[seat.rank] = Place(seat, channel, ours)
            self._changed.notify_all()
        try:
            yield place, theirs
        finally:
            with self._changed:
                # The group's wait ends when the reason is known.
                theirs.close()
                if not self._is_complete:
                    del self.places[seat.rank]
                    ours.close()
                    logger.warning("rank %d has left again: %s", seat.rank, place.reason or channel.reason)
            channel.close()
