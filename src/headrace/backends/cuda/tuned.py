"""Configs that were measured to be the fastest, by GPU, kernel, shape and rows.

`tuned/<gpu>.json` is written by `python -m bench.gpu tune`. All configs of a kernel give the same bits, so the choice
may follow the rows of a bucket. A shape that no file has, and more rows than were measured, get the kernel's default.
Called by `tape` and `program`.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from headrace.backends.cuda.launch import Config
from headrace.quant.schemes import Scheme

FOLDER = Path(__file__).with_name("tuned")

Table: TypeAlias = Mapping[str, Mapping[str, Mapping[str, str]]]
"""Kernel -> shape -> most rows of a bucket -> name of a config."""

HOPPER = "h100-80gb-hbm3"
SAME_CHIP = dict.fromkeys(("h200", "h100-nvl", "h100-pcie", "gh200-480gb", "h20"), HOPPER)
"""GPUs that take the file of another with the same multiprocessors, where they have none of their own."""

logger = logging.getLogger(__name__)


def choose(
    device: torch.device, kernel: str, shape: str, num_rows: int, configs: Sequence[Config], default: Config
) -> Config:
    """Return the config of `configs` that was the fastest for the shape, in the least measured bucket that holds
    `num_rows`; `default` where none was measured."""
    if device.type != "cuda":
        return default
    by_rows = read(gpu_name(device)).get(kernel, {}).get(shape, {})
    return pick(by_rows, num_rows, configs, default)


def pick(by_rows: Mapping[str, str], num_rows: int, configs: Sequence[Config], default: Config) -> Config:
    """Return the config named for `num_rows`; `default` where there is none, or none of that name any more."""
    # The best of few rows may split K, whose scratch for many rows is large.
    bucket = min((bucket for bucket in map(int, by_rows) if bucket >= num_rows), default=None)
    return next((config for config in configs if config.name == by_rows.get(str(bucket))), default)


@functools.cache
def gpu_name(device: torch.device) -> str:
    """Return the name of a GPU's file: "h200" for an NVIDIA H200."""
    words = torch.cuda.get_device_name(device).lower().replace("/", " ").split()
    return "-".join(word for word in words if word not in ("nvidia", "geforce"))


@functools.cache
def read(gpu: str, folder: Path = FOLDER) -> Table:
    """Return the measured configs of a GPU, or of the same chip; none where there is no file, or one that cannot be
    read."""
    path = folder / f"{gpu}.json"
    if not path.exists():
        path = folder / f"{SAME_CHIP.get(gpu, gpu)}.json"
    if not path.exists():
        return {}
    try:
        table: Table = json.loads(path.read_text())["kernels"]
    except (OSError, ValueError, KeyError) as error:
        logger.warning("%s is not used, kernels run in their default configs: %s", path, error)
        return {}
    return table


def matrix_shape(num_out: int, num_in: int, form: str, gated: bool) -> str:
    """Return the key of a linear layer. form: of its weights, such as bfloat16 or i4-64."""
    return f"{num_out}x{num_in} {form}{' gated' * gated}"


def heads_shape(heads: int, kv_heads: int, head_dim: int, query: torch.dtype, cache: torch.dtype) -> str:
    """Return the key of attention."""
    return f"{heads}/{kv_heads}x{head_dim} {dtype_name(query)} {dtype_name(cache)}"


def scheme_key(scheme: Scheme) -> str:
    """Return the name of weights of codes in a linear layer's key."""
    return f"{scheme.book or scheme.kind}-{scheme.group}{'-min' * scheme.has_min}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
