"""`Store`: keeps files, batches and responses for clients, bounded in number and in bytes.

An entry is a JSON object of metadata and a body of bytes. It lives in memory, or in a folder, where it outlives the
server: a change is on the disk before its call returns. If the disk is full or fails, the call fails and no entry is
lost: the store always agrees with the folder (R-28). Ids are random and looked up among the entries, so no text of a
client becomes a path (S-21). An entry belongs to the tenant who made it (`engine.tenants`): other tenants cannot see
it, and it takes room from its owner's share only. Calls that read bodies or change entries of one owner must not
overlap: `serve.storage.writers`. Knows no HTTP and no API. Called by `serve.apis.openai.files`,
`serve.apis.openai.batches` and `serve.apis.openai.responses`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine import tenants
from headrace.protocol.errors import HeadraceError
from headrace.serve.storage import disk
from headrace.serve.storage.space import Room, StorageError, storing

logger = logging.getLogger("headrace.server")

_ID = re.compile(r"[a-z]+[-_][0-9a-f]{32}")
_NAME = re.compile(rf"({_ID.pattern})\.(json|bin)")
_TORN = "part-"
_OWNER = "_owner"
_PIECE = 2**20


class StoreFullError(HeadraceError):
    """The owner's share has no room for the entry (HTTP 413)."""

    status = 413
    code = "storage_full"


@dataclass(slots=True)
class _Entry:
    """One entry. `text` is the encoded metadata, `body` is None if a folder has it, `size` is the bytes of both."""

    text: bytes
    body: bytearray | None
    size: int
    owner: str

    @property
    def body_size(self) -> int:
        return self.size - len(self.text)


