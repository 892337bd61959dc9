"""Makes the drafter and the `Speculator` of a `SpeculativeConfig`.

The file of a method is imported when it is needed, so that prompt lookup loads no model. Called by
`engine.library.load`.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence

from headrace.drafters.base import Drafter, Target
from headrace.drafters.pace import Pace
from headrace.drafters.speculator import Speculator
from headrace.protocol.speculation import SpeculativeConfig

FILES = {"eagle3": "eagle"}
"""Methods whose file has another name."""


def make_drafter(spec: SpeculativeConfig, target: Target) -> Drafter:
    """Make the drafter of `spec.method`. Raises `RequestError` for settings that do not fit the target, and the errors
    of reading a checkpoint."""
    module = importlib.import_module(f"headrace.drafters.{FILES.get(spec.method, spec.method)}")
    drafter: Drafter = module.make(spec, target)
    return drafter


def make_speculator(
    spec: SpeculativeConfig, drafter: Drafter, target: Target, eos_token_ids: Sequence[int]
) -> Speculator:
    """Make the `Speculator`, which the runner calls."""
    return Speculator(
        drafter,
        Pace(spec.num_drafts, spec.num_nodes, spec.method == "lookahead", drafter.looks_back)
        if spec.adaptive
        else None,
        vocab_size=target.vocab_size,
        num_drafts=spec.num_drafts,
        num_nodes=spec.num_nodes,
        max_model_len=target.max_model_len,
        eos_token_ids=eos_token_ids,
        take_probs=target.guide.take_probs if spec.mode == "rejection" else None,
        clock=time.monotonic,
    )
