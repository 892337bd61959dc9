"""`python -m tests.programs.sim.waits`: how long a holder's short request waits, whatever the other holders run.

Each program is a random world of the simulation under the policy fair, where some holders send answers, groups and beam
searches without end. Now and then a holder who has nothing else sends one request for one token, which fits into an
equal share. It must end within k + 1 steps, of k holders, and the steps that its prompt takes at an equal part of the
step's tokens. It makes no difference whether it can run ahead where steps overlap. All that
the simulation checks holds too.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter
from dataclasses import replace
from multiprocessing import Pool
from random import Random

from tests.programs.sim.simulation import Simulation, Violation
from tests.programs.sim.world import World, draw_world

from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request

NUM_STEPS = 30
NUM_PROBES = 2


def draw_shared_world(rng: Random, kinds: bool, num_others: int) -> World:
    """A world with so many busy holders, and room for one more. No step fails, and nobody is aborted."""
    world = draw_world(rng, kinds)
    num = num_others + 1
    quiet = ("abort", "abort in flight", "preempt", "allocation failure", "chunk failure", "late sampler", "too long")
    rates = world.rates | dict.fromkeys((*quiet, "duplicate id"), 0.0)
    rates |= {"arrival": rng.choice([0.3, 0.8]), "arrival in flight": rng.choice([0.0, 0.5])}
    return replace(
        world,
        policy="fair",
        num_blocks=max(world.num_blocks, num * rng.choice([1, 2, 4])),
        more_blocks=tuple(max(size, 2 * num) for size in world.more_blocks),
        max_num_seqs=max(world.max_num_seqs, num),
        max_num_batched_tokens=max(world.max_num_batched_tokens, num),
        max_model_len=world.longest,
        enable_chunked_prefill=True,
        max_alive=rng.choice([12, 24]),
        eos_probability=rng.choice([0.0, 0.02]),
        salts=[f"holder{index}" for index in range(num_others)],
        rates=rates,
    )


class Program(Simulation):
    """One world with its probes. `waits` are (steps, bound) of each."""

    def __init__(self, seed: int) -> None:
        rng = Random(f"waits {seed}")
        self.num_holders = 1 + rng.choice([1, 1, 2, 3, 5])
        kinds = seed % 4 == 3
        world = draw_shared_world(rng, kinds, self.num_holders - 1)
        super().__init__(seed, world=world, overlapping=seed % 3 == 2)
        self.waits: list[tuple[int, int]] = []

    def run_probes(self) -> list[tuple[int, int]]:
        """Return the waits of some probes, each sent after so many steps of the others."""
        for number in range(NUM_PROBES):
            for _ in range(self.rng.randint(1, NUM_STEPS)):
                self.step()
            # Where steps overlap, the second one is none that may run ahead.
            self._probe(logprobs=1 if number else None)
        self.drain()
        return self.waits

    def _probe(self, logprobs: int | None) -> None:
        num = self._draw_prompt()
        if not num:
            return
        name, bound = self._name(), self.num_holders + 1 + self._prefill(num)
        prompt = [self.rng.randrange(self.world.vocab_size) for _ in range(num)]
        params = SamplingParams(seed=1, max_tokens=1, logprobs=logprobs)
        who = {"tenant": "probe", "cache_salt": "probe"}
        self._add("probe", Request(request_id=name, prompt_token_ids=prompt, params=params, **who))
        for num_steps in range(1, bound + 1):
            self.step()
            if self.accounts[name].ended:
                self.waits.append((num_steps, bound))
                return
        raise Violation(f"R-10: {name} waits after {bound} steps, with {self.num_holders} holders")

    def _draw_prompt(self) -> int:
        """A length that fits into an equal share of the blocks; 0 if none does."""
        kinds = self.scheduler.tables.all_kinds
        fitting = [
            num
            for num in range(1, self.world.longest)
            if all(min(k.pool.blocks_for(num), k.most) <= k.pool.num_blocks // self.num_holders for k in kinds)
        ]
        return self.rng.choice(fitting) if fitting else 0

    def _prefill(self, num: int) -> int:
        """The steps of a prompt at an equal part of the tokens that single tokens and guesses leave of a step."""
        scheduler, tables = self.scheduler, self.scheduler.tables
        left = scheduler.max_num_batched_tokens - scheduler.max_num_seqs
        if self.world.guess_share:
            left //= 2
        part = max(1, min(left // self.num_holders, scheduler.chunk_limit, tables.max_chunk))
        # A chunk ends where a state is kept: after a known prefix, and after the last whole block.
        return -(-num // part) + 2 * (tables.has_state and tables.enable_prefix_caching)


def run_program(seed: int) -> tuple[int, list[tuple[int, int]], Counter[str], str]:
    """The seed, its waits, its events, and what was violated, if anything."""
    program = Program(seed)
    try:
        program.run_probes()
    except Exception as error:
        return seed, program.waits, program.report.events, f"step {program.report.num_steps}: {error!r}"
    return seed, program.waits, program.report.events, ""


def run_programs(first: int, count: int, num_jobs: int) -> tuple[dict[str, int], list[str]]:
    """The counts of so many programs, and what they violated."""
    waits: list[tuple[int, int]] = []
    events: Counter[str] = Counter()
    violations = []
    seeds = range(first, first + count)
    with contextlib.ExitStack() as stack:
        # Without processes, here.
        done = stack.enter_context(Pool(num_jobs)).imap_unordered(run_program, seeds, 16) if num_jobs else None
        for seed, some, more, violation in map(run_program, seeds) if done is None else done:
            waits += some
            events += more
            violations += [f"program {seed}: {violation}"] if violation else []
    counts = {
        "programs": count,
        "requests": len(waits),
        "requests_at_their_bound": sum(num == bound for num, bound in waits),
        "steps": events["step with work"],
        "preemptions": events["preemption"],
    }
    return counts, violations


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.sim.waits", description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000, help="number of programs (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    args = parser.parse_args()
    start = time.perf_counter()
    counts, violations = run_programs(args.first, args.programs, args.jobs)
    print(
        ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items()),
        f"in {time.perf_counter() - start:.0f} s",
    )
    print("\n".join([f"{len(violations)} violations", *violations[:20]]))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
