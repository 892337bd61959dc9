"""Writes an exported model as the package carries it: one byte for each weight, in src/headrace/builtin/model.u8.

    python training/pack.py TARGET OUT

Each matrix gets 256 levels of its own, the centres of its weights (Lloyd, IEEE Trans. Inf. Theory 28(2), 1982), and
each weight the nearest of them; vectors stay as they are. OUT holds model.u8 then, and the files that are shipped with
it. What it unpacks to is written over TARGET's weights, so that drafters are trained on what users get.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace import builtin

ROUNDS = 40


def levels_of(weights: Tensor) -> Tensor:
    """256 bfloat16 numbers, in order, which stand for `weights` with the least square error that Lloyd's rule finds."""
    flat = weights.flatten().double().sort().values
    sums = torch.cat([flat.new_zeros(1), flat.cumsum(0)])
    # Half by how many weights there are, half by how far they reach: else the few large ones go short.
    quantiles = flat[torch.linspace(0, len(flat) - 1, 256).long()]
    centres = (quantiles + torch.linspace(float(flat[0]), float(flat[-1]), 256, dtype=flat.dtype)) / 2
    for _ in range(ROUNDS):
        ends = torch.searchsorted(flat, (centres[1:] + centres[:-1]) / 2)
        bounds = torch.cat([ends.new_zeros(1), ends, ends.new_tensor([len(flat)])])
        counts = bounds.diff()
        means = sums[bounds].diff() / counts.clamp(min=1)
        centres = torch.where(counts > 0, means, centres).sort().values
    return centres.to(torch.bfloat16)


def packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    packed = {}
    for name, weights in tensors.items():
        if weights.ndim < 2:
            packed[name] = weights.to(torch.bfloat16)
            continue
        levels = levels_of(weights)
        between = (levels[1:].float() + levels[:-1].float()) / 2
        packed[name] = torch.searchsorted(between, weights.float()).to(torch.uint8)
        packed[name + builtin.LEVELS] = levels
    return packed


def pack(target: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors, file = packed(load_file(target / "model.safetensors")), out / builtin.STORED
    save_file(tensors, file)
    plain = builtin.unpacked(*builtin.read(file))
    save_file(tensors, file, metadata={builtin.DIGEST: hashlib.sha256(plain).hexdigest()})
    file.chmod(0o644)
    (target / "model.safetensors").write_bytes(plain)
    for name in builtin.BESIDE:
        if target != out:
            shutil.copyfile(target / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="directory written by export.py; its weights become the stored ones")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    pack(args.target, args.out)
    print(f"{(args.out / builtin.STORED).stat().st_size} bytes -> {args.out / builtin.STORED}")


if __name__ == "__main__":
    main()
