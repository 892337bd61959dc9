"""`SamplerGuide`: the target's own sampler, on logits of a drafter.

Says which token the target would take, were the drafter's logits its own: with the same filters, penalties and noise.
What only the answer needs (log-probabilities, grammars) is left out. Called by drafters that have logits.
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

MAX_KNOWN = 1024


class SamplerGuide:
    """`Guide` over `sampler`. `rejects`: drafts are verified by rejection sampling."""

    def __init__(self, sampler: Sampler, rejects: bool = False) -> None:
        self._sampler = sampler
        self._rejects = rejects
        # By the parameters' id, which is theirs alone as long as they are held here.
        self._params: dict[int, tuple[SamplingParams, SamplingParams]] = {}

    @property
    def rejects(self) -> bool:
        return self._rejects

    def choose(self, logits: F32, contexts: Sequence[Context], tails: Sequence[list[int]]) -> list[int]:
        rows = self._rows(contexts, tails)
        drawn = self._sampler.sample_rows(logits, rows)
        return [
            _best(x) if isinstance(each, ValueError) else each.token_id for x, each in zip(logits, drawn, strict=True)
        ]

    def rank(
        self, logits: F32, contexts: Sequence[Context], tails: Sequence[list[int]], width: int
    ) -> tuple[NDArray[np.int64], F32]:
        rows = self._rows(contexts, tails)
        ranked = self._sampler.rank(logits, rows, width)
        token_ids = np.zeros((len(rows), width), np.int64)
        shares = np.full((len(rows), width), -np.inf, np.float32)
        for i, (x, best) in enumerate(zip(logits, ranked, strict=True)):
            found = np.array([_best(x)]) if isinstance(best, ValueError) else best
            greatest = float(x.max())
            log_sum = greatest + float(np.log(np.exp(x - greatest, dtype=np.float64).sum()))
            token_ids[i, : len(found)] = found
            shares[i, : len(found)] = x[found] - log_sum
        return token_ids, shares

    def draw(self, logits: F32, contexts: Sequence[Context], tails: Sequence[list[int]]) -> tuple[list[int], F32]:
        rows = self._rows(contexts, tails)
        token_ids: list[int] = []
        shares = np.zeros(logits.shape, np.float32)
        for i, (row, found) in enumerate(zip(rows, self._sampler.shares(logits, rows), strict=True)):
            if isinstance(found, ValueError):
                token_ids.append(_best(logits[i]))
                shares[i, token_ids[-1]] = 1.0
                continue
            # The chances must be those that were drawn with, to the last bit.
            shares[i, found[0]] = found[1]
            chances = shares[i, found[0]].astype(np.float64)
            token_ids.append(pick(found[0], chances / chances.sum(), row.params.seed or 0, row.position, noise.DRAFT))
        return token_ids, shares

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
        known = self._params.get(id(params))
        if known is not None:
            return known[1]
        if len(self._params) >= MAX_KNOWN:
            self._params.clear()
        plain = params
        if params.logprobs is not None or params.structured_outputs is not None:
            plain = msgspec.structs.replace(params, logprobs=None, structured_outputs=None)
        self._params[id(params)] = params, plain
        return plain


def _best(x: F32) -> int:
    """Some token of a row that the sampler takes none from: the guess is as good as any."""
    return int(np.argmax(np.nan_to_num(x, nan=-np.inf)))
