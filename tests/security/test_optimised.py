"""S-05: this whole tier once more under `python -O`, where an assert in the package would be gone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.flags.optimize > 0, reason="this is that run")
def test_S_05_the_tier_passes_under_python_O() -> None:
    # pytest makes its own statements of the tests' asserts, so they hold without the interpreter's.
    command = [sys.executable, "-O", "-m", "pytest", str(HERE), "-p", "no:cacheprovider", "-x", "-q"]
    done = subprocess.run(
        [*command, "-W", "ignore::pytest.PytestConfigWarning"], capture_output=True, text=True, cwd=HERE.parents[1]
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"security +(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 100


def test_S_05_control_an_assert_of_these_tests_holds_in_that_run() -> None:
    caught = False
    try:
        assert HERE == "elsewhere"
    except AssertionError:
        caught = True
    if not caught:
        raise RuntimeError("asserts are gone")
