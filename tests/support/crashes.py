"""What a crash may leave of files: a recording of the calls of `serve.storage.disk`, and the states that it allows.

The model is weaker than any file system in use. A write that was not synced may be there, not there, torn at any byte,
or zeros with its length; so may each of several. A name that was created, renamed or deleted is as before or as after
until its folder is synced, whatever happened to other names. A rename is whole.
"""

from __future__ import annotations

import itertools
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Names = dict[str, int | None]
State = dict[str, bytes]
"""The contents of files by path."""


FOLDERS = "\0"


class Op(NamedTuple):
    """`kind` is write, truncate, sync, names or sync of the names; `target` is an inode, or a folder."""

    kind: str
    target: Any
    begin: int = 0
    data: bytes = b""
    names: Names | None = None


class Recording:
    """Stands in for the module `os` of `disk`: calls pass, and are recorded. Nothing is synced, to save time.

    Args:
        without: syncs of files with this in their names are left out of the recording; `FOLDERS`: those of folders.
    """

    def __init__(self, root: Path, without: str = "\n") -> None:
        self.root, self.without = root, without
        self.ops: list[Op] = []
        self.begin: State = files_of(root)
        self._inodes: dict[str, int] = {name: number for number, name in enumerate(sorted(self.begin))}
        self.first_names = dict(self._inodes)
        self._next = itertools.count(len(self._inodes))
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _name(self, path: Any) -> str:
        real = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
        return os.path.relpath(real, self.root)

    def _inode(self, name: str) -> int:
        if name not in self._inodes:
            self._inodes[name] = next(self._next)
            self.ops.append(Op("names", os.path.dirname(name), names={name: self._inodes[name]}))
        return self._inodes[name]

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        with self._lock:
            descriptor = os.open(path, flags, mode)
            if flags & os.O_CREAT:
                self._inode(self._name(path))
            return descriptor

    def pwrite(self, descriptor: int, data: Any, begin: int) -> int:
        with self._lock:
            self.ops.append(Op("write", self._inode(self._name(descriptor)), begin, bytes(data)))
            return os.pwrite(descriptor, data, begin)

    def write(self, descriptor: int, data: Any) -> int:
        with self._lock:
            inode = self._inode(self._name(descriptor))
            self.ops.append(Op("write", inode, os.fstat(descriptor).st_size, bytes(data)))
            return os.write(descriptor, data)

    def ftruncate(self, descriptor: int, size: int) -> None:
        with self._lock:
            if os.fstat(descriptor).st_size != size:
                self.ops.append(Op("truncate", self._inode(self._name(descriptor)), size))
            os.ftruncate(descriptor, size)

    def fsync(self, descriptor: int) -> None:
        with self._lock:
            name = self._name(descriptor)
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                if self.without not in name:
                    self.ops.append(Op("sync", self._inode(name)))
            elif self.without != FOLDERS:
                folder = "" if name == "." else name
                for each in os.scandir(self.root / name):
                    if each.is_file() and each.name != ".lock":
                        self._inode(os.path.normpath(os.path.join(folder, each.name)))
                self.ops.append(Op("sync of the names", folder))

    def replace(self, source: Any, target: Any) -> None:
        with self._lock:
            old, new = self._name(source), self._name(target)
            os.replace(source, target)
            self._inodes[new] = self._inodes.pop(old)
            names: Names = {old: None, new: self._inodes[new]}
            self.ops.append(Op("names", os.path.dirname(new), names=names))

    def unlink(self, path: Any) -> None:
        with self._lock:
            os.unlink(path)
            name = self._name(path)
            if self._inodes.pop(name, None) is not None:
                self.ops.append(Op("names", os.path.dirname(name), names={name: None}))

    def states(self, num_ops: int, cuts: Callable[[int], list[int]], most: int = 10**9) -> Iterator[State]:
        """Yield what a crash after so many operations may leave, at most `most` states. `cuts` returns where a write of
        a length is torn."""
        contents = {number: self.begin[name] for name, number in self.first_names.items()}
        names: dict[str, int] = dict(self.first_names)
        writes: dict[int, list[Op]] = {}
        changes: list[Op] = []
        for op in self.ops[:num_ops]:
            if op.kind in ("write", "truncate"):
                writes.setdefault(op.target, []).append(op)
            elif op.kind == "sync":
                for write in writes.pop(op.target, []):
                    contents[op.target] = changed(contents.get(op.target, b""), write)
            elif op.kind == "names":
                changes.append(op)
            else:
                for change in changes:
                    if change.target == op.target:
                        rename(names, change)
                changes = [change for change in changes if change.target != op.target]
        seen: set[tuple[tuple[str, bytes], ...]] = set()
        for mask in itertools.product((False, True), repeat=len(changes)):
            there = dict(names)
            for change, is_kept in zip(changes, mask, strict=True):
                if is_kept:
                    rename(there, change)
            inodes = sorted(set(there.values()))
            texts = [torn(contents.get(inode, b""), writes.get(inode, []), cuts) for inode in inodes]
            for choice in itertools.product(*texts):
                by_inode = dict(zip(inodes, choice, strict=True))
                state = {name: by_inode[inode] for name, inode in there.items()}
                key = tuple(sorted(state.items()))
                if key not in seen:
                    seen.add(key)
                    yield state
                    if len(seen) == most:
                        return


def rename(names: dict[str, int], change: Op) -> None:
    for name, inode in (change.names or {}).items():
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


def changed(text: bytes, op: Op) -> bytes:
    """A file's content after a write or a truncation."""
    if op.kind == "truncate":
        return text[: op.begin].ljust(op.begin, b"\0")
    return text[: op.begin].ljust(op.begin, b"\0") + op.data + text[op.begin + len(op.data) :]


def torn(text: bytes, ops: list[Op], cuts: Callable[[int], list[int]]) -> list[bytes]:
    """What the disk may have of a file whose last operations were not synced."""
    texts = {text: None}
    for op in ops:
        forms = [op]
        if op.kind == "write":
            for cut in cuts(len(op.data)):
                zeros = b"\0" * (len(op.data) - cut)
                forms += [op._replace(data=op.data[:cut]), op._replace(data=op.data[:cut] + zeros)]
                forms.append(op._replace(data=b"\0" * cut + op.data[cut:]))
        texts |= {changed(each, form): None for each in list(texts) for form in forms}
    return list(texts)


def files_of(root: Path) -> State:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def restore(state: State, root: Path) -> None:
    """Make the files below a folder those of a state."""
    known = files_of(root)
    for name in known.keys() - state.keys():
        (root / name).unlink()
    for name, text in state.items():
        if known.get(name) != text:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(text)
