"""A small model of the same vocabulary drafts (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023).

It reads the tokens themselves, so it can take up any sequence anywhere: it computes the tokens that its cache lacks, at
most its window. Where a window begins depends on the sequence's length alone, so that drafts do too. `TokenDrafter`
serves `early_exit` as well. Called by `drafters.speculator`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import takewhile
from operator import eq

from headrace.backends.base import Backend
from headrace.drafters.base import F32, Context, Target
from headrace.drafters.context import LineRows, PrivateContext
from headrace.drafters.files import directory_of
from headrace.drafters.grow import Grower
from headrace.hub import read_json
from headrace.models import Model
from headrace.models.config import ModelConfig
from headrace.protocol.errors import CheckpointError
from headrace.protocol.speculation import SpeculativeConfig
from headrace.protocol.step import Draft

logger = logging.getLogger(__name__)


class TokenDrafter:
    """`Drafter` with a model over the tokens, of which it reads the last, at most `window` and at least half as
    many."""

    feature_layers: tuple[int, ...] | None = None

    def __init__(
        self,
        model: Model,
        backend: Backend,
        spec: SpeculativeConfig,
        target: Target,
        window: int,
        num_blocks: int | None = None,
    ) -> None:
        width = spec.tree_width if spec.num_nodes > spec.num_drafts else 1
        self._half = max(1, window // 2)
        self.private = PrivateContext(
            model,
            backend,
            target,
            target.kv_dtype if target.kv_dtype in backend.kv_dtypes else backend.dtype,
            2 * self._half + spec.num_drafts,
            target.max_num_seqs * width,
            num_blocks=num_blocks,
        )
        self._grower = Grower(self.private, target.guide, width, feeds=False)

    def observe(self, seq_id: int, start: int, token_ids: list[int], features: F32) -> None:
        return None

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        keep = {context.seq_id for context in contexts}
        jobs, ready = [], []
        for i, context in enumerate(contexts):
            line = self.private.line(context.seq_id)
            start = max(0, len(context.tokens) // self._half - 1) * self._half
            if start != line.start:
                self.private.empty(line, start)
            tokens = context.tokens[start:] if start else context.tokens
            num_same = len(line.tokens)
            if line.tokens != tokens[:num_same]:
                num_same = sum(1 for _ in takewhile(bool, map(eq, line.tokens, tokens)))
            # At least the last token is computed again, for its logits.
            self.private.rewind(line, min(num_same, len(tokens) - 1))
            missing = tokens[len(line.tokens) :]
            if context.num_drafts > 0 and self.private.reserve(line, len(missing), keep):
                jobs.append(LineRows(line, missing))
                ready.append(i)
        drafts = [Draft([]) for _ in contexts]
        if jobs:
            first = self.private.extend(jobs)
            grown = self._grower.grow([contexts[i] for i in ready], [job.line for job in jobs], first)
            for i, draft in zip(ready, grown, strict=True):
                drafts[i] = draft
        return drafts

    def verified(self, seq_id: int, draft: Draft, best: list[int], accepted: list[int]) -> None:
        return None

    def drop(self, seq_id: int) -> None:
        self.private.drop(seq_id)

    def close(self) -> None:
        self.private.close()


def make(spec: SpeculativeConfig, target: Target) -> TokenDrafter:
    """Load the model that `spec` names. Raises `CheckpointError` if it does not fit the target, and what loading a
    model raises."""
    directory = directory_of(spec, target, "draft_model")
    window = min(spec.max_model_len, target.max_model_len)
    if directory.is_dir():
        values = read_json(directory / "config.json")
        config = ModelConfig(values)
        vocab_size = config.integer("vocab_size")
        _verify_vocabulary(vocab_size, target, str(directory))
        most = config.max_positions() - spec.num_drafts
        if most < 2:
            raise CheckpointError(f"{directory}: {most + spec.num_drafts} positions hold no {spec.num_drafts} guesses")
        if most < window:
            logger.info("the draft model sees the last %d tokens at most; it has no more positions", most)
            window = most
    backend, model, _ = target.load(directory, spec.quantization or target.quantization, window + spec.num_drafts)
    _verify_vocabulary(model.vocab_size, target, str(directory))
    return TokenDrafter(model, backend, spec, target, window)


def _verify_vocabulary(vocab_size: int, target: Target, name: str) -> None:
    if vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{name} can not draft: its vocab_size is {vocab_size}, the model's is {target.vocab_size}. A draft model "
            "must have the tokenizer of the model it guesses for"
        )
