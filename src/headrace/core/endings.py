"""Where a step's tokens end their sequences: the rules of `core.finish` applied to a `Sequence`.

Called by the scheduler alone, in `commit`.
"""

from __future__ import annotations

from headrace.core.finish import finish_after
from headrace.core.sequence import Sequence
from headrace.protocol.step import Finish


def finish_of(seq: Sequence, eos_token_ids: frozenset[int]) -> Finish | None:
    """How `seq` ends with its last token, or None if it goes on."""
    num = len(seq.tokens)
    return finish_after(seq.tokens[-1], num - seq.num_prompt, num >= seq.max_len, seq.params, eos_token_ids)


def append_known(
    more: dict[int, list[int]],
    flight: list[Sequence],
    seqs: list[Sequence],
    added: list[list[int]],
    ended: list[tuple[Sequence, Finish]],
    eos_token_ids: frozenset[int],
) -> None:
    """Let the tokens `more[i]` follow that just sampled for flight[i], each under the rules of an end: they were
    sampled after guesses that were kept, or a grammar forces them. `added` has what `seqs` got in this step, and
    `ended` those that end with it; both are extended. What comes after an end is dropped.
    """
    places = {id(seq): place for place, seq in enumerate(seqs)}
    for seq, _ in ended:
        places.pop(id(seq), None)
    for index, token_ids in more.items():
        seq = flight[index]
        place = places.get(id(seq), -1)
        for token_id in token_ids if place >= 0 else ():
            seq.tokens.append(token_id)
            added[place].append(token_id)
            finish = finish_of(seq, eos_token_ids)
            if finish:
                ended.append((seq, finish))
                break
