"""`Stamps` places an engine's times on the front's clock.

Clocks of two hosts have nothing in common: only the engine's own clock is subtracted from an engine's time, and the
difference from the front's clock when the message comes. How long a message was under way is unknown, and counts as
none. All times that an engine sends are here: of steps, of their notes, and of the prefix cache. Called by `link`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headrace.core.journal import Admission, Arrival, decode_note
from headrace.engine.cache_tree import CacheTree
from headrace.protocol import frames
from headrace.protocol.step import StepOutput

_tree: msgspec.msgpack.Decoder[CacheTree | str | int] = msgspec.msgpack.Decoder(CacheTree | str | int)


class Stamps:
    """The times of one engine. Steps come in order, and none begins before the one before has ended."""

    def __init__(self) -> None:
        self._sent_times: dict[str, list[float]] = {}
        self._step_id = -1
        self._start = self._end = 0.0

    def note_sent(self, request_id: str, times: list[float]) -> None:
        """Keep the times of a request's `Add`, which the front's own clock showed."""
        self._sent_times[request_id] = times

    def forget(self, request_id: str) -> None:
        self._sent_times.pop(request_id, None)

    def stamp(self, output: StepOutput, clock: float, now: float) -> None:
        """Change all times in `output`, which was sent when the engine's clock showed `clock`, and came `now`."""
        if output.step_id < 0:
            return
        here: Callable[[float], float] = lambda time: min(now, now - (clock - time))  # noqa: E731
        if output.step_id != self._step_id:
            last = self._end
            self._step_id = output.step_id
            self._start, self._end = max(last, here(output.start_time)), max(last, here(output.end_time))
            if output.note:
                note = decode_note(output.note)
                scheduled, computed = (max(self._start, here(time)) for time in note.step.times[1:3])
                note.step.times = (self._start, scheduled, computed, self._end)
                note.step.arrivals = [self._arrival(each, here) for each in note.step.arrivals]
                note.step.admissions = [_admission(each, here) for each in note.step.admissions]
                output.note = msgspec.msgpack.encode(note)
        output.start_time, output.end_time = self._start, self._end

    def _arrival(self, arrival: Arrival, here: Callable[[float], float]) -> Arrival:
        *before, read = map(here, arrival.times)
        before = self._sent_times.pop(arrival.request_id, before)
        return msgspec.structs.replace(arrival, times=[*before, max(before[-1], read)])

    def stamp_reply(self, reply: frames.Reply, clock: float, now: float) -> frames.Reply:
        """Return the view of a prefix cache with its times changed, and a fingerprint or a number as it is."""
        tree = _tree.decode(reply.body)
        if not isinstance(tree, CacheTree):
            return reply
        shift = round(1e6 * (now - clock))
        nodes = [
            msgspec.structs.replace(node, last_use=node.last_use + shift) if node.last_use else node
            for node in tree.nodes
        ]
        return frames.Reply(reply.order_id, msgspec.msgpack.encode(msgspec.structs.replace(tree, nodes=nodes)))


def _admission(admission: Admission, here: Callable[[float], float]) -> Admission:
    evicted_time = here(admission.evicted_time) if admission.evicted_time else 0.0
    return msgspec.structs.replace(admission, evicted_time=evicted_time)
