"""Drafts by a small model of the same tokenizer (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023).

The sizes of the two vocabularies may differ, as the padding behind the last token does. An id that only one of them has
is never guessed, and a sequence that shows the model such an id gets no draft.

It reads the tokens themselves, so it can begin with any sequence at any place: it computes the tokens that its cache
lacks, at most its window. The start of a window depends on the sequence's length alone, so that drafts depend on the
sequence alone. `TokenDrafter` serves `early_exit` as well. Called by `drafters.speculator`.
"""

from __future__ import annotations

import logging
from itertools import takewhile
from operator import eq

from headrace.backends.base import Backend
from headrace.drafters.base import Context, Target
from headrace.drafters.context import LineRows
from headrace.drafters.files import directory_of
from headrace.drafters.grow import ModelDrafter
from headrace.hub import read_config
from headrace.models import Model
from headrace.models.config import ModelConfig
from headrace.protocol.errors import CheckpointError
from headrace.protocol.speculation import SpeculativeConfig

logger = logging.getLogger(__name__)


class TokenDrafter(ModelDrafter):
    """`Drafter` with a model over the last tokens of a sequence: at most `window`, at least half as many."""

    def __init__(self, model: Model, backend: Backend, spec: SpeculativeConfig, target: Target, window: int) -> None:
        self._half = max(1, window // 2)
        self._vocab_size = model.vocab_size
        super().__init__(model, backend, spec, target, 2 * self._half)

    def reads(self, token_id: int) -> bool:
        return token_id < self._vocab_size

    def job(self, context: Context, keep: set[int]) -> LineRows | None:
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
        if not self.reads(max(missing)):
            return None
        return LineRows(line, missing) if self.private.reserve(line, len(missing), keep) else None


def make(spec: SpeculativeConfig, target: Target) -> TokenDrafter:
    """Load the model that `spec` names. Raises `CheckpointError` if it does not fit the target, and the errors of
    loading a model."""
    directory = directory_of(spec, target, "draft_model")
    window = min(spec.max_model_len, target.max_model_len)
    is_compared = target.compare_tokenizers(directory)
    if directory.is_dir():
        values = read_config(directory)
        config = ModelConfig(values)
        most = config.max_positions() - spec.num_drafts
        if most < 2:
            raise CheckpointError(f"{directory}: {most + spec.num_drafts} positions hold no {spec.num_drafts} guesses")
        if most < window:
            logger.info("the draft model sees the last %d tokens at most; it has no more positions", most)
            window = most
    backend, model, _ = target.load(directory, spec.quantization or target.quantization, window + spec.num_drafts)
    if model.vocab_size != target.vocab_size:
        logger.info(
            "the draft model has %d token ids, the model %d: what one of them lacks is not guessed%s",
            model.vocab_size,
            target.vocab_size,
            "" if is_compared else "; there are no two tokenizers to compare",
        )
    return TokenDrafter(model, backend, spec, target, window)
