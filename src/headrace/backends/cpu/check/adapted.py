"""What the records of adapters should give, for `verify`. Imports torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.quant.arrays import BF16, floats

Expected = dict[str, Tensor]


def _weights(view: Any, slot: int, part: int, name: str, width: int) -> Tensor:
    """Return a matrix [rank, width] of an adapter out of the table."""
    entry = view["table"][slot, part]
    num, ld, dtype = int(entry["rank"]), -(-width // 16) * 16, (np.float32, np.float16, BF16)[entry["type"]]
    raw = ctypes.string_at(int(entry[name]), num * ld * np.dtype(dtype).itemsize)
    return torch.from_numpy(floats(np.frombuffer(raw, dtype).reshape(num, ld)[:, :width]).copy())


def _adapted(view: Any, out: Tensor, add: Callable[[int, int, list[int]], None]) -> Expected:
    """Call `add` with the slot, the part and the rows of each tile; it changes `out`."""
    tiles, rows = view["tiles"], view["list"]
    for first, num, slot in tiles[1 : 1 + 3 * tiles[0]].reshape(-1, 3).tolist():
        for part in range(view["parts"]):
            if view["table"][slot, part]["rank"]:
                add(slot, part, rows[first : first + num].tolist())
    return {"out": out}


def adapt_in(view: Any) -> Expected:
    max_rank, x = view["max_rank"], view.rows(view["num_in"])
    out = view.rows(view["parts"] * max_rank, "out", "ld_out").clone()

    def add(slot: int, part: int, rows: list[int]) -> None:
        a, scale = _weights(view, slot, part, "a", view["num_in"]), float(view["table"][slot, part]["scale"])
        out[rows, part * max_rank : part * max_rank + len(a)] = x[rows] @ a.T * scale

    return _adapted(view, out, add)


def adapt_out(view: Any) -> Expected:
    max_rank, begins = view["max_rank"], view["begins"]
    x, out = view.rows(view["parts"] * max_rank), view.rows(int(begins[-1]), "out", "ld_out").clone()
    residual = None if view["residual"] is None else view.rows(int(begins[-1]), "residual", "ld_res")

    def add(slot: int, part: int, rows: list[int]) -> None:
        b = _weights(view, slot, part, "b", int(begins[part + 1] - begins[part]))
        first, entry, columns = part * max_rank, view["table"][slot, part], slice(begins[part], begins[part + 1])
        y = out[rows, columns]
        added = x[rows, first : first + len(b)] @ b
        if entry["gains"]:
            width = -(-b.shape[1] // 16) * 16
            raw = ctypes.string_at(int(entry["gains"]), 8 * width)
            gain, shift = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(2, width)[:, : b.shape[1]]
            product = y if residual is None else y - residual[rows, columns]
            added += (product * gain + shift) * float(entry["scale"])
        out[rows, columns] = y + added

    return _adapted(view, out, add)
