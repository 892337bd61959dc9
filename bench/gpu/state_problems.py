"""Problems and probes for the kernels of layers with a state: convolution, delta rule, Mamba2's scan, softplus."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.device import Device
from bench.gpu.problems import Problem, Tensors, normal, poisoned
from headrace.backends.cuda.kernels import conv, recur, softplus
from headrace.backends.cuda.kernels.recur import StateRows
from headrace.backends.cuda.launch import Config, Launch
from headrace.backends.states import DeltaInputs, ScanInputs, StateHeads

OPS = ("conv", "delta", "scan")
KERNEL_SIZE = 4
CUTS = (7, 1)
"""Sizes of chunks whose bits are those of one chunk."""


def step_of(lens: Sequence[int], reads: Sequence[int], writes: dict[int, int]) -> Tensors:
    """The ints of a step: chunks of `lens` rows from the slots `reads`; `writes`: slots by row."""
    begins = list(itertools.accumulate(lens, initial=0))
    slots = [writes.get(row, -1) for row in range(begins[-1])]
    ints = {"sizes": [begins[-1], len(lens), 0], "row_begin": begins, "state_in": list(reads), "state_out": slots}
    return {name: torch.tensor(values, dtype=torch.int32) for name, values in ints.items()}


def rows_of(t: Tensors) -> StateRows:
    return StateRows(t["sizes"], t["row_begin"], t["state_in"], t["state_out"])


def inputs_of(op: str, num_rows: int, heads: StateHeads, dtype: torch.dtype) -> Tensors:
    """Inputs and constants of an operator. A convolution has the columns of all values."""
    keys, values = heads.num_key_heads * heads.key_dim, heads.num_heads * heads.value_dim
    x = normal(num_rows, values, dtype=dtype)
    if op == "conv":
        return {"x": x, "weight": normal(KERNEL_SIZE, values, seed=1) / 2, "bias": normal(values, seed=2)}
    scale = heads.key_dim**-0.5
    tensors = {"value": x, "query": (normal(num_rows, keys, seed=3) * scale).to(dtype)}
    tensors["key"] = (normal(num_rows, keys, seed=4) * scale).to(dtype)
    decay = normal(num_rows, heads.num_heads, seed=5).abs() / 4
    if op == "delta":
        return tensors | {"decay": -decay, "beta": normal(num_rows, heads.num_heads, seed=6).sigmoid().to(dtype)}
    rates = {"a": -normal(heads.num_heads, seed=7).abs(), "d": normal(heads.num_heads, seed=8)}
    return tensors | {"decay": decay} | rates


def state_of(op: str, heads: StateHeads, num_slots: int) -> Tensor:
    if op == "conv":
        return normal(num_slots, KERNEL_SIZE - 1, heads.num_heads * heads.value_dim, seed=9)
    return normal(num_slots, heads.num_heads, heads.key_dim, heads.value_dim, seed=9)


def launches_of(op: str, t: Tensors, heads: StateHeads, num_chunks: int, config: Config | None = None) -> list[Launch]:
    """The launches over the step in `t`, for a bucket of as many rows as `out` has."""
    rows, out, state = rows_of(t), t["out"], t["state"]
    if op == "conv":
        return conv.conv(
            t["x"], t["weight"], t["bias"], "silu", out, state, rows, len(out), num_chunks, config=config
        )  # fmt: skip
    query, key, value, decay = (t[name] for name in ("query", "key", "value", "decay"))
    if op == "delta":
        return [recur.delta(DeltaInputs(query, key, value, decay, t["beta"]), heads, out, state, rows, num_chunks, 0.5)]
    inputs = ScanInputs(value, key, query, decay, t["a"], t["d"])
    return [recur.scan(inputs, heads, out, state, rows, num_chunks)]


def state_problem(op: str, lens: Sequence[int], heads: StateHeads, dtype: torch.dtype) -> Problem:
    """Chunks that begin in turn with zeros and with a state, and leave states behind their last row and one before."""
    num_rows, ends = sum(lens), list(itertools.accumulate(lens))
    reads = [-1 if i % 2 else i for i in range(len(lens))]
    writes = {end - 1: len(lens) + i for i, end in enumerate(ends)}
    writes |= {end - lens[i] // 2: 2 * len(lens) + i for i, end in enumerate(ends) if lens[i] > 3}
    tensors = inputs_of(op, num_rows, heads, dtype) | step_of(lens, reads, writes)
    state = state_of(op, heads, 3 * len(lens))
    tensors |= {"state": state, "out": poisoned(num_rows + 1, heads.num_heads * heads.value_dim, dtype=dtype)}
    wide = {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}
    outs, states = [], state.double()
    for end, length, slot in zip(ends, lens, reads, strict=True):
        before = torch.zeros_like(states[0]) if slot < 0 else states[slot].clone()
        for row, (y, after) in enumerate(exact_rows(op, wide, heads, range(end - length, end), before), end - length):
            outs.append(y)
            if row in writes:
                states[writes[row]] = after
    exact = {"out": torch.stack(outs), "state": states}

    def make(t: Tensors, config: Config | None) -> Sequence[Launch]:
        return launches_of(op, t, heads, len(lens) + 1, config)

    configs = conv.CONV.configs if op == "conv" else ()
    return Problem(tensors, ("out", "state"), make, exact, configs)


def exact_rows(
    op: str, x: Tensors, heads: StateHeads, rows: range, state: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Yield each row's output and the state after it, in float64."""
    for row in rows:
        if op == "conv":
            inputs = torch.cat([state, x["x"][row : row + 1]])
            state = inputs[1:]
            yield F.silu((x["weight"] * inputs).sum(0) + x["bias"]), state
            continue
        group = heads.num_heads // heads.num_key_heads
        key, query = (x[name][row].view(-1, heads.key_dim).repeat_interleave(group, 0) for name in ("key", "query"))
        value, decay = x["value"][row].view(heads.num_heads, -1), x["decay"][row]
        state = state * torch.exp(decay if op == "delta" else decay * x["a"])[:, None, None]
        if op == "delta":
            u = (value - torch.einsum("hk,hkv->hv", key, state)) * x["beta"][row][:, None]
        else:
            u = value * decay[:, None]
        state = state + key[:, :, None] * u[:, None, :]
        y = torch.einsum("hk,hkv->hv", query, state)
        yield (0.5 * y if op == "delta" else y + x["d"][:, None] * value).flatten(), state


