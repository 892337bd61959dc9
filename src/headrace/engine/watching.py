"""`Watching`: whether the engine sends the events of its blocks, also after a restart. Called by `engine.replica`."""

from __future__ import annotations

from collections.abc import Callable

from headrace.protocol import frames


class Watching:
    """`post` sends a message to the engine."""

    def __init__(self, post: Callable[[frames.ToEngine], None]) -> None:
        self._post = post
        self._is_watched = False

    def watch(self, is_watched: bool) -> None:
        """Begin or end the events of blocks in the notes of steps."""
        self._is_watched = is_watched
        self._post(frames.Watch(is_watched))

    def renew(self) -> None:
        """Begin them in an engine that has just started, if the last one sent them."""
        if self._is_watched:
            self._post(frames.Watch(True))
