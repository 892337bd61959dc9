"""`Flight`: the steps that are scheduled and not yet committed. One, or two while a device computes the first of them.

All blocks that a step in flight may read or write stay held until it is retired (I-7), also blocks of sequences that
end meanwhile and blocks that a sequence gives up. Knows sequences and blocks; must not know how a step is chosen.
Called by the scheduler alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.core.blocks import BlockPool
from headrace.core.sequence import Sequence
from headrace.protocol.errors import HeadraceError
from headrace.protocol.step import ScheduledBatch, StepResult


@dataclass(slots=True)
class Step:
    """A step in flight, and its sequences in the order of its batch.

    Of each pool, `num_older_pins` pins belong to the step before. `zombies` have ended since; this step is the last
    that uses their blocks. Rows in `void` began at a token that was not drawn: their result counts for nothing.
    `has_dropped`: some rows are void, or their sequences have ended.
    """

    batch: ScheduledBatch
    seqs: list[Sequence]
    num_older_pins: list[int]
    zombies: list[Sequence] = field(default_factory=list)
    void: set[int] = field(default_factory=set)
    has_dropped: bool = False


class Flight:
    """The steps in flight, the oldest first. `Sequence.num_ahead` counts the tokens that they compute."""

    def __init__(self, pools: list[BlockPool]) -> None:
        self.pools = pools
        self.steps: list[Step] = []

    def __bool__(self) -> bool:
        return bool(self.steps)

    def has_room(self) -> bool:
        """Whether a step may be scheduled while one is in flight: if at least half of its sequences can go on, since
        the others then get a token in every second step."""
        if len(self.steps) != 1:
            return False
        seqs = self.steps[0].seqs
        return 2 * sum(seq.runs_ahead for seq in seqs) >= len(seqs)

    def begin(self, batch: ScheduledBatch, seqs: list[Sequence], num_older_pins: list[int]) -> None:
        """Add a step. The pins beyond `num_older_pins` are its own."""
        self.steps.append(Step(batch, seqs, num_older_pins))
        for pool in self.pools:
            pool.is_busy = True
        for seq, length in zip(seqs, batch.lens, strict=True):
            seq.num_ahead += length

    def oldest(self, batch: ScheduledBatch, result: StepResult) -> Step:
        """Return the oldest step. Raises `HeadraceError` if `batch` is not its batch or `result` not its result."""
        step = self.steps[0] if self.steps else None
        is_whole = result.step_id == batch.step_id and len(result.token_ids) == len(batch)
        if step is None or step.batch is not batch or not is_whole:
            raise HeadraceError(f"commit() was given the batch {batch.step_id} and the result {result.step_id}")
        return step

    def retire(self) -> Step:
        """Remove the oldest step, and release its pins. The caller releases its zombies."""
        step = self.steps.pop(0)
        for kind, pool in enumerate(self.pools):
            pool.is_busy = bool(self.steps)
            pool.unpin(self.steps[0].num_older_pins[kind] if self.steps else len(pool.pins))
        for index, (seq, length) in enumerate(zip(step.seqs, step.batch.lens, strict=True)):
            if index not in step.void:
                seq.num_ahead -= length
        return step

    def hold(self, seq: Sequence) -> bool:
        """Keep the blocks of a sequence that has ended until the last step that uses them is retired. False if no step
        does."""
        users = [step for step in self.steps if seq in step.seqs]
        for step in users:
            step.has_dropped = True
        if users:
            users[-1].zombies.append(seq)
        return bool(users)

    def make_void(self, seq: Sequence) -> None:
        """Let the rows of `seq` in all steps in flight count for nothing: they followed a token that was not drawn."""
        for step in self.steps:
            if seq in step.seqs:
                step.void.add(step.seqs.index(seq))
                step.has_dropped = True
                seq.num_ahead = 0

    def zombies(self) -> list[Sequence]:
        return [seq for step in self.steps for seq in step.zombies]

    def stops(self) -> dict[int, int]:
        """Return the number of positions that each sequence, by id, has once all steps in flight are computed."""
        stops: dict[int, int] = {}
        for step in self.steps:
            batch = step.batch
            trunks = {i: len(draft.paths()[0]) for i, draft in batch.drafts.items()}
            for i, seq in enumerate(step.seqs):
                if i not in step.void:
                    stops[seq.seq_id] = batch.starts[i] + batch.lens[i] + trunks.get(i, 0)
        return stops
