"""C-13: random clients against the server's `Connection` on a virtual clock: each state has its timer, and none is cut.

A `Schedule` is what a client sends, in pieces, with pauses, and how it reads and ends. Nothing here waits: the clock
jumps to the next timer. A polite client keeps within every bound, mostly only just, and must get all its replies; any
other may do what it likes, and its connection must end within `IDLE_S` of its last act and of the last open call.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
from collections import Counter
from collections.abc import Iterator
from multiprocessing import Pool
from typing import Any, NamedTuple

import h11
import uvicorn
from uvicorn.server import ServerState

from headrace.protocol.errors import HeadraceError
from headrace.serve.errors import error_response
from headrace.serve.gates import connection
from headrace.serve.gates.connection import TABLE, Connection, Wait
from headrace.serve.gates.limits import read_body

IDLE_S = 71.0
"""HEADERS or REST, then END, which a client that reads a little at first prolongs by one window; and a second."""
PAUSES = (0.0, 0.0, 0.1, 3.0, 6.0, 12.0, 29.0, 40.0)
PIECE = b"x" * 31 * 1024
"""More than a client must send, or read, in half a minute."""
BIG = b"y" * 300_000


class Clock(selectors.SelectSelector):
    """Waits for nothing: its time is that of the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("nothing is left to wait for")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop without files, on a virtual clock. `errors` are those that no task or call caught."""

    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(self.clock)
        self.errors: list[str] = []
        self.servers: list[Server] = []
        self.set_exception_handler(lambda loop, context: self.errors.append(str(context)))

    def time(self) -> float:
        return self.clock.now


class Piece(NamedTuple):
    """What a client sends after a pause, and how much it reads then."""

    pause: float
    data: bytes
    reads: int = 0


class Schedule(NamedTuple):
    """`reads_all` reads all that comes at once. `num_replies` is that of a polite client, None for others."""

    pieces: list[Piece]
    end: str
    reads_all: bool
    num_replies: int | None


class Wire(asyncio.Transport):
    """The server's end of a connection, played by a schedule; the limits are those of asyncio's own transports."""

    HIGH, LOW, READ = 64 << 10, 16 << 10, 16 << 10

    def __init__(self, loop: VirtualLoop, protocol: Connection, schedule: Schedule, peer: str = "10.0.0.1") -> None:
        super().__init__({"peername": (peer, 1), "sockname": ("10.0.0.2", 80)})
        self.loop, self.protocol, self.schedule = loop, protocol, schedule
        self.received = bytearray()
        self.lost_at: float | None = None
        self._unread, self._incoming = bytearray(), bytearray()
        self._is_closing = self._is_paused = self._is_full = self._at_eof = False
        protocol.connection_made(self)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not self._unread:
                self.loop.call_soon(self._lose, None)

    def abort(self) -> None:
        self._unread.clear()
        self._is_closing = True
        self.loop.call_soon(self._lose, None)

    def reset(self) -> None:
        """The client's packet that ends the connection at once."""
        self._is_closing = True
        self.loop.call_soon(self._lose, ConnectionResetError())

    def _lose(self, error: Exception | None) -> None:
        if self.lost_at is None:
            self.lost_at = self.loop.time()
            self.protocol.connection_lost(error)

    def write(self, data: bytes) -> None:  # type: ignore[override]
        if self.lost_at is not None or not data:
            return
        if self.schedule.reads_all:
            self.received += data
            return
        self._unread += data
        if len(self._unread) > self.HIGH and not self._is_full:
            self._is_full = True
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self._unread)

    def read(self, size: int) -> None:
        """The client reads."""
        self.received += self._unread[:size]
        del self._unread[:size]
        if len(self._unread) <= self.LOW and self._is_full:
            self._is_full = False
            self.protocol.resume_writing()
        if self._is_closing and not self._unread:
            self.loop.call_soon(self._lose, None)

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.loop.call_soon(self._deliver)

    def send(self, data: bytes, eof: bool = False) -> None:
        """The client sends."""
        self._incoming += data
        self._at_eof |= eof
        self._deliver()

    def _deliver(self) -> None:
        while self._incoming and not self._is_paused and not self._is_closing:
            data = bytes(self._incoming[: self.READ])
            del self._incoming[: self.READ]
            self.protocol.data_received(data)
        if self._at_eof and not self._incoming and not self._is_paused and not self._is_closing:
            self.protocol.eof_received()
            self.close()


