"""`Families`: running sequences that answer the same prompt (`n` > 1), so that one can fork another's blocks.

A family is one group of requests with equal prompt, salt and adapter. The first to run computes the prompt; its
siblings wait for that and then share its blocks. If the first has ended, another running sibling is the source, or
else the next sibling computes the prompt itself. Knows sequences, not blocks; called by the scheduler and the tables.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.core.sequence import Sequence


class Families:
    """The running sequences of each family key, in the order in which they started."""

    def __init__(self) -> None:
        self._running: dict[bytes, list[Sequence]] = {}

    def __iter__(self) -> Iterator[tuple[bytes, list[Sequence]]]:
        return iter(self._running.items())

    def enter(self, seq: Sequence) -> None:
        if seq.family:
            self._running.setdefault(seq.family, []).append(seq)

    def leave(self, seq: Sequence) -> None:
        if seq.family:
            members = self._running[seq.family]
            members.remove(seq)
            if not members:
                del self._running[seq.family]

    def source(self, seq: Sequence) -> Sequence | None:
        """Return a running sibling that has computed all tokens that `seq` can share, or None."""
        num_shareable = shareable(seq)
        for sibling in self._running.get(seq.family, ()):
            if sibling.num_computed >= num_shareable:
                return sibling
        return None

    def awaited(self, seq: Sequence) -> bool:
        """Whether a running sibling is still computing the prompt, so that `seq` waits to share its blocks."""
        return seq.family in self._running and seq.may_share and self.source(seq) is None


def shareable(seq: Sequence) -> int:
    """Return the number of tokens that `seq` can share with a sibling: the prompt, less one if nothing follows it, so
    that one token remains to compute."""
    return min(seq.num_prompt, len(seq.tokens) - 1)
