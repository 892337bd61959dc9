"""C-4, load over HTTP: clients of every sort against the oracle engine, and a ledger of what became of each.

20 % hang up somewhere, 10 % send what is no request, 5 % have a deadline, 5 % ask for several answers, 2 % hardly
read, 1 % hang up just when their answer ends; up to 256 at once. The ledger notes every request before it is sent
and has to end in exactly one way that its sort allows; every token must be the one that the oracle says. Sockets are
used as they are: a stream counts as whole with its last chunk only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections import Counter
from typing import Any, NamedTuple

from tests.campaigns.oracle_server import oracle
from tests.support import fake

from headrace.insight.simulated import Oracle
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request

SORTS = {"plain": 57, "disconnect": 20, "invalid": 10, "deadline": 5, "several": 5, "slow": 2, "race": 1}
PHASES = ((1, 0.02), (8, 0.08), (32, 0.2), (96, 0.3), (256, 0.4))
"""Requests at once, and the share of all requests that come so."""
TIMEOUT_S = 60.0
ORACLE = Oracle(fake.VOCAB_SIZE, [fake.EOS])
WRONG: tuple[bytes, ...] = (
    b"{",
    b"[1]",
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "n": 100000}',
    b'{"prompt": [300]}',
    b'{"prompt": "x", "logit_bias": {"900": 1}}',
    b'{"prompt": 7}',
    b'{"prompt": "x", "prompt": "y"}',
    b'{"prompt": "\xff"}',
    b'{"max_tokens": 4}',
    b'{"prompt": "x", "model": "another"}',
    b"[" * 70,
)


class Asked(NamedTuple):
    """One request: `sort` of client, body, headers, and the tokens of each answer that it must get."""

    number: int
    sort: str
    body: bytes
    headers: str = ""
    stream: bool = False
    wanted: tuple[list[int], ...] = ()


class Reply(NamedTuple):
    """What was read: `whole` says that the body came to its declared end."""

    status: int
    body: bytes
    whole: bool


def asked(number: int, seed: int, sort: str = "") -> Asked:
    """Request `number` of the campaign `seed`: a function of both. Its sort is drawn if none is given."""
    rng = random.Random(f"{seed}/{number}")
    sort = sort or rng.choices(list(SORTS), list(SORTS.values()))[0]
    if sort == "invalid":
        return Asked(number, sort, rng.choice(WRONG))
    # Few beginnings, many ends: prefixes are shared, whole prompts are not.
    prompt = [rng.randrange(4)] * rng.randrange(2, 60) + [rng.randrange(255) for _ in range(rng.randrange(1, 20))]
    count = rng.randrange(2, 5) if sort == "several" else 1
    length = {"slow": 300, "deadline": 60}.get(sort, rng.choice((1, 5, 20, 40)))
    body = {"prompt": prompt, "max_tokens": length, "seed": number, "n": count, "return_token_ids": True}
    body |= {"stream": sort == "slow" or rng.random() < 0.5, "ignore_eos": True}
    if rng.random() < 0.3:
        body["logprobs"] = 2
    expected = []
    for index in range(count):
        params = SamplingParams(seed=number + index, max_tokens=length, ignore_eos=True)
        expected.append(ORACLE.stream(Request(request_id="", prompt_token_ids=prompt, params=params), 2048))
    headers = f"X-Request-Timeout: {rng.choice((0.01, 0.05, 0.2, 30))}\r\n" if sort == "deadline" else ""
    return Asked(number, sort, json.dumps(body).encode(), headers, bool(body["stream"]), tuple(expected))


def judge(one: Asked, reply: Reply) -> tuple[str, str]:
    """(what became of it, what is wrong with that: "" if nothing is)."""
    if not reply.whole:
        return "broken", f"cut off after {len(reply.body)} bytes, status {reply.status}"
    if one.sort == "invalid":
        return "refused", "" if 400 <= reply.status < 500 and b'"error"' in reply.body else f"got {reply.status}"
    if reply.status in (429, 503) and b'"error"' in reply.body:
        return "turned away", ""
    if reply.status in (408, 504):
        return "expired", "" if one.sort == "deadline" else f"got {reply.status}"
    if reply.status != 200:
        return "failed", f"got {reply.status}: {reply.body[:200]!r}"
    try:
        answers, finishes, error, done = _read(one, reply.body)
    except (ValueError, KeyError, TypeError) as mistake:
        return "failed", f"is no answer: {mistake}"
    if error:
        return "expired", "" if one.sort == "deadline" and error == "deadline_exceeded" and not done else error
    if not done:
        return "broken", "ends without its end"
    if answers != dict(enumerate(one.wanted)):
        return "foreign", f"tokens {answers} instead of {one.wanted}"
    if any(finish != "length" for finish in finishes.values()) or len(finishes) != len(one.wanted):
        return "failed", f"finish reasons {finishes}"
    return "answered", ""


def _read(one: Asked, body: bytes) -> tuple[dict[int, list[int]], dict[int, str], str, bool]:
    """Token ids and finish reason of each answer, the code of an error, and whether it says that it is done."""
    if one.stream:
        lines = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        done = bool(lines) and lines[-1] == "[DONE]"
    else:
        events, done = [json.loads(body)], True
    answers: dict[int, list[int]] = {}
    finishes: dict[int, str] = {}
    error = ""
    for event in events:
        if event.get("error"):
            error = str(event["error"].get("code"))
        for choice in event.get("choices", ()):
            answers.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
            if choice.get("finish_reason"):
                finishes[choice["index"]] = choice["finish_reason"]
    return answers, finishes, error, done


class Ledger:
    """Who asked, and what became of each: once."""

    def __init__(self) -> None:
        self.open: dict[int, Asked] = {}
        self.sorts: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.answers = 0
        self.asked_for = 0
        self.problems: list[str] = []

    def opened(self, one: Asked) -> None:
        if one.number in self.open:
            self.problems.append(f"{one.number} was opened twice")
        self.open[one.number] = one
        self.sorts[one.sort] += 1
        self.asked_for += len(one.wanted)

    def closed(self, one: Asked, outcome: str, problem: str = "") -> str:
        if self.open.pop(one.number, None) is None:
            problem = problem or f"ended twice: {outcome}"
        self.outcomes[outcome] += 1
        self.answers += len(one.wanted) if outcome == "answered" else 0
        if problem:
            self.problems.append(f"{one.sort} {one.number}: {problem}")
        return outcome

    def balance(self, before: dict[str, float], after: dict[str, float]) -> list[str]:
        """The server's count of ended requests beside the clients'."""
        ended = {
            name: after[name] - before.get(name, 0.0) for name in after if name.startswith("request_success_total/")
        }
        whole, total = ended.get("request_success_total/length", 0.0), sum(ended.values())
        result = [f"{number} was lost" for number in list(self.open)[:5]]
        if whole < self.answers:
            result.append(f"{self.answers} answers came, the server counts {whole:g}")
        if total > self.asked_for:
            result.append(f"{self.asked_for} answers were asked for, the server ended {total:g}")
        return result


async def fetch(port: int, one: Asked, rng: random.Random) -> Reply | None:
    """Ask as a client of this sort does. None if it hung up, as it meant to."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{one.headers}"
    data = f"{head}Content-Length: {len(one.body)}\r\n\r\n".encode() + one.body
    sock = socket.socket()
    sock.setblocking(False)
    if one.sort == "slow":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    if one.sort in ("disconnect", "race") and rng.random() < 0.5:
        # Closed with a reset instead of an end.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096 if one.sort == "slow" else 2**16)
    try:
        if one.sort == "disconnect" and rng.random() < 0.2:
            writer.write(data[: rng.randrange(len(data))])
            await writer.drain()
            return None
        writer.write(data)
        await writer.drain()
        if one.sort == "disconnect":
            if rng.random() < 0.5:
                await asyncio.sleep(rng.choice((0.0, 0.005, 0.05)))
            else:
                await reader.read(rng.choice((1, 300, 2000)))
            return None
        read = bytearray()
        while piece := await reader.read(1024 if one.sort == "slow" else 2**16):
            read += piece
            # What ends an answer stands in the event that tells its last token.
            if one.sort == "race" and (b'"length"' in read or not one.stream):
                return None
            if one.sort == "slow":
                await asyncio.sleep(0.01)
        return parse(bytes(read))
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def parse(data: bytes) -> Reply:
    """A reply of HTTP/1.1, as far as it goes."""
    head, result, body = data.partition(b"\r\n\r\n")
    if not result:
        return Reply(0, data, False)
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    status = int(lines[0].split()[1])
    if headers.get("transfer-encoding") != "chunked":
        return Reply(status, body, len(body) == int(headers.get("content-length", -1)))
    plain = bytearray()
    while True:
        size, result, body = body.partition(b"\r\n")
        if not result or len(body) < int(size, 16) + 2:
            return Reply(status, bytes(plain), False)
        if int(size, 16) == 0:
            return Reply(status, bytes(plain), body == b"\r\n")
        plain += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


