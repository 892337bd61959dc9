"""`python -m tests.campaigns.fleet_server ISA,ISA serve ...` is the headrace command, but that the engines of a fleet
compute with these instruction sets, in turn."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

from headrace.cli.main import main
from headrace.engine.links import ProcessLink
from headrace.fleet.engines import local
from headrace.protocol.config import EngineConfig


def run(isas: Sequence[str]) -> None:
    """The command, whose arguments are those of this process from the second on."""
    turns = itertools.cycle(isas)

    def link(engine: EngineConfig, command: Sequence[str], *args: Any, **options: Any) -> ProcessLink:
        return ProcessLink(engine, ("env", f"HEADRACE_ISA={next(turns)}", *command), *args, **options)

    local.ProcessLink = link  # type: ignore[assignment, misc]
    main()


if __name__ == "__main__":
    named = sys.argv.pop(1)
    run(named.split(","))
