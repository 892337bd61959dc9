"""The weights of a model as its file takes them: by name and shape, out of whatever they are stored in.

`Weights` is all that model files and drafters see of a checkpoint; its readers implement it. Knows no files and no
formats. Called by the model files and by `drafters`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from headrace.backends.base import Heads

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.backends.base import Array, Matrix


class Expert(NamedTuple):
    """Whose layer it is: expert `expert_id` of `num`. parts: of its outputs, as `Cut` has them."""

    expert_id: int
    num: int
    parts: Sequence[int]


Cut: TypeAlias = "Heads | Expert | Sequence[int] | None"
"""What the outputs of a layer are, where ranks share them out: queries, keys and values of heads, or parts of so many
outputs that are shared out each by itself; those of an expert may be one rank's alone. None: each of the stacked layers
is such a part."""


class Linear(NamedTuple):
    """Linear layers `names` [num_out, num_in] that a model takes as one matrix, stacked along their outputs.

    transposed: the checkpoint has them as [in, out] (GPT-2's Conv1D). plain: must not be quantised (a router).
    orders: for each layer None, or if it is stored in another order: for each output its place in the checkpoint.
    cut: how ranks share the outputs out (`parallel.sharding`); one process has all of them.
    """

    names: Sequence[str]
    num_in: int
    num_outs: Sequence[int]
    bias: bool = False
    transposed: bool = False
    plain: bool = False
    orders: Sequence[NDArray[np.int64] | None] = ()
    cut: Cut = None

    def layers(self) -> Iterator[tuple[str, int, NDArray[np.int64] | None]]:
        """Yield the name of each layer, its number of outputs, and its order."""
        return zip(self.names, self.num_outs, self.orders or [None] * len(self.names), strict=True)


class ByHead(NamedTuple):
    """Two matrices for each head, as `Weights.by_head` gives them."""

    turned: list[Matrix]
    straight: list[Matrix]

    @staticmethod
    def names(name: str, head: int) -> tuple[str, str]:
        """What the matrices of a head are called."""
        return f"{name}.k.{head}", f"{name}.v.{head}"

    @classmethod
    def apart(cls, weights: Weights, name: str, num_in: int, num_heads: int, turned: int, straight: int) -> ByHead:
        """The matrices out of `weights` that have each by itself, the first ones transposed."""
        names = [cls.names(name, head) for head in range(num_heads)]
        return cls(
            [weights.matrix(Linear([first], turned, [num_in])) for first, _ in names],
            [weights.matrix(Linear([second], num_in, [straight])) for _, second in names],
        )


class Weights(Protocol):
    """A checkpoint's tensors, in the form in which a backend computes with them.

    Every method that takes names and shapes raises `CheckpointError` for a tensor that is missing or has another shape.
    """

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether the checkpoint has the tensor `name`."""
        ...

    @abstractmethod
    def has_prefix(self, prefix: str) -> bool:
        """Return whether the name of any tensor starts with `prefix`."""
        ...

    @abstractmethod
    def constant(self, values: Array) -> Array:
        """Numbers that the model computed itself (a rope table) as the backend's operators take them."""
        ...

    @abstractmethod
    def constant_table(self, values: Array) -> Array:
        """As `constant`, for a table [V, H] that `Ops.embedding` looks up."""
        ...

    @abstractmethod
    def tensor(self, name: str, shape: tuple[int, ...]) -> Array:
        """A small tensor (norm, bias) as the backend's operators take it."""
        ...

    @abstractmethod
    def numbers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """A small tensor as float32, to compute a constant from."""
        ...

    @abstractmethod
    def table(self, name: str, shape: tuple[int, int]) -> Array:
        """An embedding table [V, H]; the backend may leave it mapped."""
        ...

    @abstractmethod
    def matrix(self, linear: Linear) -> Matrix:
        """The linear layers of `linear` as one matrix [sum(num_outs), num_in]."""
        ...

    @abstractmethod
    def by_head(self, name: str, num_in: int, num_heads: int, turned: int, straight: int) -> ByHead:
        """The linear layer `name`, whose outputs are for each head `turned` numbers and then `straight` ones, as two
        matrices a head: the transposed weights [num_in, turned] of the first, and [straight, num_in] of the others."""
        ...

    @abstractmethod
    def ends(self, embedding: str, head: str, shape: tuple[int, int], *, tied: bool) -> tuple[Array, Matrix]:
        """The embedding table [V, H] and the head's matrix, both of `shape`; out of one tensor if they are tied."""
        ...


class SplitWeights(Weights, Protocol):
    """`Weights` that can also give a part of a layer's inputs, which drafters need."""

    @abstractmethod
    def columns(self, linear: Linear, first: int, width: int) -> Matrix:
        """As `matrix`, for layers [num_out, width] of which the matrix has the inputs first ... first + num_in - 1."""
        ...
