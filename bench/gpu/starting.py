"""`python -m bench.gpu.starting MODEL DEVICE`: the time from a new process to the first token, by phases, as JSON.

The weights are random and made on the device, so that no disk is measured; `speed` runs it with an empty Triton cache.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    began = time.perf_counter()
    model, device = sys.argv[1:]
    from bench.gpu import serving, shapes
    from bench.gpu.weights import BLOCK, make_program

    times = {"imports": time.perf_counter() - began}

    def mark(phase: str) -> None:
        times[phase] = time.perf_counter() - began - sum(times.values())

    config = shapes.models(model == "toy")[model]
    length = 40 if model == "toy" else 2048
    program, _ = make_program(config, device, "", length, 8, 2 * length, 8 * (length + BLOCK))
    mark("weights")
    program.whole.prepare()
    mark("kernels and graphs")
    core = serving.make_core(program, 8, 2 * length)
    core.add(serving.make_request(0, length // 2, 2))
    while not any(core.step().token_ids):
        pass
    mark("first token")
    print(json.dumps({"seconds_to_token": time.perf_counter() - began} | times))


if __name__ == "__main__":
    main()
