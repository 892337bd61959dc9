"""The workload to plan for, and the plan: plain structs, for the planner and for the server's process, which does not
plan.

Must not import numpy. Called by `plan.planner`, `headrace plan`, `headrace bench` (goals) and `inspector.planning`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.plan.hardware import Hardware
from headrace.protocol.errors import RequestError

MAX_TOKENS = 2**31
"""Tokens of a sequence, and sequences at once, at most."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The work to plan for: `concurrency` sequences of `context` tokens, of which `output_len` are the answer, in these
    forms. Without a `context` it is the model's own, at most 4,096; without a `concurrency` as many as fit, up to
    `max_num_seqs`. `slo`: goals in milliseconds by ttft, tpot, e2el. `price`: dollars an hour."""

    context: int | None = None
    output_len: int = 256
    concurrency: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    slo: dict[str, float] = {}
    price: float = 0.0


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Times of `batch` sequences that are replaced as they end, in seconds; tokens and requests a second.

    `ttft` is the time of a prompt alone, `tpot` of a step of the whole batch, `tpot_mixed` with the prompts of the
    sequences that come in between. `goodput`: requests a second that keep the goals, with the best batch for that.
    """

    batch: int
    ttft: float
    tpot: float
    tpot_mixed: float
    latency: float
    tokens_per_second: float
    requests_per_second: float
    goodput: float | None = None
    goodput_batch: int | None = None
    dollars_per_million: float | None = None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change after which the plan fits, in the words of the flags, and its outcome."""

    flags: str
    outcome: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a plan: bytes, unless a name says otherwise. `fits`: whether weights and the planned sequences
    have room; `needed_bytes`: the memory of a machine that just has it. `largest_context` is of one sequence,
    `largest_batch` of sequences of `context` tokens. `kv_batch_bytes`: the cache of all `concurrency` sequences, as it
    is kept. `served`: how headrace serves the form: at load, as stored, as a checkpoint, or no; `served_how`: by which
    command, or why not. `step_source`: where the times come from, for the reader."""

    model: str
    model_type: str
    source: str
    parameters: int
    active_parameters: int
    form: str
    forms: dict[str, float]
    served: str
    served_how: str
    weight_bytes: float
    kv_cache_dtype: str
    kv_token_bytes: float
    kv_sequence_bytes: float
    kv_windowed_bytes: float
    kv_batch_bytes: float
    flops_per_token: float
    machine: Hardware
    working_bytes: float
    free_bytes: float
    needed_bytes: float
    context: int
    output_len: int
    max_context: int
    largest_context: int
    largest_batch: int
    concurrency: int
    step_source: str
    fits: bool
    speed: Speed | None = None
    changes: list[Change] = []


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The input of the planner's process: the values of a config.json, or the model `name`, whose files are at `path`.
    `machine`: this one as it was measured; None: the one of the table that `hardware` names."""

    name: str = ""
    path: str = ""
    config: dict[str, Any] | None = None
    hardware: str = ""
    machine: Hardware | None = None
    workload: Workload = Workload()


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """Its reply: a plan, or the field, the value and the bound of an error."""

    plan: Plan | None = None
    error: tuple[str, str | int | float | None, str] | None = None


def parse_goals(goals: Sequence[str], field: str) -> dict[str, float]:
    """Return {'ttft': 200.0, 'tpot': 50.0}, in ms, of ['ttft:200', 'tpot:50']. Raises `RequestError` for `field`."""
    parsed: dict[str, float] = {}
    for goal in goals:
        name, _, text = goal.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if name not in ("ttft", "tpot", "e2el") or not 0 < limit < math.inf:
            raise RequestError(field, goal, "ttft, tpot or e2el, a colon and milliseconds, such as ttft:200")
        parsed[name] = limit
    return parsed
