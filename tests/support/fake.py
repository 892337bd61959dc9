"""An engine without a model for the server's tests: the real `EngineCore` and scheduler over the simulated executor.

Run as a script it is the child process (`fake.py DELAY VOCAB_SIZE FD`); imported, it builds the same engine in this
process.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from headrace.core.options import SchedulerOptions
from headrace.core.scheduler import Scheduler
from headrace.engine.child import main
from headrace.engine.core import EngineCore
from headrace.insight.simulated import HIDDEN_SIZE, Behaviour, Oracle, SimulatedExecutor
from headrace.protocol.config import EngineConfig
from headrace.protocol.step import EngineInfo

VOCAB_SIZE = 256
EOS = 255


def build(
    config: EngineConfig, delay: float = 0.0, oracle: Oracle | None = None, vocab_size: int = VOCAB_SIZE
) -> EngineCore:
    """`delay` is slept in every step, in seconds. `oracle` says what comes next, if not the usual one."""
    num_blocks = config.num_gpu_blocks_override or 1024
    scheduler = Scheduler(
        SchedulerOptions(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len or 2048,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=config.policy,
            eos_token_ids=[EOS],
            cache_key=b"test",
        )
    )
    info = EngineInfo(
        model=config.model,
        max_model_len=scheduler.max_model_len,
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        eos_token_ids=[EOS],
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_logprobs=config.max_logprobs,
        scheduling_policy=config.policy,
        dtype="none",
        backend="simulated",
        device="cpu",
    )
    executor = SimulatedExecutor(
        num_blocks, config.block_size, oracle or Oracle(vocab_size, [EOS]), Behaviour(delay=delay)
    )
    # A check reads every block.
    return EngineCore(scheduler, executor, info, time.monotonic, check_every=max(8, num_blocks // 256))


def command(delay: float = 0.0, vocab_size: int = VOCAB_SIZE) -> tuple[str, ...]:
    """What `ProcessLink` is to run."""
    return (sys.executable, str(Path(__file__)), str(delay), str(vocab_size))


if __name__ == "__main__":
    delay, vocab_size, fd = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    sys.exit(main(fd, lambda config, is_restart: build(config, delay, vocab_size=vocab_size)))