class Store:
    """Keeps entries by id, oldest first.

    Args:
        prefix: the prefix of ids, its `-` or `_` included.
        folder: the folder of the entries' files, which only this user can read; None keeps entries in memory. Entries
            in the folder are loaded; other files and symbolic links are left alone.
        max_items, max_bytes: bounds on the number of an owner's entries, and on the bytes of their metadata and bodies.
        shares: the bytes of each owner that has a separate bound, by name.
        max_entry_bytes: a bound on the bytes of one entry.
        evict: delete the owner's oldest entries when there is no room, instead of raising `StoreFullError`.
        kind: the type of the metadata, for those in the folder: an entry with others is damaged, and left out.

    Raises `HeadraceError` if the folder cannot be used, or another server uses it.
    """

    def __init__(
        self,
        prefix: str,
        folder: Path | None,
        *,
        max_items: int,
        max_bytes: int,
        shares: Mapping[str, int] | None = None,
        max_entry_bytes: int | None = None,
        evict: bool = False,
        kind: Any = dict[str, Any],
    ) -> None:
        self.prefix, self.folder = prefix, folder
        self._kind = kind
        self.max_items, self.max_bytes, self.evict = max_items, max_bytes, evict
        self.shares = dict(shares or {})
        self.max_entry_bytes = max_entry_bytes
        self._entries: dict[str, _Entry] = {}
        self._num_items: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._lock: int | None = None
        if folder is not None:
            try:
                disk.make_folder(folder)
                self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._load(folder)
            except BlockingIOError as error:
                self.close()
                raise HeadraceError(f"{folder} is used by another server") from error
            except OSError as error:
                self.close()
                raise HeadraceError(f"{folder} can not be used as storage: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter([entry_id for entry_id, entry in list(self._entries.items()) if tenants.may_see(entry.owner)])

    def __contains__(self, entry_id: object) -> bool:
        return isinstance(entry_id, str) and self._visible(entry_id) is not None

    @property
    def num_items(self) -> int:
        """The number of the caller's entries."""
        return self._num_items[tenants.current().name]

    @property
    def num_bytes(self) -> int:
        """The bytes of the metadata and bodies of the caller's entries."""
        return self._num_bytes[tenants.current().name]

    def close(self) -> None:
        """Release the folder's lock. May be called twice."""
        if self._lock is not None:
            disk.unlock(self._lock)
            os.close(self._lock)
            self._lock = None

    def new_id(self) -> str:
        """Return a new random id that cannot be guessed."""
        return self.prefix + secrets.token_hex(16)

    def put(self, entry_id: str, metadata: dict[str, Any], body: bytes = b"") -> None:
        """Add an entry of the caller's under an id of `new_id`. Raises `StoreFullError`, `StorageError`; then nothing
        changes. Raises ValueError for any other id, and for one in use."""
        if entry_id in self._entries or not entry_id.startswith(self.prefix) or not _ID.fullmatch(entry_id):
            raise ValueError(f"{entry_id[:80]!r} is no new id")
        owner = tenants.current().name
        text = _encode(metadata, owner)
        size = len(text) + len(body)
        self._make_room(owner, entry_id, 1, size)
        self._write({f"{entry_id}.bin": body, f"{entry_id}.json": text}, is_new=True)
        self._entries[entry_id] = _Entry(text, _copy(body) if self.folder is None else None, size, owner)
        self._count(owner, 1, size)

    def set_metadata(self, entry_id: str, metadata: dict[str, Any]) -> None:
        """Replace the metadata of an entry; its body stays. Raises KeyError, `StoreFullError`, `StorageError`."""
        entry = self._entries[entry_id]
        text = _encode(metadata, entry.owner)
        growth = len(text) - len(entry.text)
        self._make_room(entry.owner, entry_id, 0, growth)
        self._write({f"{entry_id}.json": text})
        entry.text = text
        self._grow(entry, growth)

    def set_body(self, entry_id: str, body: bytes) -> None:
        """Replace the body of an entry; its metadata stays. Raises KeyError, `StoreFullError`, `StorageError`."""
        entry = self._entries[entry_id]
        growth = len(body) - entry.body_size
        self._make_room(entry.owner, entry_id, 0, growth)
        self._write({f"{entry_id}.bin": body})
        if entry.body is not None:
            entry.body = _copy(body)
        self._grow(entry, growth)

    def write(self, entry_id: str, data: bytes, begin: int) -> None:
        """Replace the end of a body, from byte `begin` on, so a call may be repeated. If it fails, the bytes before
        `begin` are as they were. Raises KeyError, `StoreFullError`, `StorageError`."""
        entry = self._entries[entry_id]
        size = entry.body_size
        growth = begin + len(data) - size
        self._make_room(entry.owner, entry_id, 0, growth)
        if self.folder is not None:
            path = self.folder / f"{entry_id}.bin"
            with storing("written to"), Room(self.folder) as room:
                room.take(max(0, growth))
                try:
                    disk.write(path, data, begin)
                except OSError:
                    # A part of the file may be there.
                    with contextlib.suppress(OSError):
                        disk.truncate(path, size)
                    raise
        elif entry.body is not None:
            del entry.body[begin:]
            for piece in _pieces(data):
                entry.body += piece
        self._grow(entry, growth)

    def metadata(self, entry_id: str) -> dict[str, Any] | None:
        """Return a copy of an entry's metadata, or None if there is no entry."""
        entry = self._visible(entry_id)
        if entry is None:
            return None
        metadata = msgspec.json.decode(entry.text, type=dict[str, Any])
        metadata.pop(_OWNER, None)
        return metadata

    def owner(self, entry_id: str) -> str:
        """Return the name of the tenant who owns an entry. Raises KeyError."""
        return self._entries[entry_id].owner

    def body_size(self, entry_id: str) -> int:
        """Return the number of bytes of an entry's body. Raises KeyError."""
        return self._entries[entry_id].body_size

    def body(self, entry_id: str) -> bytes:
        """Return an entry's body. Raises KeyError, FileNotFoundError if its file is missing, and `StorageError`."""
        entry = self._visible(entry_id)
        if entry is None:
            raise KeyError(entry_id)
        if self.folder is None:
            return b"".join(_pieces(entry.body or b""))
        with storing("read"):
            return (self.folder / f"{entry_id}.bin").read_bytes()[: entry.body_size]

    def delete(self, entry_id: str) -> bool:
        """Delete an entry. Returns False if there is none. Raises `StorageError`; then the entry stays."""
        if entry_id not in self._entries:
            return False
        if self.folder is not None:
            with storing("written to"):
                for name in (f"{entry_id}.json", f"{entry_id}.bin"):
                    disk.unlink(self.folder / name)
                disk.sync(self.folder)
        self._forget(entry_id)
        return True

    def discard(self, entry_id: str) -> None:
        """Delete an entry if there is one, even if its files cannot be deleted."""
        try:
            self.delete(entry_id)
        except StorageError:
            self._forget(entry_id)

    def _forget(self, entry_id: str) -> None:
        entry = self._entries.pop(entry_id)
        self._count(entry.owner, -1, -entry.size)

    def _grow(self, entry: _Entry, growth: int) -> None:
        entry.size += growth
        self._count(entry.owner, 0, growth)

    def _count(self, owner: str, num_items: int, num_bytes: int) -> None:
        with self._counting:
            self._num_items[owner] += num_items
            self._num_bytes[owner] += num_bytes

    def _visible(self, entry_id: str) -> _Entry | None:
        """Return the entry if it exists and the current tenant may see it."""
        entry = self._entries.get(entry_id)
        return entry if entry is not None and tenants.may_see(entry.owner) else None

    def _make_room(self, owner: str, entry_id: str, num_items: int, growth: int) -> None:
        """Evict entries of the owner's until one can grow by so many bytes. Raises `StoreFullError`."""
        share = self.shares.get(owner, self.max_bytes)
        known = self._entries.get(entry_id)
        size = growth + (0 if known is None else known.size)
        most = share if self.max_entry_bytes is None else min(share, self.max_entry_bytes)
        if growth > 0 and size > most:
            raise StoreFullError(f"storage: {size} bytes do not fit; one entry has at most {most}")
        while (growth > 0 and self._num_bytes[owner] + growth > share) or (
            num_items and self._num_items[owner] + num_items > self.max_items
        ):
            oldest = None
            if self.evict:
                owned = (each for each, entry in list(self._entries.items()) if entry.owner == owner)
                oldest = next((each for each in owned if each != entry_id), None)
            if oldest is None:
                raise StoreFullError(
                    f"storage: it is full, with {self._num_items[owner]} of {self.max_items} entries and "
                    f"{self._num_bytes[owner]} of {share} bytes; delete something first"
                )
            self.delete(oldest)

    def _write(self, files: dict[str, bytes], is_new: bool = False) -> None:
        """Write files by name. Does nothing without a folder. Raises `StorageError`; then new files are not there, and
        replaced ones are as they were, unless the disk failed behind the last step."""
        if self.folder is None:
            return
        parts: list[Path] = []
        try:
            with storing("written to"), Room(self.folder) as room:
                room.take(sum(map(len, files.values())))
                for data in files.values():
                    parts.append(self.folder / (_TORN + secrets.token_hex(8)))
                    disk.create(parts[-1], data)
                for part, name in zip(parts, files, strict=True):
                    disk.replace(part, self.folder / name)
                disk.sync(self.folder)
        except BaseException:
            for path in [*parts, *(self.folder / name for name in files if is_new)]:
                with contextlib.suppress(OSError):
                    disk.unlink(path)
            raise

    def _load(self, folder: Path) -> None:
        """Load the folder's entries, oldest first, and delete the remains of interrupted writes."""
        ids_by_time: list[tuple[float, str]] = []
        for item in os.scandir(folder):
            if item.name.startswith(_TORN) and item.is_file(follow_symlinks=False):
                disk.unlink(Path(item.path))
                continue
            match = _NAME.fullmatch(item.name)
            if not match or not match[1].startswith(self.prefix) or not item.is_file(follow_symlinks=False):
                continue
            if match[2] == "json":
                ids_by_time.append((item.stat(follow_symlinks=False).st_mtime, match[1]))
            elif not (folder / f"{match[1]}.json").is_file():
                disk.unlink(Path(item.path))
        for _, entry_id in sorted(ids_by_time):
            self._read_entry(folder, entry_id)
        # Entries that clients see from now on must be there after the next crash.
        disk.sync(folder)

    def _read_entry(self, folder: Path, entry_id: str) -> None:
        """Load one entry; log a warning if it is damaged. Metadata without a body are deleted: an interrupted `put` or
        `delete` may leave them."""
        try:
            status = os.lstat(folder / f"{entry_id}.bin")
        except FileNotFoundError:
            disk.unlink(folder / f"{entry_id}.json")
            return
        try:
            text = (folder / f"{entry_id}.json").read_bytes()
            metadata = msgspec.json.decode(text)
            entry_name = getattr(msgspec.convert(metadata, self._kind), "id", entry_id)
        except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
            logger.warning("%s in %s is left out: %s", entry_id, folder, error)
            return
        if not stat.S_ISREG(status.st_mode) or entry_name != entry_id:
            logger.warning("%s in %s is left out: it is no entry", entry_id, folder)
            return
        entry = _Entry(text, None, len(text) + status.st_size, str(metadata.get(_OWNER, "")))
        self._entries[entry_id] = entry
        self._count(entry.owner, 1, entry.size)


def _copy(body: bytes) -> bytearray:
    return bytearray().join(_pieces(body))


def _pieces(body: bytes | bytearray) -> list[bytes]:
    """Return the pieces of a large body that is to be copied: a copy in one go would hold the interpreter's lock, and
    joining pieces releases it."""
    view = memoryview(body)
    return [bytes(view[start : start + _PIECE]) for start in range(0, len(view), _PIECE)]


def _encode(metadata: dict[str, Any], owner: str) -> bytes:
    return msgspec.json.encode(metadata | {_OWNER: owner} if owner else metadata)
