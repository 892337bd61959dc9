"""The scheduler: which sequence computes how many tokens in the next step, and in which blocks.

Owns the waiting queue, the running set and, through `BlockPool` and `PrefixCache`, the blocks. Knows token ids and
numbers: no tensors, no text, no clock, no config. The engine calls `add` and `abort` at any moment, and `schedule` then
`commit` once per step; in between it may call `schedule_ahead` for the step after it. There is no prefill or decode
phase: a sequence has a gap between its known and its computed tokens, and steps spend their budget on the gaps.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from operator import le

from headrace.core import invariants
from headrace.core.beams.searches import Row, Searches
from headrace.core.drafting import Drafts
from headrace.core.kinds import fit_windows, make_kinds
from headrace.core.notes import Notes
from headrace.core.options import SchedulerOptions
from headrace.core.prefix import PrefixCache
from headrace.core.queue import ORDER, Ranks, WaitingQueue
from headrace.core.requests import STOP, append_known, finish_of, make_sequence, verify_fit, verify_numbers
from headrace.core.sequence import NEVER, Sequence, Status
from headrace.core.shares import MAX_PREEMPTIONS, Shares
from headrace.core.steps import Flight, computed_rows, make_batch, output_of, stats_of
from headrace.core.tables import BlockTables, Prefix
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.step import BeamResult, Finish, Request, ScheduledBatch, Stats, StepOutput, StepResult


class Scheduler:
    """Continuous batching. Not more sequences run than a step has tokens. Raises `ValueError` for a wrong number."""

    def __init__(self, options: SchedulerOptions) -> None:
        parts = make_kinds(options.kinds, (options.num_blocks, *options.more_blocks), options.block_size)
        self.pool = parts[0].pool
        self.cache = PrefixCache(self.pool, options.cache_key, options.cache_fingerprint, parts)
        self.max_num_batched_tokens = most = options.max_num_batched_tokens
        self.enable_chunked_prefill = chunks = options.enable_chunked_prefill
        longest, max_chunk = fit_windows(parts, most if chunks else NEVER)
        # The last token of a sequence is never computed, so it needs no slot.
        self.max_model_len = min(options.max_model_len, longest + 1)
        verify_numbers(options.max_num_seqs, most, self.max_model_len, options.long_prefill_token_threshold, chunks)
        self.block_size = options.block_size
        self.max_num_seqs = min(options.max_num_seqs, most)
        self.eos_token_ids = frozenset(options.eos_token_ids)
        self.ranks = Ranks(options.policy)
        self.chunk_limit = options.long_prefill_token_threshold or NEVER
        self.sequences: dict[str, Sequence] = {}
        self.waiting: WaitingQueue[Sequence] = WaitingQueue(options.max_overtaking)
        self.running: list[Sequence] = []
        self.tables = BlockTables(parts, self.cache, options.enable_prefix_caching, max_chunk)
        self._next_id = count(1).__next__
        self.searches = Searches(self.tables, self.running, self.eos_token_ids, self._next_id)
        numbers = self.max_num_seqs, options.vocab_size, options.policy == "fair"
        self.shares = Shares(self.tables, self.searches, self.waiting, *numbers)
        self.steps = Flight([kind.pool for kind in parts])
        self._runs_ahead = options.runs_ahead
        # Whether one lacked blocks under a step in flight, or room for a picture whole: then no other one starts.
        self._is_short = False
        self._num_older_pins: list[int] = []
        self._started: dict[str, int] = {}
        self.finished: dict[str, Finish] = {}  # ends that the next commit reports
        self.notes = Notes()
        # The last sequence that lacked blocks to start, and how many there were of each kind then.
        self._refused: tuple[Sequence | None, list[int]] = None, []
        # Sequences in the system when the last step was scheduled, if that step is empty.
        self.num_stalled = self.num_added = self.num_finished = 0
        self.counters = Stats(num_blocks=options.num_blocks)
        self.drafts = Drafts(self.tables, self.counters, options.speculates)

    # -- requests in and out -------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. A later `commit` reports its end, even if its resumed tokens end it at once.

        Raises `RequestError` for an id in use, and the errors of `verify_fit` and `verify_wholes`.
        """
        if request.request_id in self.sequences:
            raise RequestError("request_id", request.request_id, "an id that is not in use")
        seq_id = self._next_id()
        for kind in self.tables.all_kinds:
            verify_fit(request, self.max_model_len, self.max_num_seqs, *kind.numbers)
        most = min(self.max_num_batched_tokens, self.tables.max_chunk)
        seq = make_sequence(request, seq_id, self.max_model_len, most, self.eos_token_ids, self.cache)
        seq.rank = self.ranks.rank(request, self.waiting.least_rank)
        if self._runs_ahead is not None and not request.pooling and not seq.needs_history:
            seq.runs_ahead = self._runs_ahead(request.params)
        if request.beam is not None:
            self.searches.begin(request.beam, seq)
        self.sequences[seq.request_id] = seq
        self.shares.holders[request.tenant] += 1
        self.num_added += 1
        if request.resume_token_ids and (finish := finish_of(seq, self.eos_token_ids)):
            self._end(seq, finish)
        else:
            self.waiting.add(seq)

    def abort(self, request_id: str) -> bool:
        """End a request now; the next `commit` reports it. Safe at any moment: a step's blocks stay held until it is
        retired (I-7). False if there is no such request, or it has ended."""
        seq = self.sequences.get(request_id)
        if seq is None or seq.status is Status.FINISHED:
            return False
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
        self._end(seq, Finish("abort"))
        return True

    def preempt(self, request_id: str) -> bool:
        """Send a running request back to the queue, for tests. False if it is not running, or a step is in flight."""
        seq = self.sequences.get(request_id)
        if seq is None or seq.status is not Status.RUNNING or self.steps:
            return False
        self._preempt(seq, forced=True)
        return True

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Running sequences keep their blocks and publish no more of them."""
        self.cache.reset()
        for seq in self.running:
            seq.publish_at = NEVER

    @property
    def flight(self) -> list[Sequence]:
        """The sequences of the step scheduled last, if it is in flight."""
        return self.steps.steps[-1].seqs if self.steps else []

    def has_work(self) -> bool:
        """Whether a step would compute anything, or report a request that ended between steps, or is in flight."""
        return bool(self.sequences) or bool(self.steps)

    # -- the step ------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch:
        """Choose the next step. The batch may be empty, and is committed like any other.

        Gaps of one token come first, so that no long prompt delays them; then larger gaps of running sequences;
        then waiting ones, while blocks and budget last. Raises `HeadraceError` if a step is in flight.
        """
        if self.steps:
            raise HeadraceError("schedule() was called before the step in flight was committed")
        self._is_short = False
        return self._build(*self._choose())

    def schedule_ahead(self) -> ScheduledBatch | None:
        """Choose the step after the one in flight, for the sequences that can run ahead of its result; the others wait.
        None if there is nothing to compute yet. No sequence is preempted under a step in flight: where blocks lack, the
        step after this one is chosen without.
        """
        waits = self._runs_ahead is None or self._is_short or self.searches.open or self.drafts.enabled
        if waits or not self.steps.has_room(self.shares.are_equal):
            return None
        ready, chunks, num_guesses = self._choose()
        return self._build(ready, chunks, num_guesses) if ready or chunks else None

    def _choose(self) -> tuple[list[Sequence], list[tuple[Sequence, int]], int]:
        """Return the sequences that compute one token, others with the number of theirs, and the room for drafts."""
        claims = self._make_room() if self.shares.are_equal else []
        size, running, num_running, has_state = self.block_size, self.running, len(self.running), self.tables.has_state
        self._num_older_pins = [len(pool.pins) for pool in self.steps.pools]
        ready = [s for s in running if s.gap == 1]
        wide = [s for s in running if s.gap > 1] if len(ready) < num_running else []
        # A state takes a slot for each token.
        edge = ready if has_state else [s for s in ready if not (s.num_computed + s.num_ahead) % size]
        if self.steps and self.shares.are_equal and not self.tables.has_room([*edge, *wide]):
            # Some would have no room in each second step, and the others get more than their shares.
            return [], [], 0
        if edge and not self.tables.grow_by_one(edge):
            for seq in edge:
                if seq.status is Status.RUNNING:
                    self._grow(seq, 1)
        promised = [0] * len(self.steps.pools)
        if self.searches.open:
            ready = self._copy_shared_tails(ready)
            self.searches.promise(promised)

        budget = self.max_num_batched_tokens - len(ready)
        spare = len(wide) + len(claims) if self.shares.are_equal else 0
        num_guesses = self.drafts.reserve(running, max(0, budget - spare)) if self.drafts.enabled else 0
        budget -= num_guesses
        self.shares.begin_step([*wide, *claims], budget)
        chunks: list[tuple[Sequence, int]] = []
        for seq in wide:
            if seq.status is not Status.RUNNING:
                continue
            length = self._chunk(seq, seq.num_computed + seq.num_ahead, budget)
            if length and self._grow(seq, length):
                chunks.append((seq, length))
                budget -= self.shares.take(seq, seq.num_computed + seq.num_ahead, length)
            self._is_short |= bool(seq.wholes and not length and self.shares.most(seq, seq.num_computed))
            self.tables.promise(promised, seq)
        if len(self.running) == num_running and not self._is_short:
            self._admit_waiting(claims, chunks, budget, promised)
        else:
            # Some were preempted, maybe after they had their place in this step; then no waiting one starts either.
            chunks = [(s, n) for s, n in chunks if self.tables.holds(s, s.num_computed + s.num_ahead + n)]
        if edge or len(self.running) < num_running:
            ready = [s for s in ready if len(s.tables[0]) * size > s.num_computed + s.num_ahead]
            if has_state:
                ready = [s for s in ready if s.num_computed + s.num_ahead + 1 in s.states]
        self.num_stalled = 0 if ready or chunks or self.steps else len(self.running) + len(self.waiting)
        return ready, chunks, num_guesses

    def _build(self, ready: list[Sequence], chunks: list[tuple[Sequence, int]], num_guesses: int) -> ScheduledBatch:
        counters = self.counters
        counters.num_steps += 1
        for seq, length in chunks:
            seq.count(length, counters)
        drafts = self.drafts.place([*((seq, 1) for seq in ready), *chunks], num_guesses) if num_guesses else {}
        copies = self.tables.take_copies()
        ended, asks = self.drafts.request(len(ready) + len(chunks)) if self.drafts.enabled else ([], False)
        seqs, batch = make_batch(counters.num_steps, ready, chunks, copies, drafts, ended, asks, self.tables.has_state)
        self.steps.begin(batch, seqs, self._num_older_pins)
        counters.num_batched_tokens += len(batch.token_ids) + sum(len(d.token_ids) for d in drafts.values())
        return batch

    def commit(self, batch: ScheduledBatch, result: StepResult) -> StepOutput:
        """Apply the result of the oldest step: append tokens, end sequences, publish and release blocks.

        A chunk that failed ends its sequence, and nothing that it computed in the step is published.
        Raises `HeadraceError`, changing nothing, if `batch` is not the step in flight or `result` not its result.
        """
        step = self.steps.oldest(batch, result)
        flight = step.seqs
        self._retire()
        if batch.drafts:
            self.drafts.settle(batch, flight, result)
        rows: Iterable[Row] = zip(flight, batch.lens, batch.samples, result.token_ids, strict=True)
        failed: set[int] = set()
        beams: dict[str, BeamResult] = {}
        errors: dict[int, str] = result.column("error") if result.rows else {}
        deferred: set[int] = set(result.column("is_deferred")) if result.rows else set()
        if step.has_dropped or errors or self.searches.open or -1 in result.token_ids:
            rows = computed_rows(rows, deferred, self.tables.has_state)
            failed = self._drop_failed(rows, errors, step.void)
            beams = self._advance_searches(rows, result, failed)
            rows = [row for index, row in enumerate(rows) if index not in failed and not row[0].is_beam]
        seqs: list[Sequence] = []
        ends: list[tuple[Sequence, Finish]] = []
        for seq, length, sampled, token in rows:
            seq.num_computed = num = seq.num_computed + length
            if num >= seq.publish_at:
                self.tables.publish(seq)
            if sampled:
                seq.tokens.append(token)
                seqs.append(seq)
                may_end = num + 1 >= seq.max_len or token in seq.stop_ids
                if may_end and (finish := finish_of(seq, self.eos_token_ids)):
                    ends.append((seq, finish))
            elif seq.pooling and num == len(seq.tokens):
                # A pooled sequence samples nothing, and ends with its prompt.
                ends.append((seq, STOP))
        added = [[s.tokens[-1]] for s in seqs]
        if result.rows:
            if further := result.column("further"):
                append_known(further, flight, seqs, added, ends, self.eos_token_ids)
                for index in further.keys() - failed:
                    self.tables.accept(flight[index])
            if forced := result.column("forced"):
                append_known(forced, flight, seqs, added, ends, self.eos_token_ids)
        for index in deferred - failed:
            self.steps.make_void(flight[index])
            self.tables.trim(flight[index])
        for seq, finish in ends:
            self._end(seq, finish)
        if batch.asks or batch.drafts:
            self.drafts.keep(flight, batch, result, failed)
        self.counters.num_generated_tokens += sum(map(len, added))
        output = output_of(batch, flight, result, seqs, added, failed)
        self.tables.settle(flight, batch.lens, deferred - failed)
        output.started, self._started = self._started, {}
        output.finished, self.finished = self.finished, {}
        output.beams = beams
        self.num_finished += len(output.finished)
        for request_id in output.finished:
            del self.sequences[request_id]
        output.stats = self.stats()
        return output

    def retract(self) -> None:
        """Withdraw the steps in flight, whose executor raised. All of their sequences compute their tokens again: a
        block that they were to share may not have been copied."""
        flight = [seq for step in self.steps.steps for seq in step.seqs]
        while self.steps:
            self._retire()
        for seq in flight:
            if seq.status is Status.RUNNING:
                self._preempt(seq, forced=True)

    # -- parts of schedule() -------------------------------------------------------------------------------------

    def _copy_shared_tails(self, seqs: list[Sequence]) -> list[Sequence]:
        """Copy the block that each of `seqs` writes next, if beams share it. Returns those that can write."""
        beams = [s for s in seqs if s.is_beam and s.block_table and self.tables.shares_tail(s)]
        stuck = {s.seq_id for s in beams if s.status is Status.RUNNING and not self._grow(s, 1)}
        return [s for s in seqs if s.seq_id not in stuck]

    def _grow(self, seq: Sequence, length: int) -> bool:
        """Add blocks for `length` more tokens; preempts the last in the queue's order until there is room.

        Protected sequences are never victims. False if `seq` itself was preempted, or if there is no victim: while a
        step is in flight, or when an allocation was made to fail.
        """
        while not self.tables.grow(seq, length):
            self._is_short = bool(self.steps)
            candidates = [s for s in self.running if s.num_preemptions < MAX_PREEMPTIONS and not self.steps]
            if self.shares.are_equal and not self.steps:
                candidates = self.shares.givers(candidates)
            if not candidates:
                return False
            victim = max(candidates, key=ORDER)
            self._preempt(victim, victim.num_preemptions >= MAX_PREEMPTIONS, by=seq)
            if seq.status is not Status.RUNNING:
                return False
        return True

    def _make_room(self) -> list[Sequence]:
        """Return the waiting sequences that start first, for their holders' shares. Preempts others for them, unless a
        step is in flight."""
        claims = self.shares.claims(self.max_num_batched_tokens)
        while claims and not self.steps and (victim := self.shares.victim(claims)) is not None:
            self._preempt(victim, forced=True, by=claims[0])
        return claims

    def _preempt(self, seq: Sequence, forced: bool = False, by: Sequence | None = None) -> None:
        """Send `seq` back to the queue, with all beams of a search, and release its blocks: for no other, or `by` the
        need of one. A `forced` preemption does not count towards protection."""
        search = self.searches.get(seq) if seq.is_beam else None
        for member in [seq] if search is None else search.live:
            if member.status is Status.RUNNING:
                self._leave(member)
                member.move(Status.WAITING)
                member.high_water = max(member.high_water, member.num_computed)
                self.tables.release(member)
            member.num_forced += forced
            member.num_preemptions += not forced
        self.counters.num_preemptions += 1
        self.notes.preempted.append((seq.arrival, by.arrival if by else 0))
        self.waiting.add(seq if search is None else search.retire())

    def _chunk(self, seq: Sequence, num_computed: int, budget: int) -> int:
        """Return how many tokens of `seq` after the first `num_computed` go into a step with `budget` left."""
        gap = len(seq.tokens) - num_computed
        if not self.tables.is_plain:
            gap = min(gap, self.tables.reach(seq, num_computed))
        # A running sequence has computed its prompt; tokens that a grammar forced since must not wait for a wide step.
        if self.enable_chunked_prefill or seq.status is Status.RUNNING:
            length = min(gap, budget, self.chunk_limit, self.shares.most(seq, num_computed))
            return seq.fit(num_computed, length, min(gap, budget))
        return gap if gap <= budget else 0

    def _admit_waiting(
        self, claims: list[Sequence], chunks: list[tuple[Sequence, int]], budget: int, promised: list[int]
    ) -> None:
        """Start waiting sequences: the `claims`, then strictly from the head of the queue. The first that does not fit
        holds up the rest.

        Only a sequence whose prompt a running sibling is computing is passed by. `promised` counts the blocks of each
        kind that running sequences need for their known tokens: a new one must fit into the rest.
        """
        waiting = self.waiting
        index = 0
        room = self.max_num_seqs - len(self.running) - (self.searches.num_absent() if self.searches.open else 0)
        while index < len(waiting) and budget and room:
            seq = claims[0] if claims else waiting[index]
            if not claims and self.tables.awaits_sibling(seq):
                index += 1
                continue
            if claims and not self.shares.most(seq, 0):
                # Others of its holder have used the holder's part of the step.
                del claims[0]
                continue
            search = self.searches.get(seq) if seq.is_beam else None
            num_seqs = 1 if search is None else search.width
            demand = promised if search is None else self.searches.with_reserve(promised, search)
            may_copy = not claims or self.shares.num_spare > 0
            length = self._admit(seq, budget, demand, may_copy) if num_seqs <= room and self.shares.fits(seq) else 0
            if not length:
                break
            self.shares.num_spare -= seq.num_computed % self.block_size > 0
            waiting.remove(seq)
            chunks.append((seq, length))
            room -= num_seqs
            budget -= self.shares.take(seq, seq.num_computed, length)
            self.tables.promise(promised, seq)
            if search is not None and search.pending:
                promised = self.searches.with_reserve(promised, search)
            if claims:
                del claims[0]
            elif self.ranks.policy != "fcfs" and waiting.count_overtaking(seq, self.tables.awaits_sibling):
                index = 0
        # Nobody is preempted for a claim while a step is in flight.
        self._is_short = bool(claims and self.steps)

    def _admit(self, seq: Sequence, budget: int, promised: list[int], may_copy: bool) -> int:
        """Start `seq` with its first blocks. Returns the length of its first chunk, 0 if it has to wait."""
        if seq.num_preemptions >= MAX_PREEMPTIONS:
            # Protected: once running, never preempted again. So all of those must fit together at their longest.
            protected = [s for s in self.running if s.num_preemptions >= MAX_PREEMPTIONS]
            if not self.searches.fit([*protected, seq]):
                return 0
        rooms = self.tables.rooms(promised)
        if seq is self._refused[0] and self.running and all(map(le, rooms, self._refused[1])):
            # A lookup of a long prompt's prefix in every step that it waits would cost more than the step.
            return 0
        prefix = self.tables.find_shared(seq)
        verdict = self.tables.verdict(seq, prefix.num)  # before it evicts the blocks that it did not find
        part = prefix.num % self.block_size
        length = self._start(seq, prefix, budget, promised) if may_copy or not part else 0
        if not length and part:
            # A copy of the half-matching block takes one block more than to compute it again; that may be missing.
            prefix = self.tables.find_shared(seq, prefix.num - part)
            length = self._start(seq, prefix, budget, promised)
        if not length:
            # Without chunks it may have lacked budget, of which there can be more with no more room.
            is_final = self.enable_chunked_prefill and not seq.wholes and self.shares.most(seq, prefix.num)
            self._refused = (seq if is_final else None), rooms
            return 0
        seq.move(Status.RUNNING)
        self.running.append(seq)
        self.tables.enter_family(seq)
        self.notes.admitted.append((seq.arrival, prefix.num, verdict))
        self.cache.count_hits(prefix.tables[0][-1] if prefix.num else None, 1, self.cache.now)
        if not seq.started:
            seq.started = True
            num_hits = self._started[seq.request_id] = min(prefix.num, seq.num_prompt)
            if seq.may_share and self.tables.enable_prefix_caching:
                self.counters.prefix_cache_queries += seq.num_prompt
                self.counters.prefix_cache_hits += num_hits
        return length

    def _start(self, seq: Sequence, prefix: Prefix, budget: int, promised: list[int]) -> int:
        length = self._chunk(seq, prefix.num, budget)
        return length if length and self.tables.start(seq, prefix, length, promised) else 0

    # -- parts of commit() ---------------------------------------------------------------------------------------

    def _retire(self) -> None:
        """End the oldest step in flight and release the blocks that it alone held."""
        # Pins before any table: a pinned block must be released before its parent.
        for seq in self.steps.retire().zombies:
            self.tables.release(seq)

    def _drop_failed(self, rows: list[Row], errors: dict[int, str], void: set[int]) -> set[int]:
        """Return the rows without effect: void ones, of sequences that ended in flight, and of chunks that failed. The
        latter end here, a search with all its beams."""
        for index, (seq, _, sampled, token) in enumerate(rows):
            if index not in void and seq.status is not Status.FINISHED and (index in errors or (sampled and token < 0)):
                self._end(seq, Finish("error", message=errors.get(index, "no token was sampled")))
        return void | {index for index, row in enumerate(rows) if row[0].status is Status.FINISHED}

    def _advance_searches(self, rows: list[Row], result: StepResult, failed: set[int]) -> dict[str, BeamResult]:
        """Apply the step's results to the beams. Returns the answers of the searches that end with it."""
        results: dict[str, BeamResult] = {}
        for request_id, search in self.searches.take_in(rows, result, failed).items():
            answers = self.searches.advance(search)
            self.sequences[request_id] = search.live[0]
            if answers is not None:
                results[request_id] = answers
                self.counters.num_generated_tokens += sum(len(beam.token_ids) for beam in answers.beams)
                self._end(search.live[0], answers.beams[0].finish)
        return results

    def _leave(self, seq: Sequence) -> None:
        """Take `seq` out of the running set."""
        self.running.remove(seq)
        self.tables.leave_family(seq)

    def _end(self, seq: Sequence, finish: Finish) -> None:
        """End a request. The blocks that a step in flight may still write stay held until it is retired (I-7)."""
        for member in self.searches.members(seq) if seq.is_beam else [seq]:
            if member.status is Status.RUNNING:
                self._leave(member)
            if not self.steps.hold(member):
                self.tables.release(member)
            member.move(Status.FINISHED)
            if self.drafts.enabled:
                self.drafts.ended.append(member.seq_id)
        self.shares.leave(seq)
        self.searches.open.pop(seq.request_id, None)
        self.finished[seq.request_id] = finish

    # -- looking in ----------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return the present gauges and the counters since the start."""
        return stats_of(self.counters, self.steps.pools, self.searches, len(self.waiting))

    def check(self) -> None:
        """Raise `InvariantError` with the first broken one of I-1 ... I-10, I-12, I-15 ... I-19, I-21, I-22. May be
        called at any moment between two other calls."""
        invariants.check_blocks(self.tables, self.cache, self.steps, self.sequences.values(), self.running)
        invariants.check_ledger(self.sequences, self.finished, self.num_added - self.num_finished)
        invariants.check_lists(self.sequences.values(), self.waiting, self.running, self.searches, self.tables.families)
        invariants.check_sequences(self.sequences.values(), self.searches, self.waiting.max_overtaking)
        invariants.check_searches(self.searches, self.sequences, self.max_num_seqs)
        numbers = self.num_stalled, self.max_num_seqs, self.max_num_batched_tokens
        invariants.check_steps(self.steps, self.running, self.tables.windows, *numbers)
