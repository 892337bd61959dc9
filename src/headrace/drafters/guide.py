"""`SamplerGuide`: the target's own sampler, on logits of a drafter.

It returns the token that the target would sample if the drafter's logits were its own: with the same filters, penalties
and noise, without log-probabilities and grammars, which only the answer needs. Called by drafters that have logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.drafters.base import F32, Context
from headrace.protocol.params import SamplingParams
from headrace.sampling import noise
from headrace.sampling.rejection import pick
from headrace.sampling.sampler import Row, Sampler

MAX_PARAMS = 1024


class SamplerGuide:
    """`Guide` over `sampler`. `rejects`: drafts are verified by rejection sampling."""

    def __init__(self, sampler: Sampler, rejects: bool = False) -> None:
        self.rejects = rejects
        self._sampler = sampler
        # The distributions of each sequence's draft tokens, until the speculator takes them.
        self._probs: dict[int, list[F32]] = {}
        # By the id() of the parameters, which is unique while they are kept here.
        self._params: dict[int, tuple[SamplingParams, SamplingParams]] = {}

    def choose(self, logits: F32, contexts: Sequence[Context], tails: Sequence[list[int]]) -> list[int]:
        rows = self._rows(contexts, tails)
        if self.rejects:
            return self._draw(logits, rows, contexts, tails)
        samples = self._sampler.sample_rows(logits, rows)
        return [
            _best(x) if isinstance(each, ValueError) else each.token_id for x, each in zip(logits, samples, strict=True)
        ]

    def rank(
        self, logits: F32, contexts: Sequence[Context], tails: Sequence[list[int]], width: int
    ) -> tuple[NDArray[np.int64], F32]:
        rows = self._rows(contexts, tails)
        rankings = self._sampler.rank(logits, rows, width)
        token_ids = np.zeros((len(rows), width), np.int64)
        shares = np.full((len(rows), width), -np.inf, np.float32)
        for i, (x, ranking) in enumerate(zip(logits, rankings, strict=True)):
            best = np.array([_best(x)]) if isinstance(ranking, ValueError) else ranking
            greatest = float(x.max())
            log_sum = greatest + float(np.log(np.exp(x - greatest, dtype=np.float64).sum()))
            token_ids[i, : len(best)] = best
            shares[i, : len(best)] = x[best] - log_sum
        return token_ids, shares

    def take_probs(self, seq_id: int) -> F32 | None:
        probs = self._probs.pop(seq_id, None)
        return None if probs is None else np.stack(probs)

    def _draw(self, logits: F32, rows: list[Row], contexts: Sequence[Context], tails: Sequence[list[int]]) -> list[int]:
        token_ids: list[int] = []
        pools = self._sampler.shares(logits, rows)
        for x, row, pool, context, tail in zip(logits, rows, pools, contexts, tails, strict=True):
            probs = np.zeros(len(x), np.float32)
            if isinstance(pool, ValueError):
                token_id = _best(x)
                probs[token_id] = 1.0
            else:
                # The draw uses the probabilities that verification will see, to the last bit.
                probs[pool[0]] = pool[1]
                chances = probs[pool[0]].astype(np.float64)
                token_id = pick(pool[0], chances / chances.sum(), row.params.seed or 0, row.position, noise.DRAFT)
            token_ids.append(token_id)
            self._probs[context.seq_id] = [*self._probs.get(context.seq_id, [])[: len(tail)], probs]
        return token_ids

    def _rows(self, contexts: Sequence[Context], tails: Sequence[list[int]]) -> list[Row]:
        return [
            Row(
                params=self._plain(context.params),
                position=len(context.tokens) + len(tail),
                num_prompt=context.num_prompt,
                history=[*context.tokens, *tail] if context.params.needs_history else [],
                state=context.state,
            )
            for context, tail in zip(contexts, tails, strict=True)
        ]

    def _plain(self, params: SamplingParams) -> SamplingParams:
        entry = self._params.get(id(params))
        if entry is not None:
            return entry[1]
        if len(self._params) >= MAX_PARAMS:
            self._params.clear()
        plain = params
        if params.logprobs is not None or params.structured_outputs is not None:
            plain = msgspec.structs.replace(params, logprobs=None, structured_outputs=None)
        self._params[id(params)] = params, plain
        return plain


def _best(x: F32) -> int:
    """Return a token for a row from which the sampler draws none: any token would do."""
    return int(np.argmax(np.nan_to_num(x, nan=-np.inf)))
