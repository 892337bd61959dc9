"""`python -m bench.startup`: how long `import headrace`, `headrace --version` and `headrace --help` take.

Each runs in a new process. Prints one JSON object: the median, the quickest and the slowest of n, in milliseconds,
beside a bare interpreter's. A figure, not a test: what the tests guard is that no heavy library is loaded
(tests/laws/test_startup.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python": ["-c", "pass"],
    "import headrace": ["-c", "import headrace"],
    "headrace --version": ["-m", "headrace", "--version"],
    "headrace --help": ["-m", "headrace", "--help"],
}


def seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=__doc__)
    parser.add_argument("-n", type=int, default=11, help="times each is run (default: %(default)s)")
    count = parser.parse_args().n
    for arguments in COMMANDS.values():
        seconds(arguments)  # fills the page cache and writes the bytecode
    # Interleaved, so that a busy moment of the machine falls on all of them alike.
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(count):
        for name, arguments in COMMANDS.items():
            times[name].append(seconds(arguments))
    figures = {
        name: {
            "median_ms": round(statistics.median(values) * 1e3, 1),
            "min_ms": round(min(values) * 1e3, 1),
            "max_ms": round(max(values) * 1e3, 1),
        }
        for name, values in times.items()
    }
    print(json.dumps({"bench": "startup", "n": count, **figures}))


if __name__ == "__main__":
    main()
