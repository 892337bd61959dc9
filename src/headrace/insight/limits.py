"""How near an engine is to the limits of its machine: `Reads` follows its steps, `limits_of` compares them.

A step that decodes reads all weights once, and the keys and values of all tokens before its rows, so it cannot take
less than these bytes over the memory's bandwidth. The bytes are an upper bound where layers look back a window only, or
use some of their experts. Knows no HTTP and measures nothing itself.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from headrace.core.journal import Step
from headrace.protocol.step import EngineInfo

MAX_STEPS = 256
RECENT_S = 2.0


class DecodeStep(NamedTuple):
    """A step without a chunk of more than one token. Times are monotonic seconds."""

    start_time: float
    ended: float
    num_tokens: int
    num_bytes: int


class Reads:
    """The memory that the decoding steps of an engine read. `total` is their bytes and seconds so far, `best` the most
    bytes a second of one step."""

    def __init__(self) -> None:
        self.weight_bytes = self.token_bytes = 0
        self.total = 0.0, 0.0
        self.best = 0.0
        self.steps: deque[DecodeStep] = deque(maxlen=MAX_STEPS)

    def set_sizes(self, info: EngineInfo) -> None:
        """Set the bytes that a step reads. Nothing is counted before, nor where the engine does not know them."""
        self.weight_bytes, self.token_bytes = info.weight_bytes, info.kv_token_bytes

    def follow(self, step: Step) -> None:
        """Count a step, if all of its chunks are one token long."""
        start_time, ended = step.times[0], step.times[3]
        if not self.weight_bytes or not step.lens or max(step.lens) > 1 or ended <= start_time:
            return
        num_tokens = len(step.lens) + sum(num for _, _, num in step.guesses)
        num_bytes = self.weight_bytes + self.token_bytes * (sum(step.starts) + len(step.starts))
        self.steps.append(DecodeStep(start_time, ended, num_tokens, num_bytes))
        self.total = self.total[0] + num_bytes, self.total[1] + ended - start_time
        self.best = max(self.best, num_bytes / (ended - start_time))


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Measured limits: bytes a second that are read from memory, and operations a second by kind (int8, f32)."""

    bandwidth: float = 0.0
    peaks: dict[str, float] = {}


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a second that decoding steps read, and the share of `limit`: the bandwidth measured on this machine, or the
    fastest step's so far, if that is faster or if nothing `is_measured`."""

    bytes_per_second: float
    limit: float
    share: float
    is_measured: bool


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Decoding over the last `RECENT_S` seconds with steps, and the rates that the machine allows; None where they are
    unknown.

    `bytes_per_step` and `tokens_per_step` are means; without steps, the figures of one sequence without a context.
    `bandwidth` is bytes a second as in `Share.limit`, and `bandwidth_tokens_per_second` the rate that it allows at
    these means. `peaks` are measured operations a second by kind, `peak_kind` the kind that the model uses, and
    `peak_tokens_per_second` the rate that it allows.
    """

    tokens_per_second: float
    tokens_per_step: float
    bytes_per_step: float
    weight_bytes: int
    kv_token_bytes: int
    bandwidth: float | None = None
    is_measured: bool = False
    memory: Share | None = None
    bandwidth_tokens_per_second: float | None = None
    num_parameters: int = 0
    peaks: dict[str, float] = {}
    peak_kind: str = ""
    peak_tokens_per_second: float | None = None


def share_of(num_bytes: float, seconds: float, reads: Reads, machine: Machine) -> Share | None:
    """Return the share of the limit of steps that read `num_bytes` in `seconds`; None for no steps."""
    if not num_bytes or seconds <= 0:
        return None
    limit, rate = max(machine.bandwidth, reads.best), num_bytes / seconds
    is_measured = machine.bandwidth >= reads.best
    return Share(bytes_per_second=rate, limit=limit, share=rate / limit, is_measured=is_measured)


def recent(reads: Reads, now: float) -> list[DecodeStep]:
    """Return the decoding steps of the last `RECENT_S` seconds."""
    return [step for step in reads.steps if step.ended > now - RECENT_S]


def share_now(reads: Reads, machine: Machine, now: float) -> Share | None:
    """Return the share of the limit of the last `RECENT_S` seconds."""
    steps = recent(reads, now)
    num_bytes = sum(step.num_bytes for step in steps)
    return share_of(num_bytes, sum(step.ended - step.start_time for step in steps), reads, machine)


def limits_of(reads: Reads, machine: Machine, num_parameters: int, peak_kind: str, now: float) -> Limits:
    """Return the state at `now`, in monotonic seconds."""
    steps = recent(reads, now)
    num_tokens, num_bytes = sum(step.num_tokens for step in steps), sum(step.num_bytes for step in steps)
    seconds = sum(step.ended - step.start_time for step in steps)
    limit, peak = max(machine.bandwidth, reads.best), machine.peaks.get(peak_kind, 0.0)
    tokens_per_step = num_tokens / len(steps) if steps else 1.0
    bytes_per_step = num_bytes / len(steps) if steps else float(reads.weight_bytes)
    return Limits(
        tokens_per_second=num_tokens / seconds if seconds else 0.0,
        tokens_per_step=tokens_per_step,
        bytes_per_step=bytes_per_step,
        weight_bytes=reads.weight_bytes,
        kv_token_bytes=reads.token_bytes,
        bandwidth=limit or None,
        is_measured=bool(limit) and machine.bandwidth >= reads.best,
        memory=share_of(num_bytes, seconds, reads, machine),
        bandwidth_tokens_per_second=limit * tokens_per_step / bytes_per_step if limit and bytes_per_step else None,
        num_parameters=num_parameters,
        peaks=machine.peaks,
        peak_kind=peak_kind,
        # A token is a multiplication and an addition for each weight.
        peak_tokens_per_second=peak / (2 * num_parameters) if peak and num_parameters else None,
    )
