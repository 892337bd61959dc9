"""`SavedLosses`: the measurements of a model's int8 products at load, kept beside its packed file.

The file is valid for one build of headrace: any other measures again, so that no choice depends on when the file was
written. Knows names and numbers; must not know models or matrices. Made by `checkpoint.source`, used by `activations`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import secrets
from pathlib import Path

from headrace import foreign
from headrace.backends.native import require_native
from headrace.protocol.errors import CheckpointError
from headrace.protocol.sources import digest_of_sources

logger = logging.getLogger(__name__)


@functools.cache
def build() -> str:
    """Return a digest of headrace's sources and its native library."""
    library = require_native().__file__ or ""
    return digest_of_sources() + hashlib.sha256(Path(library).read_bytes()).hexdigest()[:16]


class SavedLosses:
    """The losses of matrices by name, and the matrices that take floats so that few tokens change, in the file `path`.
    may_write: whether it is written if there is none.

    They are valid for one text, and for a model made for `max_model_len` positions: some models' rope frequencies
    depend on it."""

    def __init__(self, path: Path, max_model_len: int, may_write: bool) -> None:
        self._path, self._max_model_len, self._may_write = path, max_model_len, may_write

    def read(self, text: str) -> tuple[dict[str, float], set[str]]:
        """Return the losses in the file and the names of the matrices that take floats; none if there is no file, or
        one of another build or text."""
        try:
            if not self._path.is_file():
                return {}, set()
            values = foreign.read_object(self._path, foreign.TABLE)
            if {name: values[name] for name in ("build", "max_model_len", "text")} != self._facts(text):
                return {}, set()
            losses = {str(name): float(loss) for name, loss in values["losses"].items()}
            noisy = [str(name) for name in values["noisy"]]
            if values.get("digest") != _digest(losses, noisy):
                raise CheckpointError("it has been changed or damaged")
            return losses, set(noisy)
        except (CheckpointError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s is not used: %.500s", self._path, error)
            return {}, set()

    def _facts(self, text: str) -> dict[str, str | int]:
        return {"build": build(), "max_model_len": self._max_model_len, "text": text}

    def write(self, text: str, losses: dict[str, float], noisy: list[str]) -> None:
        if not self._may_write:
            return
        part = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}.tmp")
        try:
            facts = self._facts(text) | {"losses": losses, "noisy": noisy, "digest": _digest(losses, noisy)}
            part.write_text(json.dumps(facts), encoding="utf-8")
            part.replace(self._path)
        except OSError as error:
            logger.warning("%s can not be written: %s", self._path, error)


def _digest(losses: dict[str, float], noisy: list[str]) -> str:
    return hashlib.sha256(json.dumps([losses, noisy]).encode()).hexdigest()
