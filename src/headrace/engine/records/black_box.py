"""`BlackBox` keeps the shapes of an engine's last steps, and its stacks, beyond the death of its process.

Two files in memory, made by the server and inherited by the process, which writes into both. They hold counts, request
ids and places in the code, and never a token. `engine.child` notes the steps; `engine.links` makes and reads the box;
`engine.records.crash_reports` writes its contents down.
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
"""Steps that are kept."""
SLOT_BYTES = 8192
MAX_CHUNKS = 64
"""Chunks of a step whose shapes are noted; of further chunks only the number is. 64 of them fit a slot."""
MAX_STACK_BYTES = 2**16

_HEAD = struct.Struct("<QQ")  # the step that began last, and the one that ended last
_LENGTH = struct.Struct("<I")
_NUM_BYTES = _HEAD.size + NUM_SLOTS * SLOT_BYTES


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """One step, without its tokens. Columns have an entry for each of the first `MAX_CHUNKS` chunks. `time` is in
    monotonic seconds; `num_blocks` has the blocks of each chunk's sequence; `num_drafts` counts draft tokens."""

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
    """The box of one engine. The server calls `make`, the engine's process `inherit` with the numbers of the files."""

    def __init__(self, steps: BinaryIO, stacks: BinaryIO) -> None:
        self._files = steps, stacks
        self._map = mmap.mmap(steps.fileno(), _NUM_BYTES)
        self._ended = 0
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    def make(cls) -> BlackBox:
        """Make an empty box. Raises OSError where there is no room for it."""
        steps, stacks = _nameless(), _nameless()
        os.ftruncate(steps.fileno(), _NUM_BYTES)
        return cls(steps, stacks)

    @classmethod
    def inherit(cls, fds: tuple[int, int]) -> BlackBox:
        """Return the box whose files have these numbers in this process."""
        return cls(os.fdopen(fds[0], "r+b", buffering=0), os.fdopen(fds[1], "r+b", buffering=0))

    @property
    def fds(self) -> tuple[int, int]:
        """The numbers of both files, for `inherit` in a child that inherits them."""
        return self._files[0].fileno(), self._files[1].fileno()

    @property
    def stacks_file(self) -> BinaryIO:
        """The file for `faulthandler`."""
        return self._files[1]

    # -- in the engine's process

    def begin(self, shape: StepShape) -> None:
        """Note a step before any of it is computed."""
        payload = self._encoder.encode(shape)
        if len(payload) > SLOT_BYTES - _LENGTH.size:
            payload = self._encoder.encode(
                msgspec.structs.replace(shape, request_ids=[], starts=[], lens=[], num_blocks=[])
            )
        at = _HEAD.size + shape.step_id % NUM_SLOTS * SLOT_BYTES
        self._map[at : at + _LENGTH.size + len(payload)] = _LENGTH.pack(len(payload)) + payload
        _HEAD.pack_into(self._map, 0, shape.step_id, self._ended)

    def end(self, step_id: int) -> None:
        """Note that the step has given a result."""
        self._ended = step_id
        began, _ = _HEAD.unpack_from(self._map, 0)
        _HEAD.pack_into(self._map, 0, began, step_id)

    def note_error(self, error: BaseException) -> None:
        """Note where an exception came from, and its kind; not its message, which may quote a request."""
        seen, lines = set[int](), list[str]()
        link: BaseException | None = error
        while link is not None and id(link) not in seen:
            seen.add(id(link))
            lines = [*traceback.format_tb(link.__traceback__), f"{type(link).__name__}\n", *lines]
            link = link.__cause__ or link.__context__
        os.write(self._files[1].fileno(), "".join(lines).encode("utf-8", "replace"))

    # -- in the server's

    def unfinished(self) -> int | None:
        """Return the id of the step that began and did not end, the first if there are two, or None."""
        began, ended = _HEAD.unpack_from(self._map, 0)
        if began == ended:
            return None
        return min((shape.step_id for shape in self.steps() if shape.step_id > ended), default=int(began))

    def steps(self) -> list[StepShape]:
        """Return the last steps, the oldest first. A step that was being noted when the process died may be missing."""
        shapes = []
        for slot in range(NUM_SLOTS):
            at = _HEAD.size + slot * SLOT_BYTES
            (length,) = _LENGTH.unpack_from(self._map, at)
            if not 0 < length <= SLOT_BYTES - _LENGTH.size:
                continue
            try:
                start = at + _LENGTH.size
                shapes.append(msgspec.msgpack.decode(self._map[start : start + length], type=StepShape))
            except msgspec.DecodeError:
                continue  # half written
        return sorted(shapes, key=lambda shape: shape.step_id)

    def stacks(self) -> list[str]:
        """Return the lines that `faulthandler` and `note_error` have written."""
        text = os.pread(self._files[1].fileno(), MAX_STACK_BYTES, 0)
        return text.decode("utf-8", "replace").splitlines()

    def close(self) -> None:
        """Close both files. May be called twice."""
        self._map.close()
        for file in self._files:
            file.close()


def _nameless() -> BinaryIO:
    """Return a new file in memory, or where the system has none, one that no folder lists."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("headrace-black-box"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
