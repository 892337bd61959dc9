"""`Room`: bytes of a disk that are promised to a write before it begins, so that writes that run together fit.

`storing` turns the errors of a disk into replies without a path: 507 where it is full, 503 where it fails (R-28). The
promises of this process are counted here, for each disk. Knows paths and bytes. Called by `store`, by the uploads of
models and recordings, and by the session files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from headrace.protocol.errors import HeadraceError

logger = logging.getLogger("headrace.server")

RESERVE_BYTES = 2**28
"""Bytes of a disk that uploads of models and recordings leave free."""
ORPHAN_S = 3600.0
"""Seconds since its last change after which an unfinished file has no writer any more."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_counting = threading.Lock()
promised: Counter[int] = Counter()
"""Bytes that are promised and not written yet, by the number of the disk."""


class StorageError(HeadraceError):
    """The disk fails; nothing was changed, and a later call may succeed (HTTP 503)."""

    status = 503
    code = "storage_failed"


class DiskFullError(StorageError):
    """The disk is full; nothing was changed (HTTP 507)."""

    status = 507
    code = "disk_full"

    def __init__(self, message: str = "storage: the disk is full; nothing was changed") -> None:
        super().__init__(message)


class Room:
    """The bytes promised to one write in `folder`, which `reserve` bytes of the disk must survive.

    A context manager: at its end the promise ends. Raises OSError if there is no such folder."""

    def __init__(self, folder: Path, reserve: int = 0) -> None:
        self._folder, self._reserve = folder, reserve
        self._device = os.stat(folder).st_dev
        self._num_bytes = 0

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *exc: object) -> None:
        self._add(-self._num_bytes)

    def take(self, num_bytes: int) -> None:
        """Promise so many further bytes. Raises `DiskFullError`, and then promises none."""
        with _counting:
            if num_bytes > self._free():
                raise DiskFullError
            self._count(num_bytes)

    def take_up_to(self, num_bytes: int) -> int:
        """Promise as many bytes as there are, at most `num_bytes`, and return their number."""
        with _counting:
            num_bytes = min(num_bytes, max(0, self._free()))
            self._count(num_bytes)
        return num_bytes

    def wrote(self, num_bytes: int) -> None:
        """Note that so many of the promised bytes are written: the disk itself counts them from now on."""
        self._add(-min(num_bytes, self._num_bytes))

    def _free(self) -> int:
        return shutil.disk_usage(self._folder).free - promised[self._device] - self._reserve

    def _add(self, num_bytes: int) -> None:
        with _counting:
            self._count(num_bytes)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        promised[self._device] += num_bytes


@contextlib.contextmanager
def storing(done: str) -> Iterator[None]:
    """Log a disk's error in full, and raise `StorageError` without a path for the client."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        logger.warning("the storage can not be %s: %s", done, error)
        if error.errno in FULL:
            raise DiskFullError from error
        raise StorageError(f"storage: it can not be {done} just now; nothing was changed") from error


def sweep(paths: Iterable[Path]) -> None:
    """Delete those files of an earlier process that nothing has written to for `ORPHAN_S`."""
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > ORPHAN_S:
                path.unlink()
