"""`Store`: keeps files, batches and responses for clients, bounded in number and in bytes.

An entry is a JSON object of metadata and a body of bytes. It lives in memory, or in a folder, where it outlives the
server. If the disk is full or fails, the call fails and no entry is lost: the store always agrees with the folder
(R-28). Ids are random and looked up among the entries, so no text of a client becomes a path (S-21). An entry belongs
to the tenant who made it (`engine.tenants`); other tenants can not see it. Knows no HTTP and no API. Called by
`serve.apis.openai.files`, `serve.apis.openai.batches` and `serve.apis.openai.responses`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine import tenants
from headrace.protocol.errors import HeadraceError

logger = logging.getLogger("headrace.server")

_NAME = re.compile(r"([a-z]+[-_][0-9a-f]{32})\.(json|bin)")
_TORN = "part-"
_OWNER = "_owner"


class StoreFullError(HeadraceError):
    """The store has no room for the entry (HTTP 413)."""

    status = 413
    code = "storage_full"


class StorageError(HeadraceError):
    """The disk is full or fails; nothing was changed, and a later call may succeed (HTTP 503)."""

    status = 503
    code = "storage_failed"


@dataclass(slots=True)
class _Entry:
    """One entry. `text` is the encoded metadata, `body` is None if a folder has it, `size` is the bytes of both."""

    text: bytes
    body: bytearray | None
    size: int
    owner: str


class Store:
    """Keeps entries by id, oldest first.

    Args:
        prefix: the prefix of ids, its `-` or `_` included.
        folder: the folder of the entries' files, which only this user can read; None keeps entries in memory. Entries
            in the folder are loaded; other files and symbolic links are left alone.
        max_items, max_bytes: bounds on the number of entries, and on the bytes of metadata and bodies.
        evict: delete the oldest entries when there is no room, instead of raising `StoreFullError`.

    Raises `HeadraceError` if the folder can not be used, or another server uses it.
    """

    def __init__(
        self, prefix: str, folder: Path | None, *, max_items: int, max_bytes: int, evict: bool = False
    ) -> None:
        self.prefix, self.folder = prefix, folder
        self.max_items, self.max_bytes, self.evict = max_items, max_bytes, evict
        self._entries: dict[str, _Entry] = {}
        self._lock: int | None = None
        if folder is not None:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._load(folder)
            except BlockingIOError as error:
                self.close()
                raise HeadraceError(f"{folder} is used by another server") from error
            except OSError as error:
                self.close()
                raise HeadraceError(f"{folder} can not be used as storage: {error}") from error

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter([entry_id for entry_id, entry in self._entries.items() if tenants.may_see(entry.owner)])

    def __contains__(self, entry_id: object) -> bool:
        return isinstance(entry_id, str) and self._visible(entry_id) is not None

    @property
    def num_bytes(self) -> int:
        """The bytes of all metadata and bodies."""
        return sum(entry.size for entry in self._entries.values())

    def close(self) -> None:
        """Release the folder's lock. May be called twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def new_id(self) -> str:
        """Return a new random id that can not be guessed."""
        return self.prefix + secrets.token_hex(16)

    def put(self, entry_id: str, metadata: dict[str, Any], body: bytes = b"") -> None:
        """Add an entry under an id of `new_id`, or replace one. Raises `StoreFullError`, `StorageError`; then nothing
        changes."""
        known = self._entries.get(entry_id)
        owner = tenants.current().name if known is None else known.owner
        text = _encode(metadata, owner)
        self._make_room(entry_id, len(text) + len(body), 0 if known is None else known.size)
        # The body goes first: the next start deletes a body without metadata.
        self._write({f"{entry_id}.bin": body, f"{entry_id}.json": text})
        memory = bytearray(body) if self.folder is None else None
        self._entries[entry_id] = _Entry(text, memory, len(text) + len(body), owner)

    def set_metadata(self, entry_id: str, metadata: dict[str, Any]) -> None:
        """Replace the metadata of an entry; its body stays. Raises KeyError, `StoreFullError`, `StorageError`."""
        entry = self._entries[entry_id]
        text = _encode(metadata, entry.owner)
        size = entry.size - len(entry.text) + len(text)
        self._make_room(entry_id, size, entry.size)
        self._write({f"{entry_id}.json": text})
        entry.text, entry.size = text, size

    def append(self, entry_id: str, data: bytes) -> None:
        """Add to the end of a body, all or nothing. Raises KeyError, `StoreFullError`, `StorageError`."""
        entry = self._entries[entry_id]
        self._make_room(entry_id, entry.size + len(data), entry.size)
        if self.folder is not None:
            with _disk("written to"), open(self.folder / f"{entry_id}.bin", "r+b", buffering=0) as file:
                end = entry.size - len(entry.text)
                try:
                    # Not at the file's end: a failed write may have left a part there.
                    _write_all(file.fileno(), data, end)
                except OSError:
                    with contextlib.suppress(OSError):
                        file.truncate(end)
                    raise
        elif entry.body is not None:
            entry.body += data
        entry.size += len(data)

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
        entry = self._entries[entry_id]
        return entry.size - len(entry.text)

    def body(self, entry_id: str) -> bytes:
        """Return an entry's body. Raises KeyError, FileNotFoundError if its file is missing, and `StorageError`."""
        entry = self._visible(entry_id)
        if entry is None:
            raise KeyError(entry_id)
        if self.folder is None:
            return bytes(entry.body or b"")
        with _disk("read"):
            return (self.folder / f"{entry_id}.bin").read_bytes()[: entry.size - len(entry.text)]

    def delete(self, entry_id: str) -> bool:
        """Delete an entry. Returns False if there is none. Raises `StorageError`; then the entry stays."""
        if entry_id not in self._entries:
            return False
        if self.folder is not None:
            with _disk("written to"):
                # The metadata goes first: the next start deletes a body without metadata.
                (self.folder / f"{entry_id}.json").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                (self.folder / f"{entry_id}.bin").unlink(missing_ok=True)
        del self._entries[entry_id]
        return True

    def discard(self, entry_id: str) -> None:
        """Delete an entry if there is one, even if its files can not be deleted."""
        try:
            self.delete(entry_id)
        except StorageError:
            del self._entries[entry_id]

    def _visible(self, entry_id: str) -> _Entry | None:
        """Return the entry if it exists and the current tenant may see it."""
        entry = self._entries.get(entry_id)
        return entry if entry is not None and tenants.may_see(entry.owner) else None

    def _make_room(self, entry_id: str, size: int, before: int) -> None:
        """Evict entries until one can grow from `before` to `size` bytes. Raises `StoreFullError`."""

        def over() -> bool:
            is_new = entry_id not in self._entries
            return self.num_bytes - before + size > self.max_bytes or len(self) + is_new > self.max_items

        if size > self.max_bytes:
            raise StoreFullError(f"storage: {size} bytes do not fit; it holds at most {self.max_bytes}")
        while over():
            oldest = next((known for known in self._entries if known != entry_id), None)
            if not self.evict or oldest is None:
                raise StoreFullError(
                    f"storage: it is full, with {len(self)} of {self.max_items} entries and {self.num_bytes} of "
                    f"{self.max_bytes} bytes; delete something first"
                )
            self.delete(oldest)

    def _write(self, files: dict[str, bytes]) -> None:
        """Write all files by name, or none. Does nothing without a folder. Raises `StorageError`."""
        if self.folder is None:
            return
        parts: list[Path] = []
        try:
            with _disk("written to"):
                for data in files.values():
                    parts.append(self.folder / (_TORN + secrets.token_hex(8)))
                    descriptor = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                    try:
                        _write_all(descriptor, data, 0)
                    finally:
                        os.close(descriptor)
                for part, name in zip(parts, files, strict=True):
                    os.replace(part, self.folder / name)
        except BaseException:
            for part in parts:
                with contextlib.suppress(OSError):
                    part.unlink(missing_ok=True)
            raise

    def _load(self, folder: Path) -> None:
        """Load the folder's entries, oldest first, and delete the remains of interrupted writes."""
        ids_by_time: list[tuple[float, str]] = []
        for item in os.scandir(folder):
            if item.name.startswith(_TORN) and item.is_file(follow_symlinks=False):
                os.unlink(item.path)
                continue
            match = _NAME.fullmatch(item.name)
            if not match or not match[1].startswith(self.prefix) or not item.is_file(follow_symlinks=False):
                continue
            if match[2] == "json":
                ids_by_time.append((item.stat(follow_symlinks=False).st_mtime, match[1]))
            elif not (folder / f"{match[1]}.json").is_file():
                os.unlink(item.path)
        for _, entry_id in sorted(ids_by_time):
            self._read_entry(folder, entry_id)

    def _read_entry(self, folder: Path, entry_id: str) -> None:
        """Load one entry; log a warning if it is damaged."""
        try:
            status = os.lstat(folder / f"{entry_id}.bin")
            text = (folder / f"{entry_id}.json").read_bytes()
            metadata = msgspec.json.decode(text)
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("%s in %s is left out: %s", entry_id, folder, error)
            return
        if not stat.S_ISREG(status.st_mode) or not isinstance(metadata, dict):
            logger.warning("%s in %s is left out: it is no entry", entry_id, folder)
            return
        size = len(text) + status.st_size
        self._entries[entry_id] = _Entry(text, None, size, str(metadata.get(_OWNER, "")))


@contextlib.contextmanager
def _disk(done: str) -> Iterator[None]:
    """Log a disk error in full, and raise `StorageError` without a path for the client."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        logger.warning("the storage can not be %s: %s", done, error)
        raise StorageError(f"storage: it can not be {done} just now; nothing was changed") from error


def _write_all(descriptor: int, data: bytes, begin: int) -> None:
    """Write `data` from byte `begin` on, and end the file behind it."""
    view = memoryview(data)
    while view:
        view = view[os.pwrite(descriptor, view, begin + len(data) - len(view)) :]
    os.ftruncate(descriptor, begin + len(data))


def _encode(metadata: dict[str, Any], owner: str) -> bytes:
    return msgspec.json.encode(metadata | {_OWNER: owner} if owner else metadata)
