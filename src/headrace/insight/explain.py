"""`explain`: why a request took the time it took, as parts that sum to its latency, and at most five sentences.

Called with a `Life` by the routes of the server and by `headrace explain`. Others are named by a function of the
caller, so that the holder of a key reads "another request" where an administrator reads an id. Knows no HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from headrace.core.journal import Wait
from headrace.core.prefix import Miss
from headrace.insight.limits import Machine, Share, share_of
from headrace.insight.lives import ESTIMATES, Life, Lives

Text = Callable[[list[int]], str]
"""Decodes token ids."""

MAX_SENTENCES = 5
MIN_SHARE = 0.02
"""Parts below this share of the latency get no sentence."""

WORDS = {
    "tokenising": "was rendered and tokenised",
    "sending": "waited for an engine that was starting",
    "mid_step": "arrived in the middle of a step",
    "queued": "waited in the queue",
    "prefill": "read its prompt",
    "no_budget": "had blocks, and no room in the step",
    "decode": "wrote its answer",
    "beside_prefill": "shared steps with prompts of others",
    "beside_guesses": "shared steps with draft tokens",
    "preempted": "was preempted",
    "recomputed": "computed again what a preemption had dropped",
    "mask_late": "waited for the mask of its grammar",
    "between_steps": "was between steps",
    "restarting": "waited for an engine that had died",
    "delivery": "was delivered",
}
LACKS = {
    Wait.TOKENS: "tokens of the step",
    Wait.PLACES: "a place among the running",
    Wait.BLOCKS: "KV blocks",
    Wait.PROTECTION: "room beside protected requests",
    Wait.SIBLING: "the prompt that a sibling reads",
}
MISSES = {
    Miss.NONE: "the whole prompt was cached",
    Miss.EMPTY: "nothing was cached under this root yet",
    Miss.DIVERGED: "the cached prompts differ from token {at} on",
    Miss.EVICTED: "the block at token {at} was evicted {seconds:.1f} s before, for {other}",
    Miss.PART_OF_A_BLOCK: "what follows token {at} had not filled a block, and only whole blocks are cached",
    Miss.EVERY_ROW: "the request needs every row of its prompt (prompt_logprobs or mean pooling)",
    Miss.OFF: "prefix caching is off",
    Miss.OTHER_KIND: "more tokens were cached, but after token {at} not what every kind of layer needs there",
}


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the latency. `estimated`: a share of steps that others used too, split as `Explanation.split` says."""

    name: str
    seconds: float
    estimated: bool = False


class CacheVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of the prompt that the prefix cache had when the request began to run, and why not more. `prompt` and
    `cached` are the text around the first difference on both sides, where there is one."""

    num_cached_tokens: int
    num_prompt_tokens: int
    reason: str
    at_token: int
    sentence: str
    prompt: str | None = None
    cached: str | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """`parts` sum to `latency`, in seconds; `split` is the measure by which steps of several requests are split:
    "fitted step times" where `headrace plan --check` has measured this model on this machine, and else "rows".

    Accepted draft tokens and cached tokens are time saved, outside of the sum. `preemptions` counts the preemptions of
    this request alone. `spans` are [name, begin, end] of its phases, one after the other, in seconds from its arrival.
    `memory` compares the decoding steps between its first and its last token with the machine, None where that is
    unknown. `replica` computed the end of the answer."""

    id: str
    replica: int
    latency: float
    ttft: float | None
    parts: list[Part]
    split: str
    spans: list[tuple[str | float, ...]]
    memory: Share | None
    prefix_cache: list[CacheVerdict]
    num_cached_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    preemptions: int
    finish_reason: str
    sentences: list[str]


def explain(
    life: Life,
    lives: Lives,
    name_of: Callable[[Life | None], str],
    text_of: Text | None = None,
    machine: Machine | None = None,
) -> Explanation:
    """Return the explanation of a life that has ended. `name_of` returns the name of another request as this reader may
    see it; `machine` has its measured limits."""
    arrived = life.arrival.times[0]
    parts = [
        Part(name=name, seconds=life.parts[name], estimated=name in ESTIMATES) for name in WORDS if name in life.parts
    ]
    verdicts = [verdict_of(life, index, lives, name_of, text_of) for index in range(len(life.misses))]
    return Explanation(
        id=life.call_id or life.request_id,
        latency=life.latency,
        replica=life.replica,
        ttft=life.first_token - arrived if life.first_token else None,
        parts=parts,
        split=lives.split,
        spans=[(name, begin - arrived, end - arrived) for name, begin, end in life.spans],
        memory=share_of(*life.reads, lives.reads, machine or Machine()) if life.first_token else None,
        prefix_cache=verdicts,
        num_cached_tokens=life.num_cached,
        num_draft_tokens=life.num_guessed,
        num_accepted_tokens=life.num_kept,
        preemptions=len(life.preemptions),
        finish_reason=life.reason,
        sentences=_sentences(life, lives, name_of),
    )


def verdict_of(
    life: Life,
    index: int,
    lives: Lives,
    name_of: Callable[[Life | None], str],
    text_of: Text | None,
) -> CacheVerdict:
    """Describe the tokens that the cache had at one admission."""
    miss = life.misses[index]
    admission = miss.admission
    reason = Miss(admission.miss)
    other = name_of(lives.life_of(admission.by))
    sentence = MISSES[reason].format(at=admission.at, seconds=miss.time - admission.evicted_time, other=other)
    ours, theirs = miss.token_ids or ([], [])
    return CacheVerdict(
        num_cached_tokens=admission.num_cached,
        num_prompt_tokens=life.arrival.num_prompt,
        reason=reason.name.lower(),
        at_token=admission.at,
        sentence=sentence,
        prompt=text_of(ours) if ours and text_of is not None else None,
        cached=text_of(theirs) if theirs and text_of is not None else None,
    )


def _sentences(life: Life, lives: Lives, name_of: Callable[[Life | None], str]) -> list[str]:
    total = life.latency
    sentences: list[str] = []
    for part, seconds in sorted(life.parts.items(), key=lambda item: -item[1]):
        if seconds < MIN_SHARE * total or len(sentences) == MAX_SENTENCES:
            break
        words = WORDS[part]
        if part == "beside_prefill":
            words = "waited beside " + _chunks(life, lives, name_of, life.arrival.times[3], life.ended)
            words += f" (estimated by {lives.split})"
        elif part in ("queued", "preempted"):
            words += _reason(life, lives, name_of)
        sentences.append(f"{1e3 * seconds:.0f} of {1e3 * total:.0f} ms: {words}")
    return sentences


def _reason(life: Life, lives: Lives, name_of: Callable[[Life | None], str]) -> str:
    """Return the resource that the queue lacked most of the time, and the requests whose prompts were read
    meanwhile."""
    wait = Wait(max(range(len(life.waits)), key=life.waits.__getitem__))
    lack = f" for {LACKS[wait]}" if wait in LACKS and life.waits[wait] else ""
    chunks = _chunks(life, lives, name_of, life.arrival.times[3], life.misses[0].time if life.misses else life.ended)
    return lack + (f", behind {chunks}" if chunks else "")


def _chunks(life: Life, lives: Lives, name_of: Callable[[Life | None], str], begin: float, end: float) -> str:
    """Return the chunks of others' prompts between two times in words: "3 prefill chunks of 7f2 (6,144 tokens)"."""
    tokens, numbers = Counter[str](), Counter[str]()
    for chunk in lives.chunks:
        if chunk.ended > begin and chunk.begun < end and chunk.seq_id != life.arrival.seq_id:
            name = name_of(lives.life_of(chunk.seq_id))
            tokens[name] += chunk.num_tokens
            numbers[name] += 1
    words = []
    for name, num in tokens.most_common(2):
        count = numbers[name]
        words.append(f"{count} prefill chunk{'s' * (count > 1)} of {name} ({num:,} tokens)")
    if len(tokens) > 2:
        words.append(f"{sum(numbers.values()) - sum(numbers[n] for n, _ in tokens.most_common(2))} of others")
    return " and ".join(words)
