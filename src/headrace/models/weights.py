"""The weights of a model as its model file takes them: by name and shape, whatever the format of the checkpoint.

`Weights` is the only view of a checkpoint that model files and drafters have; its readers implement it. Knows no files
and no formats. Called by the model files and by `drafters`.
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
    """The `cut` of a layer of expert `expert_id` of `num`. parts: sizes of the parts of its outputs, as in `Cut`."""

    expert_id: int
    num: int
    parts: Sequence[int]


Cut: TypeAlias = "Heads | Expert | Sequence[int] | None"
"""How the ranks of a model may cut the outputs of a layer (`parallel.sharding`). `Heads`: between the heads of q, k and
v. Numbers: the outputs are parts of these sizes, and each part is shared out by itself. `Expert`: the same, or one rank
has the whole expert. None: each of the stacked layers is one part."""


class Linear(NamedTuple):
    """Linear layers `names` [num_out, num_in] that a model takes as one matrix, stacked along their outputs.

    transposed: the checkpoint has them as [in, out] (GPT-2's Conv1D). plain: must not be quantised (a router).
    orders: for each layer None, or int64 [num_out]: output i of the matrix is row orders[i] of the checkpoint's tensor.
    cut: how ranks share the outputs out; no effect in a single process. by_shape: the checkpoint may have them as [in,
    out], which their shape says; where it does not, they are [out, in].
    """

    names: Sequence[str]
    num_in: int
    num_outs: Sequence[int]
    bias: bool = False
    transposed: bool = False
    plain: bool = False
    orders: Sequence[NDArray[np.int64] | None] = ()
    cut: Cut = None
    by_shape: bool = False

    def layers(self) -> Iterator[tuple[str, int, NDArray[np.int64] | None]]:
        """Yield the name of each layer, its number of outputs, and its order."""
        return zip(self.names, self.num_outs, self.orders or [None] * len(self.names), strict=True)


class ByHead(NamedTuple):
    """Two matrices for each head, as `Weights.by_head` gives them."""

    keys: list[Matrix]
    values: list[Matrix]

    @staticmethod
    def names(name: str, head: int) -> tuple[str, str]:
        """Return the names of the matrices of a head."""
        return f"{name}.k.{head}", f"{name}.v.{head}"

    @classmethod
    def separate(cls, weights: Weights, name: str, num_in: int, num_heads: int, key_dim: int, value_dim: int) -> ByHead:
        """Read the matrices from `weights` with a tensor for each of them, the keys' already transposed."""
        names = [cls.names(name, head) for head in range(num_heads)]
        return cls(
            [weights.matrix(Linear([first], key_dim, [num_in])) for first, _ in names],
            [weights.matrix(Linear([second], num_in, [value_dim])) for _, second in names],
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
    def by_head(self, name: str, num_in: int, num_heads: int, key_dim: int, value_dim: int) -> ByHead:
        """The linear layer `name`, whose outputs are for each head a key and then a value, as two matrices a head: the
        transposed weights [num_in, key_dim] of the key, and the weights [value_dim, num_in] of the value."""
        ...

    @abstractmethod
    def ends(self, embedding: str, head: str, shape: tuple[int, int], *, tied: bool) -> tuple[Array, Matrix]:
        """The embedding table [V, H] and the head's matrix, both of `shape`; out of one tensor if they are tied. The
        names are without ".weight"."""
        ...


class SplitWeights(Weights, Protocol):
    """`Weights` that can also give a part of a layer's inputs, which drafters need."""

    @abstractmethod
    def columns(self, linear: Linear, first: int, width: int) -> Matrix:
        """As `matrix`, for layers [num_out, width] of which the matrix has the inputs first ... first + num_in - 1."""
        ...
