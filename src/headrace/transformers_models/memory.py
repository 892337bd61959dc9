"""What a model of transformers carries from token to token, as leaves that lie in headrace's cache.

A model returns an object with its memory: a cache of transformers' own, or lists of tensors. `Plan` is learnt from two
such objects, one token apart: tensors that grew by one along an axis lie by position, tensors that kept their size
are a state, integers that grew by one count tokens. All else is copied from the later object. So a memory is rebuilt at
any position from blocks and slots alone, bit for bit. Knows tensors and slots; must not know models. Called by `model`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from headrace.backends.base import LayerShape
from headrace.backends.torch_ref.cache import LayerCache

Path: TypeAlias = tuple[Any, ...]
"""The place of a leaf: names, indices and keys from the memory down to it."""


class UnknownMemoryError(Exception):
    """A memory in which something is neither kept by position nor a state. The text says which part."""


class Positions(NamedTuple):
    """A tensor that grows along `axis`. shape: of one position, without the axis. window: positions that a row sees,
    its own included, so that one fewer are kept; 0: all."""

    axis: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    window: int = 0

    @property
    def cached(self) -> LayerShape:
        heads, size = self.rows(torch.empty(*self.shape[: self.axis], 1, *self.shape[self.axis :])).shape[1:]
        return LayerShape(heads, size, shares_key=True)

    def rows(self, leaf: Tensor) -> Tensor:
        """The leaf of T positions -> [T, heads, D]."""
        return leaf.movedim(self.axis, 0).reshape(leaf.shape[self.axis], -1, leaf.shape[-1])

    def read(self, cache: LayerCache, table: Tensor, num_tokens: int) -> Tensor:
        """Return the leaf after `num_tokens` tokens of the sequence with this block table."""
        first = max(0, num_tokens - self.window + 1) if self.window else 0
        positions = torch.arange(first, num_tokens, device=table.device)
        size = cache.keys.shape[1]
        slots = table[positions // size] * size + positions % size
        rows = cache.keys.flatten(0, 1).index_select(0, slots).to(self.dtype)
        return rows.view(len(rows), *self.shape).movedim(0, self.axis).contiguous()

    def write(self, leaf: Tensor, cache: LayerCache, slots: Sequence[int]) -> None:
        """Write the last position of a leaf to slots; where the cache rounds, the leaf is rounded too."""
        newest = leaf.narrow(self.axis, leaf.shape[self.axis] - 1, 1)
        rows = self.rows(newest)
        for slot in slots:
            cache.store(rows, None, torch.tensor([slot], device=leaf.device))
        if cache.rounds_to or cache.keys.dtype not in (self.dtype, torch.float32):
            stored = cache.keys.flatten(0, 1)[slots[0]].to(self.dtype)
            newest.copy_(stored.view(1, *self.shape).movedim(0, self.axis))


class State(NamedTuple):
    """A tensor that keeps its size."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def cached(self) -> LayerShape:
        return LayerShape(0, 0, kind=1, states=(self.shape,))


class Plan:
    """The leaves of a memory by their places: `by_position` and `states`, in the order of the model's caches."""

    def __init__(self, earlier: Any, later: Any, num_tokens: int) -> None:
        """num_tokens: that `later` has seen. Raises `UnknownMemoryError`."""
        self._later, self._num_tokens = later, num_tokens
        self.by_position: dict[Path, Positions] = {}
        self.states: dict[Path, State] = {}
        self._counters: set[Path] = set()
        before, after = leaves(earlier), leaves(later)
        if before.keys() != after.keys():
            raise UnknownMemoryError(f"{min(map(_name, before.keys() ^ after.keys()))} comes and goes")
        for path, leaf in after.items():
            if isinstance(leaf, Tensor):
                self._place(path, before[path], leaf)
            elif leaf - before[path] == 1:
                self._counters.add(path)
            elif leaf != before[path]:
                raise UnknownMemoryError(f"{_name(path)} is {before[path]}, and {leaf} a token later")
        if not self.by_position and not self.states:
            raise UnknownMemoryError("nothing is carried from token to token")

    def _place(self, path: Path, before: Any, after: Tensor) -> None:
        if not isinstance(before, Tensor) or before.dim() != after.dim():
            raise UnknownMemoryError(f"{_name(path)} changes its form")
        if not after.dim() or not after.numel():
            if before.shape != after.shape or not torch.equal(before, after):
                raise UnknownMemoryError(f"{_name(path)} is a number that changes")
            return
        if not after.dtype.is_floating_point or after.dtype == torch.float64:
            raise UnknownMemoryError(f"{_name(path)} has numbers of {after.dtype}")
        window = int(getattr(part_at(self._later, path[:-1]), "sliding_window", None) or 0)
        grown = [i for i, (a, b) in enumerate(zip(before.shape, after.shape, strict=True)) if a != b]
        if window and path[-1] in ("keys", "values"):
            grown = [after.dim() - 2]  # it may be full already
        if not grown:
            self.states[path] = State(tuple(after.shape), after.dtype)
            return
        axis, num = grown[0], min(self._num_tokens, window - 1) if window else self._num_tokens
        if len(grown) > 1 or axis == after.dim() - 1 or after.shape[axis] != num:
            raise UnknownMemoryError(f"{_name(path)} grows from {list(before.shape)} to {list(after.shape)}")
        self.by_position[path] = Positions(axis, (*after.shape[:axis], *after.shape[axis + 1 :]), after.dtype, window)

    def rebuilt(self, num_tokens: int, tensors: dict[Path, Tensor]) -> Any:
        """Return the memory after `num_tokens` tokens. tensors: all leaves."""

        def leaf_at(path: Path, leaf: Any) -> Any:
            if path in tensors:
                return tensors[path]
            return leaf + num_tokens - self._num_tokens if path in self._counters else leaf

        return replaced(self._later, leaf_at)


def part_at(memory: Any, path: Path) -> Any:
    """Return the part of a memory at a place."""
    for key in path:
        memory = memory[key] if isinstance(memory, dict | list | tuple) else getattr(memory, key)
    return memory


def leaves(memory: Any) -> dict[Path, Any]:
    """Return the tensors and integers of a memory by their places."""
    by_path: dict[Path, Any] = {}

    def note(path: Path, leaf: Any) -> Any:
        by_path[path] = leaf
        return leaf

    replaced(memory, note)
    return by_path


def replaced(memory: Any, function: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a copy of `memory` with function(path, leaf) in place of each tensor and integer. Configs and modules are
    not looked into."""
    if isinstance(memory, Tensor) or type(memory) is int:
        return function(path, memory)
    if isinstance(memory, dict):
        copied = copy.copy(memory)
        for key, part in memory.items():
            copied[key] = replaced(part, function, (*path, key))
        return copied
    if isinstance(memory, list | tuple):
        parts = [replaced(part, function, (*path, i)) for i, part in enumerate(memory)]
        return parts if isinstance(memory, list) else tuple(parts)
    opaque = isinstance(memory, torch.nn.Module | type) or hasattr(memory, "to_diff_dict")
    if opaque or not type(memory).__module__.startswith("transformers.") or not hasattr(memory, "__dict__"):
        return memory
    copied = copy.copy(memory)
    for key, part in vars(memory).items():
        copied.__dict__[key] = replaced(part, function, (*path, key))
    return copied


def _name(path: Path) -> str:
    return ".".join(map(str, path)) or "the memory"
