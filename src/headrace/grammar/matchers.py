"""`Matchers` computes, for each running sequence with a constraint, which tokens may come next, and which must.

The runner calls `begin` before the forward pass and reads the masks after it; a thread computes them meanwhile. The
state of a matcher depends on the sequence's tokens alone: one that is missing (after a preemption, in a new engine) is
built again from them. Forced tokens are derived one at a time: then an answer that is continued from any of its tokens
continues in the same way. Knows token ids and packed masks; must not know text or logits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.grammar.salted import SaltedCache
from headrace.grammar.vocabulary import Encode, Vocabulary, make_tokenizer
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.params import SamplingParams

Mask = NDArray[np.uint32]
Load = Callable[[int, list[int]], tuple[Vocabulary, Encode]]

MAX_FORCED = 64
"""Tokens that are forced in one step: bounds the time between two forward passes."""
MAX_IDLE = 256
"""Steps after which the matcher of a sequence that does not run is dropped."""
MAX_PROTOTYPES = 32
"""Built grammars in memory, for further requests with the same one."""
GRACE_S = 0.005
"""How long a step waits for late masks while other sequences could go on."""


class GrammarError(ValueError):
    """A constraint that cannot be followed any further: an error of one request."""


@dataclass(slots=True)
class _Follower:
    """One sequence's matcher. `tokens` are the generated tokens that it has consumed. `job` computes the mask after
    `job_for` tokens (None: it only builds the matcher). `seen` is the number of the last step with the sequence."""

    matcher: Any = None
    tokens: list[int] = field(default_factory=list)
    job: Future[Mask] | None = None
    job_for: int | None = None
    seen: int = 0


class Matchers:
    """Matchers of the running sequences, by sequence id.

    Args:
        load: returns, for a width and the ends of text, the vocabulary and the tokenizer's way to spell a text;
            called once, when first needed.
        width: of the logits.
        eos_token_ids: tokens that may end an answer; the first is forced where a grammar allows nothing else.
        capacity: most matchers, not counting the step in flight.
    """

    def __init__(self, load: Load, width: int, eos_token_ids: list[int], capacity: int = 256) -> None:
        self.num_forced = 0
        self.num_deferred = 0
        self._load = load
        self._width = width
        self._words = -(-width // 32)
        self._eos_token_ids = list(eos_token_ids)
        self._capacity = capacity
        self._followers: OrderedDict[int, _Follower] = OrderedDict()
        self._prototypes: SaltedCache[Any] = SaltedCache(MAX_PROTOTYPES)
        # One thread for masks, since it shares the processor with the forward pass; another for grammars, so that a
        # slow grammar does not delay the masks of other sequences.
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="headrace-mask")
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="headrace-grammar")
        self._tokenizer: Any = None
        self._warmed = False
        self._num_steps = 0

    def __len__(self) -> int:
        return len(self._followers)

    def warm(self) -> None:
        """Begin to read the tokenizer, so that the first request need not wait for it. Only the first call does so."""
        if not self._warmed:
            self._warmed = True
            self._builder.submit(self._get_tokenizer)

    def begin(self, requests: Iterable[tuple[int, StructuredOutputs, list[int] | None]]) -> None:
        """Begin to compute masks for (sequence id, its constraint, its generated tokens so far).

        None for the tokens: the sequence does not sample in this step; only its grammar is built.
        """
        self._num_steps += 1
        for seq_id, constraint, tokens in requests:
            follower = self._followers.setdefault(seq_id, _Follower())
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
        """Return the `seq_ids` whose masks are not ready.

        If `others` can go on, this waits for at most `GRACE_S`; otherwise until at least one mask is ready.
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
        """Return the mask after `tokens` of a sequence that `wait` did not return.

        Raises `GrammarError` if its tokens do not follow its constraint, or following it takes too much work.
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
        """Consume the token just sampled. Return the tokens that must follow it, which are consumed too.

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
                    # The sampler refuses the token and says why.
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
        """Drop all matchers and end the threads. May be called twice."""
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
        num_known = len(follower.tokens)
        if follower.tokens != tokens[:num_known]:
            # The scheduler did not commit the last step.
            follower.matcher.reset()
            follower.tokens, num_known = [], 0
        self._take(follower, tokens[num_known:])
        only = self._only(follower.matcher)
        if only is not None:
            mask[only // 32] = np.uint32(1 << (only % 32))
        else:
            follower.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check(follower.matcher)
            if not mask.any():
                raise GrammarError("the constraint allows no token here")
        return mask

    def _take(self, follower: _Follower, tokens: list[int]) -> None:
        matcher = follower.matcher
        # A matcher that has stopped consumes nothing, not even the end of text.
        at_end = matcher.is_stopped() and not matcher.is_error() and tokens in ([i] for i in self._eos_token_ids)
        if tokens and not at_end and not matcher.consume_tokens(tokens):
            self._check(matcher)
            raise GrammarError(f"token {tokens[-1]} does not follow the constraint")
        follower.tokens += tokens

    def _only(self, matcher: Any) -> int | None:
        """Return the one token that may come next, or None if there is a choice."""
        if matcher.is_stopped():
            self._check(matcher)
            return self._eos_token_ids[0]
        forced: list[int] = matcher.compute_ff_tokens()
        return forced[0] if forced else None

    def _check(self, matcher: Any) -> None:
        if matcher.is_error():
            message = matcher.get_error().replace("<non-verbose/>", "").strip()
            raise GrammarError(f"the constraint can not be followed: {message[:300]}")

    def _prototype(self, constraint: StructuredOutputs) -> Any:
        """Return a matcher at the beginning of an answer, to be copied."""
        # Imported here: most engines never see a constraint, and a start need not wait for llguidance.
        from headrace.grammar.compile import build_matcher, compile_grammar

        key = msgspec.msgpack.encode(constraint)
        matcher = self._prototypes.get(constraint.cache_salt, key)
        if matcher is None:
            matcher = build_matcher(self._get_tokenizer(), compile_grammar(constraint), constraint)
            self._prototypes.put(constraint.cache_salt, key, matcher)
        return matcher

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
    """Whether forced tokens may be appended without a forward pass: not where another parameter needs or changes the
    logits there."""
    return (
        params.logprobs is None
        and not params.steers
        and not params.allowed_token_ids
        and not params.bad_words_token_ids
        and not params.logits_processors
        and not params.no_repeat_ngram_size
        and params.thinking_token_budget is None
    )
