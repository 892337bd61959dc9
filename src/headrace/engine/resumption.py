"""Open requests, and how they go on in a new engine after the old one has died.

`OpenRequest` remembers what a new engine must be told. `Resumption` tells it: those that may have been in the step that
killed the engine one at a time, each when the one before has shown a token. An engine computes the same again, so a
request that killed it will do so again at the same token, and then it is the only one under suspicion; after that has
happened as often as its manner of death demands, it is failed alone. Holds no sockets and no clock; `engine.client`
is the only caller.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable

from headrace.engine.request_stream import RequestStream
from headrace.protocol.errors import HeadraceError
from headrace.protocol.step import Request
from headrace.text.outputs import Delta

# Deaths at the same token, with nobody else under suspicion, after which a request is failed; the second number is for
# SIGKILL, which a machine short of memory or a person sends, and not always for the request's sake.
STRIKES = 2
STRIKES_BY_SIGKILL = 3
PROBE = "probe-"
"""Begins the ids of the server's own requests, which see whether an engine makes tokens."""


class PoisonedRequestError(HeadraceError):
    """The request killed the engine again and again, so it was given up (HTTP 500)."""

    code = "request_killed_engine"


class OpenRequest:
    """One open request: where its deltas go, and what a new engine must be told.

    `work` and `name` are what it was admitted with. `told`: the present engine knows it. `deaths` are the times of
    deaths that it may be to blame for, `num_strikes` those of them in a row, at one token, where nobody else was.
    """

    __slots__ = (
        "arrival_time",
        "deaths",
        "delivered",
        "index",
        "is_suspect",
        "last_time",
        "name",
        "num_cached",
        "num_prompt_logprobs",
        "num_prompt_logprobs_seen",
        "num_strikes",
        "request",
        "started",
        "state",
        "stream",
        "struck_at",
        "told",
        "work",
    )

    def __init__(
        self, request: Request, stream: RequestStream, index: int, arrival_time: float, work: int, name: str
    ) -> None:
        self.request = request
        self.stream = stream
        self.index = index
        self.work = work
        self.name = name
        self.started = False
        self.told = False
        self.is_suspect = False
        self.deaths: list[float] = []
        self.num_strikes = 0
        self.struck_at = -1
        self.num_cached = 0
        self.arrival_time = arrival_time
        self.last_time: float | None = None
        self.delivered = list(request.resume_token_ids)
        self.state = request.resume_state
        self.num_prompt_logprobs = 0
        self.num_prompt_logprobs_seen = 0

    @property
    def is_probe(self) -> bool:
        return self.request.request_id.startswith(PROBE)

    @property
    def shows_no_tokens(self) -> bool:
        """Nothing of it is seen before its end."""
        return self.request.beam is not None or bool(self.request.pooling)

    def accept(self, delta: Delta) -> None:
        """Note what is delivered. A restarted engine tells prompt logprobs from the start: drop the known ones."""
        self.delivered += delta.token_ids
        if delta.prompt_logprobs:
            seen = self.num_prompt_logprobs_seen
            self.num_prompt_logprobs_seen += len(delta.prompt_logprobs)
            delta.prompt_logprobs = delta.prompt_logprobs[max(0, self.num_prompt_logprobs - seen) :]
            self.num_prompt_logprobs += len(delta.prompt_logprobs)
        if self.started:
            delta.num_cached_tokens = None
            delta.start_time = None
        elif delta.num_cached_tokens is not None:
            self.started = True
            self.num_cached = delta.num_cached_tokens

    def resumed(self) -> Request:
        """The request to tell a new engine."""
        self.num_prompt_logprobs_seen = 0
        known = {name: getattr(self.request, name) for name in self.request.__struct_fields__}
        return Request(**(known | {"resume_token_ids": list(self.delivered), "resume_state": self.state}))

    def strike(self) -> None:
        """An engine died with nobody else to blame. Only deaths at one and the same token count."""
        at = len(self.delivered)
        self.num_strikes = self.num_strikes + 1 if at == self.struck_at else 1
        self.struck_at = at


class Resumption:
    """Who is told to the engine when.

    Args:
        tell: sends a request to the engine.
    """

    def __init__(self, tell: Callable[[OpenRequest], None]) -> None:
        self._tell = tell
        self._suspects: collections.deque[OpenRequest] = collections.deque()
        self._rest: collections.deque[OpenRequest] = collections.deque()
        self._most = 1
        self._trial: OpenRequest | None = None

    @property
    def is_over(self) -> bool:
        """Nobody is held back."""
        return self._trial is None and not self._suspects and not self._rest

    def judge(self, entries: Iterable[OpenRequest], most: int, by_sigkill: bool, now: float) -> OpenRequest | None:
        """The engine has died. Returns who has to go for it, if anybody.

        `entries` are all that are open, in their order of arrival; a step holds at most `most` of them. Those in the
        last step are among the ones that had started, and the first `most` of those that had not.
        """
        told = [entry for entry in entries if entry.told]
        sole = self._trial if self._trial is not None else told[0] if len(told) == 1 else None
        self._trial = None
        self._suspects.clear()
        self._rest.clear()
        num_fresh = 0
        for entry in told:
            entry.told = False
            num_fresh += not entry.started
            entry.is_suspect = entry.started or num_fresh <= most
            if entry.is_suspect:
                entry.deaths.append(now)
        if sole is None:
            return None
        sole.strike()
        return sole if sole.num_strikes >= (STRIKES_BY_SIGKILL if by_sigkill else STRIKES) else None

    def begin(self, entries: Iterable[OpenRequest], most: int) -> None:
        """A new engine has shown that it works: tell it of those that are open. It takes `most` at once."""
        self._most = most
        entries = list(entries)
        # Those that were alone with an engine that died come last, so that the others are out of the way.
        self._suspects.extend(sorted((e for e in entries if e.is_suspect), key=lambda e: e.num_strikes))
        self._rest.extend(entry for entry in entries if not entry.is_suspect)
        self._go_on()

    def add(self, entry: OpenRequest) -> None:
        """A new request: told at once, or when those before it are through."""
        if self.is_over:
            self._tell(entry)
        else:
            self._rest.append(entry)

    def saw(self, entry: OpenRequest, ended: bool) -> None:
        """`entry` has got a token, or has ended in whatever way."""
        entry.is_suspect = False
        if ended:
            for held in (self._suspects, self._rest):
                if not entry.told and entry in held:
                    held.remove(entry)
        if entry is self._trial:
            self._trial = None
            self._go_on()

    def _go_on(self) -> None:
        """Tell the next suspect. As many as fill a step wait for each other there, so then all others are told."""
        if self._suspects and self._most > 0:
            self._most -= 1
            self._trial = self._suspects.popleft()
            self._tell(self._trial)
            return
        self._trial = None
        while self._suspects or self._rest:
            self._tell((self._suspects or self._rest).popleft())