def softplus_problem(num_rows: int, width: int) -> Problem:
    tensors = {"x": 8 * normal(num_rows, width, dtype=torch.bfloat16), "bias": normal(width, seed=1)}
    tensors |= {"factor": normal(width, seed=2), "sizes": torch.full((3,), num_rows, dtype=torch.int32)}
    tensors["out"] = poisoned(num_rows + 1, width, dtype=torch.float32)
    wide = tensors["x"].double() + tensors["bias"].double()
    exact = torch.logaddexp(torch.zeros(()).double(), wide).clamp(0.01, 20.0) * tensors["factor"].double()

    def make(t: Tensors, _: Config | None) -> Sequence[Launch]:
        return [
            softplus.softplus(
                t["x"], t["bias"], t["factor"], t["out"], t["sizes"], num_rows + 1, low=0.01, high=20.0
            )
        ]  # fmt: skip

    return Problem(tensors, ("out",), make, {"out": exact})


def state_probes(device: Device) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """A sequence in one chunk against the same in pieces, row by row, and in company."""
    sizes = {"conv": (16, 1, 128), "delta": (16, 128, 128), "scan": (16, 256, 64)}
    for op, (num_heads, key_dim, value_dim) in sizes.items():
        heads = StateHeads(2, 1, 8, 8) if device.toy else StateHeads(num_heads, num_heads // 2, key_dim, value_dim)
        yield f"chunks: {op} {heads.key_dim}x{heads.value_dim}", lambda op=op, heads=heads: cut(device, op, heads)  # type: ignore[misc]


def cut(device: Device, op: str, heads: StateHeads) -> dict[str, Any]:
    num_rows = 9 if device.toy else 150
    x = {name: each.to(device.name) for name, each in inputs_of(op, num_rows, heads, torch.float32).items()}
    per_row = [name for name in x if name not in ("weight", "bias", "a", "d")]

    def computed(lens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """All rows, one chunk after the other, and the state at the end."""
        state = state_of(op, heads, 2).to(device.name)
        out = torch.full((num_rows, heads.num_heads * heads.value_dim), torch.nan, device=device.name)
        begin, slot, listed = 0, -1, []
        for turn, length in enumerate(lens):
            rows = slice(begin, begin + length)
            step = step_of([length], [slot], {length - 1: turn % 2})
            t = x | {name: x[name][rows] for name in per_row} | {"state": state, "out": out[rows]}
            t |= {name: each.to(device.name) for name, each in step.items()}
            listed += launches_of(op, t, heads, 1)
            begin, slot = begin + length, turn % 2
        device.run(listed)
        return out, state[slot]

    whole, last = computed([num_rows])
    wrong = {}
    for size in CUTS:
        out, state = computed([size] * (num_rows // size) + [num_rows % size] * (num_rows % size > 0))
        if count := int((out != whole).sum() + (state != last).sum()):
            wrong[f"chunks of {size}"] = count
    # The same rows as the second of two chunks, in a bucket of more.
    twice = {name: torch.cat([x[name].flip(0), x[name]]) for name in per_row}
    step = step_of([num_rows] * 2, [-1, -1], {2 * num_rows - 1: 1})
    t = x | twice | {name: each.to(device.name) for name, each in step.items()}
    t |= {"state": state_of(op, heads, 2).to(device.name), "out": whole.new_full((2 * num_rows, whole.shape[1]), 0.0)}
    device.run(launches_of(op, t, heads, 2))
    if count := int((t["out"][num_rows:] != whole).sum() + (t["state"][1] != last).sum()):
        wrong["in company"] = count
    return {"rows": num_rows, "wrong": wrong, "fault": "other bits" if wrong else ""}