class Server:
    """The server's side of all connections of one loop. `last_end` is when the last call of each connection ended."""

    def __init__(self, loop: VirtualLoop, most_per_peer: int | None = None) -> None:
        self.loop = loop
        self.protocol = Connection.protocol(most_per_peer)
        self.config = uvicorn.Config(self.app, interface="asgi3", proxy_headers=False, ws="none", log_config=None)
        self.config.load()
        self.state = ServerState()
        self.last_end: dict[int, float] = {}
        loop.servers.append(self)

    def connect(self, schedule: Schedule, peer: str = "10.0.0.1") -> Wire:
        protocol = self.protocol(config=self.config, server_state=self.state, app_state={}, _loop=self.loop)
        wire = Wire(self.loop, protocol, schedule, peer)
        protocol.app = self.of(wire, protocol.app)
        return wire

    def of(self, wire: Wire, app: Any) -> Any:
        async def timed(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            finally:
                self.last_end[id(wire)] = self.loop.time()

        return timed

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        # A CONNECT that succeeds would end HTTP on the connection.
        status, body, pieces = 405 if scope["method"] == "CONNECT" else 200, b"ok", 1
        if path == "/read":
            try:
                async with read_body(scope, receive) as data:
                    body = str(len(data)).encode()
            except HeadraceError as error:
                await error_response(error)(scope, receive, send)
                return
        elif path == "/slow":
            await asyncio.sleep(20)
        elif path == "/big":
            body = BIG
        elif path == "/stream":
            body, pieces = BIG[:40_000], 6
        await send({"type": "http.response.start", "status": status, "headers": []})
        for index in range(pieces):
            if index:
                await asyncio.sleep(1)
            await send({"type": "http.response.body", "body": body, "more_body": index + 1 < pieces})


def request(chance: random.Random, path: str, size: int) -> bytes:
    """A request that is well-formed, in one of many ways."""
    more = chance.choice(["", "", "", "Upgrade: websocket\r\nConnection: Upgrade\r\n", "Expect: 100-continue\r\n"])
    if size and chance.random() < 0.5:
        more += "Transfer-Encoding: chunked\r\n"
        step = max(1, size // chance.randint(1, 5))
        pieces = [b"x" * min(step, size - at) for at in range(0, size, step)]
        extension = chance.choice([b"", b";a=b"])
        body = b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces)
        body += b"0\r\n" + chance.choice([b"", b"Trailer: x\r\n"]) + b"\r\n"
    else:
        more += f"Content-Length: {size}\r\n" if size or chance.random() < 0.3 else ""
        body = b"x" * size
    return f"{'POST' if size else 'GET'} {path} HTTP/1.1\r\nHost: a\r\n{more}\r\n".encode() + body


def last_request(chance: random.Random) -> bytes:
    """One after which the connection ends: it says so, or is malformed."""
    return chance.choice(
        [
            b"GET /quick HTTP/1.0\r\n\r\n",
            b"POST /quick HTTP/1.0\r\nContent-Length: 20\r\n\r\nxx",
            b"GET /quick HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
            b"POST /read HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc",
            b"GET /stream HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
            b"GET /quick HTTP/1.1\nHost: a\n\n",
            b"GET /quick HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
            b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"POST /quick HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nT: x\n\r\n",
            b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * 70_000,
            b"GET /" + b"a" * 70_000,
        ]
    )


PATHS = ("/quick", "/quick", "/read", "/read", "/slow", "/big", "/stream")


def hostile(chance: random.Random) -> Schedule:
    """Any client."""
    data = b"".join(
        request(chance, chance.choice(PATHS), chance.choice([0, 0, 10, 3000, 70_000]))
        for _ in range(chance.randint(0, 3))
    )
    if chance.random() < 0.4:
        data += last_request(chance)
    if chance.random() < 0.6:
        data = data[: chance.randint(0, len(data))]
    cuts = sorted(chance.randint(0, len(data)) for _ in range(chance.randint(0, 4)))
    reads = chance.choice([0, 0, 1, 5000, 40_000])
    pieces = [
        Piece(chance.choice(PAUSES), data[begin:end], reads)
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)
    ]
    pieces += [Piece(chance.choice(PAUSES), b"", reads)] * chance.randint(0, 2)
    end = chance.choice(["silence", "silence", "silence", "eof", "reset"])
    return Schedule(pieces, end, reads_all=chance.random() < 0.5, num_replies=None)


