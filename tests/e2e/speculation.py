"""Speculation put around an engine in a test: a drafter that knows some of what will be said, and any other drafter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random

from headrace.drafters.base import F32, Context
from headrace.drafters.speculator import Speculator
from headrace.engine.core import EngineCore
from headrace.protocol.step import Draft, Request


class Prophet:
    """A drafter that has been told what sequences will be. About `share` of its guesses are right. `tree` lets it
    guess trees."""

    feature_layers: tuple[int, ...] | None = None

    def __init__(self, futures: list[list[int]], vocab_size: int, share: float, tree: bool) -> None:
        self.futures, self.vocab_size, self.share, self.tree = futures, vocab_size, share, tree
        self.rng = Random(0)
        self.num_dropped = 0
        self.fates: list[tuple[int, int]] = []

    def observe(self, seq_id: int, start: int, token_ids: list[int], features: F32) -> None:
        raise AssertionError("it wants no features")

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        return [self.guess(context) for context in contexts]

    def guess(self, context: Context) -> Draft:
        known = context.tokens
        future = next((f[len(known) :] for f in self.futures if f[: len(known)] == known), [])
        right = {-1: 0}
        token_ids: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for _ in range(self.rng.randint(1, context.num_nodes)):
            last = len(token_ids) - 1
            parent = self.rng.randint(-1, last) if self.tree and self.rng.random() < 0.5 else last
            depth = depths[parent] if parent >= 0 else 0
            if depth >= context.num_drafts:
                continue
            place = right.get(parent, -1)
            is_right = 0 <= place < len(future) and self.rng.random() < self.share
            token_id = future[place] if is_right else self.rng.randrange(self.vocab_size)
            if (parent, token_id) in zip(parents, token_ids, strict=True):
                continue
            if is_right:
                right[len(token_ids)] = place + 1
            token_ids.append(token_id)
            parents.append(parent)
            depths.append(depth + 1)
        return Draft(token_ids, parents if self.tree else [])

    def verified(self, seq_id: int, draft: Draft, best: list[int], accepted: list[int]) -> None:
        self.fates.append((len(draft.token_ids), len(accepted)))

    def drop(self, seq_id: int) -> None:
        self.num_dropped += 1

    def close(self) -> None:
        return None


def speculate(
    core: EngineCore, drafter: Prophet, *, num_drafts: int = 4, num_nodes: int = 4, rejects: bool = False
) -> None:
    """Let `core` guess with `drafter` from now on."""
    core.executor.speculator = Speculator(  # type: ignore[attr-defined]
        drafter,
        None,
        vocab_size=core.info.vocab_size,
        num_drafts=num_drafts,
        num_nodes=num_nodes,
        max_model_len=core.info.max_model_len,
        eos_token_ids=core.info.eos_token_ids,
        take_probs=(lambda seq_id: None) if rejects else None,
        clock=time.monotonic,
    )
    core.scheduler.drafts.enabled = True


def futures_of(requests: list[Request], answers: dict[str, list[int]]) -> list[list[int]]:
    return [[*r.prompt_token_ids, *answers[r.request_id]] for r in requests]
