"""The invariants of the scheduler's accounting, checked from the outside. Reads everything, changes nothing.

The numbers are those of the list in docs/adr/0003-no-phases.md. Called by `Scheduler.check`: after every step in
tests, at idle in production. Takes time in proportion to all blocks and all tokens alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.core.sequence import NEVER, Sequence, Status
from headrace.protocol.errors import InvariantError

if TYPE_CHECKING:
    from headrace.core.scheduler import Scheduler


def check_scheduler(s: Scheduler) -> None:
    """Raises `InvariantError` naming the first broken one of I-1 ... I-10, I-12, I-15 ... I-19."""
    # I-1, I-2, I-3, and with the pins I-7: whatever the step in flight may write is held.
    holders = [*s.running, *s.zombies]
    s.pool.check(table for seq in holders for table in (seq.block_table, *seq.tails))
    _check_cache(s)
    _check_ledger(s)
    flight = {}
    if s.batch is not None:
        trunks = {i: len(d.paths[0]) if d.paths else len(d.token_ids) for i, d in s.batch.drafts.items()}
        flight = {id(seq): n + trunks.get(i, 0) for i, (seq, n) in enumerate(zip(s.flight, s.batch.lens, strict=True))}
    for seq in holders:
        _check_table(s, seq, flight.get(id(seq), 0))
    for seq in s.sequences.values():
        for member in seq.members:
            _check_sequence(s, member)
    _check_searches(s)
    _check_batch(s)


def _check_cache(s: Scheduler) -> None:
    roots = {entry.parent for entry in s.cache.entries.values()} - s.cache.blocks.keys()
    # A parent that is no known block must be the root of some request; roots of ended requests are known no more,
    # so look for a child of a block that was forgotten: some live sequence's key that is not its root.
    for seq in s.sequences.values():
        if roots.intersection(seq.keys[1:]):
            raise InvariantError("I-5", f"a published block follows a block of {seq.request_id} that is not")
    s.cache.check()
    for seq in s.running:
        if seq.publish_at == NEVER:
            continue
        if seq.num_published != seq.num_computed // s.block_size:
            raise InvariantError("I-5", f"{seq.request_id} has published {seq.num_published} blocks")
        for index, block in enumerate(seq.block_table[: seq.num_published]):
            if s.cache.blocks.get(seq.keys[index + 1]) != block:
                raise InvariantError("I-5", f"{seq.request_id}: block {block} is not the one known by its key")


def _check_ledger(s: Scheduler) -> None:
    if s.num_added != s.num_finished + len(s.sequences):
        raise InvariantError("I-9", f"{s.num_added} added != {s.num_finished} ended + {len(s.sequences)} in the system")
    running = [member for seq in s.sequences.values() for member in seq.members if member.status is Status.RUNNING]
    waiting = [seq for seq in s.sequences.values() if seq.status is Status.WAITING]
    for listed, found in ((s.waiting, waiting), (s.running, running)):
        if len(listed) != len(found):
            raise InvariantError("I-10", f"{len(listed)} sequences are listed that are not the {len(found)} there are")
    ended = {name for name, seq in s.sequences.items() if seq.status is Status.FINISHED}
    if ended != s.finished.keys():
        raise InvariantError("I-9", "the ends to be told are not those of the ended sequences")
    if any(seq.status is not Status.RUNNING for seq in s.running):
        raise InvariantError("I-10", "a sequence that is listed as running is not")
    for index in range(len(s.waiting)):
        if s.waiting[index].status is not Status.WAITING:
            raise InvariantError("I-10", "a sequence that is listed as waiting is not")
        if index and s.waiting[index - 1].order >= s.waiting[index].order:
            raise InvariantError("I-18", "the queue is out of order")
    in_families = [id(seq) for _, family in s.families for seq in family]
    if sorted(in_families) != sorted(id(seq) for seq in s.running if seq.family):
        raise InvariantError("I-10", "the families are not those of the running sequences")


def _check_table(s: Scheduler, seq: Sequence, num_scheduled: int) -> None:
    num_slots = seq.num_computed + num_scheduled
    if len(seq.block_table) != s.pool.blocks_for(num_slots) or len(set(seq.block_table)) != len(seq.block_table):
        raise InvariantError("I-8", f"{seq.request_id} has {num_slots} slots in blocks {seq.block_table}")
    if len(seq.block_table) > s.tables.worst_case(seq) or s.tables.worst_case(seq) > s.pool.num_blocks:
        raise InvariantError(
            "I-19", f"{seq.request_id} holds {len(seq.block_table)} blocks of {s.tables.worst_case(seq)}"
        )
    unfilled = seq.block_table[seq.num_computed // s.block_size :]
    # A beam may wait on a block that another has filled: it is copied before the beam writes, which is I-4's matter.
    if not num_scheduled and seq.search is None and any(s.pool.cached[block] for block in unfilled):
        raise InvariantError("I-5", f"{seq.request_id} has published one of {unfilled} before it was full")
    if num_scheduled:
        for block in (*unfilled, *(block for tail in seq.tails for block in tail)):
            if s.pool.refs[block] - s.pool.pins.count(block) != 1 or s.pool.cached[block]:
                raise InvariantError("I-4", f"block {block} is shared or cached and {seq.request_id} writes it")


def _check_sequence(s: Scheduler, seq: Sequence) -> None:
    name = seq.request_id
    request = seq.request
    if seq.tokens[: seq.num_known] != [*request.prompt_token_ids, *request.resume_token_ids]:
        raise InvariantError("I-12", f"{name}: the known tokens have changed")
    told = seq.search is not None and seq.seq_id in seq.search.tops
    if len(seq.tokens) > seq.max_len or (
        seq.status is not Status.FINISHED and seq.num_computed >= len(seq.tokens) + told
    ):
        raise InvariantError("I-12", f"{name}: {seq.num_computed} computed of {len(seq.tokens)}, max {seq.max_len}")
    if seq.status is Status.WAITING and (seq.block_table or seq.num_computed):
        raise InvariantError("I-8", f"{name} waits and holds blocks")
    limit = (seq.num_preemptions + seq.num_forced) * seq.max_len
    if seq.num_preemptions > 2 or seq.num_recomputed > limit:
        raise InvariantError("I-17", f"{name}: {seq.num_preemptions} preemptions, {seq.num_recomputed} recomputed")
    if seq.num_overtaken > s.waiting.max_overtaking:
        raise InvariantError("I-18", f"{name} was overtaken {seq.num_overtaken} times")


def _check_searches(s: Scheduler) -> None:
    for name, search in s.searches.open.items():
        first = search.live[0]
        if s.sequences.get(name) is not first or any(seq.search is not search for seq in search.live):
            raise InvariantError("I-10", f"{name}: the beams are not those of the request")
        if len(search.live) > search.width or (search.pending and search.pending != search.live[1:]):
            raise InvariantError("I-10", f"{name}: {len(search.live)} beams, {search.width} wanted, some are lost")
        absent = first.status if not search.pending else Status.WAITING
        if any(seq.status is not absent or seq.arrival != first.arrival for seq in search.live[1:]):
            raise InvariantError("I-10", f"{name}: a beam is not where the others are")
        held = len(set().union(*(seq.block_table for seq in search.live)))
        if held > search.claim(s.block_size) or search.claim(s.block_size) > s.pool.num_blocks:
            raise InvariantError("I-19", f"{name}: the beams hold {held} blocks of {search.claim(s.block_size)}")
    if len(s.running) + s.searches.num_absent() > s.max_num_seqs:
        raise InvariantError("I-15", f"{s.searches.num_absent()} beams to come have no room to run")


def _check_batch(s: Scheduler) -> None:
    batch = s.batch
    if batch is None:
        if s.flight or s.zombies or s.pool.pins:
            raise InvariantError("I-7", "sequences or pins are left over from a retired step")
        return
    num_rows = sum(batch.lens) + sum(len(draft.token_ids) for draft in batch.drafts.values())
    if num_rows > s.max_num_batched_tokens or sum(batch.lens) != len(batch.token_ids):
        raise InvariantError("I-15", f"{num_rows} tokens in a step of at most {s.max_num_batched_tokens}")
    if len(batch) > s.max_num_seqs or len(s.running) > s.max_num_seqs:
        raise InvariantError("I-15", f"{len(s.running)} sequences run, at most {s.max_num_seqs} may")
    if len(set(batch.seq_ids)) != len(batch):
        raise InvariantError("I-15", "a sequence is twice in a step")
    if s.num_stalled and not s.pool.has_failed:
        raise InvariantError("I-16", f"an empty step, and {s.num_stalled} sequences could run")
