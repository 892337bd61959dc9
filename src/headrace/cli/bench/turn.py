"""`python -m headrace.cli.bench.turn`: one turn of a comparison, in a process of its own. It reads a `compare.Turn` as
JSON from stdin, and prints the result of `offline.measure_throughput` as the last line. Called by `bench.compare`."""

from __future__ import annotations

import sys

import msgspec

from headrace.cli.bench.compare import Turn
from headrace.cli.bench.offline import measure_throughput
from headrace.protocol.errors import HeadraceError


def main() -> None:
    turn = msgspec.json.decode(sys.stdin.buffer.read(), type=Turn)
    try:
        result = measure_throughput(turn.plan, turn.config, turn.goals)
    except (HeadraceError, OSError) as error:
        raise SystemExit(f"headrace: {error}") from error
    print(msgspec.json.encode(result).decode())


if __name__ == "__main__":
    main()