def polite(chance: random.Random) -> Schedule:
    """A client that is as slow as each bound allows."""
    pieces: list[Piece] = []
    num_replies = chance.randint(1, 3)
    for _ in range(num_replies):
        path = chance.choice(PATHS)
        if path == "/read" and chance.random() < 0.3:
            # At the least rate: as many bytes as half a minute must bring, again and again.
            head = b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (3 * len(PIECE) + 1)
            pieces += [Piece(-1.0, head), *[Piece(29.5, PIECE)] * 3, Piece(29.5, b"x")]
            continue
        data = request(chance, path, chance.choice([0, 10, 3000]) if path != "/slow" else 0)
        head = data.index(b"\r\n\r\n")
        cut = chance.randint(1, head)
        pieces += [Piece(-1.0, data[:cut]), Piece(chance.choice([0.0, 9.5]), data[cut : head + 4])]
        if data[head + 4 :]:
            pieces.append(Piece(chance.choice([0.0, 9.5]), data[head + 4 :]))
    pieces.append(Piece(-1.0, b""))
    return Schedule(pieces, "eof", reads_all=True, num_replies=num_replies)


def slow_reader(chance: random.Random) -> Schedule:
    """A client that reads a large reply at the least rate that is allowed."""
    pieces = [Piece(0.0, request(chance, "/big", 0), 100)]
    pieces += [Piece(29.5, b"", len(PIECE)) for _ in range(len(BIG) // len(PIECE) + 2)]
    return Schedule(pieces, "silence", reads_all=False, num_replies=1)


def replies(received: bytes) -> int:
    """How many whole replies these bytes are. Raises `h11.RemoteProtocolError` if the last is not whole."""
    client, count = h11.Connection(h11.CLIENT), 0
    client.receive_data(received)
    client.receive_data(b"")
    while client.trailing_data[0] or client.their_state is not h11.IDLE:
        if client.our_state is h11.IDLE:
            client.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
            client.send(h11.EndOfMessage())
        event = client.next_event()
        if isinstance(event, h11.EndOfMessage):
            count += 1
            if client.their_state is not h11.DONE:
                break
            client.start_next_cycle()
    return count


class Outcome(NamedTuple):
    """What went wrong, or nothing, with the waits in each pair of states that the connection was in."""

    problem: str
    pairs: set[tuple[str, str, str]]


def armed(wire: Wire, pairs: set[tuple[str, str, str]]) -> str:
    """Say why the timer is not that of the state; empty if it is."""
    protocol = wire.protocol
    if wire.lost_at is not None:
        return "" if protocol._timer is None else "a timer outlives its connection"
    states = protocol.conn.their_state, protocol.conn.our_state
    wait = Wait.END if wire.is_closing() else TABLE.get(states, Wait.END)
    pairs.add((states[0].__name__, states[1].__name__, str(protocol.wait and protocol.wait.name)))
    timer = protocol._timer
    if timer is None or timer.cancelled() or timer.when() < wire.loop.time():
        return f"no timer in {states}"
    allowed = {wait, Wait.NEXT} if wait is Wait.HEADERS else {wait, Wait.REPLY} if wait is Wait.END else {wait}
    return "" if protocol.wait in allowed else f"{protocol.wait} in {states}"


async def play(server: Server, schedule: Schedule) -> Outcome:
    """Play one schedule to its end."""
    loop, pairs = server.loop, set[tuple[str, str, str]]()
    wire = server.connect(schedule)
    problem, acted_at = "", loop.time()
    for piece in schedule.pieces:
        pause = piece.pause
        if pause < 0:
            # Just before the time for a further request is over, counted from the reply.
            while wire.protocol.wait is Wait.REPLY:
                await asyncio.sleep(0.5)
            pause = 4.0 if piece is not schedule.pieces[0] else 0.0
        await asyncio.sleep(pause)
        problem = problem or armed(wire, pairs)
        if wire.lost_at is not None:
            break
        wire.send(piece.data)
        wire.read(piece.reads)
        acted_at = loop.time()
        problem = problem or armed(wire, pairs)
    if wire.lost_at is None and schedule.end == "eof":
        wire.send(b"", eof=True)
    elif wire.lost_at is None and schedule.end == "reset":
        wire.reset()
    for _ in range(100):
        await asyncio.sleep(5)
        problem = problem or armed(wire, pairs)
        if wire.lost_at is not None:
            break
    else:
        problem = problem or "the connection never ended"
    server.loop.call_soon(server.last_end.pop, id(wire), None)
    if schedule.num_replies is None:
        last = max(acted_at, server.last_end.get(id(wire), 0.0))
        if wire.lost_at is not None and wire.lost_at - last > IDLE_S:
            problem = problem or f"it ended {wire.lost_at - last:.0f} s after its last act"
    else:
        try:
            count = replies(bytes(wire.received))
        except h11.ProtocolError as error:
            problem = problem or f"a polite client got a part of a reply: {error}"
        else:
            if count != schedule.num_replies or b"HTTP/1.1 4" in wire.received:
                problem = problem or f"a polite client got {count} of {schedule.num_replies} replies"
    return Outcome(problem, pairs)


def schedule_of(seed: int) -> Schedule:
    chance = random.Random(seed)
    kind = chance.random()
    return hostile(chance) if kind < 0.75 else polite(chance) if kind < 0.95 else slow_reader(chance)


@contextlib.contextmanager
def virtual() -> Iterator[VirtualLoop]:
    """A loop on a virtual clock; an error that nothing caught fails the block."""
    loop = VirtualLoop()
    try:
        yield loop
    finally:
        for server in loop.servers:
            for each in list(server.state.connections):
                each.transport.abort()
        loop.run_until_complete(asyncio.sleep(0))
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=100))
        loop.close()
    assert not loop.errors, loop.errors[:3]


