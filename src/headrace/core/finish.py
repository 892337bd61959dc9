"""When a sequence ends: the rules as pure functions of ints, and the same rules applied to a `Sequence`.

Stop strings are not here: only the server has text. The names and the order of the rules are vLLM's: nothing
stops a sequence before `min_tokens`, the end-of-sequence token comes before `stop_token_ids`, and both before length.
Called by the scheduler and by `core.beams`.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.sequence import Sequence
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Finish

LENGTH = Finish("length")
STOP = Finish("stop")


def stop_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Return every token id that may end a sequence with these parameters."""
    return frozenset(() if params.ignore_eos else eos_token_ids).union(params.stop_token_ids or ())


def finish_after(
    token_id: int, num_generated: int, full: bool, params: SamplingParams, eos_token_ids: Iterable[int]
) -> Finish | None:
    """Return how a sequence ends with its last token `token_id`, or None if it goes on.

    `num_generated` counts that token and the tokens resumed with the request. `full`: max_tokens or the end of the
    context is reached.
    """
    if num_generated >= params.min_tokens:
        if not params.ignore_eos and token_id in eos_token_ids:
            return STOP
        if params.stop_token_ids and token_id in params.stop_token_ids:
            return Finish("stop", stop_reason=token_id)
    return LENGTH if full else None


def finish_of(seq: Sequence, eos_token_ids: frozenset[int]) -> Finish | None:
    """Return how `seq` ends with its last token, or None if it goes on."""
    num = len(seq.tokens)
    return finish_after(seq.tokens[-1], num - seq.num_prompt, num >= seq.max_len, seq.params, eos_token_ids)


def append_known(
    more: dict[int, list[int]],
    flight: list[Sequence],
    seqs: list[Sequence],
    added: list[list[int]],
    ends: list[tuple[Sequence, Finish]],
    eos_token_ids: frozenset[int],
) -> None:
    """Append the tokens `more[i]` to flight[i], each under the rules of an end: they were sampled after accepted draft
    tokens, or a grammar forces them.

    `added` holds the tokens that each of `seqs` got in this step, and `ends` the sequences that end with it; both are
    extended. Tokens after an end are dropped.
    """
    places = {id(seq): place for place, seq in enumerate(seqs)}
    for seq, _ in ends:
        places.pop(id(seq), None)
    for index, token_ids in more.items():
        seq = flight[index]
        place = places.get(id(seq), -1)
        for token_id in token_ids if place >= 0 else ():
            seq.tokens.append(token_id)
            added[place].append(token_id)
            finish = finish_of(seq, eos_token_ids)
            if finish:
                ends.append((seq, finish))
                break
