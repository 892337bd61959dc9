"""Finds stop strings in a text that comes in pieces, and holds back text that may still become one.

Knows no tokens. `tokenizer.DetokenizeStream` searches the whole text of a model, `stopped_parser` the content of a
chat's answer alone.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Finds the stop string that ends first; of several that end there, the longest. Then `reason` is that string, and
    later text is dropped. With `includes` the string is a part of the text."""

    def __init__(self, stops: Sequence[str], includes: bool = False) -> None:
        self.reason: str | None = None
        self._stops = [_Stop(stop) for stop in stops]
        self._includes = includes
        self._withheld = ""

    def push(self, text: str, exempt: bool = False) -> str:
        """Return the text that has become certain. A match that ends in an `exempt` text does not count."""
        if not text or self.reason is not None:
            return ""
        match: tuple[int, int, str] | None = None
        for stop in self._stops:
            end = stop.find(text, exempt)
            if end >= 0 and (match is None or (end, -len(stop.text)) < match[:2]):
                match = (end, -len(stop.text), stop.text)
        if match:
            end, _, self.reason = match
            whole = self._withheld + text[:end]
            self._withheld = ""
            return whole if self._includes else whole[: len(whole) - len(self.reason)]
        whole = self._withheld + text
        # Text before a stop string is certain, and so is the stop string if the output includes it.
        hold = 0 if self._includes else max(stop.num_matched for stop in self._stops)
        self._withheld = whole[len(whole) - hold :]
        return whole[: len(whole) - hold]

    def flush(self) -> str:
        """Return the text that was held back: the text ends here. Another may follow."""
        rest, self._withheld = self._withheld, ""
        for stop in self._stops:
            stop.num_matched = 0
        return rest


class _Stop:
    """Finds one stop string in a text that comes in pieces (Knuth, Morris, Pratt 1977), in linear time."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        # borders[i]: length of the longest proper head of text[:i + 1] that is also its tail.
        self._borders = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._borders[length - 1]
            length += text[i] == text[length]
            self._borders[i] = length

    def find(self, text: str, exempt: bool) -> int:
        """Return the place in `text`, which continues earlier ones, where the stop string ends; -1 if it does not.

        Matches that end in an `exempt` text do not count.
        """
        stop, borders, state = self.text, self._borders, self.num_matched
        if not state and stop[0] not in text:
            return -1
        for i, letter in enumerate(text):
            while state and stop[state] != letter:
                state = borders[state - 1]
            if stop[state] == letter:
                state += 1
                if state == len(stop):
                    if not exempt:
                        return i + 1
                    state = borders[-1]
        self.num_matched = state
        return -1
