"""Models that a backend has no kernels for: what it refuses is left out by its own word, and no list has to name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.harness import load

from headrace.protocol.errors import CheckpointError
from headrace.runner.runner import Runner

REFUSAL = "backend cuda has no kernels for"


def load_or_skip(directory: Path, **options: Any) -> Runner:
    """Load a model. Where the cuda backend refuses it and says what is missing, the test ends as skipped."""
    try:
        return load(directory, **options)
    except CheckpointError as error:
        if options["backend"] != "cuda" or REFUSAL not in str(error):
            raise
        pytest.skip(str(error)[:120])
