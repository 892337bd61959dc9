"""Makes the drafter and the `Speculator` that a `SpeculativeConfig` asks for. A method's file is imported when it is
asked for, so that prompt lookup loads no model. Called by `engine.load`.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence

from headrace.drafters.base import Drafter, Target
from headrace.drafters.pace import Pace
from headrace.drafters.speculator import Plan, Speculator, Steady
from headrace.protocol.speculation import SpeculativeConfig

FILES = {"eagle3": "eagle"}
"""Methods whose file is named otherwise."""


def make_drafter(spec: SpeculativeConfig, target: Target) -> Drafter:
    """The drafter of `spec.method`. Raises `RequestError` for what the target can not meet, and what reading a
    checkpoint raises."""
    module = importlib.import_module(f"headrace.drafters.{FILES.get(spec.method, spec.method)}")
    drafter: Drafter = module.make(spec, target)
    return drafter


def make_speculator(
    spec: SpeculativeConfig, drafter: Drafter, target: Target, eos_token_ids: Sequence[int]
) -> Speculator:
    """What the runner holds of speculation."""
    plan: Plan = Steady()
    if spec.adaptive:
        plan = Pace(spec.num_drafts, spec.num_nodes, whole=spec.method == "lookahead")
    return Speculator(
        drafter,
        plan,
        vocab_size=target.vocab_size,
        num_drafts=spec.num_drafts,
        num_nodes=spec.num_nodes,
        max_model_len=target.max_model_len,
        eos_token_ids=eos_token_ids,
        rejects=spec.mode == "rejection",
        clock=time.monotonic,
    )
