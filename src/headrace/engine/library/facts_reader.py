"""`FactsReader`: the facts about models, read by a process of bounded time and memory, once until their files change.

The server's process parses nothing that lies in a models folder in order to list it. Called by
`engine.library.model_folder` and `serve.loading`, on worker threads.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

from headrace.engine.library import facts_worker
from headrace.engine.library.facts_worker import Reply
from headrace.engine.library.model_facts import ModelFacts, digest_of
from headrace.protocol.errors import CheckpointError
from headrace.text.bounded import BoundedProcess


class Known(NamedTuple):
    """The facts of files with this digest, or the reason why they have none."""

    digest: str
    facts: ModelFacts | None
    reason: str


class FactsReader:
    """Reads facts in one process, a model at a time. For any thread."""

    def __init__(self, max_cpu_seconds: float = facts_worker.MAX_CPU_SECONDS) -> None:
        self.process = BoundedProcess(facts_worker.__name__, max_cpu_seconds)
        self._known: dict[Path, Known] = {}

    def facts(self, path: Path) -> ModelFacts:
        """Return the facts about the model at `path`; its files are read again if names, sizes or times have changed.

        Raises `CheckpointError`, and `ChildFailedError` if the process can not work."""
        try:
            digest = digest_of(path)
        except OSError as error:  # a file that is deleted just now
            raise CheckpointError(f"{path} can not be read: {error.strerror}") from error
        known = self._known.get(path)
        if known is None or known.digest != digest:
            known = self._known[path] = Known(digest, *self._read(path))
        return _facts(known.facts, known.reason)

    def check(self, path: Path) -> None:
        """Raise `CheckpointError` if there is no model at `path` that can be read."""
        _facts(*self._read(path))

    def forget(self, path: Path) -> None:
        """Drop the facts about a model that is gone."""
        self._known.pop(path, None)

    def _read(self, path: Path) -> tuple[ModelFacts | None, str]:
        reply = self.process.run(str(path), Reply)
        if isinstance(reply, str):
            return None, f"{path}: its headers can not be read: {reply}"
        return reply.facts, reply.error


def _facts(facts: ModelFacts | None, reason: str) -> ModelFacts:
    if facts is None:
        raise CheckpointError(reason)
    return facts


@functools.cache
def shared() -> FactsReader:
    """Return the reader that all of this process share."""
    return FactsReader()
