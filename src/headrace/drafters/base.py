"""The interface between drafters and their callers: `Context` goes in, a `Draft` comes out.

Holds `Context` (a drafter's view of a sequence), `Drafter` (the protocol that each method implements), `Guide`
(how drafters with logits choose tokens) and `Target` (the model that is drafted for). A draft cannot change the output:
the target's own sample decides. Knows tokens and rows of numbers; must not know the scheduler, requests or the server.
Implemented by the other files of this folder, called by `drafters.speculator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Draft

if TYPE_CHECKING:
    from headrace.backends.base import Backend
    from headrace.models import Model

F32 = NDArray[np.float32]


@dataclass(slots=True)
class Context:
    """A sequence to draft for.

    `tokens` are all known ones, prompt first; the target has computed all but the last of them, or fewer. The list is
    valid until `propose` returns. A draft is at most `num_drafts` (at least 1) tokens deep and has at most `num_nodes`
    tokens in all. `state` is the sampler's state after the last token.
    """

    seq_id: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    num_drafts: int
    num_nodes: int
    state: float | None = None


class Drafter(Protocol):
    """One method of drafting. No tokens of a sequence make it raise; without a guess it returns an empty draft.

    A sequence may be unknown, or have more tokens than at the last call (it was not drafted for, was preempted, or has
    a long prompt): `tokens` is always complete, and a drafter keeps data of a sequence only to save time. Most drafters
    need neither features nor outcomes, and inherit methods that ignore them.
    """

    feature_layers: tuple[int, ...] | None = None
    """None: the drafter needs tokens alone. (): it needs the target's hidden states after the final norm. Otherwise:
    the residual stream before the layers of these ids (num_layers: after the last), side by side."""

    looks_back: bool = False
    """Whether a draft depends on tokens alone and takes some microseconds: then guesses about text that is known show
    at no cost in rows what drafts are worth. Such guesses are asked for with ever more tokens of a sequence, too."""

    def observe(self, seq_id: int, start: int, token_ids: list[int], features: F32) -> None:
        """Take in the target's `features` [len(token_ids), F] of positions `start` ... of a sequence, whose tokens are
        `token_ids`. The array is valid until this returns. Called only for drafters that need features, without the
        rows of rejected draft tokens."""
        return None

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """Return a draft for each of the sequences."""
        ...

    def verified(self, seq_id: int, draft: Draft, best: list[int], accepted: list[int]) -> None:
        """Take in the outcome of a draft: `best[i]` is the target's likeliest token after node i (-1: not computed),
        `accepted` are the accepted nodes, in their order."""
        return None

    def drop(self, seq_id: int) -> None:
        """Forget a sequence that has ended or begins anew. An unknown one is no error."""
        ...

    def close(self) -> None:
        """Free the memory. May be called twice."""
        ...


class Guide(Protocol):
    """How drafters with logits choose tokens as the target would.

    Rows of `logits` [S, V] are for the token after `contexts[i].tokens` + `tails[i]`.
    """

    def choose(self, logits: F32, contexts: Sequence[Context], tails: Sequence[list[int]]) -> list[int]:
        """Return one token per row, of the whole vocabulary.

        Coupled: the token that the target's sampler, with the target's noise, would take of these logits; it is the
        likeliest to be accepted. Rejection sampling: a token drawn from the row's filtered distribution with separate
        noise; the guide keeps that distribution for verification.
        """
        ...

    def rank(
        self, logits: F32, contexts: Sequence[Context], tails: Sequence[list[int]], width: int
    ) -> tuple[NDArray[np.int64], F32]:
        """Return the `width` best tokens of each row [S, width] by the same measure, best first, and the natural
        logarithm of each one's probability [S, width] under the row's softmax at temperature 1: trees are grown by
        it. Never called under rejection sampling, which verifies chains."""
        ...

    @property
    def rejects(self) -> bool:
        """Whether drafts are verified by rejection sampling: drafters with logits then draft chains, never trees."""
        ...

    def take_probs(self, seq_id: int) -> F32 | None:
        """Return and forget the distributions [n, V] that `choose` drew a sequence's tokens from, in their order; None
        if it did not draw."""
        ...


class Target(NamedTuple):
    """The model that is drafted for, and the parts of the engine that a drafter may use.

    A drafter is made before the target's `Program`, which is made with the drafter's `feature_layers` and whose KV
    cache takes the memory that the drafter leaves. `directory` may be a GGUF file; `config` are the values of
    config.json. `kv_dtype` and `quantization` are the target's. `load` reads another model: (directory,
    quantization, max_model_len) -> its backend, the model, its config; it raises the errors of
    `engine.library.load.load_model`. `compare_tokenizers` compares the tokenizer of another model's directory with the
    target's: it raises `CheckpointError` where their ids stand for other tokens, and returns False where one of the two
    is missing.
    """

    model: Model
    backend: Backend
    directory: Path
    config: dict[str, Any]
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_threads: int
    kv_dtype: str
    quantization: str | None
    guide: Guide
    load: Callable[[Path, str | None, int], tuple[Backend, Model, dict[str, Any]]]
    compare_tokenizers: Callable[[Path], bool] = lambda directory: False
