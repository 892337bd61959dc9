"""The fake engine, as a child process that some requests kill: `python -m tests.support.deadly DELAY FD`.

A request whose prompt begins with a key of `DEATHS` ends the process when it has as many tokens as its second prompt
token says. All else is computed as ever.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from tests.support import fake

from headrace.engine.child import main
from headrace.engine.core import EngineCore, Ticket
from headrace.protocol.config import EngineConfig
from headrace.protocol.step import ScheduledBatch

KILL, SEGV, RAISE, FREEZE = 240, 241, 242, 243
CANARY = "xyzzy-prompt-of-a-client"


def die(kind: int) -> None:
    if kind == FREEZE:
        time.sleep(1000)
    if kind == RAISE:
        raise RuntimeError(f"the core is wrong: it was asked {CANARY}")
    os.kill(os.getpid(), signal.SIGKILL if kind == KILL else signal.SIGSEGV)
    time.sleep(10)


def build(config: EngineConfig, delay: float) -> EngineCore:
    core = fake.build(config, delay)
    real = core.executor.start

    def start(batch: ScheduledBatch) -> Ticket:
        for seq in core.scheduler.flight:
            kind, after, *_ = [*seq.request.prompt_token_ids, 0]
            if kind in (KILL, SEGV, RAISE, FREEZE) and len(seq.tokens) - seq.num_prompt >= after:
                die(kind)
        return real(batch)

    core.executor.start = start  # type: ignore[method-assign]
    return core


def command(delay: float = 0.0) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.support.deadly", str(delay))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[2]), lambda config, is_restart: build(config, float(sys.argv[1]))))
