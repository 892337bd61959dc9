"""The tokens in llama-server's slots, and the session files that they are saved to and restored from.

A slot is a number under which a client finds the tokens of its last answer again: the KV cache is the same for all.
Each holder of a key has separate slots and a separate folder. Clients choose the names of files, without folders in
them; the engine writes and reads the files (`engine.sessions`). Knows no routes. Called by `service`, `reply` and
`paths`.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.engine import tenants
from headrace.engine.client import EngineClient
from headrace.engine.sessions import MoveSession, SessionMoved
from headrace.protocol.errors import EngineDeadError, RequestError
from headrace.serve.storage.space import DiskFullError, Room, storing, sweep
from headrace.text.outputs import RequestState

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,127}")
"""The names that a client may give to a file: none begins with a dot or has a slash."""
UNFINISHED = ".*.part"
"""Session files that an engine has not finished."""
MAX_FILES = 1024
"""Session files of one holder."""
MAX_TOKENS = 2**22
"""Tokens that are kept for all slots together (16 MiB); the slots used longest ago are forgotten first."""


class Folder(NamedTuple):
    """The folder of the session files.

    Attributes:
        path: the folder of all holders.
        max_bytes: bytes that a holder may store, if `shares` does not have the holder.
        shares: bytes that the other holders may store, by name.
    """

    path: Path
    max_bytes: int
    shares: Mapping[str, int]

    @classmethod
    def of(cls, path: str | None, max_bytes: int, shares: Mapping[str, int]) -> Folder | None:
        """Return the folder of --slot-save-path, which is created if need be; None without a path. Raises
        `RequestError`."""
        if path is None:
            return None
        folder = Path(path).expanduser().absolute()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError("slot_save_path", path, f"a folder: {error.strerror}") from error
        sweep([*folder.glob(UNFINISHED), *folder.glob(f"holder-*/{UNFINISHED}")])
        return cls(folder, max_bytes, shares)

    def of_holder(self) -> Path:
        """Return the folder of the caller, which is created if need be. Raises OSError."""
        name = tenants.current().name
        path = self.path / f"holder-{hashlib.sha256(name.encode()).hexdigest()[:32]}" if name else self.path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def room_for(self, path: Path) -> int:
        """Return the bytes that the caller's file `path` may take: the share, less the caller's other files. Raises
        `RequestError` for one file too many."""
        share = self.shares.get(tenants.current().name, self.max_bytes)
        others = [each for each in path.parent.iterdir() if each.is_file() and each != path]
        if len(others) >= MAX_FILES:
            raise RequestError("filename", path.name, f"that of a file that is there: {MAX_FILES} files are kept")
        return max(0, share - sum(each.stat().st_size for each in others))


class HeldSlots(NamedTuple):
    """The slots of the answers of one request, in their order; -1 for an answer without one."""

    slots: Slots
    holder: str
    ids: list[int]

    def give_back(self, states: Sequence[RequestState]) -> None:
        """Free the slots, which then hold the computed tokens: all but the last one. May be called twice."""
        for slot_id, state in zip(self.ids, states, strict=True):
            if (self.holder, slot_id) in self.slots.busy:
                self.slots.busy.discard((self.holder, slot_id))
                self.slots.put(self.holder, slot_id, [*state.request.prompt_token_ids, *state.token_ids[:-1]])


class Slots:
    """`num` slots for each holder. `client` is the engine's; `digest` returns the digest of the model's files, all of
    which it reads."""

    def __init__(self, client: EngineClient, folder: Folder, digest: Callable[[], str]) -> None:
        self._client, self._folder, self._digest_files = client, folder, digest
        self.busy: set[tuple[str, int]] = set()
        # The slot used last is the last.
        self._tokens: dict[tuple[str, int], array[int]] = {}
        self._weights: asyncio.Future[str] | None = None

    @property
    def num(self) -> int:
        """The number of slots: as many as the batch has places."""
        return self._client.info.max_num_seqs

    def check_id(self, slot_id: int | None, field: str = "id_slot") -> None:
        """Raise `RequestError` unless there is such a slot; None and -1 are any."""
        if slot_id is not None and not -1 <= slot_id < self.num:
            raise RequestError(field, slot_id, f"a slot from 0 to {self.num - 1}, or -1 for any that is free")

    def take(self, num: int, slot_id: int | None) -> HeldSlots:
        """Return slots for `num` answers: the first in `slot_id`, if that is given, the others in free ones."""
        holder, ids = tenants.current().name, list[int]()
        for place in range(num):
            free = (i for i in range(self.num) if (holder, i) not in self.busy)
            named = place == 0 and slot_id is not None and slot_id >= 0
            ids.append(slot_id if named and slot_id is not None else next(free, -1))
            self.busy |= {(holder, ids[-1])} if ids[-1] >= 0 else set()
        return HeldSlots(self, holder, ids)

    def put(self, holder: str, slot_id: int, token_ids: Sequence[int]) -> None:
        """Note the tokens that a slot holds."""
        self._tokens.pop((holder, slot_id), None)
        self._tokens[holder, slot_id] = array("i", token_ids)
        num = sum(map(len, self._tokens.values()))
        while num > MAX_TOKENS and len(self._tokens) > 1:
            num -= len(self._tokens.pop(next(iter(self._tokens))))

    async def save(self, slot_id: int, filename: str | None) -> tuple[SessionMoved, float]:
        """Write the cached blocks of a slot's tokens to a file. Returns the counts of tokens and bytes, and the
        milliseconds.

        Raises `RequestError`, `DiskFullError` and `EngineDeadError`."""
        token_ids = self._tokens.get((tenants.current().name, slot_id), array("i"))
        path = await asyncio.to_thread(self._path, filename)
        share = await asyncio.to_thread(self._folder.room_for, path)
        with storing("written to"), Room(path.parent) as disk:
            room = await asyncio.to_thread(disk.take_up_to, share)
            return await self._move(path, share, token_ids=list(token_ids), max_bytes=room)

    async def restore(self, slot_id: int, filename: str | None) -> tuple[SessionMoved, float]:
        """Take a file's blocks into the prefix cache, and its tokens into the slot. Returns and raises as `save`."""
        moved, milliseconds = await self._move(await asyncio.to_thread(self._path, filename), restores=True)
        self.put(tenants.current().name, slot_id, moved.token_ids)
        return moved, milliseconds

    def erase(self, slot_id: int) -> int:
        """Forget a slot's tokens. Returns their number."""
        return len(self._tokens.pop((tenants.current().name, slot_id), ()))

    def _path(self, filename: str | None) -> Path:
        if filename is None or not NAME.fullmatch(filename):
            bound = "1 to 128 of A-Z a-z 0-9 _ . @ + -, with none of . @ + - at the beginning"
            raise RequestError("filename", filename, bound)
        try:
            return self._folder.of_holder() / filename
        except OSError as error:
            raise RequestError(
                "filename", filename, f"saved later: the folder can not be used: {error.strerror}"
            ) from error

    async def _digest(self) -> str:
        """Return the digest of the model's files, computed once, unless that failed."""
        if self._weights is None or (self._weights.done() and self._weights.exception() is not None):
            self._weights = asyncio.ensure_future(asyncio.to_thread(self._digest_files))
        return await asyncio.shield(self._weights)

    async def _move(self, path: Path, share: int = 0, **fields: Any) -> tuple[SessionMoved, float]:
        if not self._client.is_alive:
            raise EngineDeadError("the engine is not ready")
        weights = await self._digest()
        begin = time.monotonic()
        order = MoveSession(str(path), weights, tenants.salted(""), **fields)
        moved = await self._client.orders.give(order, SessionMoved)
        if moved.lacks_room and moved.num_bytes <= share:
            raise DiskFullError
        action = "restore" if order.restores else "save"
        if moved.moves_none:
            raise RequestError("action", action, f"left out, for no file would do: {moved.error}")
        if moved.error:
            needed = "a session file that can be used" if order.restores else "a file that can be written"
            raise RequestError("filename", path.name, f"{needed}: {moved.error}")
        return moved, 1e3 * (time.monotonic() - begin)