def play_all(seeds: range) -> tuple[list[str], set[tuple[str, str, str]]]:
    """Play the schedules of these seeds beside each other, and return the problems and the pairs of states."""

    async def beside(server: Server) -> list[Outcome]:
        return await asyncio.gather(*(play(server, schedule_of(seed)) for seed in seeds))

    with virtual() as loop:
        server = Server(loop, most_per_peer=10**6)
        outcomes = loop.run_until_complete(beside(server))
        left = len(server.state.connections), len(server.state.tasks)
    problems = [f"seed {seed}: {each.problem}" for seed, each in zip(seeds, outcomes, strict=True) if each.problem]
    if any(left):
        problems.append(f"{left[0]} connections and {left[1]} calls are left")
    return problems, set().union(*(each.pairs for each in outcomes))


def schedules(count: int, seed: int) -> dict[str, Any]:
    """The campaign: `count` schedules, 200 on a loop."""
    first = seed * 10**9
    blocks = [range(at, min(at + 200, first + count)) for at in range(first, first + count, 200)]
    problems: list[str] = []
    pairs: Counter[str] = Counter()
    connection.max_connections = lambda: 10**6  # type: ignore[assignment]
    with Pool(2) as pool:
        for bad, seen in pool.imap_unordered(play_all, blocks):
            problems += bad
            pairs.update("/".join(pair) for pair in seen)
    return {
        "schedules": count,
        "pairs_of_states": len(pairs),
        "violations": len(problems),
        "examples": problems[:5],
        "states": ", ".join(sorted(pairs)),
    }
