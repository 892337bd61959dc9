"""`Matchers`: for every running sequence with a constraint, which tokens may come next, and which must.

Held by the runner, which calls `begin` before the forward pass and reads the masks after it; they are made on a thread
of their own meanwhile. A matcher is nothing but a view of the tokens so far: it is built again from them when it is
not there (after a preemption, in a new engine), so what is dropped is only time. What follows from the tokens is
decided one token at a time, so that an answer goes on the same wherever it was cut. Knows token ids and packed masks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.grammar.vocabulary import Encode, Vocabulary, make_tokenizer
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.params import SamplingParams

Mask = NDArray[np.uint32]
Load = Callable[[int, list[int]], tuple[Vocabulary, Encode]]

MAX_FORCED = 64
"""Tokens that are forced in one step: a bound on what happens between two forward passes."""
MAX_IDLE = 256
"""Steps after which the matcher of a sequence that does not run is dropped."""
MAX_PROTOTYPES = 32
"""Built grammars that are kept for the next request that brings the same one."""
GRACE_S = 0.005
"""How long a step waits for masks that are late while others could go on."""


class GrammarError(ValueError):
    """A constraint can not be followed any further. Belongs to one request."""


class _Follower:
    """One sequence's matcher. `tokens` are the generated tokens that it has taken in. `job` makes its mask after
    `job_for` tokens; None there only builds."""

    __slots__ = ("job", "job_for", "matcher", "seen", "tokens")

    def __init__(self) -> None:
        self.matcher: Any = None
        self.tokens: list[int] = []
        self.job: Future[Mask] | None = None
        self.job_for: int | None = None
        self.seen = 0


class Matchers:
    """Matchers of the running sequences, by sequence id.

    Args:
        load: gives, for a width and the ends of text, the vocabulary and the tokenizer's way to spell a text; called
            once, on the first need.
        width: of the logits.
        eos_token_ids: what may end an answer; the first is taken where a grammar allows nothing else.
        capacity: matchers that are kept at most, beyond those of the step in flight.
    """

    def __init__(self, load: Load, width: int, eos_token_ids: list[int], capacity: int = 256) -> None:
        self.num_forced = 0
        self.num_masks = 0
        self.num_deferred = 0
        self._load = load
        self._width = width
        self._words = -(-width // 32)
        self._eos_token_ids = list(eos_token_ids)
        self._capacity = capacity
        self._followers: OrderedDict[int, _Follower] = OrderedDict()
        self._prototypes: OrderedDict[bytes, Any] = OrderedDict()
        # One thread for masks, for it shares the processor with the forward pass; another for grammars, so that a slow
        # one delays nobody's masks.
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="headrace-mask")
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="headrace-grammar")
        self._tokenizer: Any = None
        self._warmed = False
        self._num_steps = 0

    def __len__(self) -> int:
        return len(self._followers)

    def warm(self) -> None:
        """Begin to read the tokenizer, which the first request would wait for otherwise. Does nothing the next time."""
        if not self._warmed:
            self._warmed = True
            self._builder.submit(self._get_tokenizer)

    def begin(self, wanted: Iterable[tuple[int, StructuredOutputs, list[int] | None]]) -> None:
        """Begin to make masks for (sequence id, its constraint, its generated tokens so far).

        No tokens: it does not sample in this step, but will soon, so its grammar is built.
        """
        self._num_steps += 1
        for seq_id, constraint, tokens in wanted:
            follower = self._followers.get(seq_id)
            if follower is None:
                follower = self._followers[seq_id] = _Follower()
            self._followers.move_to_end(seq_id)
            follower.seen = self._num_steps
            count = None if tokens is None else len(tokens)
            if follower.job is None or (count is not None and follower.job_for != count):
                if count is None and follower.matcher is not None:
                    continue
                thread = self._builder if follower.matcher is None else self._masks
                follower.job_for = count
                follower.job = thread.submit(self._follow, follower, constraint, tokens)
        self._drop_idle()

    def wait(self, seq_ids: list[int], others: bool) -> set[int]:
        """Those of `seq_ids` whose masks are not there yet.

        If `others` have something to do, they are not kept waiting for long; else this waits for one at least.
        """
        jobs = {seq_id: job for seq_id in seq_ids if (job := self._followers[seq_id].job) is not None}
        late = {seq_id for seq_id, job in jobs.items() if not job.done()}
        if late:
            wait([jobs[seq_id] for seq_id in late], timeout=GRACE_S)
            late = {seq_id for seq_id in late if not jobs[seq_id].done()}
            if late and len(late) == len(seq_ids) and not others:
                wait(jobs.values(), return_when=FIRST_COMPLETED)
                late = {seq_id for seq_id in late if not jobs[seq_id].done()}
        self.num_deferred += len(late)
        return late

    def mask(self, seq_id: int, constraint: StructuredOutputs, tokens: list[int]) -> Mask:
        """The mask after `tokens`, of a sequence that `wait` did not name.

        Raises `GrammarError` if its tokens do not follow its constraint, or following it takes too much.
        """
        follower = self._followers.setdefault(seq_id, _Follower())
        job, follower.job = follower.job, None
        try:
            if job is None or follower.job_for != len(tokens):
                # A part of the step was computed again, for want of memory.
                thread = self._builder if follower.matcher is None else self._masks
                job = thread.submit(self._follow, follower, constraint, tokens)
            return job.result()
        except (HeadraceError, ValueError) as error:
            del self._followers[seq_id]
            raise GrammarError(str(error)) from None

    def accept(self, seq_id: int, token_id: int, params: SamplingParams, num_generated: int) -> list[int]:
        """Take in the token just sampled. Returns those that must follow it, which are taken in too.

        `num_generated` counts the sampled token. Raises `GrammarError` if it does not follow the constraint.
        """
        follower = self._followers[seq_id]
        self._take(follower, [token_id])
        forced: list[int] = []
        if jumps(params) and token_id not in self._eos_token_ids:
            barred = {*self._eos_token_ids, *(params.stop_token_ids or ())}
            while len(forced) < MAX_FORCED:
                next_id = self._only(follower.matcher)
                if next_id is None:
                    break
                if next_id in barred and num_generated + len(forced) < params.min_tokens:
                    # The sampler says why this can not be.
                    break
                forced.append(next_id)
                self._take(follower, [next_id])
                if next_id in barred:
                    break
        if (forced[-1] if forced else token_id) in self._eos_token_ids:
            self._followers.pop(seq_id, None)
        self.num_forced += len(forced)
        return forced

    def close(self) -> None:
        """Forget everything. May be called twice."""
        for thread in (self._masks, self._builder):
            thread.shutdown(wait=True, cancel_futures=True)
        self._followers.clear()
        self._prototypes.clear()

    # -- on the threads, or on the runner's own once they are done with a sequence

    def _follow(self, follower: _Follower, constraint: StructuredOutputs, tokens: list[int] | None) -> Mask:
        if follower.matcher is None:
            follower.matcher = self._prototype(constraint).deep_copy()
            follower.tokens = []
        mask = np.zeros(self._words, np.uint32)
        if tokens is None:
            return mask
        known = len(follower.tokens)
        if follower.tokens != tokens[:known]:
            # A step was taken back.
            follower.matcher.reset()
            follower.tokens, known = [], 0
        self._take(follower, tokens[known:])
        only = self._only(follower.matcher)
        if only is not None:
            mask[only // 32] = np.uint32(1 << (only % 32))
        else:
            follower.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check(follower.matcher)
            if not mask.any():
                raise GrammarError("the constraint allows no token here")
        self.num_masks += 1
        return mask

    def _take(self, follower: _Follower, tokens: list[int]) -> None:
        matcher = follower.matcher
        # One that has stopped waits for the end of the text and takes in nothing, not even that.
        at_end = matcher.is_stopped() and not matcher.is_error() and tokens in ([i] for i in self._eos_token_ids)
        if tokens and not at_end and not matcher.consume_tokens(tokens):
            self._check(matcher)
            raise GrammarError(f"token {tokens[-1]} does not follow the constraint")
        follower.tokens += tokens

    def _only(self, matcher: Any) -> int | None:
        """The one token that may come next, or None if there is a choice."""
        if matcher.is_stopped():
            self._check(matcher)
            return self._eos_token_ids[0]
        forced: list[int] = matcher.compute_ff_tokens()
        return forced[0] if forced else None

    def _check(self, matcher: Any) -> None:
        if matcher.is_error():
            said = matcher.get_error().replace("<non-verbose/>", "").strip()
            raise GrammarError(f"the constraint can not be followed: {said[:300]}")

    def _prototype(self, constraint: StructuredOutputs) -> Any:
        key = msgspec.msgpack.encode(constraint)
        found = self._prototypes.get(key)
        if found is None:
            # As late as this: most engines never see a constraint, and none waits for llguidance when it starts.
            from headrace.grammar.compile import build_matcher, compile_grammar

            found = build_matcher(self._get_tokenizer(), compile_grammar(constraint), constraint)
            self._prototypes[key] = found
            if len(self._prototypes) > MAX_PROTOTYPES:
                self._prototypes.popitem(last=False)
        self._prototypes.move_to_end(key)
        return found

    def _get_tokenizer(self) -> Any:
        if self._tokenizer is None:
            if not self._eos_token_ids:
                raise RequestError("structured_outputs", "a constraint", "left out: the model has no end-of-text token")
            vocabulary, encode = self._load(self._width, self._eos_token_ids)
            self._tokenizer = make_tokenizer(vocabulary, encode)
        return self._tokenizer

    def _drop_idle(self) -> None:
        while self._followers:
            seq_id, follower = next(iter(self._followers.items()))
            idle = self._num_steps - follower.seen
            if follower.job is not None or idle == 0:
                return
            if idle <= MAX_IDLE and len(self._followers) <= self._capacity:
                return
            del self._followers[seq_id]


def jumps(params: SamplingParams) -> bool:
    """Whether forced tokens may be appended without a forward pass: not where something else wants to see or to change
    what the model says there."""
    return (
        params.logprobs is None
        and not params.steers
        and not params.allowed_token_ids
        and not params.bad_words_token_ids
        and not params.logits_processors
        and not params.no_repeat_ngram_size
        and params.thinking_token_budget is None
    )
