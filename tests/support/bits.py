"""`python -m tests.support.bits CASES` prints a hash of the logits of each [model, options] of a JSON list."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np

from headrace.backends.step import Chunks
from headrace.engine.library.load import build_runner
from headrace.protocol.config import EngineConfig


def digest(model: str, options: dict[str, Any]) -> str:
    """Return a hash of the logits of sixteen tokens, or the error that the load ends with."""
    try:
        runner, _ = build_runner(EngineConfig(model=model, num_gpu_blocks_override=8, max_model_len=64, **options))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    _, logits = runner.program.forward(Chunks([0], [list(range(3, 19))], [[0, 1]]), list(range(16)))
    bits = hashlib.sha256(np.ascontiguousarray(logits.fetch()).tobytes()).hexdigest()
    runner.program.close()
    return bits


if __name__ == "__main__":
    print(json.dumps([digest(*case) for case in json.loads(sys.argv[1])]))
