"""`SimulatedExecutor`: an executor without a model, whose tokens prove that the block tables are right.

It owns the physical slots and stores in each the values on which a KV cache would depend: (fingerprint, token,
position). The next token is a hash of everything read back *through the block table* from position 0 on, so a wrong
block, an early reuse, a missed copy or a lost token changes the output; `Oracle.stream` returns the right one offline.
Used by the simulation of the scheduler, and by the server's tests as an engine without torch.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from headrace.protocol.errors import InvariantError
from headrace.protocol.kinds import CacheKind
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import ALL_ROWS, UNDRAWN, Draft, Request, ScheduledBatch, StepResult, TokenLogprob

_EMPTY = -1
HIDDEN_SIZE = 8


class Oracle:
    """The "model": a pure function from a context to its next token.

    `eos_probability` is the share of contexts that end with the first of `eos_token_ids`; other tokens are uniform
    over the vocabulary and are never one of these. `forced_share` of the stretches of eight positions have tokens that
    a grammar prescribes: they depend on seed and position alone.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        eos_probability: float = 0.0,
        forced_share: float = 0.0,
        kinds: Sequence[CacheKind] = (CacheKind(),),
    ) -> None:
        self.vocab_size = vocab_size
        # The positions that some layer sees; 0: all.
        self.window = 0 if kinds[0].window == 0 else max(kind.window for kind in kinds)
        self.has_state = kinds[-1].is_state
        self.forced_share = forced_share
        self.eos_token_ids = sorted(eos_token_ids)
        self.eos_probability = eos_probability if self.eos_token_ids else 0.0

    def next_token(
        self, context: array[int], params: SamplingParams, num_generated: int, state: int | None = None
    ) -> int:
        """Return the token after `context`, flat (fingerprint, token, position) triples, for these parameters. `state`
        is the recurrent state after it (`state_of`), for a model with one; None: computed from the whole context.

        No end-of-sequence and no stop token comes before `min_tokens`, as with a real sampler's mask.
        """
        forced = self._forced_token(params, context[-1] + 1, num_generated)
        if forced is not None:
            return forced
        seen = (context[-3 * self.window :] if self.window else context).tobytes()
        if self.has_state:
            seen += (state_of(context) if state is None else state).to_bytes(4, "little")
        digest = blake2b(seen, digest_size=16, key=(params.seed or 0).to_bytes(8, "little")).digest()
        stop = params.stop_token_ids or ()
        draw = int.from_bytes(digest[8:], "little") / 2**64
        early = num_generated < params.min_tokens
        if not early and draw < self.eos_probability:
            return self.eos_token_ids[0]
        token = int.from_bytes(digest[:8], "little") % self.vocab_size
        for _ in range(self.vocab_size):
            if token not in self.eos_token_ids and not (early and token in stop):
                return token
            token = (token + 1) % self.vocab_size
        raise ValueError("every token of the vocabulary is forbidden")

    def forced_after(self, params: SamplingParams, position: int, num_generated: int) -> list[int]:
        """Return the run of forced tokens that begins at `position`. An end-of-sequence may be among them, and the run
        may be longer than the room of the request."""
        tokens: list[int] = []
        while (token := self._forced_token(params, position + len(tokens), num_generated + len(tokens))) is not None:
            tokens.append(token)
        return tokens

    def _forced_token(self, params: SamplingParams, position: int, num_generated: int) -> int | None:
        if not self.forced_share or position % 8 < 3:
            return None
        stretch, token = (
            blake2b(number.to_bytes(8, "little"), digest_size=8, key=(params.seed or 0).to_bytes(8, "little")).digest()
            for number in (position // 8 + 2**40, position)
        )
        if int.from_bytes(stretch, "little") / 2**64 >= self.forced_share:
            return None
        token_id = int.from_bytes(token, "little") % self.vocab_size
        early = num_generated < params.min_tokens
        return None if early and token_id in (*self.eos_token_ids, *(params.stop_token_ids or ())) else token_id

    def state_after(self, params: SamplingParams, state: float | None, token_id: int) -> float | None:
        """Return the sampler's state after `token_id`; None for the requests (three of four) without one."""
        if not self.forced_share or (params.seed or 0) % 4:
            return None
        return ((state or 0.0) * 31 + token_id) % 1009 + 0.5

    def logprob(self, token_id: int, position: int, num_top: int) -> TokenLogprob:
        """Return an invented but repeatable log-probability, with the chosen token as the likeliest."""
        top = tuple(
            ((token_id + i) % self.vocab_size, -0.5 - 0.3 * i - 0.3 * (token_id * 31 + position * 7 + i * 53) % 17 / 17)
            for i in range(self.vocab_size if num_top < 0 else min(num_top, self.vocab_size))
        )
        return TokenLogprob(token_id, -0.5 - position % 16 / 1024, 1, top)

    def stream(self, request: Request, max_model_len: int, fingerprint: int = 0) -> list[int]:
        """Return all tokens that `request` generates, its resumed ones first, without stop strings and aborts."""
        params, num_prompt = request.params, len(request.prompt_token_ids)
        tokens = [*request.prompt_token_ids, *request.resume_token_ids]
        stops = set(params.stop_token_ids or ()).union(() if params.ignore_eos else self.eos_token_ids)
        limit = min(max_model_len, num_prompt + (params.max_tokens or max_model_len))
        context = array("q")
        for position, token in enumerate(tokens):
            context.extend((fingerprint, token, position))
        generated = list(request.resume_token_ids)
        ended = bool(generated) and generated[-1] in stops and len(generated) >= params.min_tokens
        while not ended and num_prompt + len(generated) < limit:
            token = self.next_token(context, params, len(generated))
            context.extend((fingerprint, token, num_prompt + len(generated)))
            generated.append(token)
            ended = token in stops and len(generated) >= params.min_tokens
        return generated


def state_of(context: array[int], before: int = 0) -> int:
    """Return the simulated recurrent state after `context`: it advances triple by triple, from `before`."""
    return zlib.crc32(context.tobytes(), before)


Guess = Callable[[int, int, Callable[[list[int]], int]], Draft | None]


class Behaviour(NamedTuple):
    """How a simulated executor behaves.

    `fingerprint_of` maps a sequence id to the salt, on which a slot depends besides token and position.
    `fail(step id, chunk index)` makes that chunk fail after it has spoilt its slots; `defer` makes it sample nothing in
    this step. `guess(step id, chunk index, next_token)` may return a draft; `next_token` maps further tokens to the one
    after them; `rest` returns `StepResult.rest`. `delay` is slept in each step, in seconds.
    """

    fingerprint_of: Callable[[int], int] = lambda seq_id: 0
    fail: Callable[[int, int], bool] | None = None
    defer: Callable[[int, int], bool] | None = None
    guess: Guess | None = None
    rest: Callable[[], int] | None = None
    delay: float = 0.0


class SimulatedExecutor:
    """Runs a `ScheduledBatch` on `num_blocks` * `block_size` simulated slots. The further `kinds` of cache have
    `more_blocks`. Raises `InvariantError` for batches that contradict themselves."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        oracle: Oracle,
        behaviour: Behaviour = Behaviour(),
        *,
        kinds: Sequence[CacheKind] = (CacheKind(),),
        more_blocks: Sequence[int] = (),
    ) -> None:
        self.kinds = [kind for kind in kinds if not kind.is_state]
        # By slot: the number of tokens that a state has seen, and the state.
        self.states: dict[int, tuple[int, int]] = {}
        self.has_state = kinds[-1].is_state
        # Of each chunk of the step: the state after so many tokens.
        self._after: list[dict[int, int]] = []
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.oracle = oracle
        self.delay = behaviour.delay
        # Three numbers per slot, for each kind: fingerprint, token, position.
        sizes = (num_blocks, *more_blocks)[: len(self.kinds)]
        self.memory = [array("q", [_EMPTY]) * (3 * size * block_size) for size in sizes]
        self.behaviour = behaviour
        # By sequence id: the token that the step before drew, or why it drew none.
        self._last_tokens: dict[int, int | str] = {}

    def run(self, batch: ScheduledBatch) -> StepResult:
        return self.finish(self.start(batch))

    def start(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Keep the step as it is now; `finish` computes it, as late as a device might."""
        return msgspec.structs.replace(
            batch,
            token_ids=list(batch.token_ids),
            block_tables=[list(table) for table in batch.block_tables],
            more_tables=[[list(table) for table in tables] for tables in batch.more_tables],
        )

    def finish(self, ticket: ScheduledBatch) -> StepResult:
        """Copy blocks, write the chunks, read back, and derive the tokens."""
        batch = ticket
        if self.delay:
            time.sleep(self.delay)
        for kind, copies in enumerate([batch.copies, *batch.more_copies]):
            for source, target in copies:
                self._block(target, kind)[:] = self._block(source, kind)
        self._check(batch)
        row = 0
        self._after.clear()
        offset = 0
        chunks: list[list[int]] = []
        for index, (seq_id, start, length) in enumerate(zip(batch.seq_ids, batch.starts, batch.lens, strict=True)):
            tokens = batch.token_ids[offset : offset + length]
            offset += length
            if tokens == [UNDRAWN]:
                token = self._last_tokens.get(seq_id, "late")
                tokens = [token] if isinstance(token, int) else [0]
            chunks.append(tokens)
            fingerprint = self.behaviour.fingerprint_of(seq_id)
            for table, guesses in self._paths(batch, index):
                self._write(table, start, tokens + guesses, fingerprint)
                for kind, tables in enumerate(batch.more_tables, 1):
                    self._write(tables[index], start, tokens + guesses, fingerprint, kind)
                if self.has_state:
                    self._advance(batch, index, row, tokens + guesses, fingerprint)
                    row += len(tokens + guesses)
        result = StepResult(step_id=batch.step_id, token_ids=[-1] * len(batch))
        # All writes come before all reads, so that a slot that is written twice changes a token.
        before, self._last_tokens = self._last_tokens, {}
        for index, tokens in enumerate(chunks):
            seq_id = batch.seq_ids[index]
            last, is_undrawn = before.get(seq_id), batch.token_ids[sum(batch.lens[:index])] == UNDRAWN
            if last == "failed" or (last == "late" and is_undrawn):
                # There is nothing that it could follow.
                result.row(index).is_deferred = True
                continue
            if self.behaviour.fail is not None and self.behaviour.fail(batch.step_id, index):
                for kind, tables in enumerate([batch.block_tables, *batch.more_tables]):
                    self._write(tables[index], batch.starts[index], [_EMPTY] * len(tokens), _EMPTY, kind)
                result.row(index).error = "simulated failure"
                self._last_tokens[seq_id] = "failed"
            else:
                if batch.samples[index] and self._is_late(batch, index):
                    result.row(index).is_deferred = True
                self._sample(batch, index, tokens, result)
                self._last_tokens[seq_id] = "late" if result.read(index).is_deferred else result.token_ids[index]
        if batch.asks and self.behaviour.rest is not None:
            result.rest = self.behaviour.rest()
        return result

    def close(self) -> None:
        """Release the slots."""
        self.memory = [array("q") for _ in self.kinds]

    def poison(self, blocks: Iterable[int], kind: int = 0) -> None:
        """Overwrite blocks (or states, for the kind after the block kinds) that must not be read any more."""
        for block in blocks:
            if kind == len(self.kinds):
                self.states[block] = _EMPTY, 0
            else:
                self._block(block, kind)[:] = memoryview(array("q", [_EMPTY]) * (3 * self.block_size))

    def read(self, table: list[int], num: int, kind: int = 0) -> array[int]:
        """Return the triples of the positions before `num` that a layer of this kind sees, as the table maps them."""
        context, window = array("q"), self.kinds[kind].window
        width, size = 3 * self.block_size, self.block_size
        first = max(0, num - window) if window else 0
        for block in table[first // size : -(-num // size)]:
            if block < 0:
                raise InvariantError("I-21", f"position {num} reads a freed block of kind {kind}: {table}")
            context += self.memory[kind][block * width : (block + 1) * width]
        return context[3 * (first % size) : 3 * (first % size + num - first)]

    def _read_all(self, batch: ScheduledBatch, index: int, table: list[int], num: int) -> array[int]:
        """Return the slots before position `num` that layers of any kind see. A position that several kinds see is
        taken from the last."""
        contexts = [self.read(table, num)]
        contexts += [self.read(tables[index], num, kind) for kind, tables in enumerate(batch.more_tables, 1)]
        context = max(contexts, key=len)
        for other in contexts:
            context[len(context) - len(other) :] = other
        return context

    def _advance(self, batch: ScheduledBatch, index: int, row: int, tokens: list[int], fingerprint: int) -> None:
        """Advance the state of chunk `index`, whose first row is `row`, and write it where the batch says."""
        slot, start = batch.state_reads[index], batch.starts[index]
        num, state = (0, 0) if slot < 0 else self.states.get(slot, (_EMPTY, 0))
        if num != start:
            raise InvariantError("I-22", f"sequence {batch.seq_ids[index]} reads a state of {num} tokens at {start}")
        writes = dict(batch.state_writes)
        after = {start: state}
        for position, token in enumerate(tokens, start):
            state = after[position + 1] = state_of(array("q", (fingerprint, token, position)), state)
            if row + position - start in writes:
                self.states[writes[row + position - start]] = position + 1, state
        self._after.append(after)

    def _paths(self, batch: ScheduledBatch, index: int) -> list[tuple[list[int], list[int]]]:
        """Return the block table and the draft tokens of every path of chunk `index`; there is one without a tree."""
        table, draft = batch.block_tables[index], batch.drafts.get(index, Draft([]))
        num_whole = (batch.starts[index] + batch.lens[index]) // self.block_size
        tables = [table, *(table[:num_whole] + tail for tail in draft.tails)]
        return [(t, [draft.token_ids[node] for node in path]) for t, path in zip(tables, draft.paths(), strict=True)]

    def _sample_all(self, batch: ScheduledBatch, index: int, result: StepResult) -> None:
        """Sample the token after chunk `index`, and one more after each draft token that equals the last sample."""
        params, num_prompt = batch.params[index], batch.num_prompts[index]
        num, state = batch.starts[index] + batch.lens[index], batch.states.get(index)
        paths = list(enumerate(self._paths(batch, index)))
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        while True:
            path, (table, _) = paths[0]
            at = num + len(tokens)
            context = self._read_all(batch, index, table, at)
            if context[2::3] != array("q", range(at - len(context) // 3, at)):
                raise InvariantError("I-8", f"sequence {batch.seq_ids[index]} reads positions {list(context[2::3])}")
            if not tokens:
                history = batch.histories.get(index, [])
                if history[-len(context) // 3 :] != list(context[1::3]) and (history or params.needs_history):
                    raise InvariantError("I-12", f"sequence {batch.seq_ids[index]} has the history of another")
            recurrent = (self._after[index][at],) if self.has_state else ()
            token = self.oracle.next_token(context, params, at - num_prompt, *recurrent)
            state = self.oracle.state_after(params, state, token)
            tokens.append(token)
            if params.logprobs is not None:
                logprobs.append(self.oracle.logprob(token, at, params.logprobs))
            else:
                forced = self.oracle.forced_after(params, at + 1, at + 1 - num_prompt)
                if forced:
                    result.row(index).forced = forced
                    break
            matches = [each for each in paths if each[1][1][: len(tokens)] == tokens]
            if not matches or self._is_late(batch, index):
                break
            paths = matches
        result.token_ids[index], further = tokens[0], tokens[1:]
        if further:
            result.row(index).further, result.row(index).path = further, path
        if state is not None:
            result.row(index).state = state
        if logprobs:
            result.row(index).logprob, result.row(index).further_logprobs = logprobs[0], logprobs[1:]
        if batch.asks and self.behaviour.guess is not None and params.speculation:
            self._draft(batch, index, table, tokens + result.read(index).forced, result)

    def _draft(
        self, batch: ScheduledBatch, index: int, table: list[int], tokens: list[int], result: StepResult
    ) -> None:
        num = batch.starts[index] + batch.lens[index]
        context = self._read_all(batch, index, table, num)
        fingerprint = self.behaviour.fingerprint_of(batch.seq_ids[index])
        recurrent = self._after[index][num] if self.has_state else 0

        def next_token(more: list[int]) -> int:
            further = array("q")
            for position, token in enumerate(tokens + more, num):
                further.extend((fingerprint, token, position))
            num_generated = num + len(further) // 3 - batch.num_prompts[index]
            state = (state_of(further, recurrent),) if self.has_state else ()
            return self.oracle.next_token(context + further, batch.params[index], num_generated, *state)

        draft = self.behaviour.guess(batch.step_id, index, next_token) if self.behaviour.guess is not None else None
        if draft is not None:
            result.row(index).draft = draft

    def _is_late(self, batch: ScheduledBatch, index: int) -> bool:
        return self.behaviour.defer is not None and self.behaviour.defer(batch.step_id, index)

    def _sample(self, batch: ScheduledBatch, index: int, tokens: list[int], result: StepResult) -> None:
        start, num_prompt, params = batch.starts[index], batch.num_prompts[index], batch.params[index]
        if batch.samples[index] and not result.read(index).is_deferred:
            self._sample_all(batch, index, result)
        if index in batch.pooling:
            result.row(index).pooled = self._pool(batch, index)
        if params.prompt_logprobs is not None and start < num_prompt - 1:
            following = tokens[1:]
            if index in batch.next_token_ids:
                following = [*following, batch.next_token_ids[index]]
            following = following[: num_prompt - 1 - start]
            result.row(index).prompt_logprobs = [
                self.oracle.logprob(token, start + 1 + i, params.prompt_logprobs) for i, token in enumerate(following)
            ]

    def _pool(self, batch: ScheduledBatch, index: int) -> list[float]:
        """Return eight numbers that depend on the context alone; for "mean" a sum over rows, each added once; for "cls"
        those of the first row; for all rows, eight of each."""
        kind, before = batch.pooling[index]
        start, stop = batch.starts[index], batch.starts[index] + batch.lens[index]
        if kind == "mean" and bool(before) != bool(start):
            raise InvariantError("I-8", f"sequence {batch.seq_ids[index]} pools from position {start} on, not from 0")
        context = self.read(batch.block_tables[index], stop)
        if kind == "cls" and before:
            return before
        if kind == ALL_ROWS:
            digests = [
                blake2b(context[: 3 * num].tobytes(), digest_size=HIDDEN_SIZE).digest()
                for num in range(start + 1, stop + 1)
            ]
            return before + [byte - 127.5 for digest in digests for byte in digest]
        total = before or [0.0] * HIDDEN_SIZE
        for num in range(start + 1, stop + 1) if kind == "mean" else (1,) if kind == "cls" else (stop,):
            digest = blake2b(context[: 3 * num].tobytes(), digest_size=HIDDEN_SIZE).digest()
            total = [x + byte - 127.5 for x, byte in zip(total, digest, strict=True)]
        return [x / stop for x in total] if kind == "mean" and stop == batch.num_prompts[index] else total

    def _write(self, table: list[int], start: int, tokens: list[int], fingerprint: int, kind: int = 0) -> None:
        slots, size = self.memory[kind], self.block_size
        for position, token in enumerate(tokens, start):
            at = 3 * (table[position // size] * size + position % size)
            slots[at] = fingerprint
            slots[at + 1] = token
            slots[at + 2] = position

    def read_block(self, block: int) -> bytes:
        """Return all that a block holds."""
        return self._block(block).tobytes()

    def write_block(self, block: int, data: bytes) -> None:
        """Set a block to the result of `read_block`."""
        self._block(block)[:] = array("q", data)

    def _block(self, block: int, kind: int = 0) -> memoryview[int]:
        width = 3 * self.block_size
        return memoryview(self.memory[kind])[block * width : (block + 1) * width]

    def _check(self, batch: ScheduledBatch) -> None:
        """I-4: the blocks that a chunk writes are in no other table of the batch; the slots are read by none."""
        slots = [slot for _, slot in batch.state_writes]
        if len({*slots, *batch.state_reads} - {-1}) < len(slots) + len(set(batch.state_reads) - {-1}):
            raise InvariantError("I-4", f"slots {slots} are written twice, or among those read: {batch.state_reads}")
        for kind, tables in enumerate(batch.more_tables, 1):
            self._check_tables(batch, tables, kind)
        self._check_tables(batch, batch.block_tables, 0)

    def _check_tables(self, batch: ScheduledBatch, block_tables: list[list[int]], kind: int) -> None:
        tails = {i: [block for tail in draft.tails for block in tail] for i, draft in batch.drafts.items()}
        uses = Counter(block for table in (*block_tables, *tails.values()) for block in table)
        if sum(batch.lens) != len(batch.token_ids):
            raise InvariantError("I-12", f"{len(batch.token_ids)} tokens for chunks of {sum(batch.lens)}")
        for index, (start, length, table) in enumerate(zip(batch.starts, batch.lens, block_tables, strict=True)):
            draft = batch.drafts.get(index, Draft([]))
            stop = start + length + len(draft.paths()[0])
            if length < 1 or len(table) != -(-stop // self.block_size):
                raise InvariantError("I-8", f"a table of {len(table)} blocks for {start} ... {stop}")
            for block in (*table[start // self.block_size :], *tails.get(index, [])):
                if uses[block] != 1:
                    raise InvariantError("I-4", f"block {block} of kind {kind} is written and in {uses[block]} tables")
