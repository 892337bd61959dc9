"""The directory of a run of `headrace quantize`: whether it can be written, and what of an interrupted run is in it.
Called by `quantize.driver` and `cli.quantize`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from headrace import hub
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quantize import shards

STATE = "quantize-state.json"


def verify_out(out: Path, num_bytes: int = 0) -> None:
    """Raises `RequestError` unless `out` does not exist, is empty, or holds an interrupted run; and if `num_bytes`
    cannot be written there."""
    nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not os.access(nearest, os.W_OK) or not (nearest.is_dir() or nearest == out):
        raise RequestError("out", str(out), f"a path that can be made: {nearest} can not be written to")
    free = shutil.disk_usage(nearest).free
    if num_bytes > free and not (out / STATE).is_file():
        raise RequestError("out", str(out), f"a place for {num_bytes} bytes: its disk has {free} left")
    if out.exists() and not (out / STATE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError("out", str(out), "a new or empty directory, or that of a run that was broken off")


class State:
    """The remains of an interrupted run in `out`: the state file, and whole files of weights."""

    def __init__(self, out: Path, fingerprint: str, num_layers: int) -> None:
        self.out, self.fingerprint, self.num_layers = out, fingerprint, num_layers
        self.files: dict[str, list[str]] = {}
        self.errors: dict[str, float] = {}

    @property
    def num_done(self) -> int:
        return len(self.files)

    def file_of(self, place: int) -> str:
        """Return the file of a decoder layer; of the rest, for place num_layers."""
        return f"model-{place + 1:05}-of-{self.num_layers + 1:05}.safetensors"

    def open(self) -> None:
        """Read the state of `out`. Raises `RequestError` if it holds something else, or another run."""
        path = self.out / STATE
        verify_out(self.out)
        if not path.is_file():
            self.out.mkdir(parents=True, exist_ok=True)
            self._save()
            return
        values = hub.read_json(path)
        if values.get("fingerprint") != self.fingerprint:
            raise RequestError(
                "out", str(self.out), "another directory: it holds a run with other options, model or calibration text"
            )
        files, errors = values.get("files"), values.get("errors")
        if not isinstance(files, dict) or not isinstance(errors, dict):
            raise CheckpointError(f"{path}: files or errors are missing")
        for place, (file, names) in enumerate(files.items()):
            if file != self.file_of(place) or not (self.out / file).is_file():
                raise CheckpointError(f"{path} names {file!r:.80}, which is not there; begin anew in another directory")
            self.files[file] = list(names)
        self.errors = {str(name): float(error) for name, error in errors.items()}

    def add(self, file: str, names: Iterable[str], errors: dict[str, float]) -> None:
        self.files[file] = sorted(names)
        self.errors |= errors
        self._save()

    def _save(self) -> None:
        values = {"fingerprint": self.fingerprint, "files": self.files, "errors": self.errors}
        shards.write_json(self.out / STATE, values)
