"""The draw on the GPU: problems of the kernels around it, and a probe of its tokens against the sampler's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu.device import Device
from bench.gpu.problems import Problem, Tensors, normal, poisoned, sizes
from headrace.backends.cuda.kernels import best, carry, choose
from headrace.backends.cuda.kernels.settle import LEFT
from headrace.backends.cuda.launch import Config, Launch
from headrace.backends.step import Draw

Result = dict[str, Any]
TEMPERATURES = (0.0, 0.7, 1.0, 1.3, 1e-3, 0.05, 30.0, 100.0, 1e-40, 1e35)
TOP_K = (0, 50, 1, 1000, 0, 20000)
TOP_P = (1.0, 0.9, 0.3, 1.0, 0.999, 1e-9, 1 - 2.0**-53)
FLOORS = (-np.inf, -np.inf, -4.0, -np.inf, -0.5)


def carry_problem(num_rows: int) -> Problem:
    """Every third row takes a token of the last step."""
    rows = torch.arange(num_rows + 1, dtype=torch.int32)
    places = torch.where(rows % 3 == 0, rows // 3, -1).int()
    tensors = {"places": places, "tokens": 1000 + rows, "token_ids": -5 - rows, "sizes": sizes(num_rows)}
    exact = torch.where(places >= 0, 1000 + places, -5 - rows).int()
    exact[num_rows] = -5 - num_rows

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        return [carry.carry(t["places"], t["tokens"], t["token_ids"], t["sizes"], num_rows + 1)]

    return Problem(tensors, ("token_ids",), make, {"token_ids": exact})


def report_problem(num_rows: int) -> Problem:
    """Of each row of logits a drawn token, but of every fourth the likeliest; some are not certain, or not finite."""
    rows = torch.arange(num_rows, dtype=torch.int32)
    wholes = torch.zeros(num_rows, 4, dtype=torch.int64)
    wholes[::4, 3] = LEFT
    values = torch.where(rows % 7 == 3, -torch.inf, 1.0)
    margins = torch.where(rows % 5 == 1, 1e-12, 0.5).double()
    tensors = {
        "tokens": rows - 1, "margins": margins, "wholes": wholes, "best": 2 * rows, "finite": (rows % 6 != 2).int(),
        "values": values, "finite_rows": (rows % 2).int(), "margin": torch.full((1,), choose.MARGIN).double(),
        "sizes": sizes(num_rows), "out": poisoned(4 * num_rows + 1, dtype=torch.int32),
    }  # fmt: skip
    ids = torch.where(rows % 4 == 0, 2 * rows, rows - 1).clamp(0, num_rows - 1)
    fit = (rows % 6 != 2) & (rows % 7 != 3)
    sure = (rows % 4 == 0) | (rows % 5 != 1)

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        of_best = t["best"], t["finite"], t["values"]
        choice = t["tokens"], t["margins"]
        return [
            carry.report(choice, t["wholes"], of_best, t["finite_rows"], t["out"], t["margin"], t["sizes"], num_rows)
        ]

    exact = torch.cat((ids, fit.int(), sure.int(), tensors["finite_rows"]))
    return Problem(tensors, ("out",), make, {"out": exact})


def hard_logits(num_rows: int, width: int) -> Tensor:
    """Rows of nine kinds in turn, which float32, bins or parts of a row could get wrong."""
    x = 3 * normal(num_rows, width)
    edges = [*range(0, width, 2048), *range(2047, width, 2048)]
    for row in range(num_rows):
        match row % 10:
            case 2:
                x[row] = (x[row] * 2).round() / 2
            case 3:
                x[row] = 1.5
            case 4:
                x[row, width // 3] = 80.0
            case 5:
                x[row, torch.arange(width) // 1500 % 3 > 0] = -torch.inf
            case 6:
                x[row] = torch.where(x[row] > 0, 0.0, -0.0)
            case 7:
                x[row] = x[row].round() * 1e-45
            case 8:
                x[row] = -30.0
                x[row, edges] = 4.0
            case 9:
                x[row] = -0.175 * (torch.arange(width) * 7 % 256)
    return x


def draws_of(num_rows: int, width: int) -> list[Draw]:
    """Draws of all kinds; rows of one kind of logits meet all temperatures and cuts in turn."""
    rng = np.random.default_rng(0)
    listed = []
    for i in range(num_rows):
        turn = i // 10 + i % 10
        allowed = rng.integers(0, 2**32, -(-width // 32), dtype=np.uint32)
        listed.append(Draw(
            temperature=TEMPERATURES[turn % 10], floor=FLOORS[turn % 5], top_k=TOP_K[(turn // 2) % 6],
            top_p=TOP_P[turn % 7], seed=i * 2**33 + 7, position=i * 2**30, mask=allowed if i % 7 == 6 else None,
        ))  # fmt: skip
    return listed


def drawing(device: Device) -> Result:
    """Rows drawn by the launches of `choose` against the sampler's functions (their twin), for all kinds of logits and
    cuts; again among fewer rows; and what the programs of a row share is reset."""
    shapes = ((20, 300),) if device.toy else ((256, 128_256), (40, 262_144), (40, 32_000), (40, 300))
    result: Result = {"rows": 0, "too_close": 0, "wrong": 0, "other_bits": 0}
    for num_rows, width in shapes:
        logits, draws = hard_logits(num_rows, width), draws_of(num_rows, width)
        ids, margins = drawn(device, logits, draws, device.name)
        expected, their_margins = drawn(device, logits, draws, "cpu")
        close = margins <= choose.MARGIN
        wrong = (ids != expected) & ~close
        # What is too close here is too close for the host too, up to the last bits of a logarithm.
        wrong |= close & ~(their_margins <= 2 * choose.MARGIN)
        few = num_rows // 3
        again, margins_again = drawn(device, logits[:few], draws[:few], device.name)
        other = (again != ids[:few]) | (margins_again != margins[:few])
        result["rows"] += num_rows
        result["too_close"] += int(close.sum())
        result["wrong"] += int(wrong.sum())
        result["other_bits"] += int(other.sum())
        if wrong.any():
            result[f"wrong of {width}"] = [f"{i} {draws[i]._replace(mask=None)}" for i in wrong.nonzero()[:8, 0]]
    faults = [f"{result[name]} {what}" for name, what in WRONG.items() if result[name]]
    return result | {"fault": "; ".join(faults)}


WRONG = {"wrong": "other tokens", "other_bits": "rows differ among others"}


def drawn(device: Device, logits: Tensor, draws: list[Draw], where: str) -> tuple[Tensor, Tensor]:
    """Return tokens and margins, of a GPU or of the twins."""
    num_rows, width = logits.shape
    reals, wholes = torch.zeros(num_rows, 3, dtype=torch.float64), torch.zeros(num_rows, 4, dtype=torch.int64)
    masks = torch.zeros(num_rows, -(-width // 32), dtype=torch.int32)
    choose.pack(list(range(num_rows)), draws, reals.numpy(), wholes.numpy(), masks.numpy())
    x, *packed = (tensor.to(where, copy=True) for tensor in (logits, reals, wholes, masks))
    ids, likeliest, finite = (torch.full((num_rows,), -7, dtype=torch.int32, device=where) for _ in range(3))
    values, margins = torch.zeros(num_rows, device=where), torch.zeros(num_rows, dtype=torch.float64, device=where)
    counts, space = sizes(num_rows).to(where), choose.make_space(num_rows, width, where)
    shared = best.make_space(num_rows, where)
    launches = [
        best.best(x, shared, likeliest, values, finite, counts, 0),
        *choose.choose(x, choose.Packed(*packed), values, space, ids, margins, counts, 0),
    ]
    if where == "cpu":
        for launch in launches:
            launch.run_twin()
    else:
        device.run(launches)
        device.run(launches)
    if any(part.any() for part in (*shared, space.arrived)):
        raise RuntimeError("what the programs of a row share is not reset")
    return ids.cpu(), margins.cpu()
