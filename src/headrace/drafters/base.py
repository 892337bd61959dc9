"""What a drafter is: somebody who guesses how sequences go on, and is told what became of the guesses.

Owns the words between the runner and the drafters: `Context` (what a drafter is told of a sequence), `Draft` (what it
guesses: a chain or a tree of tokens), `Drafter` (the face), `Target` (the model that is guessed for). A guess can not
change the output: the target's own sample decides. Knows tokens and rows of numbers; must not know the scheduler,
requests or the server. Implemented by the files beside this one, called by `drafters.speculator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.params import SamplingParams

if TYPE_CHECKING:
    from headrace.backends.base import Backend
    from headrace.models import Model

F32 = NDArray[np.float32]


@dataclass(slots=True)
class Context:
    """A sequence whose next tokens are to be guessed.

    `tokens` are all that are known, prompt first; the target has computed all but the last of them, or fewer. The list
    is lent until `propose` returns. At most `num_drafts` tokens deep (at least 1) is worth guessing; a tree may have
    `num_nodes` tokens in all. `state` is the sampler's, after the last token.
    """

    seq_id: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    num_drafts: int
    num_nodes: int
    state: float | None = None


@dataclass(slots=True)
class Draft:
    """Tokens that may follow a sequence; none at all is a good answer too.

    `parents[i]` is the node that node i follows, -1 for the sequence's last token; parents come before their children,
    and no two children of a node have the same token. None: each follows the one before. A tree may hold nodes that are
    no guesses, whose outcome the drafter alone wants (lookahead's): they are verified like others. `probs` [n, V], or
    None if the tokens were chosen without chance: row i is the distribution that token i was drawn from, given the
    siblings before it; only chains have it.
    """

    token_ids: list[int]
    parents: list[int] | None = None
    probs: F32 | None = None


class Drafter(Protocol):
    """One way to guess. Nothing here may raise for what a sequence holds: who can not guess returns an empty draft.

    A sequence may be unknown, or have leapt (its tokens grew while nobody asked; it was preempted; it is new with a
    long prompt): `tokens` is always the truth, and what a drafter holds beside it is only time saved.
    """

    feature_layers: tuple[int, ...] | None
    """None: looks at tokens only. (): wants the target's hidden states after the final norm. Else: wants the residual
    stream before the layers of these ids (num_layers: after the last), side by side."""

    def observe(self, seq_id: int, start: int, token_ids: list[int], features: F32) -> None:
        """The target has computed positions start ... of a sequence, whose tokens there are `token_ids`; row i of
        `features` [len(token_ids), F] belongs to the i-th. Lent until this returns. Only for those who want features;
        rows of rejected drafts are not told."""
        ...

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """A draft for each of the sequences."""
        ...

    def verified(self, seq_id: int, draft: Draft, best: list[int], accepted: list[int]) -> None:
        """What became of a draft: `best[i]` is the target's likeliest token after node i (as far as that was looked
        at; -1 else), `accepted` the nodes that were kept, in their order."""
        ...

    def drop(self, seq_id: int) -> None:
        """The sequence is no more, or starts anew. Unknown ones are no error."""
        ...

    def close(self) -> None:
        """Give back memory. May be called twice."""
        ...


class Guide(Protocol):
    """How drafters that have logits of their own choose tokens as the target would.

    Rows of `logits` [S, V] foretell the token after `contexts[i].tokens` + `tails[i]`.
    """

    def choose(self, logits: F32, contexts: Sequence[Context], tails: Sequence[list[int]]) -> list[int]:
        """For each row the token that the target's own sampler would take, with the target's own noise, were these its
        logits: the guess that is likeliest to be kept when verification is coupled. The whole vocabulary's width."""
        ...

    def rank(
        self, logits: F32, contexts: Sequence[Context], tails: Sequence[list[int]], width: int
    ) -> tuple[NDArray[np.int64], F32]:
        """The `width` best tokens of each row [S, width] by the same measure, best first, and the natural logarithm of
        each one's share [S, width] under the row's softmax at temperature 1: what a tree is grown by."""
        ...

    def draw(self, logits: F32, contexts: Sequence[Context], tails: Sequence[list[int]]) -> tuple[list[int], F32]:
        """For rejection sampling: a token of each row's filtered distribution, drawn with noise of its own, and those
        distributions [S, V]."""
        ...

    @property
    def rejects(self) -> bool:
        """Whether drafts are verified by rejection sampling: drafters with logits then `draw` chains."""
        ...


class Target(NamedTuple):
    """The model that is guessed for, and what a drafter may use of the engine.

    A drafter is made before the target's `Program`, which is told the drafter's `feature_layers` when it is made, and
    whose KV cache takes what memory the drafter leaves. `directory` may be a GGUF file; `config` are the values of
    config.json. `kv_dtype` and `quantization` are the target's own. `load` reads another model: (directory,
    quantization, max_model_len) -> its backend, the model, its config; it raises as `engine.load.load_model` does.
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
