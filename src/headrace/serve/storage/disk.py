"""The file operations of the storage. The changes of `create`, `write` and `truncate` are on the disk when they return.

A name (of a new, renamed or deleted file) is on the disk after `sync` of its folder. All writes of `serve.storage` go
through this module, so the tests record them here, and try every state that a crash may leave. Knows bytes and paths.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


def unlock(descriptor: int) -> None:
    """Release the lock of `flock` now. To close the descriptor is not enough: a child that was forked and has not begun
    its program yet holds a copy of it, and with it the lock."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def create(path: Path, data: bytes) -> None:
    """Write a new file, which only this user can read."""
    _write(path, os.O_CREAT | os.O_EXCL, data, 0)


def write(path: Path, data: bytes, begin: int) -> None:
    """Write into a file from byte `begin` on, and end the file behind it."""
    _write(path, 0, data, begin)


def truncate(path: Path, size: int) -> None:
    """End a file at byte `size`."""
    _write(path, 0, b"", size)


def replace(source: Path, target: Path) -> None:
    """Rename a file, over another one if there is one."""
    os.replace(source, target)


def unlink(path: Path) -> None:
    """Delete a file if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def sync(folder: Path) -> None:
    """Bring the names of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(descriptor: int, data: bytes) -> None:
    """Write to the end of a file that was opened for appending. It is on the disk after `sync_file`."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_file(descriptor: int) -> None:
    """Bring the written bytes of an open file to the disk."""
    os.fsync(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder, which only this user can read, and those above it, unless they are there."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
        sync(path.parent)


def _write(path: Path, flags: int, data: bytes, begin: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.pwrite(descriptor, view, begin + len(data) - len(view)) :]
        os.ftruncate(descriptor, begin + len(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
