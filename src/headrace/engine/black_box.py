"""`BlackBox`: what is left of an engine's process when it is dead: the shapes of its last steps, and its stacks.

Two files in memory, made by the server and inherited by the process, which writes into both. They hold counts, request
ids and places in the code, and never a token. `engine.child` notes the steps; `engine.links` makes the box and
reads it; `engine.crash_reports` writes down what it reads.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import traceback
from typing import BinaryIO

import msgspec

NUM_SLOTS = 32
"""Steps that are remembered."""
SLOT_BYTES = 8192
MAX_CHUNKS = 64
"""Chunks of a step whose shapes are noted; of more the number is told. 64 of them fit a slot."""
MAX_STACK_BYTES = 2**16

_HEAD = struct.Struct("<QQ")  # the step that began last, and the one that ended last
_LENGTH = struct.Struct("<I")
_NUM_BYTES = _HEAD.size + NUM_SLOTS * SLOT_BYTES


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """One step, without its tokens. Columns have an entry for each of the first `MAX_CHUNKS` chunks. `time` is in
    monotonic seconds; `num_blocks` are the blocks of each chunk's sequence, `num_drafts` guesses in all."""

    step_id: int
    time: float
    num_chunks: int
    request_ids: list[str]
    starts: list[int]
    lens: list[int]
    num_blocks: list[int]
    num_drafts: int
    num_copies: int


class BlackBox:
    """One engine's. The server calls `make`, the engine's process `inherit` with the numbers of the files."""

    def __init__(self, steps: BinaryIO, stacks: BinaryIO) -> None:
        self._files = steps, stacks
        self._map = mmap.mmap(steps.fileno(), _NUM_BYTES)
        self._ended = 0
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    def make(cls) -> BlackBox:
        """An empty one. Raises OSError where there is no room for it."""
        steps, stacks = _nameless(), _nameless()
        os.ftruncate(steps.fileno(), _NUM_BYTES)
        return cls(steps, stacks)

    @classmethod
    def inherit(cls, fds: tuple[int, int]) -> BlackBox:
        """The one whose files have these numbers in this process."""
        return cls(os.fdopen(fds[0], "r+b", buffering=0), os.fdopen(fds[1], "r+b", buffering=0))

    @property
    def fds(self) -> tuple[int, int]:
        """The numbers of both files, for `inherit` in a child that they are passed on to."""
        return self._files[0].fileno(), self._files[1].fileno()

    @property
    def stacks_file(self) -> BinaryIO:
        """Where `faulthandler` is to write."""
        return self._files[1]

    # -- in the engine's process

    def begin(self, shape: StepShape) -> None:
        """A step begins; it is noted before anything of it is computed."""
        payload = self._encoder.encode(shape)
        if len(payload) > SLOT_BYTES - _LENGTH.size:
            payload = self._encoder.encode(
                msgspec.structs.replace(shape, request_ids=[], starts=[], lens=[], num_blocks=[])
            )
        at = _HEAD.size + shape.step_id % NUM_SLOTS * SLOT_BYTES
        self._map[at : at + _LENGTH.size + len(payload)] = _LENGTH.pack(len(payload)) + payload
        _HEAD.pack_into(self._map, 0, shape.step_id, self._ended)

    def end(self, step_id: int) -> None:
        """The step has given a result."""
        self._ended = step_id
        _HEAD.pack_into(self._map, 0, step_id, step_id)

    def note_error(self, error: BaseException) -> None:
        """Where an exception came from, and its kind. Not its message, which may quote a request."""
        seen, lines = set[int](), list[str]()
        one: BaseException | None = error
        while one is not None and id(one) not in seen:
            seen.add(id(one))
            lines = [*traceback.format_tb(one.__traceback__), f"{type(one).__name__}\n", *lines]
            one = one.__cause__ or one.__context__
        os.write(self._files[1].fileno(), "".join(lines).encode("utf-8", "replace"))

    # -- in the server's

    def unfinished(self) -> int | None:
        """The id of the step that began and did not end, if there is one."""
        began, ended = _HEAD.unpack_from(self._map, 0)
        return None if began == ended else int(began)

    def steps(self) -> list[StepShape]:
        """The last steps, the oldest first. One that was being noted when the process died may be missing."""
        found = []
        for slot in range(NUM_SLOTS):
            at = _HEAD.size + slot * SLOT_BYTES
            (length,) = _LENGTH.unpack_from(self._map, at)
            if not 0 < length <= SLOT_BYTES - _LENGTH.size:
                continue
            try:
                start = at + _LENGTH.size
                found.append(msgspec.msgpack.decode(self._map[start : start + length], type=StepShape))
            except msgspec.DecodeError:
                continue  # half written
        return sorted(found, key=lambda shape: shape.step_id)

    def stacks(self) -> list[str]:
        """Lines of what `faulthandler` and `note_error` have written."""
        text = os.pread(self._files[1].fileno(), MAX_STACK_BYTES, 0)
        return text.decode("utf-8", "replace").splitlines()

    def close(self) -> None:
        """Let go of both files. May be called twice."""
        self._map.close()
        for file in self._files:
            file.close()


def _nameless() -> BinaryIO:
    """A file in memory, or where there are none such, one that no folder lists."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("headrace-black-box"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
