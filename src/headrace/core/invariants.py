"""The invariants of the scheduler's accounting: each function checks the parts that it takes and changes nothing.

docs/adr/0003-no-phases.md lists the invariants by number; every function raises `InvariantError` for the first one that
is broken. Called by `Scheduler.check`: after every step in tests, at idle in production. The time is in proportion to
all blocks and all tokens alive. Knows the parts, not the scheduler.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from headrace.core.beams.searches import Searches
from headrace.core.kinds import Kind
from headrace.core.prefix import PrefixCache
from headrace.core.queue import WaitingQueue
from headrace.core.sequence import NEVER, Sequence, Status
from headrace.core.steps import Flight
from headrace.core.tables import BlockTables
from headrace.protocol.errors import InvariantError
from headrace.protocol.step import Finish, ScheduledBatch


def check_blocks(
    tables: BlockTables, cache: PrefixCache, steps: Flight, sequences: Iterable[Sequence], running: list[Sequence]
) -> None:
    """I-1 ... I-5, I-7, I-8, I-19, I-21, I-22: the pools, the cache and the tables agree, for each kind."""
    holders = [*running, *steps.zombies()]
    for kind in tables.kinds:
        # With the pins this is I-7 too: all that a step in flight may write is held.
        blocks = [table[count_holes(table) :] for table in (seq.tables[kind.index] for seq in holders)]
        if not kind.index:
            blocks += [tail for seq in holders for tail in seq.tails]
        kind.pool.check(blocks)
    if tables.state is not None:
        tables.state.pool.check(list(seq.states.values()) for seq in holders)
    check_cache(cache, sequences, running, tables.windows[:1] != tables.kinds[:1])
    check_tables(tables, holders, steps)


def count_holes(table: list[int]) -> int:
    """Return how many blocks at the beginning of a table are freed."""
    return next((index for index, block in enumerate(table) if block >= 0), len(table))


def check_cache(
    cache: PrefixCache, sequences: Iterable[Sequence], running: Iterable[Sequence], keeps_parents: bool = True
) -> None:
    """I-5: published blocks are full, known by their keys, and follow published blocks (unless kind 0 is a window,
    which lets go of those first)."""
    cache.check()
    for seq in running:
        if seq.publish_at == NEVER:
            continue
        if seq.num_published != seq.num_computed // cache.pool.block_size:
            raise InvariantError("I-5", f"{seq.request_id} has published {seq.num_published} blocks")
        for kind, table in enumerate(seq.tables if keeps_parents else seq.tables[:1]):
            known = cache.others[kind - 1].known if kind else cache.blocks
            for index, block in enumerate(table[: seq.num_published]):
                if block >= 0 and known.get(seq.keys[index + 1]) != block:
                    raise InvariantError("I-5", f"{seq.request_id}: block {block} is not the one known by its key")
    if not keeps_parents:
        return
    roots = {entry.parent for entry in cache.entries.values()} - cache.blocks.keys()
    # A parent that is no known block must be the root of some request. The roots of ended requests are not recorded,
    # so look for a child of a forgotten block: its parent is a key, but not the root, of some live sequence.
    for seq in sequences:
        if roots.intersection(seq.keys[1:]):
            raise InvariantError("I-5", f"a published block follows a block of {seq.request_id} that is not")


def check_ledger(sequences: Mapping[str, Sequence], finished: Mapping[str, Finish], num_open: int) -> None:
    """I-9: `sequences` are the `num_open` requests added and not yet reported as ended, and `finished` are the ones
    among them that have ended."""
    if len(sequences) != num_open:
        raise InvariantError("I-9", f"{len(sequences)} requests are in the system, {num_open} were added and not ended")
    ended = {request_id for request_id, seq in sequences.items() if seq.status is Status.FINISHED}
    if ended != finished.keys():
        raise InvariantError("I-9", "the ends to report are not those of the ended sequences")


def check_lists(
    sequences: Collection[Sequence],
    waiting: WaitingQueue[Sequence],
    running: Collection[Sequence],
    searches: Searches,
    families: Mapping[bytes, Collection[Sequence]],
) -> None:
    """I-10, I-18: every sequence is listed by its status, and the queue is sorted. A search has all its beams among the
    running sequences, and only its first among the waiting ones."""
    num_waiting = sum(seq.status is Status.WAITING for seq in sequences)
    beams = [beam for seq in sequences for beam in (searches.members(seq) if seq.is_beam else (seq,))]
    num_running = sum(beam.status is Status.RUNNING for beam in beams)
    if (len(waiting), len(running)) != (num_waiting, num_running):
        counts = f"{len(waiting)} and {len(running)}, not {num_waiting} and {num_running}"
        raise InvariantError("I-10", f"the numbers of waiting and running sequences are listed as {counts}")
    if any(seq.status is not Status.RUNNING for seq in running):
        raise InvariantError("I-10", "a sequence that is listed as running is not")
    for index in range(len(waiting)):
        if waiting[index].status is not Status.WAITING:
            raise InvariantError("I-10", "a sequence that is listed as waiting is not")
        if index and waiting[index - 1].order >= waiting[index].order:
            raise InvariantError("I-18", "the queue is out of order")
    in_families = [id(seq) for family in families.values() for seq in family]
    if sorted(in_families) != sorted(id(seq) for seq in running if seq.family):
        raise InvariantError("I-10", "the families are not those of the running sequences")


def check_tables(tables: BlockTables, holders: Iterable[Sequence], steps: Flight) -> None:
    """I-4, I-5, I-8, I-19, I-21, I-22: tables are as long as they must be, and no block that a step in flight writes is
    shared."""
    stops = steps.stops()
    for seq in holders:
        stop = stops.get(seq.seq_id, seq.num_computed)
        for kind in tables.kinds:
            _check_table(kind, seq, stop, is_ahead=len(steps.steps) > 1)
        if tables.state is not None:
            _check_states(tables.state, seq, stop)


def _check_table(kind: Kind, seq: Sequence, num_slots: int, *, is_ahead: bool) -> None:
    pool, table = kind.pool, seq.tables[kind.index]
    num_scheduled, most = num_slots - seq.num_computed, kind.worst_case(seq)
    num_holes = count_holes(table)
    behind = kind.behind(seq.num_computed) if table else 0
    is_late = seq.status is Status.RUNNING and num_holes < behind
    if num_holes > behind or is_late or -1 in table[num_holes:]:
        raise InvariantError("I-21", f"{seq.request_id}: {table} after {seq.num_computed} tokens, window {kind.window}")
    if seq.status is Status.RUNNING and not 0 <= seq.num_ahead <= num_scheduled:
        raise InvariantError("I-8", f"{seq.request_id} computes {seq.num_ahead} tokens, {num_scheduled} in flight")
    if len(table) != pool.blocks_for(num_slots) or len(set(table[num_holes:])) != len(table) - num_holes:
        raise InvariantError("I-8", f"{seq.request_id} has {num_slots} slots in blocks {table}")
    # Blocks behind a window are released when a step is committed: with a second step in flight there may be more of
    # them, and a sequence that has ended keeps all.
    is_bounded = not kind.window or (seq.status is Status.RUNNING and not is_ahead)
    if (len(table) - num_holes > most and is_bounded) or most > pool.num_blocks:
        raise InvariantError("I-19", f"{seq.request_id} holds {len(table) - num_holes} blocks of {most}")
    unfilled = table[seq.num_computed // pool.block_size :]
    # A beam may wait on a block that another has filled: the beam copies it before it writes, which I-4 covers.
    if not num_scheduled and not seq.is_beam and any(pool.cached[block] for block in unfilled):
        raise InvariantError("I-5", f"{seq.request_id} has published one of {unfilled} before it was full")
    if num_scheduled:
        for block in (*unfilled, *(block for tail in seq.tails for block in tail)):
            if pool.refs[block] - pool.pins.count(block) != 1 or pool.cached[block]:
                raise InvariantError("I-4", f"block {block} is shared or cached and {seq.request_id} writes it")


def _check_states(kind: Kind, seq: Sequence, num_slots: int) -> None:
    """I-22: there is a state after the computed tokens, and after those in flight; none that is shared is written."""
    done, pool = seq.num_computed, kind.pool
    if seq.status is Status.RUNNING and done and done not in seq.states:
        raise InvariantError("I-22", f"{seq.request_id} has states after {list(seq.states)} tokens, not after {done}")
    if num_slots > done and num_slots not in seq.states:
        raise InvariantError("I-22", f"{seq.request_id} has no slot for the state after {num_slots} tokens")
    for num, slot in seq.states.items():
        if num > done and (pool.refs[slot] - pool.pins.count(slot) != 1 or pool.cached[slot]):
            raise InvariantError("I-22", f"slot {slot} is shared or cached and {seq.request_id} writes it")


def check_sequences(sequences: Iterable[Sequence], searches: Searches, max_overtaking: int) -> None:
    """I-8, I-12, I-17, I-18: the numbers of every sequence, and of all beams, agree with one another."""
    for first in sequences:
        search = searches.get(first) if first.is_beam else None
        for seq in (first,) if search is None else search.live:
            # A beam with candidates has computed all its tokens and waits for the others.
            has_candidates = search is not None and seq.seq_id in search.tops
            _check_sequence(seq, has_candidates, max_overtaking)


def _check_sequence(seq: Sequence, has_candidates: bool, max_overtaking: int) -> None:
    name, request = seq.request_id, seq.request
    if seq.tokens[: seq.num_known] != [*request.prompt_token_ids, *request.resume_token_ids]:
        raise InvariantError("I-12", f"{name}: the known tokens have changed")
    is_complete = seq.status is not Status.FINISHED and seq.num_computed >= len(seq.tokens) + has_candidates
    if len(seq.tokens) > seq.max_len or is_complete:
        raise InvariantError("I-12", f"{name}: {seq.num_computed} computed of {len(seq.tokens)}, max {seq.max_len}")
    if seq.status is Status.WAITING and (any(seq.tables) or seq.states or seq.num_computed):
        raise InvariantError("I-8", f"{name} waits and holds blocks")
    limit = (seq.num_preemptions + seq.num_forced) * seq.max_len
    if seq.num_preemptions > 2 or seq.num_recomputed > limit:
        raise InvariantError("I-17", f"{name}: {seq.num_preemptions} preemptions, {seq.num_recomputed} recomputed")
    if seq.num_overtaken > max_overtaking:
        raise InvariantError("I-18", f"{name} was overtaken {seq.num_overtaken} times")


def check_searches(searches: Searches, sequences: Mapping[str, Sequence], max_num_seqs: int) -> None:
    """I-10, I-15, I-19: the beams of a search are complete, stay together, and have room to run."""
    kind = searches.tables.all_kinds[0]
    for name, search in searches.open.items():
        first = search.live[0]
        if sequences.get(name) is not first or any(searches.get(seq) is not search for seq in search.live):
            raise InvariantError("I-10", f"{name}: the beams are not those of the request")
        if len(search.live) > search.width or (search.pending and search.pending != search.live[1:]):
            raise InvariantError("I-10", f"{name}: {len(search.live)} beams of {search.width}, and some are lost")
        absent = first.status if not search.pending else Status.WAITING
        if any(seq.status is not absent or seq.arrival != first.arrival for seq in search.live[1:]):
            raise InvariantError("I-10", f"{name}: a beam is not where the others are")
        num_held, claim = search.blocks()[0], search.claim(kind)
        if (num_held > claim and not kind.window) or claim > kind.pool.num_blocks:
            raise InvariantError("I-19", f"{name}: the beams hold {num_held} blocks of {claim}")
    num_absent = searches.num_absent() if searches.open else 0
    if len(searches.running) + num_absent > max_num_seqs:
        raise InvariantError("I-15", f"{num_absent} beams to come have no room to run")


def check_steps(
    steps: Flight,
    running: Iterable[Sequence],
    windows: list[Kind],
    num_stalled: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> None:
    """I-7, I-15, I-16: the steps in flight are within their budgets, and all that they use is held; without any there
    are no pins, and no sequence has tokens in one."""
    num_ahead, num_pins = sum(seq.num_ahead for seq in running), sum(len(pool.pins) for pool in steps.pools)
    if not steps and (num_ahead or num_pins):
        raise InvariantError("I-7", f"{num_ahead} tokens and {num_pins} pins remain of a retired step")
    has_failed = any(pool.has_failed for pool in steps.pools)
    for step in steps.steps:
        check_batch(step.batch, 0 if has_failed else num_stalled, max_num_seqs, max_num_batched_tokens)
        for index, (pool, used) in enumerate(zip(steps.pools, used_by(step.batch, windows), strict=False)):
            freed = [block for block in used if not pool.refs[block]]
            if freed:
                raise InvariantError(
                    "I-7", f"blocks {freed} of kind {index} are free, and step {step.batch.step_id} uses them"
                )


def used_by(batch: ScheduledBatch, windows: list[Kind]) -> list[set[int]]:
    """Return the blocks of each kind that a step reads or writes, and the slots if there are states."""
    behind = {kind.index: kind.behind for kind in windows}
    used: list[set[int]] = []
    for index, (tables, copies) in enumerate(
        zip([batch.block_tables, *batch.more_tables], [batch.copies, *batch.more_copies], strict=True)
    ):
        firsts = [behind[index](start) for start in batch.starts] if index in behind else [0] * len(batch)
        seen = [table[first:] for table, first in zip(tables, firsts, strict=True)]
        used.append({block for table in (*seen, *copies) for block in table})
    used[0].update(block for draft in batch.drafts.values() for tail in draft.tails for block in tail)
    if batch.state_reads:
        used.append({*batch.state_reads, *(slot for _, slot in batch.state_writes)} - {-1})
    return used


def check_batch(batch: ScheduledBatch, num_stalled: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """I-15, I-16: the step in flight is within its budgets, and not empty while `num_stalled` sequences could run."""
    num_rows = sum(batch.lens) + sum(len(draft.token_ids) for draft in batch.drafts.values())
    if num_rows > max_num_batched_tokens or sum(batch.lens) != len(batch.token_ids):
        raise InvariantError("I-15", f"{num_rows} tokens in a step of at most {max_num_batched_tokens}")
    if len(batch) > max_num_seqs:
        raise InvariantError("I-15", f"{len(batch)} sequences in a step of at most {max_num_seqs}")
    if len(set(batch.seq_ids)) != len(batch):
        raise InvariantError("I-15", "a sequence is twice in a step")
    if num_stalled:
        raise InvariantError("I-16", f"an empty step, and {num_stalled} sequences could run")
