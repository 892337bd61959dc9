"""`python -m tests.campaigns.fleet_server ISA,ISA serve ...` is the headrace command, but that the engines of a fleet
compute with these instruction sets, in turn."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from headrace.cli.main import main
from headrace.engine.links import ENGINE_COMMAND, Link
from headrace.fleet.engines.local import LocalFleet
from headrace.protocol.config import EngineConfig


def run(isas: Sequence[str]) -> None:
    """The command, whose arguments are those of this process from the second on."""
    turns, original = itertools.cycle(isas), LocalFleet._link

    def link(fleet: LocalFleet, engine: EngineConfig, cpus: Sequence[int]) -> Link:
        fleet._command = ("env", f"HEADRACE_ISA={next(turns)}", *ENGINE_COMMAND)
        return original(fleet, engine, cpus)

    LocalFleet._link = link  # type: ignore[method-assign]
    main()


if __name__ == "__main__":
    named = sys.argv.pop(1)
    run(named.split(","))
