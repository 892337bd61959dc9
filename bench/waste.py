"""`python -m bench.waste TRACE ...`: the share of the KV cache's slots that blocks of each size would waste on a trace.

Each request counts at each token of its answer, as if it ran alone: the slots of its blocks, and those of them that no
token fills. Shared prefixes fill their blocks, so they change neither by much. Traces as in `headrace simulate`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.fleet import traces
from headrace.fleet.traces import Call

SIZES = (8, 16, 32, 64, 128, 256)


def waste(calls: Sequence[Call], block_size: int) -> float:
    """Return the share of slots that hold no token, over all steps of all answers."""
    num_slots = num_empty = 0
    for call in calls:
        lengths = np.arange(call.num_prompt, call.num_prompt + call.num_new)
        slots = -(-lengths // block_size) * block_size
        num_slots += int(slots.sum())
        num_empty += int((slots - lengths).sum())
    return num_empty / max(1, num_slots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    for path in parser.parse_args().traces:
        calls = traces.read(path)
        shares = ", ".join(f"{size}: {waste(calls, size):.2%}" for size in SIZES)
        print(f"{path.name}, {len(calls):,} requests; waste by block size: {shares}")


if __name__ == "__main__":
    main()
