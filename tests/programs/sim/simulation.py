"""The simulation: the real scheduler, the oracle runner, and a swarm of hostile events, all from one seed.

After every step the scheduler's own `check()` runs; beside it the simulation keeps a ledger of its own and compares
every token with what the oracle says offline. Any difference raises `Violation` or `InvariantError`.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from random import Random

import msgspec
from tests.programs.sim.plain_beams import plain_beams
from tests.programs.sim.world import World, draw_draft, draw_params, draw_request, draw_search, draw_world

from headrace.core.invariants import used_by
from headrace.core.options import SchedulerOptions
from headrace.core.scheduler import Scheduler
from headrace.core.sequence import Status
from headrace.insight.simulated import Behaviour, Oracle, SimulatedExecutor
from headrace.protocol.errors import ContextLengthError, RequestError
from headrace.protocol.step import BeamResult, Draft, Finish, Request, ScheduledBatch, StepOutput


class Violation(Exception):
    """A promise was broken that only an onlooker can see. The message begins with the invariant's number."""


@dataclass
class Account:
    """The ledger's page of one request."""

    request: Request
    number: int
    expected: list[int]
    emitted: list[int] = field(default_factory=list)
    prompt_logprobs: list[int] = field(default_factory=list)
    state: float | None = None
    beams: list[tuple[float, float, list[int]]] = field(default_factory=list)
    started: bool = False
    aborted: bool = False
    failed: bool = False
    ended: bool = False


@dataclass
class Report:
    """What one seed did. `digest` is of the event log."""

    seed: int
    num_steps: int = 0
    events: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    num_computed: int = 0
    num_recomputed: int = 0
    num_hits: int = 0
    violation: str = ""
    digest: str = ""
    log: list[str] = field(default_factory=list)