async def work(port: int, ledger: Ledger, one: Asked, seed: int) -> str:
    """One request from its entry in the ledger to its end, which the ledger notes too."""
    rng = random.Random(f"client {seed}/{one.number}")
    ledger.opened(one)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reply = await fetch(port, one, rng)
    except TimeoutError:
        return ledger.closed(one, "lost", f"nothing for {TIMEOUT_S:g} s")
    except ConnectionError as error:
        left = one.sort in ("disconnect", "race")
        return ledger.closed(one, "left" if left else "broken", "" if left else type(error).__name__)
    return ledger.closed(one, *(("left", "") if reply is None else judge(one, reply)))


async def drive(port: int, ledger: Ledger, numbers: range, seed: int, at_once: int, sort: str = "") -> None:
    """Requests `numbers`, so many at a time."""
    waiting = iter(numbers)

    async def client() -> None:
        for number in waiting:
            await work(port, ledger, asked(number, seed, sort), seed)

    await asyncio.gather(*(client() for _ in range(at_once)))


async def pace(port: int, ledger: Ledger, numbers: range, seed: int, rate: float) -> None:
    """Requests `numbers`, so many a second, whatever becomes of them."""
    begin = time.monotonic()
    working = []
    for index, number in enumerate(numbers):
        await asyncio.sleep(max(0.0, begin + index / rate - time.monotonic()))
        working.append(asyncio.create_task(work(port, ledger, asked(number, seed), seed)))
    await asyncio.gather(*working)


