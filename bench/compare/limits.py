"""The limits of the machine, by headrace's own native probe: read bandwidth and int8 operations.

The probe has a process of its own, so a missing or failing native core does not end the run: the
table has the reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench.compare.environments import THREADS

PROBE = """
import json, sys
try:
    from headrace import _native
    probe = _native.limits
except (ImportError, AttributeError) as error:
    print(json.dumps({"error": f"the native core has no probe: {error}"}))
else:
    print(json.dumps([dict(row) for row in probe(int(sys.argv[1]), float(sys.argv[2]))]))
"""

# What the probe calls our two figures, and the unit that we give them in.
NAMES = {"bandwidth": ("read", 1e9), "int8": ("int8", 1e12)}


def probe(environment: Mapping[str, str], seconds: float) -> dict[str, float | str]:
    """{"bandwidth": GB/s (1e9), "int8": TOPS (1e12)}, or {"error": why not}."""
    command = [sys.executable, "-c", PROBE, str(THREADS), str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=dict(environment), timeout=60 + 10 * seconds)
    except subprocess.TimeoutExpired:
        return {"error": "the native probe did not end"}
    if done.returncode:
        return {"error": f"the native probe ended with status {done.returncode}: {done.stderr.strip()[-200:]}"}
    return best_rates(json.loads(done.stdout.strip().splitlines()[-1]))


def best_rates(reply: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, float | str]:
    """The highest rate of the ISAs, by our names, from the probe's reply: {"error": ...} or one row for each rate."""
    if isinstance(reply, Mapping):
        return {"error": str(reply.get("error", "the native probe gave no reply"))}
    rates_by_name: dict[str, float | str] = {}
    for ours, (theirs, unit) in NAMES.items():
        rates = [float(row["rate"]) for row in reply if row["what"] == theirs]
        if not rates:
            return {"error": f"the native probe gave no {theirs} rate"}
        rates_by_name[ours] = max(rates) / unit
    return rates_by_name