class Simulation:
    """One seed. `make_scheduler` lets a test plant a bug; with `checking` off only the ledger and the oracle look."""

    def __init__(
        self,
        seed: int,
        *,
        world: World | None = None,
        make_scheduler: Callable[[SchedulerOptions], Scheduler] = Scheduler,
        checking: bool = True,
        keep_log: bool = False,
        overlapping: bool = False,
        kinds: bool = False,
    ) -> None:
        self.rng = Random(seed)
        self.world = world or draw_world(self.rng, kinds)
        self.report = Report(seed)
        numbers = self.world.scheduler_args()
        if overlapping:
            # Neither forced tokens nor guesses run ahead.
            self.world = replace(self.world, forced_share=0.0, guess_share=0.0)
            numbers |= {"speculates": False, "runs_ahead": lambda params: params.logprobs is None}
        self.scheduler = make_scheduler(SchedulerOptions(**numbers))
        self.oracle = Oracle(
            self.world.vocab_size, [0], self.world.eos_probability, self.world.forced_share, self.world.kinds
        )
        self.executor = SimulatedExecutor(
            *(self.world.num_blocks, self.world.block_size, self.oracle),
            Behaviour(
                lambda seq_id: self.fingerprints[seq_id],
                self._fail_chunk,
                self._defer_chunk,
                guess=self._guess if self.world.guess_share else None,
                rest=self._draw_rest if self.world.guess_share else None,
            ),
            kinds=self.world.kinds,
            more_blocks=self.world.more_blocks,
        )
        self.checking = checking
        self.accounts: dict[str, Account] = {}
        self.fingerprints: dict[int, int] = {}
        self.draining = False
        self._keep_log = keep_log
        self._digest = blake2b(digest_size=16)
        self._failing: list[int] = []
        # The steps in flight: the batch, the blocks that it uses, and the executor's ticket.
        self._flight: deque[tuple[ScheduledBatch, list[set[int]], ScheduledBatch]] = deque()
        self._members: dict[int, str] = {}
        self._log(f"world {self.world}")

    def run(self, num_steps: int) -> Report:
        """`num_steps` steps with events, then steps without until all requests have ended."""
        for _ in range(num_steps):
            self.step()
        self.drain()
        return self.report

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        scheduler, report = self.scheduler, self.report
        if not self.draining:
            self._events_between_steps()
        for pool in scheduler.steps.pools:
            pool.has_failed = False
        if not self._flight:
            gaps_of_one = [s for s in scheduler.running if len(s.tokens) - s.num_computed == 1]
            batch = scheduler.schedule()
            for seq in gaps_of_one:
                has_failed = any(pool.has_failed for pool in scheduler.steps.pools)
                if seq.status is Status.RUNNING and seq.seq_id not in batch.seq_ids and not has_failed:
                    raise Violation(f"R-11: {seq.request_id} had one token to compute and got no place in the step")
            self._start(batch)
        ahead = scheduler.schedule_ahead()
        if ahead is not None:
            report.events["step ahead"] += 1
            self._start(ahead)
        if not self.draining:
            self._events_in_flight(self._flight[-1][0])
        batch, in_use, ticket = self._flight.popleft()
        result = self.executor.finish(ticket)
        for pool, used in zip(scheduler.steps.pools, in_use, strict=False):
            for block in used:
                if pool.refs[block] == 0:
                    raise Violation(f"I-7: block {block} was let go while the step that uses it was in flight")
        members = self._members
        for index in self._failing:
            self.accounts[members[batch.seq_ids[index]]].failed = True
        self._failing = []
        names = [members[seq_id] for seq_id in batch.seq_ids]
        further = {names[index]: tokens for index, tokens in result.column("further").items()}
        forced = {names[index]: tokens for index, tokens in result.column("forced").items()}
        output = scheduler.commit(batch, result)
        self._log(f"out {output.request_ids} {output.token_ids} {output.started} {output.finished} {output.stats}")
        self._keep_ledger(output, batch)
        self._check_more(output, further, forced)
        self._check()
        report.num_steps += 1
        report.events["step with work"] += len(batch) > 0
        report.events["copy"] += len(batch.copies)
        report.events["block behind a window"] += str([batch.block_tables, batch.more_tables]).count("-1")
        report.events["state written"] += len(batch.state_writes)
        report.events["hit at a state"] += sum(output.started.values()) * bool(batch.state_reads)

    def _start(self, batch: ScheduledBatch) -> None:
        """Start a step that was scheduled just now."""
        self._log(f"batch {batch.seq_ids} {batch.starts} {batch.lens} {batch.block_tables} {batch.copies}")
        self._log(f"kinds {batch.more_tables} {batch.more_copies} {batch.state_reads} {batch.state_writes}")
        self._check()
        in_use = used_by(batch, self.scheduler.tables.windows)
        for seq in self.scheduler.flight:
            self.fingerprints[seq.seq_id] = self._fingerprint(seq.request)
            self._members[seq.seq_id] = seq.request_id
        self._flight.append((batch, in_use, self.executor.start(batch)))

    def drain(self) -> None:
        """No more events; whatever is in the system must end within a bounded number of steps (I-17)."""
        self.draining = True
        scheduler = self.scheduler
        for pool in scheduler.steps.pools:
            pool.fail_at = 0
        # Every live sequence may be computed three times over, one token a step, with the others waiting.
        widths = {name: search.width for name, search in scheduler.searches.open.items()}
        bound = 10 + 3 * sum(seq.max_len * widths.get(name, 1) for name, seq in scheduler.sequences.items())
        while scheduler.has_work():
            if not bound:
                raise Violation(f"I-17: {len(scheduler.sequences)} requests did not end")
            bound -= 1
            self.step()
        stats = scheduler.stats()
        if stats.kv_cache_usage or stats.num_blocks_held or stats.num_running or stats.num_waiting:
            raise Violation(f"I-1: idle, and {stats}")
        if any(not account.ended for account in self.accounts.values()):
            raise Violation("I-9: idle, and an accepted request has not ended")
        scheduler.reset_prefix_cache()
        self._check()
        for pool, num_blocks in zip(
            scheduler.steps.pools, (self.world.num_blocks, *self.world.more_blocks), strict=True
        ):
            if len(pool.free) != num_blocks:
                raise Violation(f"I-1: {len(pool.free)} of {num_blocks} blocks are free in the end")
        self.report.num_computed = stats.num_batched_tokens
        self.report.num_recomputed = stats.num_recomputed_tokens
        self.report.num_hits = stats.prefix_cache_hits
        self.report.events["preemption"] = stats.num_preemptions
        self.report.events["draft"] = stats.num_drafts
        self.report.events["guess kept"] = stats.num_accepted_tokens
        self.report.digest = self._digest.hexdigest()

    # -- events --------------------------------------------------------------------------------------------------

    def _draw_rest(self) -> int:
        return self.rng.choice([0, 0, 0, 0, 0, 3])

    def _guess(self, step_id: int, index: int, say: Callable[[list[int]], int]) -> Draft | None:
        draft = draw_draft(self.rng, self.world, say)
        self._log(f"guess {draft}")
        return draft

    def _happens(self, name: str) -> bool:
        return self.rng.random() < self.world.rates[name]

    def _events_between_steps(self) -> None:
        rng, scheduler, world = self.rng, self.scheduler, self.world
        if len(scheduler.sequences) < world.max_alive:
            if self._happens("arrival"):
                self._add("arrival", draw_request(rng, world, self._name()))
            if self._happens("group"):
                self._add_group()
            if self._happens("resume"):
                self._add_resumed()
            if self._happens("beams"):
                self._add_search()
        if self._happens("too long"):
            size = world.longest + rng.choice([0, 1, 50])
            request = draw_request(rng, world, self._name())
            self._refused("too long", msgspec.structs.replace(request, prompt_token_ids=[1] * size))
        if scheduler.sequences and self._happens("duplicate id"):
            self._refused("duplicate id", draw_request(rng, world, self._pick()))
        if scheduler.sequences and self._happens("abort"):
            self._abort("abort", self._pick())
        if scheduler.running and self._happens("preempt"):
            name = rng.choice(scheduler.running).request_id
            self._event("preempt", name)
            if scheduler.preempt(name) == bool(self._flight):
                raise Violation(f"I-10: {name} runs and was not preempted, or was beside a step in flight")
        if self._happens("allocation failure"):
            number = rng.randint(1, 4)
            pool = scheduler.steps.pools[number % len(scheduler.steps.pools)]
            pool.fail_at = pool.num_allocations + number
            self._event("allocation failure", str(pool.fail_at))
        if self._happens("cache reset"):
            self._event("cache reset", str(len(scheduler.cache)))
            scheduler.reset_prefix_cache()
        if self._happens("poison"):
            self._event("poison", str(len(scheduler.pool.free)))
            for kind, pool in enumerate(scheduler.steps.pools):
                self.executor.poison(pool.free, kind)

    def _events_in_flight(self, batch: ScheduledBatch) -> None:
        scheduler, rng = self.scheduler, self.rng
        # Of a sequence that ended while its next step ran, the end may be reported already.
        known = [seq for seq in scheduler.flight if seq.request_id in scheduler.sequences]
        if known and self._happens("abort in flight"):
            self._abort("abort in flight", rng.choice(known).request_id)
            self._check()
        if len(scheduler.sequences) < self.world.max_alive and self._happens("arrival in flight"):
            self._add("arrival in flight", draw_request(rng, self.world, self._name()))
        if self._happens("reset in flight"):
            self._event("reset in flight", str(len(scheduler.cache)))
            scheduler.reset_prefix_cache()
            self._check()
        if len(batch) and self._happens("preempt") and scheduler.preempt(rng.choice(scheduler.flight).request_id):
            raise Violation("I-7: a sequence of the step in flight was preempted")

    def _fail_chunk(self, step_id: int, index: int) -> bool:
        if self.draining or not self._happens("chunk failure"):
            return False
        self._event("chunk failure", f"{step_id} {index}")
        self._failing.append(index)
        return True

    def _defer_chunk(self, step_id: int, index: int) -> bool:
        if self.draining or not self._happens("late sampler"):
            return False
        self._event("late sampler", f"{step_id} {index}")
        return True

    def _add_search(self) -> None:
        request = draw_search(self.rng, self.world, self._name())
        beam, size, num_prompt = request.beam, self.world.block_size, len(request.prompt_token_ids)
        room = min(request.params.max_tokens, self.scheduler.max_model_len - num_prompt)
        whole = num_prompt // size
        is_wide = whole + beam.beam_width * (-(-(num_prompt + room - 1) // size) - whole) > self.world.num_blocks
        if not self.scheduler.tables.is_plain:
            numbers = beam.beam_width, num_prompt, num_prompt + room
            is_wide = any(k.claim(*numbers) > k.pool.num_blocks for k in self.scheduler.tables.all_kinds)
        if is_wide:
            self._refused("too wide", request)
            return
        self._add("beams", request)
        stops = frozenset([*((0,) if not request.params.ignore_eos else ()), *(request.params.stop_token_ids or ())])
        prompt, print_ = request.prompt_token_ids, self._fingerprint(request)

        def tops(token_ids: list[int]) -> tuple[tuple[int, float], ...]:
            context = array("q")
            for position, token in enumerate([*prompt, *token_ids]):
                context.extend((print_, token, position))
            token = self.oracle.next_token(context, request.params, len(token_ids))
            return self.oracle.logprob(token, len(prompt) + len(token_ids), self.world.vocab_size).top

        self.accounts[request.request_id].beams = plain_beams(tops, beam, stops, room)

    def _add_group(self) -> None:
        group = self._name()
        first = draw_request(self.rng, self.world, group, group=group)
        for index in range(self.rng.randint(2, 4)):
            params = draw_params(self.rng, self.world)
            name = f"{group}.{index}"
            request = msgspec.structs.replace(first, request_id=name, params=params)
            if self.rng.random() < 0.2:
                # A stranger who gives the same group another prompt must not get the group's blocks.
                other = draw_request(self.rng, self.world, name, group=group)
                request = msgspec.structs.replace(request, prompt_token_ids=other.prompt_token_ids)
            self._add("group", self._resumed(request) if self.rng.random() < 0.1 else request)

    def _add_resumed(self) -> None:
        self._add("resume", self._resumed(draw_request(self.rng, self.world, self._name())))

    def _resumed(self, request: Request) -> Request:
        stream = self.oracle.stream(request, self.scheduler.max_model_len, self._fingerprint(request))
        return msgspec.structs.replace(
            request,
            resume_token_ids=stream[: self.rng.randint(0, len(stream))],
            resume_state=self.rng.choice([None, 3.5]),
        )

    def _add(self, event: str, request: Request) -> None:
        self._event(event, f"{request}")
        fresh = msgspec.structs.replace(request, resume_token_ids=[])
        stream = self.oracle.stream(fresh, self.scheduler.max_model_len, self._fingerprint(request))
        self.scheduler.add(request)
        seq = self.scheduler.sequences[request.request_id]
        self.fingerprints[seq.seq_id] = self._fingerprint(request)
        account = Account(request, len(self.accounts), stream[len(request.resume_token_ids) :])
        account.state = request.resume_state
        self.accounts[request.request_id] = account

    def _refused(self, event: str, request: Request) -> None:
        self._event(event, request.request_id)
        error = ContextLengthError if event == "too long" else RequestError
        before = self.scheduler.stats(), len(self.scheduler.sequences)
        try:
            self.scheduler.add(request)
        except error:
            if (self.scheduler.stats(), len(self.scheduler.sequences)) != before:
                raise Violation("S-32: a refused request left something behind") from None
            return
        raise Violation(f"I-19: a request was accepted that is {event}")

    def _abort(self, event: str, name: str) -> None:
        account = self.accounts[name]
        seq = self.scheduler.sequences[name]
        live = seq.status is not Status.FINISHED
        self._event(event, name)
        if self.scheduler.abort(name) != live:
            raise Violation(f"R-05: abort of {name}, live {live}, said {not live}")
        if self.scheduler.abort(name) or self.scheduler.abort("nobody"):
            raise Violation("R-05: an abort of what is not there said that it was")
        account.aborted = account.aborted or live

    def _fingerprint(self, request: Request) -> int:
        return zlib.crc32(request.cache_salt.encode())

    def _name(self) -> str:
        self._num_names = getattr(self, "_num_names", 0) + 1
        return f"r{self._num_names}"

    def _pick(self) -> str:
        return self.rng.choice(list(self.scheduler.sequences))

    # -- the ledger ----------------------------------------------------------------------------------------------

    def _keep_ledger(self, output: StepOutput, batch: ScheduledBatch) -> None:
        accounts = self.accounts
        if len(set(output.request_ids)) != len(output.request_ids):
            raise Violation("I-12: a request is twice in one output")
        for name, num_hits in output.started.items():
            account = accounts[name]
            if account.started or num_hits > len(account.request.prompt_token_ids):
                raise Violation(f"I-9: {name} started twice, or found {num_hits} prompt tokens")
            account.started = True
            self._check_order(account)
        for name, tokens in zip(output.request_ids, output.token_ids, strict=True):
            account = accounts[name]
            at = len(account.emitted)
            if account.ended or not account.started:
                raise Violation(f"I-9: {name} got tokens outside its life")
            if not tokens or tokens != account.expected[at : at + len(tokens)]:
                raise Violation(f"I-13: {name} got {tokens} at {at}, wants {account.expected[at : at + 3]}")
            account.emitted += tokens
            self.report.num_tokens += len(tokens)
            wants = account.request.params.logprobs is not None
            if [entry.token_id for entry in output.logprobs.get(name, ())] != (tokens if wants else []):
                raise Violation(f"I-12: {name} got log-probabilities of other tokens")
        for name, entries in output.prompt_logprobs.items():
            accounts[name].prompt_logprobs += [entry.token_id for entry in entries]
        for name, finish in output.finished.items():
            account = accounts[name]
            if account.ended:
                raise Violation(f"I-9: {name} ended twice")
            account.ended = True
            self.report.events[f"end by {finish.reason}"] += 1
            if account.request.beam is not None and finish.reason in ("stop", "length"):
                self._check_beams(account, output.beams.get(name), finish)
                continue
            self._check_end(account, finish.reason, finish.stop_reason)
        ended = sum(account.ended for account in accounts.values()) if self.draining else self.scheduler.num_finished
        if ended + len(self.scheduler.sequences) != len(accounts):
            raise Violation(f"I-9: {len(accounts)} accepted, {ended} ended, {len(self.scheduler.sequences)} inside")

    def _check_more(self, output: StepOutput, further: dict[str, list[int]], forced: dict[str, list[int]]) -> None:
        """What was sampled after guesses and what was forced comes in the step that made it, whole, unless the answer
        has ended before."""
        columns = dict(zip(output.request_ids, output.token_ids, strict=True))
        for name, tokens in columns.items():
            sampled = [tokens[0], *further.get(name, [])]
            expected = sampled[1:] + forced.get(name, [])
            is_cut = len(tokens) <= len(expected) and name not in output.finished
            if tokens[1:] != expected[: len(tokens) - 1] or is_cut:
                raise Violation(f"I-12: {name} got {tokens[1:]} after its token, {expected} were to follow")
            self.report.events["forced"] += len(tokens) - 1
            account = self.accounts[name]
            for token in sampled:
                account.state = self.oracle.state_after(account.request.params, account.state, token)
            if output.states.get(name) != account.state:
                raise Violation(f"I-12: {name} has the state {output.states.get(name)}, not {account.state}")
            self.report.events["state"] += account.state is not None
        if output.states.keys() - columns.keys():
            raise Violation("I-12: a state is told of a request that got no token")

    def _check_beams(self, account: Account, result: BeamResult | None, finish: Finish) -> None:
        name, beams = account.request.request_id, result.beams if result else []
        outcome = [(beam.score, beam.cumulative_logprob, beam.token_ids) for beam in beams]
        if outcome != account.beams:
            raise Violation(f"I-13: the beams of {name} are {outcome}, not {account.beams}")
        if not result or finish != beams[0].finish or not 0 < result.num_blocks <= result.num_blocks_unshared:
            raise Violation(f"I-12: {name} ended by {finish} with {result}")
        self.report.events["beams found"] += len(outcome)
        self.report.events["beam blocks"] += result.num_blocks
        self.report.events["beam blocks unshared"] += result.num_blocks_unshared

    def _check_end(self, account: Account, reason: str, stop_reason: object) -> None:
        name, params = account.request.request_id, account.request.params
        if reason == "abort":
            right = account.aborted
        elif reason == "error":
            right = account.failed
        else:
            last = [*account.request.resume_token_ids, *account.emitted][-1]
            is_eos = last == 0 and not params.ignore_eos
            is_stop = last in (params.stop_token_ids or ())
            right = account.emitted == account.expected and not account.aborted
            right = right and (stop_reason is None or (stop_reason == last and is_stop))
            right = right and (is_eos or is_stop if reason == "stop" else reason == "length")
            prompt = account.request.prompt_token_ids
            if account.started and account.prompt_logprobs != (prompt[1:] if params.prompt_logprobs else []):
                raise Violation(f"I-12: {name} got log-probabilities of {account.prompt_logprobs} for {prompt}")
        if not right:
            raise Violation(f"I-11: {name} ended by {reason} after {len(account.emitted)} tokens")

    def _check_order(self, account: Account) -> None:
        """First come, first served: who has not started is later, or waits for a sibling."""
        if self.world.policy != "fcfs":
            return
        for name in self.scheduler.sequences:
            other = self.accounts[name]
            if not other.started and other.number < account.number and not other.request.group and not other.aborted:
                raise Violation(f"I-18: {account.request.request_id} started before {name}")

    # -- small things --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.checking:
            self.scheduler.check()

    def _event(self, name: str, detail: str) -> None:
        self.report.events[name] += 1
        self._log(f"{name} {detail}")

    def _log(self, line: str) -> None:
        self._digest.update(line.encode())
        if self._keep_log:
            self.report.log.append(f"{self.report.num_steps}: {line}")