def phases(num: int) -> list[tuple[int, range]]:
    """(requests at once, their numbers)."""
    result, first = [], 0
    for at_once, share in PHASES:
        last = num if (at_once, share) == PHASES[-1] else first + round(num * share)
        result.append((at_once, range(first, last)))
        first = last
    return result


def run_campaign(num: int, seed: int) -> dict[str, Any]:
    """`num` requests, the counts of their sorts and ends, and everything that was wrong."""
    ledger = Ledger()
    begin = time.monotonic()
    with oracle(delay=0.0005) as served:
        before = served.metrics()
        for at_once, numbers in phases(num):
            asyncio.run(drive(served.port, ledger, numbers, seed, at_once))
        problems = ledger.problems + served.unsettled()
        after = served.metrics()
        problems += ledger.balance(before, after)
        if after["engine_restarts_total"]:
            problems.append(f"the engine was started {after['engine_restarts_total']:g} times anew")
    return {
        "requests": num,
        "answers_compared": ledger.answers,
        "most_at_once": max(at_once for at_once, _ in PHASES),
        "sorts": dict(sorted(ledger.sorts.items())),
        "outcomes": dict(sorted(ledger.outcomes.items())),
        "ended_on_the_server": {
            name.partition("/")[2]: int(after[name])
            for name in sorted(after)
            if name.startswith("request_success_total/")
        },
        "requests_a_second": round(num / (time.monotonic() - begin)),
        "violations": len(problems),
        "examples": problems[:5],
    }
